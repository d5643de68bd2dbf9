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
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

import tcompress
from tcompress.data.calibration import load_batches
from tcompress.fitting.layer_fits import LayerMoments, fit_layers
from tcompress.hf.opening import load_model
from tcompress.latency.passes import Pass
from tcompress.linalg.moments import Moments, MomentSums
from tcompress.linalg.tensortrain import matrix_modes
from tcompress.models import SourceModel
from tcompress.options import Calibration, Convert
from tcompress.planning.costs import Choice, plan_terms
from tcompress.planning.entries import LayerPlan
from tcompress.planning.sites import structure_of
from tcompress.roles.find import find_roles
from tcompress.structures import Site
from tcompress.structures.modules.linear import PartLayout, StructuredLinear

ROLES = ("q", "up", "down")
PARTS = ("error", "time", "memory")
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


def cases(model: str, calib: str, samples: int, roles: Sequence[str]) -> Iterator[Case]:
    """The layers of the middle block with their activations; padding is left out."""
    source = SourceModel.open(model)
    data = load_batches(source, Calibration(source=calib, samples=samples))
    network = load_model(source, dtype=torch.float32)
    blocks = find_roles(source.meta_model()).blocks
    layers = {layer.role: layer for layer in blocks[len(blocks) // 2].layers}
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
    spec = structure_of(spec).settle(spec, calibrated=calibrated)
    site = Site(case.linear.in_features, case.linear.out_features, case.side)
    terms = plan_terms(Choice(spec, target=target), site, 1, calibrated=calibrated)
    part = PartLayout(name="weight", terms=terms)
    entry = LayerPlan(name=case.name, block="", role="", kind="linear", bias=True, parts=(part,))
    moments = LayerMoments(case.moments if calibrated else None)
    weight, damping = case.linear.weight.detach(), Calibration().damping
    (fitted,) = fit_layers([entry], [weight], [[moments]], dtype=torch.float32, damping=damping)
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
    wanted = [name for name in makers if not args.only or args.only in name]
    return {name: makers[name] for name in wanted if not args.skip or args.skip not in name}


def main() -> None:
    """Prints a table for each layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="encoder: folder or hub id")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--layers", nargs="*", default=ROLES, choices=ROLES)
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
    results = []
    for case in cases(args.model, args.calib, args.samples, args.layers):
        rows = [make(case, args) for make in chosen(args, there=there).values()]
        results += report(case, rows, args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
