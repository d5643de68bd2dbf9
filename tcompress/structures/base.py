"""What a structure is: pure functions of a layout, and the registry of all structures.

Eight methods say all that every structure has to: its sizes, how it is applied and what fits it.
What only some can do, such as sharing tensors between layers, stands in `capabilities.py`.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import torch
from pydantic import BeforeValidator, SerializeAsAny
from torch import Tensor

from tcompress.errors import RecipeError
from tcompress.structures.terms import (
    Layout,
    Refusal,
    Shapes,
    Side,
    Site,
    Spec,
    Target,
    Tensors,
    predicted_loss,
)

__all__ = [
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
    "predicted_loss",
    "register",
    "structure",
    "structures",
]

S = TypeVar("S", bound=Spec)
L = TypeVar("L", bound=Layout)


class Structure(ABC, Generic[S, L]):
    """One way of storing and applying a weight. Stateless; tensors are passed in.

    The tensors of `apply` may carry leading dimensions (experts); `x` then carries them too.
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
    def apply(self, x: Tensor, tensors: Tensors, layout: L) -> Tensor:
        """Multiplies rows by the weight.  # (..., tokens, in) -> (..., tokens, out)."""

    @abstractmethod
    def fit(self, target: Target, layout: L) -> dict[str, Tensor]:
        """Fits the layer's own tensors, float64."""

    @abstractmethod
    def start(self, layout: L, generator: torch.Generator) -> dict[str, Tensor]:
        """Draws random tensors that keep the scale of unit-variance inputs, float32."""

    def dense(self, tensors: Tensors, layout: L) -> Tensor:
        """Returns the dense weight of these tensors.  # (..., out, in)."""
        like = next(iter(tensors.values()))
        eye = torch.eye(layout.in_features, dtype=like.dtype, device=like.device)
        return self.apply(eye, tensors, layout).mT

    def quick_fit(self, target: Target, layout: L) -> Tensor:
        """Returns a dense weight that the layout can hold, cheaply: the fit is at least as good.

        This is what a budget judges a structure by.  # (out, in)
        """
        fitted = self.fit(replace(target, curvature=None), layout)
        return self.dense({**fitted, **target.bank}, layout)

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
