"""Agreement with the baseline, labels unread."""

import numpy as np
import pytest
import torch
from scipy.special import softmax

from tcompress.evaluation.language_modeling import _LIKELIEST, Compared
from tcompress.evaluation.statistics import agreement
from tests.support.numerics import randn


def _kl(one: np.ndarray, two: np.ndarray) -> float:
    p, q = softmax(one, -1), softmax(two, -1)
    return float((p * (np.log(p) - np.log(q))).sum(-1).mean())


def test_classes_and_their_divergence() -> None:
    dense, small = randn(20, 5, seed=1).numpy(), randn(20, 5, seed=2).numpy()
    same, apart = agreement(small, dense)
    assert same.value() == pytest.approx((dense.argmax(-1) == small.argmax(-1)).mean())
    assert apart.value() == pytest.approx(_kl(dense, small))
    assert [found.value() for found in agreement(dense, dense)] == pytest.approx([1, 0])
    assert (same.higher_is_better, apart.higher_is_better) == (True, False)


def test_tokens_of_a_vocabulary_that_is_kept_whole() -> None:
    dense, small = (randn(12, _LIKELIEST, seed=seed).float() for seed in (1, 2))
    reference = Compared(2, None)
    assert reference.statistics([4, 8]) == []
    compared = Compared(2, reference.likeliest)
    for index, rows in enumerate([slice(0, 4), slice(4, 12)]):
        reference.add(index, dense[rows])
        compared.add(index, small[rows])
    same, apart = compared.statistics([4, 8])
    equal = (dense.argmax(-1) == small.argmax(-1)).float().mean()
    assert same.value() == pytest.approx(float(equal))
    assert apart.value() == pytest.approx(_kl(dense.numpy(), small.numpy()), rel=1e-4)


def test_the_divergence_of_likely_tokens_is_a_lower_bound() -> None:
    dense, small = (4 * randn(30, 500, seed=seed).float() for seed in (1, 2))
    reference, itself = Compared(1, None), []
    reference.add(0, dense)
    for scores in (small, dense):
        compared = Compared(1, reference.likeliest)
        compared.add(0, scores)
        itself.append(compared.statistics([30])[1].value())
    assert 0 < itself[0] <= _kl(dense.numpy(), small.numpy())
    assert itself[1] == pytest.approx(0, abs=1e-5)
    assert torch.equal(reference.likeliest[0][0][:, 0], dense.argmax(-1).int())
