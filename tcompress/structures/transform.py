"""The invertible transform of an L-product layer: fixed, learned or fitted.

Every kind is orthogonal. What is stored (nothing, or generators) is turned into an *operator*,
which is what the layer applies: a p x p matrix of the tubes, blocks of a staged rotation, or both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tcompress.linalg.rotation import (
    Stages,
    build_blocks,
    fold_tube_transform,
    merges_with,
    mix_tubes,
    rotate,
    rotate_back,
)
from tcompress.linalg.transforms import fixed_transform
from tcompress.options.methods import TransformKind as TransformKind
from tcompress.structures.base import Shapes, Tensors
from tcompress.structures.capabilities import Transform


class Operator(NamedTuple):
    """A built transform.

    Attributes:
        blocks: Stages of the rotation, or None.  # (stages, groups, b, b)
        tubes: Transform of the tubes that follows, or None.  # (p, p)
    """

    blocks: Tensor | None
    tubes: Tensor | None


@dataclass(frozen=True)
class TransformLayout(Transform):
    """Kind and sizes of one transform."""

    kind: TransformKind
    features: int
    p: int
    block: int
    stages: int
    seed: int

    @property
    def rotation(self) -> Stages:
        """Shape of the staged rotation of the `fitted` kind."""
        return Stages(self.features, self.block, self.stages)

    def tube_matrix(self) -> Tensor:
        """Returns the fixed p x p part, float64."""
        kind = "dct" if self.kind in ("learned", "fitted") else self.kind
        return fixed_transform(kind, self.p, self.seed)

    @property
    def shapes(self) -> Shapes:
        if self.kind == "learned":
            return {"generators": (self.p * (self.p - 1) // 2,)}
        return {"generators": self.rotation.generators_shape} if self.kind == "fitted" else {}

    def constants(self) -> Tensors:
        # Compilers cannot trace into scipy, so a module makes the fixed part beforehand.
        return {"tubes": self.tube_matrix()}

    def build(self, tensors: Tensors, like: Tensor) -> Operator:
        """Builds the operator; gradients flow to the generators."""
        fixed = tensors["tubes"] if "tubes" in tensors else self.tube_matrix()
        fixed = fixed.to(like.device)
        if self.kind == "learned":
            turn = build_blocks(tensors["generators"], self.p)
            return Operator(None, (turn @ fixed.to(turn)).to(like.dtype))
        if self.kind != "fitted":
            return Operator(None, fixed.to(like.dtype))
        blocks = build_blocks(tensors["generators"], self.block)
        if merges_with(self.rotation, self.p):
            return Operator(fold_tube_transform(blocks, fixed).to(like.dtype), None)
        return Operator(blocks.to(like.dtype), fixed.to(like.dtype))


def apply_transform(x: Tensor, operator: Operator) -> Tensor:
    """Applies the transform.  # (tokens, features) -> (tokens, features)."""
    if operator.blocks is not None:
        x = rotate(x, operator.blocks)
    return x if operator.tubes is None else mix_tubes(x, operator.tubes)


def apply_inverse(x: Tensor, operator: Operator) -> Tensor:
    """Applies the inverse, which is the transpose.  # (tokens, features) -> same."""
    if operator.tubes is not None:
        x = mix_tubes(x, operator.tubes.mT)
    return x if operator.blocks is None else rotate_back(x, operator.blocks)
