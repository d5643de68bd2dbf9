"""The numbers that are tried on the way to what a budget allows."""

import pytest

from tcompress.search.budgets import TRIES, UNSPENT, approach


@pytest.mark.parametrize("step", [1, 10, 300, 1000, 4000])
@pytest.mark.parametrize("over", [1, 9, 900, 1300])
def test_sizes_that_come_in_steps_are_met(step: int, over: int) -> None:
    """As channels do: less room changes nothing, until it changes more than was too much."""
    aim, taken = 1_000_000, dict[float, float]()
    for room in approach(taken, aim, aim, int):
        size = aim + over + (room - aim + step - 1) // step * step  # just not one step less
        taken[room] = size
        if 0 <= aim - size <= UNSPENT * aim:
            break
    assert len(taken) <= TRIES
    assert any(size <= aim for size in taken.values())
    assert max(size for size in taken.values() if size <= aim) >= 0.99 * aim


def test_what_grows_evenly_takes_few_tries() -> None:
    taken: dict[float, float] = {}
    for number in approach(taken, 100.0, 50.0):
        taken[number] = 0.8 * number + 1
    assert min(abs(value - 50.0) for value in list(taken.values())[:4]) < 0.5
