"""The default rate of healing follows how close a model is to its teacher."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tcompress.training import loop
from tcompress.training.losses import Losses
from tcompress.training.rates import HALVINGS, MOVES, find_rate, rate_for
from tcompress.training.schedule import HEALING_RATE
from tests.support.model_folders import sentences, text_file
from tests.support.training import settings, small_encoder, texts, train


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Rates that runs choose by trial, one of each run; None where it tries none."""
    rates: list[float | None] = []
    inner = loop.tested_rate

    def heard(*arguments: Any) -> float | None:
        rates.append(inner(*arguments))
        return rates[-1]

    monkeypatch.setattr(loop, "tested_rate", heard)
    return rates


def _rate(distance: float, batch_size: int = 4) -> float:
    """Of a bowl so far from its bottom, in moves of the highest rate with four examples."""
    value = nn.Parameter(torch.full((3,), distance / MOVES / 2))
    start = value.detach().clone()
    value.grad = value.detach().clone()
    how = {"highest": 1.0, "batch_size": batch_size}
    rate = find_rate({"a": value}, lambda: value.detach().square().sum(), **how)
    assert_close(value.detach(), start, rtol=0, atol=0)
    return rate


@pytest.mark.parametrize(
    ("distance", "rate"), [(5.0, 1.0), (0.9, 1.0), (0.5, 0.5), (0.1, 0.125), (1e-4, 2**-HALVINGS)]
)
def test_the_rate_is_in_moves_to_the_least_loss(distance: float, rate: float) -> None:
    assert _rate(distance) == rate
    assert _rate(distance / 8, batch_size=256) == rate  # the root of sixty-four times as many


def test_moves_that_leave_no_number_are_not_taken() -> None:
    value = nn.Parameter(torch.ones(1))
    value.grad = torch.full((1,), torch.nan)
    values = iter([torch.nan, torch.inf, 3.0, 2.0, 2.5])
    how = {"highest": 1.0, "batch_size": 4}
    assert find_rate({"a": value}, lambda: torch.tensor(next(values)), **how) == 1 / 8
    assert find_rate({"a": value}, lambda: torch.tensor(torch.nan), **how) == 2**-HALVINGS
    assert value.detach().tolist() == [1.0]


@pytest.mark.parametrize(
    ("steps", "rate"), [(1, 1e-4), (100, 1e-4), (400, 2e-4), (2500, 5e-4), (10**6, 1e-3)]
)
def test_long_runs_may_win_back_what_they_lose(steps: int, rate: float) -> None:
    assert rate_for(steps, 1e-4, 1e-3) == pytest.approx(rate)


def test_healing_tests_its_rate_and_goes_on_with_it(
    tmp_path: Path, tested: list[float | None]
) -> None:
    model, data = small_encoder(tmp_path), texts(tmp_path)
    how = {"warmup": 0.0, "schedule": "constant", "data": data}
    done = train(model, tmp_path / "out", **how)
    assert HEALING_RATE / 2**HALVINGS <= tested[0] <= HEALING_RATE
    assert {point.learning_rate for point in done.facts.curve} == {tested[0]}
    assert settings(**how).learning_rate is None
    for index, given in enumerate(({"learning_rate": 5e-4}, {"stage": "blocks"})):
        train(model, tmp_path / str(index), **how, **given)
    assert tested[1:] == [None, None]


def test_a_rate_is_tested_on_all_sources_in_their_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested, loss_on = [], Losses.loss_on

    def heard(self: Losses, order: list[list[int]], *, keeps: bool = True) -> Any:
        tested.extend(chain.from_iterable(order))
        return loss_on(self, order, keeps=keeps)

    files = [text_file(tmp_path / f"{name}.txt", sentences(80)) for name in "ab"]
    data = {"source": files, "weights": (3, 1)}
    monkeypatch.setattr(Losses, "loss_on", heard)
    train(small_encoder(tmp_path), tmp_path / "out", steps=1, data=data)
    assert len(tested) == 64
    assert sum(index < 192 for index in tested) == 48  # of 3 x 64, and of 64


def test_what_a_teacher_says_is_not_kept_where_memory_is_short(
    tmp_path: Path, tested: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, loss_on = [], Losses.loss_on

    def short(self: Losses, order: list[list[int]], *, keeps: bool = True) -> Any:
        asked.append((len(order[0]), keeps))
        if keeps:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss_on(self, order, keeps=keeps)

    model, data = small_encoder(tmp_path), texts(tmp_path)
    train(model, tmp_path / "enough", data=data)
    monkeypatch.setattr(Losses, "loss_on", short)
    train(model, tmp_path / "out", data=data)
    assert [keeps for _, keeps in asked] == [True, False]
    assert tested[1] == tested[0]
