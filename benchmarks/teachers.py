"""Encoders of sentences taught by larger ones, and a large one made as fast as a small one.

    python benchmarks/teachers.py TEACHER STUDENT OUT --train stsb/train.parquet \\
        --data stsb/validation.parquet sick/validation.parquet --only small "narrow two"

TEACHER is a model such as all-mpnet-base-v2, STUDENT a smaller one such as all-MiniLM-L6-v2. A row
is one way: a form (dense, or converted from one of them), trained by one teacher or both, measured
beside the dense student in the same run. `small` is TEACHER at the speed of STUDENT, exported in
eight bits too. Texts that are in a measured pair are left out of what is trained on. A step that is
done stands in OUT/results.json and is not done again; one that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import tcompress
from tcompress.artifact.manifest import TrainingFacts, read_manifest
from tcompress.evaluation.scores import ModelScores
from tcompress.training.encoded_examples import without_words

SENTENCES = ("sentence1", "sentence2", "sentence", "text")
DROPPED = 0.45  # of the words of variants
CLOSE, TRIES = 0.1, 3  # distance from the student's speed that is no miss, and conversions at most
REPEATS = 9
Results = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """How a model is before it is trained."""

    dense: str  # `teacher` or `student`
    options: Results | None = None  # of the conversion; none of a dense model
    samples: int = 640  # that it is fitted to
    size: tuple[int, int] | None = None  # texts and tokens of a pass that is timed
    against: str = "teacher"  # what is timed beside it


@dataclass(frozen=True)
class Way:
    """One row: what learns what from whom."""

    form: str
    teachers: tuple[str, ...]  # of `teacher` and `student`, the dense ones
    options: Results = field(default_factory=dict)
    variants: bool = False  # whether texts without some of their words are trained on too
    steps: int | None = 300  # none: so many as the minutes allow
    int8: bool = False  # whether it is exported, measured and timed in ONNX Runtime too


def _lprod(transform: str) -> Form:
    options = {"method": "lprod", "p": 4, "transform": transform}
    return Form("teacher", options, 1440, (32, 128))


FORMS = {
    "dense": Form("student"),
    "narrow": Form("student", {"method": "width", "target": 0.25}),
    "small": Form("teacher", {"at": "32x32"}, 1440, (32, 32), "student"),
    "lprod dct": _lprod("dct"),
    "lprod fitted": _lprod("fitted"),
}


def _ways() -> dict[str, Way]:
    similarities, embedding = {"similarities": 1.0}, {"embedding": 1.0}
    both = ("student", "teacher")
    # Far from its teachers, it gains from three times as many texts in as many steps.
    ways = {"small": Way("small", both, {"batch_size": 192}, steps=600, int8=True)}
    ways |= {name: Way(name, ("teacher",), steps=None) for name in ("lprod dct", "lprod fitted")}
    for form in ("dense", "narrow"):
        for name, objectives in (
            ("similarities", similarities),
            ("embedding", embedding),
            ("both", {**similarities, **embedding}),
        ):
            ways[f"{form} {name}"] = Way(form, ("teacher",), {"objectives": objectives})
        ways[f"{form} variants"] = Way(form, ("teacher",), variants=True)
        ways[f"{form} all"] = Way(form, ("teacher",), {"train": "all"})
        ways[f"{form} two"] = Way(form, both)
        ways[f"{form} two variants"] = Way(form, both, variants=True)
    ways["narrow self"] = Way("narrow", ("student",))
    return ways


WAYS = _ways()


def texts_of(path: Path) -> list[str]:
    """Distinct sentences of a table, or lines of a text file."""
    if path.suffix == ".txt":
        return list(dict.fromkeys(filter(None, path.read_text(encoding="utf-8").splitlines())))
    table = pd.read_parquet(path)
    columns = [name for name in SENTENCES if name in table.columns]
    texts = [str(text) for name in columns for text in table[name]]
    return [text for text in dict.fromkeys(texts) if text.strip() and "\n" not in text]


def write_texts(train: list[Path], data: list[Path], out: Path) -> dict[bool, list[str]]:
    """Write what is trained on, without measured sentences: as it is, and with variants."""
    measured = {text for path in data for text in texts_of(path)}
    files: dict[bool, list[str]] = {False: [], True: []}
    folders = [path.parent.name for path in train]
    for path in train:
        name = path.parent.name if folders.count(path.parent.name) == 1 else path.stem
        texts = [text for text in texts_of(path) if text not in measured]
        variants = [without_words(text, DROPPED) for text in texts]
        for has, lines in ((False, texts), (True, [*texts, *variants])):
            file = out / f"{name}{'-variants' if has else ''}.txt"
            file.write_text("\n".join(dict.fromkeys(lines)) + "\n", encoding="utf-8")
            files[has].append(str(file))
        print(f"{name}: {len(texts):,} texts", flush=True)
    return files


def learnt(facts: TrainingFacts) -> Results:
    """What a manifest says of the run."""
    named = {item.name: [item.start, item.end, item.kept] for item in facts.sources}
    losses = [facts.curve[0].validation, facts.best]
    return {"share": facts.share, "step": facts.best_step, "losses": losses, "agreement": named}


def summary(scores: ModelScores) -> Results:
    """Numbers on each set, with intervals of them and of the distance from the dense student."""
    mains = [item.metrics[0] for item in scores.sets]
    numbers = []
    for metric in (*mains, *scores.means[:1]):
        difference = metric.difference and metric.difference.interval
        numbers.append(
            {
                "value": metric.value,
                "interval": metric.interval and [metric.interval.low, metric.interval.high],
                "difference": difference and [difference.low, difference.high],
                "ratio": metric.ratio,
            }
        )
    return {"spearman": numbers}


def pace(folder: str, against: str, options: Results) -> Results:
    """Time a pass of a model, and of another in turn."""
    [times] = tcompress.bench([folder], against, save=False, **options)
    speed = times.speed[0]
    return {
        "milliseconds": [round(speed.milliseconds, 2), round(speed.baseline_milliseconds, 2)],
        "times": speed.ratio,
        "spread": [speed.spread, speed.baseline_spread],
    }


@dataclass(frozen=True)
class Rows:
    """Steps that are done once, with what they came to."""

    given: argparse.Namespace
    texts: dict[bool, list[str]]
    results: Results

    def once(self, name: str, work: Callable[[], Results]) -> Results:
        """Do a step, unless it is done."""
        if name not in self.results:
            begun = time.perf_counter()
            self.results[name] = {**work(), "seconds": round(time.perf_counter() - begun, 1)}
            path = self.given.out / "results.json"
            written = path.with_suffix(".tmp")
            written.write_text(json.dumps(self.results, indent=1), encoding="utf-8")
            os.replace(written, path)
        self._print(name, self.results[name])
        return self.results[name]

    @staticmethod
    def _print(name: str, result: Results) -> None:
        columns = []
        for number in result.get("spearman", ()):
            low, high = number["difference"] or (0.0, 0.0)
            columns.append(f"{number['value']:.4f} ({low:+.4f} to {high:+.4f})")
        if columns:
            columns.append(f"{result['spearman'][-1]['ratio'] or 1.0:.4f} x")
        facts = {key: item for key, item in result.items() if key not in ("spearman", "agreement")}
        print(f"{name:28} {'  '.join(columns)}  {facts}", flush=True)

    def dense(self, name: str) -> str:
        """Folder of the `teacher`, or of the `student`."""
        return str(getattr(self.given, name))

    @cached_property
    def reference(self) -> ModelScores:
        """The dense student, measured in this run: others are compared with it."""
        data = [str(path) for path in self.given.data]
        device = self.given.device
        [scores] = tcompress.evaluate([self.given.student], "sts", data, device=device, save=False)
        return scores

    def measured(self, folder: str, runtime: str = "torch") -> Results:
        """Measure a model beside the dense student."""
        options: Results = {"device": self.given.device if runtime == "torch" else "cpu"}
        data = [str(path) for path in self.given.data]
        reference = self.reference.baseline
        [scores] = tcompress.evaluate(
            [folder], "sts", data, baseline=reference, save=False, runtime=(runtime,), **options
        )
        return summary(scores)

    def timed(
        self, folder: str, against: str, size: tuple[int, int], runtime: str = "torch"
    ) -> Results:
        """Time a pass of a model, and of a dense one in turn."""
        options: Results = {"device": self.given.device if runtime == "torch" else "cpu"}
        options |= {"batch": [size[0]], "length": [size[1]], "threads": self.given.threads}
        options |= {"repeats": REPEATS, "runtime": [runtime]}
        # In a process of its own, as of a user: one that has trained keeps memory and threads.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(pace, folder, self.dense(against), options).result()

    def converted(self, name: str, form: Form, **options: Any) -> str:
        """Convert a model, unless that is done; gives its folder."""
        folder = self.given.out / name.replace(" ", "-")

        def work() -> Results:
            if not folder.exists():
                tcompress.convert(
                    self.dense(form.dense),
                    output=folder,
                    calibration={"source": self.texts[False], "samples": form.samples},
                    device=self.given.device,
                    **form.options or {},
                    **options,
                )
            manifest = read_manifest(folder)
            assert manifest is not None  # it was just written
            return {"kept": manifest.plan.kept, "parameters": manifest.plan.parameters}

        self.once(f"{name}, converted in", work)
        return str(folder)

    def as_fast(self, form: Form) -> str:
        """Convert the teacher to the student's speed, or to the one that is asked for.

        What conversions time is not what a finished model takes, so another speed is asked for
        where the student's was missed by more than a tenth.
        """
        size = form.size
        assert size is not None
        ask = self.given.speedup
        if ask is None:
            timing = lambda: self.timed(self.dense("student"), "teacher", size)  # noqa: E731
            ask = self.once("student against teacher", timing)["times"]
        ratios: dict[str, float] = {}
        for _ in range(1 if self.given.speedup else TRIES):
            name = f"small {ask:.3g}"
            options = {"speedup": float(f"{ask:.3g}"), "threads": self.given.threads}
            folder = self.converted(name, form, **options)
            timing = lambda at=folder: self.timed(at, form.against, size)  # noqa: E731
            ratios[folder] = self.once(f"{name} against {form.against}", timing)["times"]
            if abs(ratios[folder] - 1) <= CLOSE:
                break
            ask = max(1.05, ask / ratios[folder])
        return min(ratios, key=lambda folder: abs(ratios[folder] - 1))

    def begun(self, name: str) -> str:
        """Folder of a form, converted, measured and timed."""
        form = FORMS[name]
        if form.options is None:
            return self.dense(form.dense)
        if name in self.given.converted:
            folder = self.given.converted[name]
        elif form.against == "student":
            folder = self.as_fast(form)
        else:
            folder = self.converted(name, form)
        self.once(f"{name} as converted", lambda: self.measured(folder))
        return str(folder)

    def trained(self, name: str, row: str, start: str) -> str:
        """Train one row from a folder, unless that is done; gives its folder."""
        way, given = WAYS[name], self.given
        folder = given.out / f"{row.replace(' ', '-')}-trained"

        def work() -> Results:
            steps = given.steps or way.steps
            length = {"steps": steps} if steps else {"minutes": given.minutes}
            rate = {"learning_rate": given.lr} if given.lr else {}
            if not folder.exists():
                tcompress.finetune(
                    start,
                    output=folder,
                    teacher=[self.dense(one) for one in way.teachers],
                    data={
                        "source": self.texts[way.variants],
                        "samples": given.samples,
                        "max_length": given.max_length,
                    },
                    device=given.device,
                    mixed_precision=given.mixed_precision,
                    **length,
                    **rate,
                    **{"batch_size": given.batch_size, **way.options},
                )
            manifest = read_manifest(folder)
            assert manifest is not None  # it was just written
            return learnt(manifest.training[-1])

        self.once(f"{row}, trained in", work)
        return str(folder)

    def run(self, name: str) -> None:
        """Do all of one row."""
        way, row = WAYS[name], f"{self.given.tag}{name}"
        form, size = FORMS[way.form], FORMS[way.form].size
        folder = self.trained(name, row, self.begun(way.form))
        self.once(row, lambda: self.measured(folder))
        if size is not None:
            self.once(
                f"{row} against {form.against}", lambda: self.timed(folder, form.against, size)
            )
        if way.int8:
            self._in_eight_bits(row, folder, form)

    def _in_eight_bits(self, row: str, folder: str, form: Form) -> None:
        exported = f"{folder}-onnx"
        if not Path(exported).exists():
            tcompress.export_onnx(folder, exported, int8=True)
        self.once(f"{row} int8", lambda: self.measured(exported, "onnx-int8"))
        if (size := form.size) is not None:
            label = f"{row} int8 against {form.against}"
            self.once(label, lambda: self.timed(exported, form.against, size, "onnx-int8"))


def _pairs(items: Iterable[str]) -> dict[str, str]:
    return dict(item.split("=", 1) for item in items)


def main() -> None:
    """Trains and measures the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("teacher", help="folder of the teacher, such as all-mpnet-base-v2")
    parser.add_argument("student", help="folder of the dense student, such as all-MiniLM-L6-v2")
    parser.add_argument("out", type=Path, help="folder for all that is written")
    parser.add_argument("--data", nargs="+", type=Path, required=True, help="pairs with scores")
    parser.add_argument("--train", nargs="+", type=Path, required=True, help="parquet or txt")
    parser.add_argument("--only", nargs="+", default=[*WAYS], metavar="ROW", help=", ".join(WAYS))
    parser.add_argument("--speedup", type=float, help="of `small`; default STUDENT's, as measured")
    parser.add_argument(
        "--converted", nargs="+", default=(), metavar="FORM=FOLDER", help=", ".join([*FORMS][1:])
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="of passes that are timed")
    parser.add_argument("--steps", type=int, help="default 300, and 600 of `small`")
    parser.add_argument("--minutes", type=float, default=10.0, help="of rows of lprod")
    parser.add_argument("--samples", type=int, default=200_000, help="texts to train on, at most")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--mixed-precision", default="auto", help="`bf16` is faster on some CPUs")
    parser.add_argument("--lr", type=float, help="default as `finetune` finds it")
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--tag", default="", help="put before names of rows, such as of a rate")
    given = parser.parse_args()
    given.converted = _pairs(given.converted)
    for names, known in ((given.only, WAYS), (given.converted, FORMS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"there is no {unknown}; there are {[*known]}")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    rows = Rows(given, write_texts(given.train, given.data, given.out), results)
    rows.once("student", lambda: summary(rows.reference))
    rows.once("teacher", lambda: rows.measured(given.teacher))
    for name in given.only:
        rows.run(name)
    print(f"torch {torch.__version__}, {given.device}")


if __name__ == "__main__":
    main()
