"""`tcompress lm-eval`."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated
from unittest.mock import patch

import typer

from tcompress.cli import options as opt
from tcompress.errors import InputError

EPILOG = opt.examples(
    "tcompress lm-eval run --model hf --model_args pretrained=./small ...",
    "tcompress lm-eval run --help",
)

# Whatever follows belongs to the harness, options too.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGS...", show_default=False, help="Passed on to lm-evaluation-harness."
    ),
]


def lm_eval(arguments: Arguments = None) -> None:
    """Run lm-evaluation-harness so that it can load converted models."""
    if find_spec("lm_eval") is None:
        raise InputError(
            "lm-evaluation-harness is not installed", "run `pip install 'tcompress[eval]'`"
        )
    # This package is imported, which is all that loading converted models takes.
    harness = import_module("lm_eval.__main__")
    with patch.object(sys, "argv", ["lm-eval", *(arguments or [])]):
        harness.cli_evaluate()
