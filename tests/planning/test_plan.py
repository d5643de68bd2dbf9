"""Planning: what a recipe means for a model, before any weight is read."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tcompress.artifact.format import parse_plan, quantization_section
from tcompress.conversion.converter import convert
from tcompress.errors import PlanError
from tcompress.models import SourceModel, WeightStore
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.planning.planner import _matrices, make_plan
from tests.support.conversions import (
    OPTIONS,
    Made,
    assert_wired,
    by_role,
    calibration,
    make,
    recipe,
    short_name,
)
from tests.support.tiny import TINY, TinyModel, build

Planned = Callable[..., Plan]
SVD = {"name": "svd", "rank": 4}


@pytest.mark.often("phi3", "t5", "mixtral")
@pytest.mark.parametrize("family", TINY)
def test_no_weight_is_read(
    family: str, sources: Callable[[str], SourceModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources(family)
    dense = build(family)

    def read(*args: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(WeightStore, "tensor", read)
    for option in OPTIONS:
        plan = make_plan(recipe(option), source)
        assert plan.parameters == sum(p.numel() for p in dense.parameters())
        assert sum(e.dense_parameters for e in plan.layers) == plan.dense_rewritten
        assert sum(e.parameters for e in plan.layers) == plan.structured_rewritten
        assert plan.dense_rewritten <= plan.block_parameters < plan.parameters
        assert _covered(plan) == plan.parameters
        assert plan.coverage.rewritten == plan.dense_rewritten
        assert all(item.name and item.parameters for item in plan.coverage.left)
        assert 0 < plan.kept < 1
        assert all(layer.macs(10) > 0 for layer in plan.layers)
        assert Plan.model_validate_json(plan.model_dump_json()) == plan
        assert parse_plan(quantization_section(plan.layers)).layers == plan.layers


def _covered(plan: Plan) -> int:
    """The sum of the parts that a plan accounts for, in which every parameter is once."""
    own = plan.coverage
    assert own is not None
    kept = own.embeddings + own.norms + sum(item.parameters for item in own.left)
    total: int = own.rewritten + own.replaced + own.dropped + kept
    assert total == own.total
    return total


def test_a_plan_cannot_be_changed(planned: Planned) -> None:
    plan = planned("bert")
    with pytest.raises(ValueError, match="frozen"):
        plan.layers[0].name = "other"
    with pytest.raises(ValueError, match="Extra inputs"):
        Plan.model_validate({**plan.model_dump(), "more": 1})


KEPT = [
    ("bert", ["bert.encoder.layer.0.attention.self.query"], {"0 query"}),
    ("bert", ["bert.encoder.layer.0.*"], {"0 query", "0 key", "0 value", "0 dense"}),
    ("bert", ["attention.output.dense"], {"0 dense", "1 dense"}),
    ("bert", ["q", "k"], {"0 query", "0 key", "1 query", "1 key"}),
    ("bert", ["re:layer\\.1.*(query|key)$"], {"1 query", "1 key"}),
    ("bert", ["re:^v$"], {"0 value", "1 value"}),
    ("bert", ["query", "*.1.*.key"], {"0 query", "1 query", "1 key"}),
    # The checkpoint's names of a ViT are not those of the model in memory: both count.
    ("vit", ["vit.encoder.layer.0.attention.attention.query"], {"0 query"}),
    ("vit", ["vit.layers.0.attention.q_proj"], {"0 query"}),
    ("gpt2", ["c_attn"], {"0 c_attn", "1 c_attn"}),
    ("gpt2", ["qkv"], {"0 c_attn", "1 c_attn"}),
    ("t5", ["EncDecAttention.k"], {"0 k", "1 k"}),
    ("t5", ["cross_k"], {"0 k", "1 k"}),
    ("mixtral", ["experts_down"], {"0 experts", "1 experts"}),
    ("mixtral", ["*.down_proj"], {"0 experts", "1 experts"}),
]


@pytest.mark.parametrize("family", ["bert", "vit", "mixtral"])
def test_names_in_plans_can_be_used_in_recipes(family: str, planned: Planned) -> None:
    """Those of layers that are planned, and of those that are left dense."""
    plan = planned(family)
    names = {layer.name for layer in plan.layers if layer.block == plan.layers[0].block}
    kept = planned(family, keep=sorted(names))
    assert {layer.name for layer in kept.layers} == {layer.name for layer in plan.layers} - names
    left = [item.name for item in kept.left if item.role]
    assert planned(family, keep=left).layers == kept.layers


@pytest.mark.parametrize(("family", "patterns", "wanted"), KEPT)
@pytest.mark.parametrize("way", ["keep", "layers"])
def test_patterns_choose_layers(
    family: str, patterns: list[str], wanted: set[str], way: str, planned: Planned
) -> None:
    whole = planned(family)
    rules = [{"match": pattern, "keep": True} for pattern in patterns]
    plan = planned(family, **{way: patterns if way == "keep" else rules})
    keys = {(layer.name, layer.parameter) for layer in plan.layers}
    gone = [item for item in whole.layers if (item.name, item.parameter) not in keys]
    assert {short_name(layer.name) for layer in gone} == wanted
    assert len(gone) == len(plan.left) - len(whole.left)
    left = [item for item in plan.left if item.reason == "kept dense by the recipe"]
    assert len(left) == len(gone)
    assert Counter(item.parameters for item in left) == Counter(e.dense_parameters for e in gone)
    assert {item.role for item in left} == {layer.role for layer in gone}


def _terms(layer: LayerPlan) -> list[str]:
    return [term.structure for term in layer.parts[0].terms]


def test_rules_change_method_rank_and_target(planned: Planned) -> None:
    rules = [
        {"match": "q", "method": SVD},
        {"match": "k", "residual_rank": 3},
        {"match": "v", "target": 0.5},
        {"match": "o", "keep": True},
    ]
    layers = by_role(planned("bert", layers=rules))
    assert _terms(layers["q"]) == ["lowrank"]
    assert layers["q"].parts[0].terms[0].rank == 4
    assert _terms(layers["k"]) == ["lprod", "lowrank"]
    assert layers["k"].parts[0].terms[1].rank == 3
    assert _terms(layers["v"]) == ["lprod", "lowrank"]
    assert 0.4 <= layers["v"].parameters / layers["v"].dense_parameters <= 0.5
    assert "o" not in layers
    assert _terms(layers["up"]) == ["lprod"]


def test_the_last_rule_wins_and_keep_is_stronger(planned: Planned) -> None:
    rules = [
        {"match": "*", "keep": True},
        {"match": "re:^(q|k)$", "method": SVD},
        {"match": "k", "method": {"name": "svd", "rank": 2}},
    ]
    layers = by_role(planned("bert", layers=rules))
    assert {role: layer.parts[0].terms[0].rank for role, layer in layers.items()} == {
        "q": 4,
        "k": 2,
    }
    assert by_role(planned("bert", keep=["q"], layers=rules)).keys() == {"k"}


@pytest.mark.parametrize("method", ["svd", "tt", "tucker"])
def test_the_smallest_target_that_is_named_can_be_met(method: str, planned: Planned) -> None:
    with pytest.raises(PlanError) as failed:
        planned("bert", method={"name": method}, target=0.002)
    words = (failed.value.hint or "").split()
    first, whole = float(words[0]), float(words[-3])
    assert 0 < len(planned("bert", method={"name": method}, target=first).layers) < 12
    assert len(planned("bert", method={"name": method}, target=whole).layers) == 12
    with pytest.raises(PlanError):
        planned("bert", method={"name": method}, target=first - 0.001)


@pytest.mark.parametrize(
    ("method", "note"),
    [
        ({"name": "tt", "order": 3, "rank": [4, 20]}, "4, 20 became 4, 8"),
        ({"name": "lprod", "p": 2, "tubal_rank": 99}, "rank of 99 became whole slices"),
        ({"name": "tucker", "share": "layers", "rank": 4, "cores": 99}, "99 became 2"),
    ],
)
def test_ranks_that_shapes_do_not_admit_are_told(
    method: dict[str, Any], note: str, planned: Planned
) -> None:
    warnings = planned("bert", method=method).warnings
    assert [text for text in warnings if note in text and "more than shapes admit in" in text]
    assert "shapes admit" not in "".join(planned("bert", method={"name": "tt", "rank": 4}).warnings)


@pytest.mark.parametrize(
    ("method", "notes"),
    [
        (
            {"name": "lprod", "transform": "dct", "block": 8, "stages": 3, "placement": "in"},
            ["`block` 8 does nothing: it needs `transform: fitted`, not `dct`", "`stages` 3 does"],
        ),
        ({"name": "lprod", "transform": "dft", "placement": "in"}, ["`dft` is always on both"]),
        ({"name": "lprod", "transform": "identity", "placement": "in"}, ["it needs a transform"]),
        ({"name": "lprod", "transform": "fitted", "placement": "both"}, ["always on one side"]),
        ({"name": "lprod", "transform": "fitted", "block": 8, "stages": 3, "placement": "in"}, []),
        (
            {"name": "tt", "rank": 4, "modes": {32: [4, 8], 48: [6, 8]}},
            ["`modes` 48=6x8 does nothing: it needs a width of 48, and there are 32, 64"],
        ),
        ({"name": "tt", "rank": 4, "chains": "heads"}, []),
    ],
)
def test_options_that_do_nothing_are_told_once(
    method: dict[str, Any], notes: list[str], planned: Planned
) -> None:
    told = [text for text in planned("bert", method=method).warnings if "does nothing" in text]
    assert len(told) == len(notes)
    assert all(note in text for note, text in zip(notes, told, strict=True))


def test_options_of_rules_and_tables_that_do_nothing_are_told(planned: Planned) -> None:
    rule = {"match": "up", "method": {"name": "lprod", "transform": "dct", "block": 8}}
    chains = {"name": "tt", "rank": 4, "chains": "heads"}
    table = {"method": {"name": "tt", "modes": {48: [6, 8]}}, "target": 0.5}
    data = {"source": "builtin", "probes": 2}  # of which fits of a rank measure no gradients
    changes = {"layers": [rule], "embeddings": table, "calibration": data}
    plan = planned("bert", method=chains, only=["up", "down"], **changes)
    told = [text.split(" does nothing")[0] for text in plan.warnings if "does nothing" in text]
    assert any("--output-moments" in text for text in plan.warnings)
    assert told == ["`probes`", "`block` 8", "`chains` heads", "`modes` 48=6x8"]


def test_layers_that_would_not_shrink_are_left(planned: Planned) -> None:
    plan = planned("bert", method={"name": "svd", "rank": 16})
    assert set(by_role(plan)) == {"up", "down"}
    assert len(plan.left) == 8
    assert {item.reason for item in plan.left} == {"it would not shrink: 100% of 1,024"}


PARTS = [
    ("gpt2", "qkv", {"q": 32, "k": 32, "v": 32}),
    ("phi3", "qkv", {"q": 32, "k": 16, "v": 16}),
    ("phi3", "gate_up", {"gate": 64, "up": 64}),
    ("mixtral", "experts_gate_up", {"gate": 64, "up": 64}),
    ("gpt_neox", "qkv", {"qkv": 96}),  # heads by heads: query, key and value alternate
    ("llama", "q", {"q": 32}),
]


@pytest.mark.parametrize(("family", "role", "wanted"), PARTS)
@pytest.mark.parametrize("option", OPTIONS)
def test_fused_layers_have_parts(
    family: str, role: str, wanted: dict[str, int], option: str, planned: Planned
) -> None:
    layer = by_role(planned(family, option))[role]
    assert {part.name: part.out_features for part in layer.parts} == wanted
    assert layer.out_features == sum(wanted.values())
    assert len({len(part.terms) for part in layer.parts}) == 1
    shapes = layer.tensor_shapes
    inputs = [name for name in shapes if name.startswith("tc_in")]
    assert len(inputs) == (option == "fitted")  # one for all parts
    if len(wanted) > 1:
        for name in wanted:
            assert any(key.startswith(f"tc_{name}_") for key in shapes)


def _unknown(folder: Path) -> SourceModel:
    """A model of a family without a table of roles."""
    tiny = TinyModel("SplinterConfig", "SplinterModel", TINY["bert"].options)
    tiny.build().save_pretrained(folder)
    return SourceModel.open(str(folder))


def test_an_unknown_family_is_scanned(tmp_path: Path) -> None:
    plan = make_plan(recipe("residual"), _unknown(tmp_path))
    assert len(plan.layers) == 12
    assert {layer.role for layer in plan.layers} == {"linear"}
    assert {layer.readers for layer in plan.layers} == {1}
    assert {layer.parts[0].terms[0].placement for layer in plan.layers} == {"both"}
    assert any("has no table of roles" in warning for warning in plan.warnings)
    with pytest.raises(PlanError, match="no layer matches `q`"):
        make_plan(recipe(keep=["q"]), _unknown(tmp_path / "again"))
    with pytest.raises(PlanError, match="it is not known with which layers it has channels"):
        make_plan(recipe(method={"name": "width"}, target=0.5), _unknown(tmp_path / "again"))


@pytest.mark.often("svd-True")
@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("option", ["dct", "svd"])
def test_an_unknown_family_is_converted(option: str, aware: bool, tmp_path: Path) -> None:
    source = _unknown(tmp_path / "dense")
    data = calibration("bert") if aware else None
    converted = convert(source, recipe(option, aware=aware), tmp_path / "small", data=data)
    dense = transformers.SplinterModel.from_pretrained(source.folder)
    assert_wired(Made("bert", dense, source.folder, converted))
    kinds = {kind for errors in converted.manifest.fit.values() for kind in errors}
    assert kinds == ({"calibration", "held_out"} if aware else {"weight"})


def test_a_refused_family_says_why(tmp_path: Path) -> None:
    config = transformers.SuperPointConfig(encoder_hidden_sizes=[8, 8, 8, 8])
    transformers.SuperPointForKeypointDetection(config).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="no layer of this `superpoint` model is supported"):
        make_plan(recipe(), SourceModel.open(str(tmp_path)))


@pytest.mark.parametrize(("source", "wanted"), [("none", "dct"), ("builtin", "fitted")])
def test_the_default_transform_depends_on_data(source: str, wanted: str, planned: Planned) -> None:
    plan = planned("bert", method={"name": "lprod"}, calibration={"source": source})
    assert {layer.parts[0].terms[0].transform for layer in plan.layers} == {wanted}


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("bert", {}, {"rewritten": 16384, "embeddings": 5312}),
        ("bert", {"keep": ["down"]}, {"rewritten": 12288, "embeddings": 5312}),
        ("bert", {"drop_layers": 1}, {"dropped": 8544, "rewritten": 8192, "embeddings": 5312}),
        (
            "bert",
            {"embeddings": {"method": {"name": "svd"}, "target": 0.5}},
            {"rewritten": 16384 + 3200, "embeddings": 2112},
        ),
        (
            "bert",
            {"method": None, "target": None, "attention": {"name": "multilinear", "length": 8}},
            {"rewritten": 0, "embeddings": 5312},
        ),
        ("mixtral", {"only": ["experts_*"]}, {"rewritten": 49152, "embeddings": 3200}),
    ],
)
def test_what_a_plan_covers(
    family: str, changes: dict[str, Any], parts: dict[str, int], planned: Planned
) -> None:
    plan = planned(family, "svd", **changes)
    own = plan.coverage
    assert _covered(plan) == plan.parameters
    assert {name: getattr(own, name) for name in parts} == parts
    assert own.replaced == sum(e.parameters for a in plan.attention for e in a.unused)
    # Nobody is warned of what he asked for.
    assert not [note for note in plan.warnings if "outside embeddings" in note]


def test_a_model_that_is_mostly_left_dense(tmp_path: Path) -> None:
    options = TINY["llama"].options | {"vocab_size": 3000}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).save_pretrained(tmp_path)
    plan = make_plan(recipe("svd"), SourceModel.open(str(tmp_path)))
    assert plan.warnings == (
        "only 16% of the parameters outside embeddings can be rewritten; the largest part that "
        "stays dense is `lm_head` (96,000 parameters), outside the blocks",
    )


def test_layers_that_are_refused_have_their_parameters(
    sources: Callable[[str], SourceModel], planned: Planned
) -> None:
    """Routers, and experts where a family is not known."""
    model = sources("mixtral").meta_model()
    left = planned("mixtral", "svd").left
    assert {item.parameters for item in left} == {4 * 32}
    experts = next(m for n, m in model.named_modules() if n.endswith("experts"))
    name = next(n for n, m in model.named_modules() if m is experts)
    held = sum(item.numel() for item in experts.parameters())
    assert _matrices(model, name) == held == _matrices(model, f"{name}.gate_up_proj") * 3 // 2


# Plans of layers that read one input, and of budgets


FITTED = {"name": "lprod", "p": 4, "transform": "fitted", "block": 4}
SIZES = {
    "hidden_size", "intermediate_size", "d_model", "d_kv", "d_ff", "dim", "hidden_dim", "n_embd",
    "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
}  # fmt: skip


def _wide(tiny: TinyModel, factor: int) -> TinyModel:
    def scaled(options: Any) -> dict[str, Any]:
        return {
            key: scaled(value)
            if isinstance(value, dict)
            else value * factor
            if key in SIZES
            else value
            for key, value in options.items()
        }

    return dataclasses.replace(tiny, options=scaled(tiny.options))


BUDGETS = [
    ({"name": "svd"}, 0.25),
    ({"name": "svd"}, 0.6),
    ({"name": "lprod", "p": 4, "transform": "dct"}, 0.4),
    ({"name": "lprod", "p": 8, "transform": "fitted"}, 0.3),
    ({"name": "lprod", "p": 4, "transform": "dft", "tubal_rank": None}, 0.5),
]


@pytest.mark.often("tcompress_text", "llama", "bert", "t5")
@pytest.mark.parametrize("family", TINY)
def test_targets_are_kept_and_filled(family: str, tmp_path: Path) -> None:
    _wide(TINY[family], 4).build().save_pretrained(tmp_path)
    source = SourceModel.open(str(tmp_path))
    for method, target in BUDGETS:
        plan = make_plan(recipe(method=method, target=target), source)
        assert {item.reason for item in plan.left if item.role} == set()
        assert 0.9 * target <= plan.kept <= target, (method, target)


@pytest.mark.often("changes3-method2")
@pytest.mark.parametrize("method", [FITTED, {"name": "lprod", "p": 4}, {"name": "svd"}])
@pytest.mark.parametrize(
    "changes",
    [
        {"keep": ["k", "v"]},
        {"layers": [{"match": "q", "method": SVD}]},
        {"layers": [{"match": "q", "target": 0.5}]},
        {"layers": [{"match": "v", "keep": True}]},
    ],
)
def test_targets_are_kept_where_not_all_layers_share_an_input(
    changes: dict[str, Any], method: dict[str, Any], tmp_path: Path
) -> None:
    """Those that do pay for its transform alone."""
    _wide(TINY["bert"], 2).build().save_pretrained(tmp_path)
    plan = make_plan(recipe(method=method, target=0.4, **changes), SourceModel.open(str(tmp_path)))
    ruled = {"q"} if "layers" in changes else set()
    for block in {layer.block for layer in plan.layers}:
        group = [e for e in plan.layers if e.block == block and e.role in {"q", "k", "v"} - ruled]
        kept = sum(e.parameters for e in group) / sum(e.dense_parameters for e in group)
        assert kept <= 0.4


def _shares(plan: Plan, block: str | None = None) -> dict[str, tuple[int, str | None]]:
    """Readers and owner of every layer's input in a block, by default the first."""
    return {
        layer.role: (layer.readers, layer.input_of and short_name(layer.input_of))
        for layer in plan.layers
        if layer.block == (block or plan.layers[0].block)
    }


@pytest.mark.parametrize("option", ["dct", "fitted"])
def test_layers_that_read_one_input_share_its_transform(option: str, planned: Planned) -> None:
    assert _shares(planned("llama", option)) == {
        "q": (3, None),
        "k": (1, "0 q_proj"),
        "v": (1, "0 q_proj"),
        "o": (1, None),
        "gate": (2, None),
        "up": (1, "0 gate_proj"),
        "down": (1, None),
    }


def test_cross_attention_shares_the_encoders_states(planned: Planned) -> None:
    shares = _shares(planned("bart"), "model.decoder.layers.0")
    assert shares["q"] == (3, None)
    assert shares["cross_q"] == (1, None)
    assert {shares["cross_k"], shares["cross_v"]} in (
        {(2, None), (1, "0 k_proj")},
        {(2, None), (1, "0 v_proj")},
    )


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("option", ["dct", "fitted", "residual"])
def test_owners_of_inputs_come_first_and_count_their_readers(
    family: str, option: str, planned: Planned
) -> None:
    seen: dict[str, LayerPlan] = {}
    readers: Counter[str] = Counter()
    for layer in planned(family, option).layers:
        if layer.input_of is not None:
            owner = seen[layer.input_of]
            assert owner.input_of is None
            assert (owner.block, owner.in_features) == (layer.block, layer.in_features)
            readers[layer.input_of] += 1
        if layer.parameter == "weight":
            seen[layer.name] = layer
    assert all(layer.readers == 1 + readers[name] for name, layer in seen.items())


MIXED = [
    ({"layers": [{"match": "q", "method": SVD}]}, {"q": (1, None), "k": (2, None), "v": "k"}),
    ({"layers": [{"match": "k", "method": SVD}]}, {"q": (2, None), "k": (1, None), "v": "q"}),
    ({"layers": [{"match": "q", "keep": True}]}, {"k": (2, None), "v": "k"}),
    (
        {"layers": [{"match": "v", "method": {**FITTED, "block": 8}}]},
        {"q": (2, None), "k": "q", "v": (1, None)},
    ),
    ({"layers": [{"match": "k", "residual_rank": 2}]}, {"q": (3, None), "k": "q", "v": "q"}),
    ({"layers": [{"match": "q", "residual_rank": 2}]}, {"q": (3, None), "k": "q", "v": "q"}),
    (
        {"layers": [{"match": "k", "method": {**FITTED, "placement": "out"}}]},
        {"q": (2, None), "k": (1, None), "v": "q"},
    ),
]


@pytest.mark.parametrize(("changes", "wanted"), MIXED)
def test_plans_share_inputs_among_equals_only(
    changes: dict[str, Any], wanted: dict[str, Any], planned: Planned
) -> None:
    plan = planned("llama", method=FITTED, **changes)
    owners = {role: (1, f"0 {x}_proj") for role, x in wanted.items() if isinstance(x, str)}
    found = {role: share for role, share in _shares(plan).items() if role in ("q", "k", "v")}
    assert found == {**wanted, **owners}


@pytest.mark.often("changes0")
@pytest.mark.parametrize("changes", [case for case, _ in MIXED])
def test_inputs_are_shared_as_planned(changes: dict[str, Any], tmp_path: Path) -> None:
    made = make("llama", tmp_path, aware=True, method=FITTED, **changes)
    assert_wired(made)
