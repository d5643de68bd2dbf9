"""What may be asked of measurements: quality on a task, and speed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tcompress.options.fields import Device, DType, Section, option

DATA, MEASUREMENT, MEASURED = "Data", "Measurement", "What is measured"

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

    task: EvaluationTask = option(..., "what is measured", panel=DATA, metavar="NAME")
    data: str = option(
        ...,
        "file (csv, jsonl, parquet, txt or npz), folder or hub id; `id:config` selects a "
        "configuration",
        panel=DATA,
        metavar="FILE|FOLDER|DATASET",
        complete="data",
    )
    split: str = option(
        "validation",
        "split of a folder or hub dataset, or part of an archive or a series",
        panel=DATA,
    )
    columns: dict[str, str] = option(
        {},
        "columns by role (`text`, `pair`, `image`, `volume`, `shape`, `label`, `score`); guessed "
        "where not given",
        panel=DATA,
        metavar="ROLE=NAME",
    )
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
    batch_size: int | None = option(
        None, "inputs in a batch; numbers do not depend on it", gt=0, le=10**6
    )
    dtype: DType | None = option(None, "dtype of the run; default as stored")
    device: Device = "auto"
    seed: int = option(0, "seed of all draws", ge=0, lt=2**32)
    bootstrap: int = option(1000, "resamples for 95 % intervals; 0 for none", ge=0, le=10**6)
    threshold: Bound | None = option(
        None,
        "worst allowed number, or share of the baseline's such as `0.95x`; a model that misses it "
        "makes the exit code 3",
        metavar="NUMBER|FACTORx",
    )

    @model_validator(mode="after")
    def _check_options(self) -> Evaluate:
        for name, task in (("pack", "perplexity"), ("candidates", "response-selection")):
            if getattr(self, name) is not None and self.task != task:
                raise ValueError(f"`{name}` belongs to the task `{task}`, not to `{self.task}`")
        return self


Size = Annotated[int, Field(gt=0, lt=10**9)]


class Bench(Section):
    """Time of a forward pass beside the dense model's."""

    panel = MEASURED

    batch: tuple[Size, ...] = option(
        (1, 8, 32), "sizes of batches", metavar="N,N,...", min_length=1
    )
    length: tuple[Size, ...] = option(
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
    repeats: int = option(7, "timed passes of each model; medians count", gt=0, le=10**6)
    threads: int | None = option(None, "threads on a CPU; default PyTorch's", gt=0, le=4096)
    keep_weights: bool = option(
        False, "whether converted layers keep a dense weight; for eager passes only"
    )
    dtype: DType | None = option(None, "dtype of both; default as the dense is stored")
    device: Device = "auto"
    seed: int = option(0, "seed of the random inputs", ge=0, lt=2**32)
