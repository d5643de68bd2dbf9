"""Modules of a host in another form: positions that are not trained, norms of single slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from tcompress.integration.build import set_module
from tcompress.linalg.positions import slice_positions
from tcompress.planning.entries import FormPlan


class SliceNorm(nn.LayerNorm):
    """A layer norm whose mean and variance are those of each slice of the features by itself.

    Scales and shifts are those of all features, as in the host's.

    Reference: arXiv:2603.05727, Definition 17.

    Args:
        width: Number of features, which p divides.
        p: Number of slices, runs of features.
        eps: Added to the variance.
        bias: Whether there are shifts.
        dtype: Dtype of the parameters.
        device: Device of the parameters.
    """

    def __init__(
        self,
        width: int,
        p: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(width, eps, bias=bias, dtype=dtype, device=device)
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        """Normalises.  # (..., width) -> (..., width)."""
        slices = input.unflatten(-1, (self.p, -1))
        normal = layer_norm(slices, slices.shape[-1:], eps=self.eps).flatten(-2)
        scaled = normal * self.weight
        return scaled if self.bias is None else scaled + self.bias

    def extra_repr(self) -> str:
        """Shows the slices too."""
        return f"{super().extra_repr()}, p={self.p}"


def install_forms(
    root: nn.Module,
    entries: Iterable[FormPlan],
    runtime_name: Callable[[str], str | None],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Gives planned modules their form; tensors keep their names and are loaded as before.

    Args:
        root: Model.
        entries: Plans.
        runtime_name: Gives the module path below `root` of a planned name, or None where the
            model has no such module.
        dtype: Dtype of the tensors.
        device: Device of the tensors.
    """
    for entry in entries:
        path = runtime_name(entry.name)
        if path is None:
            continue
        host = root.get_submodule(path)
        if entry.kind == "norm":
            assert isinstance(host, nn.LayerNorm)
            made = SliceNorm(
                entry.shape[-1],
                entry.p,
                host.eps,
                bias=host.bias is not None,
                dtype=dtype,
                device=device,
            )
            set_module(root, path, made)
            continue
        table = torch.empty(entry.shape, dtype=dtype, device=device)
        # What is no parameter is trained by nobody, whichever trainer it is.
        host._parameters.pop("weight", None)
        host._buffers.pop("weight", None)
        if entry.is_trained:
            host.register_parameter("weight", nn.Parameter(table))
        else:
            host.register_buffer("weight", table)


def first_table(entry: FormPlan, host: Tensor) -> Tensor:
    """Makes the table of positions that a model begins with.

    Sinusoids are scaled to the size of the host's own first values: words are as large as these,
    and would drown in sinusoids between -1 and 1.

    Args:
        entry: The plan.
        host: What the host draws.  # (rows, width)

    Returns:
        The table, float64; rows that stand for no position are zero.  # (rows, width)
    """
    if entry.form == "learned":
        return host.double()
    rows, width = entry.shape
    table = torch.zeros(rows, width, dtype=torch.float64)
    table[entry.offset :] = slice_positions(rows - entry.offset, width, entry.p, entry.form)  # type: ignore[arg-type]
    size = host.double().square().mean().sqrt()
    return table * size / table[entry.offset :].square().mean().sqrt() if size > 0 else table
