"""Layers whose weights a forward pass reads itself, instead of calling the layer."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

# Methods that build a model, not such that compute.
_BUILDING = ("__init__", "_init", "init_", "reset_", "tie_", "_tie", "resize", "_resize", "load")
_HARMLESS = frozenset({"dtype", "device", "requires_grad", "is_cuda"})
_QUESTIONS = frozenset({"isinstance", "hasattr", "type", "id"})
_ANY = "*"


class _Use(NamedTuple):
    """Steps from a module to one whose weight is read (`*` for all children), where, and when.

    Conditions are expressions of `self` alone, with what they must be; all hold where it is read.
    """

    steps: tuple[str, ...]
    method: str
    conditions: tuple[tuple[str, bool], ...] = ()


def direct_uses(model: nn.Module) -> dict[nn.Module, str]:
    """Find the modules whose `weight` is read by a method of another module.

    The methods' sources are looked at, so the model may live on the meta device. Reading a
    weight's dtype or device is no use of it; methods that initialise are left out.

    Args:
        model: The model.

    Returns:
        Why each such module must keep its weight.
    """
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        kind: Any = type(module)
        for use in _uses(kind):
            if not all(_may_be(module, *condition) for condition in use.conditions):
                continue
            reason = f"`{type(module).__name__}.{use.method}` uses its weight directly"
            for child in _at(module, use.steps):
                found.setdefault(child, reason)
    return found


@cache
def computes_linear(kind: Any) -> bool:
    """Tell by trial whether a subclass of `nn.Linear` computes what `nn.Linear` does.

    Args:
        kind: The class. It is built with small sizes and run on numbers small and large.
    """
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


def _at(module: nn.Module, steps: tuple[str, ...]) -> Iterator[nn.Module]:
    if not steps:
        yield module
        return
    own = dict(module.named_children())
    for child in own.values() if steps[0] == _ANY else filter(None, [own.get(steps[0])]):
        yield from _at(child, steps[1:])


@cache
def _uses(kind: type[nn.Module]) -> tuple[_Use, ...]:
    """Find what the methods of a class, its own and inherited ones, read of other modules."""
    found: dict[_Use, None] = {}
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        method = inspect.unwrap(getattr(method, "__func__", method))
        if not isinstance(method, FunctionType) or name.startswith(_BUILDING):
            continue
        if method.__module__.startswith("torch.") or not _names(method.__code__, "weight"):
            continue
        for steps, conditions in _read_in(method):
            found.setdefault(_Use(steps, name, conditions))
    return tuple(found)


def _names(code: CodeType, name: str) -> bool:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return name in code.co_names or any(_names(each, name) for each in inner)


def _read_in(
    method: FunctionType,
) -> Iterator[tuple[tuple[str, ...], tuple[tuple[str, bool], ...]]]:
    """Yield the steps to every module whose weight one method reads, and the conditions."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):  # no source, such as in a console
        return
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    known = _assigned(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr != "weight":
            continue
        if not _is_harmless(node, parents):
            conditions = tuple(_conditions(node, parents))
            yield from ((steps, conditions) for steps in _steps(node.value, known) if steps)


def _conditions(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yield what the fields of a module must be for an expression to be reached."""
    while (parent := parents.get(node)) is not None:
        if isinstance(parent, ast.If | ast.IfExp) and node is not parent.test:
            names = {part.id for part in ast.walk(parent.test) if isinstance(part, ast.Name)}
            fields = {
                part.attr for part in ast.walk(parent.test) if isinstance(part, ast.Attribute)
            }
            if names == {"self"} and "training" not in fields:
                body = parent.body if isinstance(parent, ast.If) else [parent.body]
                yield ast.unparse(parent.test), node in body
        node = parent


def _may_be(module: nn.Module, condition: str, wanted: bool) -> bool:
    """Tell whether a condition of the model's own code can be so for a module."""
    try:
        return bool(eval(condition, {"__builtins__": {}}, {"self": module})) is wanted
    except Exception:  # not known before a pass
        return True


def _is_harmless(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents.get(node)
    if isinstance(parent, ast.Attribute):
        data = parent.attr == "data"
        return parent.attr in _HARMLESS or (data and _is_harmless(parent, parents))
    if isinstance(parent, ast.Compare):
        return all(isinstance(operator, ast.Is | ast.IsNot) for operator in parent.ops)
    called = parent.func if isinstance(parent, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in _QUESTIONS


def _steps(
    node: ast.AST, known: dict[str, list[ast.AST]], seen: frozenset[str] = frozenset()
) -> Iterator[tuple[str, ...]]:
    """Yield the steps that lead from `self` to what an expression may be."""
    if isinstance(node, ast.Name):
        if node.id == "self":
            yield ()
        elif node.id not in seen:
            for value in known.get(node.id, ()):
                yield from _steps(value, known, seen | {node.id})
    elif isinstance(node, ast.Attribute):
        yield from ((*steps, node.attr) for steps in _steps(node.value, known, seen))
    elif isinstance(node, ast.Subscript):
        yield from ((*steps, _ANY) for steps in _steps(node.value, known, seen))
    elif isinstance(node, ast.Tuple | ast.List):
        for item in node.elts:
            yield from _steps(item, known, seen)
    elif isinstance(node, ast.IfExp):
        yield from _steps(node.body, known, seen)
        yield from _steps(node.orelse, known, seen)


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
