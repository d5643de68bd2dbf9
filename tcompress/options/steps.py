"""What may be asked of training and measurements, and of models that begin at random."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tcompress.errors import listed
from tcompress.fields import DATASET, Device, DType, RuntimeName, Section, Sources, option

LEARNING, DATA, RUNNING = "What is learnt", "Data", "The run"
_COLUMNS = (
    "columns by role (`text`, `pair`, `semantics`, `source`, `target`, `image`, `volume`, `shape`, "
    "`label`, `score`); guessed where not given"
)

TrainingTaskName = Literal[
    "classification", "regression", "sts", "masked-lm", "causal-lm", "image-classification",
    "volume-classification", "forecasting", "response-selection", "seq2seq", "pretraining",
]  # fmt: skip
ObjectiveName = Literal["task", "logits", "hidden", "embedding", "similarities", "attention"]


class TrainingData(Section):
    """Data to train on. Without a task labels are never read."""

    panel = DATA

    source: tuple[str, ...] = option(
        ("builtin",),
        "`builtin`, `teacher` (what a language model writes itself), txt, csv, jsonl, "
        "parquet or npz files, image folders, hub ids",
        "--data",
        splits=False,
        **DATASET,
    )
    weights: tuple[Annotated[float, Field(gt=0)], ...] = option(
        (),
        "how often each of several sources is seen in a pass over the data; default once",
        "--data-weights",
        metavar="2,1,0.5",
    )
    split: str = option(
        "train", "split of folders and hub datasets, or part of an archive or a series"
    )
    columns: dict[str, str] = option({}, _COLUMNS, metavar="ROLE=NAME")
    samples: int = option(200_000, "most examples; drawn at random", gt=0)
    max_length: int = option(128, "longest text, in tokens", gt=1)
    validation: str | None = option(
        None,
        "data to validate on; default a share of the training data, of an archive or a series its "
        "own part",
        **DATASET,
    )
    validation_split: str = option("validation", "split of `validation`", off=True)
    holdout: float = option(
        0.02, "share of the data kept back where `validation` is not set", gt=0, lt=0.9, off=True
    )
    validation_samples: int = option(1000, "most examples to validate on", gt=0, off=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all data, of that to validate on too."""
        return (*self.source, *filter(None, [self.validation]))

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.weights and len(self.weights) != len(self.source):
            raise ValueError(
                f"`weights` are {len(self.weights)} for {len(self.source)} sources of data: give "
                "one for each, or leave `weights` out"
            )
        return self


class Finetune(Section):
    """Training of a model: healed against its teacher, or taught a task."""

    panel = RUNNING

    task: TrainingTaskName | None = option(
        None, "task to learn; without one the model is healed", panel=LEARNING, metavar="NAME"
    )
    data: TrainingData = Field(TrainingData(), description="training data")
    teacher: Sources = option(
        ("source",),
        "model to imitate: `source` (the dense model of the conversion), `none`, a folder, short "
        "name or hub id; of several, the mean of what they say of a text",
        panel=LEARNING,
        metavar="source|none|MODEL",
        splits=False,
        min_length=1,
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
        None, "optimizer steps; default 1,000 or `minutes` to heal, else as `epochs`", gt=0
    )
    epochs: float | None = option(None, "passes over the data; default 3 with a task", gt=0)
    minutes: float | None = option(
        None,
        "minutes for all of the work, of which steps are planned as they are timed: as many as "
        "fit, `steps` or `epochs` at most",
        gt=0,
    )
    batch_size: int = option(64, "examples in a step, in each process", gt=0)
    accumulate: int = option(
        1,
        "pieces that a step's examples are computed in, one after another (gradient "
        "accumulation): less memory, the same result; more where memory runs out",
        gt=0,
    )
    optimizer: Literal["adamw", "muon"] | None = option(
        None,
        "`muon`: orthogonalised momentum for matrices, AdamW for all else; default `muon` to heal, "
        "`adamw` with a task",
    )
    learning_rate: float | None = option(
        None,
        "highest learning rate; default at most 1e-3 to heal, less the closer the model is; 1e-3 "
        "from random weights, 1e-4 with a task",
        "--lr",
        gt=0,
        le=10,
    )
    schedule: Literal["cosine", "linear", "constant"] = option(
        "cosine", "course of the learning rate after warming up", off=True
    )
    warmup: float = option(0.1, "share of the steps to warm up", ge=0, lt=1, off=True)
    weight_decay: float = option(0.01, "for matrices only", ge=0, off=True)
    clip: float = option(1.0, "largest norm of the gradient", gt=0, off=True)
    dropout: bool | None = option(
        None, "whether to drop out; default only where there is no teacher", off=True
    )
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = option(
        "auto", "mixed precision; `auto`: bf16 on GPUs that have it"
    )
    shard: bool = option(
        False,
        "share weights, gradients and the optimizer's state out over the processes (FSDP2), for "
        "models that no device holds whole",
    )
    gradient_checkpointing: bool = option(
        False, "compute blocks twice instead of keeping what they compute: less memory, more time"
    )
    evaluate_every: int = option(100, "steps between validations", gt=0)
    checkpoint_every: int = option(200, "steps between checkpoints", gt=0)
    patience: int | None = option(None, "stop after so many validations without a better one", gt=0)
    bits: Literal[8, 4] | None = option(
        None,
        "bits that weights are stored in when they are written, which training makes up for; "
        "default as the model is stored",
        metavar="8|4",
    )
    embedding_bits: Literal[8, 4, 3] | None = option(
        None, "the same of the word embedding; default `bits`", metavar="8|4|3"
    )
    trackers: tuple[str, ...] = option(
        (), "loggers of accelerate, such as `tensorboard` or `wandb`", "--track", metavar="NAME"
    )
    seed: int = option(0, "seed of the order of examples, new heads and dropout", ge=0, lt=2**32)
    device: Device = "auto"

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        if self.embedding_bits is not None and self.bits is None:
            raise ValueError(
                "`embedding_bits` goes with `bits`: give both, or convert with `--embedding-bits`"
            )
        return self

    @field_validator("teacher")
    @classmethod
    def _check_teachers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(names) > 1 and "none" in names:
            raise ValueError(
                f"`teacher` is {listed(names)}: `none` goes with no other; leave it out, or the "
                "others"
            )
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"`teacher` names {listed(twice)} more than once: name each once")
        return names

    @field_validator("objectives")
    @classmethod
    def _check_objectives(cls, weights: dict[ObjectiveName, float]) -> dict[ObjectiveName, float]:
        if weights and not any(weights.values()):
            raise ValueError(
                f"all weights of `objectives` are 0 ({', '.join(weights)}), which teaches nothing: "
                "give one that is greater, or leave `objectives` out"
            )
        return weights


FEW = 30
"""Fewer examples than this say little, whether they are learnt or measured on."""

MEASUREMENT, MEASURED = "Measurement", "What is measured"

EvaluationTaskName = Literal[
    "classification", "sts", "perplexity", "masked-lm", "image-classification",
    "volume-classification", "forecasting", "retrieval", "response-selection", "seq2seq",
]  # fmt: skip
Bound = Annotated[
    str,
    Field(
        pattern=r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?x?$",
        examples=["0.8", "0.95x"],
    ),
]


class Evaluate(Section):
    """One measurement of all models of a recipe: the dense one, as converted, as trained."""

    panel = MEASUREMENT

    task: EvaluationTaskName = option(..., "what is measured", panel=DATA, metavar="NAME")
    data: Sources = option(
        ...,
        "file (csv, jsonl, parquet, txt or npz), folder or hub id; `id:config` selects a "
        "configuration; several are measured one by one, and their mean",
        panel=DATA,
        splits=False,
        min_length=1,
        **DATASET,
    )
    split: str = option(
        "validation", "split of a folder or dataset, or part of an archive or a series", panel=DATA
    )
    columns: dict[str, str] = option({}, _COLUMNS, panel=DATA, metavar="ROLE=NAME")
    limit: int | None = option(None, "most examples, drawn by the seed", panel=DATA, gt=0, le=10**9)
    max_length: int | None = option(
        None, "longest text, in tokens; default by task", gt=1, le=10**6
    )
    pack: Literal["eos", "newline", "none"] | None = option(
        None, "`perplexity`: how texts are joined; default with the end token"
    )
    candidates: int | None = option(
        None, "`response-selection`: responses to choose from; default 10", gt=1, le=10**6
    )
    exact_match: bool | None = option(
        None,
        "`seq2seq`: whether targets are generated too, token after token, and compared as a whole; "
        "default true",
    )
    attention_map: bool = option(
        False,
        "keep what the last attention that returns weights looks at in the first example, words "
        "included, for reports (`tam`, `additive`, `tcompress_tam`)",
    )
    batch_size: int | None = option(
        None, "inputs in a batch; numbers do not depend on it", gt=0, le=10**6
    )
    runtime: tuple[RuntimeName, ...] = option(
        ("torch",),
        "`torch`, and ONNX Runtime with weights of 32, 8 or 4 bits: `onnx`, `onnx-int8`, "
        "`onnx-q4`; each model is measured in each of them",
        metavar="NAME,NAME,...",
        min_length=1,
    )
    dtype: DType | None = option(None, "dtype of the run; default as stored")
    device: Device = "auto"
    seed: int = option(0, "seed of all draws", ge=0, lt=2**32)
    bootstrap: int = option(1000, "resamples for 95 % intervals; 0 for none", ge=0, le=10**6)
    threshold: Bound | None = option(
        None,
        "worst allowed number, of several sets their mean, or share of the baseline's such as "
        "`0.95x`; a model that misses it makes the exit code 3",
        metavar="NUMBER|FACTORx",
    )

    @model_validator(mode="after")
    def _check_options(self) -> Evaluate:
        owners = {
            "pack": "perplexity",
            "candidates": "response-selection",
            "exact_match": "seq2seq",
        }
        for name, task in owners.items():
            if getattr(self, name) is not None and self.task != task:
                raise ValueError(f"`{name}` belongs to the task `{task}`, not to `{self.task}`")
        if self.task == "seq2seq" and self.runtime != ("torch",):
            raise ValueError("the task `seq2seq` is measured in PyTorch alone: leave `runtime` out")
        return self


Sizes = tuple[Annotated[int, Field(gt=0, lt=10**9)], ...]
CacheName = Literal["dynamic", "static"]


class Bench(Section):
    """Time of forward passes, and of generating text, beside the dense model's."""

    panel = MEASURED

    batch: Sizes = option(
        (), "sizes of batches; default 1, 8 and 32, with `generate` 1 and 8", metavar="N,N,..."
    )
    length: Sizes = option(
        (),
        "tokens in a sequence; default 32 and 128, as far as the models go; pictures have a "
        "length of their own",
        metavar="N,N,...",
    )
    mode: tuple[Literal["eager", "compiled"], ...] = option(
        ("eager",),
        "as the model is, through `torch.compile`, or both",
        metavar="eager,compiled",
        min_length=1,
    )
    generate: int | None = option(
        None,
        "time generating so many tokens too: reading a prompt (`prefill`), then one token after "
        "another (`decode`); for language models",
        metavar="N",
        gt=0,
        le=10**6,
    )
    cache: tuple[CacheName, ...] = option(
        (),
        "caches of Transformers that `generate` fills; default `dynamic`, which grows; `static` "
        "has its full length from the start, and compiled steps need it",
        metavar="dynamic,static",
    )
    runtime: tuple[RuntimeName, ...] = option(
        ("torch",),
        "`torch`, and ONNX Runtime with weights of 32, 8 or 4 bits: `onnx`, `onnx-int8`, "
        "`onnx-q4`; the dense model is timed in each of them too",
        metavar="NAME,NAME,...",
        min_length=1,
    )
    repeats: int = option(7, "timed passes of each model; medians count", gt=0, le=10**6)
    threads: int | None = option(None, "threads on a CPU; default PyTorch's", gt=0, le=4096)
    keep_weights: bool = option(
        False, "whether converted layers keep a dense weight; for eager passes only"
    )
    dtype: DType | None = option(None, "dtype of both; default as the dense is stored")
    device: Device = "auto"
    seed: int = option(0, "seed of the random inputs", ge=0, lt=2**32)

    @property
    def batches(self) -> tuple[int, ...]:
        return self.batch or ((1, 8) if self.generate else (1, 8, 32))

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways of running a pass: those of PyTorch, then other runtimes."""
        others = tuple(name for name in self.runtime if name != "torch")
        return (*(self.mode if "torch" in self.runtime else ()), *others)

    @property
    def caches(self) -> tuple[CacheName, ...]:
        """Those to fill, if anything is generated."""
        return (self.cache or ("dynamic",)) if self.generate else ()

    @model_validator(mode="after")
    def _check_ways(self) -> Bench:
        if self.mode != type(self).model_fields["mode"].default and "torch" not in self.runtime:
            raise ValueError("`mode` is of passes in PyTorch: add `torch` to `runtime`")
        if self.cache and not self.generate:
            raise ValueError("`cache` belongs to `generate`: give the number of tokens too")
        if self.generate and self.runtime != ("torch",):
            raise ValueError("`generate` is timed in PyTorch alone: leave `runtime` out")
        if self.generate and "compiled" in self.mode and "static" not in self.cache:
            raise ValueError("compiled steps need a cache of one length: add `static` to `cache`")
        return self


class Words(Section):
    """A tokenizer of lower-case words, made from texts."""

    words: str = Field(
        description="texts to take words from: `builtin`, or a txt, csv, jsonl or parquet file, a "
        "folder or a hub id"
    )
    split: str = Field("train", description="split of a folder or hub dataset")
    columns: tuple[str, ...] = Field((), description="text columns; guessed where not given")
    size: int = Field(
        20_000, gt=5, description="most words, the five that stand for something else included"
    )


class Architecture(BaseModel):
    """A model without weights; other keys are those of its `config.json`, such as its sizes."""

    model_config = ConfigDict(
        extra="allow", frozen=True, allow_inf_nan=False, serialize_by_alias=True
    )

    model_type: str = Field(description="family, such as `bert`")
    kind: str | None = Field(
        None,
        alias="class",
        description="class of the model, such as `BertForSequenceClassification`; default the one "
        "without a head",
    )
    tokenizer: str | Words | None = Field(
        None,
        description="folder, short name or hub id whose tokenizer is carried along, or a tokenizer "
        "of words to make; `vocab_size` follows from it",
    )

    @property
    def sizes(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class PaperRow(Section):
    """A published number."""

    row: str = Field(description="what it is about, such as `Std, d=256`")
    metric: str = Field(description="what was measured, such as `accuracy`")
    value: float = Field(description="the number, as it was published")
    deviation: float | None = Field(
        None, description="its standard deviation over runs, as it was published", ge=0
    )
    source: str = Field(description="where it stands, such as `Table 8`")
    comparable: bool = Field(
        False, description="whether ours is measured on the same data in the same way"
    )
    why: str | None = Field(None, description="why it is not comparable")
    ours: bool = Field(
        True, description="whether the recipe makes this model, or one to compare it with"
    )
    mean: bool = Field(
        False, description="whether it is a mean over several variants of the recipe"
    )
