"""The folder beside the output in which long work is done: what is finished survives a kill.

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

from tcompress.errors import InputError


def check_output(output: Path, *, force: bool) -> None:
    """Refuses to write over something.

    Raises:
        InputError: The output exists and is not an empty folder, and `force` is not given.
    """
    if output.is_file():
        raise InputError(f"output `{output}` is a file", "choose another folder with `-o`")
    if os.path.ismount(output):
        raise InputError(
            f"output `{output}` is where another disk is mounted, so that it cannot be replaced",
            f"choose a folder inside it, such as `-o {output / 'model'}`",
        )
    if output.is_dir() and any(output.iterdir()) and not force:
        raise InputError(
            f"output folder `{output}` is not empty",
            "choose another one with `-o`, or replace it with `--force`",
        )


class Workplace:
    """Working folder of one conversion or training run.

    Args:
        output: The folder that will be written.
        identity: Everything that determines the result; another identity starts afresh.

    Raises:
        InputError: Another run is writing the same output.
    """

    def __init__(self, output: Path, identity: str) -> None:
        self.output = output
        self.folder = output.parent / f".{output.name}.partial"
        self.model = self.folder / "model"
        self._journal = self.folder / "journal.jsonl"
        self.resumed = False
        self._lock = self._locked()
        self._finished = False
        state = self.folder / "identity"
        if state.is_file() and state.read_text(encoding="utf-8") == identity:
            self.resumed = self._journal.is_file()
        else:
            for item in self.folder.iterdir():
                if item.name != "lock":
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
            state.write_text(identity, encoding="utf-8")
        self.model.mkdir(exist_ok=True)

    def _locked(self) -> FileLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise InputError(
                f"another run is writing `{self.output}`",
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

    def publish(self, *, force: bool) -> None:
        """Renames the finished model folder to the output, and removes the rest."""
        self._finished = True
        check_output(self.output, force=force)
        old = self.folder / "replaced"
        if self.output.exists():
            self.output.rename(old)
        self.model.rename(self.output)
        self._finished = False
        self.discard()

    def discard(self) -> None:
        """Removes the working folder; what is finished and could not be moved stays."""
        self._lock.release()
        if not self._finished:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Leaves the working folder for a later run."""
        self._lock.release()


def identity_of(parts: Mapping[str, Any]) -> str:
    """Renders what determines a result; the version of torch changes rounding."""
    facts = {**parts, "torch": torch.__version__}
    return json.dumps(facts, sort_keys=True, default=str)
