"""What is generated from the options: schema, reference, methods, and the list of recipes."""

import pytest

from tests.support.cli import worked
from tests.support.golden import Golden

COMMANDS = ("recipes reference", "recipes list", "methods")


@pytest.mark.parametrize("name", COMMANDS)
def test_text(name: str, golden: Golden) -> None:
    golden.text(f"reference/{_file(name)}", worked(*name.split()).out)


@pytest.mark.parametrize("name", COMMANDS)
def test_document(name: str, golden: Golden) -> None:
    found = worked(*name.split(), "--json").document
    golden.document(f"reference/{_file(name, 'json')}", found)


def test_every_file_is_of_a_command(golden: Golden) -> None:
    golden.only("reference", [_file(name, kind) for name in COMMANDS for kind in ("txt", "json")])


def _file(name: str, kind: str = "txt") -> str:
    kind = "md" if (name, kind) == ("recipes reference", "txt") else kind
    return f"{name.replace(' ', '-')}.{kind}"
