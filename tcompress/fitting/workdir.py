"""The working folder of a conversion: fits of finished blocks survive a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from torch import Tensor

from tcompress.artifact.disk_cache import (
    DAMAGED,
    StoredTensors,
    read_record,
    read_tensors,
    save_tensors,
)
from tcompress.artifact.workplace import Workplace, partial_folder
from tcompress.files import remove, write_text
from tcompress.fitting.layer_fits import BlockResult, FittedLayer
from tcompress.linalg.moments import LARGEST, SMALLEST
from tcompress.models.keymap import CPU
from tcompress.planning.entries import DepthPlan, FactorsKey, Plan
from tcompress.processes import by_first
from tcompress.progress import Seconds

KINDS = ("inputs", "curvature", "condensed", "tokens", "channels")
TRIALS = "trials"  # folder, within the working folder, of conversions that are tried out

_ANSWERS = TypeAdapter(dict[str, Plan])
_SECONDS = TypeAdapter(dict[str, dict[str, float]])

_PRIVATE = ("lock", "identity", "journal.jsonl", "model", "depth.json", "change")
"""Files that are never taken over from the working folder of another conversion."""


class Distance(NamedTuple):
    """Distance of a model from the dense one, on samples held out."""

    change: float  # of the output per sample, in the unit of predicted losses
    lost: float | None = None  # agreement, as far as there is such a thing


class FitWorkplace(Workplace):
    """Working folder of one conversion on one device; other arguments as for `Workplace`.

    What was measured is read onto the device, where fits are made of it. What was fitted is read
    onto the CPU, where it is written from.
    """

    def __init__(
        self,
        output: Path,
        identity: str,
        device: torch.device,
        *,
        force: bool = False,
        measured: Path | None = None,
    ) -> None:
        super().__init__(output, identity, force=force)
        self._device = device
        self._measured = measured or self.folder  # where moments are

    @by_first
    def keep_block(self, result: BlockResult) -> None:
        errors = {name: fitted.errors for name, fitted in result.layers.items()}
        path, facts = self._path_of(result.block), {"errors": json.dumps(errors)}
        path.parent.mkdir(exist_ok=True)
        save_tensors(_flat(_groups(result)), path, facts)
        self.note("block", name=result.block)

    def block(self, name: str) -> BlockResult | None:
        """Read the fits of a block; None where there are none, or a kill has cut them off."""
        errors, tensors = self.errors(name), read_tensors(self._path_of(name), CPU)
        if errors is None or tensors is None:
            return None
        result = BlockResult(name, {key: FittedLayer({}, errors[key]) for key in errors})
        groups = _groups(result)
        for key, tensor in tensors.items():
            group, _, leaf = key.rpartition("/")
            groups[group][leaf] = tensor
        return result

    def errors(self, name: str) -> dict[str, dict[str, float]] | None:
        """Read the errors of a finished block's layers, by weight name."""
        try:
            with safe_open(self._path_of(name), "pt") as file:
                return dict(json.loads(file.metadata()["errors"]))
        except DAMAGED:
            return None

    @by_first
    def keep_moments(self, kind: str, block: str, moments: Mapping[str, Tensor]) -> None:
        """Store what was measured of a block's layers, by name.

        Moments of `inputs`, or of output gradients (`curvature`), or weights `condensed` by these;
        what `tokens` are worth, by name and batch; the order of `channels`.
        """
        (self._measured / kind).mkdir(exist_ok=True)
        tensors = {name: narrowed(item) for name, item in moments.items()}
        save_tensors(tensors, self._measured / kind / f"{block}.safetensors")

    def moments(self, kind: str, block: str) -> Mapping[str, Tensor]:
        """Read them back, each when it is asked for; there are none where none were kept."""
        return StoredTensors(self._measured / kind / f"{block}.safetensors", self._device)

    @property
    def moments_bytes(self) -> int:
        """Bytes of all that was measured, which are no part of a result."""
        files = chain.from_iterable((self.folder / kind).rglob("*") for kind in KINDS)
        return sum(path.stat().st_size for path in files if path.is_file())

    @by_first
    def copy_moments(self, folder: Path) -> None:
        """Copy all that was measured, and nothing that was fitted."""
        for kind in KINDS:
            if (self.folder / kind).is_dir():
                shutil.copytree(self.folder / kind, folder / kind)

    @by_first
    def keep_factors(self, factors: Mapping[FactorsKey, Mapping[str, Tensor]]) -> None:
        groups = {"/".join(key): tensors for key, tensors in factors.items()}
        save_tensors(_flat(groups), self.folder / "factors.safetensors")

    def factors(self) -> dict[FactorsKey, dict[str, Tensor]] | None:
        """Read what layers share, if an interrupted run had fitted it."""
        tensors = read_tensors(self.folder / "factors.safetensors", CPU)
        if tensors is None:
            return None
        factors: dict[FactorsKey, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            owner, group, name = key.split("/")
            factors.setdefault((owner, group), {})[name] = tensor
        return factors

    @by_first
    def scratch(self) -> Path:
        """Make an empty folder for what is needed for a while."""
        folder = self.folder / "scratch"
        remove(folder)
        folder.mkdir()
        return folder

    @by_first
    def keep_answers(self, answers: Mapping[str, Plan]) -> None:
        """Store plans with final sizes by name: all that are to be tried, or the one taken."""
        write_text(self.folder / "answers.json", _ANSWERS.dump_json(dict(answers)).decode())

    def answers(self) -> dict[str, Plan] | None:
        """Read them, as an interrupted run had made them; none if what led to them is gone."""
        moments = (path for kind in KINDS for path in self.folder.glob(f"{kind}/*"))
        if not all(StoredTensors(path, CPU).is_readable for path in moments):
            return None
        return read_record(self.folder / "answers.json", _ANSWERS.validate_json)

    @by_first
    def keep_depth(self, depth: DepthPlan) -> None:
        write_text(self.folder / "depth.json", depth.model_dump_json())
        self.note("depth")

    def depth(self) -> DepthPlan | None:
        """Read which blocks stay, as an interrupted run had chosen them."""
        return read_record(self.folder / "depth.json", DepthPlan.model_validate_json)

    def keep_seconds(self, seconds: Seconds) -> None:
        """Store what stages have taken so far."""
        if self._lock is not None:  # without waiting for other processes
            write_text(self.folder / "seconds.json", json.dumps(seconds))

    def seconds(self) -> Seconds:
        """Read what they took in an interrupted run."""
        return read_record(self.folder / "seconds.json", _SECONDS.validate_json) or {}

    @by_first
    def keep_distance(self, distance: Distance) -> None:
        """Store how far a trial is from the dense model."""
        write_text(self.folder / "change", json.dumps(distance))

    def distance(self) -> Distance | None:
        """Read it back, if the trial was finished."""
        return read_record(self.folder / "change", lambda text: Distance(*json.loads(text)))

    def trial(self, name: str, *, measures: bool = True) -> FitWorkplace:
        """Open the folder of another conversion that is tried out.

        It has moments of its own where it `measures`, else those of this one.
        """
        measured = None if measures else self._measured
        return FitWorkplace(self.folder / TRIALS / name, "", self._device, measured=measured)

    @by_first
    def adopt(self, name: str) -> None:
        """Adopt what a trial has measured and fitted; the choice must be on disk by then."""
        trial = partial_folder(self.folder / TRIALS / name)
        for item in trial.iterdir() if trial.is_dir() else ():
            if item.name not in _PRIVATE:
                remove(self.folder / item.name)
                item.rename(self.folder / item.name)
        self.drop_trials()

    @by_first
    def drop_trials(self) -> None:
        """Forget all other conversions that were tried out."""
        remove(self.folder / TRIALS)

    def _path_of(self, block: str) -> Path:
        return self.folder / "blocks" / f"{block}.safetensors"


def _groups(result: BlockResult) -> dict[str, dict[str, Tensor]]:
    """Tensors of fits by what they belong to."""
    layers = {f"layer/{name}": fitted.tensors for name, fitted in result.layers.items()}
    return {**layers, "attention": result.attention}


def _flat(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()}


def narrowed(moment: Tensor) -> Tensor:
    """Give a moment as float32, unless its range is too small for it."""
    largest = float(moment.abs().amax()) if moment.numel() else 0.0
    narrow = largest == 0 or SMALLEST**2 < largest < LARGEST**2
    return moment.float() if narrow else moment
