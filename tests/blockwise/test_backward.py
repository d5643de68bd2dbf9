"""Label-free backward passes, block by block, beside plain backward passes of whole models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.modeling_outputs import (
    BaseModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
)

from tcompress.blockwise.output_sampler import OutputSampler
from tcompress.blockwise.sensitivity import BackwardWalk, Sensitivity
from tcompress.blockwise.streams import first_tensor, token_rows
from tcompress.data.sentences import PLAIN
from tcompress.errors import DataError, FitError
from tcompress.models import SourceModel
from tcompress.roles import Roles
from tcompress.roles.find import find_roles
from tests.support.conversions import threads
from tests.support.tiny import TINY, build

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files between the passes may be somebody else's; models are in safetensors here."""
    monkeypatch.setattr(torch, "load", None)


def _walk(
    folder: Path, batches: Sequence[Mapping[str, Tensor]], sampler: OutputSampler
) -> dict[str, Sensitivity]:
    source = SourceModel.open(str(folder))
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    walk = BackwardWalk(source, batches, sampler, scratch, CPU)
    found = {name: worth for _, layers in walk.run() for name, worth in layers.items()}
    assert not list(scratch.iterdir())
    return found


def _plain(
    model: nn.Module, roles: Roles, batches: Sequence[Mapping[str, Tensor]], sampler: OutputSampler
) -> dict[str, Sensitivity]:
    """The same from one backward pass through the whole model."""
    found: dict[str, Sensitivity] = {}
    seen: list[tuple[Any, Tensor, Tensor]] = []
    for layer in roles.layers:
        if layer.kind == "experts":
            continue
        width = sum(part.size for part in layer.parts)
        found[layer.name] = Sensitivity(layer.in_features, width, CPU)

        def keep(_: nn.Module, args: Any, kwargs: Any, output: Tensor, layer: Any = layer) -> None:
            output.retain_grad()
            seen.append((layer, first_tensor(*args, **kwargs).detach(), output))

        model.get_submodule(layer.name).register_forward_hook(keep, with_kwargs=True)
    block_of = {layer.name: block.name for block in roles.blocks for layer in block.layers}
    for index, batch in enumerate(batches):
        seen.clear()
        tensors, gradients = zip(*sampler(model(**batch), batch, index), strict=True)
        torch.autograd.backward(tensors, gradients)
        for layer, x, own in seen:
            rows, mask = token_rows(x, batch, block_of[layer.name], layer.role)
            if own.grad is None:
                continue
            back = own.grad.reshape(len(rows), -1)
            kept = (rows, back) if mask is None else (rows[mask], back[mask])
            found[layer.name].add(*kept, weighed=sampler.weighs_tokens)
    return found


@pytest.mark.often("deberta-v2", "clip", "t5", "mixtral", "llama")
@pytest.mark.parametrize("family", TINY)
def test_block_by_block_equals_a_plain_backward_pass(family: str, tmp_path: Path) -> None:
    model: Any = build(family)
    model.config.use_cache = False
    model.save_pretrained(tmp_path)
    batches = [TINY[family].inputs(3, 8, seed) for seed in (0, 1)]
    before = threads()
    found = _walk(tmp_path, batches, OutputSampler(PLAIN, seed=5))
    assert threads() == before
    wanted = _plain(model, find_roles(model), batches, OutputSampler(PLAIN, seed=5))
    assert sum(worth.rows > 0 for worth in found.values()) > len(found) // 2
    _assert_alike(found, wanted)


def _assert_alike(found: dict[str, Sensitivity], wanted: dict[str, Sensitivity]) -> None:
    assert set(found) == set(wanted)
    for name, worth in wanted.items():
        assert found[name].rows == worth.rows, name
        assert _distance(found[name].curvature.total(), worth.curvature.total()) < 1e-5, name
        moments = (item.inputs.moments(centred=False).gram for item in (found[name], worth))
        assert _distance(*moments) < 1e-5, name


def test_tokens_that_count_alike_are_summed_up_once(tmp_path: Path) -> None:
    """Layers that read one input have one sum; where tokens are weighed each has its own."""
    build("llama").save_pretrained(tmp_path)
    batches = [TINY["llama"].inputs(3, 8, seed) for seed in (0, 1)]
    worth = _walk(tmp_path, batches, OutputSampler(PLAIN))
    names = [f"model.layers.0.self_attn.{role}_proj" for role in "qkvo"]
    assert len({id(worth[name].inputs) for name in names}) == 2
    build("bert").base_model.save_pretrained(tmp_path / "states")
    worth = _walk(tmp_path / "states", batches[:1], OutputSampler(PLAIN))
    assert len({id(item.inputs) for item in worth.values()}) == len(worth)


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def test_padding_changes_nothing(tmp_path: Path) -> None:
    """Rows of padding alone, at which no gradient may arrive and nothing may be summed."""
    build("bert").save_pretrained(tmp_path)
    batch = TINY["bert"].inputs(2, 8, 0)
    longer = {key: torch.nn.functional.pad(value, (0, 5)) for key, value in batch.items()}
    found, padded = (_walk(tmp_path, [item], _Fixed(None)) for item in (batch, longer))
    assert {worth.rows for worth in found.values()} == {14}
    _assert_alike(padded, found)


class _Fixed(OutputSampler):
    """The same gradients for the tokens that are there, however long texts are."""

    def _outcome(self, scores: Tensor) -> Tensor:
        rows = torch.arange(1.0, 9).repeat(len(scores), 1)
        rows = torch.nn.functional.pad(rows, (0, scores.shape[1] - 8))
        return rows[..., None] * scores.detach().sin()


def test_not_finite_gradients_name_the_layer(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)

    class Broken(OutputSampler):
        def _outcome(self, scores: Tensor) -> Tensor:
            return torch.full_like(scores, torch.nan)

    with pytest.raises(FitError, match=r"layer `bert\.encoder\.layer\.1\..*`: gradients hold NaN"):
        _walk(tmp_path, [TINY["bert"].inputs(2, 8, 0)], Broken(PLAIN))
    assert not list((tmp_path / "scratch").iterdir())


# ---------------------------------------------------------------- what is propagated
def test_outcomes_have_the_moment_of_fisher() -> None:
    """E[g g^T] = diag(p) - p p^T for outcomes drawn from p."""
    scores = torch.tensor([[1.0, 0.0, -1.0]]).expand(40_000, 3)
    output = SequenceClassifierOutput(logits=scores)  # type: ignore[arg-type]
    ((found, gradient),) = OutputSampler(None)(output, {})
    assert found is scores
    chances = scores[0].softmax(0)
    wanted = torch.diag(chances) - torch.outer(chances, chances)
    assert_close(gradient.T @ gradient / len(gradient), wanted, atol=5e-3, rtol=0)
    assert_close(gradient.mean(0), torch.zeros(3), atol=1e-2, rtol=0)


def test_padded_tokens_predict_nothing() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for last in (1, 7):
        output = SequenceClassifierOutput(logits=torch.randn(2, 3, last))  # type: ignore[arg-type]
        ((_, gradient),) = OutputSampler(None)(output, {"attention_mask": mask})
        assert bool((gradient.abs().sum(-1) > 0).equal(mask.bool()))


def test_as_many_classes_as_tokens_are_still_classes() -> None:
    """A matrix of scores is masked only where it has a score for each token."""
    mask, scores = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.randn(2, 3)
    batch = {"attention_mask": mask}
    classes = SequenceClassifierOutput(logits=scores)  # type: ignore[arg-type]
    several = OutputSampler(None, independent=True)
    for sampler in (OutputSampler(None), several):
        assert bool((sampler(classes, batch)[0][1] != 0).all())
        moved = SequenceClassifierOutput(logits=scores + mask.logical_not())  # type: ignore[arg-type]
        assert sampler.change(classes, moved, batch) > 0.1
    embeddings = OutputSampler(PLAIN)
    states = BaseModelOutput(last_hidden_state=torch.randn(2, 3, 3))  # type: ignore[arg-type]
    assert bool((embeddings(states, batch)[0][1] != 0).all())
    span = QuestionAnsweringModelOutput(start_logits=scores, end_logits=scores)  # type: ignore[arg-type]
    for _, gradient in OutputSampler(None)(span, batch):
        assert bool((gradient != 0).equal(mask.bool()))
    ((_, gradient),) = OutputSampler(None, independent=True, per_token=True)(classes, batch)
    assert bool((gradient != 0).equal(mask.bool()))


def test_embeddings_are_pooled_where_a_model_makes_them() -> None:
    states, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    output = BaseModelOutput(last_hidden_state=states)  # type: ignore[arg-type]
    ((embedding, gradient),) = OutputSampler(PLAIN)(output, {"attention_mask": mask})
    assert_close(embedding, PLAIN(states, mask))
    assert gradient.shape == (2, 4)
    ((found, gradient),) = OutputSampler(None)(output, {"attention_mask": mask})
    assert found is states
    assert bool((gradient.abs().sum(-1) > 0).equal(mask.bool()))


def test_draws_follow_the_seed() -> None:
    output = BaseModelOutput(last_hidden_state=torch.randn(2, 3, 4))  # type: ignore[arg-type]
    draws = [OutputSampler(None, seed)(output, {})[0][1] for seed in (0, 0, 1)]
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])


def test_an_output_of_neither_scores_nor_states_is_refused() -> None:
    with pytest.raises(DataError, match="has no scores and no states"):
        OutputSampler(None)(BaseModelOutput(), {})


def test_what_is_measured_is_no_class_and_classes_of_places_stand_first() -> None:
    """A shift of all outputs counts in regression; of pictures the second axis has classes."""
    dense, new = torch.randn(3, 4), torch.randn(3, 4)
    one, two = (SimpleNamespace(logits=item) for item in (dense, new))
    change = OutputSampler(None, measures=True).change(one, two, {})
    assert change == pytest.approx(float((dense - new).square().sum()), rel=1e-5)
    places = [item.repeat(2, 1)[:, :, None, None].expand(-1, -1, 2, 2) for item in (dense, new)]
    many = OutputSampler(None).change(*(SimpleNamespace(logits=item) for item in places), {})
    assert many == pytest.approx(8 * OutputSampler(None).change(one, two, {}), rel=1e-5)
