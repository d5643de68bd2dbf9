"""`tcompress evaluate`."""

from __future__ import annotations

import typer

from tcompress.cli import terminal
from tcompress.errors import InputError
from tcompress.options.commands import Hub, Manner, Measured
from tcompress.options.steps import Evaluate

EXAMPLES = (
    "tcompress evaluate minilm ./small --task sts --data validation.parquet",
    "tcompress evaluate ./small --baseline gpt2 --task perplexity --data a.txt",
    "tcompress evaluate ./tuned --task classification --data nyu-mll/glue:sst2",
)


def evaluate(call: Measured, wanted: Evaluate, hub: Hub, manner: Manner) -> None:
    """Does what `tcompress evaluate` says."""
    from tcompress.evaluation.measuring import evaluate as run
    from tcompress.evaluation.scores import Threshold, document, headline, score_table

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
        terminal.tell(headline(scores))
        terminal.results().print(score_table(scores))
    for name in missed:
        terminal.say(f"{name}: misses the threshold {bound} on `{scores[0].metrics[0].name}`")
    if missed:
        raise typer.Exit(terminal.THRESHOLD)
