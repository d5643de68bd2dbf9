"""A new structure is one file and one import: commands, recipes and budgets then know it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tcompress.structures import Structure, capabilities
from tests.support.tiny import build


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bert"
    build("bert").save_pretrained(folder)
    return folder


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process that has one more structure; here it stays unknown."""
    code = "import tests.support.blockdiag; from tcompress.cli.main import main; main()"
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True)


def test_its_options_are_flags(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    asked = ("--method", "blockdiag", "--blocks", 4, "--calib", "none")
    assert run("convert", tiny, *asked, "-o", folder).returncode == 0
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert '"structure": "blockdiag"' in json.dumps(config)
    shown = run("report", folder).stdout
    assert "blockdiag blocks=4" in shown
    wrong = run("convert", tiny, "--method", "svd", "--blocks=4", "--target", 0.5, "--dry-run")
    assert (wrong.returncode, "belongs to `--method blockdiag`" in wrong.stderr) == (2, True)
    bad = run("convert", tiny, "--method", "blockdiag", "--blocks", "many", "--dry-run")
    assert "`--blocks` is `many`, allowed is a whole number, at least 1" in bad.stderr


def test_methods_recipes_and_budgets_know_it(tiny: Path, tmp_path: Path) -> None:
    assert "--blocks" in run("methods").stdout
    budget = ("--method", "blockdiag", "--blocks", 8, "--target", 0.5, "--calib", "none")
    assert "blockdiag blocks=8 + lowrank" in run("convert", tiny, *budget, "--dry-run").stdout
    recipe = tmp_path / "recipe.yaml"
    convert = {"method": {"name": "blockdiag", "blocks": 2}, "calibration": {"source": "none"}}
    recipe.write_text(yaml.safe_dump({"recipe_version": 1, "convert": convert}))
    planned = run("convert", tiny, "--recipe", recipe, "--dry-run").stdout
    assert "blockdiag blocks=2" in planned


def test_structures_and_their_capabilities_stay_small() -> None:
    def methods(kind: type) -> list[str]:
        return [n for n, _ in inspect.getmembers(kind, inspect.isfunction) if n[0] != "_"]

    assert sorted(methods(Structure)) == sorted(
        ["layout", "tensors", "apply", "fit", "start", "dense", "losses", "quick_fit"]
    )
    for kind in vars(capabilities).values():
        if inspect.isclass(kind) and kind.__module__ == capabilities.__name__:
            assert len(methods(kind)) <= 6
