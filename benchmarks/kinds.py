"""Every kind of candidate at equal size and at equal time, converted only: quality on several sets.

    python benchmarks/kinds.py MODEL OUT --calibrate stsb/train.parquet sick/train.parquet \
        sst2_sentence/train.parquet --task sts --data stsb/validation.parquet \
        sick/validation.parquet --budgets target=0.25 target=0.5 speedup=2 speedup=4

Agreement is with the dense model, labels unread. Speed is that of the written model beside the
dense one, in turns; `predicted` was known before anything was fitted. What is done is not done
again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rows import recorded

import tcompress
from tcompress.api import bench, evaluate
from tcompress.conversion.converter import convert
from tcompress.options import Convert

KINDS: dict[str, dict[str, Any]] = {
    "svd": {"name": "svd"},
    "lprod": {"name": "lprod", "p": 8},
    "tt": {"name": "tt"},
    "width": {"name": "width"},
    "auto": {"name": "auto"},
}


def main() -> None:
    """Converts, measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="dense model: folder, short name or hub id")
    parser.add_argument("out", type=Path, help="folder for results.json")
    parser.add_argument("--calibrate", nargs="+", default=["builtin"], help="calibration data")
    parser.add_argument("--samples", type=int, help="of it; default as `convert` does")
    parser.add_argument("--task", required=True, help="task of `tcompress evaluate`")
    parser.add_argument("--data", nargs="+", required=True, help="sets to measure on")
    parser.add_argument("--max-length", type=int, help="longest text, in tokens")
    parser.add_argument("--limit", type=int, help="most examples to measure on")
    parser.add_argument("--at", default="32x128", help="the pass that is timed")
    parser.add_argument("--budgets", nargs="+", default=["target=0.25", "target=0.5"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--drop", nargs="*", type=int, default=[], help="numbers of blocks to drop")
    args = parser.parse_args()
    record, rows = recorded(args.out)
    wanted = [
        (f"{kind}, {budget}", {"method": KINDS[kind], **budget_of(budget, args.at)})
        for budget, kind in product(args.budgets, args.kinds)
    ]
    wanted += [(f"without {count} blocks", {"drop_layers": count}) for count in args.drop]
    for name, said in wanted:
        if name not in rows:
            rows[name] = row(args, said)
            record.write_text(json.dumps(rows, indent=1) + "\n")
        print(name, line(rows[name]), flush=True)


def budget_of(text: str, at: str) -> dict[str, Any]:
    """Reads `target=0.25` or `speedup=4`."""
    name, _, value = text.partition("=")
    return {name: float(value), **({"at": at} if name == "speedup" else {})}


def row(args: argparse.Namespace, said: dict[str, Any]) -> dict[str, Any]:
    """Converts and measures; a refusal is a row as well."""
    calibration = {"source": args.calibrate, "samples": args.samples}
    with tempfile.TemporaryDirectory() as folder:
        out, start = Path(folder) / "model", time.perf_counter()
        try:
            recipe = Convert.model_validate({**said, "calibration": calibration})
            done = convert(args.model, recipe, out).manifest
        except tcompress.TCompressError as error:
            return {"refused": str(error)}
        seconds = time.perf_counter() - start
        options = {"max_length": args.max_length, "limit": args.limit}
        scores = evaluate([args.model, out], args.task, args.data, save=False, **options)[1]
        batch, length = map(int, args.at.split("x"))
        shape: dict[str, Any] = {"batch": [batch], "repeats": 9}
        if args.task != "image-classification":
            shape["length"] = [length]
        [timed] = bench([out], args.model, save=False, **shape)
    main_numbers = [own.metrics[0] for own in scores.sets]
    budget = done.plan.budget
    return {
        "kept": done.plan.kept,
        "seconds": round(seconds, 1),
        "values": [metric.value for metric in main_numbers],
        "ratios": [metric.ratio for metric in main_numbers],
        "agreement": [
            metric.value
            for own in scores.sets
            for metric in own.metrics
            if metric.name == "agreement"
        ],
        "predicted": budget and budget.speedup,
        "taken": budget and budget.taken,
        "speed": timed.speed[0].ratio,
        "samples": done.calibration.samples,
    }


def line(found: dict[str, Any]) -> str:
    """One row, for people."""
    if "refused" in found:
        return f"refused: {found['refused']}"
    ratios, agreement = (
        " ".join(f"{value:.4f}" for value in found[name]) for name in ("ratios", "agreement")
    )
    predicted = f" ({found['predicted']:.2f} predicted)" if found["predicted"] else ""
    taken = f", {found['taken']} taken" if found["taken"] else ""
    return (
        f"{ratios} mean {fmean(found['ratios']):.4f}, agreement {agreement}, kept "
        f"{found['kept']:.1%}, {found['speed']:.2f} x{predicted}, {found['seconds']:.0f} s{taken}"
    )


if __name__ == "__main__":
    main()
