"""The folder beside the output in which a conversion works: what is finished survives a kill.

Nothing in it loads as a model: `config.json` is written last, and the finished model folder is
renamed to the output's name in one step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tcompress.conversion.blocks import BlockResult
from tcompress.conversion.fit import FittedLayer
from tcompress.errors import InputError


def check_output(output: Path, *, force: bool) -> None:
    """Refuses to write over something.

    Raises:
        InputError: The output exists and is not an empty folder, and `force` is not given.
    """
    if output.is_file():
        raise InputError(f"output `{output}` is a file", "choose another folder with `-o`")
    if output.is_dir() and any(output.iterdir()) and not force:
        raise InputError(
            f"output folder `{output}` is not empty",
            "choose another one with `-o`, or replace it with `--force`",
        )


class Workplace:
    """Working folder of one conversion.

    Args:
        output: The folder that will be written.
        identity: Everything that determines the result; another identity starts afresh.

    Raises:
        InputError: Another conversion is writing the same output.
    """

    def __init__(self, output: Path, identity: str) -> None:
        self.output = output
        self.folder = output.parent / f".{output.name}.partial"
        self.model = self.folder / "model"
        self._blocks = self.folder / "blocks"
        self._journal = self.folder / "journal.jsonl"
        self.resumed = False
        self._lock = self._locked()
        state = self.folder / "identity"
        if state.is_file() and state.read_text(encoding="utf-8") == identity:
            self.resumed = self._journal.is_file()
        else:
            for item in self.folder.iterdir():
                if item.name != "lock":
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
            state.write_text(identity, encoding="utf-8")
        self.model.mkdir(exist_ok=True)
        self._blocks.mkdir(exist_ok=True)

    def _locked(self) -> FileLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise InputError(
                f"another conversion is writing `{self.output}`",
                "wait for it, or choose another output with `-o`",
            ) from error
        return lock

    def note(self, kind: str, **facts: Any) -> None:
        """Appends a line to the journal; it is on disk when this returns."""
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **facts}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Reads the journal's lines of one kind; a line cut off by a kill is left out."""
        if not self._journal.is_file():
            return []
        found = []
        for line in self._journal.read_text(encoding="utf-8").splitlines():
            try:
                fact = json.loads(line)
            except ValueError:
                continue
            if fact["kind"] == kind:
                found.append(fact)
        return found

    def keep_block(self, result: BlockResult) -> None:
        """Stores the fits of one block."""
        tensors: dict[str, Tensor] = {}
        for name, fitted in result.layers.items():
            tensors |= {f"layer/{name}/{key}": value for key, value in fitted.tensors.items()}
        tensors |= {f"bias/{name}": bias for name, bias in result.biases.items()}
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
        try:
            with safe_open(path, "pt") as file:
                errors: Mapping[str, dict[str, float]] = json.loads(file.metadata()["errors"])
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    kind, _, rest = key.partition("/")
                    if kind == "bias":
                        biases[rest] = file.get_tensor(key)
                    else:
                        layer, _, tensor = rest.partition("/")
                        layers.setdefault(layer, {})[tensor] = file.get_tensor(key)
        except (SafetensorError, OSError, KeyError, ValueError):
            return None  # cut off by a kill: fitted again
        fitted = {key: FittedLayer(tensors, errors[key]) for key, tensors in layers.items()}
        return BlockResult(name, fitted, biases)

    def _path_of(self, block: str) -> Path:
        return self._blocks / f"{block}.safetensors"

    def publish(self, *, force: bool) -> None:
        """Renames the finished model folder to the output, and removes the rest."""
        check_output(self.output, force=force)
        old = self.folder / "replaced"
        if self.output.exists():
            self.output.rename(old)
        self.model.rename(self.output)
        self.discard()

    def discard(self) -> None:
        """Removes the working folder."""
        self._lock.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Leaves the working folder for a later run."""
        self._lock.release()


def identity_of(parts: Mapping[str, Any]) -> str:
    """Renders what determines a result; the version of torch changes rounding."""
    facts = {**parts, "torch": torch.__version__}
    return json.dumps(facts, sort_keys=True, default=str)
