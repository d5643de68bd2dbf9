"""What may be asked of training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from tcompress.options.fields import NO_FLAG, Device, Section, option

LEARNING, DATA, RUNNING = "What is learnt", "Data", "The run"

TrainingTask = Literal[
    "classification",
    "regression",
    "sts",
    "masked-lm",
    "causal-lm",
    "image-classification",
    "volume-classification",
    "forecasting",
    "response-selection",
]
ObjectiveName = Literal["task", "logits", "hidden", "embedding", "attention"]


class TrainingData(Section):
    """What a model is trained on. Without a task labels are never read."""

    panel = DATA

    source: tuple[str, ...] = option(
        ("builtin",),
        "`builtin`, or txt, csv, jsonl, parquet or npz files, image folders, hub ids",
        "--data",
        metavar="FILE|FOLDER|DATASET",
        complete="data",
        splits=False,
    )
    split: str = option(
        "train", "split of folders and hub datasets, or part of an archive or a series"
    )
    columns: dict[str, str] = option(
        {},
        "columns by role (`text`, `pair`, `image`, `volume`, `shape`, `label`, `score`); guessed "
        "where not given",
        metavar="ROLE=NAME",
    )
    samples: int = option(200_000, "most examples; drawn at random", gt=0)
    max_length: int = option(128, "longest text, in tokens", gt=1)
    validation: str | None = option(
        None,
        "data to validate on; default a share of the training data, of an archive or a series its "
        "own part",
        metavar="FILE|FOLDER|DATASET",
        complete="data",
    )
    validation_split: str = Field(
        "validation", description="split of `validation`", json_schema_extra=NO_FLAG
    )
    holdout: float = Field(
        0.02,
        gt=0,
        lt=0.9,
        description="share of the data kept back where `validation` is not set",
        json_schema_extra=NO_FLAG,
    )
    validation_samples: int = Field(
        1000, gt=0, description="most examples to validate on", json_schema_extra=NO_FLAG
    )


class Finetune(Section):
    """How a model is trained: healed against its teacher, or taught a task."""

    panel = RUNNING

    task: TrainingTask | None = option(
        None,
        "task to learn from labels; without it the model is healed",
        panel=LEARNING,
        metavar="NAME",
    )
    data: TrainingData = Field(TrainingData(), description="training data")
    teacher: str = option(
        "source",
        "model to imitate: `source` (the dense model of the conversion), `none`, a folder, short "
        "name or hub id",
        panel=LEARNING,
        metavar="source|none|MODEL",
    )
    teacher_blocks: tuple[int, ...] = option(
        (),
        "teacher block, from 0, that each block imitates; default one to one, the one that it was "
        "where blocks were dropped, or at equal distances",
        panel=LEARNING,
        metavar="0,2,5",
    )
    objectives: dict[ObjectiveName, Annotated[float, Field(ge=0)]] = option(
        {},
        "weights of the terms of the loss; default by task and teacher",
        "--objective",
        panel=LEARNING,
        metavar="NAME=WEIGHT",
    )
    temperature: float = option(2.0, "softening of the teacher's logits", panel=LEARNING, gt=0)
    stage: Literal["end-to-end", "blocks"] = option(
        "end-to-end",
        "`blocks`: first each block alone, on the teacher's states, then all together",
        panel=LEARNING,
    )
    block_steps: int | None = option(
        None, "steps of the stage `blocks`; default a quarter of all", panel=LEARNING, gt=0
    )
    train: Literal["auto", "rewritten", "blocks", "all"] = option(
        "auto", "parameters to train; `auto`: blocks to heal, all for a task", panel=LEARNING
    )
    steps: int | None = option(
        None, "optimizer steps; default 1,000 to heal, else as `epochs`", gt=0
    )
    epochs: float | None = option(None, "passes over the data; default 3 with a task", gt=0)
    max_minutes: float | None = option(
        None, "longest duration, in minutes; the learning rate warms up and falls within it", gt=0
    )
    batch_size: int = option(64, "examples in a step, in each process", gt=0)
    accumulate: int = option(
        1,
        "pieces that a step's examples are computed in, one after another (gradient "
        "accumulation): less memory, the same result; more where memory runs out",
        gt=0,
    )
    learning_rate: float | None = option(
        None,
        "highest learning rate; default 1e-3 to heal and from random weights, 1e-4 with a task",
        "--lr",
        gt=0,
        le=10,
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine",
        description="course of the learning rate after warming up",
        json_schema_extra=NO_FLAG,
    )
    warmup: float = Field(
        0.1, ge=0, lt=1, description="share of the steps to warm up", json_schema_extra=NO_FLAG
    )
    weight_decay: float = Field(
        0.01, ge=0, description="AdamW's, for matrices only", json_schema_extra=NO_FLAG
    )
    clip: float = Field(
        1.0, gt=0, description="largest norm of the gradient", json_schema_extra=NO_FLAG
    )
    dropout: bool | None = Field(
        None,
        description="whether to drop out; default only where there is no teacher",
        json_schema_extra=NO_FLAG,
    )
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = option(
        "auto", "mixed precision; `auto`: bf16 on GPUs that have it"
    )
    gradient_checkpointing: bool = option(
        False, "compute blocks twice instead of keeping what they compute: less memory, more time"
    )
    evaluate_every: int = option(100, "steps between validations", gt=0)
    checkpoint_every: int = option(200, "steps between checkpoints", gt=0)
    patience: int | None = option(None, "stop after so many validations without a better one", gt=0)
    trackers: tuple[str, ...] = option(
        (), "loggers of accelerate, such as `tensorboard` or `wandb`", "--track", metavar="NAME"
    )
    seed: int = option(0, "seed of the order of examples, new heads and dropout", ge=0, lt=2**32)
    device: Device = "auto"

    @field_validator("objectives")
    @classmethod
    def _check_objectives(cls, weights: dict[ObjectiveName, float]) -> dict[ObjectiveName, float]:
        if weights and not any(weights.values()):
            raise ValueError(
                f"all weights of `objectives` are 0 ({', '.join(weights)}), which teaches nothing: "
                "give one that is greater, or leave `objectives` out"
            )
        return weights
