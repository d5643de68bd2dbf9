"""What a recipe may say. Unknown keys are errors at every level."""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tcompress.structures import Spec, Structure, structures

RECIPE_VERSION = 1

DType = Literal["float32", "float16", "bfloat16"]

if TYPE_CHECKING:
    MethodSpec = Any
else:
    # Options of one method; `name` selects it.
    MethodSpec = Annotated[
        reduce(operator.or_, (item.spec for item in structures())), Field(discriminator="name")
    ]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Calibration(_Model):
    """Data that the fit may look at; labels are never used."""

    source: str = Field(
        "builtin",
        description="`builtin`, `none`, a txt, csv, jsonl or parquet file, a folder of images, "
        "or a hub id",
    )
    split: str = Field("train", description="split of a hub dataset")
    columns: tuple[str, ...] = Field(
        (), description="text or image columns; guessed where not given"
    )
    samples: int = Field(1024, gt=0, description="number of texts or images")
    max_length: int = Field(256, gt=1, description="longest text, in tokens")
    batch_size: int = Field(32, gt=0, description="texts or images run together")
    holdout: float = Field(
        0.1, gt=0, lt=0.9, description="share of the samples kept back to measure errors on"
    )
    damping: float = Field(
        0.1,
        ge=0,
        description="ridge added to the moments where there is one row per regressor, in units of "
        "their mean diagonal; shrinks with more rows",
    )
    seed: int = Field(0, ge=0, description="seed of the choice of samples")


class LayerRule(_Model):
    """An exception for some layers; the last rule that matches a layer wins."""

    match: str = Field(description="layer name with `*` wildcards, or `re:` and an expression")
    keep: bool = Field(False, description="leave these layers dense")
    method: MethodSpec | None = Field(None, description="another method for these layers")
    residual_rank: int | None = Field(None, ge=0, description="another residual rank")
    target: float | None = Field(None, gt=0, lt=1, description="another kept fraction")


class Convert(_Model):
    """How a dense model becomes a structured one."""

    method: MethodSpec = Field(description="structure of the rewritten layers")
    target: float | None = Field(
        None, gt=0, lt=1, description="kept fraction of the rewritten layers' parameters"
    )
    residual_rank: int = Field(
        0,
        ge=0,
        description="rank of a low-rank term added to the structure; 0 leaves it to `target`",
    )
    keep: tuple[str, ...] = Field((), description="layers left dense, as in `layers[].match`")
    layers: tuple[LayerRule, ...] = Field((), description="exceptions by layer")
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


class Recipe(_Model):
    """A whole recipe."""

    recipe_version: Literal[1] = Field(description="version of this schema")
    name: str | None = Field(None, description="short name")
    description: str | None = Field(None, description="what the recipe reaches, and on what")
    model: str | None = Field(None, description="folder, short name or hub id of the source model")
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    output: str | None = Field(None, description="folder to write")
    convert: Convert = Field(description="how to convert")


def structure_of(spec: Spec) -> Structure[Any, Any]:
    """Returns the structure that a method's options belong to."""
    return next(item for item in structures() if isinstance(spec, item.spec))


def method_names() -> tuple[str, ...]:
    """Returns the names that select a method."""
    names: list[str] = []
    for item in structures():
        names.extend(item.spec.model_fields["name"].annotation.__args__)
    return tuple(names)
