"""What a structure is: pure functions of a layout, and the registry of all structures.

A structure answers four questions (layout, cost, fit, dense form) and applies itself in three
steps. ``encode`` acts on the input and ``decode`` on the output; their tensors may be shared by
several layers (all weights that read one input, or a whole model). ``core`` is a layer's own part.

    y = decode(core(encode(x)))
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import torch
from pydantic import BeforeValidator, SerializeAsAny
from torch import Tensor

from tcompress.errors import RecipeError
from tcompress.structures.terms import (
    TOL,
    Layout,
    Refusal,
    Shapes,
    Side,
    Site,
    Spec,
    Target,
    Tensors,
    clip_note,
    predicted_loss,
)

__all__ = [
    "TOL",
    "AnyLayout",
    "Layout",
    "Refusal",
    "Shapes",
    "Side",
    "Site",
    "Spec",
    "Structure",
    "Target",
    "Tensors",
    "clip_note",
    "predicted_loss",
    "register",
    "structure",
    "structures",
    "svd_flops",
]

S = TypeVar("S", bound=Spec)
L = TypeVar("L", bound=Layout)


class Structure(ABC, Generic[S, L]):
    """One way of storing and applying a weight. Stateless; tensors are passed in.

    The tensors of `core` may carry leading dimensions (experts); `z` then carries them too. Where
    a layout uses a bank, its tensors stand among those of `core` and `dense`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    spec: type[S]
    layout_type: type[L]
    in_auto: ClassVar[bool] = False
    """Whether `auto` offers it without being told to."""
    exact_losses: ClassVar[bool] = False
    """Whether `losses` are those of the fits themselves, to the rows that they are told of."""

    @abstractmethod
    def layout(self, spec: S, site: Site, budget: int | None = None) -> L:
        """Decides sizes for a site, or raises `Refusal`.

        Args:
            spec: The options.
            site: Dimensions and placement.
            budget: Parameters that may be spent, for structures that can fill a budget.
        """

    @abstractmethod
    def tensors(self, layout: L) -> Shapes:
        """Shapes of the layer's own tensors."""

    @abstractmethod
    def core_macs(self, layout: L) -> int:
        """Multiply-adds of `core` for one token, in a pass over many."""

    @abstractmethod
    def core(self, z: Tensor, tensors: Tensors, layout: L) -> Tensor:
        """Applies the layer's own tensors.  # (..., tokens, in) -> (..., tokens, out)."""

    @abstractmethod
    def fit(self, target: Target, layout: L, operators: Mapping[Side, Any]) -> dict[str, Tensor]:
        """Fits the layer's own tensors, float64, given the built operators of its sides."""

    @abstractmethod
    def start(self, layout: L, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws random tensors that keep the scale of unit-variance inputs, float32."""

    def quick_fit(self, target: Target, layout: L) -> Tensor:
        """Returns a dense weight that the layout can hold, cheaply: the fit is at least as good.

        This is what a budget judges a structure by.  # (out, in)
        """
        sides: tuple[Side, Side] = ("in", "out")
        operators = {
            side: self.operator(
                {
                    **{k: t.double() for k, t in self.start_side(layout, side).items()},
                    **self.constants(layout, side),
                },
                layout,
                side,
                target.product,
            )
            for side in sides
            if self.has_side(layout, side)
        }
        fitted = self.fit(replace(target, curvature=None), layout, operators)
        return self.dense({**fitted, **target.bank}, layout, operators)

    def losses(self, target: Target, constant: float, layouts: Sequence[L]) -> list[float]:
        """Predicts the loss of layouts that differ in size.

        Args:
            target: What a fit aims at, with curvature.
            constant: Predicted loss of a weight of zeros.
            layouts: Layouts of one site, by growing size.
        """
        seen: dict[L, float] = {}
        for layout in layouts:
            if layout not in seen:
                dense = self.quick_fit(target, layout)
                seen[layout] = predicted_loss(dense, target, constant)
        return [seen[layout] for layout in layouts]

    def looks_up(self, layout: L) -> bool:
        """Whether `rows` can be asked for, so that a table of embeddings may be stored so."""
        return False

    def rows(self, index: Tensor, tensors: Tensors, layout: L) -> Tensor:
        """Builds rows of the dense weight, where `looks_up` says so.  # (n,) -> (n, in)."""
        raise NotImplementedError

    def row_macs(self, layout: L) -> int:
        """Multiply-adds of `rows` for one row."""
        return 0

    def scale_rows(self, tensors: Tensors, scales: Tensor, layout: L) -> dict[str, Tensor] | None:
        """Multiplies the rows of the dense weight, if these tensors can say so.

        Args:
            tensors: The layer's own tensors.
            scales: A factor for each row.  # (out,)
            layout: Their layout.
        """
        return None

    def pass_macs(self, layout: L, tokens: int) -> tuple[int, int]:
        """Multiply-adds of `core` in a pass over so many tokens.

        Returns:
            Those done once in the pass, and those done for each token.
        """
        return 0, self.core_macs(layout)

    def fit_flops(self, layout: L, *, calibrated: bool) -> float:
        """Floating-point operations of `fit`, roughly."""
        return 2.0 * layout.out_features * layout.in_features**2 if calibrated else 0.0

    def fit_bytes(self, layout: L, *, calibrated: bool) -> int:
        """Bytes that `fit` holds beyond a few copies of the weight and its moments, at most."""
        return 0

    def side_key(self, layout: L, side: Side) -> Hashable:
        """Identifies a side: layers that read one input share it where this is equal."""
        return None

    def side_tensors(self, layout: L, side: Side) -> Shapes:
        """Shapes of the tensors of `encode` ("in") or `decode` ("out")."""
        return {}

    def side_macs(self, layout: L, side: Side) -> int:
        """Multiply-adds of `encode` or `decode` for one token."""
        return 0

    def has_side(self, layout: L, side: Side) -> bool:
        """Tells whether the structure does anything on this side."""
        return False

    def fit_side(self, targets: Sequence[Target], layout: L, side: Side) -> dict[str, Tensor]:
        """Fits the tensors of one side for all layers that share them, float64."""
        return {}

    def start_side(self, layout: L, side: Side) -> dict[str, Tensor]:
        """Returns the tensors of one side for training from scratch, float32."""
        return {name: torch.zeros(shape) for name, shape in self.side_tensors(layout, side).items()}

    def pool(self, spec: S, site: Site) -> Hashable:
        """Identifies the bank that a site would use: sites of a model with equal ones share it."""
        return None

    def bank_name(self, layout: L) -> str | None:
        """Names the bank that a layout uses, uniquely within a layer."""
        return None

    def bank_tensors(self, layout: L) -> Shapes:
        """Shapes of the tensors of the bank that a layout uses."""
        return {}

    def bank_share(self, layout: L) -> float:
        """What part of its bank a layer of this layout answers for; the users' add up to one."""
        return 0.0

    def fit_bank(self, targets: Sequence[Target], layouts: Sequence[L]) -> dict[str, Tensor]:
        """Fits a bank, float64, to what all its users aim at; every target has its weight."""
        return {}

    def bank_flops(self, layout: L, *, calibrated: bool) -> float:
        """Floating-point operations of `fit_bank`, roughly."""
        return 0.0

    def bank_bytes(self, layout: L, *, calibrated: bool) -> int:
        """Bytes that `fit_bank` holds, with all weights and moments that it looks at."""
        return 0

    def start_bank(self, layout: L, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws random tensors of a bank, as `start` does."""
        return {}

    def constants(self, layout: L, side: Side) -> Tensors:
        """Fixed tensors that an operator is built from: made once, neither stored nor trained.

        They come back in the `tensors` of `operator`, beside what is stored.
        """
        return {}

    def operator(self, tensors: Tensors, layout: L, side: Side, like: Tensor) -> Any:
        """Builds what a side applies from what it stores, in the dtype and device of `like`."""
        return None

    def encode(self, x: Tensor, operator: Any, layout: L) -> Tensor:
        """Takes the input to the core's coordinates.  # (tokens, in) -> (tokens, in')."""
        return x

    def decode(self, u: Tensor, operator: Any, layout: L) -> Tensor:
        """Takes the core's result to the host's coordinates.  # (tokens, out') -> (tokens, out)."""
        return u

    def dense(self, tensors: Tensors, layout: L, operators: Mapping[Side, Any]) -> Tensor:
        """Returns the dense weight of these tensors.  # (..., out, in)."""
        like = next(iter(tensors.values()))
        eye = torch.eye(layout.in_features, dtype=like.dtype, device=like.device)
        z = self.encode(eye, operators.get("in"), layout)
        u = self.core(z, tensors, layout)
        dense = self.decode(u.reshape(-1, u.shape[-1]), operators.get("out"), layout)
        return dense.reshape(*u.shape[:-1], -1).mT


def svd_flops(rows: int, columns: int) -> float:
    """Floating-point operations of a truncated SVD and of the products around it, roughly."""
    least = min(rows, columns)
    return 20.0 * least**3 + 4.0 * rows * columns * least


def _parse_layout(value: Any) -> Any:
    if isinstance(value, dict) and "structure" in value:
        return structure(str(value["structure"])).layout_type.model_validate(value)
    return value


AnyLayout = Annotated[SerializeAsAny[Layout], BeforeValidator(_parse_layout)]
"""A layout of any registered structure, as it is read from a plan."""


_STRUCTURES: dict[str, Structure[Any, Any]] = {}


def register(structure: Structure[Any, Any]) -> None:
    """Adds a structure to the registry.

    Raises:
        ValueError: The name is not lower snake case, or name or spec class are already taken.
    """
    name = structure.name
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"structure name `{name}` is not lower snake case")
    if name in _STRUCTURES or any(structure.spec is other.spec for other in _STRUCTURES.values()):
        raise ValueError(f"structure `{name}` or its spec class is already registered")
    _STRUCTURES[name] = structure


def structure(name: str) -> Structure[Any, Any]:
    """Looks a structure up by name.

    Raises:
        RecipeError: There is no such structure; the message lists the known ones.
    """
    if name in _STRUCTURES:
        return _STRUCTURES[name]
    close = difflib.get_close_matches(name, _STRUCTURES, 1)
    known = ", ".join(f"`{known}`" for known in _STRUCTURES)
    hint = f"did you mean `{close[0]}`?" if close else None
    raise RecipeError(f"unknown structure `{name}`; known structures are {known}", hint)


def structures() -> tuple[Structure[Any, Any], ...]:
    """Returns all structures in the order of registration."""
    return tuple(_STRUCTURES.values())
