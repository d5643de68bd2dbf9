"""How much memory is free: of the machine, of the group of processes that this one is in, of a GPU.

Nothing here imports torch unless a GPU is asked about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GROUPS = Path("/sys/fs/cgroup")


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
