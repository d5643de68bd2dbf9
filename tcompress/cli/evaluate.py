"""`tcompress evaluate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tcompress.cli import complete
from tcompress.cli import options as opt
from tcompress.cli.errors import THRESHOLD
from tcompress.errors import InputError

EPILOG = opt.examples(
    "tcompress evaluate minilm ./small --task sts --data validation.parquet",
    "tcompress evaluate ./small --baseline gpt2 --task perplexity --data a.txt",
    "tcompress evaluate ./tuned --task classification --data nyu-mll/glue:sst2",
)

DATA, MEASUREMENT = "Data", "Measurement"

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        show_default=False,
        help="Converted or dense models: folders, short names or hub ids.",
        autocompletion=complete.models,
    ),
]
Task = Annotated[
    str,
    typer.Option(
        "--task",
        metavar="NAME",
        show_default=False,
        help="`classification`, `sts`, `perplexity`, `masked-lm`, `image-classification`, "
        "`volume-classification`, `forecasting`, `retrieval` or `response-selection`.",
        rich_help_panel=DATA,
        autocompletion=complete.tasks,
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="FILE|FOLDER|DATASET",
        show_default=False,
        help="csv, jsonl, parquet, txt or npz file, a folder, or a hub id; `id:config` selects a "
        "configuration.",
        rich_help_panel=DATA,
        autocompletion=complete.data,
    ),
]
Split = Annotated[
    str,
    typer.Option(
        help="Split of a folder, hub data set or npz file, or part of a series.",
        rich_help_panel=DATA,
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=NAME",
        help="Columns that are not guessed, such as `text=review,label=stars`. Roles: `text`, "
        "`pair`, `image`, `volume`, `shape`, `label`, `score`.",
        rich_help_panel=DATA,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, max=10**9, help="Most examples, drawn at random.", rich_help_panel=DATA),
]
Pack = Annotated[
    str | None,
    typer.Option(
        metavar="eos|newline|none",
        help="perplexity: join texts with the end token (default) or newlines, or not at all.",
        rich_help_panel=MEASUREMENT,
    ),
]
Candidates = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=10**6,
        help="response-selection: responses to choose from. Default 10.",
        rich_help_panel=MEASUREMENT,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10**6,
        help="Inputs in a batch; numbers do not depend on it.",
        rich_help_panel=MEASUREMENT,
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10**6,
        help="Longest text in tokens. Default by task.",
        rich_help_panel=MEASUREMENT,
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="`float32`, `float16` or `bfloat16`. Default: as each model is stored.",
        rich_help_panel=MEASUREMENT,
        autocompletion=complete.dtypes,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        help="`auto`, `cpu`, `cuda`, `cuda:1` or `mps`.",
        rich_help_panel=MEASUREMENT,
        autocompletion=complete.devices,
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**32 - 1, help="Seed of all draws.", rich_help_panel=MEASUREMENT)
]
Bootstrap = Annotated[
    int,
    typer.Option(
        min=0,
        max=10**6,
        help="Resamples for 95 % intervals; 0 for none.",
        rich_help_panel=MEASUREMENT,
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Model to compare with. Default: the first one.",
        rich_help_panel=MEASUREMENT,
        autocompletion=complete.models,
    ),
]
ThresholdText = Annotated[
    str | None,
    typer.Option(
        "--threshold",
        metavar="NUMBER|FACTORx",
        help="Exit with 3 if a model's main number is worse than this, or (`0.95x`) than this "
        "multiple of the baseline's.",
        rich_help_panel=MEASUREMENT,
    ),
]
NoSave = Annotated[
    bool,
    typer.Option(
        "--no-save", help="Leave the manifests of converted models.", rich_help_panel=opt.REPORT
    ),
]


def evaluate(
    models: Models,
    task: Task,
    data: Data,
    split: Split = "validation",
    columns: Columns = None,
    limit: Limit = None,
    baseline: Baseline = None,
    max_length: MaxLength = None,
    batch_size: BatchSize = None,
    dtype: DType = None,
    device: Device = "auto",
    seed: Seed = 0,
    bootstrap: Bootstrap = 1000,
    threshold: ThresholdText = None,
    pack: Pack = None,
    candidates: Candidates = None,
    token: opt.Token = None,
    allow_remote_code: opt.AllowRemoteCode = False,
    no_save: NoSave = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Measure models on the same examples, with intervals and paired differences."""
    from tcompress.cli.output import silence_libraries
    from tcompress.cli.progress import shown_progress

    silence_libraries(verbose=verbose, downloads=not quiet)
    from transformers.utils import logging

    from tcompress.evaluation.run import evaluate as run
    from tcompress.evaluation.threshold import Threshold

    if not verbose:
        logging.disable_progress_bar()  # of loading weights; downloads keep theirs
    bound = Threshold.parse(threshold) if threshold is not None else None
    if bound and bound.relative and not {*models} - {baseline or models[0]}:
        raise InputError(
            f"`--threshold {threshold}` compares with a baseline, but there is one model",
            "name a `--baseline`, or give a plain number",
        )
    with shown_progress(quiet=quiet) as progress:
        scores = run(
            models,
            task,
            data,
            split=split,
            columns=_by_role(columns or []),
            limit=limit,
            batch_size=batch_size,
            max_length=max_length,
            baseline=baseline,
            dtype=dtype,
            device=device,
            seed=seed,
            bootstrap=bootstrap,
            save=not no_save,
            options={"pack": pack, "candidates": candidates},
            token=token,
            trust_remote_code=allow_remote_code,
            progress=progress,
        )
    missed = [item.name for item in scores if bound and bound.missed(item.metrics[0])]
    _show(scores, str(bound) if bound else None, missed, json=json, tell_stored=verbose)
    if missed:
        raise typer.Exit(THRESHOLD)


def _show(
    scores: Any, threshold: str | None, missed: list[str], *, json: bool, tell_stored: bool
) -> None:
    from tcompress.cli.output import print_json, results, say
    from tcompress.evaluation.console import headline, score_table
    from tcompress.evaluation.scores import document

    for item in scores:
        for note in item.notes:
            say(f"warning: {item.name}: {note}")
        if tell_stored and not item.stored:
            say(f"{item.name}: its numbers were not stored")
    if json:
        print_json({**document(scores), "threshold": threshold, "missed": missed})
    else:
        results().print(headline(scores), soft_wrap=True)
        results().print(score_table(scores))
    for name in missed:
        say(f"{name}: misses the threshold {threshold} on `{scores[0].metrics[0].name}`")


def _by_role(columns: list[str]) -> dict[str, str]:
    found = {}
    for item in ",".join(columns).split(",") if columns else []:
        role, equals, name = item.partition("=")
        if not equals or not role.strip() or not name.strip():
            raise InputError(
                f"`--columns {item}` is not of the form ROLE=NAME",
                "write, for example, `--columns text=review,label=stars`",
            )
        found[role.strip()] = name.strip()
    return found
