"""What every kind of budget makes of ten tiny models: choices, few numbers, and refusals.

`choices` is a digest of the plan without floats. What differs behind it, `python -m tests.answers`
shows: run it in both trees.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.answers import GRID, SAMPLE, Case, is_often, quiet_machine
from tests.support.golden import Golden

OFTEN = [case for case in GRID if is_often(case)]
REST = [case for case in GRID if not is_often(case)]


@pytest.fixture(scope="module", autouse=True)
def _machine() -> Iterator[None]:
    with quiet_machine():
        yield


def _models(cases: list[Case]) -> list[str]:
    return list(dict.fromkeys(case.model for case in cases))


def _facts(cases: list[Case], model: str) -> dict[str, Any]:
    answers = (case.answers() for case in cases if case.model == model)
    return {name: item.portable() for named in answers for name, item in named.items()}


@pytest.mark.parametrize("model", _models(OFTEN))
def test_sample(model: str, golden: Golden) -> None:
    golden.document(f"answers/{model}.json", _facts(OFTEN, model))


@pytest.mark.grid
@pytest.mark.parametrize("model", _models(REST))
def test_rest(model: str, golden: Golden) -> None:
    golden.document(f"answers/{model}-rest.json", _facts(REST, model))


def test_every_file_is_of_a_model(golden: Golden) -> None:
    names = [f"{model}.json" for model in _models(OFTEN)]
    names += [f"{model}-rest.json" for model in _models(REST)]
    golden.only("answers", names)


def test_the_sample_is_of_the_grid() -> None:
    asked = {Case(model, budget) for model, budgets in SAMPLE.items() for budget in budgets}
    assert asked <= {*GRID}
    assert len({*GRID}) == len(GRID)
