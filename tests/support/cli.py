"""Running the command line inside the test process."""

import io
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import typer
from rich.console import Console, RenderableType

from tcompress.cli.main import main, program


@dataclass(frozen=True)
class Ran:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout; there must be nothing else."""
        document: dict[str, Any] = json.loads(self.out)
        assert document["schema"] == 1
        return document

    @property
    def lines(self) -> list[str]:
        """Lines of stdout without the spaces around them, empty ones left out."""
        return [line.strip() for line in self.out.splitlines() if line.strip()]


def run(*arguments: object, columns: int | None = None) -> Ran:
    """Runs a command that prints to files; `columns` is the width of help and tables."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ),  # commands set variables for the libraries that they import
        warnings.catch_warnings(),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        os.environ.pop("COLUMNS", None)
        if columns is not None:
            os.environ["COLUMNS"] = str(columns)
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return Ran(ended.value.code, out.getvalue(), err.getvalue())


def completed(*arguments: object, columns: int | None = None) -> Ran:
    """Runs a command that must end well, whatever it says on the way."""
    done = run(*arguments, columns=columns)
    assert done.code == 0, done.err
    return done


def worked(*arguments: object, columns: int | None = None) -> Ran:
    """Runs a command that must work, and say nothing besides its result."""
    done = run(*arguments, columns=columns)
    assert (done.code, done.err) == (0, "")
    return done


def commands() -> Iterator[tuple[str, Any]]:
    """All commands with what parses them, those of groups as `recipes list`."""
    root: Any = typer.main.get_command(program())
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        yield from (
            [(name, command)] if inner is None else ((f"{name} {n}", c) for n, c in inner.items())
        )


def error(message: str, hint: str) -> str:
    """What stderr says about a failure."""
    return f"error: {message}\n\nhint: {hint}\n"


def shown(what: RenderableType, width: int = 100) -> str:
    """Print without colour; spaces at the ends of lines and empty lines are left out."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, force_terminal=False).print(what)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"
