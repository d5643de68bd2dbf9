"""Attention replacements by name: the options of each."""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from tcompress.options.fields import NO_FLAG, Options, option
from tcompress.options.typed import read_sizes

Kernel = Literal["softmax", "favor", "smreg"]
Pool = Literal["mean", "sum"]
Core = Literal["aligned", "cp", "tucker"]
Normalize = Literal["softmax", "none"]
Memory = Literal["states", "gru"]

SCRATCH_DECAY = 0.9
"""First decay of the papers."""
CONVERTED_DECAY = 0.05
"""First decay of trained weights: their keys are long, and sums over neighbours are no averages, so
that edges that reach far would drown each token's own values (docs/attention.md)."""


class MechanismSpec(Options):
    """Options of a mechanism as a recipe gives them."""

    structure: ClassVar[str] = "lprod"
    """Structure that goes with it where only a size is given, as in its paper."""
    only: ClassVar[tuple[str, ...]] = ()
    """Patterns of the layers that the paper stores in it; empty for all."""


class GraphSpec(MechanismSpec):
    """Options of `tga` and `tsa`."""

    structure = "tt"
    only = ("re:^(k|v|qkv)$",)

    name: Literal["tga", "tsa"] = "tga"
    filter_order: int = option(
        2, "terms of the graph filter; powers 0 to this less one", ge=2, le=16
    )
    decay: float | None = option(
        None,
        "what a step of distance multiplies edges by; at first; default "
        f"{SCRATCH_DECAY}, as in the papers, and {CONVERTED_DECAY} in converted models",
        gt=0,
        lt=1,
    )

    @model_validator(mode="after")
    def _check_order(self) -> GraphSpec:
        if self.name == "tga" and self.filter_order != 2:
            raise ValueError("`tga` has a filter of order 2; `tsa` takes `filter_order`")
        return self


class KroneckerSpec(MechanismSpec):
    """Options of `hot`."""

    name: Literal["hot", "kronecker"] = "hot"
    grid: tuple[PositiveInt, ...] | None = option(
        None,
        "sizes of the axes; read from the config of image and video models",
        metavar="N,N,...",
        read=read_sizes,
    )
    fold: int | None = option(
        None, "for text, tokens in a row of the grid; instead of `grid`", ge=2
    )
    kernel: Kernel = option(
        "softmax",
        "kernel; `favor` and `smreg` need time linear in each axis: random features of the softmax "
        "kernel, with directions as long as normal vectors, or all of length sqrt(width) (the "
        "regularised kernel, which is the paper's)",
    )
    features: int | None = option(
        None, "number of random features; default twice the head's width", gt=0
    )
    pool: Pool = option(
        "mean", "how the other axes are pooled; the paper's `sum` saturates softmax"
    )
    seed: int = Field(0, ge=0, description="seed of the random features", json_schema_extra=NO_FLAG)


class MultilinearSpec(MechanismSpec):
    """Options of `multilinear`."""

    name: Literal["multilinear"] = "multilinear"
    length: int | None = option(
        None, "number of tokens; read from the config of image models", gt=1
    )


class TamSpec(MechanismSpec):
    """Options of `tam`."""

    structure = "tucker"

    name: Literal["tam"] = "tam"
    core: Core = option(
        "cp",
        "form of the core; `aligned`: the paper's, along positions of queries; `cp`: along "
        "features, the paper's without query alignment; `tucker`: a full core with factors",
    )
    # `--cores` and `--rank` are those of `tucker`.
    cores: int = Field(
        1,
        gt=0,
        le=64,
        description="number of cores, which are averaged: several compute what one with their mean "
        "does, and differ in training alone",
        json_schema_extra=NO_FLAG,
    )
    rank: int | None = Field(
        None,
        gt=0,
        description="size of the core `tucker`; default the head's width",
        json_schema_extra=NO_FLAG,
    )
    semantic_rank: int = option(8, "size of the core `tucker` along semantics", gt=0)
    normalize: Normalize = option(
        "softmax", "how scores are normalised; `none` uses scores as in the paper"
    )
    memory: Memory = option(
        "states",
        "where keys and values come from; the model's `states`, or also a `gru`: k + g GRU(k) and "
        "v + h GRU(k) with gates g and h in every layer (the paper has GRU(e) W of the word "
        "embeddings e in their place)",
    )


MECHANISMS: tuple[type[MechanismSpec], ...] = (
    GraphSpec,
    KroneckerSpec,
    MultilinearSpec,
    TamSpec,
)
"""Options of every mechanism, in the order of the registry."""


def mechanism_names() -> tuple[str, ...]:
    """Returns the names that select a mechanism."""
    return tuple(name for spec in MECHANISMS for name in spec.names())


if TYPE_CHECKING:
    AttentionSpec = Any
else:
    # Options of one mechanism; `name` selects it.
    AttentionSpec = Annotated[reduce(operator.or_, MECHANISMS), Field(discriminator="name")]
