"""Width: an ordinary matrix between fewer channels (method ``width``).

Neurons of feed-forwards and dimensions of heads lie between layers. Which of them stay is chosen
for the layers on both sides together (`planning.sites`); what is stored is a smaller matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from tcompress import linalg
from tcompress.structures.base import (
    Layout,
    Roundings,
    RoundsInNorm,
    Shapes,
    Site,
    Spec,
    Structure,
    Target,
    Tensors,
    register,
)

if TYPE_CHECKING:
    from torch import Tensor


class WidthSpec(Spec):
    """Options of `width`: sizes are those of `keep_neurons` and `head_size`, or a budget's."""

    name: Literal["width"] = "width"

    has_size: ClassVar[bool] = False
    fills: ClassVar[bool] = True
    narrows: ClassVar[bool] = True


class WidthLayout(Layout):
    """A plain matrix (out, in) of the channels that stay."""

    structure: Literal["width"] = "width"
    in_features: int = Field(ge=0)
    out_features: int = Field(ge=0)

    is_plain: ClassVar[bool] = True


def plain_layout(inputs: int, outputs: int) -> WidthLayout:
    """Lay out an ordinary matrix of so many inputs and outputs."""
    return WidthLayout(in_features=inputs, out_features=outputs)


class Width(Structure[WidthSpec, WidthLayout], RoundsInNorm):
    """Fewer channels; what reads them is refitted by least squares."""

    name = "width"
    summary = "fewer neurons, fewer or smaller heads: plain smaller matrices, refitted on the data"
    reference = "He et al. 2017 (arXiv:1707.06168); order by orthogonal matching pursuit"
    spec = WidthSpec
    layout_type = WidthLayout
    in_auto = True
    saves_time = True
    exact_losses = True
    reads_curvature = False

    def layout(self, spec: WidthSpec, site: Site, budget: int | None = None) -> WidthLayout:
        return WidthLayout(**site.widths)

    def tensors(self, layout: WidthLayout) -> Shapes:
        return {"w": (layout.out_features, layout.in_features)}

    def apply(self, x: Tensor, tensors: Tensors, layout: WidthLayout) -> Tensor:
        return x @ tensors["w"].mT

    def dense(self, tensors: Tensors, layout: WidthLayout) -> Tensor:
        return tensors["w"]

    def fit(self, target: Target, layout: WidthLayout) -> dict[str, Tensor]:
        return {"w": linalg.fit_slices(target.product, target.gram, 1)[0]}

    def rounded(
        self, target: Target, layout: WidthLayout, tensors: Tensors, roundings: Roundings
    ) -> dict[str, Tensor]:
        if "w" not in roundings:
            return dict(tensors)
        return {"w": linalg.rounded_in_norm(tensors["w"], target.full_gram(), roundings["w"])}


register(Width())
