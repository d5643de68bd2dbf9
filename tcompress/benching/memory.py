"""Peak memory of a forward pass: what it allocates itself, weights and inputs not counted.

On a GPU this is what PyTorch's caching allocator says. On a CPU it is added up from the profiler's
record of every allocation and release; scratch space that a library takes from the system itself,
without PyTorch, is not seen. On other devices it is unknown.
"""

from __future__ import annotations

import os

import torch
from torch.profiler import ProfilerActivity, profile

from tcompress.benching.timing import Pass

WHAT = "allocated during the pass, without weights and inputs"
"""How the number is defined, for protocols."""


def peak_bytes(run: Pass, device: torch.device) -> int | None:
    """Runs a pass once and returns its peak memory, or None where that cannot be known."""
    if device.type == "cuda":
        return _on_cuda(run, device)
    return _on_cpu(run) if device.type == "cpu" else None


def _on_cuda(run: Pass, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _on_cpu(run: Pass) -> int:
    # Read when the profiler first starts, which otherwise talks on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    level = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        level += change.nbytes()
        peak = max(peak, level)
    return peak
