"""What a recipe may say. Unknown keys are errors at every level."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tcompress.recipe.attention import AttentionSpec
from tcompress.recipe.budget import Budget, Bytes, Parameters, bytes_of, parameters_of
from tcompress.recipe.methods import AnyMethod, AutoSpec, MethodName, NamedMethod
from tcompress.recipe.sections import BUDGETS, Section, tol_of
from tcompress.recipe.sections import Calibration as Calibration
from tcompress.recipe.sections import Embeddings as Embeddings
from tcompress.recipe.sections import LayerRule as LayerRule
from tcompress.structures import Spec

RECIPE_VERSION = 1

DType = Literal["float32", "float16", "bfloat16"]


BlockIndex = Annotated[int, Field(ge=0)]
BlockCount = Annotated[int, Field(gt=0)]


class Convert(Section):
    """How a model is rewritten: structured layers, another attention, fewer blocks."""

    method: NamedMethod | None = Field(
        None,
        description="structure of the rewritten layers, or `auto`, which chooses one for each; "
        "without one their weights stay dense",
    )
    attention: AttentionSpec | None = Field(
        None, description="mechanism that mixes tokens; default the model's own"
    )
    attention_layers: tuple[BlockIndex, ...] | None = Field(
        None,
        description="blocks whose attention is exchanged, from 0, in every stack; default all",
    )
    keep_layers: tuple[BlockIndex, ...] | dict[str, tuple[BlockIndex, ...]] | None = Field(
        None,
        description="blocks that stay, from 0, such as `[1, 3, 5]`; by stack where there are "
        "several, such as `{decoder: [0, 2]}`",
    )
    drop_layers: BlockCount | Literal["auto"] | dict[str, BlockCount] | None = Field(
        None,
        description="number of blocks to drop, those whose loss changes the model least on "
        "calibration data; by stack where there are several; `auto`: as many as serve the budget "
        "best, which then counts dropped layers too",
    )
    target: float | None = Field(
        None, gt=0, lt=1, description="kept fraction of the rewritten layers' parameters"
    )
    target_params: Parameters | None = Field(
        None, description="most parameters of the whole model, such as `30M`, in place of `target`"
    )
    target_bytes: Bytes | None = Field(
        None,
        description="most bytes of the weights on disk, such as `60MB`, in place of `target`; "
        "headers of files, some kilobytes, come on top",
    )
    max_error: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="in place of `target`: largest predicted error of the rewritten layers' "
        "outputs, squared, weighed by what they are worth to the model and summed over layers, "
        "relative to that of leaving all of them out; without data of the weights alone",
    )
    allocation: Literal["loss", "uniform"] = Field(
        "loss",
        description="how a budget is shared out: by the predicted loss that parameters save, or "
        "the same fraction for all layers; without calibration data always the latter, but by "
        "`auto` and `max_error`",
    )
    residual_rank: int = Field(
        0,
        ge=0,
        description="rank of a low-rank term added to the structure; 0 leaves it to the budget",
    )
    keep: tuple[str, ...] = Field((), description="layers left dense, as in `layers[].match`")
    only: tuple[str, ...] = Field(
        (), description="layers to rewrite, as in `layers[].match`; default all"
    )
    layers: tuple[LayerRule, ...] = Field((), description="exceptions by layer")
    embeddings: Embeddings | None = Field(
        None, description="how the word embedding is rewritten; left as it is by default"
    )
    calibration: Calibration = Field(Calibration(), description="calibration data")
    dtype: DType | None = Field(None, description="dtype of the output; default as the source")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|mps|xpu|cuda(:\d+)?)$",
        description="`auto`, `cpu`, `cuda`, `cuda:1` or `mps`",
    )
    max_shard_size: str = Field(
        "2GB", pattern=r"^\d+(\.\d+)?[KMG]i?B$", description="largest weight file of the output"
    )

    @model_validator(mode="after")
    def _check_depth(self) -> Convert:
        if self.keep_layers is not None and self.drop_layers is not None:
            raise ValueError("`keep_layers` and `drop_layers` are both given; allowed is one")
        if self.attention_layers is not None and self.attention is None:
            raise ValueError("`attention_layers` needs `attention`, since it is about mechanisms")
        if self.method is None:
            if not (self.cuts or self.embeddings or self.attention):
                raise ValueError(
                    "there is nothing to do: give `method`, `attention`, or `keep_layers`"
                )
            alone = (*BUDGETS, "residual_rank", "keep", "only", "layers")
            given = [f"`{name}`" for name in alone if getattr(self, name)]
            if given:
                raise ValueError(f"{', '.join(given)} needs a `method`, since it is about layers")
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> Convert:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if tol_of(self.method) is not None:
            given.append("tol")
        if len(given) > 1:
            names = " and ".join(f"`{name}`" for name in given)
            raise ValueError(f"{names} are given together; allowed is one of them")
        for name, parse in (("target_params", parameters_of), ("target_bytes", bytes_of)):
            value = getattr(self, name)
            if value is not None and parse(value) < 1:
                raise ValueError(f"`{name}` is `{value}`, allowed is 1 or more")
        if any(tol_of(rule.method) is not None for rule in self.layers):
            raise ValueError("`tol` is for all layers; rules in `layers` take a `rank` or `target`")
        if self.max_error is not None and self.method is not None and self.method.pools:
            raise ValueError(
                "`max_error` sizes layers one by one, which banks cannot: give a target instead"
            )
        sizes = ("target", "target_params", "target_bytes")
        if self.weighs_depth and (self.method is None or not any(map(given.count, sizes))):
            raise ValueError(
                "`drop_layers: auto` shares a budget between blocks and layers: give a `method` "
                "and a `target`, `target_params` or `target_bytes`"
            )
        if self.weighs_depth and self.calibration.source == "none":
            raise ValueError("`drop_layers: auto` measures on data: choose a calibration source")
        if isinstance(self.method, AutoSpec) and self.residual_rank:
            raise ValueError("`residual_rank` is chosen by `auto` itself: leave it out")
        return self

    @property
    def cuts(self) -> bool:
        """Whether blocks are dropped."""
        return self.keep_layers is not None or self.drop_layers is not None

    @property
    def weighs_depth(self) -> bool:
        """Whether the number of dropped blocks is chosen too, under the budget."""
        return self.drop_layers == "auto"

    @property
    def label(self) -> str:
        """What is done, for people: mechanism, method, `depth`, `embeddings`, or several."""
        words = [part.name for part in (self.attention, self.method) if part is not None]
        words += ["depth"] if self.cuts else []
        return " + ".join([*words, *(["embeddings"] if self.embeddings else [])])

    @property
    def within_blocks(self) -> Convert:
        """The same without dropping blocks: what is done to a model that was cut already."""
        return self.model_copy(update={"keep_layers": None, "drop_layers": None})

    @property
    def without_method(self) -> Convert:
        """The same with all layers dense."""
        none = {"method": None, "residual_rank": 0, "keep": (), "only": (), "layers": ()}
        return self.model_copy(update={**none, **dict.fromkeys(BUDGETS, None)})

    @property
    def budget(self) -> Budget | None:
        """What limits the size, or the error, if anything does."""
        if self.target_params is not None:
            return Budget("target_params", parameters_of(self.target_params))
        if self.target_bytes is not None:
            return Budget("target_bytes", bytes_of(self.target_bytes))
        if self.max_error is not None:
            return Budget("max_error", self.max_error)
        tol = tol_of(self.method)
        if tol is not None:
            return Budget("tol", tol)
        return None if self.target is None else Budget("target", self.target)

    def at(self, target: float | None, method: Spec | None = None) -> Convert:
        """The same with a kept fraction in place of any other budget.

        Args:
            target: The fraction.
            method: Another method, if any.
        """
        own = method or self.method
        if own is not None and tol_of(own) is not None:
            own = own.model_copy(update={"tol": None})
        others = dict.fromkeys(BUDGETS, None)
        return self.model_copy(update={**others, "target": target, "method": own})

    @property
    def by_loss(self) -> bool:
        """Whether sizes, or structures, follow predicted loss."""
        if self.budget is None or self.method is None or self.method.pools:
            return False
        return self._only_predicted or self._asks_for_loss

    @property
    def _only_predicted(self) -> bool:
        """Whether nothing but a prediction can tell what layers become."""
        limits_error = self.budget is not None and not self.budget.is_size
        return limits_error or isinstance(self.method, AutoSpec)

    @property
    def _asks_for_loss(self) -> bool:
        asked = self.budget is not None and (self._only_predicted or self.allocation == "loss")
        return asked and self.calibration.source != "none"

    @property
    def surveys(self) -> bool:
        """Whether a conversion begins with a backward pass over the calibration data."""
        if self.calibration.source == "none":
            return False
        weighs = self.calibration.output_moments
        return self.by_loss or (self._asks_for_loss if weighs is None else weighs)


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
    objectives: dict[ObjectiveName, float] = Field(
        {}, description="weights of the terms of the loss; default by task and teacher"
    )
    temperature: float = Field(2.0, gt=0, description="softening of the teacher's logits")
    block_steps: int = Field(
        0,
        ge=0,
        description="first steps in which each block is trained alone, on the teacher's states",
    )
    train: Literal["auto", "rewritten", "blocks", "all"] = Field(
        "auto", description="parameters to train; `auto`: blocks to heal, all for a task"
    )
    steps: int | None = Field(None, gt=0, description="optimizer steps; default as `epochs`")
    epochs: float | None = Field(None, gt=0, description="passes over the data")
    max_minutes: float | None = Field(None, gt=0, description="longest duration, in minutes")
    batch_size: int = Field(64, gt=0, description="examples in a step, in each process")
    learning_rate: float | None = Field(
        None, gt=0, description="highest learning rate; default 1e-3 to heal, 1e-4 with a task"
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
    seed: int = Field(0, ge=0, description="seed of the order of examples, new heads and dropout")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|mps|xpu|cuda(:\d+)?)$",
        description="`auto`, `cpu`, `cuda`, `cuda:1` or `mps`",
    )


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
    bootstrap: int = Field(1000, ge=0, description="resamples for intervals; 0 for none")
    threshold: str | None = Field(
        None, description="worst allowed number, or share of the dense model's such as `0.95x`"
    )


class Bench(Section):
    """Time of a forward pass beside the dense model's."""

    batch: tuple[int, ...] = Field((1, 8, 32), description="sizes of batches")
    length: tuple[int, ...] = Field((), description="tokens in a sequence; default 32 and 128")
    mode: tuple[Literal["eager", "compiled"], ...] = Field(("eager",), description="how to run")
    repeats: int = Field(7, gt=0, description="timed passes; medians count")


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
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    output: str | None = Field(None, description="folder to write")
    convert: Convert = Field(description="how to convert")
    finetune: Finetune | None = Field(None, description="how to train what was converted")
    evaluate: tuple[Evaluate, ...] = Field((), description="what to measure in the end")
    bench: Bench | None = Field(None, description="how to time in the end")
    sweep: Sweep | None = Field(None, description="methods and targets to compare")
    report: str | None = Field(None, description="HTML file to write in the end")
