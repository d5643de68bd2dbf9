"""What the command line imports, offers and documents."""

import subprocess
import sys
from pathlib import Path

import pytest

import tcompress
from tcompress.attention import replacements
from tcompress.cli.flags import offers
from tcompress.evaluation.measuring import TASKS
from tcompress.fields import read_factors, typed_fields, words_of
from tcompress.options import Convert, Evaluate, complete, recipe_names
from tcompress.options.method_options import REPLACEMENTS
from tests.support.cli import commands, run, worked

HEAVY = ("torch", "transformers", "datasets", "numpy", "click")


def modules_after(*arguments: str, setup: str = "") -> set[str]:
    """Modules that a fresh process has imported when a command ends."""
    code = (
        f"import sys, os, atexit\n{setup}\n"
        "atexit.register(lambda: print('modules:', *sys.modules))\n"
        f"from tcompress.cli.main import main\nmain({list(arguments)})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    _, ended, modules = done.stdout.rpartition("modules:")
    assert ended, done.stderr
    return set(modules.split())


@pytest.mark.often("arguments1")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["convert", "--help"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    loaded = modules_after(*arguments)
    assert ("tcompress.cli.convert" in loaded) == ("convert" in arguments)  # what is asked for
    assert ("tcompress.options.convert_options" in loaded) == ("convert" in arguments)
    assert not loaded & set(HEAVY)


def test_options_import_no_torch() -> None:
    code = (
        "import pkgutil, sys, importlib, tcompress.options as o\n"
        "for item in pkgutil.iter_modules(o.__path__):\n"
        "    importlib.import_module(f'tcompress.options.{item.name}')\n"
        "o.json_schema()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {*done.stdout.split()} & {"torch", "transformers", "numpy", "typer"}


def test_completion_and_lists_of_recipes_import_no_torch() -> None:
    setup = (
        "os.environ |= {'_TCOMPRESS_COMPLETE': 'complete_bash', "
        "'COMP_WORDS': 'tcompress convert x --method l', 'COMP_CWORD': '4'}"
    )
    assert not modules_after(setup=setup) & set(HEAVY)
    assert "torch" not in modules_after("recipes", "list")


def test_no_command_shows_the_help() -> None:
    done = run()
    assert done.code == 2
    assert "Usage: tcompress [OPTIONS] COMMAND" in done.out


@pytest.mark.parametrize("name", ["", "methods"])
def test_help_is_a_word_too(name: str) -> None:
    assert run("help", *name.split()).out == worked(*name.split(), "--help").out


def test_a_factor_may_end_as_it_is_said() -> None:
    assert read_factors(["3x"]) == 3
    assert read_factors(["2x,4"]) == [2, 4]


def test_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tcompress", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"tcompress {tcompress.__version__}\n"


def test_the_registries_are_those_of_the_options() -> None:
    assert tuple(item.spec for item in replacements()) == REPLACEMENTS
    assert set(words_of(Evaluate.model_fields["task"].annotation)) == set(TASKS)
    flags = [item.name for item in typed_fields(Convert)]
    assert len(flags) == len({*flags})
    assert {"--p", "--rank", "--core", "--grid"} <= {*flags}


def test_help_of_convert_is_short_and_the_rest_is_listed_elsewhere() -> None:
    assert len(run("convert", "--help", columns=100).out.splitlines()) <= 100
    convert = dict(commands())["convert"]
    flags = {name for item in convert.params if not item.hidden for name in item.opts}
    assert {"--grid", "--core"} <= flags  # completion offers them
    assert "--core" in worked("methods", "tam").out


def test_completion_of_words() -> None:
    def offered(flag: str, typed: str) -> list[str]:
        item = next(item for item in typed_fields(Convert) if item.name == flag)
        return offers(item)(typed)

    assert complete.methods("l") == ["lowrank", "lprod"]
    assert complete.methods("q") == ["qtt"]
    assert complete.methods("h") == ["hot"]
    assert complete.structures("t") == ["tt", "tucker"]
    assert complete.method_lists("svd,lp") == ["svd,lprod"]
    assert complete.calibrations("bui") == ["builtin"]
    assert complete.devices("cu") == ["cuda"]
    assert offered("--apply", "con") == ["contract"]
    assert offered("--share", "m") == ["model"]
    assert offered("--dtype", "b") == ["bfloat16"]
    assert offered("--transform", "f") == ["fitted"]
    assert offered("--embeddings", "t") == ["tt", "tucker"]
    assert "bert-base" in complete.models("bert-b")
    assert set(recipe_names()) <= set(complete.recipes(""))


def test_completion_of_paths(tmp_path: Path, own_folder: None) -> None:
    for name in ("models/small", "models/.hidden", "more"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("mine.yaml", "models/texts.csv", "models/image.png"):
        (tmp_path / name).touch()
    assert complete.folders("mo") == ["models/", "more/"]
    assert complete.folders("models/") == ["models/small/"]
    assert complete.calibrations("models/t") == ["models/texts.csv"]
    assert complete.recipes("mi") == ["mine.yaml"]
    assert complete.folders("nowhere/x") == []
    assert complete.folders("~nobody-has-this-name/x") == []
