"""What is generated from the options: schema, reference, methods, and the list of recipes."""

from __future__ import annotations

import pytest

from tests.support.cli import worked
from tests.support.golden import Golden

COMMANDS = ("recipes reference", "recipes list", "methods")


@pytest.mark.parametrize("name", COMMANDS)
def test_text(name: str, golden: Golden) -> None:
    found = worked(*name.split()).out
    suffix = "md" if name == "recipes reference" else "txt"
    golden.text(f"reference/{name.replace(' ', '-')}.{suffix}", found)


@pytest.mark.parametrize("name", COMMANDS)
def test_document(name: str, golden: Golden) -> None:
    found = worked(*name.split(), "--json").document
    golden.document(f"reference/{name.replace(' ', '-')}.json", found)
