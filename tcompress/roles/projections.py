"""Modules that hold projection weights: finding them, their shapes, and which to leave alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList
from transformers.pytorch_utils import Conv1D

from tcompress.errors import InputError
from tcompress.roles.families import Kind, Layer, Part, Role

# Methods that build a model, not such that compute.
_BUILDING = ("__init__", "_init", "init_", "reset_", "tie_", "_tie", "resize", "_resize", "load")
_HARMLESS = frozenset({"dtype", "device", "requires_grad", "is_cuda"})
_QUESTIONS = frozenset({"isinstance", "hasattr", "type", "id"})
_ANY = "*"


class _Use(NamedTuple):
    """Steps from a module to one whose weight is read (`*` for all children), where, and when."""

    steps: tuple[str, ...]
    method: str
    conditions: tuple[tuple[str, bool], ...] = ()


def direct_uses(model: nn.Module) -> dict[nn.Module, str]:
    """Find modules whose `weight` a method of another module reads, and say which one.

    The methods' sources are read; initialisation, and reading dtype or device, are no use.
    """
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        kind: Any = type(module)
        for use in _uses(kind):
            if all(_may_be(module, *condition) for condition in use.conditions):
                reason = f"`{kind.__name__}.{use.method}` uses its weight directly"
                for child in _at(module, use.steps):
                    found.setdefault(child, reason)
    return found


@cache
def computes_linear(kind: Any) -> bool:
    """Tell by trial, on numbers small and large, whether a class computes what `nn.Linear` does."""
    if kind.forward is nn.Linear.forward:
        return True
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            layer: Any = kind(6, 4).float().eval()  # type: ignore[call-arg]
            layer.weight.normal_()
            x = torch.randn(2, 3, 6) * torch.tensor([0.01, 1.0, 300.0]).view(3, 1)
            want = functional.linear(x, layer.weight, layer.bias)
            got = layer(x)
    except Exception:  # any class may raise anything: then it is not known to be linear
        return False
    return isinstance(got, torch.Tensor) and got.shape == want.shape and torch.allclose(got, want)


def _at(module: nn.Module, steps: tuple[str, ...]) -> list[nn.Module]:
    found = [module]
    for step in steps:
        below = (item for parent in found for item in parent.named_children())
        found = [child for name, child in below if step in (_ANY, name)]
    return found


@cache
def _uses(kind: type[nn.Module]) -> tuple[_Use, ...]:
    uses: dict[_Use, None] = {}
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        method = inspect.unwrap(getattr(method, "__func__", method))
        if not isinstance(method, FunctionType) or name.startswith(_BUILDING):
            continue
        if not method.__module__.startswith("torch.") and _names(method.__code__, "weight"):
            uses |= dict.fromkeys(_read_in(method, name))
    return tuple(uses)


def _names(code: CodeType, name: str) -> bool:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return name in code.co_names or any(_names(each, name) for each in inner)


def _read_in(method: FunctionType, name: str) -> Iterator[_Use]:
    tree = parsed(method)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    known = _assigned(tree)
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in reads:
        if node.attr == "weight" and not _is_harmless(node, parents):
            conditions = tuple(_conditions(node, parents))
            origins = (steps for steps, _ in _origins(node.value, known) if steps)
            yield from (_Use(steps, name, conditions) for steps in origins)


def parsed(function: Any) -> ast.AST:
    """Parse a function; nothing is found in one without source, such as in a console."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _conditions(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yield what the fields of a module must be for an expression to be reached."""
    while (parent := parents.get(node)) is not None:
        if isinstance(parent, ast.If | ast.IfExp) and node is not parent.test:
            parts = list(ast.walk(parent.test))
            names = {part.id for part in parts if isinstance(part, ast.Name)}
            fields = {part.attr for part in parts if isinstance(part, ast.Attribute)}
            if names == {"self"} and "training" not in fields:
                body = parent.body if isinstance(parent, ast.If) else [parent.body]
                yield ast.unparse(parent.test), node in body
        node = parent


def _may_be(module: nn.Module, condition: str, wanted: bool) -> bool:
    try:
        return bool(eval(condition, {"__builtins__": {}}, {"self": module})) is wanted
    except Exception:  # not known before a pass
        return True


def _is_harmless(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents.get(node)
    if isinstance(parent, ast.Attribute):
        return parent.attr in _HARMLESS or (parent.attr == "data" and _is_harmless(parent, parents))
    if isinstance(parent, ast.Compare):
        return all(isinstance(operator, ast.Is | ast.IsNot) for operator in parent.ops)
    called = parent.func if isinstance(parent, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in _QUESTIONS


def _origins(
    node: ast.AST, known: Mapping[str, list[ast.AST]], last: bool = False
) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the steps from `self` to what an expression may be, and whether it is transposed."""
    inner: list[ast.AST] = []
    step, turned = None, False
    if isinstance(node, ast.Name):
        if node.id == "self":
            yield (), False
        values = known.get(node.id, [])
        inner = values[-1:] if last else values
        known = {**known, node.id: values[:-1] if last else []}
    elif isinstance(node, ast.Attribute):
        inner, turned = [node.value], node.attr in ("T", "mT")
        step = None if turned else node.attr
    elif isinstance(node, ast.Subscript):
        inner, step = [node.value], _ANY
    elif isinstance(node, ast.Tuple | ast.List):
        inner = [*node.elts]
    elif isinstance(node, ast.IfExp):
        inner = [node.body, node.orelse]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        turned = node.func.attr == "transpose"
        if node.func.attr == "index_select":
            inner = [*node.args[:1]]
        elif turned or node.func.attr in ("to", "float", "type_as", "contiguous"):
            inner = [node.func.value]
    for each in inner:
        for steps, flipped in _origins(each, known, last):
            yield (*steps, step) if step else steps, flipped != turned


def _assigned(tree: ast.AST) -> dict[str, list[ast.AST]]:
    """Find what local names stand for: values given to them, and items of loops."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.NamedExpr):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.For | ast.comprehension):
            # One of a tuple's items, or any item of a module list.
            items = node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List) else None
            whole = ast.Subscript(node.iter, ast.Constant(0), ast.Load())
            pairs = [(node.target, item) for item in items or [whole]]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
    return found


_ROUTES = "it routes tokens to experts, which a small error changes"
_SELECTS = "it selects the tokens to attend to, which a small error changes"


def projections(block: nn.Module) -> dict[str, nn.Module]:
    """Return linear layers, pointwise convolutions, stacked experts and routers, by path."""
    modules = {name: module for name, module in block.named_modules() if name}
    return {
        name: module
        for name, module in modules.items()
        if isinstance(module, (nn.Linear, Conv1D, nn.MultiheadAttention))
        or is_pointwise(module)
        or _stacks(module, name)
        or (
            any(parameter.ndim == 2 for parameter in module.parameters(recurse=False))
            and chooses(name, modules)
        )
    }


def is_pointwise(module: nn.Module) -> bool:
    """Return whether a module is a convolution with a kernel of one point, in whole or groups."""
    return (
        isinstance(module, _ConvNd)
        and not module.transposed
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and set(module.kernel_size) == {1}
        and not (isinstance(module.padding, tuple) and any(module.padding))
        and min(module.weight.shape[:2]) > 1
    )


def shapes_of(module: nn.Module) -> tuple[Layer, ...]:
    """Read the shapes of a projection: one, or one for each stack of weights, in order of use.

    What its place in a model says of it is not filled in.
    """
    if isinstance(module, nn.Linear):
        sizes = module.in_features, module.out_features
        return (_shape("linear", *sizes, module.bias is not None),)
    if isinstance(module, Conv1D):
        return (_shape("conv1d", module.nx, module.nf, True),)
    if isinstance(module, _ConvNd):
        sizes = module.in_channels, module.out_channels
        return (_shape("pointwise", *sizes, module.bias is not None, axes=len(module.kernel_size)),)
    ways, stacks = _ways(module).items(), _stacks(module)
    return tuple(_stack(module, name, transposed=way) for name, way in ways if name in stacks)


def _shape(kind: Kind, inputs: int, outputs: int, bias: bool, **facts: Any) -> Layer:
    blank: dict[str, Any] = {"name": "", "role": "linear", "parts": (), "group": ""}
    return Layer(kind=kind, in_features=inputs, out_features=outputs, bias=bias, **(blank | facts))


def shape_of(module: nn.Module, role: Role, path: str) -> Layer:
    """Read the shape of the projection of a module that has a role."""
    for shape in shapes_of(module):
        if shape.role == role or not role.startswith("experts_"):
            return shape
    raise InputError(
        f"the experts `{path}` have no 3-D parameter `{role.removeprefix('experts_')}_proj`",
        "convert the checkpoint with a transformers release that stacks the experts",
    )


def is_block(module: nn.Module) -> bool:
    """Tell blocks from heads, which are linear layers alone and end in another width."""
    owners = [part for part in module.modules() if any(True for _ in part.parameters(False))]
    plain = [part for part in owners if isinstance(part, nn.Linear)]
    if len(plain) < len(owners):
        return bool(projections(module))
    return len(plain) > 1 and plain[0].in_features == plain[-1].out_features


def reason_to_refuse(name: str, block: nn.Module) -> str | None:
    """Say why a projection without a known role must be left alone, if it must."""
    modules = dict(block.named_modules())
    module = modules[name]
    kind: Any = type(module)
    parent = modules[name.rpartition(".")[0]]
    if reason := chooses(name, modules):
        return reason
    if not all(parameter.numel() for parameter in module.parameters(recurse=False)):
        return "it has weights without numbers"
    if isinstance(module, nn.MultiheadAttention) or isinstance(parent, nn.MultiheadAttention):
        return "`nn.MultiheadAttention` uses its weight directly"
    if stacks := _stacks(module, name):
        ways = _ways(module)
        names = ", ".join(f"`{parameter}`" for parameter in stacks if parameter not in ways)
        if names:
            reason = "its forward pass does not say how it multiplies by its stacked weights"
            return f"{reason}: {names}"
    elif isinstance(module, _ConvNd):
        if module.groups > 1:
            return "it is a convolution in groups"
        own = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # others may change their weight
        forward = (kind.forward, getattr(kind, "_conv_forward", None))
        if forward not in [(each.forward, each._conv_forward) for each in own]:
            return f"its class `{kind.__name__}` has a forward pass of its own"
    elif kind.forward is not Conv1D.forward and not computes_linear(kind):
        return f"its class `{kind.__name__}` has a forward pass of its own"
    return None


def _stacks(module: nn.Module, path: str = "") -> tuple[str, ...]:
    """Name stacked matrices: all parameters of experts, else those that a pass multiplies by."""
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


def _stack(module: nn.Module, name: str, *, transposed: bool) -> Layer:
    experts, *sizes = getattr(module, name).shape
    rows, columns = sizes[::-1] if transposed else sizes
    facts: dict[str, Any] = {"experts": experts, "parameter": name, "transposed": transposed}
    if _described(module):
        up = name in ("gate_up_proj", "up_proj")
        facts["role"] = "experts_gate_up" if up else "experts_down"
        if name == "gate_up_proj" and module.is_concatenated:
            facts["parts"] = Part("gate", rows // 2), Part("up", rows // 2)
    return _shape("experts", columns, rows, hasattr(module, f"{name}_bias"), **facts)


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
    tree = parsed(kind.forward)
    known = _assigned(tree)
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        weight, flipped = _factor(node)
        origins = set() if weight is None else set(_origins(weight, known, last=True))
        names = {steps[0] for steps, _ in origins if steps and {*steps[1:]} <= {_ANY}}
        if len(origins) == 1 and names:
            found.setdefault(names.pop(), flipped != origins.pop()[1])
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


def chooses(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Say what a module, or one above it, chooses, if it is a router, a gate or an indexer."""
    path, best = "", False
    for step in name.split("."):
        parent, path = path, f"{path}.{step}" if path else step
        module, beside = modules[path], modules.get(f"{parent}.experts" if parent else "experts")
        label = f"{step} {type(module).__name__}".lower()
        if "indexer" in label:
            return _SELECTS
        # A linear layer with one output for every item of a list of experts.
        experts = len(beside) if isinstance(beside, (nn.ModuleList, nn.ModuleDict)) else -1
        gate = _is_gate(step) or getattr(module, "out_features", None) == experts
        if "router" in label or (gate and (best or beside not in (None, module))):
            return _ROUTES
        best = _takes_best(type(module)) and "attention" not in label  # type: ignore[arg-type]
        gated = any(_is_gate(own) or "router" in own for own, _ in module.named_children())
        inside = module.named_modules()
        if best and not gated and not any("expert" in n.lower() or _stacks(m) for n, m in inside):
            return _ROUTES
    return None


def _is_gate(step: str) -> bool:
    return step == "gate" or step.endswith("_gate")


@cache
def _takes_best(kind: type[nn.Module]) -> bool:
    foreign = ("torch.", "transformers.generation")
    bases = [base for base in kind.__mro__ if not base.__module__.startswith(foreign)]
    own = (value for base in bases for value in vars(base).values())
    codes = (getattr(inspect.unwrap(item), "__code__", None) for item in own if callable(item))
    return any(code is not None and "topk" in code.co_names for code in codes)
