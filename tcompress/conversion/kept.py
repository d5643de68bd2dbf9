"""The working folder of a conversion: fits of finished blocks survive a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcompress.artifact.workplace import Workplace
from tcompress.conversion.blocks import BlockResult
from tcompress.conversion.fit import FittedLayer
from tcompress.planning.entries import BankKey, DepthPlan, Plan

TRIALS = "trials"
"""Folder, within the working folder, of conversions that are tried out."""

_OWN = ("lock", "identity", "journal.jsonl", "model", "depth.json", "method", "change")
"""What is never taken over from the working folder of another conversion."""


class FitWorkplace(Workplace):
    """Working folder of one conversion; arguments as for `Workplace`."""

    def __init__(self, output: Path, identity: str) -> None:
        super().__init__(output, identity)
        self._blocks = self.folder / "blocks"
        self._blocks.mkdir(exist_ok=True)

    def keep_block(self, result: BlockResult) -> None:
        """Stores the fits of one block."""
        tensors: dict[str, Tensor] = {}
        for name, fitted in result.layers.items():
            tensors |= {f"layer/{name}/{key}": value for key, value in fitted.tensors.items()}
        tensors |= {f"bias/{name}": bias for name, bias in result.biases.items()}
        tensors |= {f"attention/{name}": value for name, value in result.attention.items()}
        errors = {name: fitted.errors for name, fitted in result.layers.items()}
        beside = self._path_of(result.block).with_suffix(".tmp")
        save_file(
            {key: tensor.cpu().contiguous() for key, tensor in tensors.items()},
            beside,
            {"errors": json.dumps(errors)},
        )
        beside.rename(self._path_of(result.block))
        self.note("block", name=result.block)

    def block(self, name: str) -> BlockResult | None:
        """Reads the fits of a finished block."""
        path = self._path_of(name)
        if not path.is_file():
            return None
        layers: dict[str, dict[str, Tensor]] = {}
        biases: dict[str, Tensor] = {}
        attention: dict[str, Tensor] = {}
        try:
            with safe_open(path, "pt") as file:
                errors: Mapping[str, dict[str, float]] = json.loads(file.metadata()["errors"])
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    kind, _, rest = key.partition("/")
                    if kind == "bias":
                        biases[rest] = file.get_tensor(key)
                    elif kind == "attention":
                        attention[rest] = file.get_tensor(key)
                    else:
                        layer, _, tensor = rest.partition("/")
                        layers.setdefault(layer, {})[tensor] = file.get_tensor(key)
        except (SafetensorError, OSError, KeyError, ValueError):
            return None  # cut off by a kill: fitted again
        fitted = {key: FittedLayer(tensors, errors[key]) for key, tensors in layers.items()}
        return BlockResult(name, fitted, biases, attention)

    def keep_curvature(self, block: str, curvatures: Mapping[str, Tensor]) -> None:
        """Stores moments of the output gradients of a block's layers."""
        folder = self.folder / "curvature"
        folder.mkdir(exist_ok=True)
        tensors = {name: item.float().cpu().contiguous() for name, item in curvatures.items()}
        save_file(tensors, folder / f"{block}.safetensors")

    def curvature(self, block: str) -> dict[str, Tensor]:
        """Reads them back; none where no backward pass was made."""
        path = self.folder / "curvature" / f"{block}.safetensors"
        return load_file(path) if path.is_file() else {}

    def keep_inputs(self, block: str, moments: Mapping[str, Tensor]) -> None:
        """Stores moments of what a block's layers read."""
        folder = self.folder / "inputs"
        folder.mkdir(exist_ok=True)
        tensors = {name: item.float().cpu().contiguous() for name, item in moments.items()}
        save_file(tensors, folder / f"{block}.safetensors")

    def inputs(self, block: str) -> dict[str, Tensor]:
        """Reads them back; none where nothing was measured."""
        path = self.folder / "inputs" / f"{block}.safetensors"
        return load_file(path) if path.is_file() else {}

    def keep_banks(self, banks: Mapping[BankKey, Mapping[str, Tensor]]) -> None:
        """Stores what layers share."""
        beside = self.folder / "banks.tmp"
        save_file(
            {
                f"{owner}/{bank}/{name}": tensor
                for (owner, bank), tensors in banks.items()
                for name, tensor in tensors.items()
            },
            beside,
        )
        beside.rename(self.folder / "banks.safetensors")

    def banks(self) -> dict[BankKey, dict[str, Tensor]] | None:
        """Reads what layers share, if an interrupted run had fitted it."""
        path = self.folder / "banks.safetensors"
        if not path.is_file():
            return None
        found: dict[BankKey, dict[str, Tensor]] = {}
        for key, tensor in load_file(path).items():
            owner, bank, name = key.split("/")
            found.setdefault((owner, bank), {})[name] = tensor
        return found

    def scratch(self) -> Path:
        """Gives an empty folder for what is needed for a while."""
        folder = self.folder / "scratch"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def keep_plan(self, plan: Plan) -> None:
        """Stores the plan with its final sizes."""
        self._keep("plan", plan)

    def plan(self) -> Plan | None:
        """Reads the plan that an interrupted run had settled on."""
        path = self.folder / "plan.json"
        return Plan.model_validate_json(path.read_text("utf-8")) if path.is_file() else None

    def keep_depth(self, depth: DepthPlan) -> None:
        """Stores which blocks stay."""
        self._keep("depth", depth)
        self.note("depth")

    def depth(self) -> DepthPlan | None:
        """Reads which blocks stay, as an interrupted run had chosen them."""
        path = self.folder / "depth.json"
        return DepthPlan.model_validate_json(path.read_text("utf-8")) if path.is_file() else None

    def keep_method(self, name: str) -> None:
        """Stores which of the methods that were tried is taken."""
        beside = self.folder / "method.tmp"
        beside.write_text(name, encoding="utf-8")
        beside.rename(self.folder / "method")

    def method(self) -> str | None:
        """Reads it back, as an interrupted run had chosen it."""
        path = self.folder / "method"
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def keep_change(self, change: float) -> None:
        """Stores how far a trial is from the dense model."""
        (self.folder / "change").write_text(repr(change), encoding="utf-8")

    def change(self) -> float | None:
        """Reads it back, if the trial was finished."""
        path = self.folder / "change"
        return float(path.read_text(encoding="utf-8")) if path.is_file() else None

    def trial(self, name: str) -> FitWorkplace:
        """Opens the folder of another conversion that is tried out."""
        return FitWorkplace(self.folder / TRIALS / name, "")

    def trial_plan(self, name: str) -> Plan | None:
        """Reads the plan of a trial that was made."""
        trial = self.trial(name)
        try:
            return trial.plan()
        finally:
            trial.close()

    def adopt(self, name: str) -> None:
        """Takes over what a trial has measured and fitted; all trials are removed."""
        trial = self.trial(name)
        for item in trial.folder.iterdir():
            if item.name not in _OWN:
                goal = self.folder / item.name
                if goal.is_dir():
                    shutil.rmtree(goal)
                item.rename(goal)
        trial.discard()
        shutil.rmtree(self.folder / TRIALS)

    def _keep(self, name: str, facts: BaseModel) -> None:
        beside = self.folder / f"{name}.tmp"
        beside.write_text(facts.model_dump_json(), encoding="utf-8")
        beside.rename(self.folder / f"{name}.json")

    def _path_of(self, block: str) -> Path:
        return self._blocks / f"{block}.safetensors"
