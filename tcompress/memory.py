"""How much memory is free, of the machine, of a group of processes, of a GPU, and how it is taken.

Nothing here imports torch unless a GPU is asked about.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GROUPS = Path("/sys/fs/cgroup")
_FRESH = 1 << 25  # bytes from which glibc asks the system for new pages each time
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of `mallopt`
_LARGEST_KEPT, _MOST_KEPT = 1 << 26, 1 << 30  # bytes of one block, and of all at the end


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask the system to back a large tensor of the CPU by huge pages, before it is written to.

    The first touch of each small page costs more than a fast layer spends on the page. Only a
    hint, for systems (Linux) that leave the choice to programs; returns the tensor.
    """
    advise = _advise() if tensor.is_cpu and tensor.nbytes >= _FRESH else None
    if advise is not None:
        address = tensor.data_ptr()
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, end - start, mmap.MADV_HUGEPAGE)
    return tensor


@cache
def keep_freed_memory() -> None:
    """Let the C library keep what is freed, as allocators of servers do, for the next to take.

    In a new process glibc returns large blocks to the system and takes them again in every pass;
    the first touch of their pages then takes up to a quarter of a fast model's time, more or less
    by chance. Holds for the whole process, where it runs on glibc. Blocks of 64 MB go back
    all the same: what lies between them would leave holes that none of them fits into again.
    """
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        # Older versions take no more than 32 MB; without the first the second does harm.
        if any(library.mallopt(_MMAP_THRESHOLD, most) for most in (_LARGEST_KEPT, _FRESH)):
            library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT)


def use_huge_pages() -> None:
    """Have torch ask the system for huge pages for large tensors, where the environment is silent.

    A large model's conversion spends a quarter of its time on the first touch of small pages. It
    holds for the whole process, and for those that it starts, where torch has made no tensor yet.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def pins(device: torch.device) -> bool:
    """True of devices that copy from pinned memory by themselves, while the host goes on."""
    return device.type == "cuda"


def give_back_memory() -> None:
    """Return freed memory to the system: what one thread has freed no other one can take."""
    with suppress(OSError, AttributeError, TypeError):  # the allocator of glibc alone can
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    """Find `madvise` of the C library, where there are huge pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    with suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return advise  # type: ignore[no-any-return]
    return None


def free_memory(device: torch.device | None = None) -> int | None:
    """Return the bytes that can still be taken on a device; None where the system does not say.

    Of the CPU, and where no device is given, that is what the kernel says is available, or less
    where a container or a job of a scheduler has a limit.
    """
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    if device is not None and device.type != "cpu":
        return None
    return min(_limits(), default=None)


def _limits() -> Iterator[int]:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        yield 1024 * int(line.split()[1])
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:  # version 2
                yield from _left(_GROUPS, name, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                yield from _left(_GROUPS / "memory", name, *files)


def _left(root: Path, name: str, limit: str, usage: str) -> Iterator[int]:
    """Yield what the limits of a group, and of those around it, leave."""
    group = root / name.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        with suppress(OSError, ValueError):  # `max` where there is no limit
            most, used = (int((folder / file).read_text()) for file in (limit, usage))
            stat = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = sum(int(size) for key, size in stat if key in ("active_file", "inactive_file"))
            yield max(0, most - used + cached)
