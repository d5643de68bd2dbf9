"""What users deploy: models in fewer bits and in ONNX Runtime, beside the float32 they came from.

    python benchmarks/ship.py MODEL OUT --data stsb/validation.parquet sick/validation.parquet
        --train stsb/train.parquet sick/train.parquet sst2_sentence/train.parquet

MODEL is a sentence encoder. Each form (dense, svd and width at 25 %, slices with p = 4) is
converted, stored in 8 and in 4 bits, healed for a few steps as float and as 4 bits; those of
`--exported` (dense and width; each of the others takes some minutes more) are run as ONNX files.
Numbers are Spearman of `--task sts`, the mean of the sets, and their share of the float form's.
`--goals` asks `tcompress compress` for sizes and speeds, and shows its tables. Half an hour of two
cores, and what goals are given; what OUT/results.json has is not done again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rows import recorded

import tcompress

FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "svd": {"method": "svd", "target": 0.25},
    "width": {"method": "width", "target": 0.25},
    "lprod": {"method": {"name": "lprod", "p": 4}},
}
GOALS: dict[str, dict[str, Any]] = {
    "10MB": {"size": "10MB", "minutes": 12},
    "6MB": {"size": "6MB", "minutes": 7},
    "4MB": {"size": "4MB", "minutes": 7},
    "6x": {"speedup": 6, "minutes": 7},
    "10x": {"speedup": 10, "minutes": 7},
}
RUNTIMES = ("torch", "onnx", "onnx-int8", "onnx-q4")


def main() -> None:
    """Runs the rows that are not there yet, and prints all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a sentence encoder")
    parser.add_argument("out", type=Path, help="folder for models and results.json")
    parser.add_argument("--data", nargs="+", required=True, help="pairs with scores")
    parser.add_argument("--train", nargs="+", required=True, help="texts to fit and heal on")
    parser.add_argument("--steps", type=int, default=100, help="of healing")
    parser.add_argument("--threads", type=int, default=2, help="of what is timed")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=[*FORMS])
    parser.add_argument("--exported", nargs="*", choices=FORMS, default=["dense", "width"])
    parser.add_argument("--goals", nargs="*", choices=GOALS, default=[], help="of `compress`")
    args = parser.parse_args()
    record, results = recorded(args.out)

    def row(name: str, measured: Callable[[], Any]) -> None:
        if name not in results:
            start = time.perf_counter()
            values = measured()
            results[name] = {"values": values, "seconds": round(time.perf_counter() - start, 1)}
            record.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {json.dumps(results[name])}", flush=True)

    for form in args.forms:
        row(f"{form}: written", lambda form=form: write(args, form))
        models = [f"{form}", f"{form}-8", f"{form}-4"]
        row(f"{form}: bits", lambda models=models: scores(args, models))
        if form != "dense":
            healed = [f"{form}-healed", f"{form}-4-healed"]
            row(f"{form}: healed", lambda form=form: heal(args, form))
            row(f"{form}: bits after healing", lambda models=healed: scores(args, models))
        if form not in args.exported:
            continue
        shipped = f"{form}-healed" if form != "dense" else form
        row(f"{shipped}: runtimes", lambda one=shipped: scores(args, [one], RUNTIMES))
        row(f"{shipped}: speed", lambda one=shipped: speed(args, one))
    for goal in args.goals:
        row(f"compress: {goal}", lambda goal=goal: compressed(args, goal))


def compressed(args: argparse.Namespace, goal: str) -> dict[str, Any]:
    """Gives one command a goal.  Its table, with the share of the dense model's quality."""
    options = {"data": args.train, "task": "sts", "test_data": args.data, "threads": args.threads}
    output = args.out / f"goal-{goal}"
    done = tcompress.compress(args.model, output, force=True, **options, **GOALS[goal])
    first = done.rows[0].quality
    rows = {
        f"{row.name}, {row.runtime}": {
            "MB": round(row.bytes / 1e6, 2),
            "speed": round(row.speedup, 2),
            "quality": row.quality and round(row.quality, 4),
            "times_dense": row.quality and first and round(row.quality / first, 4),
            "agreement": row.agreement and round(row.agreement, 4),
        }
        for row in done.rows
    }
    return {**rows, "healed": done.healed, "missed": done.missed}


def folder(args: argparse.Namespace, name: str) -> Path:
    """Folder of a model by its short name."""
    return Path(args.model) if name == "dense" else args.out / name


def write(args: argparse.Namespace, form: str) -> dict[str, float]:
    """Converts a form, and stores it in fewer bits.  Megabytes of weights by bits."""
    calibration = {"source": args.train, "samples": 640, "max_length": 64}
    options = {"calibration": calibration, **FORMS[form]} if FORMS[form] else {}
    for bits in (None, 8, 4) if options else (8, 4):
        rounded = {} if bits is None else {"bits": bits}
        output = args.out / (form if bits is None else f"{form}-{bits}")
        tcompress.convert(args.model, output=output, force=True, **options, **rounded)
    return {
        name: round(
            sum(p.stat().st_size for p in folder(args, name).glob("*.safetensors")) / 1e6, 2
        )
        for name in (form, f"{form}-8", f"{form}-4")
    }


def heal(args: argparse.Namespace, form: str) -> dict[str, float]:
    """Heals a form, to be stored as float and in 4 bits.  Seconds."""
    options = {"steps": args.steps, "data": {"source": args.train, "max_length": 64}}
    options |= {"mixed_precision": "bf16", "force": True}
    seconds = {}
    for name, bits in ((form, {}), (f"{form}-4", {"bits": 4})):
        start = time.perf_counter()
        output = args.out / f"{name}-healed"
        tcompress.finetune(folder(args, form), output=output, **options, **bits)
        seconds[name] = round(time.perf_counter() - start, 1)
    return seconds


def scores(
    args: argparse.Namespace, names: list[str], runtimes: tuple[str, ...] = ("torch",)
) -> dict[str, Any]:
    """Spearman of models, by set, with its share of the first one's, and their mean."""
    models = [folder(args, name) for name in names]
    options = {"runtime": list(runtimes), "bootstrap": 0, "save": False}
    measured = tcompress.evaluate(models, "sts", args.data, **options)
    values = [
        [metric.value for metric in item.metrics if metric.name == "spearman"] for item in measured
    ]
    labels = [f"{name} {runtime}".removesuffix(" torch") for name in names for runtime in runtimes]
    means = [sum(row) / len(row) for row in values]
    return {
        label: {
            "spearman": [round(value, 4) for value in row],
            "times_first": [round(v / first, 4) for v, first in zip(row, values[0], strict=True)],
            "mean_times_first": round(mean / means[0], 4),
        }
        for label, row, mean in zip(labels, values, means, strict=True)
    }


def speed(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Passes of 32 x 32 tokens, beside the dense model in PyTorch and in the same runtime."""
    options = {"batch": [32], "length": [32], "threads": args.threads, "save": False}
    [bench] = tcompress.bench(
        [folder(args, name)], args.model, runtime=list(RUNTIMES), repeats=9, **options
    )
    return {
        item.mode: {
            "ms": round(item.milliseconds, 2),
            "dense_torch_ms": round(item.baseline_milliseconds, 2),
            "times_dense_torch": round(item.ratio, 2),
            "dense_ms_there": item.same_runtime_milliseconds
            and round(item.same_runtime_milliseconds, 2),
            "instructions": item.protocol["instructions"],
        }
        for item in bench.speed
    }


if __name__ == "__main__":
    main()
