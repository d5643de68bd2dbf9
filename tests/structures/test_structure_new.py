"""A structure is three files: the example of CONTRIBUTING.md, added to a copy of the package."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.copied_tree import copied, example, in_tree

FILES = (
    "tcompress/structures/blockdiag.py",
    "tcompress/structures/__init__.py",
    "tests/support/structure_cases.py",
)
KEPT = {"blocks": 0.25, "target": 0.5, "params": 1.0, "auto": 0.4, "recipe": 0.5}
RECIPE = """
recipe_version: 1
convert:
  method: {name: blockdiag, blocks: 2}
  calibration: {source: none}
"""
COMMANDS = """
import json
from pathlib import Path
from tests.support.cli import run
from tests.support.model_folders import model_folder, sentences, text_file

model_folder("bert", Path("model"))
text = text_file(Path("text.txt"), sentences(40))
data = ("--calib", text, "--calib-samples", "16", "--max-length", "32")
convert = ("convert", "model", "--json", "--method")
calls = {
    "blocks": (*convert, "blockdiag", "--blocks", "4", *data),
    "target": (*convert, "blockdiag", "--target", "0.5", "--calib", "none"),
    "params": (*convert, "blockdiag", "--target-params", "20000", "--calib", "none"),
    "auto": (*convert, "auto", "--offer", "blockdiag,svd", "--target", "0.4", *data),
    "recipe": ("run", "mine.yaml", "--model", "model", "--json"),
    "method": ("methods", "blockdiag", "--json"),
    "methods": ("methods", "--json"),
}
done = {}
for name, call in calls.items():
    output = ("-o", name) if call[0] in ("convert", "run") else ()
    found = run(*call, *output)
    assert found.code == 0, found.err
    done[name] = found.document
import torch
import tcompress
from transformers import AutoModel
ids = torch.arange(8)[None]
found = AutoModel.from_pretrained("blocks")
done["forward"] = list(found(ids).last_hidden_state.shape)
print(json.dumps(done))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its tests with the three blocks of the document put where they belong."""
    folder = copied(tmp_path_factory.mktemp("tree"))
    blocks = example("## Add a structure")
    assert tuple(blocks) == FILES
    for name, code in blocks.items():
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(code)
    return folder


@pytest.mark.slow
def test_the_contract_holds(tree: Path) -> None:
    contract = "tests/structures/test_structure_contract.py"
    out = in_tree(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", contract, "-k",
                  "blockdiag or registered")  # fmt: skip
    assert re.search(r"\n\d{2,} passed", out), out


@pytest.mark.slow
def test_commands_recipes_and_budgets_know_it(tree: Path) -> None:
    (tree / "mine.yaml").write_text(RECIPE)
    done: dict[str, Any] = json.loads(in_tree(tree, "-c", COMMANDS))
    report = {name: item["report"] for name, item in done.items() if name in KEPT}
    for name, most in KEPT.items():
        assert report[name]["parameters"]["rewritten"]["kept"] <= most
    assert report["params"]["parameters"]["total"]["now"] <= 20_000
    for layer in report["target"]["layers"]:  # a low-rank term takes what blocks leave
        assert layer["structure"].startswith("blockdiag blocks=4 + lowrank r=")
    assert {layer["structure"] for layer in report["recipe"]["layers"]} == {"blockdiag blocks=2"}
    assert done["forward"] == [1, 8, 32]
    assert "blockdiag" in [fact["name"] for fact in done["methods"]["methods"]]
    (fact,) = done["method"]["methods"]
    assert [(item["option"], item["default"]) for item in fact["options"]] == [("--blocks", 4)]


def test_help_and_completion_know_it_without_torch(tree: Path) -> None:
    code = "import sys, atexit; from tcompress.cli.main import main\n"
    code += "atexit.register(lambda: print('torch' in sys.modules))\nmain({})"
    shown = in_tree(tree, "-c", code.format(["convert", "--help"]))
    assert re.search(r"Options of methods.*--blocks .*blockdiag:", shown, re.DOTALL)
    for words, wanted in (("--method bl", "blockdiag"), ("--bloc", "--blocks")):
        typed = f"tcompress convert x {words}"
        completing = {"_TCOMPRESS_COMPLETE": "complete_bash", "COMP_WORDS": typed}
        at = str(len(typed.split()) - 1)
        found = in_tree(tree, "-c", code.format([]), **completing, COMP_CWORD=at)
        assert wanted in found.split()
        assert found.split()[-1] == "False"
