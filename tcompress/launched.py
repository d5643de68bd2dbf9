"""What a launcher such as `torchrun` has told this process by its environment."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta

_PATIENCE = timedelta(seconds=10)


def is_launched() -> bool:
    """True where this is one of several processes."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1


def is_first() -> bool:
    """True where this process talks to the user."""
    return os.environ.get("RANK", "0") == "0"


def speaks() -> bool:
    """True for the first process that asks: of what all meet, one alone is to report.

    Where the launcher's store cannot be reached every process reports.
    """
    if not is_launched():
        return True
    with suppress(Exception):
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=_PATIENCE, wait_for_workers=False)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return bool(store.add(f"tcompress/reported/{attempt}", 1) == 1)
    return True
