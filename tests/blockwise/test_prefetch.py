"""Weights that are read while the block before them computes."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tcompress.blockwise.prefetch import Prefetch, Weight
from tcompress.blockwise.streams import PartialModel
from tcompress.errors import FitError
from tcompress.models import SourceModel
from tcompress.progress import COMPUTING, READING, Silent, StageTimes
from tests.support.conversions import threads
from tests.support.tiny import TINY

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threads()
    yield
    assert threads() == before


class _Reader:
    """Reads blocks of two tensors, and keeps which thread read which of them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, bool]] = []  # block, tensor, whether by the main thread

    def __call__(self, block: str) -> Iterator[Weight]:
        for number in range(2):
            main = threading.current_thread() is threading.main_thread()
            self.seen.append((block, number, main))
            if block == "broken":
                raise OSError("no such disk")
            yield [f"{block}.{number}"], torch.full((3,), float(number))


@pytest.mark.parametrize("pinned", [False, True])
def test_the_next_block_alone_is_read_ahead(pinned: bool) -> None:
    reader = _Reader()
    prefetch = Prefetch(reader, ["a", "b", "c"], pinned=pinned)  # as it is, without a GPU
    for block in ("a", "b"):
        assert [names for names, _ in prefetch.take(block)] == [[f"{block}.0"], [f"{block}.1"]]
    assert {block for block, _, _ in reader.seen} == {"a", "b"}  # nothing was started
    reader.seen.clear()
    for block in ("a", "b", "c"):
        weights = list(prefetch.take(block))
        assert [value.tolist() for _, value in weights] == [[0.0] * 3, [1.0] * 3]
        prefetch.start_after(block)
    assert reader.seen == [(b, number, b == "a") for b in "abc" for number in range(2)]
    prefetch.close()


def test_a_wrong_guess_is_dropped_and_another_block_is_read_as_ever() -> None:
    reader = _Reader()
    prefetch = Prefetch(reader, ["a", "broken", "c"], pinned=False)
    prefetch.start_after("a")
    assert [names for names, _ in prefetch.take("c")] == [["c.0"], ["c.1"]]
    assert reader.seen == [("broken", 0, False), ("c", 0, True), ("c", 1, True)]
    prefetch.close()


def test_errors_are_raised_where_the_block_is_asked_for() -> None:
    prefetch = Prefetch(_Reader(), ["a", "broken"], pinned=False)
    prefetch.start_after("a")
    with pytest.raises(OSError, match="no such disk"):
        prefetch.take("broken")
    prefetch.close()


def test_closing_stops_after_the_tensor_that_is_read() -> None:
    seen: list[int] = []

    def read(_: str) -> Iterator[Weight]:
        thread: Any = threading.current_thread()
        for number in range(2):
            seen.append(number)
            while not thread.stopped:
                time.sleep(0.001)
            yield ["x"], torch.ones(3)

    prefetch = Prefetch(read, ["a", "b"], pinned=False)
    prefetch.start_after("a")
    prefetch.close()
    assert seen == [0]


def test_the_wait_counts_as_reading() -> None:
    waited, ticks = threading.Event(), iter([0.0, 1.0, 3.0, 3.0])

    def clock() -> float:
        now = next(ticks)
        if now == 1.0:  # the wait begins
            waited.set()
        return now

    def read(_: str) -> Iterator[Weight]:
        waited.wait()
        yield ["x"], torch.ones(3)

    prefetch, times = Prefetch(read, ["a", "b"], pinned=False), StageTimes(Silent(), "walk", clock)
    with times.running():
        prefetch.start_after("a")
        prefetch.take("b")
    assert times.seconds == {"walk": {COMPUTING: 1.0, READING: 2.0}}


def _walked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Walk through a model on the CPU as another device does; gives blocks that are loaded."""
    monkeypatch.setattr(
        PartialModel,
        "prefetch",
        lambda self, order: Prefetch(self._read_block, order, pinned=False),
    )
    model = PartialModel(SourceModel.open(str(folder)), CPU)
    streams = [model.stream(TINY["bert"].inputs(2, 8, 0))]
    for block, _ in model.walk(streams):
        yield block.name
        streams[0].answer(model.answer_of(streams[0]))


def test_a_tensor_of_the_next_block_is_named_when_that_is_loaded(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, name = tiny("bert"), "bert.encoder.layer.1.attention.self.key.weight"
    weights = load_file(source / "model.safetensors")
    weights[name][0, 0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    walk = _walked(tmp_path, monkeypatch)
    assert next(walk) == "bert.encoder.layer.0"
    with pytest.raises(FitError, match=f"`{name}` of the source holds NaN"):
        next(walk)


def test_a_walk_that_ends_early_leaves_no_thread(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = _walked(tiny("bert"), monkeypatch)
    next(walk)
    walk.close()  # type: ignore[attr-defined]


def test_on_the_cpu_nothing_is_read_ahead(tiny: Callable[[str], Path]) -> None:
    model, before = PartialModel(SourceModel.open(str(tiny("bert"))), CPU), threads()
    prefetch = model.prefetch([*model.blocks])
    for block in model.blocks:
        with model.loaded(block, prefetch):
            assert threads() == before
