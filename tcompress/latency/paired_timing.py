"""A model beside its baseline, timed in turn: one cell of the grid at a time."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.artifact.manifest import Speed, environment
from tcompress.errors import InputError, TCompressError, first_line
from tcompress.fields import RuntimeName
from tcompress.latency.generation import Generation
from tcompress.latency.passes import Clock, Pass, forward_pass, spread, turns, waiting
from tcompress.latency.sizes import Cell, RandomInputs, sequence_length
from tcompress.models import SourceModel, tell_padding
from tcompress.options import Bench
from tcompress.runtimes.sessions import OnnxModule

WARM_UPS = 2


def device_name(device: torch.device) -> str:
    """Name the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return device.type
    return _processor_fact("model name") or platform.processor() or platform.machine()


def _processor_fact(*names: str) -> str:
    """First fact of one of these names in Linux's table of processors, if there is one."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = (line.partition(":")[2].strip() for line in lines if line.lower().startswith(names))
    return next(facts, "")


_INSTRUCTIONS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512bw", "avx2", "asimddp")
"""Of processors, for products of bytes, the fastest first, as Linux names them."""


def instructions() -> str:
    """Name the fastest instructions for products of bytes that this processor has.

    Without those of VNNI or AMX an int8 model takes about twice as long as with them.
    """
    flags = _processor_fact("flags", "features").split()
    return next((name for name in _INSTRUCTIONS if name in flags), platform.machine())


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Set the number of threads while the block runs, and yield it."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def require_compiler(device: torch.device) -> None:
    """Compile a small function, before any time is spent on models; an error says if it fails."""
    with _compiling("here", "on a CPU it needs a C++ compiler, on a GPU Triton"):
        torch.compile(lambda x: (x + 1).relu())(torch.zeros(8, device=device))
    torch.compiler.reset()


@contextmanager
def _compiling(where: str, why: str) -> Iterator[None]:
    """Turn whatever the compiler raises into an `InputError`."""
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
    """Turn whatever a model raises into an `InputError`."""
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

    def __post_init__(self) -> None:
        tell_padding(self.model)  # of which there is none

    @property
    def weight_bytes(self) -> int:
        """Memory that parameters and buffers take, and cached dense weights; bytes of a file."""
        if isinstance(self.model, OnnxModule):
            return self.model.file.nbytes
        held = (*self.model.parameters(), *self.model.buffers())
        return sum(tensor.nbytes for tensor in held) + (self.kept_bytes or 0)


InRuntime = Callable[[SourceModel, RuntimeName], nn.Module]


@dataclass(frozen=True, eq=False)
class PairedTiming:
    """A model and its baseline, timed in turn; in another runtime, the baseline in both."""

    model: TimedModel
    baseline: TimedModel
    inputs: RandomInputs
    device: torch.device
    dtype: torch.dtype  # what both compute in
    settings: Bench  # repeats and seed
    clock: Clock
    in_runtime: InRuntime  # opens either in another runtime than PyTorch

    def own_length(self) -> int:
        """Tokens of a picture or sound, whose length cannot be chosen."""
        with _running(f"`{self.model.name}` cannot run a batch of 1"):
            return sequence_length(self.model.source, self.model.model, self._batch(1, 1))

    def measure(self, cell: Cell) -> Speed:
        """Times both at one cell: warm-ups, timed passes in turn, one more for the memory."""
        if cell.mode == "compiled":
            torch.compiler.reset()  # past a few shapes the compiler silently falls back to eager
        with _running(f"`{self.model.name}` cannot run {cell}"):
            inputs = self._batch(cell.batch, cell.length)
        with torch.inference_mode():
            timed = self.model
            if cell.mode == "eager" or cell.mode == "compiled":
                passes = [self._warmed(item, cell, inputs) for item in (timed, self.baseline)]
            else:
                timed, same = (
                    TimedModel(item.name, item.source, self.in_runtime(item.source, cell.mode))
                    for item in (timed, self.baseline)
                )
                pairs = ((timed, cell), (self.baseline, cell._replace(mode="eager")), (same, cell))
                warmed = [self._warmed(item, how, inputs) for item, how in pairs]
                # Threads of a runtime wait actively for a while after a pass. So that none is timed
                # while those of another hold its cores, each follows one like it that is not timed.
                passes = [replace(timed_pass, ready=timed_pass) for timed_pass in warmed]
            repeats, wait = self.settings.repeats, waiting(self.device)
            times = [*zip(*islice(turns(passes, self.clock, wait), repeats), strict=True)]
            peaks = [item.peak_bytes(self.device) for item in passes[:2]]
        seconds, reference, *others = map(median, times)
        tokens = 1 if cell.phase == "decode" else cell.length
        return Speed(
            **cell._asdict(),
            milliseconds=1e3 * seconds,
            tokens_per_second=cell.batch * tokens / seconds,
            peak_bytes=None if others else peaks[0],  # PyTorch sees its own memory alone
            baseline=self.baseline.name,
            baseline_milliseconds=1e3 * reference,
            baseline_peak_bytes=peaks[1],
            ratio=reference / seconds,
            same_runtime_milliseconds=1e3 * others[0] if others else None,
            spread=spread(times[0]),
            baseline_spread=spread(times[1]),
            weight_bytes=timed.weight_bytes,
            baseline_weight_bytes=self.baseline.weight_bytes,
            protocol=self._protocol(cell),
        )

    def _protocol(self, cell: Cell) -> dict[str, Any]:
        kept, new = self.model.kept_bytes, self.settings.generate
        return {
            **({} if kept is None else {"kept_weights_bytes": kept}),
            **({"new_tokens": new} if cell.cache else {}),
            "device": self.device.type,
            "device_name": device_name(self.device),
            **({"instructions": instructions()} if self.device.type == "cpu" else {}),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "repeats": self.settings.repeats,
            "warm_ups": WARM_UPS,
            "statistic": "median; model and baseline in turn, the first one changing"
            + ("" if cell.mode in ("eager", "compiled") else "; each right after an untimed pass"),
            "spread": "distance of the quartiles over the median",
            "memory": "allocated during the pass, and the cache; without weights and inputs",
            "inputs": self.inputs.words(),
            "seed": self.settings.seed,
            "date": datetime.now(UTC).date().isoformat(),
            **environment(),
        }

    def _batch(self, batch: int, length: int) -> dict[str, Tensor]:
        return self.inputs.batch(batch, length, self.settings.seed, self.device, self.dtype)

    def _warmed(self, timed: TimedModel, cell: Cell, inputs: dict[str, Tensor]) -> Pass:
        """A pass that was run before: compiled, and with warm caches."""
        with _running(f"`{timed.name}` cannot run {cell}"):
            timed_pass = self._pass(timed.model, timed.model, cell, inputs)
            timed_pass()
        if cell.mode == "compiled":
            # Steps under a window see their place as a number, which is no constant.
            forward = torch.compile(timed.model, dynamic=None if cell.cache else False)
            timed_pass = self._pass(timed.model, forward, cell, inputs)
            with _compiling(f"on `{timed.name}`", "that needs no compiler"):
                timed_pass()
        for _ in range(WARM_UPS - 1):
            timed_pass()
        return timed_pass

    def _pass(
        self, model: nn.Module, forward: Callable[..., Any], cell: Cell, inputs: dict[str, Tensor]
    ) -> Pass:
        kinds = self.inputs.inputs
        if cell.cache is None:
            return forward_pass(forward, kinds, inputs)
        tokens = self.settings.generate or 1
        text = Generation(model, kinds, inputs, tokens, cell.cache, step=forward)
        return text.prefilling() if cell.phase == "prefill" else text.decoding()
