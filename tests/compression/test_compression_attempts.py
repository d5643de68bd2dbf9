"""Which conversion is tried next, against files that are as fast as some law says."""

from collections.abc import Callable

import pytest

from tcompress.compression.attempts import AIM, Ask, Attempt, Goal, Measured, best, next_ask
from tcompress.compression.table import kept_layers, layers_that_reach

DENSE = Measured(bytes=23_000_000, speedup=3.0)


def _tried(goal: Goal, file_of: Callable[[Ask], Measured]) -> list[Attempt]:
    """Try three times at most, as `compress` does."""
    ask, attempts = Ask.first(goal, DENSE, 22_900_000), list[Attempt]()
    while ask is not None and len(attempts) < 3:
        attempts.append((ask, file_of(ask)))
        ask = next_ask(goal, DENSE, attempts)
    return attempts


@pytest.mark.parametrize("power", [0.6, 0.8, 1.0, 1.3])
@pytest.mark.parametrize("speedup", [4.0, 6.0, 10.0])
def test_speeds_come_between_what_is_asked_and_a_little_more(speedup: float, power: float) -> None:
    def file_of(ask: Ask) -> Measured:
        return Measured(10**7, 3.0 * (ask.speedup or 1.0) ** power)

    attempts = _tried(Goal(speedup), file_of)
    last = attempts[best(Goal(speedup), attempts)][1].speedup
    assert speedup <= last <= 1.15 * speedup


@pytest.mark.parametrize("beside", [100_000, 400_000, 2_000_000])
def test_sizes_come_below_what_is_asked_and_not_far(beside: int) -> None:
    goal = Goal(bytes=10_000_000)
    attempts = _tried(goal, lambda ask: Measured((ask.bytes or 0) + beside, 5.0))
    assert 0.98 * goal.bytes <= attempts[best(goal, attempts)][1].bytes <= goal.bytes  # type: ignore[operator]


def test_two_goals_are_both_reached() -> None:
    goal = Goal(6.0, 10_000_000)

    def file_of(ask: Ask) -> Measured:
        narrow = min(10_100_000, ask.bytes or 10**9, int(23_000_000 / (ask.speedup or 1.0)))
        return Measured(narrow, 3.0 * 23_000_000 / narrow * 0.8)

    attempts = _tried(goal, file_of)
    assert attempts[best(goal, attempts)][1].missed(goal) == ()


def test_the_dense_file_may_do() -> None:
    assert Ask.first(Goal(2.9, 23_000_000), DENSE, 0) is None
    assert Ask.first(Goal(3.1, 23_000_000), DENSE, 0) == Ask(AIM * 3.1 / 3.0, None)


def test_the_nearest_is_taken_where_none_reaches_the_goal() -> None:
    goal = Goal(8.0)
    attempts = [
        (Ask(2.0), Measured(1, 5.0)),
        (Ask(3.0), Measured(1, 7.0)),
        (Ask(4), Measured(1, 6)),
    ]
    assert best(goal, attempts) == 1
    assert attempts[1][1].missed(goal) == ("7.00 x as fast, not 8 x",)
    assert attempts[1][1].missed(goal, near=0.8) == ()


def test_what_surely_reaches_the_goal_is_taken_before_what_hardly_does() -> None:
    hardly, surely, far = ((Ask(2.0), Measured(1, speed)) for speed in (6.03, 6.4, 7.5))
    assert best(Goal(6.0), [hardly, surely, far]) == 1
    assert best(Goal(6.0), [hardly, far]) == 0
    assert next_ask(Goal(6.0), DENSE, [hardly]) is not None
    assert next_ask(Goal(6.0), DENSE, [surely]) is None


def test_layers_that_stay() -> None:
    assert kept_layers(6, 3) == (1, 3, 5)
    assert kept_layers(12, 5) == (1, 3, 6, 8, 11)
    dense = Measured(23, 3.0)
    assert layers_that_reach(6, Goal(6.0), dense, 2) == 3
    assert layers_that_reach(6, Goal(None, 18), dense, 2) == 3
    assert layers_that_reach(6, Goal(30.0), dense, 2) == 0
