"""The machine that a time belongs to."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tcompress.errors import InputError

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


def pick_device(name: str) -> torch.device:
    """Returns the device to run on.

    Raises:
        InputError: There is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device `{name}` cannot be used here", "use `--device cpu`, or `auto`"
        ) from error
    return device


def pick_dtype(name: str | None) -> torch.dtype | None:
    """Returns the dtype to compute in; None stands for that of the baseline.

    Raises:
        InputError: It is not one of `DTYPES`.
    """
    if name is not None and name not in DTYPES:
        listed = ", ".join(f"`{known}`" for known in DTYPES)
        raise InputError(f"unknown dtype `{name}`; known are {listed}", "leave `--dtype` out")
    return None if name is None else DTYPES[name]


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
