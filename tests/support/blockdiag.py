"""A structure of one file: square blocks on the diagonal. Importing it registers it."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from tcompress.linalg.slices import diagonal_blocks, fit_slices
from tcompress.structures import Layout, Refusal, Site, Spec, Structure, Target, register
from tcompress.structures.base import Shapes, Tensors


class BlockSpec(Spec):
    """Options of `blockdiag`."""

    name: Literal["blockdiag"] = "blockdiag"
    blocks: int = Field(8, ge=1, description="number of blocks; 1/blocks of the weights is kept")


class BlockLayout(Layout):
    """Blocks of equal shape."""

    structure: Literal["blockdiag"] = "blockdiag"
    blocks: int


class BlockDiagonal(Structure[BlockSpec, BlockLayout]):
    """Every block of outputs reads one block of inputs."""

    name = "blockdiag"
    summary = "blocks on the diagonal"
    reference = "a test"
    spec = BlockSpec
    layout_type = BlockLayout

    def layout(self, spec: BlockSpec, site: Site, budget: int | None = None) -> BlockLayout:
        if site.in_features % spec.blocks or site.out_features % spec.blocks:
            raise Refusal(f"{spec.blocks} blocks do not divide its widths")
        return BlockLayout(
            in_features=site.in_features, out_features=site.out_features, blocks=spec.blocks
        )

    def tensors(self, layout: BlockLayout) -> Shapes:
        count = layout.blocks
        return {"weights": (count, layout.out_features // count, layout.in_features // count)}

    def apply(self, x: Tensor, tensors: Tensors, layout: BlockLayout) -> Tensor:
        parts = x.unflatten(-1, (layout.blocks, -1)).transpose(-3, -2)
        return (parts @ tensors["weights"].mT).transpose(-3, -2).flatten(-2)

    def fit(self, target: Target, layout: BlockLayout) -> dict[str, Tensor]:
        if target.gram is None:
            return {"weights": diagonal_blocks(target.product, layout.blocks).contiguous()}
        return {"weights": fit_slices(target.product, target.gram, layout.blocks)}

    def start(self, layout: BlockLayout, generator: torch.Generator) -> dict[str, Tensor]:
        shape = self.tensors(layout)["weights"]
        return {"weights": torch.randn(shape, generator=generator) / shape[-1] ** 0.5}


register(BlockDiagonal())
