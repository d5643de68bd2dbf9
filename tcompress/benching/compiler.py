"""`torch.compile`, and saying in one line that it cannot run here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tcompress.errors import InputError, TCompressError
from tcompress.source.text import first_line


def require_compiler(device: torch.device) -> None:
    """Compiles a small function, before any time is spent on models.

    Raises:
        InputError: It cannot be compiled or run.
    """

    def small(x: Tensor) -> Tensor:
        return (x + 1).relu()

    with explained("here", "on a CPU it needs a C++ compiler, on a GPU Triton"):
        torch.compile(small)(torch.zeros(8, device=device))
    torch.compiler.reset()


def compiled(model: nn.Module) -> Callable[..., object]:
    """Returns the compiled model; it compiles at the first call, for the shapes of that call."""
    forward: Callable[..., object] = torch.compile(model, dynamic=False)
    return forward


def forget() -> None:
    """Drops all compiled code: past a few shapes the compiler silently falls back to eager."""
    torch.compiler.reset()


@contextmanager
def explained(where: str, why: str) -> Iterator[None]:
    """Turns whatever the compiler raises into an `InputError`."""
    try:
        yield
    except (TCompressError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        # Compilers, linkers and backends raise errors of unrelated classes.
        cause = getattr(error, "inner_exception", error)  # what the backend raised
        raise InputError(
            f"`torch.compile` cannot run {where} ({type(cause).__name__}: {first_line(cause)})",
            f"use `--mode eager`; {why}",
        ) from error
