"""Options of `tcompress finetune`: names, help, panels, completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcompress.cli import complete
from tcompress.cli import options as opt

LEARNING, DATA, RUNNING = "What is learnt", "Data", "The run"

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="Folder that `tcompress convert` wrote, or any other model.",
        autocompletion=complete.models,
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="`classification`, `regression`, `sts`, `masked-lm`, `causal-lm`, "
        "`image-classification`, `volume-classification`, `forecasting` or `response-selection`. "
        "Without it the model is healed, and labels are not read.",
        rich_help_panel=LEARNING,
        autocompletion=complete.training_tasks,
    ),
]
Teacher = Annotated[
    str | None,
    typer.Option(
        metavar="source|none|MODEL",
        help="Model to imitate. Default: the dense model of the conversion.",
        rich_help_panel=LEARNING,
    ),
]
TeacherBlocks = Annotated[
    str | None,
    typer.Option(
        metavar="0,2,5",
        help="Teacher's block, from 0, that each block imitates, where there are fewer.",
        rich_help_panel=LEARNING,
    ),
]
Objective = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=WEIGHT",
        help="Terms of the loss: `task`, `logits`, `hidden`, `embedding`, `attention`. Repeatable, "
        "or with commas between. In recipes `objectives`.",
        rich_help_panel=LEARNING,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Softening of the teacher's logits.", rich_help_panel=LEARNING),
]
Stage = Annotated[
    str | None,
    typer.Option(
        metavar="end-to-end|blocks",
        help="`blocks`: first each block alone, on the teacher's states, then all together. "
        "Default: end-to-end at once.",
        rich_help_panel=LEARNING,
    ),
]
BlockSteps = Annotated[
    int | None,
    typer.Option(
        help="Steps of `--stage blocks`. Default: a quarter of all.",
        rich_help_panel=LEARNING,
    ),
]
Train = Annotated[
    str | None,
    typer.Option(
        metavar="rewritten|blocks|all",
        help="Parameters to train. Default: blocks to heal, all for a task.",
        rich_help_panel=LEARNING,
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE|FOLDER|DATASET",
        help="txt, csv, jsonl, parquet or npz files, image folders or hub ids; repeatable. "
        "Default: text that ships.",
        rich_help_panel=DATA,
    ),
]
Split = Annotated[
    str | None, typer.Option(help="Split of folders and hub datasets.", rich_help_panel=DATA)
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=NAME",
        help="Columns by role: `text`, `pair`, `image`, `volume`, `shape`, `label`, `score`. "
        "Guessed where not given.",
        rich_help_panel=DATA,
    ),
]
Samples = Annotated[
    int | None, typer.Option(help="Most examples. Default: 200,000.", rich_help_panel=DATA)
]
MaxLength = Annotated[
    int | None, typer.Option(help="Longest text, in tokens. Default: 128.", rich_help_panel=DATA)
]
Validation = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|FOLDER|DATASET",
        help="Data to validate on. Default: a share of the training data; of a series or an "
        "archive, its own part.",
        rich_help_panel=DATA,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Optimizer steps. Default: 1,000 to heal, else as `--epochs`.",
        show_default=False,
        rich_help_panel=RUNNING,
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option(help="Passes over the data. Default: 3 with a task.", rich_help_panel=RUNNING),
]
MaxMinutes = Annotated[
    float | None,
    typer.Option(
        help="Longest duration; the learning rate warms up and falls within it.",
        rich_help_panel=RUNNING,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Examples in a step, in each process. Default: 64.", rich_help_panel=RUNNING),
]
Accumulate = Annotated[
    int | None,
    typer.Option(
        help="Pieces that a step's examples are computed in, one after another: less memory, the "
        "same result. Default: 1, and more where memory runs out.",
        rich_help_panel=RUNNING,
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        "--lr",
        help="Highest learning rate. Default: 1e-3 to heal and from scratch, 1e-4 with a task. "
        "In recipes `learning_rate`.",
        rich_help_panel=RUNNING,
    ),
]
EvaluateEvery = Annotated[
    int | None,
    typer.Option(help="Steps between validations. Default: 100.", rich_help_panel=RUNNING),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(help="Steps between checkpoints. Default: 200.", rich_help_panel=RUNNING),
]
Patience = Annotated[
    int | None,
    typer.Option(
        help="Stop after so many validations without a better one.", rich_help_panel=RUNNING
    ),
]
MixedPrecision = Annotated[
    str | None,
    typer.Option(metavar="auto|no|fp16|bf16", help="Mixed precision.", rich_help_panel=RUNNING),
]
GradientCheckpointing = Annotated[
    bool,
    typer.Option(
        "--gradient-checkpointing",
        help="Less memory, more time: compute blocks twice.",
        rich_help_panel=RUNNING,
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Loggers of accelerate, such as `tensorboard`; repeatable. In recipes `trackers`.",
        rich_help_panel=RUNNING,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed.", rich_help_panel=RUNNING)]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="`auto`, `cpu`, `cuda`, `cuda:1` or `mps`.",
        rich_help_panel=RUNNING,
        autocompletion=complete.devices,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        help="Folder to write. Default: the model's name and `-healed`, or the task.",
        rich_help_panel=opt.OUTPUT,
        autocompletion=complete.folders,
    ),
]
