"""Classifiers, compressed and healed with their dense classifier as teacher.

    python benchmarks/classifiers.py MODEL OUT --train sst2/train.parquet \
        --validation sst2/validation.parquet --dense-epochs 2 --epochs 1

A dense classifier is trained first. Then every conversion is trained twice for the same number of
steps: with the dense classifier as teacher, and on labels alone (or only those of `--alone`).
Accuracy has bootstrap intervals and paired differences to the dense classifier. What is done is
not done again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rows import SLICES, every_budget, recorded

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.api import evaluate
from tcompress.conversion.converter import convert
from tcompress.options import Convert, Finetune
from tcompress.training.finetuning import finetune

CONVERSIONS = SLICES | every_budget()
USUAL = [name for name in CONVERSIONS if name.startswith(("lprod", "svd"))]


def main() -> None:
    """Trains, converts, heals, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="dense encoder: folder, short name or hub id")
    parser.add_argument("out", type=Path, help="folder for the models and results.json")
    parser.add_argument("--task", default="classification")
    parser.add_argument("--train", required=True)
    parser.add_argument("--validation", required=True, help="data to measure on")
    parser.add_argument("--samples", type=int, default=200_000, help="most training examples")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--dense-epochs", type=float, default=2.0)
    parser.add_argument("--dense-lr", type=float, default=1e-4)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--lr", type=float, help="default finetune's own")
    parser.add_argument("--only", nargs="*", default=USUAL, help="conversions")
    parser.add_argument("--alone", nargs="*", help="those to train on labels alone; default all")
    parser.add_argument("--extra", type=json.loads, default={}, help="more settings of finetune")
    args = parser.parse_args()
    record, rows = recorded(args.out)
    dense = args.out / "dense"
    for name, make in stages(args, dense):
        if name not in rows:
            rows[name] = make()
            record.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps({name: rows[name]}), flush=True)


def stages(args: argparse.Namespace, dense: Path) -> Any:
    """Names of the rows, and what makes them."""
    yield "dense", lambda: train_dense(args, dense)
    for name in args.only:
        folder = args.out / name.replace(" ", "-").replace("%", "pc")
        yield name, lambda name=name, folder=folder: convert_one(args, dense, name, folder)
        teachers = {"taught": str(dense)}
        if args.alone is None or name in args.alone:
            teachers["labels alone"] = "none"
        for label, teacher in teachers.items():
            goal = folder.with_name(f"{folder.name}-{label.replace(' ', '-')}")
            yield (
                f"{name}, {label}",
                lambda folder=folder, goal=goal, teacher=teacher: heal(
                    args, dense, folder, goal, teacher
                ),
            )


def settings(args: argparse.Namespace, **more: Any) -> Finetune:
    """Settings that all training shares."""
    data = {"source": [args.train], "samples": args.samples, "max_length": args.max_length}
    fixed = {"task": args.task, "data": data, "evaluate_every": 200}
    return Finetune.model_validate({**fixed, **more, **args.extra})


def train_dense(args: argparse.Namespace, dense: Path) -> dict[str, Any]:
    """Trains the dense classifier."""
    options = settings(
        args, teacher="none", epochs=args.dense_epochs, learning_rate=args.dense_lr, train="all"
    )
    if not dense.exists():
        finetune(args.model, options, dense)
    return measured(args, dense, dense)


def convert_one(args: argparse.Namespace, dense: Path, name: str, folder: Path) -> dict[str, Any]:
    """Converts the dense classifier, calibrated on its training texts."""
    calibration = {"source": args.train, "samples": 1024, "max_length": args.max_length}
    recipe = Convert.model_validate({**CONVERSIONS[name], "calibration": calibration})
    kept = convert(str(dense), recipe, folder, force=True).manifest.plan.kept
    return {"kept": kept, **measured(args, dense, folder)}


def heal(
    args: argparse.Namespace, dense: Path, folder: Path, goal: Path, teacher: str
) -> dict[str, Any]:
    """Trains a converted classifier."""
    options = settings(args, teacher=teacher, epochs=args.epochs, learning_rate=args.lr)
    facts = finetune(str(folder), options, goal, force=True).facts
    minutes = round(facts.seconds / 60, 2)
    return {"steps": facts.steps, "minutes": minutes, **measured(args, dense, goal)}


def measured(args: argparse.Namespace, dense: Path, model: Path) -> dict[str, Any]:
    """Accuracy, its interval, and the difference to the dense classifier."""
    names = list(dict.fromkeys([str(dense), str(model)]))
    scores = evaluate(names, args.task, args.validation, max_length=args.max_length)
    metric = scores[-1].metrics[0]
    return metric.model_dump(exclude={"protocol", "higher_is_better"})


if __name__ == "__main__":
    main()
