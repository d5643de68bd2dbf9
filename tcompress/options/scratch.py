"""What a recipe says of models that are trained from scratch, and of the papers that did so."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tcompress.options.fields import Section


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
