"""Conversions that are cut short: killed, or interrupted by an exception."""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModel

from tcompress.conversion.converter import Converted, convert
from tcompress.options import Convert
from tcompress.progress import Silent
from tests.support.conversions import calibration, recipe

MODULES = ["tests.support.interrupted", "transformers.models.auto.modeling_auto"]


def several_files(aware: bool = False, **changes: Any) -> Convert:
    """A recipe whose output has several weight files."""
    return recipe("svd", aware=aware, **{"max_shard_size": "20KB", **changes})


def run(source: Path, output: Path, aware: bool = False, **options: Any) -> Converted:
    """Convert a tiny bert with the recipe above."""
    chosen = several_files(aware, **options.pop("changes", {}))
    data = calibration("bert") if aware else None
    return convert(str(source), chosen, output, data=data, **options)


def partial_folder(output: Path) -> Path:
    return output.parent / f".{output.name}.partial"


def assert_nothing_loads(output: Path) -> None:
    """Neither the output, nor what is left of the work on it."""
    assert not output.exists()
    assert partial_folder(output).is_dir()
    for folder in partial_folder(output).rglob("*"):
        if folder.is_dir():
            with pytest.raises((OSError, ValueError)):
                AutoModel.from_pretrained(folder)


def assert_nothing_left(output: Path) -> None:
    assert not output.exists()
    assert not partial_folder(output).exists()


def contents(folder: Path) -> dict[str, str]:
    """Checksums of all files; without dates, durations and so the digest of the manifest."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.name == "tcompress.json":
                facts = json.loads(content, object_hook=_timeless)
                content = json.dumps(facts).encode()
            found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def _timeless(facts: dict[str, Any]) -> dict[str, Any]:
    changing = ("created", "seconds", "stage_seconds", "digest")
    return {name: value for name, value in facts.items() if name not in changing}


class Interrupt(Silent):
    """A progress that is interrupted after some steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


class Killer:
    """A progress that kills its process after some steps of a stage."""

    def __init__(self, stage: str, step: int) -> None:
        self._wanted, self._left = stage, step
        self._stage = ""

    def stage(self, name: str, total: int, unit: str) -> None:
        self._stage = name

    def advance(self, amount: int = 1, note: str = "") -> None:
        if self._stage.endswith(self._wanted):  # what is fitted without data is written at once
            self._left -= 1
            if not self._left:
                die()


def die(*args: object, **options: object) -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _watch(folder: Path, operation: int) -> None:
    """Kill this process before an operation on files in a folder; by number, from 1."""
    left = operation

    def seen(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        changes = bool(args[2] & _WRITING) if event == "open" else event in _CHANGES
        # Whole trees are removed by names within open folders.
        in_tree = event == "os.remove" and args[1] != -1
        if changes and (in_tree or str(args[0]).startswith(str(folder))):
            left -= 1
            if not left:
                die()

    sys.addaudithook(seen)


def _work(
    work: Callable[..., object], args: tuple[Any, ...], folder: Path, operation: int, begun: Any
) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda _: None
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if operation:
        _watch(folder, operation)
    begun.set()
    work(*args)


def killed(
    work: Callable[..., object],
    *args: Any,
    folder: Path,
    operation: int = 0,
    seconds: float | None = None,
) -> bool:
    """Run something in another process, and kill it.

    Args:
        work: A function of a module.
        args: Its arguments.
        folder: Where it writes.
        operation: The operation on a file there at which to kill it, from 1.
        seconds: Kill it after this time instead.

    Returns:
        Whether it was killed; otherwise it had ended well before.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    begun = context.Event()
    process = context.Process(target=_work, args=(work, args, folder, operation, begun))
    process.start()
    begun.wait(120)
    if seconds is not None:
        time.sleep(seconds)
        process.kill()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def until_killed(work: Callable[..., object], *args: Any) -> None:
    """Run a function of a module in another process, which must die."""
    # A process that forks from a fresh one inherits no threads, and imports only once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    process = context.Process(target=work, args=args)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def convert_until_killed(
    source: Path, recipe: Convert, output: Path, family: str | None, moment: tuple[str, int] | str
) -> None:
    """Run a conversion in another process, which must die.

    The moment is a stage and a number of steps in it, or a function at whose call to die; if a
    family is given, its inputs are calibrated on.
    """
    until_killed(_run, source, recipe, output, family, moment)


def _run(
    source: Path, recipe: Convert, output: Path, family: str | None, moment: tuple[str, int] | str
) -> None:
    torch.set_num_threads(1)
    data = calibration(family) if family else None
    if isinstance(moment, str):
        with patch(moment, die):
            convert(str(source), recipe, output, data=data)
    else:
        convert(str(source), recipe, output, data=data, progress=Killer(*moment))
