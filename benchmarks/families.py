"""Converts a tiny model of every family of the installed Transformers; says what stayed dense.

    python benchmarks/families.py --output families.jsonl
    python benchmarks/families.py --only bamba,gpt_oss --output some.jsonl
    python benchmarks/families.py --output families.jsonl --table    # of what was done before

Every model has weights of rank 2 (`zoo.py`), so that `svd --target 0.5` loses nothing. It is
converted by that and by `lprod --p 2`, without data, loaded, run and exported. A family is a line
of the output; those that stand there are not done again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.modeling_utils
from torch import nn
from transformers.pytorch_utils import Conv1D

sys.path.insert(0, str(Path(__file__).parents[1]))  # a plain script has only its own folder

from benchmarks import zoo
from tcompress import api
from tcompress.errors import TCompressError

METHODS: dict[str, dict[str, Any]] = {
    "svd": {"method": "svd", "target": 0.5},
    "lprod": {"method": {"name": "lprod", "p": 2}},
}
CHOOSES = re.compile(r"router|indexer|(^|[._])gate$")
ENOUGH, CLOSE = 0.95, 1e-3


class _Failed(Exception):
    """A step that went wrong: how, and what it said."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


def examine(
    family: str, folder: Path, methods: Mapping[str, Mapping[str, Any]] = METHODS
) -> dict[str, Any]:
    """Converts one family in several ways.

    Args:
        family: Its model type.
        folder: An empty folder.
        methods: Options of the conversions by name.

    Returns:
        `outcome`, and as far as it went `class`, `fraction` and `error` by method, `dense` (inside
        blocks: name, parameters, reason) and `outside` (of blocks: name, parameters).
    """
    row: dict[str, Any] = {"family": family, "outcome": "ok"}
    try:
        model, inputs = zoo.build(family)
    except LookupError as error:
        return row | {"outcome": "no model", "reason": str(error)}
    except (ValueError, ImportError) as error:  # of libraries that are not installed, too
        return row | {"outcome": "not built", "reason": str(error)[:300]}
    kind: Any = type(model)
    row |= {"class": kind.__name__, "inputs": inputs is not None}
    try:
        model.save_pretrained(folder / "dense")
        model, absent = _loaded(kind, folder / "dense")
    except Exception as error:
        return row | {"outcome": "not reloaded by Transformers", "reason": _said(error)}
    want = None if inputs is None else zoo.outputs(model, inputs)
    for name, options in methods.items():
        try:
            row |= _method(model, absent, folder, name, options, inputs, want, row)
        except _Failed as error:
            return row | {"outcome": error.outcome, "method": name, "reason": error.reason}
    return row


def _method(
    model: nn.Module,
    absent: frozenset[str],
    folder: Path,
    name: str,
    options: Mapping[str, Any],
    inputs: dict[str, Any] | None,
    want: list[torch.Tensor] | None,
    row: Mapping[str, Any],
) -> dict[str, Any]:
    kind: Any = type(model)
    source, output, plain = folder / "dense", folder / name, folder / f"{name}-plain"
    given = {"calibration": "none", **options}
    plan = _step("crash-plan", lambda: api.plan(source, **given))
    _step("crash-convert", lambda: api.convert(source, output=output, **given))
    found, missing = _step("crash-load", lambda: _loaded(kind, output))
    if extra := missing - absent:
        raise _Failed("crash-load", f"not loaded: {sorted(extra)[:5]}")
    again = folder / f"{name}-again"
    _step("crash-save", lambda: found.save_pretrained(again))
    saved, missing = _step("crash-reload", lambda: _loaded(kind, again))
    if extra := missing - absent:
        raise _Failed("crash-reload", f"not loaded: {sorted(extra)[:5]}")
    _step("crash-export", lambda: api.export_dense(output, plain))
    exported, missing = _step("crash-export", lambda: _loaded(kind, plain))
    if extra := missing - absent:
        raise _Failed("crash-export", f"not loaded: {sorted(extra)[:5]}")
    dense, outside, fraction = coverage(
        model, found, {left.name: left.reason for left in plan.left}
    )
    made: dict[str, Any] = {
        "fraction": {**row.get("fraction", {}), name: round(fraction, 4)},
        **({"dense": dense, "outside": outside} if "dense" not in row else {}),
    }
    if inputs is not None and want is not None:
        got = _step("crash-forward", lambda: zoo.outputs(found, inputs))
        error = distance(got, want)
        if not all(bool(torch.isfinite(value).all()) for value in got[:1]):
            raise _Failed("not finite", "the output holds NaN or infinity")
        for other, text in ((saved, "saved again"), (exported, "exported")):
            if distance(zoo.outputs(other, inputs), got) > CLOSE:
                raise _Failed("differs", f"{text}, the model computes something else")
        made["error"] = {**row.get("error", {}), name: float(f"{error:.2g}")}
    if name == "svd":  # half of a layer 4 wide has no room for rank 2
        factors = [value for key, value in found.named_parameters() if ".tc_" in key]
        made["narrow"] = any(min(value.shape[-2:]) < zoo.RANK for value in factors)
    return made


def _step(outcome: str, step: Any) -> Any:
    try:
        return step()
    except TCompressError as error:
        said = outcome.replace("crash", "refused") if "plan" not in outcome else "refused"
        raise _Failed(said, f"{error}"[:500]) from error
    except Exception as error:
        raise _Failed(outcome, _said(error)) from error


def _said(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {str(error)[:300]} ({Path(place.filename).name}:{place.lineno})"
    )


def _loaded(kind: Any, folder: Path) -> tuple[nn.Module, frozenset[str]]:
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    lost = {str(name) for key in info for name in info[key] if key != "error_msgs"}
    return model.float().eval(), frozenset(lost)


def distance(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> float:
    """Gives the largest relative error of several outputs."""
    pairs = [(a, b) for a, b in zip(got, want, strict=False) if a.shape == b.shape]
    return max(
        (float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in pairs), default=float("nan")
    )


def coverage(
    model: nn.Module, converted: nn.Module, reasons: Mapping[str, str]
) -> tuple[list[tuple[str, int, str]], list[tuple[str, int]], float]:
    """Compares the linear and expert weights of a model with those that a conversion left.

    Args:
        model: The dense model.
        converted: The same after converting.
        reasons: Why layers stayed dense, by module path.

    Returns:
        What stayed dense inside blocks, what did outside, and the rewritten fraction of the
        parameters inside blocks, without routers and indexers.
    """
    left = {name for name, value in converted.named_parameters() if value.numel()}
    blocks = block_paths(model)
    dense, outside, total, kept = [], [], 0, 0
    for name, weight in linear_weights(model):
        path = name.rpartition(".")[0]
        if not any(path.startswith(f"{block}.") for block in blocks):
            outside += [(name, weight.numel())] if name in left else []
            continue
        steps = path.split(".")
        if any(CHOOSES.search(step) for step in steps):
            continue
        total += weight.numel()
        if name in left:
            kept += weight.numel()
            dense.append((name, weight.numel(), _reason(name, reasons)))
    return dense, outside, 1 - kept / total if total else 0.0


def _reason(weight: str, reasons: Mapping[str, str]) -> str:
    """What a plan says of a weight, or of its module; names may lack, or gain, a prefix."""
    for path in (weight, weight.rpartition(".")[0]):
        for name, reason in reasons.items():
            if name == path or path.endswith(f".{name}") or name.endswith(f".{path}"):
                return reason
    return "not said"


def linear_weights(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Lists the weights of linear layers, and stacked matrices of experts."""
    modules = dict(model.named_modules())
    found = []
    for name, weight in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = modules[path]
        linear = isinstance(owner, nn.Linear | Conv1D) and leaf == "weight"
        linear = linear or (zoo.is_pointwise(owner) and leaf == "weight")
        fused = isinstance(owner, nn.MultiheadAttention) and leaf == "in_proj_weight"
        stacked = weight.ndim == 3 and "expert" in path.lower() and min(weight.shape) > 1
        if linear or fused or stacked:
            found.append((name, weight))
    return found


def block_paths(model: nn.Module) -> list[str]:
    """Lists items of lists: outermost module lists, or the innermost of other containers.

    Items of linear layers alone which end in another width than they begin with are heads.
    """
    found = []
    for name, child in model.named_children():
        inner = [] if isinstance(model, nn.ModuleList) else block_paths(child)
        found += [f"{name}.{path}" for path in inner]
        if not inner and isinstance(model, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            weights = [weight for _, weight in linear_weights(child)]
            owners = [m for m in child.modules() if list(m.parameters(recurse=False))]
            plain = all(isinstance(owner, nn.Linear) for owner in owners)
            ends = len(weights) > 1 and weights[0].shape[-1] == weights[-1].shape[0]
            if weights and list(child.children()) and (ends or not plain):
                found.append(name)
    return found


def _child(family: str, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    sys.stderr = sys.stdout = Path("/dev/null").open("w")  # noqa: SIM115 - until the process ends
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = examine(family, Path(folder))
        except Exception as error:
            row = {"family": family, "outcome": "crash", "reason": _said(error)}
    pipe.send(row | {"seconds": round(time.process_time() - begun, 1)})


def run(names: Iterable[str], output: Path, jobs: int, seconds: float) -> None:
    """Examines families in processes of their own; what hangs or dies is a row as well."""
    context: Any = multiprocessing.get_context("fork")
    waiting, running = list(names)[::-1], {}
    while waiting or running:
        while waiting and len(running) < jobs:
            family = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(family, there))
            process.start()
            there.close()
            running[family] = (process, here, time.monotonic() + seconds)
        for family, (process, pipe, until) in list(running.items()):
            row = None
            if pipe.poll(0.05):
                try:
                    row = pipe.recv()
                except EOFError:
                    row = {"family": family, "outcome": "crash", "reason": "its process died"}
            elif time.monotonic() > until:
                row = {"family": family, "outcome": "crash", "reason": f"over {seconds:.0f} s"}
            if row is not None:
                process.kill()
                process.join()
                del running[family]
                with output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(line(row), flush=True)


def line(row: Mapping[str, Any]) -> str:
    """Gives one row of the table."""
    fraction = row.get("fraction", {}).get("svd")
    error = row.get("error", {}).get("svd")
    cells = [
        row["family"],
        row.get("class", ""),
        row["outcome"],
        "" if fraction is None else f"{fraction:.2f}",
        "not run" if error is None else f"{error:.1g}",
        notes(row),
    ]
    return "| " + " | ".join(cells) + " |"


def notes(row: Mapping[str, Any]) -> str:
    """Says why a family stopped short: the reason, or what stays dense, summed by reason."""
    if row["outcome"] != "ok":
        return str(row.get("reason", ""))[:160].replace("\n", " ")
    sums: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for name, size, reason in row["dense"]:
        sums[reason] += size
        examples.setdefault(reason, name)
    return "; ".join(f"{size:,} in `{examples[why]}`...: {why}" for why, size in sums.items())


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """Counts outcomes."""
    rows = list(rows)
    ends = Counter(row["outcome"] for row in rows)
    tried = [
        r
        for r in rows
        if r["outcome"] not in ("no model", "not built", "not reloaded by Transformers")
    ]
    done = [row for row in tried if row["outcome"] == "ok"]
    full = [row for row in done if row["fraction"]["svd"] >= ENOUGH]
    sliced = [row["family"] for row in full if row["fraction"]["lprod"] < ENOUGH]
    silent = [
        row["family"] for row in done if any(reason == "not said" for *_, reason in row["dense"])
    ]
    wrong = [
        row["family"]
        for row in done
        if row.get("error", {}).get("svd", 0) > CLOSE and not row["narrow"]
    ]
    crashes = sum(count for end, count in ends.items() if end.startswith(("crash", "refused-")))
    return (
        f"{len(tried)} families tried, {len(full)} convert {ENOUGH:.0%} or more inside blocks,"
        f" {len(done) - len(full)} less, {ends['refused']} refused whole, {crashes} crashes,"
        f" fewer by two slices, which odd widths do not admit: {sliced},"
        f" silent: {silent}, inexact though of rank 2: {wrong}\n{dict(ends)}"
    )


def main() -> None:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; added to")
    parser.add_argument("--only", help="model types, with commas between them")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="after which a family is ended")
    parser.add_argument("--table", action="store_true", help="only print what was done")
    options = parser.parse_args()
    text = options.output.read_text() if options.output.exists() else ""
    rows = {row["family"]: row for row in map(json.loads, text.splitlines())}
    if options.table:
        for row in rows.values():
            print(line(row))
    else:
        torch.set_num_threads(1)
        names = options.only.split(",") if options.only else zoo.families()
        run(
            (name for name in names if name not in rows),
            options.output,
            options.jobs,
            options.seconds,
        )
        rows = {r["family"]: r for r in map(json.loads, options.output.read_text().splitlines())}
    print(summary(rows.values()))


if __name__ == "__main__":
    main()
