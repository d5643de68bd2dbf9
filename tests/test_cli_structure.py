"""What the command line imports, offers and documents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tcompress
from tcompress.cli import complete
from tcompress.cli.main import app
from tcompress.cli.names import MECHANISM_OPTIONS, METHOD_OPTIONS
from tcompress.evaluation.tasks import TASKS
from tcompress.mechanisms import mechanisms
from tcompress.mechanisms.kronecker import Kernel
from tcompress.mechanisms.tam import Core, Memory
from tcompress.recipe import lookup_methods, mechanism_names, method_names, recipe_names
from tcompress.recipe.methods import AutoSpec
from tcompress.recipe.schema import DType
from tcompress.structures import structures
from tcompress.structures.transform import TransformKind
from tcompress.structures.tt import Way
from tcompress.structures.tucker import Share
from tests.support.cli import run

COMMANDS = (
    "convert",
    "finetune",
    "inspect",
    "report",
    "evaluate",
    "lm-eval",
    "bench",
    "export",
    "run",
    "sweep",
    "methods",
    "recipes",
    "demo",
)
# Typer may import pydantic by itself; our own models must not come with it.
HEAVY = ("torch", "transformers", "datasets", "numpy", "click", "tcompress.recipe.schema")


def modules_after(*arguments: str, setup: str = "") -> set[str]:
    """Modules that a fresh process has imported when a command ends."""
    code = (
        f"import sys, os, atexit\n{setup}\n"
        "atexit.register(lambda: print('modules:', *sys.modules))\n"
        f"from tcompress.cli.main import main\nmain({list(arguments)})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return set(done.stdout.rpartition("modules:")[2].split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["convert", "--help"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    loaded = modules_after(*arguments)
    assert "tcompress.cli.convert" in loaded
    assert not loaded & set(HEAVY)


def test_listing_recipes_imports_no_torch() -> None:
    assert "torch" not in modules_after("recipes", "list")


def test_completion_imports_no_torch() -> None:
    setup = (
        "os.environ |= {'_TCOMPRESS_COMPLETE': 'complete_bash', "
        "'COMP_WORDS': 'tcompress convert x --method l', 'COMP_CWORD': '4'}"
    )
    assert not modules_after(setup=setup) & set(HEAVY)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_ends_with_examples(command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0
    _, found, after = done.out.rpartition("Examples")
    assert found
    lines = [line for line in after.split("\n ") if line.strip()]
    assert all(line.startswith(("tcompress ", "torchrun ")) for line in lines)


def test_no_command_shows_the_help() -> None:
    done = run()
    assert done.code == 2
    assert "Usage: tcompress [OPTIONS] COMMAND" in done.out


def test_version() -> None:
    assert run("--version").out == f"tcompress {tcompress.__version__}\n"


def test_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tcompress", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"tcompress {tcompress.__version__}\n"


def test_spelled_out_completions_are_those_of_the_registry() -> None:
    assert set(complete.METHODS) == set(method_names())
    assert set(complete.TABLE_METHODS) == set(lookup_methods())
    assert set(complete.MECHANISMS) == set(mechanism_names())
    assert set(complete.KERNELS) == set(Kernel.__args__)  # type: ignore[attr-defined]
    assert set(complete.CORE_FORMS) == set(Core.__args__)  # type: ignore[attr-defined]
    assert set(complete.MEMORIES) == set(Memory.__args__)  # type: ignore[attr-defined]
    assert tuple(TASKS) == complete.TASKS
    assert set(complete.TRANSFORMS) == set(TransformKind.__args__)  # type: ignore[attr-defined]
    assert set(complete.WAYS) == set(Way.__args__)  # type: ignore[attr-defined]
    assert set(complete.SHARES) == set(Share.__args__)  # type: ignore[attr-defined]
    assert set(complete.DTYPES) == set(DType.__args__)  # type: ignore[attr-defined]


def test_method_options_exist() -> None:
    specs = [AutoSpec, *(item.spec for item in structures())]
    fields = {field for spec in specs for field in spec.model_fields}
    assert set(METHOD_OPTIONS) <= fields
    own = {field for item in mechanisms() for field in item.spec.model_fields}
    assert set(MECHANISM_OPTIONS) <= own
    assert not set(MECHANISM_OPTIONS) & set(METHOD_OPTIONS)
    names = {info.name for info in app.registered_commands}
    assert names | {"recipes"} == set(COMMANDS)


def test_completion_of_words() -> None:
    assert complete.methods("l") == ["lprod", "lowrank"]
    assert complete.methods("q") == ["qtt"]
    assert complete.methods("h") == ["hot"]
    assert complete.structures("t") == ["tt", "tucker"]
    assert complete.ways("con") == ["contract"]
    assert complete.shares("m") == ["model"]
    assert complete.dtypes("b") == ["bfloat16"]
    assert complete.calibrations("bui") == ["builtin"]
    assert complete.formats("") == ["dense"]
    assert complete.devices("cu") == ["cuda"]
    assert complete.transforms("f") == ["fitted"]
    assert "bert-base" in complete.models("bert-b")
    assert set(recipe_names()) <= set(complete.recipes(""))


def test_completion_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models/small", "models/.hidden", "more"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("mine.yaml", "models/texts.csv", "models/image.png"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert complete.folders("mo") == ["models/", "more/"]
    assert complete.folders("models/") == ["models/small/"]
    assert complete.calibrations("models/t") == ["models/texts.csv"]
    assert complete.recipes("mi") == ["mine.yaml"]
    assert complete.folders("nowhere/x") == []
