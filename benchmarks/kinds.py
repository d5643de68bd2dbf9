"""Every kind of candidate at equal size and at equal time: quality on several sets, and speed.

    python benchmarks/kinds.py MODEL OUT --calibrate stsb/train.parquet sick/train.parquet \
        sst2_sentence/train.parquet --task sts --data stsb/validation.parquet \
        sick/validation.parquet --budgets target=0.25 target=0.5 speedup=2 speedup=4 --drop 3
    python benchmarks/kinds.py MODEL OUT --split tinystories_sample/test.parquet \
        --task perplexity --options '{"pack": "newline"}' --max-length 256 --heal 200

Agreement is with the dense model, labels unread. Speed is that of the written model beside the
dense one, in turns; `predicted` was known before anything was fitted. Healing imitates the dense
model on the different texts of the calibration data, or of `--train`, that are not measured on;
what it writes stays in OUT. What is done is not done again.
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

import pandas as pd
from rows import recorded

import tcompress
from tcompress.api import bench, evaluate, finetune
from tcompress.conversion.converter import convert
from tcompress.options import Convert

KINDS: dict[str, dict[str, Any]] = {
    "svd": {"name": "svd"},
    "lprod": {"name": "lprod"},
    "tt": {"name": "tt"},
    "width": {"name": "width"},
    "auto": {"name": "auto"},
}


def main() -> None:
    """Converts, measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="dense model: folder, short name or hub id")
    parser.add_argument("out", type=Path, help="folder for results.json and healed models")
    parser.add_argument("--calibrate", nargs="+", default=["builtin"], help="calibration data")
    parser.add_argument("--samples", type=int, help="of it; default as `convert` does")
    parser.add_argument("--task", required=True, help="task of `tcompress evaluate`")
    parser.add_argument("--data", nargs="+", default=[], help="sets to measure on")
    parser.add_argument(
        "--split", type=Path, help="text: four fifths to calibrate, a fifth to measure"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="of the task")
    parser.add_argument("--max-length", type=int, help="longest text, in tokens")
    parser.add_argument("--limit", type=int, help="most examples to measure on")
    parser.add_argument("--at", default="32x128", help="the pass that is timed")
    parser.add_argument("--budgets", nargs="*", default=["target=0.25", "target=0.5"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--slices", type=int, default=8, help="of `lprod`: divides all widths")
    parser.add_argument("--drop", nargs="*", type=int, default=[], help="numbers of blocks to drop")
    parser.add_argument(
        "--more", type=json.loads, default={}, help="rows by name: settings of `convert`"
    )
    parser.add_argument("--heal", type=int, default=0, help="steps of healing")
    parser.add_argument("--train", nargs="+", help="data to heal with; default that of calibration")
    parser.add_argument("--finetune", type=json.loads, default={}, help="more settings of it")
    args = parser.parse_args()
    record, rows = recorded(args.out)
    if args.split:
        train, test = split(args.split, args.out)
        args.calibrate, args.data = [train], [test, *args.data]
    kinds = {**KINDS, "lprod": {"name": "lprod", "p": args.slices}}
    wanted = [
        (f"{kind}, {budget}", {"method": kinds[kind], **budget_of(budget, args.at)})
        for budget, kind in product(args.budgets, args.kinds)
    ]
    wanted += [(f"without {count} blocks", {"drop_layers": count}) for count in args.drop]
    wanted += args.more.items()
    if args.heal:
        args.train = unmeasured(args.train or args.calibrate, args.data, args.out)
    for name, said in wanted:
        if name not in rows:
            rows[name] = row(args, name, said)
            record.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{name}: {line(rows[name])}", flush=True)


def budget_of(text: str, at: str) -> dict[str, Any]:
    """Reads `target=0.25` or `speedup=4`."""
    name, _, value = text.partition("=")
    return {name: float(value), **({"at": at} if name == "speedup" else {})}


def split(text: Path, out: Path) -> tuple[str, str]:
    """Writes the first four fifths of a text, and the rest, as files of lines."""
    lines = [line for line in pd.read_parquet(text)["text"].tolist() if line.strip()]
    cut, names = len(lines) * 4 // 5, []
    for name, part in (("train.txt", lines[:cut]), ("test.txt", lines[cut:])):
        (out / name).write_text("\n".join(part) + "\n", encoding="utf-8")
        names.append(str(out / name))
    return names[0], names[1]


def unmeasured(sources: list[str], measured: list[str], out: Path) -> list[str]:
    """Writes the different texts of each table that no measured table holds, as files of lines."""
    taken = {text for file in measured if file.endswith(".parquet") for text in texts(file)}
    names = []
    for index, file in enumerate(sources):
        names.append(file)
        if file.endswith(".parquet") and (found := texts(file)):
            kept = [text for text in dict.fromkeys(found) if text not in taken]
            names[-1] = str(out / f"train{index}.txt")
            Path(names[-1]).write_text("\n".join(kept) + "\n", encoding="utf-8")
            print(f"{file}: {len(kept)} texts of which none is measured on", flush=True)
    return names


def texts(file: str) -> list[str]:
    """All texts of a table, from columns such as `sentence1` and `text`."""
    table = pd.read_parquet(file)
    columns = [name for name in table if name.startswith(("sentence", "text"))]
    lines = [" ".join(text.split()) for name in columns for text in table[name]]
    return [line for line in lines if line]


def row(args: argparse.Namespace, name: str, said: dict[str, Any]) -> dict[str, Any]:
    """Converts, measures, heals and measures again; a refusal is a row as well."""
    calibration = {"source": args.calibrate, "samples": args.samples, "max_length": args.max_length}
    calibration = {name: value for name, value in calibration.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        out, start = Path(folder) / "model", time.perf_counter()
        try:
            recipe = Convert.model_validate({**said, "calibration": calibration})
            done = convert(args.model, recipe, out).manifest
        except tcompress.TCompressError as error:
            return {"refused": str(error)}
        seconds = time.perf_counter() - start
        budget = done.plan.budget
        found = {
            "kept": 1 - done.plan.saved_in_blocks / done.plan.block_parameters,
            "seconds": round(seconds, 1),
            **measured(args, out),
            "predicted": budget and budget.speedup,
            "taken": budget and budget.taken,
            "speed": speed(args, out),
            "samples": done.calibration.samples,
        }
        if args.heal:
            more = dict(args.finetune)
            data = {"max_length": args.max_length or 128, **more.pop("data", {})}
            options = {"steps": args.heal, "data": {"source": args.train, **data}, **more}
            healed = finetune(out, output=args.out / name.replace(" ", "-"), force=True, **options)
            found["healed"] = measured(args, healed.folder)
            found["minutes"] = round(healed.facts.seconds / 60, 2)
    return found


def measured(args: argparse.Namespace, model: Path) -> dict[str, list[float]]:
    """The main number on every set, as it is and over the dense model's, and agreement."""
    options = {"max_length": args.max_length, "limit": args.limit, "options": args.options}
    scores = evaluate([args.model, model], args.task, args.data, save=False, **options)[1]
    everything = [metric for own in scores.sets for metric in own.metrics]
    main_numbers = [own.metrics[0] for own in scores.sets]
    return {
        "values": [metric.value for metric in main_numbers],
        "ratios": [metric.ratio for metric in main_numbers],
        "agreement": [metric.value for metric in everything if "agreement" in metric.name],
    }


def speed(args: argparse.Namespace, model: Path) -> float:
    """Times as fast as the dense model, in turns."""
    batch, _, length = args.at.partition("x")
    shape: dict[str, Any] = {"batch": [int(batch)], "repeats": 9}
    if args.task != "image-classification":
        shape["length"] = [int(length)]
    [timed] = bench([model], args.model, save=False, **shape)
    return timed.speed[0].ratio


def line(found: dict[str, Any]) -> str:
    """One row, for people."""
    if "refused" in found:
        return f"refused: {found['refused']}"
    predicted = f" ({found['predicted']:.2f} predicted)" if found["predicted"] else ""
    taken = f", {found['taken']} taken" if found["taken"] else ""
    healed = ""
    if "healed" in found:
        healed = f"; healed in {found['minutes']} minutes: {quality(found['healed'])}"
    return (
        f"{quality(found)}, kept {found['kept']:.1%}, {found['speed']:.2f} x{predicted}, "
        f"{found['seconds']:.0f} s{taken}{healed}"
    )


def quality(found: dict[str, Any]) -> str:
    """Ratios, or values where they have none, and agreement."""
    numbers, unit = (found["values"], "") if None in found["ratios"] else (found["ratios"], " x")
    listed = " ".join(f"{value:.4f}" for value in numbers)
    agreement = " ".join(f"{value:.4f}" for value in found["agreement"])
    return f"{listed}, mean {fmean(numbers):.4f}{unit}, agreement {agreement}"


if __name__ == "__main__":
    main()
