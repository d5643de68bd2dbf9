"""What all tests rely on."""

from __future__ import annotations

import gc
import os
import re
import signal
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

# Before huggingface_hub is imported: times that were measured are kept nowhere.
os.environ["HF_ASSETS_CACHE"] = f"{os.devnull}/none"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Golden files are compared with, unless this is asked for."""
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


def other_versions() -> list[str]:
    """Libraries that tcompress stands on, where they are not those of constraints.txt."""
    root = Path(__file__).parents[1]
    needs = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (root / "constraints.txt").read_text("utf-8"), re.M)
    direct = {re.split(r"[<>=!~]", need)[0] for need in needs}
    found = []
    for name, pin in ((name.lower().replace("_", "-"), pin) for name, pin in pins):
        if name in direct:
            try:
                installed = version(name).partition("+")[0]  # a build for CPUs is no other version
            except PackageNotFoundError:
                installed = "unknown"
            if installed != pin:
                found.append(f"{name} {installed} instead of {pin}")
    return found


def pytest_report_header() -> list[str]:
    """Says why warnings pass."""
    others = other_versions()
    return [f"warnings are no errors with {', '.join(others)}"] if others else []


def pytest_configure(config: pytest.Config) -> None:
    """Waits for no disk: tests kill processes, they do not cut the power.

    Lets Ctrl-C through too: a shell's background jobs, as on build machines, start without it.
    Warnings are errors with the versions of constraints.txt alone: others deprecate other things.
    """
    if other_versions():
        config.addinivalue_line("filterwarnings", "default")
    os.fsync = lambda _: None
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave all cases of a test to the grid but those that its mark `often` names."""
    unmet: set[tuple[str, str]] = set()
    met: set[tuple[str, str]] = set()
    for item in items:
        mark = item.get_closest_marker("often")
        if mark is None:
            continue
        test, _, case = item.nodeid.rstrip("]").partition("[")
        unmet |= {(test, name) for name in mark.args}
        met.add((test, case))
        if case not in mark.args:
            item.add_marker(pytest.mark.grid)
    if (unmet - met) and not any("::" in name for name in config.args):
        raise pytest.UsageError(f"marked `often`, but no such cases: {sorted(unmet - met)}")


def pytest_collection_finish() -> None:
    """Keeps the collector away from what stays: libraries and thousands of tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of floats depend on how many threads share them."""
    from tests.support.evaluation import one_thread

    with one_thread():
        yield


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny models by family, each written once: nobody may write into them."""
    from tests.support.tiny import build

    def write(family: str) -> Path:
        folder = tmp_path_factory.mktemp("tiny") / family
        build(family).save_pretrained(folder)
        return folder

    return cache(write)


@pytest.fixture(scope="session")
def sources(tiny: Callable[[str], Path]) -> Callable[[str], Any]:
    """The same, opened."""
    from tcompress.models import SourceModel

    return cache(lambda family: SourceModel.open(str(tiny(family))))


@pytest.fixture(scope="session")
def planned(sources: Callable[[str], Any]) -> Callable[..., Any]:
    """Plans a tiny model, from `dct` unless another option is named."""
    from tcompress.planning.planner import make_plan
    from tests.support.conversions import recipe

    return lambda family, option="dct", **changes: make_plan(
        recipe(option, **changes), sources(family)
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Converted models by family and option, each made once."""
    from tests.support.conversions import make

    return cache(lambda family, option: make(family, tmp_path_factory.mktemp(family), option))


@pytest.fixture(scope="session")
def uninterrupted(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], Any]:
    """Whole conversions of a tiny bert to compare with, without and with data, each made once."""
    from tests.support.interrupted import run

    return cache(lambda aware: run(tiny("bert"), tmp_path_factory.mktemp("whole") / "out", aware))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws at random does not depend on which tests ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _few_steps() -> Iterator[None]:
    """Stop fits that go on in steps early: few tests look at how good they become."""
    from tests.support.conversions import few_steps

    with few_steps():
        yield


@pytest.fixture
def whole_fits() -> Iterator[None]:
    """Let fits take all of their steps, for tests of quality."""
    from tests.support.conversions import all_steps

    with all_steps():
        yield


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares with golden files, or writes them."""
    from tests.support.golden import Golden

    return Golden(update=request.config.getoption("--update-golden"))
