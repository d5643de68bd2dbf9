"""Ctrl-C between steps, not within one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Stopping:
    """While it is open, Ctrl-C asks to stop after the step; a second one stops at once.

    Args:
        say: Tells the user that the first one was heard.

    Attributes:
        asked: Whether it was asked for.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say = say
        self._old: Any = None

    def __enter__(self) -> Stopping:
        try:
            self._old = signal.signal(signal.SIGINT, self._hear)
        except ValueError:  # not in the main thread, which alone receives signals
            self._old = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("stopping after this step")
