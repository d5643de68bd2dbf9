"""Terms of the loss: each is what it says, however batches are cut and padded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcompress.errors import InputError
from tcompress.training.objectives import OBJECTIVES, Batch, Objective, Observed, Setting
from tcompress.training.tasks import TASKS

LENGTHS, WIDTH, TOKENS, CLASSES = (5, 3, 4, 1), 8, 5, 7
HEADS, SOFT = 2, 3.0
CASES = ("hidden", "logits", "logits of tokens", "embedding", "attention", "attention causal")


def _mask(lengths: tuple[int, ...] = LENGTHS) -> Batch:
    mask = torch.arange(TOKENS) < torch.tensor(lengths)[:, None]
    return {"input_ids": mask.long(), "attention_mask": mask.long()}


def _drawn(case: str, seed: int) -> Observed:
    """Everything that a model may compute, at random."""
    make = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make).requires_grad_()

    rows = (len(LENGTHS), TOKENS)
    logits = draw(*rows, CLASSES) if case == "logits of tokens" else draw(len(LENGTHS), CLASSES)
    output = SimpleNamespace(logits=logits, last_hidden_state=draw(*rows, WIDTH))
    states = [draw(*rows, WIDTH), draw(*rows, WIDTH)]
    return Observed(output, states, {role: draw(*rows, WIDTH) for role in ("q", "k")})


def _objective(case: str, **setting: Any) -> Objective:
    options = {"heads": HEADS, "temperature": SOFT, "causal": "causal" in case, **setting}
    made = OBJECTIVES[case.split()[0]](Setting(per_token="tokens" in case, **options))
    made.prepare([(_mask(), _drawn(case, 9))])
    return made


def _relative(own: Tensor, wanted: Tensor) -> Tensor:
    return (own - wanted).square().sum() / wanted.square().sum()


def _divergence(own: Tensor, wanted: Tensor) -> Tensor:
    """Of two rows of logits."""
    p, q = wanted.softmax(-1), own.softmax(-1)
    return (p * (p / q).log()).sum()


def _embedding(seen: Observed, row: int) -> Tensor:
    mean = seen.output.last_hidden_state[row, : LENGTHS[row]].mean(0)
    return mean / mean.norm()


def _plainly(case: str, student: Observed, teacher: Observed) -> Tensor:
    """The same number, example by example and token by token."""
    places = [(row, token) for row, length in enumerate(LENGTHS) for token in range(length)]
    if case == "hidden":
        pairs = [*zip(student.states, teacher.states, strict=True), (student.final, teacher.final)]
        return sum(_relative(own[at], wanted[at]) for own, wanted in pairs for at in places) / 3
    if case == "logits":
        both = zip(student.logits, teacher.logits, strict=True)
        return sum(_divergence(own / SOFT, wanted / SOFT) for own, wanted in both) * SOFT**2
    if case == "logits of tokens":
        own, wanted = student.logits, teacher.logits
        return sum(_divergence(own[at] / SOFT, wanted[at] / SOFT) for at in places) * SOFT**2
    if case == "embedding":
        anchors = [_embedding(_drawn(case, 9), row) for row in range(len(LENGTHS))]
        total = torch.zeros(())
        for row in range(len(LENGTHS)):
            gap = _embedding(student, row) - _embedding(teacher, row)
            near = sum((gap @ anchor).square() for anchor in anchors) / len(anchors)
            total = total + gap.square().sum() + WIDTH * near
        return total
    total, size = torch.zeros(()), WIDTH // HEADS
    for role in ("q", "k"):
        for row, length in enumerate(LENGTHS):
            for head in range(HEADS):
                part = slice(head * size, (head + 1) * size)
                own, wanted = (s.projections[role][row, :, part] for s in (student, teacher))
                for token in range(length):
                    seen = token + 1 if case == "attention causal" else length
                    scores = [side[:seen] @ side[token] / size**0.5 for side in (own, wanted)]
                    total = total + _divergence(*scores)
    return total / (2 * HEADS)


@pytest.mark.parametrize("case", CASES)
def test_plain_computation(case: str) -> None:
    student, teacher = _drawn(case, 1), _drawn(case, 2)
    found = _objective(case).loss(_mask(), student, teacher)
    assert_close(found, _plainly(case, student, teacher), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_finite_with_a_row_of_padding(case: str) -> None:
    student, teacher = _drawn(case, 1), _drawn(case, 2)
    _objective(case).loss(_mask((5, 0, 4, 1)), student, teacher).backward()
    leaves = [student.logits, student.final, *student.states, *student.projections.values()]
    found = [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]
    assert found
    assert all(gradient.isfinite().all() for gradient in found)


def test_attention_with_fewer_key_heads() -> None:
    """Whatever heads do not divide is one head."""
    student, teacher = _drawn("attention", 1), _drawn("attention", 2)
    for seen in (student, teacher):
        seen.projections = {"k": seen.projections["k"][..., :5]}
    found = _objective("attention").loss(_mask(), student, teacher)
    one = _objective("attention", heads=1).loss(_mask(), student, teacher)
    assert_close(found, one)


def test_an_objective_that_the_model_cannot_have() -> None:
    bare = Observed(SimpleNamespace(), [])
    with pytest.raises(InputError, match="`attention` needs queries, keys or values"):
        _objective("attention").loss(_mask(), bare, bare)


def test_without_a_mask_an_example_counts_as_one_token() -> None:
    """As for pictures."""
    student, teacher = _drawn("hidden", 1), _drawn("hidden", 2)
    batch = {"pixel_values": torch.zeros(len(LENGTHS), 3, 2, 2)}
    whole = {"attention_mask": torch.ones(len(LENGTHS), TOKENS)}
    objective = _objective("hidden")
    assert_close(
        objective.loss(batch, student, teacher), objective.loss(whole, student, teacher) / TOKENS
    )


def test_losses_of_tasks() -> None:
    seen = _drawn("logits", 1)
    labels = torch.tensor([0, 3, 6, 2])
    chances = seen.logits.softmax(-1)[range(4), labels]
    found = TASKS["classification"]().loss(seen, {"labels": labels})
    assert_close(found, -chances.log().sum())

    seen.output.logits = torch.tensor([[1.0], [2.0]])
    scores = {"labels": torch.tensor([0.5, 4.0])}
    assert_close(TASKS["regression"]().loss(seen, scores), torch.tensor(0.25 + 4.0))

    token = _drawn("logits of tokens", 1)
    labels = torch.full((4, TOKENS), -100)
    labels[0, 1], labels[2, 3] = 5, 0
    wanted = -(token.logits.log_softmax(-1)[0, 1, 5] + token.logits.log_softmax(-1)[2, 3, 0])
    assert_close(TASKS["masked-lm"]().loss(token, {"labels": labels}), wanted)


def test_similarity_compares_rows_in_pairs() -> None:
    seen = _drawn("embedding", 1)
    found = TASKS["sts"]().predictions(seen, _mask())  # type: ignore[attr-defined]
    wanted = [_embedding(seen, row) @ _embedding(seen, row + 1) for row in (0, 2)]
    assert_close(found, torch.stack(wanted))


def test_scores_of_tasks() -> None:
    accuracy = TASKS["classification"]().score(torch.tensor([1, 0, 1.0]), torch.tensor([1, 1, 1]))
    assert accuracy == pytest.approx(2 / 3)
    rank = TASKS["regression"]().score
    assert rank(torch.tensor([1.0, 2, 9]), torch.tensor([0.1, 0.2, 0.3])) == pytest.approx(1)
    assert rank(torch.tensor([1.0, 1, 1]), torch.tensor([0.1, 0.2, 0.3])) == 0
