"""Fewer channels between layers: neurons, values and scores of heads."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import Olmo2Config, Olmo2ForCausalLM

from tcompress.blockwise import sensitivity
from tcompress.conversion.converter import convert
from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError, PlanError
from tcompress.exports.dense import export_dense
from tcompress.fitting.channel_orders import LayerStatistics, order_by_weights, order_channels
from tcompress.hf import build as installing
from tcompress.linalg.channels import head_bases, order_groups, order_neurons
from tcompress.models import SourceModel, read_parameter
from tcompress.options import Convert
from tcompress.options.choose import conversion
from tcompress.planning.costs import path_of
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.planning.sites import Coupling, couplings, roles_of, whole_heads
from tcompress.reporting.model_report import report_of
from tcompress.roles.find import attentions_of
from tcompress.search.candidates import PARAMETERS, Candidate, Site
from tcompress.search.knapsack import joint
from tcompress.structures.modules.linear import StructuredLinear, keep_weights
from tests.support.conversions import (
    assert_same_without_a_cache,
    by_role,
    calibration,
    distance,
    make,
    outputs,
    recipe,
    structured,
)
from tests.support.depth import deep
from tests.support.numerics import alike, randn
from tests.support.tiny import TINY

quick = settings(deadline=None, derandomize=True, max_examples=20)


def _moments(features: int, seed: int, heads: int = 1) -> Tensor:
    rows = randn(heads, 3 * features, features, seed=seed)
    return rows.mT @ rows


def _missed(gram: Tensor, target: Tensor, constant: float, chosen: Tensor) -> float:
    """What least squares on some neurons leave, from the normal equations."""
    own = target[:, chosen]
    return constant - float((own @ torch.linalg.inv(gram[chosen][:, chosen]) * own).sum())


# ---------------------------------------------------------------- the order of channels
@quick
@given(count=st.integers(1, 90), seed=st.integers(0, 99))
def test_neurons_are_ordered_once_each_and_losses_are_those_of_least_squares(
    count: int, seed: int
) -> None:
    [gram], weight = _moments(count, seed), randn(5, count, seed=seed + 1)
    constant = float((weight @ gram * weight).sum())
    found = order_neurons(gram.clone(), weight @ gram, constant)
    assert sorted(found.order.tolist()) == list(range(count))
    assert bool((found.losses.diff() <= 0).all())
    for kept in {1, count // 2, count} - {0}:
        missed = _missed(gram, weight @ gram, constant, found.order[:kept])
        assert float(found.losses[kept]) == pytest.approx(missed, abs=1e-9 * constant)


@pytest.mark.parametrize("contiguous", [True, False])
def test_many_neurons_are_ordered_in_the_memory_of_their_moments(
    contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [gram], weight = _moments(61, 1), randn(5, 61, seed=2)
    gram, constant = (gram + gram.T) / 2, float((weight @ gram * weight).sum())
    monkeypatch.setattr("tcompress.linalg.channels._GROUP", 4)
    exact = order_neurons(gram.clone(), weight @ gram, constant)
    monkeypatch.setattr("tcompress.linalg.channels._LARGE", 8)
    monkeypatch.setattr("tcompress.linalg.channels._ROWS", 7)
    given = gram.clone() if contiguous else gram.clone().T
    found = order_neurons(given, weight @ gram, constant)
    assert torch.equal(found.order, exact.order)
    assert torch.allclose(found.losses, exact.losses, rtol=1e-9, atol=1e-9 * constant)


def test_the_first_neuron_explains_most_and_copies_come_last() -> None:
    [gram], weight = _moments(12, 3), randn(4, 12, seed=4)
    twice = torch.cat([gram, gram], 0)
    twice = torch.cat([twice, twice], 1)  # every neuron has a copy
    target = torch.cat([weight @ gram] * 2, 1)
    found = order_neurons(twice.clone(), target.clone(), float((weight @ gram * weight).sum()))
    assert sorted((found.order[:12] % 12).tolist()) == list(range(12))
    assert float(found.losses[12]) <= 1e-9 * float(found.losses[0])
    explained = (weight @ gram).square().sum(0) / gram.diagonal()
    assert int(found.order[0]) % 12 == int(explained.argmax())


@quick
@given(groups=st.integers(1, 6), size=st.integers(1, 4), seed=st.integers(0, 99))
def test_groups_are_ordered_and_losses_are_those_of_least_squares(
    groups: int, size: int, seed: int
) -> None:
    [gram], weight = _moments(groups * size, seed), randn(5, groups * size, seed=seed + 1)
    constant = float((weight @ gram * weight).sum())
    found = order_groups(gram, weight @ gram, constant, size)
    assert sorted(found.order.tolist()) == list(range(groups))
    assert float(found.losses[0]) == pytest.approx(constant)
    rows = torch.arange(groups * size).unflatten(0, (groups, size))
    for kept in range(1, groups + 1):
        missed = _missed(gram, weight @ gram, constant, rows[found.order[:kept]].flatten())
        assert float(found.losses[kept]) == pytest.approx(missed, abs=1e-9 * constant)
    first = [_missed(gram, weight @ gram, constant, own) for own in rows]
    assert first[int(found.order[0])] == pytest.approx(min(first), abs=1e-9 * constant)


@quick
@given(size=st.integers(1, 8), seed=st.integers(0, 99))
def test_bases_of_heads_lose_what_they_say(size: int, seed: int) -> None:
    moments, worth = _moments(size, seed, 3), _moments(size, seed + 1, 3)
    bases = head_bases(moments, worth)
    assert_close(bases.lift @ bases.reduce, torch.eye(size).double().expand(3, -1, -1))
    for rank in range(size + 1):
        missed = torch.eye(size) - bases.lift[..., :rank] @ bases.reduce[:, :rank]
        lost = (missed.mT @ worth @ missed @ moments).diagonal(dim1=-2, dim2=-1).sum()
        assert_close(bases.losses[rank], lost, atol=1e-8 * float(bases.losses[0]), rtol=1e-8)


def test_sites_that_are_joint_offer_the_best_of_all() -> None:
    def site(name: str, costs: Iterable[int], share: float) -> Site:
        candidates = [
            Candidate(
                f"{name}{cost}", ((name, None),), (10 - cost) ** 2 * share, {PARAMETERS: cost}
            )
            for cost in costs
        ]
        return Site((name,), "", {PARAMETERS: 10}, tuple(candidates))

    sites = [site("a", range(1, 10), 1.0), site("b", (2, 6), 0.5)]
    found = joint(sites, PARAMETERS)
    costs = [own.costs[PARAMETERS] for own in found]
    assert (costs[0], costs[-1]) == (1 + 2, 10 + 10)
    assert costs == sorted(costs)
    for own in found:
        assert [key for key, _ in own.forms] == ["a", "b"]
        every = [
            one.loss + two.loss
            for one in sites[0].every
            for two in sites[1].every
            if one.costs[PARAMETERS] + two.costs[PARAMETERS] <= own.costs[PARAMETERS]
        ]
        assert own.loss == pytest.approx(min(every))


# ---------------------------------------------------------------- what may become narrower
@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("bert", {"scores", "values", "neurons"}),
        ("gpt2", {"scores", "values", "neurons"}),
        ("t5", {"scores", "values", "neurons"}),
        ("vit", {"scores", "values", "neurons"}),
        ("llama", {"values", "neurons"}),  # positions turn queries and keys
        ("deberta-v2", {"values", "neurons"}),  # which tables of positions read too
        ("gpt_neox", {"neurons"}),  # its projection has no parts
        ("mixtral", {"values", "neurons"}),
    ],
)
def test_what_layers_have_in_common(
    family: str, wanted: set[str], sources: Callable[[str], SourceModel]
) -> None:
    blocks = roles_of(sources(family)).blocks
    assert {own.kind for block in blocks for own in couplings(block)} == wanted


def _narrow(family: str, folder: Path, *, aware: bool = False, **changes: Any) -> Any:
    return make(family, folder, "width", aware=aware, **{"target": None, **changes})


def _sizes(plan: Plan) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the first block's layers that are left."""
    return {role: (e.inputs_left, e.outputs_left) for role, e in by_role(plan).items()}


def test_numbers_and_fractions_of_channels(tmp_path: Path) -> None:
    made = _narrow("bert", tmp_path, keep_neurons=48, head_size=0.5)
    assert _sizes(made.plan) == {
        "q": (32, 16), "k": (32, 16), "v": (32, 16), "o": (16, 32), "up": (32, 48), "down": (48, 32)
    }  # fmt: skip
    model = made.load()
    assert made.plan.saved == made.plan.parameters - model.num_parameters()
    layers = [module for module in model.modules() if isinstance(module, StructuredLinear)]
    kept = sum(layer.dense_weight(torch.float32).nbytes for layer in layers)
    assert keep_weights(model) == kept


def test_layers_around_channels_change_together_or_not_at_all(tmp_path: Path) -> None:
    made = _narrow("bert", tmp_path, keep_neurons=0.5, head_size=0.5, keep=["down"])
    assert "up" not in _sizes(made.plan)
    assert _sizes(made.plan)["o"] == (16, 32)


def test_all_channels_change_nothing(tmp_path: Path) -> None:
    made = _narrow("bert", tmp_path, aware=True, keep_neurons=64, head_size=8)
    found, wanted = (outputs(model, made.inputs()) for model in (made.load(), made.dense))
    assert distance(found, wanted) <= 1e-4


@pytest.mark.often("llama")
@pytest.mark.parametrize("family", ["bert", "llama", "t5", "vit"])
def test_refitting_is_no_worse_than_leaving_channels_out(family: str, tmp_path: Path) -> None:
    """On the rows that the fit saw, and summed over the layers that read channels."""
    errors = {}
    for aware in (True, False):
        made = _narrow(family, tmp_path / str(aware), aware=aware, keep_neurons=0.5, head_size=0.5)
        small, rows = made.load(), calibration(family).batches[:2]
        errors[aware] = sum(
            float((one - two).square().sum())
            for batch in rows
            for one, two in zip(outputs(small, batch), outputs(made.dense, batch), strict=True)
        )
    assert errors[True] < errors[False]


def test_narrow_heads_compute_what_zeros_in_their_place_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _narrow("bert", tmp_path, keep_neurons=0.5, head_size=0.5)
    narrow = made.load()
    assert {layer.head_width for layer in structured(narrow).values() if layer.head_width} == {4}
    monkeypatch.setattr(installing, "narrow_heads", lambda *_: None)
    padded = made.load()
    assert not any(layer.head_width for layer in structured(padded).values())
    inputs = made.inputs()
    assert distance(outputs(narrow, inputs), outputs(padded, inputs)) <= 1e-6


@pytest.mark.parametrize(
    "attention",
    [
        {"name": "tam"},
        {"name": "additive"},
        {"name": "hot", "kernel": "favor", "fold": 4},
        {"name": "tga"},
    ],
    ids=lambda own: own["name"],
)
def test_what_replaces_attention_sees_narrow_heads_as_wide_ones(
    attention: dict[str, Any], tmp_path: Path
) -> None:
    """Its own tensors are as wide as dense heads."""
    made = _narrow("bert", tmp_path, attention=attention, head_size=0.5)
    assert any(layer._spreads for layer in structured(made.load()).values())
    assert all(own.isfinite().all() for own in outputs(made.load(), made.inputs()))


@pytest.mark.often("mixtral")
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "mixtral"])
def test_the_dense_form_computes_the_same(family: str, tmp_path: Path) -> None:
    _check_copies(_narrow(family, tmp_path, keep_neurons=0.5, head_size=0.5), tmp_path)


# ---------------------------------------------------------------- nothing left
@pytest.mark.parametrize(
    ("family", "heads"),
    [
        ("bert", 4),
        ("gpt2", 4),
        ("gpt_neox", 1),  # all of its projection may go, though no part of it
        ("t5", 1),  # every head has positions of its own
        ("vit", 4),
        ("llama", 2),  # with their queries
        ("qwen3", 2),
        ("mixtral", 2),
        ("deberta-v2", 0),  # it computes attention itself
        ("mpnet", 0),
    ],
)
def test_whose_heads_may_go(family: str, heads: int, sources: Callable[[str], SourceModel]) -> None:
    source = sources(family)
    found = attentions_of(source.keymap.model, roles_of(source))
    wholes = [own for item in found if (own := whole_heads(item)) is not None]
    assert bool(wholes) == bool(heads)
    for own in wholes:
        assert own.sizes == [*range(heads)]


def test_heads_that_a_norm_takes_together_stay_together(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Olmo2Config(**sizes, intermediate_size=64, vocab_size=99)
    Olmo2ForCausalLM(config).save_pretrained(tmp_path)
    source = SourceModel.open(str(tmp_path))
    [found] = attentions_of(source.keymap.model, roles_of(source))
    heads = whole_heads(found)
    assert heads is not None
    assert heads.sizes == [0]


def test_one_head_of_keys_leaves_values_their_bases(tmp_path: Path) -> None:
    """Whole heads have the width of one there; they are all or none, and in no order."""
    deep("llama", 2, num_key_value_heads=1).build().save_pretrained(tmp_path)
    source = SourceModel.open(str(tmp_path))
    plan = make_plan(Convert.model_validate({"method": {"name": "width"}, "target": 0.5}), source)
    [_, found] = attentions_of(source.keymap.model, roles_of(source))
    block = roles_of(source).blocks[-1]
    layers = {layer.name: layer for layer in block.layers}
    entries = {layers[e.name].weight_name: e for e in plan.layers if e.name in layers}
    facts = {}
    for layer in block.layers:
        weight = read_parameter(source.store, source.keymap, layer.weight_name).double()
        moments = torch.eye(weight.shape[1], dtype=torch.float64)
        if (entry := entries.get(layer.weight_name)) is not None:
            facts[layer] = LayerStatistics(entry, weight, moments, moments[0])
    orders = {
        coupling.kind: order_channels(coupling, facts, 0.01)
        for coupling in (*couplings(block), whole_heads(found))
        if coupling is not None
    }
    assert orders["values"].reductions
    assert not orders["values"].reductions.keys() & orders["heads"].reductions.keys()


def test_what_ends_the_ordering_of_channels_names_their_layers(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two tokens, which are all that is told of 64 neurons, and no damping."""
    told = {"source": "builtin", "damping": 0.0}
    chosen = recipe("width", calibration=told)
    data = CalibrationData([TINY["bert"].inputs(1, 2, seed=0)], [], "tiny", 1, 2, "bert")
    with pytest.raises(FitError) as failed:
        convert(str(tiny("bert")), chosen, tmp_path / "small", data=data)
    assert re.fullmatch(
        r"the channels that (`\S+`(, )?)+ share cannot be ordered: a moment matrix is not .*",
        failed.value.message,
    )
    assert "a larger `damping`" in (failed.value.hint or "")


def test_a_rule_for_one_layer_holds_for_those_around_its_channels(tmp_path: Path) -> None:
    rule = {"match": "up", "method": {"name": "svd"}, "target": 0.3}
    made = make("bert", tmp_path, "width", aware=True, target=0.8, layers=[rule])
    planned = by_role(made.plan)
    channels = planned["up"].parts[0].channels
    assert channels is not None
    assert channels.kept == 52
    assert planned["down"].reads == channels
    made.load()(**made.inputs())


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_without_data_channels_lose_what_their_layers_would(
    family: str, sources: Callable[[str], SourceModel], planned: Callable[..., Any]
) -> None:
    source, plan = sources(family), planned(family, "width", target=0.5)
    entries = {path_of(source, entry): entry for entry in plan.layers}
    block = roles_of(source).blocks[-1]
    heads = whole_heads([*attentions_of(source.keymap.model, roles_of(source))][-1])
    tried = 0
    for coupling in filter(None, (*couplings(block), heads)):
        if not entries.keys() >= {layer.weight_name for layer in coupling.layers}:
            continue
        tried += 1
        losses = order_by_weights(coupling, entries, source, torch.device("cpu")).losses
        layers = sum(
            part.size / entries[it.weight_name].out_features for it, part in coupling.writers
        )
        assert float(losses[0]) == pytest.approx(layers + (coupling.reader is not None))
        assert (losses.diff() <= 1e-9).all()
        assert coupling.kind == "heads" or losses[-1] < 1e-2
    assert tried


@pytest.mark.often("bert", "whisper")
@pytest.mark.parametrize(
    "family", ["bert", "gpt2", "llama", "qwen3", "phi3", "mixtral", "opt", "vit", "whisper"]
)
def test_half_of_the_heads_is_a_model_like_any_other(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _fewer_heads(family, tmp_path, monkeypatch)
    few = [part.channels for e in made.plan.layers for part in e.parts if part.channels]
    assert few
    assert {own.kept / own.size for own in few} == {0.5}
    _check_copies(made, tmp_path)


def test_heads_that_are_gone_are_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _fewer_heads("llama", tmp_path, monkeypatch)
    inputs, ids = made.inputs(), made.inputs()["input_ids"]
    whole, few = (
        model(ids, use_cache=True).past_key_values.layers[0].keys.shape[1]
        for model in (made.dense, made.load())
    )
    assert (whole, few) == (2, 1)
    for cache in ("dynamic", "static"):
        one, two = (
            made.load().generate(
                ids, max_new_tokens=4, do_sample=False, use_cache=flag, pad_token_id=0,
                cache_implementation=cache if flag else None,
            )
            for flag in (True, False)
        )  # fmt: skip
        assert torch.equal(one, two)
    found = outputs(made.load(), inputs)
    monkeypatch.setattr(installing, "narrow_heads", lambda *_: None)
    assert distance(found, outputs(made.load(), inputs)) <= 1e-6


def _fewer_heads(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A conversion that may only take whole heads away, and pays for half of them."""

    def sizes(self: Coupling) -> list[int]:
        return [self.size // 2] if self.kind == "heads" else [self.size]

    monkeypatch.setattr(Coupling, "sizes", property(sizes))
    only = ["re:(?<!encoder_)attn|attention"]
    return make(family, folder, "width", aware=True, target=0.5, only=only)


def test_experts_keep_neurons(sources: Callable[[str], SourceModel]) -> None:
    block = roles_of(sources("mixtral")).blocks[0]
    found = [own for own in couplings(block) if own.kind == "neurons"]
    assert [min(own.sizes) > 0 for own in found] == [True]


def test_experts_with_biases_keep_all_neurons(sources: Callable[[str], SourceModel]) -> None:
    """Their biases are stored as they are."""
    block = roles_of(sources("mixtral")).blocks[0]
    biased = replace(block, layers=tuple(replace(item, bias=True) for item in block.layers))
    assert not [item for item in couplings(biased) if item.kind == "neurons"]


TIGHT = {"t5": 0.03, "mixtral": 0.1}  # attention to another text, and experts, stay


def _halved(family: str, folder: Path) -> Any:
    """A conversion whose budget pays for no feed-forward and no attention to the own text."""
    return make(family, folder, "width", aware=True, target=TIGHT.get(family, 0.003))


@pytest.mark.often("phi3")
@pytest.mark.parametrize(
    "family", ["bert", "gpt2", "gpt_neox", "llama", "qwen3", "phi3", "mixtral", "t5", "vit"]
)
def test_nothing_of_half_a_block_is_a_model_like_any_other(family: str, tmp_path: Path) -> None:
    made = _halved(family, tmp_path)
    gone = {e.role for e in made.plan.layers if not e.inputs_left}
    assert gone == ({"o"} if family == "mixtral" else {"o", "down"})
    _check_copies(made, tmp_path)
    assert report_of(made.folder).parameters.total.now == made.load().num_parameters()


def _check_copies(made: Any, folder: Path) -> None:
    """Saved again it computes the same, and nearly so in its dense form."""
    small, inputs = made.load(), made.inputs()
    wanted = outputs(small, inputs)
    small.save_pretrained(folder / "again")
    assert distance(outputs(made.load(folder / "again"), inputs), wanted) == 0
    export_dense(str(made.folder), folder / "whole")
    assert distance(outputs(made.load(folder / "whole"), inputs), wanted) <= 1e-5


def test_biases_take_the_mean_of_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "token_weights", alike)
    made, rows = _halved("bert", tmp_path), []
    output = made.dense.get_submodule("bert.encoder.layer.0.attention.output.dense")
    output.register_forward_hook(lambda _, __, y: rows.append(y[batch["attention_mask"].bool()]))
    for batch in calibration("bert").batches[:2]:
        outputs(made.dense, batch)
    bias = made.load().get_parameter("bert.encoder.layer.0.attention.output.dense.bias")
    assert_close(bias.detach(), torch.cat(rows).mean(0), atol=1e-5, rtol=1e-4)


@pytest.mark.often("gpt2")
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_what_is_gone_is_not_computed(family: str, tmp_path: Path) -> None:
    made = _halved(family, tmp_path)
    small, tokens = made.load(attn_implementation="eager"), made.inputs()["input_ids"].numel()
    with FlopCounterMode(display=False) as counter:
        outputs(small, made.inputs())
    assert not counter.get_flop_counts()["Global"].get(torch.ops.aten.bmm)
    macs = report_of(made.folder).macs_per_token.now
    assert made.dense.config.vocab_size * 32 * tokens <= counter.get_total_flops() // 2
    assert macs == made.dense.config.vocab_size * 32  # the output head


@pytest.mark.often("gpt2")
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_generation_with_a_cache_is_that_without(family: str, tmp_path: Path) -> None:
    made = _halved(family, tmp_path)
    assert_same_without_a_cache(made.load(), made.inputs()["input_ids"], 4)


def test_gradients_reach_all_parameters_around_what_is_gone(tmp_path: Path) -> None:
    """As training on several devices asks for."""
    small = _halved("llama", tmp_path).load().train()
    inputs = calibration("llama").batches[0]
    small(**inputs).logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())


# ---------------------------------------------------------------- budgets
def test_a_budget_is_shared_by_what_is_lost(tmp_path: Path) -> None:
    made = make("bert", tmp_path, "width", aware=True, target=0.6)
    plan = made.plan
    assert plan.structured_rewritten <= 0.6 * plan.dense_rewritten
    assert plan.structured_rewritten > 0.5 * plan.dense_rewritten
    assert plan.budget is not None
    assert plan.budget.error is not None
    assert plan.budget.uniform_error is not None
    assert plan.budget.error <= plan.budget.uniform_error
    by_place = {(e.block, e.role): e for e in plan.layers}
    for (block, role), entry in by_place.items():  # what one layer writes the next one reads
        if role == "up":
            assert entry.outputs_left == by_place[block, "down"].inputs_left
        elif role == "v":
            assert entry.outputs_left == by_place[block, "o"].inputs_left
        elif role == "q":
            assert entry.outputs_left == by_place[block, "k"].outputs_left


def test_a_budget_out_of_reach_says_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the smallest possible is"):
        make("deberta-v2", tmp_path, "width", aware=True, target=0.2)


# ---------------------------------------------------------------- words
def test_sizes_alone_are_the_method() -> None:
    found = conversion({"keep_neurons": 0.5})
    assert found.method is not None
    assert found.method.name == "width"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"init": "random", "keep_neurons": 8, "calibration": {"source": "none"}}, "configuration"),
        ({"method": {"name": "tucker", "share": "model", "rank": 4}, "head_size": 4}, "share"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Convert.model_validate({"method": {"name": "width"}, **changes})
