"""A model beside its baseline, timed in turn: one cell of the grid at a time."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tcompress.artifact.manifest import Speed, environment
from tcompress.errors import InputError, TCompressError, first_line
from tcompress.latency.sizes import Cell, RandomInputs, sequence_length
from tcompress.models import SourceModel
from tcompress.options import Bench

Pass = Callable[[], object]
Clock = Callable[[], float]
Seconds = tuple[list[float], list[float]]

WARM_UPS = 2


def spread(times: Sequence[float]) -> float | None:
    """Returns the distance of the quartiles over the median; None for fewer than four times."""
    if len(times) < 4:
        return None
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else None


def alternate(
    one: Pass,
    other: Pass,
    repeats: int,
    clock: Clock = time.perf_counter,
    wait: Callable[[], None] = lambda: None,
) -> Seconds:
    """Times two passes in turn, in seconds: what slows the machine down slows both.

    Who goes first changes with every repeat; `wait` returns when the device has done all its work.
    """
    times: Seconds = ([], [])
    passes = list(zip((one, other), times, strict=True))
    for _ in range(repeats):
        for run, seconds in passes:
            wait()
            start = clock()
            run()
            wait()
            seconds.append(clock() - start)
        passes.reverse()
    return times


def peak_bytes(run: Pass, device: torch.device) -> int | None:
    """Runs a pass once and returns what it allocates itself at its peak.

    On a GPU this is what PyTorch's caching allocator says. On a CPU it is added up from the
    profiler's record of every allocation and release; scratch space that a library takes from the
    system itself, without PyTorch, is not seen. On other devices it is unknown: None.
    """
    if device.type == "cpu":
        return _peak_on_cpu(run)
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _peak_on_cpu(run: Pass) -> int:
    # Read when the profiler first starts, which otherwise talks on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate((change.nbytes() for change in changes), initial=0))


def device_name(device: torch.device) -> str:
    """Names the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return device.type
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(named), "") or platform.processor() or platform.machine()


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Sets the number of threads while the block runs; gives it."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def require_compiler(device: torch.device) -> None:
    """Compiles a small function, before any time is spent on models; an error says if it fails."""
    with _compiling("here", "on a CPU it needs a C++ compiler, on a GPU Triton"):
        torch.compile(lambda x: (x + 1).relu())(torch.zeros(8, device=device))
    torch.compiler.reset()


@contextmanager
def _compiling(where: str, why: str) -> Iterator[None]:
    """Turns whatever the compiler raises into an `InputError`."""
    try:
        yield
    except (TCompressError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        cause = getattr(error, "inner_exception", error)  # what the backend raised
        text = f"`torch.compile` cannot run {where} ({type(cause).__name__}: {first_line(cause)})"
        raise InputError(text, f"use `--mode eager`; {why}") from error


@contextmanager
def _running(what: str) -> Iterator[None]:
    """Turns whatever a model raises into an `InputError`."""
    hint = "give a smaller `--batch` or `--length`, or another `--device`"
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise InputError(f"{what}: the memory is too small", hint) from error
    except Exception as error:
        raise InputError(f"{what} ({type(error).__name__}: {first_line(error)})", hint) from error


@dataclass(frozen=True)
class TimedModel:
    """A loaded model, in evaluation mode."""

    name: str  # for people
    source: SourceModel
    model: nn.Module = field(repr=False)
    kept_bytes: int | None = None  # memory that its cached dense weights take, if it keeps them

    @property
    def weight_bytes(self) -> int:
        """Memory that parameters and buffers take, and cached dense weights."""
        held = (*self.model.parameters(), *self.model.buffers())
        return sum(tensor.nbytes for tensor in held) + (self.kept_bytes or 0)


@dataclass(frozen=True, eq=False)
class PairedTiming:
    """Times a model and its baseline in turn."""

    model: TimedModel
    baseline: TimedModel
    inputs: RandomInputs
    device: torch.device
    dtype: torch.dtype  # what both compute in
    settings: Bench  # repeats and seed
    clock: Clock

    def own_length(self) -> int:
        """Tokens of a picture or sound, whose length cannot be chosen."""
        inputs = self._batch(1, 1)
        with _running(f"`{self.model.name}` cannot run a batch of 1"):
            return sequence_length(self.model.source, self.model.model, inputs)

    def measure(self, cell: Cell) -> Speed:
        """Times both at one cell: warm-ups, timed passes in turn, one more for the memory."""
        if cell.mode == "compiled":
            torch.compiler.reset()  # past a few shapes the compiler silently falls back to eager
        inputs = self._batch(cell.batch, cell.length)
        with torch.inference_mode():
            one = self._warmed(self.model, cell, inputs)
            other = self._warmed(self.baseline, cell, inputs)
            cuda, mps = (lambda: torch.cuda.synchronize(self.device)), torch.mps.synchronize
            wait = {"cuda": cuda, "mps": mps}.get(self.device.type, lambda: None)
            times = alternate(one, other, self.settings.repeats, self.clock, wait)
            peaks = [peak_bytes(run, self.device) for run in (one, other)]
        seconds, reference = map(median, times)
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
            protocol=self._protocol(),
        )

    def _protocol(self) -> dict[str, Any]:
        kept = self.model.kept_bytes
        return {
            **({} if kept is None else {"kept_weights_bytes": kept}),
            "device": self.device.type,
            "device_name": device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "repeats": self.settings.repeats,
            "warm_ups": WARM_UPS,
            "statistic": "median; model and baseline in turn, the first one changing",
            "spread": "distance of the quartiles over the median",
            "memory": "allocated during the pass, without weights and inputs",
            "inputs": self.inputs.words(),
            "seed": self.settings.seed,
            "date": datetime.now(UTC).date().isoformat(),
            **environment(),
        }

    def _batch(self, batch: int, length: int) -> dict[str, Tensor]:
        return self.inputs.batch(batch, length, self.settings.seed, self.device, self.dtype)

    def _warmed(self, timed: TimedModel, cell: Cell, inputs: dict[str, Tensor]) -> Pass:
        """Returns a pass that was run before: compiled, and with warm caches."""
        options: dict[str, Any] = dict(inputs)
        if "use_cache" in self.inputs.inputs.names:
            options["use_cache"] = False  # nothing is generated
        forward: Callable[..., object] = timed.model

        def run() -> object:
            return forward(**options)

        with _running(f"`{timed.name}` cannot run batch {cell.batch}, length {cell.length}"):
            run()
        if cell.mode == "compiled":
            forward = torch.compile(timed.model, dynamic=False)
            with _compiling(f"on `{timed.name}`", "that needs no compiler"):
                run()
        for _ in range(WARM_UPS - 1):
            run()
        return run
