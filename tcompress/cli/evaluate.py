"""`tcompress evaluate`."""

from __future__ import annotations

from typing import Any

import typer

from tcompress.cli.terminal import THRESHOLD
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
    from tcompress.cli.terminal import shown_progress, silence_libraries

    silence_libraries(verbose=manner.verbose, downloads=not manner.quiet)
    from transformers.utils import logging

    from tcompress.evaluation.measuring import evaluate as run
    from tcompress.evaluation.scores import Threshold

    if not manner.verbose:
        logging.disable_progress_bar()  # of loading weights; downloads keep theirs
    bound = Threshold.parse(wanted.threshold) if wanted.threshold is not None else None
    if bound and bound.relative and not {*call.models} - {call.baseline or call.models[0]}:
        raise InputError(
            f"`--threshold {wanted.threshold}` compares with a baseline, but there is one model",
            "name a `--baseline`, or give a plain number",
        )
    with shown_progress(quiet=manner.quiet) as progress:
        scores = run(
            call.models,
            wanted,
            baseline=call.baseline,
            save=call.save,
            token=hub.token,
            trust_remote_code=hub.allow_remote_code,
            progress=progress,
        )
    missed = [item.name for item in scores if bound and bound.missed(item.metrics[0])]
    _show(scores, str(bound) if bound else None, missed, manner)
    if missed:
        raise typer.Exit(THRESHOLD)


def _show(scores: Any, threshold: str | None, missed: list[str], manner: Manner) -> None:
    from tcompress.cli.terminal import print_json, results, say
    from tcompress.evaluation.scores import document, headline, score_table

    for item in scores:
        for note in item.notes:
            say(f"warning: {item.name}: {note}")
        if manner.verbose and not item.stored:
            say(f"{item.name}: its numbers were not stored")
    if manner.as_json:
        print_json({**document(scores), "threshold": threshold, "missed": missed})
    else:
        results().print(headline(scores), soft_wrap=True)
        results().print(score_table(scores))
    for name in missed:
        say(f"{name}: misses the threshold {threshold} on `{scores[0].metrics[0].name}`")
