"""How stages scale with the minutes that there are."""

from itertools import pairwise

import pytest

from tcompress.artifact.manifest import Speed
from tcompress.compression.effort import Effort, Needs
from tcompress.compression.working import _agree, _fastest

NEEDS = Needs(least=1.2, full=4.0)


def test_with_time_enough_nothing_is_left_out() -> None:
    assert NEEDS.effort(15) == Effort()
    assert NEEDS.too_short(15) is None


@pytest.mark.parametrize("minutes", [0.2, 1.2, 2.0])
def test_with_too_little_all_is_at_its_least(minutes: float) -> None:
    assert NEEDS.effort(minutes) == Effort.least()


def test_between_both_more_time_is_more_of_everything() -> None:
    efforts = [NEEDS.effort(minutes) for minutes in (3, 4, 5, 6)]
    for less, more in pairwise(efforts):
        assert (less.samples or 0) < (more.samples or 0)
        assert (less.examples or 0) < (more.examples or 0)
        assert less.repeats <= more.repeats
    assert not efforts[0].other_rows
    assert efforts[-1].other_rows
    assert "fitted to" in efforts[0].words
    assert "fewer other models" in efforts[0].words


@pytest.mark.parametrize(
    ("least", "words"), [(0.3, "0.5 minutes"), (0.9, "1 minute"), (3.2, "4 minutes")]
)
def test_the_least_is_said_without_false_precision(least: float, words: str) -> None:
    said = Needs(least, 2 * least).too_short(0.2)
    assert f"at least about {words} on this machine" in said


def test_timings_join_to_the_fastest_of_both_models() -> None:
    def timed(own: float, dense: float) -> Speed:
        numbers = {"milliseconds": own, "baseline_milliseconds": dense, "ratio": dense / own}
        where = {"batch": 1, "length": 1, "mode": "onnx-int8", "baseline": "dense"}
        return Speed(**where, **numbers, tokens_per_second=1.0, protocol={})

    slow_dense = [timed(20.0, 150.0), timed(21.0, 100.0)]
    assert _fastest(slow_dense).ratio == 5.0
    assert not _agree(slow_dense, surely=True)  # too few, and the dense ones differ
    assert not _agree([*slow_dense, timed(20.0, 120.0)], surely=True)
    assert _agree([*slow_dense, timed(20.0, 104.0)], surely=True)
