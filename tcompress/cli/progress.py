"""Progress of long work: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tcompress.cli.output import notices, say
from tcompress.progress import Progress, Silent

if TYPE_CHECKING:
    from rich.progress import TaskID

_SECONDS_BETWEEN_LINES = 15.0
_MOST_LINES = 10  # of a stage


@contextmanager
def shown_progress(*, quiet: bool) -> Iterator[Progress]:
    """Shows progress on stderr while the block runs.

    Args:
        quiet: Show nothing.
    """
    if quiet:
        yield Silent()
    elif sys.stderr.isatty():
        with _Bars() as bars:
            yield bars
    else:
        lines = _Lines()
        yield lines
        lines.close()


class _Bars:
    """One bar for each stage."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=notices(),
        )
        self._stage = _Stage("", 0, "")
        self._task: TaskID | None = None
        self._parts: TaskID | None = None

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, name: str, total: int, unit: str) -> None:
        if self._task is not None:
            self._bars.update(self._task, note="")
        self._stage = _Stage(name, total, unit)
        count = self._stage.count()
        self._task = self._bars.add_task(name, total=total, count=count, note="")

    def advance(self, amount: int = 1, note: str = "") -> None:
        if self._task is None:
            return
        self._stage.done += amount
        self._bars.update(self._task, advance=amount, count=self._stage.count(), note=note)

    def shorten(self, total: int) -> None:
        if self._task is not None:
            self._stage.total = total
            self._bars.update(self._task, total=total, count=self._stage.count())

    def part(self, name: str, number: int, total: int) -> None:
        """Shows how many jobs are done, and leaves out the bars of the one before."""
        if self._parts is None:
            self._parts = self._bars.add_task("cells", total=total, count="", note="")
        for task in [task for task in self._bars.task_ids if task != self._parts]:
            self._bars.remove_task(task)
        self._task = None
        count = f"{number} of {total}"
        self._bars.update(self._parts, completed=number - 1, count=count, note=name)


class _Lines:
    """A line when a stage ends, and now and then before: ten of a stage at most."""

    def __init__(self) -> None:
        self._stage: _Stage | None = None
        self._last = 0.0
        self._said = 0

    def stage(self, name: str, total: int, unit: str) -> None:
        self.close()
        self._stage = _Stage(name, total, unit)
        self._last, self._said = time.monotonic(), 0

    def advance(self, amount: int = 1, note: str = "") -> None:
        if self._stage is None:
            return
        self._stage.done += amount
        if self._stage.done >= self._stage.total:  # what comes after it is no part of it
            self.close()
            return
        part = (self._stage.done - self._said) * _MOST_LINES >= self._stage.total
        if part and time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last, self._said = time.monotonic(), self._stage.done
            said = f"  {note}" if note and self._stage.unit == "steps" else ""
            say(f"{self._stage.name}: {self._stage.count()}{said}")

    def shorten(self, total: int) -> None:
        if self._stage is not None:
            self._stage.total = total

    def part(self, name: str, number: int, total: int) -> None:
        self.close()
        say(f"{name}: {number} of {total}")

    def close(self) -> None:
        """Says that the stage is over."""
        if self._stage is not None:
            seconds = time.monotonic() - self._stage.start
            say(f"{self._stage.name}: {self._stage.count()} in {seconds:.1f} s")
        self._stage = None


class _Stage:
    def __init__(self, name: str, total: int, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0
        self.start = time.monotonic()

    def count(self) -> str:
        """Says how far the stage is."""
        if self.unit == "bytes":
            return f"{_megabytes(self.done)} of {_megabytes(self.total)} MB"
        return f"{self.done:,} of {self.total:,} {self.unit}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f}"
