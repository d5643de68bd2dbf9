"""Times that were measured on this machine before, so that runs count with the same ones."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import cached_assets_path

from tcompress import processes
from tcompress.artifact.disk_cache import fingerprint, read_record
from tcompress.files import write_text
from tcompress.latency.paired_timing import device_name

LASTING = 24 * 3600
"""Seconds after which times are measured anew: machines change, by what else they do above all."""


@dataclass
class TimingCache:
    """Numbers by what was timed, in a file; one that cannot be read or written is none."""

    path: Path | None = None
    since: float = field(default_factory=time.time)
    values: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device, *facts: object) -> TimingCache:
        """Read what was measured with as many threads on this machine, and with these facts."""
        processor = device_name(torch.device("cpu"))
        processor = f"{processor}, {torch.backends.cpu.get_cpu_capability()}"
        machine = [torch.__version__, processor, str(device), torch.get_num_threads()]
        if device.type == "cuda":
            machine.append(device_name(device))
        try:
            folder = cached_assets_path("tcompress", "times")
        except (OSError, ValueError):  # of users without a home there is nowhere to keep anything
            return cls()
        path = folder / f"{fingerprint(*machine, *facts)}.json"

        def lasting() -> tuple[float, dict[str, float]] | None:
            record = read_record(path, _parsed)
            return record if record and 0 <= time.time() - record[0] < LASTING else None

        record = processes.first(lasting)  # whose clock decides for all
        return cls(path) if record is None else cls(path, *record)

    def keep(self) -> None:
        """Write all times that were measured so far."""
        if self.path is not None and processes.leads():
            with suppress(OSError):
                write_text(self.path, json.dumps({"since": self.since, "values": self.values}))


def _parsed(text: str) -> tuple[float, dict[str, float]]:
    """Seconds since the epoch when measuring began, and times by what was timed."""
    content = json.loads(text)
    values = {str(key): float(value) for key, value in content["values"].items()}
    return float(content["since"]), values
