"""The machine that a time belongs to."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """Names the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _processor() if device.type == "cpu" else device.type


def waiting_for(device: torch.device) -> Callable[[], None]:
    """Returns what waits until the device has done all its work."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None


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


def _processor() -> str:
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(named), "") or platform.processor() or platform.machine()
