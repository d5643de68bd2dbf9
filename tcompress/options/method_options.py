"""Methods, attention replacements and budgets by name, and the options of each."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from tcompress.fields import FIT, Options, option, read_sizes
from tcompress.structures import Spec, structures
from tcompress.structures.base import LooksUp
from tcompress.structures.width import WidthSpec

AUTO = "auto"
AUTO_ABOUT = (
    "For every layer the structure and size that save most predicted loss per parameter, under "
    "one budget; one structure for all, where mixing is not predicted to lose clearly less."
)

STRUCTURES: tuple[type[Spec], ...] = tuple(item.spec for item in structures())
"""Options of every structure, in the order of the registry."""


_LOOKUPS = tuple(item.spec for item in structures() if isinstance(item, LooksUp))


def _names(specs: Iterable[type[Options]]) -> tuple[str, ...]:
    return tuple(name for spec in specs for name in spec.names())


def lookup_methods() -> tuple[str, ...]:
    """Returns the names of the methods that a table of embeddings may be stored with."""
    return _names(_LOOKUPS)


def method_names() -> tuple[str, ...]:
    """Returns the names that select a method."""
    return (*_names(STRUCTURES), AUTO)


if TYPE_CHECKING:
    StructureName = str
else:
    StructureName = Literal[_names(STRUCTURES)]


class AutoSpec(Spec):
    """Options of `auto`: every layer gets the structure that its budget does most with."""

    name: Literal["auto"] = "auto"
    offer: tuple[StructureName, ...] = option(
        (),
        "structures to choose among; default those that are usually worthwhile",
        panel=FIT,
        metavar="NAME,...",
    )
    trials: bool = option(
        True,
        "whether structures are tried out too; the mixture that is predicted best and every "
        "structure on its own are converted, and the one that changes the output least is kept; "
        "predictions alone take less time",
        panel=FIT,
    )

    @property
    def has_size(self) -> bool:
        return False


METHODS: tuple[type[Spec], ...] = (*STRUCTURES, AutoSpec)
"""Options of every method."""
NARROWING = WidthSpec.names()[0]
"""The method that makes layers narrower and leaves them plain."""

if TYPE_CHECKING:
    MethodSpec = Any
    TableMethod = Any
    AnyMethod = Any
    MethodName = str
else:
    # Options of one structure; `name` selects it.
    MethodSpec = Annotated[reduce(operator.or_, STRUCTURES), Field(discriminator="name")]
    # The same of those that can look words up.
    TableMethod = Annotated[reduce(operator.or_, _LOOKUPS), Field(discriminator="name")]
    AnyMethod = Annotated[reduce(operator.or_, METHODS), Field(discriminator="name")]
    MethodName = Literal[method_names()]

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


class ReplacementSpec(Options):
    """Options of a replacement as a recipe gives them."""

    structure: ClassVar[str] = "lprod"
    """Structure that goes with it where only a size is given, as in its paper."""
    only: ClassVar[tuple[str, ...]] = ()
    """Patterns of the layers that the paper stores in it; empty for all."""

    if TYPE_CHECKING:
        name: str


class GraphSpec(ReplacementSpec):
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


class KroneckerSpec(ReplacementSpec):
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
    pool: Pool = option("mean", "how other axes are pooled; the paper's `sum` saturates softmax")
    seed: int = option(0, "seed of the random features", ge=0, off=True)


class MultilinearSpec(ReplacementSpec):
    """Options of `multilinear`."""

    name: Literal["multilinear"] = "multilinear"
    length: int | None = option(
        None, "number of tokens; read from the config of image models", gt=1
    )


class TamSpec(ReplacementSpec):
    """Options of `tam`."""

    structure = "tucker"

    name: Literal["tam"] = "tam"
    core: Core = option(
        "cp",
        "form of the core; `aligned`: the paper's, along positions of queries; `cp`: along "
        "features, the paper's without query alignment; `tucker`: a full core with factors",
    )
    # The flags `--cores` and `--rank` are those of `tucker`.
    cores: int = option(
        1,
        "number of cores, which are averaged: several compute what one with their mean does, and "
        "differ in training alone",
        gt=0,
        le=64,
        off=True,
    )
    rank: int | None = option(
        None, "size of the core `tucker`; default the head's width", gt=0, off=True
    )
    semantic_rank: int = option(8, "size of the core `tucker` in semantics", gt=0)
    normalize: Normalize = option(
        "softmax", "how scores are normalised; `none` uses scores as in the paper"
    )
    memory: Memory = option(
        "states",
        "where keys and values come from; the model's `states`, or also a `gru`: k + g GRU(k) and "
        "v + h GRU(k) with gates g and h in every layer (the paper has GRU(e) W of the word "
        "embeddings e in their place)",
    )


REPLACEMENTS: tuple[type[ReplacementSpec], ...] = (
    GraphSpec,
    KroneckerSpec,
    MultilinearSpec,
    TamSpec,
)
"""Options of every replacement, in the order of the registry."""


def replacement_names() -> tuple[str, ...]:
    """Returns the names that select a replacement."""
    return _names(REPLACEMENTS)


if TYPE_CHECKING:
    AttentionSpec = Any
else:
    # Options of one replacement; `name` selects it.
    AttentionSpec = Annotated[reduce(operator.or_, REPLACEMENTS), Field(discriminator="name")]
