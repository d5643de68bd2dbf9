"""A model beside its baseline, both loaded: one cell of the grid at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.artifact.manifest import Speed, environment
from tcompress.benching import compiler
from tcompress.benching.feed import Feed, sequence_length
from tcompress.benching.grid import Cell
from tcompress.benching.machine import device_name, waiting_for
from tcompress.benching.memory import WHAT, peak_bytes
from tcompress.benching.timing import Clock, Pass, alternate, spread
from tcompress.errors import InputError
from tcompress.source import SourceModel
from tcompress.source.text import first_line

WARM_UPS = 2


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two.

    Attributes:
        name: Name for people.
        source: What it was loaded from.
        model: The model, in evaluation mode.
        kept_bytes: Memory that its kept weights take, if it keeps them.
    """

    name: str
    source: SourceModel
    model: nn.Module = field(repr=False)
    kept_bytes: int | None = None

    @property
    def weight_bytes(self) -> int:
        """Memory that parameters and buffers take, and kept weights."""
        held = (*self.model.parameters(), *self.model.buffers())
        return sum(tensor.nbytes for tensor in held) + (self.kept_bytes or 0)


@dataclass(frozen=True, eq=False)
class Duel:
    """Times a model and its baseline in turn.

    Attributes:
        model: The model.
        baseline: What it is compared with.
        feed: Makes inputs that both take.
        device: Where both are.
        dtype: What both compute in.
        threads: Threads that PyTorch uses.
        repeats: Timed passes of each.
        seed: Seed of the inputs.
        clock: Tells the time in seconds.
    """

    model: Side
    baseline: Side
    feed: Feed
    device: torch.device
    dtype: torch.dtype
    threads: int
    repeats: int
    seed: int
    clock: Clock = time.perf_counter

    def own_length(self) -> int:
        """Tokens of a picture or sound, whose length cannot be chosen.

        Raises:
            InputError: The model cannot run.
        """
        inputs = self._inputs(1, 1)
        with _explained(f"`{self.model.name}` cannot run a batch of 1"):
            return sequence_length(self.model.source, self.model.model, inputs)

    def measure(self, cell: Cell) -> Speed:
        """Times both at one cell: warm-ups, timed passes in turn, one more for the memory.

        Raises:
            InputError: One of them cannot run at this size, or cannot be compiled.
        """
        if cell.mode == "compiled":
            compiler.forget()
        inputs = self._inputs(cell.batch, cell.length)
        with torch.inference_mode():
            passes = [self._ready(side, cell, inputs) for side in (self.model, self.baseline)]
            wait = waiting_for(self.device)
            times = alternate(passes[0], passes[1], self.repeats, self.clock, wait)
            peaks = [peak_bytes(run, self.device) for run in passes]
        seconds, reference = median(times[0]), median(times[1])
        return Speed(
            batch=cell.batch,
            length=cell.length,
            mode=cell.mode,
            milliseconds=1e3 * seconds,
            tokens_per_second=cell.batch * cell.length / seconds,
            peak_bytes=peaks[0],
            baseline=self.baseline.name,
            baseline_milliseconds=1e3 * reference,
            baseline_peak_bytes=peaks[1],
            ratio=reference / seconds,
            spread=spread(times[0]),
            baseline_spread=spread(times[1]),
            weight_bytes=self.model.weight_bytes,
            baseline_weight_bytes=self.baseline.weight_bytes,
            protocol=self.protocol(),
        )

    def protocol(self) -> dict[str, Any]:
        """Says how the times were measured."""
        kept = self.model.kept_bytes
        return {
            **({} if kept is None else {"kept_weights_bytes": kept}),
            "device": self.device.type,
            "device_name": device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": self.threads,
            "repeats": self.repeats,
            "warm_ups": WARM_UPS,
            "statistic": "median; model and baseline in turn, the first one changing",
            "spread": "distance of the quartiles over the median",
            "memory": WHAT,
            "inputs": self.feed.words(),
            "seed": self.seed,
            "date": datetime.now(UTC).date().isoformat(),
            **environment(),
        }

    def _inputs(self, batch: int, length: int) -> dict[str, Tensor]:
        return self.feed.batch(batch, length, self.seed, self.device, self.dtype)

    def _ready(self, side: Side, cell: Cell, inputs: dict[str, Tensor]) -> Pass:
        """Returns a pass that was run before: compiled, and with warm caches."""
        options: dict[str, Any] = dict(inputs)
        if "use_cache" in self.feed.inputs.names:
            options["use_cache"] = False  # nothing is generated
        forward: Callable[..., object] = side.model

        def run() -> object:
            return forward(**options)

        with _explained(f"`{side.name}` cannot run batch {cell.batch}, length {cell.length}"):
            run()
        if cell.mode == "compiled":
            forward = compiler.compiled(side.model)
            with compiler.explained(f"on `{side.name}`", "that needs no compiler"):
                run()
        for _ in range(WARM_UPS - 1):
            run()
        return run


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns whatever a model raises into an `InputError`."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise InputError(f"{what}: the memory is too small", _SMALLER) from error
    except Exception as error:
        # A forward pass may raise anything.
        words = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{what} ({words})", _SMALLER) from error


_SMALLER = "give a smaller `--batch` or `--length`, or another `--device`"
