"""What teachers of another width teach an encoder: ways on a dense and on a narrow student.

    python benchmarks/teachers.py TEACHER STUDENT OUT --train stsb/train.parquet \\
        --data stsb/validation.parquet sick/validation.parquet --device cuda --steps 600

Texts that are in a measured pair are left out of what is trained on. Each row is one `finetune` and
one `evaluate`; rows that are done are not repeated. OUT/results.json has all that is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import tcompress
from tcompress.artifact.manifest import TrainingFacts, read_manifest
from tcompress.training.text_agreement import without_words

SENTENCES = ("sentence1", "sentence2", "sentence", "text")
DROPPED = 0.45  # of the words of variants


@dataclass(frozen=True)
class Way:
    """One row: who learns what from whom."""

    student: str  # `dense` or `narrow`
    teachers: tuple[str, ...]  # of `teacher` and `student`, the dense one
    options: dict[str, Any] = field(default_factory=dict)
    variants: bool = False  # whether texts without some of their words are trained on too


def _ways() -> dict[str, Way]:
    similarities, embedding = {"similarities": 1.0}, {"embedding": 1.0}
    found: dict[str, Way] = {}
    for student in ("dense", "narrow"):
        for name, objectives in (
            ("similarities", similarities),
            ("embedding", embedding),
            ("both", {**similarities, **embedding}),
        ):
            found[f"{student} {name}"] = Way(student, ("teacher",), {"objectives": objectives})
        found[f"{student} variants"] = Way(student, ("teacher",), variants=True)
        found[f"{student} all"] = Way(student, ("teacher",), {"train": "all"})
        found[f"{student} two"] = Way(student, ("student", "teacher"))
        found[f"{student} two variants"] = Way(student, ("student", "teacher"), variants=True)
    found["narrow self"] = Way("narrow", ("student",))
    return found


WAYS = _ways()


def texts_of(path: Path) -> list[str]:
    """Distinct sentences of a table, or lines of a text file."""
    if path.suffix == ".txt":
        return list(dict.fromkeys(filter(None, path.read_text(encoding="utf-8").splitlines())))
    table = pd.read_parquet(path)
    columns = [name for name in SENTENCES if name in table.columns]
    found = [str(text) for name in columns for text in table[name]]
    return [text for text in dict.fromkeys(found) if text.strip() and "\n" not in text]


def write_texts(train: list[Path], data: list[Path], out: Path) -> dict[bool, list[str]]:
    """Write what is trained on, without measured sentences: as it is, and with variants."""
    measured = {text for path in data for text in texts_of(path)}
    files: dict[bool, list[str]] = {False: [], True: []}
    for path in train:
        name = path.parent.name or path.stem
        texts = [text for text in texts_of(path) if text not in measured]
        variants = [without_words(own, DROPPED) for own in texts]
        for has, lines in ((False, texts), (True, [*texts, *variants])):
            file = out / f"{name}{'-variants' if has else ''}.txt"
            file.write_text("\n".join(dict.fromkeys(lines)) + "\n", encoding="utf-8")
            files[has].append(str(file))
        print(f"{name}: {len(texts):,} texts", flush=True)
    return files


def measured(folder: str, data: list[Path], device: str) -> list[float]:
    """Spearman on each set."""
    found = []
    for path in data:
        scores = tcompress.evaluate([folder], "sts", str(path), device=device, bootstrap=0)
        found.append(next(own.value for own in scores[0].metrics if own.name == "spearman"))
    return found


def learnt(facts: TrainingFacts) -> dict[str, Any]:
    """What a manifest says of the run."""
    named = {own.name: [own.start, own.end, own.kept] for own in facts.sources}
    losses = [facts.curve[0].validation, facts.best]
    return {"share": facts.share, "step": facts.best_step, "losses": losses, "agreement": named}


def main() -> None:
    """Trains and measures the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("teacher", help="folder of the teacher, such as all-mpnet-base-v2")
    parser.add_argument("student", help="folder of the dense student, such as all-MiniLM-L6-v2")
    parser.add_argument("out", type=Path, help="folder for all that is written")
    parser.add_argument("--data", nargs="+", type=Path, required=True, help="pairs with scores")
    parser.add_argument("--train", nargs="+", type=Path, required=True, help="parquet or txt")
    parser.add_argument("--narrow", help="converted student; default `width`, 25 % of STUDENT")
    parser.add_argument("--rows", nargs="+", default=[*WAYS], help=", ".join(WAYS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, help="default as `finetune` finds it")
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--tag", default="", help="put before names of rows, such as of a rate")
    given = parser.parse_args()
    if unknown := [name for name in given.rows if name not in WAYS]:
        parser.error(f"no rows {unknown}; there are {[*WAYS]}")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    texts = write_texts(given.train, given.data, given.out)
    narrow = given.narrow or str(given.out / "narrow")
    if any(WAYS[name].student == "narrow" for name in given.rows) and not Path(narrow).exists():
        calibration = {"source": texts[False], "samples": 640}
        tcompress.convert(
            given.student,
            method="width",
            output=narrow,
            target=0.25,
            calibration=calibration,
            device=given.device,
        )
    folders = {"teacher": given.teacher, "student": given.student}
    places = {"dense": given.student, "narrow": narrow}

    def note(name: str, scores: list[float], seconds: float, **more: Any) -> None:
        results[name] = {"spearman": scores, "seconds": seconds, **more}
        path.write_text(json.dumps(results, indent=1))
        dense = results.get("student", {}).get("spearman", scores)
        shares = [own / base for own, base in zip(scores, dense, strict=True)]
        columns = [*(f"{score:.4f}" for score in scores), f"{np.mean(shares):.4f} x"]
        said = {key: item for key, item in more.items() if key in ("share", "step", "losses")}
        print(f"{name:32} {'  '.join(columns)}  {seconds:6.0f} s  {said}", flush=True)

    for name, folder in (
        ("student", given.student),
        ("teacher", given.teacher),
        ("narrow", narrow),
    ):
        if name not in results and Path(folder).exists():
            begun = time.perf_counter()
            scores = measured(folder, given.data, given.device)
            note(name, scores, time.perf_counter() - begun)
    for name in given.rows:
        row = f"{given.tag}{name}"
        if row in results:
            continue
        way, begun = WAYS[name], time.perf_counter()
        chosen = {"learning_rate": given.lr} if given.lr else {}
        done = tcompress.finetune(
            places[way.student],
            output=given.out / row.replace(" ", "-"),
            teacher=[folders[one] for one in way.teachers],
            data={"source": texts[way.variants], "max_length": given.max_length},
            steps=given.steps,
            batch_size=given.batch_size,
            device=given.device,
            force=True,
            **chosen,
            **way.options,
        )
        seconds = time.perf_counter() - begun
        facts = read_manifest(done.folder)
        assert facts is not None  # it was just written
        scores = measured(str(done.folder), given.data, given.device)
        note(row, scores, seconds, **learnt(facts.training[-1]))
    print(f"torch {torch.__version__}, {given.device}")


if __name__ == "__main__":
    main()
