"""Errors of tcompress.

TCompressError
├── InputError (ValueError)        bad option, recipe, model or data: exit code 2
│   ├── SourceError                the model to convert cannot be read
│   ├── RecipeError                a recipe or an option is wrong
│   ├── PlanError                  the recipe does not fit the model
│   ├── DataError                  data to calibrate, train or measure with cannot be used
│   └── ArtifactError              a converted model is damaged or too new
├── WriteError                     what was written is not what was fitted: exit code 1
├── FitError (ArithmeticError)     a factorisation failed: names the layer
└── TrainingError (ArithmeticError) training diverged, or cannot go on
"""

from __future__ import annotations

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


class FitError(TCompressError, ArithmeticError):
    """A factorisation failed or met values that are not finite."""

    exit_code = 2


class TrainingError(TCompressError, ArithmeticError):
    """Training met values that are not finite, or cannot go on."""

    exit_code = 2


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
