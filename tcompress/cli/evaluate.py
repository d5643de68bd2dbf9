"""`tcompress evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from tcompress.cli import terminal
from tcompress.errors import InputError
from tcompress.options.commands import Hub, Manner, Measured
from tcompress.options.steps import Evaluate

if TYPE_CHECKING:
    from rich.table import Table

    from tcompress.artifact.manifest import Interval
    from tcompress.evaluation.scores import ModelScores

EXAMPLES = (
    "tcompress evaluate minilm ./small --task sts --data validation.parquet",
    "tcompress evaluate ./small --baseline gpt2 --task perplexity --data a.txt",
    "tcompress evaluate ./tuned --task classification --data nyu-mll/glue:sst2",
)


def evaluate(call: Measured, wanted: Evaluate, hub: Hub, manner: Manner) -> None:
    """Does what `tcompress evaluate` says."""
    from tcompress.evaluation.measuring import evaluate as run
    from tcompress.evaluation.scores import Threshold, document

    bound = Threshold.parse(wanted.threshold) if wanted.threshold is not None else None
    if bound and bound.relative and not {*call.models} - {call.baseline or call.models[0]}:
        text = f"`--threshold {wanted.threshold}` compares with a baseline, but there is one model"
        raise InputError(text, "name a `--baseline`, or give a plain number")
    with terminal.shown_progress(quiet=manner.quiet) as progress:
        scores = run(
            call.models,
            wanted,
            baseline=call.baseline,
            save=call.save,
            token=hub.token,
            trust_remote_code=hub.allow_remote_code,
            progress=progress,
        )
    for item in scores:
        for note in item.notes:
            terminal.say(f"warning: {item.name}: {note}")
        if manner.verbose and not item.stored:
            terminal.say(f"{item.name}: its numbers were not stored")
    missed = [item.name for item in scores if bound and bound.missed(item.metrics[0])]
    if manner.as_json:
        threshold = str(bound) if bound else None
        terminal.print_json({**document(scores), "threshold": threshold, "missed": missed})
    else:
        terminal.tell(_headline(scores))
        terminal.results().print(score_table(scores))
    for name in missed:
        terminal.say(f"{name}: misses the threshold {bound} on `{scores[0].metrics[0].name}`")
    if missed:
        raise typer.Exit(terminal.THRESHOLD)


def _headline(scores: Sequence[ModelScores]) -> str:
    """Says in a line what was measured."""
    facts = scores[0].metrics[0].protocol
    length = f", at most {facts['max_length']} tokens" if facts["max_length"] else ""
    dtypes = sorted({item.metrics[0].protocol["dtype"] for item in scores})
    text = (
        f"{facts['task']} on {facts['data']}: {facts['examples']:,} examples{length}, "
        f"{'/'.join(dtypes)} on {facts['device']}"
    )
    if facts["bootstrap"]:
        text += f"; in brackets 95 % intervals of {facts['bootstrap']:,} bootstrap resamples"
    return text


def score_table(scores: Sequence[ModelScores]) -> Table:
    """Makes a table with a row for each number of each model, and of forecasts without one."""
    from tcompress.evaluation.scores import ratio_of

    unit, compared = f"{scores[0].unit}/s", len(scores) > 1
    numbers = ["value", *(["difference", "ratio"] if compared else []), unit]
    table = terminal.table("model", "metric", *numbers, right=numbers)
    ends = [item.name.rstrip("/").rpartition("/")[2] for item in scores]
    # The ends of names, if they tell the models apart.
    labels = ends if len({*ends}) == len(ends) else [item.name for item in scores]
    for label, item in zip(labels, scores, strict=True):
        for index, metric in enumerate(item.metrics):
            cells = [metric.name, f"{_number(metric.value)}{_range(metric.interval)}"]
            if compared:
                found, ratio = metric.difference, ratio_of(metric)
                cells += [
                    f"{_number(found.value, '+')}{_range(found.interval, '+')}" if found else "",
                    "" if ratio is None else f"{ratio:.3f} x",
                ]
            cells.append("" if index else f"{item.per_second:,.1f}")
            table.add_row("" if index else label, *cells)
    for label, values in scores[0].metrics[0].protocol.get("naive", {}).items():
        for index, (name, value) in enumerate(values.items()):
            table.add_row("" if index else f"{label} (no model)", name, _number(value))
    return table


def _range(found: Interval | None, sign: str = "") -> str:
    if found is None:
        return ""
    low, high = (_number(value, sign, fewer=1) for value in (found.low, found.high))
    return f" [{low}, {high}]"


def _number(value: float, sign: str = "", fewer: int = 0) -> str:
    size = abs(value)
    digits = 0 if size >= 1000 else 2 - fewer if size >= 10 else 4 - fewer
    return f"{value:{sign},.{digits}f}"
