"""Budgets of agreement: how it is measured, and how the cheapest model within it is found."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tcompress.blockwise.output_sampler import VARIANTS, OutputComparison, OutputSampler
from tcompress.conversion.converter import CLOSE, largest_error
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import PlanError
from tcompress.search.budgets import TRIES
from tests.support.conversions import calibration, make

ALLOWED = 0.03


@pytest.mark.parametrize(
    "lost_at",
    [lambda e: e, lambda e: 0.2 * e, lambda e: 5 * e, lambda e: 0.9 * e**0.7, lambda e: 3 * e**1.5],
)
def test_the_largest_error_that_is_allowed(lost_at: Callable[[float], float]) -> None:
    tried: list[float] = []

    def lost(error: float) -> float:
        tried.append(error)
        return lost_at(error)

    found = largest_error(ALLOWED, lost)
    assert found is not None
    assert CLOSE * ALLOWED <= lost_at(found) <= ALLOWED
    assert found == max(error for error in tried if lost_at(error) <= ALLOWED)
    assert len(tried) <= TRIES


def test_where_nothing_is_good_enough_or_nothing_is_lost() -> None:
    assert largest_error(ALLOWED, lambda _: 0.5) is None
    assert largest_error(ALLOWED, lambda _: None) is None  # no model is that small
    assert largest_error(ALLOWED, lambda _: 0.0) == 1  # everything may go


def test_agreement_of_scores_is_the_share_of_equal_choices() -> None:
    one = torch.tensor([[[2.0, 1.0], [0.0, 3.0]], [[1.0, 0.0], [5.0, 1.0]]])
    two = one.clone()
    two[0, 0] = torch.tensor([0.0, 1.0])  # another choice
    two[1, 1] = torch.tensor([0.0, 9.0])  # as well, on padding
    batch = {"attention_mask": torch.tensor([[1, 1], [1, 0]])}
    compared = OutputComparison(OutputSampler(None, per_token=True))
    compared.add("a", SimpleNamespace(logits=one), SimpleNamespace(logits=two), batch)
    assert compared.agreement == {"a": pytest.approx(2 / 3)}
    compared.add("b", SimpleNamespace(logits=one), SimpleNamespace(logits=one), batch)
    assert compared.lost == pytest.approx((1 / 3 + 0) / 2)
    assert compared.changes["b"] == 0 < compared.changes["a"]


def test_agreement_of_answers_is_the_share_of_equal_tokens() -> None:
    """One token of each text is chosen, and none of the padding."""
    one = torch.tensor([[2.0, 1.0, 9.0], [0.0, 3.0, 1.0]])
    two = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 4.0]])
    batch = {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    compared = OutputComparison(OutputSampler(None))
    compared.add(
        "a", *(SimpleNamespace(start_logits=it, end_logits=one) for it in (one, two)), batch
    )
    assert compared.agreement == {"a": pytest.approx(3 / 4)}


@pytest.mark.parametrize("measures", [True, False])
def test_agreement_of_single_scores_ranks_them(measures: bool) -> None:
    """Whatever their signs, and a constant has none."""
    one = torch.tensor([[3.0], [1.0], [2.0], [-5.0]])
    for two, wanted in ((one + 100, 1), (100 - one, -1), (torch.ones(4, 1), None)):
        compared = OutputComparison(OutputSampler(None, measures=measures))
        for half in (slice(0, 2), slice(2, 4)):  # of one source
            outputs = (SimpleNamespace(logits=scores[half]) for scores in (one, two))
            compared.add("a", *outputs, {"input_ids": torch.ones(2, 1)})
        assert compared.agreement == ({} if wanted is None else {"a": pytest.approx(wanted)})


def test_agreement_of_embeddings_ranks_similarities() -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(6, 3, 8, generator=generator)
    two = one + 0.5 * torch.randn(6, 3, 8, generator=generator)
    mask = torch.tensor([[1, 1, 1]] * 4 + [[1, 0, 0]] * 2)
    compared = OutputComparison(OutputSampler(SentenceEncoder()))
    for rows in (slice(0, 4), slice(4, 6)):  # batches of one source are compared with each other
        whole = [own[rows].repeat(VARIANTS, 1, 1) for own in (one, two)]  # with their variants
        outputs = (SimpleNamespace(last_hidden_state=own) for own in whole)
        compared.add("a", *outputs, {"attention_mask": mask[rows].repeat(VARIANTS, 1)})

    def similarities(states: Tensor) -> list[float]:
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        pairs = [(i, j) for i in range(6) for j in range(i + 1, 6)]
        return [float(cosine_similarity(mean[i], mean[j], 0)) for i, j in pairs]

    wanted = spearmanr(similarities(one), similarities(two)).statistic
    assert compared.agreement == {"a": pytest.approx(wanted)}
    assert 0 < compared.lost < 1  # type: ignore[operator]


def test_a_model_loses_no_more_than_allowed(tmp_path: Path) -> None:
    made = make("bert", tmp_path, "svd", aware=True, target=None, max_loss=0.2)
    budget = made.plan.budget
    assert (budget.kind, budget.limit) == ("max_loss", 0.2)
    assert 0 <= budget.lost <= 0.2
    assert made.plan.structured_rewritten < made.plan.dense_rewritten
    smaller = make("bert", tmp_path / "more", "svd", aware=True, target=None, max_loss=0.6).plan
    assert smaller.structured_rewritten < made.plan.structured_rewritten


def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"loses at most 0\.00% of agreement"):
        make("bert", tmp_path, "svd", aware=True, target=None, max_loss=1e-9)


def test_a_part_of_the_data_keeps_what_is_held_out() -> None:
    data = calibration("bert", batches=9)
    part = data.part(12)
    assert len(part.fitted) == 3 < len(data.fitted)
    assert [data.batches[place] for place in part.places] == part.batches
    held = [part.place(index) for index in part.holdout]
    assert held == data.holdout
    assert data.part(data.samples) is data
