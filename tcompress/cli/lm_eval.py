"""`tcompress lm-eval`."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec

from tcompress.cli.first_look import first_look
from tcompress.errors import InputError
from tcompress.options.commands import Passed
from tcompress.project import install_with

EXAMPLES = (
    "tcompress lm-eval run --model hf --model_args pretrained=./small ...",
    "tcompress lm-eval run --help",
)

# Whatever follows belongs to the harness, options too.
SETTINGS = {"context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False}}


def lm_eval(call: Passed) -> None:
    """Does what `tcompress lm-eval` says."""
    if find_spec("lm_eval") is None:
        text = "lm-evaluation-harness is not installed"
        raise InputError(text, f"run `{install_with('eval')}`")
    # Those of the harness's arguments that name a model.
    models = re.findall(r"(?:^|,)pretrained=([^,\n]+)", "\n".join(call.arguments), re.MULTILINE)
    with first_look() as look:
        look.models(*models)
    # This package is imported, which is all that loading converted models takes.
    harness = import_module("lm_eval.__main__")
    from unittest.mock import patch

    with patch.object(sys, "argv", ["lm-eval", *call.arguments]):
        harness.cli_evaluate()
