"""Memory: how much is free, of the machine and within limits of groups; how large blocks are."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tcompress import memory
from tcompress.memory import free_memory


def test_the_narrowest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_memory()
    if free is None:
        pytest.skip("this system does not say how much memory is free")
    assert 0 < free < 2**50
    cpu = torch.device("cpu")
    [name] = [
        line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if not line.split(":", 2)[1]
    ] or [""]
    group = tmp_path / name.lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    files = {"memory.max": "5000", "memory.current": "3000", "memory.stat": "inactive_file 100"}
    for file, text in files.items():
        (group / file).write_text(f"{text}\n")
    if name:  # else there is no group of the second version, whose files these are
        assert free_memory(cpu) == 2100
    (group / "memory.max").write_text("max\n")
    assert (free_memory(cpu) or 0) > 2100


def test_other_devices_are_not_guessed() -> None:
    assert free_memory(torch.device("meta")) is None


_BLOCKS = """
import ctypes, resource, torch
from tcompress import memory

class Info(ctypes.Structure):
    _fields_ = [(str(number), ctypes.c_size_t) for number in range(10)]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Info

def returned():
    before = getattr(library.mallinfo2(), "4")  # bytes in blocks that go back when they are freed
    block = torch.empty(3 << 24, dtype=torch.uint8)
    return getattr(library.mallinfo2(), "4") - before

def faults(ask):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ask(torch.empty(5 << 24, dtype=torch.uint8)).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(lambda block: block), faults(memory.in_huge_pages), returned())
memory.keep_freed_memory()
print(returned())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators decide themselves")
def test_large_blocks_are_kept_and_have_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    # A command that ran in this process has said it for all that is started from here.
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    command = [sys.executable, "-c", _BLOCKS]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    plain, hinted, before, after = map(int, out.split())
    assert (before >= 3 << 24, after) == (True, 0)
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if pages.is_file() and "[madvise]" in pages.read_text():
        assert hinted < plain / 4


_TENSORS = """
import resource
import sys
from tcompress import memory

if sys.argv[1] == "asked":
    memory.use_huge_pages()
import torch

before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(5 << 22)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems decide themselves")
def test_large_tensors_have_huge_pages_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    command = [sys.executable, "-c", _TENSORS]
    plain, asked = (
        int(subprocess.run([*command, word], capture_output=True, text=True, check=True).stdout)
        for word in ("plain", "asked")
    )
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if pages.is_file() and "[madvise]" in pages.read_text():
        assert asked < plain / 4
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # what a user has said of them
    memory.use_huge_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


@pytest.mark.parametrize(("most", "kept"), [(1 << 30, 1 << 26), (1 << 25, 1 << 25), (0, None)])
def test_older_libraries_keep_what_they_can(
    most: int, kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second threshold by itself would end what the library does about the first."""
    set_to: dict[int, int] = {}

    class Library:
        def mallopt(self, what: int, size: int) -> int:
            if what == memory._MMAP_THRESHOLD and size > most:
                return 0
            set_to[what] = size
            return 1

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: Library())
    memory.keep_freed_memory.__wrapped__()
    assert set_to.get(memory._MMAP_THRESHOLD) == kept
    assert (memory._TRIM_THRESHOLD in set_to) == (kept is not None)
