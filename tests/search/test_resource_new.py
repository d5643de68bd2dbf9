"""A resource is three files: the example of CONTRIBUTING.md, added to a copy of the package."""

import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from tests.support.copied_tree import copied, example, in_tree

FILES = (
    "tcompress/options/convert_options.py",
    "tcompress/search/resources.py",
    "tests/search/test_resource_contract.py",
)
COMMANDS = """
import json
from pathlib import Path
from tests.support.cli import run
from tests.support.model_folders import model_folder, sentences, text_file

model_folder("bert", Path("model"))
text = text_file(Path("text.txt"), sentences(40))
data = ("--calib", text, "--calib-samples", "16", "--max-length", "32", "--method", "width")
done = run("convert", "model", *data, "--joules", "0.5", "--json", "-o", "small")
assert done.code == 0, done.err
refused = run("convert", "model", *data, "--joules", "0.01", "-o", "none")
assert refused.code != 0 and not Path("none").exists()
report = run("report", "small")
assert report.code == 0, report.err
planned = run("convert", "model", *data, "--joules", "0.5", "--dry-run")
assert planned.code == 0, planned.err
found = [done.document, refused.err, "\\n".join(report.lines), "\\n".join(planned.lines)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the three blocks of the document put where they belong."""
    folder = copied(tmp_path_factory.mktemp("tree"))
    blocks = example("## Add a resource")
    assert tuple(blocks) == FILES
    field, resource, row = blocks.values()
    options, resources, contract = (folder / name for name in FILES)
    text, field = options.read_text("utf-8"), indent(field, "    ")
    options.write_text(text.replace("    at: str | None", f"{field}    at: str | None", 1), "utf-8")
    resources.write_text(resources.read_text("utf-8") + resource, "utf-8")
    text = contract.read_text("utf-8")
    contract.write_text(text.replace("ROW = ", f"{row}ROW = ", 1), "utf-8")
    return folder


@pytest.mark.slow
def test_the_contract_holds(tree: Path) -> None:
    contract = "tests/search/test_resource_contract.py"
    options = ("-q", "-p", "no:cacheprovider", "-m", "grid or not grid")
    out = in_tree(tree, "-m", "pytest", *options, contract, "-k", "joules or every_option")
    assert re.search(r"\n4 passed", out), out


def test_commands_plan_refuse_and_report(tree: Path) -> None:
    found: list[Any] = json.loads(in_tree(tree, "-c", COMMANDS))
    document, refused, report, planned = found
    assert document["report"]["parameters"]["rewritten"]["kept"] < 1
    assert "`--joules 0.01` is out of reach" in refused
    assert re.search(r"the smallest possible is [0-9.]+ joules", refused)
    assert "--joules 0.5" in report
    assert "--joules 0.5" in planned
