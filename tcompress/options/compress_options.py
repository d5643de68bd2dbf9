"""Options of `compress`: one goal, some minutes, and what the result runs in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tcompress.fields import DATASET, FRACTION, Section, Sources, option
from tcompress.options.limits import Bytes, Speedup, bytes_of
from tcompress.options.steps import MEASURED, EvaluationTaskName

GOAL, WORK, SMOKE_MINUTES = "Goal", "The work", 1.0


class Compress(Section):
    """A goal, the data to reach it with, and the time that it may take."""

    panel = GOAL

    speedup: Speedup | None = option(
        None,
        "how many times as fast as the dense model in PyTorch; of the file for the runtime",
        metavar="FACTOR",
    )
    size: Bytes | None = option(
        None,
        "most bytes that the runtime needs beside the tokenizer, such as `10MB`",
        metavar="10MB",
    )
    max_loss: float | None = option(
        None,
        "most agreement with the dense model to lose, such as 1%, before healing; default 1% where "
        "no other goal is given",
        **FRACTION,
    )
    runtime: Literal["onnx-int8", "torch"] | None = option(
        None,
        "what the result is to run in; speed and size are those of its file; default `onnx-int8`, "
        "or `torch` where the model has no such file",
        metavar="onnx-int8|torch",
    )
    at: str = option(
        "32x32",
        "the pass that is timed: texts in a batch and tokens in a text",
        pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,5}$",
        metavar="32x32",
    )
    vocab: Annotated[int, Field(gt=0, le=10**7)] | Literal["data"] | None = option(
        None,
        "tokens that stay: those that `data` needs, or a number of the most frequent ones; default "
        "all",
        metavar="data|N",
    )
    data: Sources = option(
        (),
        "texts to fit and heal on, without labels: file, folder or hub id; default text that "
        "ships, which is worth less",
        panel=WORK,
        splits=False,
        **DATASET,
    )
    minutes: float = option(15.0, "duration of all of it, healing included", panel=WORK, gt=0)
    smoke: bool = option(False, "all stages in little: few samples, hardly any healing", panel=WORK)
    threads: int | None = option(
        None, "threads on a CPU; default PyTorch's", panel=WORK, gt=0, le=4096
    )
    seed: int = option(0, "seed of all random choices", panel=WORK, ge=0, lt=2**32)
    task: EvaluationTaskName | None = option(
        None,
        "what quality is measured by, with `test_data`; any but `seq2seq`",
        panel=MEASURED,
        metavar="NAME",
    )
    test_data: Sources = option(
        (), "labelled data to measure on", panel=MEASURED, splits=False, **DATASET
    )

    @model_validator(mode="after")
    def _check_pairs(self) -> Compress:
        if self.most_bytes == 0:
            raise ValueError(f"`size` is `{self.size}`, allowed is 1 or more")
        if (self.task is None) != (not self.test_data):
            raise ValueError("`task` and `test_data` go together: give both, or none")
        if self.task == "seq2seq":
            raise ValueError(
                "`compress` measures ONNX files too, and the task `seq2seq` is measured in PyTorch "
                "alone: convert, heal and evaluate one after another"
            )
        if self.vocab == "data" and not self.data:
            raise ValueError("`vocab: data` keeps what your data needs: give `data`")
        if self.max_loss is not None and (self.speedup or self.size):
            raise ValueError(
                "`max_loss` asks for the smallest model, `speedup` and `size` say how small it is: "
                "give one or the other"
            )
        return self

    @property
    def most_bytes(self) -> int | None:
        """The size as a number."""
        return None if self.size is None else bytes_of(self.size)

    @property
    def most_minutes(self) -> float:
        """Minutes of all of it."""
        return min(self.minutes, SMOKE_MINUTES) if self.smoke else self.minutes

    @property
    def batch_and_length(self) -> tuple[int, int]:
        """Texts in a batch, and tokens in a text."""
        batch, length = self.at.split("x")
        return int(batch), int(length)
