"""Puts structured layers, and other forms of modules, in the place of dense ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from tcompress.errors import ArtifactError
from tcompress.planning.entries import FactorsKey, FormPlan, LayerPlan
from tcompress.structures.modules.embedding import LookupScale, StructuredEmbedding, tie_tables
from tcompress.structures.modules.experts import StructuredExperts, child_of
from tcompress.structures.modules.linear import PointwiseConvolution, StructuredLinear
from tcompress.structures.modules.shared import FactorsModule


def install_layers(
    root: nn.Module,
    entries: Iterable[LayerPlan],
    runtime_name: Callable[[str], str | None],
    factors: MutableMapping[FactorsKey, FactorsModule] | None = None,
    **place: Any,
) -> dict[str, StructuredLinear | StructuredExperts]:
    """Replaces every planned layer by a structured one with empty tensors; returns them by name.

    Owners of shared inputs come before the layers that share them. `runtime_name` gives the module
    path below `root` of a planned name, or None where a model without some heads has no such
    layer. To `factors` that were made before, what these layers own is added. `place` is dtype and
    device.
    """
    made: dict[str, StructuredLinear | StructuredExperts] = {}
    factors = {} if factors is None else factors
    for entry in entries:
        path = runtime_name(entry.name)
        if path is None:
            continue
        dense = root.get_submodule(path)
        new: StructuredLinear | StructuredExperts
        if entry.kind == "experts":
            new = dense if isinstance(dense, StructuredExperts) else StructuredExperts(dense)
            new.rewrite(entry.parameter, entry.parts, transposed=entry.transposed, **place)
        elif entry.kind == "embedding":
            padding, scale = getattr(dense, "padding_idx", None), LookupScale.of(dense)
            new = StructuredEmbedding(entry.parts, padding_idx=padding, scale=scale, **place)
        else:
            owner = made.get(entry.input_of) if entry.input_of else None
            new = _linear(entry, dense, owner, factors, place)
            factors.update({(entry.name, name): new.factors[name] for name in entry.own_factors})
        made[entry.name] = new
        set_module(root, path, new)
        if isinstance(new, StructuredEmbedding):
            tie_tables(root, path, new)
    return made


def _linear(
    entry: LayerPlan,
    dense: nn.Module,
    owner: nn.Module | None,
    factors: Mapping[FactorsKey, FactorsModule],
    place: Mapping[str, Any],
) -> StructuredLinear:
    shared = {name: (other, name) for name, other in entry.bank_of.items()}
    if not factors.keys() >= set(shared.values()):
        raise ArtifactError(
            f"layer `{entry.name}` shares tensors with layers that this model lacks",
            "load the whole model, or export it first: `tcompress export MODEL --to dense`",
        )
    kind: Callable[..., StructuredLinear] = StructuredLinear
    if entry.kind == "pointwise":
        kind = partial(PointwiseConvolution, host=dense)
    return kind(
        entry.parts,
        bias=entry.bias,
        input_of=owner if isinstance(owner, StructuredLinear) else None,
        readers=entry.readers,
        factors={name: factors[key] for name, key in shared.items()},
        **place,
    )


def set_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Replaces a submodule, keeping its training mode."""
    parent, _, leaf = path.rpartition(".")
    module.train(root.get_submodule(path).training)
    setattr(root.get_submodule(parent), leaf, module)


def stored_name(entry: LayerPlan, tensor: str) -> str:
    """Returns the name below the layer under which a tensor is stored."""
    return f"{child_of(entry.parameter)}.{tensor}" if entry.kind == "experts" else tensor


def fill(module: nn.Module, entry: LayerPlan, tensors: Mapping[str, Tensor]) -> None:
    """Copies fitted tensors into an installed layer."""
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[stored_name(entry, name)].copy_(tensor)


def slice_scales(p: int, scaling: str) -> Tensor:
    """Returns the factor of the frequencies in each slice, float64.  # (p,)."""
    k = torch.arange(1, p + 1, dtype=torch.float64)
    if scaling == "linear":
        return k / p
    if scaling == "exponential":
        return torch.exp2((k - 1) / max(p - 1, 1))
    return k if scaling == "harmonic" else torch.ones_like(k)


def slice_positions(tokens: int, width: int, p: int, scaling: str) -> Tensor:
    """Builds sinusoidal positions with frequencies scaled slice by slice, float64, (tokens, width).

    Feature j of slice k, both from 1, of token t from 1 is sin or cos (j odd or even) of
    t alpha_k / 10000^(2 floor((j - 1) / 2) / d_s), with d_s = width / p. Slices are runs of
    features.

    Reference: "Structured Multidimensional Representation Learning for Large Language Models"
    (arXiv:2603.05727), Definition 13 and Remark 4.
    """
    features = width // p
    index = torch.arange(features)
    rates = 10000.0 ** (-2.0 * (index // 2).double() / features)  # (d_s,)
    time = torch.arange(1, tokens + 1, dtype=torch.float64)
    angles = time[:, None, None] * slice_scales(p, scaling)[:, None] * rates  # (T, p, d_s)
    return torch.where(index % 2 == 0, angles.sin(), angles.cos()).reshape(tokens, width)


class SliceNorm(nn.LayerNorm):
    """A layer norm with mean and variance of each of p slices, which are runs of the features.

    Scales and shifts are those of all features. Reference: arXiv:2603.05727, Definition 17.
    """

    def __init__(self, width: int, p: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(width, eps, **options)
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        slices = input.unflatten(-1, (self.p, -1))
        normal = layer_norm(slices, slices.shape[-1:], eps=self.eps).flatten(-2)
        scaled = normal * self.weight
        return scaled if self.bias is None else scaled + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


def install_forms(
    root: nn.Module,
    entries: Iterable[FormPlan],
    runtime_name: Callable[[str], str | None],
    **place: Any,
) -> None:
    """Gives planned modules their form; tensors keep their names. See `install_layers`."""
    for entry in entries:
        path = runtime_name(entry.name)
        if path is None:
            continue
        module = root.get_submodule(path)
        if entry.kind == "norm":
            assert isinstance(module, nn.LayerNorm)
            bias = module.bias is not None
            norm = SliceNorm(entry.shape[-1], entry.p, module.eps, bias=bias, **place)
            set_module(root, path, norm)
            continue
        table = torch.empty(entry.shape, **place)
        # What is no parameter is trained by nobody, whichever trainer it is.
        module._parameters.pop("weight", None)
        module._buffers.pop("weight", None)
        if entry.is_trained:
            module.register_parameter("weight", nn.Parameter(table))
        else:
            module.register_buffer("weight", table)


def first_table(entry: FormPlan, random: Tensor) -> Tensor:
    """Makes the table of positions that a model begins with, float64.  # (rows, width).

    Sinusoids are scaled to the size of the random first values of the family's own model: words are
    as large as these, and would drown in sinusoids between -1 and 1. Rows that stand for no
    position are zero.
    """
    if entry.form == "learned":
        return random.double()
    rows, width = entry.shape
    table = torch.zeros(rows, width, dtype=torch.float64)
    table[entry.offset :] = slice_positions(rows - entry.offset, width, entry.p, entry.form)
    size = random.double().square().mean().sqrt()
    return table * size / table[entry.offset :].square().mean().sqrt() if size > 0 else table
