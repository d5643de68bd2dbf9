"""Methods, attention replacements and budgets by name, and the options of each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil, log2
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from tcompress.options.fields import FIT, FRACTION, Options, option, read_modes, read_sizes

# Methods by name: the options of every structure, and `auto`, which offers several.


AUTO = "auto"
AUTO_ABOUT = (
    "For every layer the structure and size that save most predicted loss per parameter, under "
    "one budget; one structure for all, where mixing is not predicted to lose clearly less."
)

TransformKind = Literal["dct", "identity", "haar", "hadamard", "random", "dft", "learned", "fitted"]
Placement = Literal["in", "out", "both"]
Way = Literal["auto", "contract", "rebuild"]
Share = Literal["none", "heads", "layers", "model"]
Modes = tuple[PositiveInt, ...]
Edges = tuple[PositiveInt, PositiveInt]

TOL = option(
    None,
    "largest error of a weight; as predicted, in place of a rank; in place of a budget too: each "
    "weight gets the smallest rank whose predicted error, squared and relative to leaving the "
    "weight out, is at most this",
    **FRACTION,
)


def _clip_note(asked: int | Sequence[int] | None, given: Sequence[int]) -> str | None:
    """Says what became of ranks, if they are not those asked for."""
    if asked is None:
        return None
    wanted = [asked] * len(given) if isinstance(asked, int) else list(asked)
    if all(one <= other for one, other in zip(wanted, given, strict=True)):
        return None
    said = asked if isinstance(asked, int) else ", ".join(map(str, asked))
    return f"{said} became {', '.join(map(str, given))}"


class Spec(Options):
    """Options of a method as a recipe gives them."""

    looks_up: ClassVar[bool] = False
    """Whether a table of embeddings may be stored with it."""

    @model_validator(mode="after")
    def _check_tol(self) -> Spec:
        if getattr(self, "tol", None) is None:
            return self
        if getattr(self, "rank", None) is not None:
            raise ValueError("`rank` and `tol` are both given; allowed is one")
        if self.pools:
            raise ValueError("`tol` sizes weights one by one, but factors are shared: give `rank`")
        return self

    @property
    def has_size(self) -> bool:
        """Whether these options alone decide a size; else a budget has to."""
        return getattr(self, "rank", 0) is not None

    @property
    def fixes_size(self) -> bool:
        """Whether these options leave nothing to a budget, not even a low-rank term beside them."""
        return False

    @property
    def fills(self) -> bool:
        """Whether a layout spends a budget itself; if not, a low-rank term may take the rest."""
        return getattr(self, "rank", 0) is None

    @property
    def pools(self) -> bool:
        """Whether layers share tensors of their cores, so that they are sized together."""
        return False

    def settled(self, *, calibrated: bool) -> Self:
        """Fills options whose default depends on whether there is calibration data."""
        return self

    def offered(self, target: float) -> tuple[Self, ...]:
        """Options that `auto` tries on every layer, the first that its dimensions allow.

        Args:
            target: About which kept fraction the budget comes to.
        """
        return (self,)

    def alone(self, target: float) -> tuple[Self, ...]:
        """Options for a target with nothing else on offer; the first that all layers allow."""
        return (self,)

    def clipped(self, layout: Any) -> str | None:
        """Says which of these numbers a layout has less of, since its shape admits no more."""
        return None


class LowRankSpec(Spec):
    """Options of `svd`: two factors of a chosen rank."""

    looks_up = True

    name: Literal["svd", "lowrank"] = "svd"
    rank: int | None = option(None, "rank of every weight", metavar="N", gt=0)
    tol: float | None = TOL

    @property
    def fixes_size(self) -> bool:
        return self.has_size

    @property
    def fills(self) -> bool:
        return True

    def clipped(self, layout: Any) -> str | None:
        return _clip_note(self.rank, (layout.rank,))


class LprodSpec(Spec):
    """Options of `lprod`."""

    name: Literal["lprod"] = "lprod"
    p: int = option(4, "number of slices; 1/p of the weights is kept", ge=1)
    transform: TransformKind | None = option(
        None, "transform of the features; default `fitted` with calibration, else `dct`"
    )
    block: int | None = option(
        None, "block size of the fitted transform; default width / 12, at most 32", ge=2
    )
    stages: int = option(2, "stages of the fitted transform", ge=1, le=8)
    placement: Placement | None = option(
        None, "where the transform sits; default by the role of the layer"
    )
    tubal_rank: int | None = option(None, "keep only this many singular tubes of the slices", gt=0)
    pad: bool = option(False, "pad widths that p does not divide; instead of refusing")
    seed: int = option(0, "seed of the `random` transform", ge=0, off=True)

    def settled(self, *, calibrated: bool) -> Self:
        if self.transform is not None:
            return self
        return self.model_copy(update={"transform": "fitted" if calibrated else "dct"})

    def offered(self, target: float) -> tuple[Self, ...]:
        # A quarter for the slices: layers that get little of a budget need small ones.
        return self._halvings(ceil(log2(4 / target)))

    def alone(self, target: float) -> tuple[Self, ...]:
        # Half for the slices, an eighth of the weight at most: transforms and a low-rank term take
        # the rest, and do better with it.
        return self._halvings(max(3, ceil(log2(2 / target))))

    def _halvings(self, most: int) -> tuple[Self, ...]:
        return tuple(self.model_copy(update={"p": 2**power}) for power in range(most, 0, -1))


class TTSpec(Spec):
    """Options of `tt` and `qtt`."""

    looks_up = True

    name: Literal["tt", "qtt"] = "tt"
    order: int | None = option(
        None, "number of cores; default 2, or as many as `modes` says", ge=2, le=16
    )
    modes: dict[PositiveInt, Modes] = option(
        {},
        "factors of a width, such as `768: [24, 32]`; default as even as possible",
        metavar="WIDTH=AxB",
        read=read_modes,
    )
    rank: PositiveInt | Modes | None = option(
        None,
        "inner ranks: one, or a list; `qtt` has 2 unless a budget says",
        metavar="N|N,N,...",
    )
    tol: float | None = TOL
    apply: Way = option(
        "auto",
        "how cores are applied; `contract` them with the input, `rebuild` the weight in each pass, "
        "or `auto`: what costs less for the tokens at hand",
    )

    @property
    def has_size(self) -> bool:
        return self.rank is not None or self.name == "qtt"

    def clipped(self, layout: Any) -> str | None:
        return _clip_note(self.rank, layout.ranks)

    @model_validator(mode="after")
    def _without_modes_of_its_own(self) -> TTSpec:
        if self.name == "qtt" and (self.order is not None or self.modes):
            raise ValueError("the modes of `qtt` are 2: leave out `order` and `modes`")
        return self


class TuckerSpec(Spec):
    """Options of `tucker`."""

    looks_up = True

    name: Literal["tucker"] = "tucker"
    share: Share = option(
        "none",
        "what shares factors and cores; nothing (`svd` then needs fewer parameters), the `heads` "
        "of an attention, the `layers` of a role, or the blocks of the whole `model`",
    )
    rank: PositiveInt | Edges | None = option(
        None,
        "columns of the factors U and V; one number, or two if shared",
        metavar="N|N,N",
    )
    tol: float | None = TOL
    cores: PositiveInt | None = option(
        None, "number of shared cores; default as many as blocks, within a `target`"
    )

    @property
    def fixes_size(self) -> bool:
        return self.has_size and not self.pools  # beside shared factors a low-rank term fills up

    @property
    def fills(self) -> bool:
        return self.rank is None or (self.pools and self.cores is None)

    @property
    def pools(self) -> bool:
        return self.share != "none"

    def clipped(self, layout: Any) -> str | None:
        cores = None if layout.bank is None else _clip_note(self.cores, (layout.cores,))
        return _clip_note(self.rank, layout.ranks) or cores

    @model_validator(mode="after")
    def _without_what_is_shared(self) -> TuckerSpec:
        if self.share == "none" and self.cores is not None:
            raise ValueError("`cores` are shared: choose `share` heads, layers or model")
        if self.share == "none" and isinstance(self.rank, tuple):
            raise ValueError("with `share: none` both factors have one rank: give one number")
        return self


STRUCTURES: tuple[type[Spec], ...] = (LowRankSpec, LprodSpec, TTSpec, TuckerSpec)
"""Options of every structure, in the order of the registry."""


def _names(specs: Iterable[type[Options]]) -> tuple[str, ...]:
    return tuple(name for spec in specs for name in spec.names())


def lookup_methods() -> tuple[str, ...]:
    """Returns the names of the methods that a table of embeddings may be stored with."""
    return _names(spec for spec in STRUCTURES if spec.looks_up)


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

if TYPE_CHECKING:
    MethodSpec = Any
    TableMethod = Any
    AnyMethod = Any
    MethodName = str
else:
    # Options of one structure; `name` selects it.
    MethodSpec = Annotated[reduce(operator.or_, STRUCTURES), Field(discriminator="name")]
    # The same of those that can look words up.
    TableMethod = Annotated[
        reduce(operator.or_, (spec for spec in STRUCTURES if spec.looks_up)),
        Field(discriminator="name"),
    ]
    AnyMethod = Annotated[reduce(operator.or_, METHODS), Field(discriminator="name")]
    MethodName = Literal[method_names()]


# Attention replacements by name: the options of each.


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
    pool: Pool = option("mean", "how other axes are pooled; the paper's `sum` saturates softmax")
    seed: int = option(0, "seed of the random features", ge=0, off=True)


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


MECHANISMS: tuple[type[MechanismSpec], ...] = (GraphSpec, KroneckerSpec, MultilinearSpec, TamSpec)
"""Options of every mechanism, in the order of the registry."""


def mechanism_names() -> tuple[str, ...]:
    """Returns the names that select a mechanism."""
    return _names(MECHANISMS)


if TYPE_CHECKING:
    AttentionSpec = Any
else:
    # Options of one mechanism; `name` selects it.
    AttentionSpec = Annotated[reduce(operator.or_, MECHANISMS), Field(discriminator="name")]


# How large a conversion may come out, or how much it may lose: one of several ways to say it.


BudgetKind = Literal["target", "target_params", "target_bytes", "max_error", "tol"]

_PARAMETERS = {"K": 10**3, "M": 10**6, "B": 10**9}
_BYTES = {
    "B": 1,
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMG", 1)},
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMG", 1)},
}
_MOST = 10**15  # more than any model has, and small enough to count with

Parameters = (
    Annotated[int, Field(gt=0, le=_MOST)]
    | Annotated[str, Field(pattern=r"^[0-9]{1,15}(\.[0-9]{1,15})?[KMB]?$", examples=["30M"])]
)
Bytes = (
    Annotated[int, Field(gt=0, le=_MOST)]
    | Annotated[str, Field(pattern=r"^[0-9]{1,15}(\.[0-9]{1,15})?([KMG]i?)?B$", examples=["60MB"])]
)


@dataclass(frozen=True)
class Budget:
    """A limit.

    Attributes:
        kind: The option that sets it.
        limit: A fraction, a number of parameters or bytes, or a relative error.
    """

    kind: BudgetKind
    limit: float

    @property
    def is_size(self) -> bool:
        """Whether it limits a size, which shapes alone tell; else it limits an error."""
        return self.kind not in ("max_error", "tol")

    def __str__(self) -> str:
        """Writes it as an option, such as `--target-params 30,000,000`."""
        whole = self.kind in ("target_params", "target_bytes")
        number = f"{self.limit:,.0f}" if whole else f"{self.limit:g}"
        return f"--{self.kind.replace('_', '-')} {number}"


def parameters_of(text: int | str) -> int:
    """Reads a number of parameters such as `30M`."""
    return _count(text, _PARAMETERS)


def bytes_of(text: int | str) -> int:
    """Reads a number of bytes such as `60MB` or `60MiB`."""
    return _count(text, _BYTES)


def _count(text: int | str, units: Mapping[str, int]) -> int:
    if isinstance(text, int):
        return text
    unit = text.lstrip("0123456789.")
    return int(float(text.removesuffix(unit)) * units.get(unit, 1))
