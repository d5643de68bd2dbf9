"""States of a run on disk: what is needed to go on as if nothing had happened."""

from __future__ import annotations

import shutil
from pathlib import Path

from accelerate import Accelerator
from pydantic import BaseModel, Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcompress.artifact.manifest import CurvePoint, SourceAgreement
from tcompress.errors import TrainingError, first_line
from tcompress.files import beside, free_text, swap, sync, write_text

_STATE = "run.json"


class RunState(BaseModel):
    """Progress of a run, as it stands in a checkpoint."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    validation: float = 0.0  # seconds of the first one
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

    def add(self, point: CurvePoint, *, higher_is_better: bool) -> bool:
        """Add a validation to the curve; True if it is the best so far."""
        value, best = point.validation, self.best
        assert value is not None  # a point without one is not made in a run
        self.recent.clear()
        self.curve.append(point)
        if best is not None and not (value > best if higher_is_better else value < best):
            self.stale += 1
            return False
        self.best, self.best_step, self.stale = value, self.step, 0
        return True


class Checkpoints:
    """Checkpoints of one run, in a folder; the last one and the best weights are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._needed: int | None = None  # step of the best weights that the last checkpoint needs

    def last(self) -> Path | None:
        """The newest checkpoint; it has its name from the moment that it is complete."""
        return max(self.folder.glob("step-*[0-9]"), default=None)

    def save(self, state: RunState, accelerator: Accelerator) -> None:
        """Write a checkpoint and remove older ones; every process saves, the main one the rest.

        All is saved as it is in memory: in safetensors it would leave out what shares memory, for
        which it takes empty parameters too, once they are on a GPU; and it would not load what it
        had left out.
        """
        target, main = self.folder / f"step-{state.step:08d}", accelerator.is_main_process
        unfinished = target.with_suffix(".tmp")
        try:
            if main:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
            accelerator.wait_for_everyone()
            accelerator.save_state(str(unfinished), safe_serialization=False)
            accelerator.wait_for_everyone()
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
            what = f"the checkpoint of step {state.step:,}"
            raise _unwritten(what, self.folder, error) from error

    def read_state(self, folder: Path) -> RunState:
        """Read the state of a run."""
        state = RunState.model_validate_json((folder / _STATE).read_text(encoding="utf-8"))
        self._needed = state.best_step
        return state

    def keep_best(self, tensors: dict[str, Tensor], step: int) -> None:
        """Keep the weights of the best step so far, and those that the last checkpoint needs."""
        write_tensors(self._best(step), tensors, "the best weights")
        self._forget(step)

    def best(self, step: int) -> dict[str, Tensor]:
        """Read the weights of a step that was the best one once, as the first always was."""
        return load_file(self._best(step))

    def _best(self, step: int) -> Path:
        return self.folder / f"best-{step:08d}.safetensors"

    def _forget(self, step: int) -> None:
        """Remove best weights of other steps, but for the first, that no checkpoint needs."""
        needed = {self._best(best) for best in (0, step, self._needed) if best is not None}
        for path in self.folder.glob("best-*"):
            if path not in needed:
                path.unlink()


def write_tensors(path: Path, tensors: dict[str, Tensor], what: str) -> None:
    """Write tensors to a file that has its name from the moment that it is complete.

    Raises:
        TrainingError: It cannot be written; says `what` it holds.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path) as unfinished:
            save_file({name: value.contiguous() for name, value in tensors.items()}, unfinished)
    except Exception as error:  # safetensors wraps errors of the disk in its own
        raise _unwritten(what, path.parent, error) from error


def _unwritten(what: str, folder: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"{what} cannot be written ({type(error).__name__}: {first_line(error)}); "
        f"{free_text(folder)} on its disk",
        "free some disk space and run the same command again: it goes on where it was",
    )
