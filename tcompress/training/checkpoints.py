"""States of a run on disk: what is needed to go on as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcompress.artifact.manifest import CurvePoint, SourceAgreement
from tcompress.errors import TrainingError
from tcompress.files import beside, free_text, swap, sync, write_text

_STATE = "run.json"


class RunState(BaseModel):
    """How far a run is."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    parts: int = 1  # pieces that a batch is cut into
    rate: float | None = None  # of short runs, where it was tested for
    total: int = 0  # steps in all, as the time limit allows
    best: float | None = None
    best_step: int = 0
    stale: int = 0  # validations since the best
    recent: list[float] = Field(default_factory=list)  # losses since the last validation
    curve: list[CurvePoint] = Field(default_factory=list)
    share: float = 1.0  # of the way from the first weights to the best ones
    sources: list[SourceAgreement] = Field(default_factory=list)


class Checkpoints:
    """Checkpoints of one run, in a folder; the last one and the best weights are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._needed: int | None = None  # step of the best weights that the last checkpoint needs

    def last(self) -> Path | None:
        """The newest checkpoint; it has its name from the moment that it is complete."""
        return max(self.folder.glob("step-*[0-9]"), default=None)

    def save(
        self, state: RunState, write: Callable[[Path], None], wait: Callable[[], object], main: bool
    ) -> None:
        """Writes a checkpoint and removes older ones; every process calls `write`, one the rest."""
        target = self.folder / f"step-{state.step:08d}"
        unfinished = target.with_suffix(".tmp")
        try:
            if main:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
            wait()
            write(unfinished)
            wait()
            if main:
                write_text(unfinished / _STATE, state.model_dump_json())
                for path in (*unfinished.rglob("*"), unfinished):
                    sync(path)
                if target.exists():  # a resumed run may come back to its step
                    swap(unfinished, target, target.with_suffix(".old.tmp"))
                else:
                    unfinished.rename(target)
                self._needed = state.best_step
                self._forget(state.best_step)
                for path in self.folder.glob("step-*"):
                    if path != target:
                        shutil.rmtree(path, ignore_errors=True)
        except Exception as error:  # safetensors and torch wrap errors of the disk in their own
            shutil.rmtree(unfinished, ignore_errors=True)
            raise self._unwritten(f"the checkpoint of step {state.step:,}", error) from error

    def read_state(self, folder: Path) -> RunState:
        """Reads how far a run was."""
        state = RunState.model_validate_json((folder / _STATE).read_text(encoding="utf-8"))
        self._needed = state.best_step
        return state

    def keep_best(self, tensors: dict[str, Tensor], step: int) -> None:
        """Keeps the weights of the best step so far, and those that the last checkpoint needs."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with beside(self._best(step)) as other:
                save_file({name: value.contiguous() for name, value in tensors.items()}, other)
        except Exception as error:
            raise self._unwritten("the best weights", error) from error
        self._forget(step)

    def best(self, step: int) -> dict[str, Tensor]:
        """Reads the weights of a step that was the best one once, as the first always was."""
        return load_file(self._best(step))

    def _best(self, step: int) -> Path:
        return self.folder / f"best-{step:08d}.safetensors"

    def _forget(self, step: int) -> None:
        """Removes best weights of other steps, but for the first, that no checkpoint needs."""
        needed = {self._best(one) for one in (0, step, self._needed) if one is not None}
        for path in self.folder.glob("best-*"):
            if path not in needed:
                path.unlink()

    def _unwritten(self, what: str, error: Exception) -> TrainingError:
        text = (str(error).strip() or "no reason").splitlines()[0]
        return TrainingError(
            f"{what} cannot be written ({type(error).__name__}: {text}); "
            f"{free_text(self.folder)} on its disk",
            "free some disk space and run the same command again: it goes on where it was",
        )
