"""Three projections that read one input through one side."""

from typing import Any

import torch
from torch import Tensor, nn

from tcompress.structures import Site, structure
from tcompress.structures.modules.linear import PartLayout, StructuredLinear
from tests.support.structures import fill_random

WIDTH, OUTPUTS = 16, (24, 16, 8)
LPROD: dict[str, dict[str, int]] = {
    "dct": {},
    "dft": {},
    "learned": {},
    "fitted": {"block": 4},  # the transform of the tubes is folded into the last stage
    "fitted-3-stages": {"block": 4, "stages": 3},  # it is not
}
TT: dict[str, dict[str, object]] = {
    "tt": {"rank": 3},
    "tt-contract": {"order": 3, "rank": 3, "apply": "contract"},
}
METHODS = ["lowrank", *TT, *LPROD]


def terms_of(method: str, outputs: int, residual: int = 0) -> tuple[Any, ...]:
    site = Site(WIDTH, outputs, "in")
    low, lprod = structure("lowrank"), structure("lprod")
    extra = (low.layout(low.spec(rank=residual), site),) if residual else ()
    if method == "lowrank":
        return (low.layout(low.spec(rank=3), site), *extra)
    if method in TT:
        train = structure("tt")
        return (train.layout(train.spec(**TT[method]), site), *extra)
    options = {"transform": method.partition("-")[0], **LPROD[method]}
    return (lprod.layout(lprod.spec(**options), site), *extra)


class Trio(nn.Module):
    """Three projections of one input, whose input side the first one owns."""

    def __init__(self, method: str = "fitted", *, shared: bool = True, residual: int = 0) -> None:
        super().__init__()
        owner = None
        self.names = ("q", "k", "v")
        for name, outputs in zip(self.names, OUTPUTS, strict=True):
            part = PartLayout(name=name, terms=terms_of(method, outputs, residual))
            readers = 3 if shared and owner is None else 1
            layer = StructuredLinear(
                [part], input_of=owner, readers=readers, dtype=torch.float64, bias=True
            )
            self.add_module(name, layer)
            owner = layer if shared and owner is None else owner
        fill_random(self)

    @property
    def generators(self) -> Tensor:
        return self.q.tc_in0.generators

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([getattr(self, name)(x) for name in self.names], -1)
