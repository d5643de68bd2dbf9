"""What `--help` says, 100 columns wide and without colour."""

import pytest

from tests.support.cli import commands, worked
from tests.support.golden import Golden

GROUPS = ["", "recipes"]
NAMES = [*GROUPS, *(name for name, _ in commands())]


def _file(name: str) -> str:
    return f"{'-'.join(['tcompress', *name.split()])}.txt"


@pytest.mark.parametrize("name", NAMES)
def test_help(name: str, golden: Golden) -> None:
    golden.text(f"help/{_file(name)}", worked(*name.split(), "--help", columns=100).out)


def test_every_file_is_of_a_command(golden: Golden) -> None:
    golden.only("help", map(_file, NAMES))
