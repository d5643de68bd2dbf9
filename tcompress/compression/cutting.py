"""The conversion whose file reaches a goal."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tcompress import files, processes
from tcompress.artifact.manifest import read_manifest
from tcompress.compression.attempts import Ask, Attempt, Goal, Measured, best, next_ask
from tcompress.compression.forecast import bytes_of_weights, reason_of, smaller_ways
from tcompress.compression.working import Job, Work
from tcompress.errors import PlanError
from tcompress.options import Convert
from tcompress.options.choose import conversion
from tcompress.options.method_options import NARROWING
from tcompress.search.search import Statistics

ATTEMPTS = 3
CUTTING = 0.5
"""Share of the time after which no further conversion is tried."""
CONVERTED, EXPORTED = "converted", "exported"
"""Beginnings of the names of a conversion's folder, and of that with its files."""


def converted(work: Work) -> Path:
    """The conversion that meets the goal; the dense model itself where its file does."""
    for note in work.place.notes("converted"):  # and measured, before a run was stopped
        return work.original if note["number"] is None else _attempt(work, note["number"])
    dense = work.measured(work.dense)
    work.say(f"dense in {work.runtime}: {_words(dense)}")
    goal, ask = work.goal, Ask()
    if goal != Goal():
        first = Ask.first(goal, dense, bytes_of_weights(work.source, work.runtime))
        if first is None and work.settings.vocab is None:
            work.say("The dense model reaches the goal in this runtime: nothing is cut.")
            work.place.note("converted", number=None)
            return work.original
        ask = first or ask
    attempts = _attempts(work, ask, dense)
    number = best(goal, attempts)
    work.place.note("converted", number=number)
    return _attempt(work, number)


def _attempt(work: Work, number: int) -> Path:
    return work.place.folder / f"{CONVERTED}-{number}"


def _attempts(work: Work, ask: Ask, dense: Measured) -> list[Attempt]:
    """Convert and measure until the goal is met, or tries or time are spent."""
    attempts: list[Attempt] = []
    following: Ask | None = ask
    with tempfile.TemporaryDirectory(dir=work.place.folder, prefix="statistics-") as scratch:
        statistics = Statistics(Path(scratch))
        while following is not None and len(attempts) < ATTEMPTS:
            number, asked = len(attempts), asdict(following)
            folder, name = _attempt(work, number), f"{EXPORTED}-{number}"
            done = {note["number"]: note["ask"] for note in work.place.notes("attempt")}
            if done.get(number) != asked or read_manifest(folder) is None:
                try:
                    with work.timed("Converting"):
                        _convert(work, following, folder, statistics)
                except PlanError as error:
                    if attempts:
                        break
                    raise _out_of_reach(work, following, error) from error
                files.remove(work.place.folder / name)
                work.place.note("attempt", number=number, ask=asked)
            label = "what was converted"
            found = work.measured(work.exported(folder, name, label))
            work.say(f"converted: {_words(found)}")
            if (manifest := read_manifest(folder)) is not None:
                work.learn_agreement(manifest.calibration.agreement.values())
            attempts.append((following, found))
            following = next_ask(work.goal, dense, attempts)
            if work.minutes_left < (1 - CUTTING) * work.settings.most_minutes:
                break
    return attempts


def _convert(work: Work, ask: Ask, folder: Path, statistics: Statistics) -> None:
    settings = _options(work, ask)
    # Only speeds of one recipe share what they measure, in one process.
    shares = settings.target_bytes is None and settings.speedup and not processes.is_launched()
    work.crew.do(Job(settings, folder, statistics=statistics if shares else None))


def _out_of_reach(work: Work, ask: Ask, error: PlanError) -> PlanError:
    """Say what a goal comes to for a conversion that cannot meet it."""
    asked = [f"{ask.speedup:.2f} x in PyTorch"] if ask.speedup else []
    asked += [f"{ask.bytes / 1e6:.2f} MB of weights"] if ask.bytes else []
    reason = reason_of(error)
    text = f"the goal asks for {' and '.join(asked)}, which is out of reach: {reason}"
    return PlanError(text if asked else error.message, smaller_ways(work.source, work.settings))


def _options(work: Work, ask: Ask) -> Convert:
    """Options of a conversion for a speed in PyTorch and bytes of weights."""
    goal = work.settings
    calibration: dict[str, Any] = {"seed": goal.seed}
    if goal.data:
        calibration["source"] = list(goal.data)
    if work.effort.samples is not None:
        calibration["samples"] = work.effort.samples
    said: dict[str, Any] = {"method": {"name": NARROWING}, "calibration": calibration}
    if ask.speedup is not None:
        said |= {"speedup": round(ask.speedup, 3), "at": goal.at, "threads": goal.threads}
        said |= {"device": "cpu"}
    if ask.bytes is not None:
        # What becomes of the word embedding is chosen with the sizes of layers.
        said |= {"target_bytes": ask.bytes, "bits": None if work.runtime == "torch" else 8}
    if ask == Ask():
        if work.goal == Goal():
            said["max_loss"] = goal.max_loss or 0.01
        else:  # nothing to do but what was asked for by name
            del said["method"]
    said["vocab"] = goal.vocab
    return conversion({name: value for name, value in said.items() if value is not None})


def _words(found: Measured) -> str:
    return f"{found.bytes / 1e6:.1f} MB, {found.speedup:.2f} x as fast as PyTorch"
