"""Candidates put alone into the dense model, and what changes of embeddings count."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.clip.modeling_clip import CLIPVisionModelOutput

from tcompress.blockwise.output_sampler import (
    LEFT_OUT,
    VARIANTS,
    OutputComparison,
    OutputSampler,
)
from tcompress.conversion.converter import convert
from tcompress.conversion.estimate import estimate
from tcompress.data.calibration import CalibrationData
from tcompress.data.sentences import PLAIN
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.search import corrections, search
from tcompress.search.candidates import SearchInputs
from tcompress.search.corrections import Substitute, changes_with
from tests.support.conversions import calibration, make
from tests.support.depth import deep, drawn, idle_llama
from tests.support.tiny import build

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("texts", [1, 5])
def test_embeddings_are_compared_with_those_of_texts_without_some_words(texts: int) -> None:
    batch = {
        "input_ids": torch.arange(texts * 40).reshape(texts, 40),
        "attention_mask": torch.tensor([[0] * 4 + [1] * 30 + [0] * 6] * texts),
    }
    sampler = OutputSampler(PLAIN, seed=1)
    found = sampler.with_variants(batch)
    assert found["input_ids"].equal(batch["input_ids"].repeat(VARIANTS, 1))
    masks = found["attention_mask"].unflatten(0, (VARIANTS, texts))
    assert masks[0].equal(batch["attention_mask"])
    assert bool((masks[:, :, [4, 33]] == 1).all())  # what marks a text stays
    assert not bool(masks[:, :, [3, 34]].any())
    for mask, share in zip(masks[1:], LEFT_OUT, strict=True):
        gone = 1 - mask.sum() / masks[0].sum()
        assert float(gone) == pytest.approx(share, abs=0.2 if texts == 1 else 0.15)
    scorer = OutputSampler(None)
    assert scorer.with_variants(batch) is batch


@pytest.mark.parametrize(("batches", "size"), [(1, 60), (15, 4), (60, 1), (2, 1)])
def test_what_judges_is_cut_over_all_batches(batches: int, size: int, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    source = SourceModel.open(str(tmp_path))
    ids = torch.arange(batches * size)[:, None].expand(-1, 200).split(size)
    facts = ("random", batches * size, 0, "0", {})
    data = CalibrationData([{"input_ids": x} for x in ids], [*range(batches)], *facts)
    cut = corrections.judged_batches(data, OutputSampler(None), source, 1)
    chosen = torch.cat([batch["input_ids"][:, 0] for batch in cut]).tolist()
    assert chosen == ([1, 4, 7, *range(10, 60, 3)] if batches * size == 60 else [0, 1])


def test_states_of_two_widths_are_ranked_apart() -> None:
    comparison = OutputComparison(OutputSampler(None))
    generator = torch.Generator().manual_seed(0)
    for index in range(4):
        states = torch.randn(2, 3, 8, generator=generator)
        output = CLIPVisionModelOutput(states[:, 0, :4].clone(), states)
        comparison.add("data", output, output, {"pixel_values": states}, index)
    assert comparison.agreement == {"data": pytest.approx(1.0)}


@pytest.mark.parametrize("texts", [1, 5])
def test_changes_of_embeddings_that_change_no_order_are_none(texts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(VARIANTS * texts, 1, 6, generator=generator)
    batch = {"attention_mask": torch.ones(len(states), 1, dtype=torch.long)}
    sampler = OutputSampler(PLAIN, seed=1)

    def change(moved: torch.Tensor) -> float:
        pair = (BaseModelOutput(last_hidden_state=own) for own in (states, moved))
        return sampler.change(*pair, batch)

    turned, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator))
    assert change(2 * states @ turned) == pytest.approx(0, abs=1e-9)
    unit = torch.nn.functional.normalize(states, dim=-1)
    alike = torch.cat([unit, torch.full_like(unit[..., :1], 0.7)], -1)  # cosines: affine
    assert change(alike) == pytest.approx(0, abs=1e-9)
    little, more = (change(states + size * torch.randn(states.shape)) for size in (0.01, 0.3))
    assert 0 < little < more


@pytest.mark.slow
def test_substitutes_in_idle_blocks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, float]] = []

    def changes(inputs: SearchInputs, passes: int, items: Sequence[Substitute]) -> list[float]:
        made = changes_with(inputs, passes, items)
        found.extend((item.block, one) for item, one in zip(items, made, strict=True))
        return made

    monkeypatch.setattr(search, "changes_with", changes)
    idle_llama(tmp_path / "dense")
    recipe = Convert.model_validate({"method": {"name": "svd"}, "target": 0.4})
    convert(str(tmp_path / "dense"), recipe, tmp_path / "out", data=drawn(deep("llama", 5), 16))
    assert len({block for block, _ in found}) == 5
    for block, change in found:
        idle = block.endswith((".1", ".3"))
        assert change == pytest.approx(0, abs=1e-9) if idle else change > 1e-6


@pytest.mark.parametrize("method", ["svd", "width"])
def test_a_substitute_changes_what_the_model_with_it_does(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def changes(inputs: SearchInputs, passes: int, items: Sequence[Substitute]) -> list[float]:
        seen.extend(changes_with(inputs, passes, items))
        return [0.0] * len(items)

    monkeypatch.setattr(search, "changes_with", changes)
    made = make("bert", tmp_path, aware=True, method={"name": method}, target=0.5)
    assert min(seen) > 0
    assert made.plan.budget.error > 0  # predictions stand where nothing was found


@pytest.mark.often("llama")
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5"])
def test_a_dry_run_says_how_many_candidates_are_tried(
    family: str, sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources(family)
    tried: list[int] = []

    def changes(inputs: SearchInputs, passes: int, items: Sequence[Substitute]) -> list[float]:
        tried.append(len(items))
        return [0.0] * len(items)

    monkeypatch.setattr(search, "changes_with", changes)
    method = {"name": "auto", "offer": ["svd", "width"], "trials": False}
    recipe = Convert.model_validate({"method": method, "target": 0.5})
    planned = estimate(make_plan(recipe, source), source, recipe)
    convert(source, recipe, tmp_path / family, data=calibration(family))
    assert tried == [planned.candidates]


@pytest.mark.slow
def test_blocks_between_those_that_are_tried_get_what_lies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model of many blocks some are tried; factors between them are interpolated."""
    model = deep("llama", 7)
    model.build().save_pretrained(tmp_path / "dense")
    recipe = Convert.model_validate({"method": {"name": "svd"}, "target": 0.4})
    tried: list[str] = []

    def changes(inputs: SearchInputs, passes: int, items: Sequence[Substitute]) -> list[float]:
        tried.extend(item.block for item in items)
        blocks = [int(item.block.rpartition(".")[2]) for item in items]
        # Scores, values and neurons alike.
        return [i.predicted * 4.0 ** (block / 6) for i, block in zip(items, blocks, strict=True)]

    monkeypatch.setattr(search, "changes_with", changes)

    def errors(folder: str) -> Plan:
        return convert(
            str(tmp_path / "dense"), recipe, tmp_path / folder, data=drawn(model, 16)
        ).manifest.plan

    whole = errors("whole")
    assert len({*tried}) == 7
    tried.clear()
    monkeypatch.setattr(corrections, "BLOCKS", 3)
    some = errors("some")
    assert {block.rpartition(".")[2] for block in tried} == {"0", "3", "6"}
    assert some.layers == whole.layers
    assert some.budget.error == pytest.approx(whole.budget.error, rel=1e-6)
