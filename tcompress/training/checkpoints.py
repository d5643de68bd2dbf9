"""States of a run on disk: what is needed to go on as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcompress.artifact.manifest import CurvePoint
from tcompress.errors import TrainingError

_STATE = "run.json"


class RunState(BaseModel):
    """How far a run is.

    Attributes:
        step: Optimizer steps done.
        samples: Examples seen.
        tokens: Tokens seen, padding not counted.
        seconds: Time spent.
        parts: Pieces that a batch is cut into.
        total: Steps in all, if the time limit has shortened them.
        best: Best validated number so far.
        best_step: Its step.
        stale: Validations since then.
        recent: Losses since the last validation.
        curve: Course of the run.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    parts: int = 1
    total: int = 0
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    recent: list[float] = Field(default_factory=list)
    curve: list[CurvePoint] = Field(default_factory=list)


class Checkpoints:
    """Checkpoints of one run; the last one and the best weights are kept.

    Args:
        folder: Folder to keep them in.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._best = folder / "best.safetensors"

    def last(self) -> Path | None:
        """The newest complete checkpoint."""
        found = sorted(path for path in self.folder.glob("step-*") if (path / _STATE).is_file())
        return found[-1] if found else None

    def save(self, state: RunState, write: Callable[[Path], None], *, main: bool) -> None:
        """Writes a checkpoint; older ones are removed when it is complete.

        Args:
            state: How far the run is.
            write: Writes models, optimizer and generators into a folder; called in every process.
            main: Whether this process is the one that writes everything else.

        Raises:
            TrainingError: It cannot be written; the one before is still there.
        """
        target = self.folder / f"step-{state.step:08d}"
        beside = self.folder / f"{target.name}.tmp"
        try:
            if main:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
            write(beside)
            if main:
                (beside / _STATE).write_text(state.model_dump_json(), encoding="utf-8")
                shutil.rmtree(target, ignore_errors=True)
                beside.rename(target)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise _unwritten(f"the checkpoint of step {state.step:,}", error) from error
        if main:
            for path in self.folder.glob("step-*"):
                if path != target:
                    shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def read_state(folder: Path) -> RunState:
        """Reads how far a run was."""
        return RunState.model_validate_json((folder / _STATE).read_text(encoding="utf-8"))

    def keep_best(self, tensors: dict[str, Tensor]) -> None:
        """Keeps the weights that are best so far.

        Raises:
            TrainingError: They cannot be written; those before are still there.
        """
        beside = self._best.with_suffix(".tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({name: value.contiguous() for name, value in tensors.items()}, beside)
            beside.rename(self._best)
        except Exception as error:
            beside.unlink(missing_ok=True)
            raise _unwritten("the best weights", error) from error

    def best(self) -> dict[str, Tensor]:
        """Reads the best weights."""
        return load_file(self._best)


def _unwritten(what: str, error: Exception) -> TrainingError:
    text = str(error).strip().splitlines()
    return TrainingError(
        f"{what} cannot be written ({type(error).__name__}: {text[0] if text else 'no reason'})",
        "free some disk space and run the same command again: it goes on where it was",
    )
