"""What a structure is: options, layouts, pure functions of a layout, and the registry."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import pydantic
from pydantic import BaseModel, Field, model_validator

from tcompress.errors import RecipeError
from tcompress.fields import FRACTION, Options, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tcompress.linalg.rounding import Rounding

TOL = option(
    None,
    "largest error of a weight; as predicted, in place of a rank; in place of a budget too: each "
    "weight gets the smallest rank whose predicted error, squared and relative to leaving the "
    "weight out, is at most this",
    **FRACTION,
)
NO_RANK = "no rank is given: set `rank` or `target`"


def clip_note(option: int | Sequence[int] | None, ranks: Sequence[int]) -> str | None:
    """Says what became of the ranks of an option, if not all are as large."""
    if option is None:
        return None
    asked = [option] if isinstance(option, int) else option
    if all(rank <= clipped for rank, clipped in zip(cycle(asked), ranks, strict=False)):
        return None
    return f"{', '.join(map(str, asked))} became {', '.join(map(str, ranks))}"


class Spec(Options):
    """Options of a method as a recipe gives them."""

    narrows: ClassVar[bool] = False
    """Whether layers around channels become narrower together, and stay plain matrices."""

    @model_validator(mode="after")
    def _check_tol(self) -> Spec:
        if getattr(self, "tol", None) is None:
            return self
        if getattr(self, "rank", None) is not None:
            raise ValueError("`rank` and `tol` are both given; allowed is one")
        if self.shares_factors:
            raise ValueError("`tol` sizes weights one by one, but factors are shared: give `rank`")
        return self

    @property
    def has_size(self) -> bool:
        """True if these options alone decide a size; else a budget has to."""
        return getattr(self, "rank", 0) is not None

    @property
    def fixes_size(self) -> bool:
        """True if these options leave nothing to a budget, not even a low-rank term beside them."""
        return False

    @property
    def fills(self) -> bool:
        """True if a layout spends a budget itself; if not, a low-rank term may take the rest."""
        return getattr(self, "rank", 0) is None

    @property
    def shares_factors(self) -> bool:
        """True if layers share tensors of their cores, so that they are sized together."""
        return False

    def settled(self, *, calibrated: bool) -> Spec:
        """Fills options whose default depends on whether there is calibration data."""
        return self

    def offered(self, target: float) -> tuple[Spec, ...]:
        """Options that `auto` tries on every layer, the first that its dimensions allow."""
        return (self,)

    def alone(self, target: float) -> tuple[Spec, ...]:
        """Options for a target with nothing else on offer; the first that all layers allow."""
        return (self,)

    def clipped(self, layout: Any) -> str | None:
        """Says which of these numbers a layout has less of, since its shape admits no more."""
        return None

    def unused(self, layouts: Sequence[Any]) -> Iterator[str]:
        """Says which of these options none of the layouts follows, and what each would need.

        Layouts, at least one, are all that were planned with these options. Nothing is said of
        options that have their default.
        """
        yield from ()


Side = Literal["in", "out"]
Shapes = dict[str, tuple[int, ...]]
Tensors = Mapping[str, "Tensor"]
Roundings = Mapping[str, "Rounding"]


class Refusal(Exception):
    """A structure cannot take these dimensions; the message says why."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def chosen_rank(
    rank: int | None,
    budget: int | None,
    paid_by: Callable[[int], int],
    missing: str = NO_RANK,
) -> int:
    """Returns the rank of an option, else what a budget pays for; or raises `Refusal`."""
    if rank is None and budget is not None:
        rank = paid_by(budget)
    if rank is None:
        raise Refusal(missing)
    if rank < 1:
        raise Refusal(f"the budget of {budget} parameters does not pay for rank 1")
    return rank


class Frozen(BaseModel, extra="forbid", frozen=True):
    """A record of the artefact: it does not change, and has no fields but its own."""


class Layout(Frozen):
    """All that is needed to build one term of a layer: it is stored in the artefact."""

    structure: str
    in_features: int = Field(gt=0)
    out_features: int = Field(gt=0)

    is_plain: ClassVar[bool] = False
    """Whether it is an ordinary matrix, which is no structure to any other program."""

    @property
    def regressors(self) -> int:
        """Number of inputs that every output sees: what calibration rows must suffice for."""
        return self.in_features

    @pydantic.model_serializer(mode="wrap")
    def _with_structure(self, handler: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keeps the name in dumps without defaults: it selects the class on reading."""
        return {"structure": self.structure, **handler(self)}


@dataclass(frozen=True)
class Site:
    """Where a term will sit."""

    in_features: int
    out_features: int
    side: Literal["in", "out", "both"]  # reads the residual stream, writes it, or unknown
    role: str = ""  # what the weight does, such as `q` or `down`
    block: str = ""
    head: int | None = None  # width of one head, for projections of an attention
    reads: str = ""  # the input that it reads: the same for layers of a block that share it
    # All that share factors with this one, itself included; none without.
    sharing_sites: tuple[Site, ...] = field(default=(), compare=False, repr=False)

    @property
    def widths(self) -> dict[str, int]:
        """Both widths, as layouts take them."""
        return {"in_features": self.in_features, "out_features": self.out_features}


@dataclass(frozen=True)
class Target:
    """Weight and moments that a term is fitted to; no moment stands for the identity."""

    cross_product: Tensor | None  # W C, less what other terms contribute; None for W G  # (out, in)
    gram: Tensor | None  # G, damped  # (in, in)
    scale: float = 1.0  # E||W x||^2: makes layers comparable that share a transform
    curvature: Tensor | None = None  # S, damped  # (out, out)
    # What a data-free fit would aim at, for fits that only find a local optimum and have to be no
    # worse; None if it is not known, or is the product itself.  # (out, in)
    weight: Tensor | None = None
    # Of an earlier fit to nearly the same target: a fit in steps goes on from it, and is no worse.
    start: Tensors = field(default_factory=dict)
    factors: Tensors = field(default_factory=dict)  # the shared ones, float64, fitted before
    operators: Mapping[Side, Any] = field(default_factory=dict)  # built transforms
    dense_weight: Tensor | None = None  # W, where the product is W G: not all need it  # (out, in)
    condensed: Tensor | None = None
    """In place of S: W with as many outputs as inputs, which all count alike.  # (in, in)"""
    cross: Tensor | None = None  # C beside it, where that is not G  # (in, in)

    @classmethod
    def of_weight(cls, weight: Tensor, gram: Tensor, **others: Any) -> Target:
        """Returns the target where the compressed model reads what the dense one does (C is G).

        The product of a large weight, which some structures need not, is computed where one does.
        """
        from tcompress.linalg.moments import LARGE

        if len(gram) <= LARGE:
            return cls(weight @ gram, gram, **others)
        return cls(None, gram, dense_weight=weight, **others)

    @cached_property
    def product(self) -> Tensor:
        """What the product of a fit with G aims at.  # (out, in)."""
        if self.cross_product is not None:
            return self.cross_product
        assert self.dense_weight is not None
        assert self.gram is not None
        return self.dense_weight @ (self.gram if self.cross is None else self.cross)

    def aiming_at(self, product: Tensor, **changes: Any) -> Target:
        """Returns a target with another product, or with this one computed, and other changes."""
        plain: dict[str, Any] = dict.fromkeys(("dense_weight", "condensed", "cross"))
        return replace(self, cross_product=product, **plain | changes)

    def full_gram(self) -> Tensor:
        """Returns G, as a matrix in any case."""
        if self.gram is not None:
            return self.gram
        import torch

        return torch.eye(self.product.shape[1], dtype=self.product.dtype).to(self.product)

    @cached_property
    def whitened(self) -> Tensor:
        """K^T (W C) L^-T, of G = L L^T and S = K K^T: losses are plain sums of squares there.

        Of a condensed weight, where C is G, it has other rows of the same products.
        """
        from tcompress.linalg.moments import (
            keeps_in_float32,
            large_whitened,
            safe_cholesky,
            whitened,
        )

        gram, curvature = self.full_gram(), self.curvature
        moments = [gram] if curvature is None else [gram, curvature]
        weight = self.dense_weight if self.condensed is None else self.condensed.to(gram)
        if self.cross_product is None and all(map(keeps_in_float32, moments)):
            assert weight is not None
            return large_whitened(weight, gram, curvature)
        inputs, *outputs = map(safe_cholesky, moments)
        return whitened(self.cross_product, inputs, outputs[0] if outputs else None, weight)

    @cached_property
    def spectrum(self) -> Tensor:
        """Singular values of that, the largest first: what every further rank saves."""
        from tcompress.linalg.fits import singular_values

        return singular_values(self.whitened)


def random_tensors(
    shapes: Shapes, generator: torch.Generator, variances: Mapping[str, float]
) -> dict[str, Tensor]:
    """Draws normal tensors, float32, each divided by the root of its number."""
    import torch

    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float32) / variances[name] ** 0.5
        for name, shape in shapes.items()
    }


def predicted_loss(fitted: Tensor, target: Target, constant: float) -> float:
    """Returns what a weight costs the model, to second order.  # (out, in)."""
    from tcompress.linalg.fits import curved_loss

    assert target.curvature is not None
    gram = target.full_gram()
    return constant + float(curved_loss(fitted, target.product, gram, target.curvature))


S = TypeVar("S", bound=Spec)
L = TypeVar("L", bound=Layout)
T = TypeVar("T", bound=Any)


class Structure(ABC, Generic[S, L]):
    """One way of storing and applying a weight. Stateless; tensors are passed in.

    Eight methods say all that every structure has to: its sizes, how it is applied and what fits
    it. What only some can do, such as sharing tensors, is a class of its own below.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    spec: type[S]
    layout_type: type[L]
    in_auto: ClassVar[bool] = False
    """Whether `auto` offers it without being told to."""
    saves_time: ClassVar[bool] = False
    """Whether it is offered where time counts: no other structure is faster at its loss."""
    reads_product: ClassVar[bool] = True
    """Whether fits read the product of weight and moments, and not the weight alone where both
    streams are the same."""
    exact_losses: ClassVar[bool] = False
    """Whether `losses` are those of the fits themselves, to the rows that they are told of."""
    reads_curvature: ClassVar[bool] = True
    """Whether fits or predictions read S itself, and not at most K^T W."""
    sized_by_part: ClassVar[bool] = False
    """Whether sizes come out better by candidates fitted to a part of few samples."""

    @abstractmethod
    def layout(self, spec: S, site: Site, budget: int | None = None) -> L:
        """Decides sizes for a site and, if it can fill one, a budget; or raises `Refusal`."""

    @abstractmethod
    def tensors(self, layout: L) -> Shapes:
        """Shapes of the layer's own tensors."""

    @abstractmethod
    def apply(self, x: Tensor, tensors: Tensors, layout: L) -> Tensor:
        """Multiplies rows by the weight.  # (..., tokens, in) -> (..., tokens, out).

        With experts, rows and tensors both carry a leading dimension.
        """

    @abstractmethod
    def fit(self, target: Target, layout: L) -> dict[str, Tensor]:
        """Fits the layer's own tensors, float64."""

    def start(self, layout: L, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws random tensors that keep the scale of unit-variance inputs, float32.

        Here each of them is multiplied by inputs along its last axis.
        """
        shapes = self.tensors(layout)
        return random_tensors(shapes, generator, {name: size[-1] for name, size in shapes.items()})

    def dense(self, tensors: Tensors, layout: L) -> Tensor:
        """Returns the dense weight of these tensors.  # (..., out, in)."""
        import torch

        like = next(iter(tensors.values()))
        eye = torch.eye(layout.in_features, dtype=like.dtype, device=like.device)
        return self.apply(eye, tensors, layout).mT

    def quick_fit(self, target: Target, layout: L) -> Tensor:
        """Returns what a budget judges by: a dense weight, no better than that of a fit."""
        fitted = self.fit(target.aiming_at(target.product, curvature=None), layout)
        return self.dense({**fitted, **target.factors}, layout)

    def fit_cost(self, layout: L, *, calibrated: bool) -> FitCost:
        """Cost of `fit`: that of one truncated SVD of the weight, unless it does something else."""
        return FitCost(svd_flops(layout.out_features, layout.in_features))

    def losses(self, target: Target, constant: float, layouts: Sequence[L]) -> list[float]:
        """Predicts the loss of one site's layouts, by growing size; `constant` is that of zeros."""
        losses = {
            layout: predicted_loss(self.quick_fit(target, layout), target, constant)
            for layout in dict.fromkeys(layouts)
        }
        return [losses[layout] for layout in layouts]


class Registry(dict[str, T]):
    """Registered members by name, in order; an unknown name is a `RecipeError`.

    In a layout the name stands under `key`.
    """

    def __init__(self, what: str, key: str) -> None:
        super().__init__()
        self._what, self._key = what, key

    def add(self, item: T) -> None:
        """Adds a member, which has a `name` and a `spec` of its own."""
        name = item.name
        if not name.isidentifier() or name != name.lower():
            raise ValueError(f"{self._what} name `{name}` is not lower snake case")
        if name in self or any(item.spec is other.spec for other in self.values()):
            raise ValueError(f"{self._what} `{name}` or its spec class is already registered")
        self[name] = item

    def parsed(self, value: Any) -> Any:
        """Reads a layout of any member from a plan."""
        if isinstance(value, dict) and self._key in value:
            return self[str(value[self._key])].layout_type.model_validate(value)
        return value

    def __missing__(self, name: str) -> T:
        close = difflib.get_close_matches(name, self, 1)
        known = ", ".join(f"`{known}`" for known in self)
        hint = f"did you mean `{close[0]}`?" if close else None
        raise RecipeError(f"unknown {self._what} `{name}`; known are {known}", hint)


_STRUCTURES = Registry[Structure[Any, Any]]("structure", "structure")
register = _STRUCTURES.add


def structure(name: str) -> Structure[Any, Any]:
    """The structure of a name; a `RecipeError` tells which there are."""
    return _STRUCTURES[name]  # a method of a dictionary would be none that Dynamo can trace


AnyLayout = Annotated[pydantic.SerializeAsAny[Layout], pydantic.BeforeValidator(_STRUCTURES.parsed)]
"""A layout of any registered structure."""


def structures() -> tuple[Structure[Any, Any], ...]:
    """Returns all structures in the order of registration."""
    return tuple(_STRUCTURES.values())


SIDES: tuple[Side, Side] = ("in", "out")
NO_OPERATORS: Mapping[Side, Any] = {}


class LooksUp(ABC):
    """Builds rows of its weight on demand, so that a table of embeddings may be stored so."""

    def looks_up(self, layout: Any) -> bool:
        """Return whether a layout has all that its rows are made of."""
        return True

    @abstractmethod
    def rows(self, index: Tensor, tensors: Tensors, layout: Any) -> Tensor:
        """Builds rows of the dense weight.  # (n,) -> (n, in)."""

    def scale_rows(self, tensors: Tensors, scales: Tensor, layout: Any) -> dict[str, Tensor] | None:
        """Multiplies the rows of the dense weight, if these tensors can say so.  # (out,)."""
        return None  # a row is made of what other rows are made of too


class RoundsInNorm(ABC):
    """Rounds its tensors so that the norm of the moments sees little of it."""

    @abstractmethod
    def rounded(
        self, target: Target, layout: Any, tensors: Tensors, roundings: Roundings
    ) -> dict[str, Tensor]:
        """Rounds fitted tensors, those that have a rounding, as they will be stored."""


class Shared(NamedTuple):
    """The factors that a layer shares with others."""

    name: str  # unique within a layer
    shapes: Shapes  # of tensors that stand among those of `apply` and `dense`
    share: float  # what part of them a layer answers for; those of all users add up to one


class FitCost(NamedTuple):
    """Rough cost of a fit."""

    flops: float
    bytes: int = 0  # memory beyond a few copies of the weight and its moments, at most


def svd_flops(rows: int, columns: int) -> float:
    """Counts what a truncated SVD and the products around it take, roughly, as of float32."""
    least = min(rows, columns)
    return 10.0 * least**3 + 4.0 * rows * columns * least


class SharesFactors(ABC):
    """Has factors that heads, layers or the model share, beside tensors of a layer's own."""

    @abstractmethod
    def sharing_group(self, spec: Any, site: Site) -> Hashable:
        """Identifies what a site would share: sites of a model with equal answers share it."""

    @abstractmethod
    def shared(self, layout: Any) -> Shared | None:
        """Describes the shared factors that a layout uses, if any."""

    @abstractmethod
    def fit_shared(self, targets: Sequence[Target], layouts: Sequence[Any]) -> dict[str, Tensor]:
        """Fits shared factors, float64, to what all users aim at; every target has its weight."""

    @abstractmethod
    def start_shared(self, layout: Any, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws random tensors of shared factors, as `start` does."""

    @abstractmethod
    def shared_cost(self, layout: Any, *, calibrated: bool) -> FitCost:
        """Cost of `fit_shared`, with all weights and moments that it looks at."""


def shared_of(layout: Layout) -> Shared | None:
    """Describes the shared factors that a term uses, if any."""
    kind = structure(layout.structure)
    return kind.shared(layout) if isinstance(kind, SharesFactors) else None


def shared_shapes(layout: Layout) -> Shapes:
    """Shapes of the shared factors that a term uses."""
    found = shared_of(layout)
    return {} if found is None else found.shapes


class Transform(ABC):
    """A transform of what a layer reads or returns.

    It is hashable: layers that read one input share it where theirs are equal. What is stored for
    it is the orthogonal, or at least invertible, transform's own; zeros stand for its first values.
    """

    @property
    @abstractmethod
    def shapes(self) -> Shapes:
        """Shapes of what is stored."""

    @abstractmethod
    def constants(self) -> Tensors:
        """Fixed tensors that it is built from: made once, neither stored nor trained."""

    @abstractmethod
    def build(self, tensors: Tensors, like: Tensor) -> Any:
        """Builds what is applied, from what is stored and from constants."""

    def first(self) -> dict[str, Tensor]:
        """First values of what is stored, float32."""
        import torch

        return {name: torch.zeros(shape) for name, shape in self.shapes.items()}


class Transformed(ABC):
    """Applies its own tensors between two transforms, of the input and of the output.

    y = decode(apply(encode(x))). Either transform may be missing. That of the input is shared by
    the layers that read it, that of the output by the experts of a layer.
    """

    @abstractmethod
    def transform(self, layout: Any, side: Side) -> Transform | None:
        """Describes the transform of the input or output, if there is one."""

    @abstractmethod
    def fit_transform(
        self, targets: Sequence[Target], layout: Any, side: Side
    ) -> dict[str, Tensor]:
        """Fits what a transform stores, for all layers that share it, float64."""

    @abstractmethod
    def encode(self, x: Tensor, operator: Any, layout: Any) -> Tensor:
        """Transform the input to the coordinates of `apply`.  # (tokens, in) -> (tokens, in')."""

    @abstractmethod
    def decode(self, u: Tensor, operator: Any, layout: Any) -> Tensor:
        """Transform the output of `apply` back.  # (tokens, out') -> (tokens, out)."""


def transform_of(layout: Layout, side: Side) -> Transform | None:
    """Describes the transform of a term's input or output, if there is one."""
    kind = structure(layout.structure)
    return kind.transform(layout, side) if isinstance(kind, Transformed) else None


def transform_shapes(layout: Layout, side: Side) -> Shapes:
    """Shapes of what is stored for the transform of a term's input or output."""
    found = transform_of(layout, side)
    return {} if found is None else found.shapes


def first_operators(layout: Layout, like: Tensor) -> dict[Side, Any]:
    """Builds the transforms of a term from their first values, in the dtype of a tensor."""
    return {
        side: item.build({k: t.to(like) for k, t in item.first().items()}, like)
        for side in SIDES
        if (item := transform_of(layout, side)) is not None
    }


def encoded(layout: Layout, x: Tensor, operator: Any = None) -> Tensor:
    """Transform a term's input to the coordinates of `apply`.  # (tokens, in) -> (tokens, in')."""
    kind = structure(layout.structure)
    return kind.encode(x, operator, layout) if isinstance(kind, Transformed) else x


def decoded(layout: Layout, u: Tensor, operator: Any = None) -> Tensor:
    """Transform the output of `apply` back.  # (tokens, out') -> (tokens, out)."""
    kind = structure(layout.structure)
    return kind.decode(u, operator, layout) if isinstance(kind, Transformed) else u


def dense_of(
    layout: Layout, tensors: Tensors, operators: Mapping[Side, Any] = NO_OPERATORS
) -> Tensor:
    """Returns the dense weight of a term, its transforms included.  # (..., out, in)."""
    kind = structure(layout.structure)
    if not isinstance(kind, Transformed):
        return kind.dense(tensors, layout)
    import torch

    like = next(iter(tensors.values()))
    eye = torch.eye(layout.in_features, dtype=like.dtype, device=like.device)
    u = kind.apply(kind.encode(eye, operators.get("in"), layout), tensors, layout)
    dense = kind.decode(u.reshape(-1, u.shape[-1]), operators.get("out"), layout)
    return dense.reshape(*u.shape[:-1], -1).mT
