"""Seconds of stages and of their parts, over interrupted runs."""

from collections.abc import Callable, Iterator

import pytest

from tcompress.progress import FORWARD, READING, Seconds, Silent, StageTimes, by_stage, timed
from tcompress.reporting.formatting import stages_text


@pytest.fixture
def clock() -> Callable[[], float]:
    """A clock on which a second goes by with every look."""
    ticks: Iterator[int] = iter(range(10**6))
    return lambda: float(next(ticks))


def test_every_second_is_counted_once(clock: Callable[[], float]) -> None:
    times, begun = StageTimes(Silent(), "planning", clock), -1.0
    with times.running():
        times.stage("fitting 12 blocks", 12, "blocks")
        with timed(FORWARD), timed(READING):
            pass
        times.stage("trying svd", 1, "trial")
        times.stage("counting tokens of a.csv", 3, "rows")
    with timed(READING):  # nobody listens
        pass
    seconds = times.seconds
    assert [*seconds] == ["planning", "fitting blocks", "trying models", "counting tokens"]
    assert {*seconds["fitting blocks"]} == {"computing", FORWARD, READING}
    assert times.total == pytest.approx(sum(by_stage(seconds).values()), abs=2)
    assert begun < min(value for parts in seconds.values() for value in parts.values())


def test_an_error_ends_a_part(clock: Callable[[], float]) -> None:
    times = StageTimes(Silent(), "planning", clock)
    with times.running(), pytest.raises(KeyError), timed(FORWARD):
        raise KeyError
    assert times.stage_and_part == ("planning", "computing")


def test_interrupted_runs_add_up(clock: Callable[[], float]) -> None:
    kept: list[Seconds] = []
    first = StageTimes(Silent(), "planning", clock)
    first.resume({}, kept.append)
    first.stage("writing", 1, "bytes")
    for _ in range(12):  # long enough for it to be kept within a stage
        first.advance()
    before = kept[-1]
    assert before["writing"]["computing"] > 0
    second = StageTimes(Silent(), "planning", clock)
    second.resume(before, kept.append)
    second.stage("writing", 1, "bytes")
    total = by_stage(second.seconds)
    assert total["planning"] > by_stage(before)["planning"]
    assert total["writing"] > by_stage(before)["writing"]


def test_only_long_conversions_are_told_of() -> None:
    seconds = {"fitting blocks": {"computing": 100.0, FORWARD: 400.0}, "writing": {READING: 1.0}}
    text = "8 min: fitting blocks 8 min (of which forward passes 7 min)"
    assert stages_text(seconds) == text
    assert stages_text({"writing": {"computing": 59.0}}) == stages_text({}) == ""
