"""What all tests rely on."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.golden import Golden

# Before torch is imported: workers that each use all cores wait for one another most of the time.
# Not in the process that starts them, whose variables they would inherit.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
if WORKERS:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))

# Before typer is imported, which reads some of them once: colours and widths are those of files.
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TERMINAL_WIDTH"):
    os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Golden files are compared with, unless this is asked for."""
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


def pytest_configure() -> None:
    """Waits for no disk: tests kill processes, they do not cut the power.

    Lets Ctrl-C through too: a shell's background jobs, as on build machines, start without it.
    """
    os.fsync = lambda _: None
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keeps the collector away from what stays: libraries and thousands of tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of floats depend on how many threads share them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is remembered of checked files stays out of the user's cache."""
    from tcompress.artifact import checksums

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares with golden files, or writes them."""
    from tests.support.golden import Golden

    return Golden(update=request.config.getoption("--update-golden"))
