"""Errors of tcompress, and the small pieces of text that messages are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

_MOST_LISTED = 12
_DEEPEST = 100  # libraries that copy a config recurse into it

# Hints of several errors.
WITHOUT_DATA = "convert this model without data: `--calib none`"
REPAIR = f"repair the checkpoint, or {WITHOUT_DATA}"


def listed(names: Iterable[str]) -> str:
    """Write names as text for a message: sorted, in backticks, cut after twelve."""
    ordered = sorted(names)
    shown = ", ".join(f"`{name}`" for name in ordered[:_MOST_LISTED])
    more = len(ordered) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown or "nothing"


def counted(number: int, one: str, several: str = "") -> str:
    """Write a number of things as text for a message: `1 row`, and `2 rows` of the same word."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def after_colon(problems: Sequence[str]) -> str:
    """Write problems as the end of a message: the only one, or each on a line of its own."""
    if len(problems) == 1:
        return f" {problems[0]}"
    return "".join(f"\n  - {problem}" for problem in problems)


def folder_content(folder: Path) -> str:
    """Write what a folder holds as text for a message, folders with a slash."""
    return listed(f"{item.name}/" if item.is_dir() else item.name for item in folder.iterdir())


def first_line(error: BaseException) -> str:
    """First line of an error's text, without full stop, and the next one after a colon."""
    text = str(error).strip().splitlines()
    if not text:
        return type(error).__name__
    more = f" {text[1].strip()}" if text[0].endswith(":") and text[1:] else ""
    return (text[0] + more).rstrip(".")


def read_json(path: Path, *, strict: bool = False, constants: bool = False) -> Any:
    """Read a JSON file.

    With `strict`, what other readers would understand in another way is refused: keys that stand
    twice, and numbers that JSON does not have, unless these `constants` are let through. Why it
    cannot be read, a `ValueError` says in one line.
    """
    try:
        return parse_json(path.read_bytes(), strict=strict, constants=constants)
    except OSError as error:
        raise ValueError(error.strerror or type(error).__name__) from error


def parse_json(text: bytes | str, *, strict: bool = False, constants: bool = False) -> Any:
    """Parse JSON as `read_json` does."""
    refused = _refuse_constant if strict and not constants else None
    try:
        value = json.loads(
            text, object_pairs_hook=_unique if strict else None, parse_constant=refused
        )
        if not _is_deep(value):
            return value
    except RecursionError:
        pass
    raise ValueError(f"it is nested more than {_DEEPEST} levels deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{listed({key for key in names if names.count(key) > 1})} stands twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds `{name}`, which is no number of JSON")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        holders = [item for item in level if isinstance(item, dict | list)]
        inner = [item.values() if isinstance(item, dict) else item for item in holders]
        level = [item for items in inner for item in items]
        if not level:
            return False
    return True


def read_settings(path: Path, *, strict: bool = False) -> dict[str, Any]:
    """Read a `config.json`, of which what is used first is known to be of the right kind.

    Transformers writes infinity there as it is, such as a limit of Mamba's time steps. With
    `strict`, keys that stand twice are refused. What is wrong with it, a `ValueError` says as a
    predicate in one line.
    """
    try:
        found = read_json(path, strict=strict, constants=True)
    except ValueError as error:
        raise ValueError(f"is no valid JSON ({first_line(error)})") from error
    if not isinstance(found, dict):
        raise ValueError(f"holds a {type(found).__name__}, expected an object")
    for key, kind, what in (
        ("model_type", str, "a text"),
        ("architectures", list, "a list of texts"),
        ("auto_map", dict, "an object"),
    ):
        value = found.get(key)
        texts = not isinstance(value, list) or all(isinstance(item, str) for item in value)
        if value is not None and not (isinstance(value, kind) and texts):
            raise ValueError(f"has `{str(value)[:40]}` as `{key}`, expected {what}")
    check_counts(found)
    return found


MOST_LAYERS = 10_000
"""More than any model has; so many modules are built one by one, which would not end."""

_COUNTS = re.compile(r"(n|num)_(\w+_)?layers?|(\w+_)?layers|(\w+_)?depth")


def check_counts(settings: Mapping[str, Any]) -> None:
    """Refuses, by a `ValueError`, numbers of layers that nothing could build, in parts too."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            check_counts(value)
        elif type(value) is int and value > MOST_LAYERS and _COUNTS.fullmatch(key):
            raise ValueError(
                f"has `{str(value)[:40]}` as `{key}`, expected at most {MOST_LAYERS:,}"
            )


class TCompressError(Exception):
    """Base of every error that tcompress raises on purpose.

    The message is one sentence: what was found, where, and what is allowed; the hint says what to
    do next.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"


class InputError(TCompressError, ValueError):
    """Input that cannot be used; nothing was written."""

    exit_code = 2


class Problems:
    """Collects what is wrong with several things, to say all of it at once."""

    def __init__(self) -> None:
        self.found: list[InputError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keeps the error of the block, if it raises one about what the user gave."""
        try:
            yield
        except InputError as error:
            self.found.append(error)

    def report(self) -> None:
        """Raises what was collected: the only error, or an `InputError` that lists all of them."""
        found = {error.message: error for error in self.found}
        if len(found) == 1:
            raise next(iter(found.values()))
        if found:
            lines = "".join(f"\n  - {message}" for message in found)
            hints = dict.fromkeys(error.hint for error in self.found if error.hint)
            raise InputError(f"{len(found)} problems:{lines}", "; ".join(hints) or None)


class SourceError(InputError):
    """The model to convert cannot be found or read."""


class RecipeError(InputError):
    """A recipe or a combination of options is invalid."""


class PlanError(InputError):
    """The recipe cannot be applied to this model."""


class DataError(InputError):
    """Data to calibrate, train or measure with is empty or of the wrong kind."""


class ArtifactError(InputError):
    """A converted model is damaged, incomplete or of a newer format."""


class WriteError(TCompressError):
    """Files that do not load, or hold something else than what was fitted; not published."""


class DiskError(TCompressError, OSError):
    """A disk is full, or refuses a file; work that was begun can go on."""

    exit_code = 2


class ProcessError(TCompressError, RuntimeError):
    """A process that works together with this one is gone; work that was begun can go on."""


class FitError(TCompressError, ArithmeticError):
    """A factorisation failed or met values that are not finite."""

    exit_code = 2


class TrainingError(TCompressError, ArithmeticError):
    """Training met values that are not finite, or cannot go on."""

    exit_code = 2


def message_of(error: Exception) -> str:
    """Returns what an error says, without its hint, to be quoted in another one."""
    return str(error).partition("\n")[0]


def refuse_replica(module: object) -> NoReturn:
    """Refuses, in modules, what `nn.DataParallel` asks for; it would lose what layers share."""
    raise InputError(
        f"a `{type(module).__name__}` cannot be copied for `nn.DataParallel`, which training on "
        "several devices uses in one process",
        "start one process for each device, with `torchrun` or `accelerate launch`, or show one "
        "device only: `CUDA_VISIBLE_DEVICES=0`",
    )
