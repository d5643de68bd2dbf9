"""Errors of tcompress.

TCompressError
├── InputError (ValueError)        bad option, recipe, model or data: exit code 2
│   ├── SourceError                the model to convert cannot be read
│   ├── RecipeError                a recipe or an option is wrong
│   ├── PlanError                  the recipe does not fit the model
│   ├── DataError                  data to calibrate, train or measure with cannot be used
│   └── ArtifactError              a converted model is damaged or too new
├── WriteError                     what was written is not what was fitted: exit code 1
├── DiskError (OSError)             a disk is full, or refuses a file
├── FitError (ArithmeticError)     a factorisation failed: names the layer
└── TrainingError (ArithmeticError) training diverged, or cannot go on
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class TCompressError(Exception):
    """Base of every error that tcompress raises on purpose.

    Args:
        message: One sentence: what was found, where, and what is allowed.
        hint: What to do next.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"


class InputError(TCompressError, ValueError):
    """What the user gave cannot be used; nothing was written."""

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
        """Raises what was collected.

        Raises:
            InputError: The only one, or one that lists all of them, with their hints.
        """
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
    """What was written does not load, or is not what was fitted; it was not published."""


class DiskError(TCompressError, OSError):
    """A disk is full, or refuses a file; work that was begun can go on."""

    exit_code = 2


class FitError(TCompressError, ArithmeticError):
    """A factorisation failed or met values that are not finite."""

    exit_code = 2


class TrainingError(TCompressError, ArithmeticError):
    """Training met values that are not finite, or cannot go on."""

    exit_code = 2


def first_line(error: Exception) -> str:
    """Returns what an error says, without its hint, to be quoted in another one."""
    return str(error).partition("\n")[0]


def refuse_replica(module: object) -> NoReturn:
    """Stands in modules for what `nn.DataParallel` calls; it would lose what layers share.

    Raises:
        InputError: Always.
    """
    raise InputError(
        f"a `{type(module).__name__}` cannot be copied for `nn.DataParallel`, which training on "
        "several devices uses in one process",
        "start one process for each device, with `torchrun` or `accelerate launch`, or show one "
        "device only: `CUDA_VISIBLE_DEVICES=0`",
    )
