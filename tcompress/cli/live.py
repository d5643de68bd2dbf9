"""The one view of a command of many stages: what is done now, how well, and the time left.

Jobs inside a stage, such as those of a conversion or of healing, fill one bar in it, so that
nothing moves but this place; what is finished becomes a line above it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tcompress.progress import Job

_PER_SECOND = 4
_BAR = 30  # characters


class LiveView:
    """Three lines of a terminal, for `Progress` and `Overview`."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage, self._began = "", clock()
        self._deadline: float | None = None
        self._job, self._note = Job("", 0, ""), ""
        self._learned: dict[str, float] = {}
        self.live = Live(
            console=console,
            get_renderable=self.rendered,
            refresh_per_second=_PER_SECOND,
            transient=True,
        )

    @contextmanager
    def shown(self) -> Iterator[LiveView]:
        """Show it while the block runs."""
        with self.live:
            yield self
            self._finish()

    # Of a command

    def begin(self, stage: str, minutes_left: float) -> None:
        self._finish()
        self._stage, self._began = stage, self._clock()
        self._deadline = self._began + 60 * minutes_left
        self._job, self._note = Job("", 0, ""), ""

    def learn(self, name: str, value: float) -> None:
        """A number of the model so far is known, in place of an older one."""
        self._learned = {**self._learned, name: value}

    # Of the jobs in a stage

    def stage(self, name: str, total: int, unit: str) -> None:
        self._job, self._note = Job(name, total, unit), ""

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._job.done += amount
        self._note = note

    def shorten(self, total: int) -> None:
        self._job.total = total

    def part(self, name: str, number: int, total: int) -> None:
        self._job, self._note = Job(name, total, "parts", number - 1), ""

    def tell(self, text: str) -> None:
        self.live.console.print(text, soft_wrap=True)  # above the view

    def rendered(self) -> RenderableType:
        """Lay out what is known now; nothing before the first stage."""
        if not self._stage:
            return Text("")
        now = self._clock()
        top = Text.assemble((self._stage, "bold"), f"  {_clock_text(now - self._began)}")
        if self._deadline is not None:
            left = self._deadline - now
            words = "left" if left >= 0 else "over the time"
            top.append(f"   {_clock_text(abs(left))} {words}", style="cyan")
        lines: list[RenderableType] = [top]
        if self._job.total:
            bar = ProgressBar(self._job.total, min(self._job.done, self._job.total), width=_BAR)
            row = Table.grid(padding=(0, 1))
            text = Text(f"{self._job.name}: {self._job}", no_wrap=True, overflow="ellipsis")
            row.add_row(bar, text)
            lines.append(row)
        numbers = [f"{name} so far {value:.4f}" for name, value in self._learned.items()]
        if words := "   ".join([*([self._note] if self._note else []), *numbers]):
            lines.append(Text(words, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _finish(self) -> None:
        """Make a line of the stage that ends."""
        stage, self._stage = self._stage, ""  # so that it is not shown below its line
        if stage:
            self.tell(f"{stage}: {self._clock() - self._began:.1f} s")


def _clock_text(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
