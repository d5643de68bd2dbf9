"""Sentence similarity after conversion and after healing, structures beside plain baselines.

    python benchmarks/healing.py MODEL OUT --calibrate stsb/train.parquet \
        --train stsb/train.parquet sick/train.parquet sst2_sentence/train.parquet \
        --data stsb/validation.parquet --steps 600

All models are healed for the same number of steps on the same unlabelled sentences, none of which
occurs in the measured pairs, with the dense model as teacher. Baselines: the dense model with some
of its layers kept, and with int8 weights (dynamic quantisation), which is not trained. What is done
is not done again.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rows import SLICES, every_budget, with_depth
from transformers import AutoModel
from transformers.utils import logging

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.api import evaluate
from tcompress.conversion.converter import convert
from tcompress.data.examples import load_examples
from tcompress.evaluation.measuring import TASKS
from tcompress.models import SourceModel
from tcompress.options import Convert, Evaluate, Finetune
from tcompress.training.finetuning import finetune

CONVERSIONS: dict[str, dict[str, Any]] = {
    **with_depth("layers 1, 3, 5", {"keep_layers": [1, 3, 5]}, 3 / 6),
    **with_depth("layers 1, 5", {"keep_layers": [1, 5]}, 2 / 6),
    **with_depth("2 layers dropped", {"drop_layers": 2}, 4 / 6),
    "3 layers dropped": {"drop_layers": 3},
    "lprod p=4 dct": {"method": {"name": "lprod", "p": 4, "transform": "dct"}},
    "lprod p=4 fitted": SLICES["lprod p=4"],
    "lprod p=2 fitted": SLICES["lprod p=2"],
    **every_budget(),
}


def main() -> None:
    """Converts, heals, measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="BERT-like sentence encoder")
    parser.add_argument("out", type=Path, help="folder for the models and results.json")
    parser.add_argument("--calibrate", required=True, help="parquet to calibrate with")
    parser.add_argument("--train", nargs="+", required=True, help="data to heal with")
    parser.add_argument("--data", required=True, help="pairs with scores to measure on")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--extra", type=json.loads, default={}, help="more settings of finetune")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    args.train = write_sentences(args.train, args.data, args.out / "train.txt")
    record = args.out / "results.json"
    rows: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    for name in ("dense", "dense int8", *CONVERSIONS):
        if name in rows or (args.only and name not in args.only):
            continue
        rows[name] = row(args, name)
        record.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps({name: {k: v for k, v in rows[name].items() if k != "curve"}}), flush=True)


def write_sentences(files: list[str], measured: str, path: Path) -> list[str]:
    """Writes the different sentences of all files, without those to be measured on."""
    held_out = set(sentences(measured))
    kept = [line for name in files for line in sentences(name) if line not in held_out]
    kept = list(dict.fromkeys(kept))
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    print(f"{len(kept)} different sentences, none of the {len(held_out)} measured ones")
    return [str(path)]


def sentences(file: str) -> list[str]:
    """All texts of a table, from columns such as `sentence1` and `text`."""
    table = pd.read_parquet(file)
    columns = [name for name in table if name.startswith(("sentence", "text"))]
    texts = [" ".join(text.split()) for name in columns for text in table[name]]
    return [text for text in texts if text]


def row(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Measures one row."""
    if name == "dense":
        return {"healed": spearman(args, args.model)}
    if name == "dense int8":
        return int8(args)
    with tempfile.TemporaryDirectory() as temporary:
        raw = Path(temporary) / "raw"
        settings: dict[str, Any] = {"teacher": args.model, **args.extra}
        start = time.perf_counter()
        data = {"source": args.calibrate, "samples": 640, "columns": ["sentence1", "sentence2"]}
        recipe = Convert.model_validate({**CONVERSIONS[name], "calibration": data})
        plan = convert(args.model, recipe, raw).manifest.plan
        seconds = time.perf_counter() - start
        before = spearman(args, str(raw))
        data = {"source": args.train, "max_length": 64, "validation_samples": 300}
        options = Finetune.model_validate({"data": data, "steps": args.steps, **settings})
        facts = finetune(str(raw), options, args.out / name.replace(" ", "-"), force=True).facts
    return {
        "kept": plan.kept,
        "blocks": None if plan.depth is None else plan.depth.which,
        "conversion_seconds": round(seconds, 1),
        "converted": before,
        "healed": spearman(args, str(args.out / name.replace(" ", "-"))),
        "steps": facts.steps,
        "sentences": facts.samples,
        "minutes": round(facts.seconds / 60, 2),
        "curve": [(point.step, point.validation) for point in facts.curve],
    }


def spearman(args: argparse.Namespace, model: str) -> float:
    """Spearman correlation on the pairs, by `tcompress evaluate`."""
    scores = evaluate([model], "sts", args.data, max_length=128, bootstrap=0, save=False)
    return float(scores[0].metrics[0].value)


def int8(args: argparse.Namespace) -> dict[str, Any]:
    """Dynamic quantisation of all linear layers: int8 weights, activations as they come."""
    source = SourceModel.open(args.model)
    dense: Any = AutoModel.from_pretrained(args.model, dtype=torch.float32).eval()
    small = torch.ao.quantization.quantize_dynamic(dense, {torch.nn.Linear}, dtype=torch.qint8)
    examples = load_examples(args.data, "validation", TASKS["sts"].needs)
    task = TASKS["sts"](source, examples, 128, Evaluate(task="sts", data=args.data))
    value = task.measure(small, task.batch_size, lambda done: None)[0].value()
    ids = torch.randint(1000, 2000, (32, 32))
    times: dict[str, list[float]] = {"dense": [], "int8": []}
    with torch.inference_mode():
        for _ in range(9):
            for label, model in (("dense", dense), ("int8", small)):
                start = time.perf_counter()
                model(input_ids=ids)
                times[label].append(time.perf_counter() - start)
    ratio = sorted(times["dense"])[4] / sorted(times["int8"])[4]
    linear = sum(m.weight.numel() for m in dense.modules() if isinstance(m, torch.nn.Linear))
    return {"healed": value, "speed": ratio, "kept": 0.25, "linear_bytes": linear}


if __name__ == "__main__":
    main()
