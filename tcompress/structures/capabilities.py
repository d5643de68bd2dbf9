"""What only some structures can do, asked for with `isinstance`; and multiply-adds, counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tcompress.structures.base import Layout, Shapes, Side, Site, Target, Tensors, structure

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SIDES: tuple[Side, Side] = ("in", "out")
NO_OPERATORS: Mapping[Side, Any] = {}


class LooksUp(ABC):
    """Builds rows of its weight on demand, so that a table of embeddings may be stored so."""

    @abstractmethod
    def looks_up(self, layout: Any) -> bool:
        """Whether a layout has all that its rows are made of."""

    @abstractmethod
    def rows(self, index: Tensor, tensors: Tensors, layout: Any) -> Tensor:
        """Builds rows of the dense weight.  # (n,) -> (n, in)."""

    @abstractmethod
    def scale_rows(self, tensors: Tensors, scales: Tensor, layout: Any) -> dict[str, Tensor] | None:
        """Multiplies the rows of the dense weight, if these tensors can say so.  # (out,)."""


class Shared(NamedTuple):
    """The factors that a layer shares with others."""

    name: str  # unique within a layer
    shapes: Shapes  # of tensors that stand among those of `apply` and `dense`
    share: float  # what part of them a layer answers for; those of all users add up to one


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
        """What `fit_shared` takes, with all weights and moments that it looks at."""


def shared_of(layout: Layout) -> Shared | None:
    """Describes the shared factors that a term uses, if any."""
    kind = structure(layout.structure)
    return kind.shared(layout) if isinstance(kind, SharesFactors) else None


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
        """Takes the input to the coordinates of `apply`.  # (tokens, in) -> (tokens, in')."""

    @abstractmethod
    def decode(self, u: Tensor, operator: Any, layout: Any) -> Tensor:
        """Takes what `apply` returns to the model's coordinates.  # (tokens, out') -> (.., out)."""


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
    """Takes the input of a term to the coordinates of `apply`.  # (tokens, in) -> (tokens, in')."""
    kind = structure(layout.structure)
    return kind.encode(x, operator, layout) if isinstance(kind, Transformed) else x


def decoded(layout: Layout, u: Tensor, operator: Any = None) -> Tensor:
    """Takes what `apply` returns back.  # (tokens, out') -> (tokens, out)."""
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


class FitCost(NamedTuple):
    """What a fit takes, roughly."""

    flops: float
    bytes: int = 0  # memory beyond a few copies of the weight and its moments, at most


class CostsOther(ABC):
    """Has a fit that costs something else than one truncated SVD of the weight."""

    @abstractmethod
    def fit_cost(self, layout: Any, *, calibrated: bool) -> FitCost:
        """What `fit` takes."""


def svd_flops(rows: int, columns: int) -> float:
    """Counts what a truncated SVD and the products around it take, roughly."""
    least = min(rows, columns)
    return 20.0 * least**3 + 4.0 * rows * columns * least


def fit_cost(layout: Layout, *, calibrated: bool) -> FitCost:
    """What the fit of a term takes."""
    kind = structure(layout.structure)
    if isinstance(kind, CostsOther):
        return kind.fit_cost(layout, calibrated=calibrated)
    return FitCost(svd_flops(layout.out_features, layout.in_features))


class Macs(NamedTuple):
    """Multiply-adds of one term in a pass, as torch counts them on the meta device."""

    encode: int  # of the transform of the input
    apply: int  # of the term's own tensors, with what is done once in a pass
    decode: int  # of the transform of the output


@lru_cache(maxsize=4096)
def macs_of(layout: Layout, tokens: int) -> Macs:
    """Counts one term in a pass over so many tokens; building its transforms counts nothing."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.empty(tokens, layout.in_features, device="meta")
    transforms = (transform_of(layout, side) for side in SIDES)
    into, out = (None if t is None else t.build(_empty(t.shapes), x) for t in transforms)
    tensors = _all_tensors(layout)
    # With gradients a structure may take another way.
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        z = encoded(layout, x, into)
        encode = counter.get_total_flops()
        u = structure(layout.structure).apply(z, tensors, layout)
        apply = counter.get_total_flops() - encode
        decoded(layout, u, out)
        decode = counter.get_total_flops() - apply - encode
    return Macs(encode // 2, apply // 2, decode // 2)


@lru_cache(maxsize=1024)
def lookup_macs(layout: Layout) -> int:
    """Counts looking up one row of a term."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    kind = structure(layout.structure)
    if not isinstance(kind, LooksUp):
        return 0
    index = torch.empty(1, dtype=torch.long, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        kind.rows(index, _all_tensors(layout), layout)
    return counter.get_total_flops() // 2


def _all_tensors(layout: Layout) -> dict[str, Tensor]:
    """Empty tensors of a term, those that it shares among them."""
    shared, own = shared_of(layout), structure(layout.structure).tensors(layout)
    return _empty({**own, **(shared.shapes if shared else {})})


def _empty(shapes: Shapes) -> dict[str, Tensor]:
    import torch

    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
