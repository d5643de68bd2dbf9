"""What a recipe may say. Unknown keys are errors at every level."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tcompress.recipe.convert import Convert as Convert
from tcompress.recipe.convert import Device as Device
from tcompress.recipe.convert import DType as DType
from tcompress.recipe.methods import AnyMethod, MethodName
from tcompress.recipe.scratch import Architecture, PaperRow
from tcompress.recipe.sections import Calibration as Calibration
from tcompress.recipe.sections import Embeddings as Embeddings
from tcompress.recipe.sections import LayerRule as LayerRule
from tcompress.recipe.sections import Section, refuse_two_sizes

RECIPE_VERSION = 1

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

    source: tuple[str, ...] = Field(
        ("builtin",),
        description="`builtin`, or txt, csv, jsonl, parquet files, image folders, hub ids",
    )
    split: str = Field(
        "train", description="split of folders and hub datasets, or part of an archive or a series"
    )
    columns: dict[str, str] = Field(
        {},
        description="columns by role (`text`, `pair`, `image`, `volume`, `shape`, `label`, "
        "`score`); guessed where not given",
    )
    samples: int = Field(200_000, gt=0, description="most examples; drawn at random")
    max_length: int = Field(128, gt=1, description="longest text, in tokens")
    validation: str | None = Field(
        None,
        description="data to validate on; default a share of the training data, of an archive or "
        "a series its own part",
    )
    validation_split: str = Field("validation", description="split of `validation`")
    holdout: float = Field(
        0.02, gt=0, lt=0.9, description="share of the data kept back where `validation` is not set"
    )
    validation_samples: int = Field(1000, gt=0, description="most examples to validate on")


class Finetune(Section):
    """How a model is trained: healed against its teacher, or taught a task."""

    task: TrainingTask | None = Field(
        None, description="task to learn from labels; without it the model is healed"
    )
    data: TrainingData = Field(TrainingData(), description="training data")
    teacher: str = Field(
        "source",
        description="model to imitate: `source` (the dense model of the conversion), `none`, a "
        "folder, short name or hub id",
    )
    teacher_blocks: tuple[int, ...] = Field(
        (),
        description="teacher block, from 0, that each block imitates; default one to one, the one "
        "that it was where blocks were dropped, or at equal distances",
    )
    objectives: dict[ObjectiveName, Annotated[float, Field(ge=0)]] = Field(
        {}, description="weights of the terms of the loss; default by task and teacher"
    )
    temperature: float = Field(2.0, gt=0, description="softening of the teacher's logits")
    stage: Literal["end-to-end", "blocks"] = Field(
        "end-to-end",
        description="`blocks`: first each block alone, on the teacher's states, then all together",
    )
    block_steps: int | None = Field(
        None, gt=0, description="steps of the stage `blocks`; default a quarter of all"
    )
    train: Literal["auto", "rewritten", "blocks", "all"] = Field(
        "auto", description="parameters to train; `auto`: blocks to heal, all for a task"
    )
    steps: int | None = Field(None, gt=0, description="optimizer steps; default as `epochs`")
    epochs: float | None = Field(None, gt=0, description="passes over the data")
    max_minutes: float | None = Field(
        None,
        gt=0,
        description="longest duration, in minutes; the learning rate warms up and falls within it",
    )
    batch_size: int = Field(64, gt=0, description="examples in a step, in each process")
    accumulate: int = Field(
        1,
        gt=0,
        description="pieces that a step's examples are computed in, one after another "
        "(gradient accumulation): less memory, the same result",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        le=10,
        description="highest learning rate; default 1e-3 to heal and from random weights, 1e-4 "
        "with a task",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="course of the learning rate after warming up"
    )
    warmup: float = Field(0.1, ge=0, lt=1, description="share of the steps to warm up")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's, for matrices only")
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    dropout: bool | None = Field(
        None, description="whether to drop out; default only where there is no teacher"
    )
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = Field(
        "auto", description="`auto`: bf16 on GPUs that have it"
    )
    gradient_checkpointing: bool = Field(
        False, description="compute blocks twice instead of keeping what they compute"
    )
    evaluate_every: int = Field(100, gt=0, description="steps between validations")
    checkpoint_every: int = Field(200, gt=0, description="steps between checkpoints")
    patience: int | None = Field(
        None, gt=0, description="stop after so many validations without a better one"
    )
    trackers: tuple[str, ...] = Field(
        (), description="loggers of accelerate, such as `tensorboard` or `wandb`"
    )
    seed: int = Field(
        0, ge=0, lt=2**32, description="seed of the order of examples, new heads and dropout"
    )
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


EvaluationTask = Literal[
    "classification",
    "sts",
    "perplexity",
    "masked-lm",
    "image-classification",
    "volume-classification",
    "forecasting",
    "retrieval",
    "response-selection",
]


class Evaluate(Section):
    """One measurement of all models of a recipe: the dense one, as converted, as trained."""

    task: EvaluationTask = Field(description="what is measured")
    data: str = Field(description="file, folder or hub id")
    split: str = Field(
        "validation",
        description="split of a folder or hub dataset, or part of an archive or a series",
    )
    columns: dict[str, str] = Field({}, description="columns by role; guessed where not given")
    limit: int | None = Field(None, gt=0, description="most examples, drawn by the seed")
    max_length: int | None = Field(None, gt=1, description="longest text; default by task")
    pack: Literal["eos", "newline", "none"] | None = Field(
        None, description="`perplexity`: how texts are joined; default with the end token"
    )
    candidates: int | None = Field(
        None, gt=1, description="`response-selection`: responses to choose from; default 10"
    )
    batch_size: int | None = Field(
        None, gt=0, description="inputs in a batch; numbers do not depend on it"
    )
    dtype: DType | None = Field(None, description="dtype of the run; default as stored")
    device: Device = "auto"
    seed: int = Field(0, ge=0, lt=2**32, description="seed of all draws")
    bootstrap: int = Field(1000, ge=0, le=10**6, description="resamples for intervals; 0 for none")
    threshold: str | None = Field(
        None, description="worst allowed number, or share of the dense model's such as `0.95x`"
    )

    @model_validator(mode="after")
    def _check_options(self) -> Evaluate:
        for option, task in (("pack", "perplexity"), ("candidates", "response-selection")):
            if getattr(self, option) is not None and self.task != task:
                raise ValueError(f"`{option}` belongs to the task `{task}`, not to `{self.task}`")
        return self


class Bench(Section):
    """Time of a forward pass beside the dense model's."""

    batch: tuple[int, ...] = Field((1, 8, 32), description="sizes of batches")
    length: tuple[int, ...] = Field((), description="tokens in a sequence; default 32 and 128")
    mode: tuple[Literal["eager", "compiled"], ...] = Field(("eager",), description="how to run")
    repeats: int = Field(7, gt=0, le=10**6, description="timed passes; medians count")
    threads: int | None = Field(
        None, gt=0, le=4096, description="threads on a CPU; default PyTorch's"
    )
    keep_weights: bool = Field(
        False, description="whether converted layers keep a dense weight; for eager passes only"
    )
    dtype: DType | None = Field(None, description="dtype of both; default as the dense is stored")
    device: Device = "auto"


class Sweep(Section):
    """Cells to compare: this recipe with each method and each target in place of its own."""

    methods: tuple[AnyMethod | MethodName, ...] = Field(
        (),
        description="methods: a name alone takes options that suit the target; default "
        "`convert.method`",
    )
    targets: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (0.5, 0.25),
        min_length=1,
        description="kept fractions of the rewritten layers' parameters",
    )
    keep_models: bool = Field(
        True, description="whether models are kept once they are measured; numbers always are"
    )


class Recipe(Section):
    """A whole recipe."""

    recipe_version: Literal[1] = Field(description="version of this schema")
    name: str | None = Field(None, description="short name")
    description: str | None = Field(None, description="what the recipe reaches, and on what")
    model: str | None = Field(None, description="folder, short name or hub id of the source model")
    architecture: Architecture | None = Field(
        None, description="in place of `model`, with `init: random`: the model's configuration"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    output: str | None = Field(None, description="folder to write")
    convert: Convert = Field(description="how to convert")
    finetune: Finetune | None = Field(None, description="how to train what was converted")
    evaluate: tuple[Evaluate, ...] = Field((), description="what to measure in the end")
    bench: Bench | None = Field(None, description="how to time in the end")
    sweep: Sweep | None = Field(None, description="methods and targets to compare")
    report: str | None = Field(None, description="HTML file to write in the end")
    paper: tuple[PaperRow, ...] = Field((), description="published numbers, to show beside ours")
    variants: dict[str, dict[str, Any]] = Field(
        {}, description="other ways to run it, by name: changes such as `finetune.steps: 20`"
    )

    @model_validator(mode="after")
    def _check_architecture(self) -> Recipe:
        if self.sweep is not None and self.convert.init == "random":
            raise ValueError(
                "`sweep` compares conversions of one trained model: with `init: random` run one "
                "recipe for each method"
            )
        if self.sweep is not None:
            for method in self.sweep.methods or (self.convert.method,):
                refuse_two_sizes(None if isinstance(method, str) else method, "sweep.targets")
        if self.architecture is None:
            return self
        if self.model is not None:
            raise ValueError("`model` and `architecture` are both given; allowed is one")
        if self.convert.init != "random":
            raise ValueError(
                "`architecture` describes a model without weights: it needs `convert.init: random`"
            )
        return self
