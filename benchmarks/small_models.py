"""A language model or an image classifier: dense, converted, healed, at 25 % and 50 %.

    python benchmarks/small_models.py lm MODEL OUT --data tinystories_sample/test.parquet
    python benchmarks/small_models.py image MODEL OUT --train cifar10/train.parquet \
        --data cifar10/test.parquet

Healing imitates the dense model and reads no labels. A language model is calibrated and healed on
the first four fifths of the text and measured on the rest. What is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rows import SLICES, every_budget, with_depth
from transformers.utils import logging

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.api import evaluate
from tcompress.conversion.converter import convert
from tcompress.models import SourceModel
from tcompress.options import Convert, Finetune
from tcompress.training.finetuning import finetune


def main() -> None:
    """Converts, heals, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("lm", "image"))
    parser.add_argument("model")
    parser.add_argument("out", type=Path, help="folder for the models and results.json")
    parser.add_argument("--data", required=True, help="data to measure on")
    parser.add_argument("--train", help="data to heal with; default a part of the text")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", nargs="*", help="conversions")
    parser.add_argument("--limit", type=int, help="examples to measure on")
    parser.add_argument("--extra", type=json.loads, default={}, help="more settings of finetune")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.kind == "lm" and args.train is None:
        args.train, args.data = split_text(Path(args.data), args.out)
    record = args.out / "results.json"
    rows: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    config = SourceModel.open(args.model).config
    widths = config.hidden_size, config.intermediate_size
    p = next(p for p in (8, 4, 2) if not any(width % p for width in widths))
    args.rows = conversions(config.num_hidden_layers, p)
    for name in ("dense", *(args.only or args.rows)):
        if name not in rows:
            rows[name] = row(args, name)
            record.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps({name: rows[name]}), flush=True)


def conversions(blocks: int, p: int) -> dict[str, dict[str, Any]]:
    """All rows: structures, and structures in fewer blocks."""
    rows = SLICES | every_budget(p)
    for count in (1, 2):
        label = f"{count} {'layer' if count == 1 else 'layers'} dropped"
        rows |= with_depth(label, {"drop_layers": count}, 1 - count / blocks, p)
    return rows


def split_text(data: Path, out: Path) -> tuple[str, str]:
    """Writes the first four fifths of a text, and the rest, as files of lines."""
    lines = [line for line in pd.read_parquet(data)["text"].tolist() if line.strip()]
    cut = len(lines) * 4 // 5
    names = []
    for name, part in (("train.txt", lines[:cut]), ("test.txt", lines[cut:])):
        (out / name).write_text("\n".join(part) + "\n", encoding="utf-8")
        names.append(str(out / name))
    return names[0], names[1]


def row(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Measures one conversion, before and after healing."""
    if name == "dense":
        return {"healed": measured(args, args.model)}
    folder = args.out / name.replace(" ", "-").replace("%", "pc")
    calibration = {"source": args.train, "max_length": args.max_length}
    recipe = Convert.model_validate({**args.rows[name], "calibration": calibration})
    kept = convert(args.model, recipe, folder, force=True).manifest.plan.kept
    data = {"source": [args.train], "max_length": args.max_length, "validation_samples": 200}
    options = Finetune.model_validate({"data": data, "steps": args.steps, **args.extra})
    goal = folder.with_name(f"{folder.name}-healed")
    facts = finetune(str(folder), options, goal, force=True).facts
    return {
        "kept": kept,
        "converted": measured(args, folder),
        "healed": measured(args, goal),
        "steps": facts.steps,
        "samples": facts.samples,
        "minutes": round(facts.seconds / 60, 2),
        "curve": [(point.step, point.validation) for point in facts.curve],
    }


def measured(args: argparse.Namespace, model: Any) -> float:
    """Perplexity or accuracy."""
    task = "perplexity" if args.kind == "lm" else "image-classification"
    options = {"pack": "newline"} if args.kind == "lm" else {}
    length = args.max_length if args.kind == "lm" else None
    scores = evaluate(
        [str(model)],
        task,
        args.data,
        max_length=length,
        limit=args.limit,
        bootstrap=0,
        options=options,
    )
    return float(scores[0].metrics[0].value)


if __name__ == "__main__":
    main()
