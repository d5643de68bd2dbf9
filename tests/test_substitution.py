"""Candidates put alone into the dense model, and what changes of embeddings count."""

from pathlib import Path

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from tcompress.conversion.converter import convert
from tcompress.conversion.output_sampler import OutputSampler
from tcompress.conversion.substitution import SubstitutionWalk
from tcompress.data.inputs import MEAN
from tcompress.options import Convert
from tests.support.conversions import calibration
from tests.support.depth import deep, drawn, idle_llama

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("texts", [1, 4])
def test_gradients_of_embeddings_tell_how_far_cosines_move(texts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    states = 3 * torch.randn(texts, 1, 6, generator=generator)
    moved = states + 1e-3 * torch.randn(states.shape, generator=generator)
    batch = {"attention_mask": torch.ones(texts, 1, dtype=torch.long)}
    sampler = OutputSampler(MEAN, seed=1)
    dense, other = (BaseModelOutput(last_hidden_state=own) for own in (states, moved))
    squares = 0.0
    for _ in range(4000):
        start = states.clone().requires_grad_()
        [(embedding, gradient)] = sampler(BaseModelOutput(last_hidden_state=start), batch)
        embedding.backward(gradient)
        squares += float((start.grad * (moved - states)).sum((1, 2)).square().sum()) / 4000
    assert sampler.change(dense, other, batch) == pytest.approx(squares, rel=0.1)
    longer = BaseModelOutput(last_hidden_state=2 * states)
    assert sampler.change(dense, longer, batch) == pytest.approx(0, abs=1e-12)


def test_substitutes_in_idle_blocks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, float]] = []
    own = SubstitutionWalk.changes

    def changes(walk: SubstitutionWalk, advance: object) -> list[float]:
        made = own(walk, advance)  # type: ignore[arg-type]
        found.extend((item.block, one) for item, one in zip(walk.substitutes, made, strict=True))
        return made

    monkeypatch.setattr(SubstitutionWalk, "changes", changes)
    idle_llama(tmp_path / "dense")
    recipe = Convert.model_validate({"method": {"name": "svd"}, "target": 0.4})
    convert(str(tmp_path / "dense"), recipe, tmp_path / "out", data=drawn(deep("llama", 5), 16))
    assert len({block for block, _ in found}) == 5
    for block, change in found:
        idle = block.endswith((".1", ".3"))
        assert change == pytest.approx(0, abs=1e-9) if idle else change > 1e-6


@pytest.mark.parametrize("method", ["svd", "width"])
def test_a_substitute_changes_what_the_model_with_it_does(
    tiny: object, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny("bert")  # type: ignore[operator]
    seen: list[float] = []
    own = SubstitutionWalk.changes

    def changes(walk: SubstitutionWalk, advance: object) -> list[float]:
        seen.extend(own(walk, advance))  # type: ignore[arg-type]
        return [0.0 for _ in walk.substitutes]

    monkeypatch.setattr(SubstitutionWalk, "changes", changes)
    recipe = Convert.model_validate({"method": {"name": method}, "target": 0.5})
    made = convert(str(source), recipe, tmp_path / method, data=calibration("bert"))
    assert min(seen) > 0
    assert made.manifest.plan.budget.error > 0  # predictions stand where nothing was found
