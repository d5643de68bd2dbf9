"""What `inspect`, `report` and `convert` say of tiny models."""

from collections.abc import Iterator
from contextlib import chdir

import pytest

from tests.support.cli import worked
from tests.support.golden import Golden
from tests.support.model_folders import model_folder

SMALL = "--method lprod --p 8 --target 0.5 --keep h.1.mlp.* --calib none --device cpu --quiet"
COMMANDS = {
    "convert": f"convert ./gpt2 {SMALL} -o again",
    "dry-run": f"convert ./gpt2 {SMALL} --dry-run",
    "inspect": "inspect small",
    "inspect-layers": "inspect small --layers",
    "inspect-dense": "inspect mixtral",
    "report": "report small --length 16",
    "report-dense": "report gpt2",
    "report-side-by-side": "report small gpt2 mixtral --layers",
}
DOCUMENTS = ("inspect", "report")


@pytest.fixture(scope="module", autouse=True)
def _models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder with tiny models, and one that is converted."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("gpt2", "mixtral"):
        model_folder(family, folder / family)
    with chdir(folder):
        worked("convert", "./gpt2", *SMALL.split(), "-o", "small")
        yield


@pytest.mark.parametrize("name", COMMANDS)
def test_text(name: str, golden: Golden) -> None:
    golden.text(f"reports/{name}.txt", worked(*COMMANDS[name].split(), columns=100).out)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document(name: str, golden: Golden) -> None:
    found = worked(*COMMANDS[name].split(), "--json").document
    golden.document(f"reports/{name}.json", found)


def test_every_file_is_of_a_command(golden: Golden) -> None:
    texts, documents = ([f"{n}.txt" for n in COMMANDS], [f"{n}.json" for n in DOCUMENTS])
    golden.only("reports", texts + documents)
