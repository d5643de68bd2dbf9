"""Passes of models: timed in turn, with their spread and the memory that they take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from tcompress.data.inputs import Inputs
from tcompress.memory import keep_freed_memory

Clock = Callable[[], float]


@dataclass(frozen=True)
class Pass:
    """A computation to time, and what must be done before it each time, which is not timed."""

    run: Callable[[Any], object]  # of what `ready` gives
    ready: Callable[[], Any] = lambda: None
    steps: int = 1  # one after another; times are of one of them

    def __call__(self) -> None:
        self.run(self.ready())

    def seconds(
        self, clock: Clock = time.perf_counter, wait: Callable[[], None] = lambda: None
    ) -> float:
        """Time one step; `wait` returns when the device has done all its work."""
        prepared = self.ready()
        wait()
        start = clock()
        self.run(prepared)
        wait()
        return (clock() - start) / self.steps

    def peak_bytes(self, device: torch.device) -> int | None:
        """Run it once; count the bytes it needs at its peak, with what was made ready for it.

        On a GPU this is what PyTorch's caching allocator says. On a CPU it is added up from the
        profiler's record of every allocation and release; scratch space that a library takes from
        the system itself, without PyTorch, is not seen. On other devices it is unknown: None.
        """
        if device.type == "cpu":
            return self._peak_on_cpu()
        if device.type != "cuda":
            return None
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        prepared = self.ready()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self.run(prepared)
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)

    def _peak_on_cpu(self) -> int:
        # Read when the profiler first starts, which otherwise talks on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            prepared = self.ready()
            with record_function(_RUN):
                self.run(prepared)
        assert profiled.profiler is not None
        events = sorted(profiled.profiler.kineto_results.events(), key=lambda e: e.start_ns())
        start = next(event.start_ns() for event in events if event.name() == _RUN)
        memory = [event for event in events if event.name() == "[memory]"]
        before = sum(event.nbytes() for event in memory if event.start_ns() < start)
        after = (event.nbytes() for event in memory if event.start_ns() >= start)
        return max(accumulate(after, initial=before))


_RUN = "what is measured"


def forward_pass(forward: Callable[..., object], kinds: Inputs, inputs: dict[str, Tensor]) -> Pass:
    """A pass over inputs that fills no cache."""
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in kinds.names else {}
    return Pass(lambda _: forward(**inputs, **options))


def spread(times: Sequence[float]) -> float | None:
    """Return the distance of the quartiles over the median; None for fewer than four times."""
    if len(times) < 4:
        return None
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / middle if middle else None


def turns(
    passes: Sequence[Pass],
    clock: Clock = time.perf_counter,
    wait: Callable[[], None] = lambda: None,
) -> Iterator[list[float]]:
    """Time passes in turn, in seconds, without end: what slows the machine down slows all.

    Who goes first changes with every turn; `wait` returns when the device has done all its work.
    """
    keep_freed_memory()
    order = list(range(len(passes)))
    while True:
        seconds = {index: passes[index].seconds(clock, wait) for index in order}
        order.reverse()
        yield [seconds[index] for index in range(len(passes))]


def waiting(device: torch.device) -> Callable[[], None]:
    """Choose the function that returns when a device has done all its work."""
    if device.type == "cpu":
        return lambda: None
    if device.type == "mps":  # there is but one
        return torch.mps.synchronize
    return partial(torch.get_device_module(device).synchronize, device)
