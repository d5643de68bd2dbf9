"""Times that were measured on this machine before, so that runs count with the same ones."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import cached_assets_path

from tcompress.files import write_text

LASTING = 24 * 3600
"""Seconds after which times are measured anew: machines change, by what else they do above all."""


@dataclass
class KnownTimes:
    """Numbers by what was timed, in a file; one that cannot be read or written is none."""

    path: Path | None = None
    since: float = field(default_factory=time.time)
    values: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device, *facts: object) -> KnownTimes:
        """Reads what was measured with as many threads on this machine, and with these facts."""
        known = [torch.__version__, _processor(), str(device), torch.get_num_threads()]
        if device.type == "cuda":
            known.append(torch.cuda.get_device_name(device))
        digest = hashlib.sha256(repr([*known, *facts]).encode()).hexdigest()[:24]
        try:
            path = cached_assets_path("tcompress", "times") / f"{digest}.json"
        except (OSError, ValueError):  # of users without a home there is nowhere to keep anything
            return cls()
        found: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text(encoding="utf-8"))
        try:
            since = float(found["since"])
            values = {str(key): float(value) for key, value in found["values"].items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            return cls(path)
        return cls(path, since, values) if 0 <= time.time() - since < LASTING else cls(path)

    def keep(self) -> None:
        """Writes all that is known by now."""
        if self.path is not None:
            with suppress(OSError):
                write_text(self.path, json.dumps({"since": self.since, "values": self.values}))


def _processor() -> str:
    """Name of the processor, as far as the system tells."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    own = next(names, platform.processor() or platform.machine())
    return f"{own}, {torch.backends.cpu.get_cpu_capability()}"
