"""What a teacher computes for a text is kept, and is the same in every pass and every run."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcompress.training import teacher_cache
from tcompress.training.objectives import Observed
from tcompress.training.teacher_cache import TeacherCache

LENGTHS = [3, 5, 1, 4]


class Teacher:
    """Computes other numbers each time that it is asked."""

    def __init__(self, classes: tuple[int, ...] = ()) -> None:
        self.calls, self.classes = 0, classes

    def __call__(self, places: list[int]) -> Observed:
        self.calls += 1
        longest = max(LENGTHS[place] for place in places)
        made = torch.Generator().manual_seed(self.calls)

        def randn(*shape: int) -> Tensor:
            return torch.randn(len(places), *shape, generator=made)

        output = SimpleNamespace(last_hidden_state=randn(longest, 6))
        if self.classes:
            by_token = len(self.classes) > 1
            output.logits = randn(*([longest] if by_token else []), self.classes[-1])
        states = [randn(longest, 6), randn(longest, 6)]
        return Observed(output, states, {"q": randn(longest, 4)})


def _observed(store: TeacherCache, teacher: Teacher, places: list[int]) -> Observed:
    return store.observed(torch.tensor(places), lambda: teacher(places))


def _rows(seen: Observed, places: list[int]) -> dict[int, list[Tensor]]:
    """All that was computed for each text, without padding."""
    found: dict[int, list[Tensor]] = {}
    for row, place in enumerate(places):
        tensors = [*seen.states, *seen.projections.values(), seen.final]
        found[place] = [own[row, : LENGTHS[place]] for own in tensors if own is not None]
        if seen.logits is not None:
            own = seen.logits[row]
            found[place].append(own[: LENGTHS[place]] if own.ndim > 1 else own)
    return found


@pytest.mark.parametrize("classes", [(), (3,), (0, 3)])
def test_texts_get_what_was_computed_first(tmp_path: Path, classes: tuple[int, ...]) -> None:
    teacher = Teacher(classes)
    store = TeacherCache(tmp_path / "new" / "kept", LENGTHS, logits=bool(classes))
    first = _rows(_observed(store, teacher, [1, 3]), [1, 3])
    exact = Teacher(classes)([1, 3])
    for own, wanted in zip(first.values(), _rows(exact, [1, 3]).values(), strict=True):
        assert_close(own, wanted, rtol=0.005, atol=1e-6)
        if len(classes) == 1:
            assert_close(own[-1], wanted[-1], rtol=0, atol=0)
    second = _rows(_observed(store, teacher, [3, 0, 2]), [3, 0, 2])
    assert teacher.calls == 2
    again = _rows(_observed(store, teacher, [0, 1]), [0, 1])
    assert teacher.calls == 2
    for own, wanted in ((second[3], first[3]), (again[1], first[1]), (again[0], second[0])):
        for left, right in zip(own, wanted, strict=True):
            same = min(len(left), len(right))
            assert_close(left[:same], right[:same], rtol=0, atol=0)


def test_texts_are_padded_as_the_batch_is(tmp_path: Path) -> None:
    """A batch may be cut into pieces, whose own texts may be shorter than its longest."""
    store = TeacherCache(tmp_path / "kept", LENGTHS, logits=False)
    for _ in range(2):
        seen = store.observed(torch.tensor([0, 2]), lambda: Teacher()([0, 1]), 5)
        assert seen.states[0].shape == (2, 5, 6)
        assert not seen.states[0][0, 3:].any()


def test_a_run_that_goes_on_finds_them(tmp_path: Path) -> None:
    teacher, later = Teacher(), Teacher()
    later.calls = 50
    first = _observed(TeacherCache(tmp_path / "kept", LENGTHS, logits=False), teacher, [0, 1, 2])
    store = TeacherCache(tmp_path / "kept", LENGTHS, logits=False)
    seen = _observed(store, later, [2, 1])  # to know of what shape they are
    assert_close(seen.states[0][1], first.states[0][1], rtol=0, atol=0)
    _observed(store, later, [0, 3])  # one of them is known
    found = _observed(store, later, [0, 1, 2])
    assert later.calls == 52
    assert_close(found.states, first.states, rtol=0, atol=0)


def test_without_room_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_cache, "MOST_BYTES", 100)
    teacher = Teacher()
    store = TeacherCache(tmp_path / "kept", LENGTHS, logits=False)
    for calls in (1, 2):
        seen = _observed(store, teacher, [0, 1])
        assert teacher.calls == calls
        assert seen.states[0].dtype == torch.float32
    assert not (tmp_path / "kept").exists()


def test_a_run_that_goes_on_does_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own file is part of what the disk lacks by then; or there is room by now."""
    for free, calls in ((10**9, 2), (0, 3)):
        monkeypatch.setattr(
            teacher_cache.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free)
        )
        path, teacher = tmp_path / str(free) / "kept", Teacher()
        _observed(TeacherCache(path, LENGTHS, logits=False), teacher, [0, 1, 2, 3])
        other = SimpleNamespace(free=10**9 - free)
        monkeypatch.setattr(teacher_cache.shutil, "disk_usage", lambda _, other=other: other)
        store = TeacherCache(path, LENGTHS, logits=False)
        for _ in range(2):
            _observed(store, teacher, [0, 1, 2, 3])
        assert teacher.calls == calls


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(teacher_cache.os, "posix_fallocate", full, raising=False)
    teacher = Teacher()
    store = TeacherCache(tmp_path / "kept", LENGTHS, logits=False)
    for calls in (1, 2):
        _observed(store, teacher, [0, 1])
        assert teacher.calls == calls


def test_two_stacks_are_not_kept(tmp_path: Path) -> None:
    store = TeacherCache(tmp_path / "kept", LENGTHS, logits=False)
    seen = Observed(None, [torch.zeros(2, 5, 4), torch.zeros(2, 7, 4)])
    runs: list[Any] = []
    for _ in range(2):
        assert store.observed(torch.tensor([0, 1]), lambda: runs.append(0) or seen) is seen  # type: ignore[func-returns-value]
    assert len(runs) == 2
