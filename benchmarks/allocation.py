"""Structures after conversion alone: sizes by loss or alike, with and without output moments.

    python benchmarks/allocation.py MODEL OUT --calibrate stsb/train.parquet \
        --columns sentence1 sentence2 --task sts --data stsb/validation.parquet

Every structure is converted at every target four ways: the same fraction for all layers or sizes
by predicted loss, fitted to input moments alone or to output moments too. The last way is taken
with the built-in text as well. Nothing is trained. What is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from rows import recorded

import tcompress
from tcompress.api import evaluate
from tcompress.conversion.converter import convert
from tcompress.options import Convert

METHODS: dict[str, dict[str, Any]] = {
    "svd": {"name": "svd"},
    "tt": {"name": "tt"},
    "lprod fitted p=4": {"name": "lprod", "p": 4},
    "lprod p=8 + low rank": {"name": "lprod", "p": 8},
    "tucker": {"name": "tucker", "share": "none"},
    "tucker inputs": {"name": "tucker", "share": "inputs"},
    "tucker heads": {"name": "tucker", "share": "heads"},
    "tucker layers": {"name": "tucker", "share": "layers"},
    "tucker model": {"name": "tucker", "share": "model"},
    "auto": {"name": "auto"},
}
WAYS = {
    "alike, inputs": ("uniform", False, "data"),
    "alike, inputs and outputs": ("uniform", True, "data"),
    "by loss, inputs": ("loss", False, "data"),
    "by loss, inputs and outputs": ("loss", True, "data"),
    "by loss, built-in text": ("loss", True, "builtin"),
}


def main() -> None:
    """Converts, measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="dense model: folder, short name or hub id")
    parser.add_argument("out", type=Path, help="folder for results.json")
    parser.add_argument("--calibrate", required=True, help="data to calibrate with")
    parser.add_argument("--columns", nargs="*", default=[], help="its columns")
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--task", required=True, help="task of `tcompress evaluate`")
    parser.add_argument("--data", required=True, help="data to measure on")
    parser.add_argument("--max-length", type=int, help="longest text, in tokens")
    parser.add_argument("--limit", type=int, help="most examples to measure on")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the task")
    parser.add_argument("--targets", nargs="*", type=float, default=[0.25, 0.5])
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    args = parser.parse_args()
    record, rows = recorded(args.out)
    if "dense" not in rows:
        rows["dense"] = {"value": measured(args, args.model)}
    dense = rows["dense"]["value"]
    print(f"dense {dense:.4f}")
    for target, method, way in product(args.targets, args.methods, args.ways):
        name = f"{method}, {target:.0%}, {way}"
        if name not in rows:
            rows[name] = row(args, METHODS[method], target, way)
            record.write_text(json.dumps(rows, indent=1) + "\n")
        print(name, line(rows[name], dense), flush=True)


def row(
    args: argparse.Namespace, method: dict[str, Any], target: float, way: str
) -> dict[str, Any]:
    """Converts one way and measures the result; a refusal is a row as well."""
    allocation, outputs, source = WAYS[way]
    calibration: dict[str, Any] = {"source": "builtin", "output_moments": outputs}
    if source == "data":
        calibration |= {"source": args.calibrate, "samples": args.samples}
        calibration |= {"columns": args.columns} if args.columns else {}
    if args.max_length and source == "data":
        calibration["max_length"] = args.max_length
    recipe = Convert.model_validate(
        {"method": method, "target": target, "allocation": allocation, "calibration": calibration}
    )
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        try:
            plan = convert(args.model, recipe, Path(folder) / "model").manifest.plan
        except tcompress.TCompressError as error:
            return {"refused": str(error)}
        seconds = round(time.perf_counter() - start, 1)
        value = measured(args, str(Path(folder) / "model"))
    used = sorted({t.structure for e in plan.layers for part in e.parts for t in part.terms})
    return {"value": value, "kept": plan.kept, "seconds": seconds, "used": used}


def line(found: dict[str, Any], dense: float) -> str:
    """One row, for people."""
    if "refused" in found:
        return f"refused: {found['refused']}"
    ratio = found["value"] / dense
    return (
        f"{found['value']:.4f} ({ratio:.3f} x dense), kept {found['kept']:.2%}, "
        f"{found['seconds']:.0f} s, {' + '.join(found['used'])}"
    )


def measured(args: argparse.Namespace, model: str) -> float:
    """The first metric of the task."""
    scores = evaluate(
        [model],
        args.task,
        args.data,
        max_length=args.max_length,
        limit=args.limit,
        bootstrap=0,
        save=False,
        options=args.options,
    )
    return float(scores[0].metrics[0].value)


if __name__ == "__main__":
    main()
