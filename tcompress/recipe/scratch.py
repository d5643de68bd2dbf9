"""What a recipe says of models that are trained from scratch, and of the papers that did so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tcompress.recipe.methods import AutoSpec
from tcompress.recipe.sections import DEPTH, Calibration, Section, tol_of

Positions = Literal["host", "standard", "linear", "exponential", "harmonic", "learned"]
Norm = Literal["host", "tensor"]


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
        """What is said of the configuration."""
        return dict(self.model_extra or {})


class PaperRow(Section):
    """A published number."""

    row: str = Field(description="what it is about, such as `Std, d=256`")
    metric: str = Field(description="what was measured, such as `accuracy`")
    value: float = Field(description="the number, as it was published")
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


def usual_calibration(said: Mapping[str, Any]) -> Calibration:
    """Returns the calibration data of a conversion that says nothing of it.

    Args:
        said: What else it says.
    """
    return Calibration(source="none") if said.get("init") == "random" else Calibration()


def needs_data(convert: Any) -> list[str]:
    """Lists what a conversion asks for that only trained weights, or data, can give."""
    problems = []
    if convert.calibration.source != "none":
        problems.append(
            f"`calibration` is `{convert.calibration.source}`, but with `init: random` nothing is "
            "fitted: leave it out"
        )
    if isinstance(convert.method, AutoSpec):
        problems.append(
            "`auto` compares what methods lose of trained weights: with `init: random` name one"
        )
    for name in DEPTH:
        if getattr(convert, name) is not None:
            problems.append(
                f"`{name}` picks blocks of a trained model: with `init: random` give the number of "
                "blocks in the configuration"
            )
    if convert.max_error is not None:
        problems.append("`max_error` limits an error, and `init: random` has none: give a target")
    if tol_of(convert.method) is not None:
        problems.append("`tol` limits an error, and `init: random` has none: give a rank or target")
    return problems
