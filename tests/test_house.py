"""The shape of the code: no class is too long, and no object grows attributes."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tcompress"
LONGEST, MOST = 250, 15
BEGINNINGS = ("__init__", "__post_init__", "__new__")


def _classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _undeclared(node: ast.ClassDef) -> set[str]:
    """Attributes that methods set first, and neither the class nor its beginning declares."""
    targets = [
        target
        for item in node.body
        if isinstance(item, ast.Assign | ast.AnnAssign)
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
    ]
    declared = {target.id for target in targets if isinstance(target, ast.Name)}
    stored: set[str] = set()
    for method in node.body:
        if isinstance(method, ast.FunctionDef):
            names = {
                item.attr
                for item in ast.walk(method)
                if isinstance(item, ast.Attribute)
                and isinstance(item.ctx, ast.Store)
                and getattr(item.value, "id", "") == "self"
            }
            (declared if method.name in BEGINNINGS else stored).update(names)
    return stored - declared


def test_no_class_is_too_long() -> None:
    """Options are a list of fields, which may be long."""
    lengths = {
        f"{path.relative_to(PACKAGE)} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, node in _classes()
        if "options" not in path.parts
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_objects_do_not_grow_attributes() -> None:
    found = {
        f"{path.relative_to(PACKAGE)} {node.name}": _undeclared(node) for path, node in _classes()
    }
    assert sum(map(len, found.values())) <= MOST, {name: own for name, own in found.items() if own}
