"""From exceptions to messages and exit codes.

Exit codes: 0 done, 1 unexpected failure, 2 bad option, recipe or input, 3 a declared threshold
was missed, 130 interrupted, 143 by a SIGTERM.
"""

from __future__ import annotations

import difflib
import os
import re
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import typer

from tcompress.cli.output import notices, print_json
from tcompress.errors import TCompressError
from tcompress.files import disk_error

UNEXPECTED, USAGE, THRESHOLD, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143

_NO_HOME = "write the path in full, or `./~name` for a file of that name"

TRACEBACK = "TCOMPRESS_TRACEBACK"
"""Environment variable that asks for tracebacks."""

# Typer brings its parser along or imports it, by version; either way this is its base class.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


class Interrupted(TCompressError):
    """The user stopped a command that can go on later."""

    exit_code = INTERRUPTED


@dataclass(frozen=True)
class Failure:
    """What is said about an exception.

    Attributes:
        kind: Name of the exception's class.
        message: One sentence without full stop.
        hint: What to do next.
        code: Exit code.
    """

    kind: str
    message: str
    hint: str | None
    code: int


def describe(error: BaseException) -> Failure:
    """Puts an exception into words."""
    kind = type(error).__name__
    if isinstance(error, TCompressError):
        return Failure(kind, error.message, error.hint, error.exit_code)
    if isinstance(error, _UsageError):
        message, hint = _usage_words(error)
        return Failure("UsageError", message, hint, USAGE)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return Failure("Interrupted", "interrupted", None, INTERRUPTED)
    refused = disk_error(error)
    if refused is not None:
        return describe(refused)
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of `~name`
        return Failure(kind, "a path begins with `~` and a user that there is not", _NO_HOME, USAGE)
    lines = str(error).strip().splitlines()
    message = f"unexpected `{kind}`" + (f": {lines[0]}" if lines else "")
    return Failure(kind, message, _unexpected_hint(error), UNEXPECTED)


def report_failure(error: BaseException, *, as_json: bool) -> int:
    """Prints what went wrong.

    Args:
        error: What was raised.
        as_json: Print a JSON document to stdout too.

    Returns:
        The exit code.
    """
    failure = describe(error)
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        notices().print("".join(traceback.format_exception(error)), soft_wrap=True)
    if as_json:
        facts = {"type": failure.kind, "message": failure.message, "hint": failure.hint}
        with suppress(OSError):  # where stdout is what is wrong
            print_json({"error": facts})
    _print(failure)
    return failure.code


def suggestion(word: str, known: Iterable[str]) -> str | None:
    """Returns a hint that names the closest known word, if one is close.

    A word that goes on where a known one ends, such as `--calibration` for `--calib`, means it.
    """
    words = {name.lower(): name for name in known}
    typed = word.lower()
    begun = sorted((name for name in words if len(name) > 4 and typed.startswith(name)), key=len)
    close = begun[-1:] or difflib.get_close_matches(typed, words, 1)
    return f"did you mean `{words[close[0]]}`?" if close and words[close[0]] != word else None


def _print(failure: Failure) -> None:
    from rich.text import Text

    text = Text.assemble(("error", "bold red"), f": {failure.message}")
    if failure.hint:
        text.append("\n\n").append("hint", "bold cyan").append(f": {failure.hint}")
    notices().print(text, soft_wrap=True)


def _unexpected_hint(error: BaseException) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            "give fewer or shorter examples at a time (`--batch-size`, `--max-length`, "
            "`convert.calibration.batch_size` in a recipe), or another `--device`"
        )
    return f"run again with `{TRACEBACK}=1` to see where, and report it"


def _usage_words(error: Any) -> tuple[str, str | None]:
    """Rewords what the parser says about the command line."""
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context else "tcompress"
    hint = f"see `{path} --help`"
    text = str(error.format_message())
    if type(error).__name__ == "NoSuchOption":
        known = [name for item in context.command.get_params(context) for name in item.opts]
        name = error.option_name
        return f"unknown option `{name}`", suggestion(name, known) or hint
    if found := re.match(r"No such command '(.*?)'", text):
        known = list(context.command.commands)
        listed = ", ".join(f"`{name}`" for name in known)
        message = f"unknown command `{found[1]}`; commands are {listed}"
        return message, suggestion(found[1], known) or hint
    text = re.sub(r"'([^' ]+)'", r"`\1`", text.rstrip("."))
    return text[:1].lower() + text[1:], hint
