"""Modules that hold projection weights: finding them, their shapes, and which to leave alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList
from transformers.pytorch_utils import Conv1D

from tcompress.anatomy.data import Kind, Role
from tcompress.anatomy.uses import computes_linear
from tcompress.errors import InputError

_UNREADABLE = "its forward pass does not say how it multiplies by its stacked weights"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NOT_OWN = ("torch.", "transformers.generation")
_ROUTES = "it routes tokens to experts, which a small error changes"
_SELECTS = "it selects the tokens to attend to, which a small error changes"


class Shape(NamedTuple):
    """How a projection is stored.

    Attributes:
        kind: See `Layer`.
        in_features: Width of one input row.
        out_features: Width of one output row.
        bias: Whether there is a bias.
        experts: Number of stacked weights, if it is a stack.
        parameter: Attribute of the module that holds the weight.
        transposed: Whether a stack is stored as (experts, in, out).
        role: Of a stack that Transformers describes; else `linear`.
        halves: Whether the first half of the outputs is a gate for the second.
        axes: Number of axes that a convolution moves along.
    """

    kind: Kind
    in_features: int
    out_features: int
    bias: bool
    experts: int | None = None
    parameter: str = "weight"
    transposed: bool = False
    role: Role = "linear"
    halves: bool = False
    axes: int = 0


def projections(block: nn.Module) -> dict[str, nn.Module]:
    """Return linear layers, pointwise convolutions, stacked experts and routers, by path."""
    modules = {name: module for name, module in block.named_modules() if name}
    return {
        name: module
        for name, module in modules.items()
        if isinstance(module, (nn.Linear, Conv1D, nn.MultiheadAttention))
        or is_pointwise(module)
        or _stacks(module, name)
        or (chooses(name, modules) and _holds_matrix(module))
    }


def is_pointwise(module: nn.Module) -> bool:
    """Tells whether a module is a convolution whose kernel covers one point, in whole or groups."""
    return (
        isinstance(module, _ConvNd)
        and not module.transposed
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and set(module.kernel_size) == {1}
        and not (isinstance(module.padding, tuple) and any(module.padding))
        and min(module.weight.shape[:2]) > 1
    )


def shapes_of(module: nn.Module) -> tuple[Shape, ...]:
    """Read the shapes of a projection: one, or one for each stack of weights, in order of use."""
    if isinstance(module, nn.Linear):
        return (Shape("linear", module.in_features, module.out_features, module.bias is not None),)
    if isinstance(module, Conv1D):
        return (Shape("conv1d", module.nx, module.nf, True),)
    if isinstance(module, _ConvNd):
        sizes = module.in_channels, module.out_channels
        return (Shape("pointwise", *sizes, module.bias is not None, axes=len(module.kernel_size)),)
    stacks = _stacks(module)
    ways = _ways(module)
    found = [(order, name) for order, name in enumerate(ways) if name in stacks]
    return tuple(_stack(module, name, transposed=ways[name]) for _, name in sorted(found))


def shape_of(module: nn.Module, role: Role, path: str) -> Shape:
    """Read the shape of the projection of a module that has a role.

    Raises:
        InputError: The experts do not store the weight that the role asks for.
    """
    shapes = shapes_of(module)
    if not role.startswith("experts_"):
        return shapes[0]
    found = next((shape for shape in shapes if shape.role == role), None)
    if found is None:
        wanted = {"experts_gate_up": "gate_up_proj", "experts_down": "down_proj"}[role]
        raise InputError(
            f"the experts `{path}` have no 3-D parameter `{wanted}`",
            "convert the checkpoint with a transformers release that stacks the experts",
        )
    return found


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
    module, kind = modules[name], type(modules[name])
    parent = modules[name.rpartition(".")[0]]
    if reason := chooses(name, modules):
        return reason
    if not all(parameter.numel() for parameter in module.parameters(recurse=False)):
        return "it has weights without numbers"
    if isinstance(module, nn.MultiheadAttention) or isinstance(parent, nn.MultiheadAttention):
        return "`nn.MultiheadAttention` uses its weight directly"
    if stacks := _stacks(module, name):
        ways = _ways(module)
        unread = [parameter for parameter in stacks if parameter not in ways]
        if unread:
            return f"{_UNREADABLE}: " + ", ".join(f"`{parameter}`" for parameter in unread)
    elif isinstance(module, _ConvNd):
        if module.groups > 1:
            return "it is a convolution in groups"
        if not _applies_kernel(module):
            return f"its class `{kind.__name__}` has a forward pass of its own"
    elif kind.forward is not Conv1D.forward and not computes_linear(kind):  # type: ignore[arg-type]
        return f"its class `{kind.__name__}` has a forward pass of its own"
    return None


def _applies_kernel(module: nn.Module) -> bool:
    """Tells whether a convolution is one of PyTorch's own, and not one that changes its weight."""
    kind: Any = type(module)
    return any(
        kind.forward is own.forward and kind._conv_forward is own._conv_forward
        for own in _CONVOLUTIONS
    )


def _stacks(module: nn.Module, path: str = "") -> tuple[str, ...]:
    """Name the parameters that are stacked matrices: not tokens, kernels or decay rates.

    These are the ones that a forward pass multiplies by, and all that experts have.
    """
    if isinstance(module, (nn.Linear, nn.Embedding, _ConvNd, nn.Bilinear, ParametrizationList)):
        return ()
    own = [
        (name, parameter)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1 and "bias" not in name
    ]
    deep = [name for name, parameter in own if parameter.ndim == 3]
    if "expert" in f"{path.rpartition('.')[2]} {type(module).__name__}".lower():
        return tuple(deep or (name for name, _ in own))  # some stack them one below the other
    ways = _ways(module) if deep else {}
    return tuple(name for name in deep if name in ways)


def _stack(module: nn.Module, name: str, *, transposed: bool) -> Shape:
    experts, out_features, in_features = getattr(module, name).shape
    if transposed:
        out_features, in_features = in_features, out_features
    described = bool(_described(module))
    up = name in ("gate_up_proj", "up_proj")
    role: Role = "linear" if not described else "experts_gate_up" if up else "experts_down"
    return Shape(
        "experts",
        in_features,
        out_features,
        hasattr(module, f"{name}_bias"),
        experts,
        name,
        transposed,
        role,
        halves=described and name == "gate_up_proj" and bool(module.is_concatenated),
    )


def _described(module: nn.Module) -> dict[str, bool]:
    """Tell by attributes, where Transformers sets them, which stacks are stored transposed."""
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed")):
        return {}
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return dict.fromkeys(names, bool(module.is_transposed))


def _ways(module: nn.Module) -> Mapping[str, bool]:
    """Tell which attributes a forward pass multiplies by, and whether they are (in, out)."""
    return _described(module) or _read(type(module))  # type: ignore[arg-type]


@cache
def _read(kind: type[nn.Module]) -> Mapping[str, bool]:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return {}
    seen: dict[str, set[str]] = {}  # attributes behind a variable; "~" marks a transposed one
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            behind = set(_behind(node.value, seen))
            seen[node.targets[0].id] = behind if len(behind) == 1 else set()
    for node in ast.walk(tree):
        weight, flipped = _factor(node)
        if weight is not None:
            behind = set(_behind(weight, seen))
            if len(behind) == 1:
                name = behind.pop()
                found.setdefault(name.strip("~"), flipped != name.startswith("~"))
    return found


def _factor(node: ast.AST) -> tuple[ast.expr | None, bool]:
    """Give the weight of a product with rows, and whether it is meant as (in, out)."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.right, True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "linear" and len(node.args) > 1:
            return node.args[1], False
        if node.func.attr in ("matmul", "bmm", "mm") and node.args:
            return node.args[-1], True
    return None, False


def _behind(node: ast.expr, seen: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the attribute that an expression selects from or transposes."""
    if isinstance(node, ast.Name):
        yield from seen.get(node.id, ())
    elif isinstance(node, ast.Subscript):
        yield from _behind(node.value, seen)
    elif isinstance(node, ast.IfExp):
        yield from (*_behind(node.body, seen), *_behind(node.orelse, seen))
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == "self":
            yield node.attr
        elif node.attr in ("T", "mT"):
            yield from map(_flip, _behind(node.value, seen))
    elif isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        yield from map(_flip, _behind(node.value, seen))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "index_select" and node.args:
            yield from _behind(node.args[0], seen)
        elif node.func.attr in ("transpose", "to", "float", "type_as", "contiguous"):
            inner = _behind(node.func.value, seen)
            yield from map(_flip, inner) if node.func.attr == "transpose" else inner


def _flip(name: str) -> str:
    return name[1:] if name.startswith("~") else f"~{name}"


def _holds_matrix(module: nn.Module) -> bool:
    return any(parameter.ndim == 2 for parameter in module.parameters(recurse=False))


def chooses(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Say what a module, or one above it, chooses, if it is a router, a gate or an indexer."""
    path, best = "", False
    for step in name.split("."):
        parent, path = path, f"{path}.{step}" if path else step
        module, beside = modules[path], modules.get(f"{parent}.experts" if parent else "experts")
        label = f"{step} {type(module).__name__}".lower()
        if "indexer" in label:
            return _SELECTS
        gate = _is_gate(step) or _scores(module, beside)
        if "router" in label or (gate and (best or beside not in (None, module))):
            return _ROUTES
        best = _takes_best(type(module)) and "attention" not in label  # type: ignore[arg-type]
        gated = any(_is_gate(own) or "router" in own for own, _ in module.named_children())
        if best and not gated and not _has_experts(module):
            return _ROUTES
    return None


def _is_gate(step: str) -> bool:
    return step == "gate" or step.endswith("_gate")


def _scores(module: nn.Module, experts: nn.Module | None) -> bool:
    """Tell whether a linear layer has one output for every item of a list of experts."""
    listed = isinstance(experts, (nn.ModuleList, nn.ModuleDict))
    return listed and getattr(module, "out_features", None) == len(experts)  # type: ignore[arg-type]


def _has_experts(module: nn.Module) -> bool:
    return any("expert" in name.lower() or _stacks(item) for name, item in module.named_modules())


@cache
def _takes_best(kind: type[nn.Module]) -> bool:
    """Tell whether a class of its own chooses the k best of something."""
    bases = [base for base in kind.__mro__ if not base.__module__.startswith(_NOT_OWN)]
    own = (value for base in bases for value in vars(base).values())
    codes = (getattr(inspect.unwrap(item), "__code__", None) for item in own if callable(item))
    return any(code is not None and "topk" in code.co_names for code in codes)
