"""Imports inside the package point one way, and what is public is documented."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tcompress"

# What each package, or module beside the packages, may import of its siblings.
FOUNDATION = {
    "errors", "files", "progress", "linalg", "structures", "attention", "models", "roles",
    "options", "fields", "project", "processes", "memory",
}  # fmt: skip
BLOCKWISE = FOUNDATION | {"planning", "data", "artifact", "hf", "blockwise"}
APPLICATION = BLOCKWISE | {"conversion", "vocabulary"}
PRODUCT = APPLICATION | {"reporting", "training", "evaluation", "latency"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "files": {"errors"},
    "progress": set(),
    "processes": {"errors"},
    "memory": set(),
    "linalg": {"errors", "memory"},
    "fields": set(),
    "project": set(),
    "structures": {"errors", "linalg", "fields"},
    "attention": {"errors", "linalg", "structures", "roles", "fields"},
    "models": {"errors", "files", "project", "linalg", "progress"},
    "roles": {"errors"},
    "options": {"errors", "files", "models", "fields", "structures", "attention", "project"},
    "planning": {"errors", "linalg", "structures", "attention", "models", "roles", "options"},
    "data": {"errors", "progress", "models", "roles", "options"},
    "artifact": {
        "errors", "files", "fields", "linalg", "structures", "models", "options", "planning",
        "project", "processes",
    },
    "vocabulary": {"errors", "files", "progress", "models", "roles", "options", "data"},
    "own_models": {"errors", "models", "options", "data", "attention"},
    "hf": {
        "errors", "linalg", "structures", "attention", "models", "planning", "artifact",
        "own_models", "roles",
    },
    "blockwise": BLOCKWISE - {"blockwise", "hf", "options"},
    "fitting": BLOCKWISE,
    "search": BLOCKWISE | {"fitting", "latency", "timing_model"},
    "conversion": BLOCKWISE | {
        "fitting", "search", "vocabulary", "latency", "timing_model",
    },
    "training": APPLICATION - {"conversion"},
    "latency": FOUNDATION - {"linalg", "attention"} | {"data", "artifact", "hf", "runtimes"},
    "timing_model": {
        "errors", "files", "structures", "models", "planning", "artifact", "hf", "latency",
        "processes",
    },
    "evaluation": FOUNDATION - {"linalg"} | {"planning", "data", "artifact", "hf", "exports"},
    "reporting": {
        "errors", "files", "fields", "structures", "attention", "models", "roles", "options",
        "planning", "artifact", "conversion", "progress",
    },
    "runtimes": {"errors", "project"},
    "exports": FOUNDATION | {
        "planning", "data", "artifact", "hf", "latency", "runtimes",
    },
    "inspection": APPLICATION | {"reporting"},
    "demonstration": APPLICATION | {"compression", "latency", "reporting", "training"},
    "pipeline": PRODUCT | {"search"},
    "compression": PRODUCT | {"search", "exports", "runtimes"},
    "sweeps": PRODUCT | {"pipeline", "search", "timing_model"},
    "variant_sweep": {
        "artifact", "files", "options", "pipeline", "planning", "progress", "reporting",
    },
    "cli": PRODUCT | {
        "own_models", "compression", "exports", "runtimes", "inspection", "demonstration",
        "pipeline", "sweeps", "variant_sweep",
    },
    "__main__": {"cli"},
    "api": PRODUCT | {"own_models", "compression", "exports", "inspection", "pipeline", "sweeps"},
    "__init__": {"api", "errors", "hf"},
}  # fmt: skip

# Where a package may use a part of another one only.
ONLY = {
    ("hf", "artifact"): {"tcompress.artifact.format", "tcompress.artifact.manifest"},
    ("reporting", "conversion"): {"tcompress.conversion.estimate"},
    ("training", "blockwise"): {"tcompress.blockwise.output_sampler"},
    ("__init__", "hf"): {"tcompress.hf.autoload"},
    ("hf", "own_models"): {
        "tcompress.own_models.configs", "tcompress.own_models.grid", "tcompress.own_models.tam",
        "tcompress.own_models.text",
    },
    ("own_models", "attention"): {"tcompress.attention.tam"},
}  # fmt: skip


def _modules() -> dict[str, Path]:
    """All modules of the package by dotted name; a package itself stands for its `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["tcompress", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and modules that a file imports from the package, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "tcompress":
                while name not in MODULES:
                    name = name.rpartition(".")[0]
                yield node.lineno, name


def _unit(module: str) -> str:
    """The package of a module, or the module beside the packages."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _edges() -> Iterator[tuple[str, str, str]]:
    """Importer, imported, and where, for imports that leave a package; not of the version."""
    for module, path in MODULES.items():
        for line, target in _imports(path):
            if target != "tcompress" and _unit(target) != _unit(module):
                yield module, target, f"{path.relative_to(PACKAGE.parent)}:{line}"


def test_the_table_lists_every_package() -> None:
    assert {_unit(module) for module in MODULES} <= set(ALLOWED)
    assert set().union(*ALLOWED.values()) <= set(ALLOWED)


def test_the_table_itself_has_no_cycle() -> None:
    order = list(TopologicalSorter(ALLOWED).static_order())
    assert order.index("linalg") < order.index("structures") < order.index("cli")


def test_imports_follow_the_table() -> None:
    wrong = [
        f"{place}: `{_unit(module)}` must not import `{target}`"
        for module, target, place in _edges()
        if _unit(target) not in ALLOWED[_unit(module)]
        or target not in ONLY.get((_unit(module), _unit(target)), {target})
    ]
    assert not wrong, "\n" + "\n".join(sorted(set(wrong)))


def test_modules_import_each_other_without_cycles() -> None:
    graph = {
        module: {target for _, target in _imports(path)} - {"tcompress", module}
        for module, path in MODULES.items()
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which shows the cycle


PUBLIC = [module for module in MODULES if _unit(module) in ("linalg", "structures", "attention")]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    missing = []
    for key, value in vars(module).items():
        own = getattr(value, "__module__", None) == name and not key.startswith("_")
        if not own or not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        described = {key: value}
        if inspect.isclass(value):
            described |= {
                f"{key}.{method}": getattr(value, method)
                for method, found in vars(value).items()
                if not method.startswith("_")
                and (inspect.isfunction(found) or isinstance(found, property))
            }
        # Methods that implement a documented one inherit its text.
        missing += [path for path, target in described.items() if not inspect.getdoc(target)]
    assert not missing


@pytest.mark.slow
def test_each_package_may_be_imported_first() -> None:
    """No package waits for another one that waits for it."""
    code = (
        "import sys, importlib\n"
        "for name in sys.argv[1:]:\n"
        "    for own in [m for m in sys.modules if m.split('.')[0] == 'tcompress']:\n"
        "        del sys.modules[own]\n"
        "    importlib.import_module(f'tcompress.{name}')\n"
    )
    subprocess.run([sys.executable, "-c", code, *ALLOWED], check=True)
