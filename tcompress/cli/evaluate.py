"""`tcompress evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from tcompress.cli import terminal
from tcompress.cli.first_look import first_look, reach
from tcompress.errors import InputError, counted
from tcompress.options.commands import Hub, Manner, Measured, Tables
from tcompress.options.steps import FEW, Evaluate

if TYPE_CHECKING:
    from rich.table import Table

    from tcompress.artifact.manifest import Interval, Metric
    from tcompress.evaluation.scores import ModelScores

EXAMPLES = (
    "tcompress evaluate minilm ./small --task sts --data validation.parquet",
    "tcompress evaluate minilm ./small --task sts --data stsb.csv --data sick.csv",
    "tcompress evaluate ./small --baseline gpt2 --task perplexity --data a.txt",
    "tcompress evaluate minilm ./small --task sts --data a.csv --latex table.tex",
    "tcompress evaluate ./tuned --task classification --data nyu-mll/glue:sst2",
)


def evaluate(call: Measured, wanted: Evaluate, tables: Tables, hub: Hub, manner: Manner) -> None:
    """Does what `tcompress evaluate` says."""
    with first_look() as look:
        look.models(call.baseline, *call.models)
        look.data(wanted.data)
        look.tables(tables)
    reach(call.baseline, *call.models, token=hub.token)
    from tcompress.artifact.averages import main_of
    from tcompress.evaluation.measuring import evaluate as run
    from tcompress.evaluation.scores import Threshold, document
    from tcompress.reporting.table_files import metrics_sheet, metrics_table, write_tables

    bound = Threshold.parse(wanted.threshold) if wanted.threshold is not None else None
    others = {*call.models} - {call.baseline or call.models[0]} or wanted.runtime[1:]
    if bound and bound.relative and not others:
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
    several = len(wanted.data) > 1
    mains = [(item.name, main_of(item.metrics, several=several)) for item in scores]
    missed = {name: main.label for name, main in mains if bound and main and bound.missed(main)}
    first, where = call.baseline or call.models[0], wanted.runtime[0]
    base = first if where == "torch" else f"{first} ({where})"  # which agrees with nothing
    for name, main in mains:
        if bound and main is None and name != base:
            missed[name] = "nothing that both have"
    numbers = [(item.name, [*item.metrics, *item.means]) for item in scores]
    files = write_tables(tables, metrics_sheet(numbers), metrics_table(numbers))
    if manner.as_json:
        threshold = str(bound) if bound else None
        found = {"threshold": threshold, "missed": list(missed)}
        terminal.print_json({**document(scores), **found, **files})
    else:
        terminal.tell(_headline(scores, wanted))
        terminal.results().print(score_table(scores))
        _tell_few(scores)
        terminal.tell_written(files.values())
    for name, label in missed.items():
        terminal.say(f"{name}: misses the threshold {bound} on `{label}`")
    if missed:
        raise typer.Exit(terminal.THRESHOLD)


def _tell_few(scores: Sequence[ModelScores]) -> None:
    """Warns of sets whose numbers, and intervals, say little."""
    for own in (item.protocol for item in scores[0].sets):
        if own["examples"] < FEW:
            terminal.tell(
                f"warning: {own['data']} has {counted(own['examples'], 'example')}: with fewer "
                f"than {FEW} neither numbers nor intervals say much"
            )


def _headline(scores: Sequence[ModelScores], wanted: Evaluate) -> str:
    """Says in a line what was measured, and that its columns were guessed."""
    protocols = [item.protocol for item in scores[0].sets]
    facts = protocols[0]
    sets = [
        f"{own['data']}: {counted(own['examples'], 'example')}"
        + (" without labels, so that only agreement is measured" if "labels" in own else "")
        for own in protocols
    ]
    if not wanted.columns and any(_names_columns(own["data"], wanted.data) for own in protocols):
        sets[-1] += " (columns guessed: `--columns` names others)"
    length = f", at most {facts['max_length']} tokens" if facts["max_length"] else ""
    dtypes = sorted({item.sets[0].protocol["dtype"] for item in scores})
    text = f"{facts['task']} on {'; '.join(sets)}{length}, {'/'.join(dtypes)} on {facts['device']}"
    if facts["bootstrap"]:
        text += f"; in brackets 95 % intervals of {facts['bootstrap']:,} bootstrap resamples"
    return text


def _names_columns(name: str, asked: Sequence[str]) -> bool:
    """Return whether a name of data ends with columns, beyond what was asked for."""
    if ".txt:" in name:  # which has one column
        return False
    return ":" in name and not any(data.endswith(name.rpartition("/")[2]) for data in asked)


def score_table(scores: Sequence[ModelScores]) -> Table:
    """Makes a table with a row for each number of each model, and of forecasts without one.

    Several sets are groups of rows, and their means the last one.
    """
    from tcompress.reporting.formatting import set_names

    compared, sets = len(scores) > 1, scores[0].sets
    numbers = ["value", *(["difference", "ratio"] if compared else []), f"{scores[0].unit}/s"]
    table = terminal.table("model", "metric", *numbers, right=numbers)
    ends = [item.name.rstrip("/").rpartition("/")[2] for item in scores]
    # The ends of names, if they tell the models apart.
    labels = ends if len({*ends}) == len(ends) else [item.name for item in scores]
    labels = labels if len(sets) == 1 else [f"  {label}" for label in labels]
    for index, name in enumerate(set_names([item.protocol["data"] for item in sets])):
        if len(sets) > 1:
            table.add_row(name)
        for label, item in zip(labels, scores, strict=True):
            speed = f"{item.sets[index].per_second:,.1f}"
            _add_rows(table, label, item.sets[index].metrics, speed, compared=compared)
        for label, values in sets[index].protocol.get("naive", {}).items():
            for place, (name, value) in enumerate(values.items()):
                table.add_row("" if place else f"{label} (no model)", name, _number(value))
    if len(sets) > 1:
        table.add_row(f"mean of {len(sets)} sets")
        for label, item in zip(labels, scores, strict=True):
            _add_rows(table, label, item.means, "", compared=compared)
    return table


def _add_rows(
    table: Table, label: str, metrics: Sequence[Metric], speed: str, *, compared: bool
) -> None:
    """Adds the numbers of a model on one set; a baseline without labels has none."""
    if speed and not metrics:
        table.add_row(label, *[""] * (4 if compared else 2), speed)
    for index, metric in enumerate(metrics):
        cells = [metric.name, f"{_number(metric.value)}{_range(metric.interval)}"]
        if compared:
            found, ratio = metric.difference, metric.ratio
            cells += [
                f"{_number(found.value, '+')}{_range(found.interval, '+')}" if found else "",
                "" if ratio is None else f"{ratio:.3f} x",
            ]
        table.add_row("" if index else label, *cells, "" if index else speed)


def _range(found: Interval | None, sign: str = "") -> str:
    if found is None:
        return ""
    low, high = (_number(value, sign, fewer=1) for value in (found.low, found.high))
    return f" [{low}, {high}]"


def _number(value: float, sign: str = "", fewer: int = 0) -> str:
    size = abs(value)
    digits = 0 if size >= 1000 else 2 - fewer if size >= 10 else 4 - fewer
    return f"{value:{sign},.{digits}f}"
