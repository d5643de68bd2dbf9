"""How long work says how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Hears how far long work is."""

    def stage(self, name: str, total: int, unit: str) -> None:
        """A new stage begins."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """The current stage went on."""

    def shorten(self, total: int) -> None:
        """The current stage has less to do than was said."""

    def part(self, name: str, number: int, total: int) -> None:
        """The next of several jobs begins, which has stages of its own; numbers start at 1."""


class Silent:
    """Says nothing."""

    def stage(self, name: str, total: int, unit: str) -> None: ...
    def advance(self, amount: int = 1, note: str = "") -> None: ...
    def shorten(self, total: int) -> None: ...
    def part(self, name: str, number: int, total: int) -> None: ...
