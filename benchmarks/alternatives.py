"""Layers of a real encoder, structured here and by `tensorly-torch`: error, time, training memory.

    pip install --target alternatives --no-deps tensorly-torch opt_einsum
    PYTHONPATH=alternatives python benchmarks/alternatives.py MODEL [--parts error time memory]

The query projection and both FFN layers of the middle block are stored with a quarter of their
parameters, each from the same dense weight. `tensorly-torch` decomposes the weight
(`FactorizedLinear.from_linear`, with explicit ranks: its own choice by fraction misses the budget);
here fits see the weight alone, or the moments of calibration activations too.

- error: squared error of the outputs over their variance, on texts held out. `data-free` is the
  weight alone. `calibrated` is our fit on moments; for `tensorly-torch`, which takes no data, its
  decomposition with the mean of the error taken up by the bias, as our calibrated fits do.
- time: one forward pass without gradients, in milliseconds; medians, all layers of a table and the
  dense one in turns. Both implementations of `tensorly-torch` are shown, `factorized` (contracts
  the input with the factors) and `reconstructed` (builds the weight in each pass).
- memory: what a forward and a backward pass allocate at most, in MB, gradients counted.

Two parts more, which are asked for by name, need no `tensorly-torch`, and take `--blocks`:

- forms: error in the norm of the moments that all are fitted to, of our structures and of what
  `tensorly` has besides (`tensor_forms.py`), in brackets that of its decomposition of the weight
  alone.
- heads: the same for the four projections of an attention together, a tensor d x d_h x 4 x H,
  beside low rank of each and shared factors (`tucker --share heads`).
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from tensor_forms import Effort, Form, Weighed, attention_forms, errors, forms_of
from torch import Tensor, nn
from transformers.utils import logging

import tcompress
from tcompress.data.calibration import load_batches
from tcompress.fitting.layer_fits import LayerMoments, LayerToFit, fit_layers
from tcompress.hf.opening import load_model
from tcompress.latency.passes import Pass
from tcompress.linalg.moments import Moments, MomentSums, safe_cholesky
from tcompress.linalg.tensortrain import matrix_modes
from tcompress.linalg.tuckerfit import User, fit_tucker_factors, tucker_parameters
from tcompress.models import SourceModel
from tcompress.options import Calibration, Convert
from tcompress.planning.costs import Choice, plan_terms
from tcompress.planning.entries import LayerPlan
from tcompress.roles.find import find_roles
from tcompress.structures import Site, structure
from tcompress.structures.modules.linear import PartLayout, StructuredLinear
from tcompress.structures.tucker import TuckerSpec

ROLES = ("q", "up", "down")
PARTS = ("error", "time", "memory")
ATTENTION = ("q", "k", "v", "o")
TENSOR_PARTS = ("forms", "heads")
OURS: dict[str, tuple[dict[str, Any], bool]] = {  # options, and whether a target sizes them
    "svd": ({"name": "svd"}, True),
    "lprod p=4 dct": ({"name": "lprod", "p": 4, "transform": "dct"}, False),
    "lprod p=8 dct + low rank": ({"name": "lprod", "p": 8, "transform": "dct"}, True),
    "lprod p=8 fitted + low rank": ({"name": "lprod", "p": 8, "transform": "fitted"}, True),
    "tt, 2 cores": ({"name": "tt", "order": 2}, True),
    "tt, 3 cores": ({"name": "tt", "order": 3}, True),
}
THEIRS = [(name, order) for name in ("BlockTT", "Tucker", "CP") for order in (2, 3)]


@dataclass
class Case:
    """One dense layer and what runs through it.

    Attributes:
        name: Its role and widths.
        linear: The dense layer.
        side: Where a transform would sit.
        train: Activations to calibrate on.  # (tokens, in)
        held: Activations to measure on.  # (tokens, in)
        moments: Moments of the former.
    """

    name: str
    linear: nn.Linear
    side: str
    train: Tensor
    held: Tensor
    moments: Moments

    @property
    def weighed(self) -> Weighed:
        """The weight with the moments that fits see."""
        moments = self.moments
        damping = Calibration().damping * len(moments.gram) / moments.rows
        return Weighed.of(self.linear.weight, moments.damped(damping).gram)


@dataclass
class Row:
    """One way to store a layer.

    Attributes:
        name: For people.
        modules: Layers to time, by name of the way they are applied.
        errors: By kind.
        seconds: Duration of the data-free fit and, if there is one, of the calibrated one.
    """

    name: str
    modules: dict[str, nn.Module]
    errors: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """Parameters of the weight, without the bias."""
        module = next(iter(self.modules.values()))
        return sum(p.numel() for name, p in module.named_parameters() if name != "bias")


def cases(
    model: str, calibration: Calibration, roles: Sequence[str], block: int | None = None
) -> Iterator[Case]:
    """The layers of a block, the middle one by default, with activations; padding is left out."""
    source = SourceModel.open(model)
    data = load_batches(source, calibration)
    network = load_model(source, dtype=torch.float32)
    blocks = find_roles(source.meta_model()).blocks
    chosen = blocks[len(blocks) // 2 if block is None else block]
    layers = {layer.role: layer for layer in chosen.layers}
    rows: dict[str, list[list[Tensor]]] = {role: [[], []] for role in roles}
    for index, batch in enumerate(data.batches):
        with watched(network, {role: layers[role].name for role in roles}) as seen:
            network(**batch)
        mask = batch["attention_mask"].bool()
        for role in roles:
            rows[role][index in data.holdout].append(seen[role][mask])
    for role in roles:
        linear = network.get_submodule(layers[role].name)
        train, held = map(torch.cat, rows[role])
        sums = MomentSums(train.shape[1])
        sums.add(train, train)
        name = f"{role} {linear.in_features} -> {linear.out_features}"
        name = name if block is None else f"{role} {block}"
        yield Case(name, linear, layers[role].side, train, held, sums.moments(centred=True))


@contextmanager
def watched(network: nn.Module, names: dict[str, str]) -> Iterator[dict[str, Tensor]]:
    """Keeps the inputs of some layers."""
    seen: dict[str, Tensor] = {}

    def keep(role: str) -> Callable[[Any, Any], None]:
        return lambda _, args: seen.__setitem__(role, args[0].detach())

    hooks = [
        network.get_submodule(name).register_forward_pre_hook(keep(role))
        for role, name in names.items()
    ]
    with torch.no_grad():
        yield seen
    for hook in hooks:
        hook.remove()


def structured(case: Case, method: dict[str, Any], target: float | None, calibrated: bool) -> Any:
    """Fits a layer of ours, on moments or on the weight alone."""
    spec = Convert.model_validate({"method": method}).method
    site = Site(case.linear.in_features, case.linear.out_features, case.side)
    terms = plan_terms(Choice(spec, target=target), site, 1, calibrated=calibrated)
    part = PartLayout(name="weight", terms=terms)
    entry = LayerPlan(name=case.name, block="", role="", kind="linear", bias=True, parts=(part,))
    moments = [LayerMoments(case.moments if calibrated else None)]
    to_fit = LayerToFit(entry, case.linear.weight.detach(), moments)
    (fitted,) = fit_layers([to_fit], dtype=torch.float32, damping=Calibration().damping)
    layer = StructuredLinear(entry.parts, bias=True)
    shift = 0 if fitted.shift is None else fitted.shift
    bias = (case.linear.bias.detach().double() + shift).float()
    lost = layer.load_state_dict({**fitted.tensors, "bias": bias}, strict=False)
    assert lost.missing_keys == ["weight"]  # the empty guard
    assert not lost.unexpected_keys
    return layer.eval()


def ours(case: Case, name: str, target: float) -> Row:
    """Both fits of one of our structures; the calibrated layer is timed."""
    method, sized = OURS[name]
    found: dict[str, nn.Module] = {}
    seconds = []
    for kind in ("data-free", "calibrated"):
        start = time.perf_counter()
        size = target if sized else None
        found[kind] = structured(case, method, size, kind == "calibrated")
        seconds.append(time.perf_counter() - start)
    modules = {"": found["calibrated"]}
    if method["name"] == "tt":
        kept = copy.deepcopy(found["calibrated"])
        tcompress.keep_weights(kept)
        modules["weight kept"] = kept
    errors = {kind: error(case, layer) for kind, layer in found.items()}
    return Row(name, modules, errors, seconds)


def theirs(case: Case, name: str, order: int, target: float, iterations: int) -> Row:
    """A factorised layer of tensorly-torch, from its own decomposition."""
    from tltorch import FactorizedLinear

    dense = case.linear
    modes = matrix_modes(dense.in_features, dense.out_features, order)
    budget = int(target * dense.weight.numel())
    options: dict[str, Any] = {}
    if name == "CP":
        options = {"n_iter_max": iterations, "init": "random", "random_state": 0}
    start = time.perf_counter()
    layer = FactorizedLinear.from_linear(
        copy.deepcopy(dense),
        rank=ranks(name, *modes, budget),
        auto_tensorize=False,
        in_tensorized_features=modes[0],
        out_tensorized_features=modes[1],
        factorization=name,
        implementation="reconstructed",
        decomposition_kwargs=options,
    ).eval()
    seconds = [time.perf_counter() - start]
    contracting = copy.deepcopy(layer)
    contracting.implementation = "factorized"
    modules = {"factorized": contracting, "reconstructed": layer}
    row = Row(f"tensorly-torch {name}, order {order}", modules, seconds=seconds)
    assert row.parameters <= budget, f"{row.name}: {row.parameters} of {budget}"
    row.errors["data-free"] = error(case, layer)
    moved = copy.deepcopy(layer)
    with torch.no_grad():
        moved.bias += (dense(case.train) - layer(case.train)).mean(0)
    row.errors["calibrated"] = error(case, moved)
    return row


def ranks(name: str, in_modes: Sequence[int], out_modes: Sequence[int], budget: int) -> Any:
    """The largest ranks within a budget."""
    modes = [*out_modes, *in_modes]
    if name == "CP":
        return budget // (sum(modes) + 1)  # weights count too
    if name == "BlockTT":
        products = [i * j for i, j in zip(in_modes, out_modes, strict=True)]

        def chain(rank: int) -> list[int]:
            most = [min(prod(products[:k]), prod(products[k:])) for k in range(1, len(products))]
            return [1, *(min(rank, limit) for limit in most), 1]

        def cores(rank: int) -> int:
            own = chain(rank)
            return sum(a * m * b for a, m, b in zip(own, products, own[1:], strict=False))

        return tuple(chain(largest(cores, budget)))

    def shares(thousandths: int) -> list[int]:
        return [max(1, thousandths * mode // 1000) for mode in modes]

    def size(own: list[int]) -> int:
        return prod(own) + sum(rank * mode for rank, mode in zip(own, modes, strict=True))

    def tucker(thousandths: int) -> int:
        return size(shares(thousandths))

    own = shares(min(1000, largest(tucker, budget)))
    for place, mode in enumerate(modes):  # what rounding has left over
        while (
            own[place] < mode and size([*own[:place], own[place] + 1, *own[place + 1 :]]) <= budget
        ):
            own[place] += 1
    return tuple(own)


def largest(cost: Callable[[int], int], budget: int) -> int:
    """The largest number up to 4096 whose cost, which grows with it, is within a budget."""
    low, high = 1, 4096
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle - 1)
    return low


def error(case: Case, layer: nn.Module) -> float:
    """Squared error of the outputs on held-out rows, over their variance."""
    with torch.no_grad():
        wanted, found = case.linear(case.held).double(), layer(case.held).double()
    spread = (wanted - wanted.mean(0)).square().sum()
    return float((wanted - found).square().sum() / spread)


def times(
    case: Case, rows: Sequence[Row], tokens: int, args: argparse.Namespace
) -> dict[Any, float]:
    """Median milliseconds of every layer; all take turns in changing order."""
    runs: dict[Any, nn.Module] = {("dense", ""): case.linear}
    runs |= {(row.name, way): module for row in rows for way, module in row.modules.items()}
    found: dict[Any, list[float]] = {key: [] for key in runs}
    x, order, start = torch.randn(tokens, case.linear.in_features), list(runs), time.perf_counter()
    shuffle = random.Random(0).shuffle
    for repeat in range(args.repeats + 1):
        shuffle(order)
        for key in order:
            begun = time.perf_counter()
            with torch.no_grad():
                runs[key](x)
            if repeat:
                found[key].append((time.perf_counter() - begun) * 1e3)
        if repeat >= 5 and time.perf_counter() - start > args.seconds:
            break
    return {key: statistics.median(values) for key, values in found.items()}


def memory(module: nn.Module, tokens: int, width: int) -> float:
    """Peak of a forward and a backward pass, in MB; the input needs a gradient, as in a model."""
    module = copy.deepcopy(module).train()
    x = torch.randn(tokens, width, requires_grad=True)
    peak = Pass(lambda _: module(x).square().mean().backward()).peak_bytes(torch.device("cpu"))
    assert peak is not None
    return peak / 1e6


def report(case: Case, rows: Sequence[Row], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints a table, and gives it as data."""
    clock = {n: times(case, rows, n, args) for n in args.tokens} if "time" in args.parts else {}
    heads = ["", "kept", *(["data-free", "calibrated", "fit s"] if "error" in args.parts else [])]
    heads += [f"{n} tokens, ms" for n in clock]
    heads += [f"training, {args.memory_tokens} tokens, MB"] if "memory" in args.parts else []
    print(f"\n### {case.name}, {len(case.held):,} held-out tokens\n")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    dense = Row("dense", {"": case.linear})
    found = []
    for row in [dense, *rows]:
        for way, module in row.modules.items():
            first = way == next(iter(row.modules))
            facts: dict[str, Any] = {"layer": case.name, "name": row.name, "way": way}
            facts["kept"] = row.parameters / case.linear.weight.numel()
            cells = [f"{row.name}{f', {way}' if way else ''}", f"{facts['kept']:.1%}"]
            if "error" in args.parts:
                shown = [f"{value:.4f}" for value in row.errors.values()] or ["", ""]
                shown.append(" / ".join(f"{value:.1f}" for value in row.seconds))
                cells += shown if first else ["", "", ""]
                facts |= {"errors": row.errors, "seconds": row.seconds}
            for n, values in clock.items():
                facts[f"ms_{n}"] = values[row.name, way]
                cells.append(f"{values[row.name, way]:.3f}")
            if "memory" in args.parts:
                facts["memory"] = memory(module, args.memory_tokens, case.linear.in_features)
                cells.append(f"{facts['memory']:.1f}" if way != "weight kept" else "")
            print("| " + " | ".join(cells) + " |", flush=True)
            found.append(facts)
    return found


def dense_of(layer: nn.Module, width: int) -> Tensor:
    """The weight that a layer stands for.  # (out, in), float64."""
    with torch.no_grad():
        seen = layer(torch.cat((torch.eye(width), torch.zeros(1, width)))).double()
    return (seen[:-1] - seen[-1]).mT


def forms(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Errors of a layer in the norm of its moments, by our structures and by tensor forms."""
    layer, width = case.weighed, case.linear.in_features
    for name, (method, sized) in OURS.items():
        if picked(name, args):
            start = time.perf_counter()
            module = structured(case, method, args.target if sized else None, calibrated=True)
            error = layer.error(dense_of(module, width))
            yield {"name": name, "error": error, "seconds": time.perf_counter() - start}
    for form in forms_of(tuple(layer.weight.shape), args.target):
        if picked(form.name, args):
            yield fitted(form, [layer], args)


def fitted(form: Form, layers: Sequence[Weighed], args: argparse.Namespace) -> dict[str, Any]:
    """Mean errors of a tensor form, before and after its fit to moments."""
    start = time.perf_counter()
    begin, end = form.fit(layers, Effort(args.rounds, args.least))
    seconds = time.perf_counter() - start
    every = [layer.error(weight) for layer, weight in zip(layers, form.weights(end), strict=True)]
    alone = errors(form.weights(begin), layers)
    facts = {"name": form.name, "error": sum(every) / len(every), "alone": alone, "each": every}
    return {**facts, "parameters": sum(factor.numel() for factor in end), "seconds": seconds}


def heads(found: Sequence[Case], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Mean errors of the projections of one attention, of all at one budget together."""
    layers = [case.weighed for case in found]
    width, size = len(layers[0].weight), args.head
    budget = int(args.target * 4 * width * width)
    roots = [safe_cholesky(layer.gram) for layer in layers]
    images = [layer.weight @ root for layer, root in zip(layers, roots, strict=True)]
    values = [torch.linalg.svdvals(image).square() for image in images]
    lost = [1 - value.cumsum(0) for value in values]  # by rank - 1
    rank = budget // (8 * width)
    each = [float(one[rank - 1]) for one in lost]
    yield {"name": "svd, one rank", "error": sum(each) / 4, "each": each}
    pooled = torch.cat(values).sort(descending=True).values
    yield {"name": "svd, ranks by loss", "error": 1 - float(pooled[: 4 * rank].sum()) / 4}
    # q, k and v read one input: their scaled weights, one above the other, share their factor V.
    joint = 3 - torch.linalg.svdvals(torch.cat(images[:3])).square().cumsum(0)
    pairs = [(r, (budget - 4 * width * r) // (2 * width)) for r in range(1, budget // (4 * width))]
    alike = float(joint[3 * rank // 2 - 1] + lost[3][rank - 1]) / 4
    yield {"name": "q, k, v with one V, o alone, alike", "error": alike}
    together = [float(joint[r - 1] + lost[3][min(width, other) - 1]) / 4 for r, other in pairs]
    best = min(range(len(pairs)), key=together.__getitem__)
    text = f"q, k, v with one V of rank {pairs[best][0]}, o of {pairs[best][1]}"
    yield {"name": "q, k, v with one V, o alone, by loss", "error": together[best], "ranks": text}
    users = [User(layer.weight, layer.gram) for layer in layers]
    users[3] = users[3].turned()
    blocks = 4 * width // size
    for left in (None, size // 2, 3 * size // 4, size):
        ranks = shared_ranks(found, size, args.target) if left is None else (0, 0, 0)
        while left is not None and tucker_parameters(blocks, size, width, ranks) <= budget:
            ranks = (blocks, left, ranks[2] + 1)
        ranks = ranks if left is None else (blocks, left, ranks[2] - 1)
        name = "tucker --share heads" + ("" if left is None else f" --rank {left},{ranks[2]}")
        if picked(name, args):
            start = time.perf_counter()
            factors = fit_tucker_factors(users, (size, width), ranks)
            seconds = time.perf_counter() - start
            each = [user.error(factors) for user in users]
            facts = {"name": name, "error": sum(each) / 4, "each": each, "seconds": seconds}
            yield {**facts, "ranks": str(ranks)}
    for form in attention_forms(width, width // size, args.target):
        if picked(form.name, args):
            yield fitted(form, layers, args)


def shared_ranks(found: Sequence[Case], size: int, target: float) -> tuple[int, int, int]:
    """Cores and ranks that `tucker --share heads` chooses by itself."""
    facts = [(case.linear.in_features, case.linear.out_features, case.side) for case in found]
    sites = [
        Site(*fact, role=role, block="0", head=size)
        for role, fact in zip(ATTENTION, facts, strict=True)
    ]
    site = replace(sites[0], sharing_sites=tuple(sites))
    budget = int(target * site.in_features * site.out_features)
    layout: Any = structure("tucker").layout(TuckerSpec(share="heads"), site, budget)
    return layout.cores, *layout.ranks


def tensor_table(part: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints a table with a column for each layer, or for each attention, and gives it as data."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    calibration = calibration_of(args)
    for block in args.blocks:
        roles = ATTENTION if part == "heads" else args.layers
        found = list(cases(args.model, calibration, roles, block))
        columns = (
            {f"block {block}": heads(found, args)}
            if part == "heads"
            else {case.name: forms(case, args) for case in found}
        )
        for column, rows in columns.items():
            for row in rows:
                table.setdefault(row["name"], {})[column] = row
                print(f"- {column}: {json.dumps(row)}", flush=True)
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    best = {c: min(row[c]["error"] for row in table.values() if c in row) for c in columns}
    print(f"\n| | {' | '.join(columns)} |\n|---|" + "---|" * len(columns))
    for name, row in table.items():
        cells = [cell(row.get(column), best[column]) for column in columns]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return [{"part": part, "column": c, **row[c]} for row in table.values() for c in row]


def cell(row: dict[str, Any] | None, best: float) -> str:
    """An error, the least of a column in bold, and in brackets that of the weight alone."""
    if row is None:
        return ""
    text = f"**{row['error']:.3f}**" if row["error"] == best else f"{row['error']:.3f}"
    return f"{text} ({row['alone']:.2f})" if "alone" in row else text


def picked(name: str, args: argparse.Namespace) -> bool:
    """Whether a row is asked for."""
    return (not args.only or args.only in name) and not (args.skip and args.skip in name)


def calibration_of(args: argparse.Namespace) -> Calibration:
    """The data that are asked for."""
    return Calibration(source=args.calib, samples=args.samples)


def chosen(
    args: argparse.Namespace, *, there: bool
) -> dict[str, Callable[[Case, argparse.Namespace], Row]]:
    """What makes each row that is asked for."""
    makers: dict[str, Any] = {
        name: lambda case, args, name=name: ours(case, name, args.target) for name in OURS
    }
    for name, order in THEIRS if there else ():
        makers[f"tensorly-torch {name}, order {order}"] = (
            lambda case, args, name=name, order=order: theirs(
                case, name, order, args.target, args.cp_iterations
            )
        )
    return {name: maker for name, maker in makers.items() if picked(name, args)}


def main() -> None:
    """Prints a table for each layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="encoder: folder or hub id")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=(*PARTS, *TENSOR_PARTS))
    parser.add_argument("--layers", nargs="*", default=ROLES, choices=(*ATTENTION, *ROLES[1:]))
    parser.add_argument("--blocks", nargs="*", type=int, default=[0], help="of forms and heads")
    parser.add_argument("--rounds", type=int, default=12, help="of fits of forms and heads")
    parser.add_argument("--least", type=float, default=2e-3, help="what a round has to win")
    parser.add_argument("--head", type=int, default=32, help="width of a head, of heads")
    parser.add_argument("--only", help="rows whose names hold this")
    parser.add_argument("--skip", help="no rows whose names hold this, such as `CP, order 3`")
    parser.add_argument("--calib", default="builtin", help="text to calibrate on and to hold out")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--target", type=float, default=0.25, help="kept fraction")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 128, 4096])
    parser.add_argument("--memory-tokens", type=int, default=4096)
    parser.add_argument("--cp-iterations", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--seconds", type=float, default=10.0, help="time per row of tokens, about")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="tensorly|tltorch")
    there = importlib.util.find_spec("tltorch") is not None
    print(f"torch {torch.__version__}, {args.threads} threads, {platform.machine()}, float32")
    print("tensorly-torch: " + ("there" if there else "not installed, its rows are left out"))
    tables = [part for part in TENSOR_PARTS if part in args.parts]
    results = [row for part in tables for row in tensor_table(part, args)]
    every = cases(args.model, calibration_of(args), args.layers)
    for case in every if {*args.parts} & {*PARTS} else ():
        rows = [make(case, args) for make in chosen(args, there=there).values()]
        results += report(case, rows, args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
