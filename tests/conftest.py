"""What all tests rely on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Lets Ctrl-C through: a shell's background jobs, as on build machines, start without it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
