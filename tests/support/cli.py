"""Running the command line inside the test process."""

from __future__ import annotations

import io
import json
import os
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from tcompress.cli.main import main


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


def run(*arguments: object) -> Ran:
    """Runs a command that prints to files, not to a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ),  # commands set variables for the libraries that they import
        warnings.catch_warnings(),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        os.environ.pop("COLUMNS", None)
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return Ran(ended.value.code, out.getvalue(), err.getvalue())


def error(message: str, hint: str) -> str:
    """What stderr says about a failure."""
    return f"error: {message}\n\nhint: {hint}\n"
