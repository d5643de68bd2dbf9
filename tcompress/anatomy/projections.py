"""Modules that hold projection weights: finding them, their shapes, and which to leave alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from tcompress.anatomy.data import Kind, Role
from tcompress.anatomy.uses import computes_linear
from tcompress.errors import InputError

_EXPERT_PARAMETER: dict[Role, str] = {
    "experts_gate_up": "gate_up_proj",
    "experts_down": "down_proj",
}


class Shape(NamedTuple):
    """How a projection is stored."""

    kind: Kind
    in_features: int
    out_features: int
    bias: bool
    experts: int | None = None
    parameter: str = "weight"


def projections(block: nn.Module) -> dict[str, nn.Module]:
    """Return linear layers, stacked experts and routers below the block, by relative path."""
    modules = {name: module for name, module in block.named_modules() if name}
    return {
        name: module
        for name, module in modules.items()
        if isinstance(module, (nn.Linear, Conv1D))
        or _is_stacked(module)
        or (_is_router(name, modules) and _holds_matrix(module))
    }


def shape_of(module: nn.Module, role: Role, path: str) -> Shape:
    """Read the shape of a projection.

    Raises:
        InputError: The experts do not store the weight that the role asks for.
    """
    if isinstance(module, nn.Linear):
        return Shape("linear", module.in_features, module.out_features, module.bias is not None)
    if isinstance(module, Conv1D):
        return Shape("conv1d", module.nx, module.nf, True)
    parameter = _EXPERT_PARAMETER[role]
    weight = getattr(module, parameter, None)
    if weight is None or weight.ndim != 3:
        raise InputError(
            f"the experts `{path}` have no 3-D parameter `{parameter}`",
            "convert the checkpoint with a transformers release that stacks the experts",
        )
    experts, out_features, in_features = weight.shape
    bias = hasattr(module, f"{parameter}_bias")
    return Shape("experts", in_features, out_features, bias, experts, parameter)


def is_block(module: nn.Module) -> bool:
    """Tell whether an item of a list is a block, and not a head.

    Heads are nothing but linear layers, and do not end in the width that they begin with.
    """
    found = list(projections(module).values())
    owners = [part for part in module.modules() if any(True for _ in part.parameters(False))]
    plain = [part for part in owners if isinstance(part, nn.Linear)]
    if len(plain) < len(owners):
        return bool(found)
    return len(plain) > 1 and plain[0].in_features == plain[-1].out_features


def reason_to_refuse(name: str, block: nn.Module) -> str | None:
    """Say why a projection without a known role must be left alone, if it must.

    Args:
        name: Path of the projection below the block.
        block: The block.

    Returns:
        The reason, or None if the projection is an ordinary layer.
    """
    modules = dict(block.named_modules())
    module = modules[name]
    parent = modules[name.rpartition(".")[0]]
    if _is_router(name, modules):
        return "it routes tokens to experts, which a small error changes"
    if _is_stacked(module):
        return "its 3-D weights have a known layout in supported families only"
    if isinstance(parent, nn.MultiheadAttention):
        return "`nn.MultiheadAttention` uses its weight directly"
    kind = type(module)
    if kind.forward is not Conv1D.forward and not computes_linear(kind):
        return f"its class `{kind.__name__}` has a forward pass of its own"
    return None


def _is_stacked(module: nn.Module) -> bool:
    """Tell whether the module itself holds stacked matrices (tokens and kernels are not)."""
    return any(
        parameter.ndim == 3 and min(parameter.shape) > 1 and name != "weight"
        for name, parameter in module.named_parameters(recurse=False)
    )


def _holds_matrix(module: nn.Module) -> bool:
    return any(parameter.ndim == 2 for parameter in module.parameters(recurse=False))


def _is_router(name: str, names: Collection[str]) -> bool:
    """Tell whether a module that stands beside `experts` is, or is part of, the router."""
    steps = name.split(".")
    return any(
        ".".join([*steps[:depth], "experts"]) in names
        and ("router" in step or step == "gate" or step.endswith("_gate"))
        for depth, step in enumerate(steps)
    )
