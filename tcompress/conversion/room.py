"""Whether a conversion has room: free memory and disk against what it will take, before any work.

A disk that is too small stops it, since nothing but an error can come of it. Memory is estimated to
a third, systems swap, and other programs end: too little of it is said, with what takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from tcompress.conversion.estimate import Estimate, estimate
from tcompress.errors import DiskError
from tcompress.files import free_bytes
from tcompress.fitting.workdir import FitWorkplace
from tcompress.memory import free_memory
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.entries import Plan

FEWEST_SAMPLES = 32
"""No fewer samples are proposed."""


def check_room(
    plan: Plan,
    source: SourceModel,
    recipe: Convert,
    workdir: FitWorkplace,
    device: torch.device,
    tell: Callable[[str], None],
) -> None:
    """Refuse a disk that is too small, and warn of too little memory.

    Raises:
        DiskError: What is missing, and what needs less.
    """
    costs = estimate(plan, source, recipe)

    def needed(of: Estimate) -> int:
        return of.disk_bytes + of.scratch_bytes

    def options(fits: Callable[[Estimate], bool], size: Callable[[Estimate], int]) -> list[str]:
        return [*_that_fit(plan, source, recipe, fits, size)]

    room = free_bytes(workdir.output) + workdir.written_bytes
    if needed(costs) > room:
        less = options(lambda other: needed(other) <= room, needed)
        raise DiskError(
            f"there is no space for `{workdir.output}`: about {_size(needed(costs))} are needed "
            f"beside it meanwhile and for it, and {_size(room)} are free on its disk",
            " or ".join(["free some disk space, choose another folder with `-o`", *less]),
        )
    free = free_memory(device)
    if free is not None and costs.memory_bytes > free:
        less = options(lambda other: other.memory_bytes <= free, lambda it: it.memory_bytes)
        where = "memory" if device.type == "cpu" else f"memory of `{device}`"
        text = (
            f"warning: about {_size(costs.memory_bytes)} of {where} will be needed, and "
            f"{_size(free)} are free; should the system end this run, the same command goes on "
            "with what was done"
        )
        tell(f"{text}. Less takes {' or '.join(less)}" if less else text)


def _that_fit(
    plan: Plan,
    source: SourceModel,
    recipe: Convert,
    fits: Callable[[Estimate], bool],
    size: Callable[[Estimate], int],
) -> Iterator[str]:
    """List what to type that fits: the most samples, and no data at all."""
    data = recipe.calibration
    if data.is_none:
        return

    def flags(changes: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
        for flag, change in changes.items():
            less = recipe.model_copy(update={"calibration": data.model_copy(update=change)})
            costs = estimate(plan, source, less)
            if fits(costs):
                yield f"`{flag}` (about {_size(size(costs))})"
                return

    yield from flags({f"--calib-samples {n}": {"samples": n} for n in _fewer(data.count)})
    compares = recipe.resource_budget or recipe.max_loss or recipe.chooses_depth
    if not compares and recipe.vocab != "data":
        yield from flags({"--calib none": {"source": ("none",)}})


def _fewer(count: int) -> Iterator[int]:
    while count > FEWEST_SAMPLES:
        count //= 2
        yield count


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
