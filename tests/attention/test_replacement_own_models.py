"""Mechanisms inside hosts: planned, converted, saved and loaded, in all kinds of families."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tcompress.artifact.reader import Artifact
from tcompress.attention.module import CHILD, GuardedLinear, ReplacementModule, UnusedProjection
from tcompress.conversion.converter import convert
from tcompress.errors import ArtifactError, InputError, PlanError
from tcompress.exports.dense import export_dense
from tcompress.models import SourceModel
from tcompress.planning.planner import make_plan
from tests.support.conversions import calibration, outputs
from tests.support.copied_tree import ROOT, in_tree
from tests.support.model_folders import edited
from tests.support.own_models import (
    FAMILIES,
    REASONS,
    REPLACEMENTS,
    Hosted,
    Workshop,
    recipe_for,
)

PAIRS = [
    (family, name) for family in FAMILIES for name in REPLACEMENTS if (family, name) not in REASONS
]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("shop"))


@pytest.mark.often(
    "tcompress_text-memory",
    "bert-tga",
    "bert-tsa",
    "vit-hot",
    "vit-favor",
    "gpt2-tga",
    "tcompress_text-folded",
    "tcompress_text-tucker",
    "tcompress_text-multilinear",
)
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_what_is_saved_loads_and_computes_the_same(
    family: str, name: str, shop: Workshop, tmp_path: Path
) -> None:
    made: Hosted = shop.hosted(family, name)
    model, info = made.load()
    assert not any(info.values())
    own = [module for module in model.modules() if isinstance(module, ReplacementModule)]
    assert len(own) == len(made.plan.attention) >= 1
    inputs = FAMILIES[family].inputs(batch=2, length=8, seed=1)
    first = outputs(model, inputs)[0]
    assert torch.isfinite(first).all()
    again = tmp_path / "again"
    model.save_pretrained(again)
    other = type(model).from_pretrained(again).eval()
    assert torch.equal(outputs(other, inputs)[0], first)
    stored = made.plan.attention[0].tensor_shapes
    assert {key: tuple(Artifact.open(again).store.shape(key)) for key in stored} == stored
    dense = shop.source(family)
    before = outputs(type(model).from_pretrained(dense).eval(), inputs)[0]
    exact = name in ("tam", "memory")  # begins as the host's own attention
    assert torch.allclose(first, before, atol=1e-4) == exact


@pytest.mark.parametrize(("family", "name"), REASONS)
def test_what_cannot_work_is_refused_by_layer(family: str, name: str, shop: Workshop) -> None:
    source = SourceModel.open(str(shop.source(family)))
    with pytest.raises(PlanError, match=REASONS[family, name]) as error:
        make_plan(recipe_for(name), source)
    first = source.keymap.model
    assert any(f"`{path}`" in error.value.message for path, _ in first.named_modules())


@pytest.mark.often("tam")
@pytest.mark.parametrize("name", [name for name in REPLACEMENTS if ("bert", name) not in REASONS])
def test_padding_changes_nothing_in_a_model(name: str, shop: Workshop) -> None:
    """With numbers as training leaves them: at first some mechanisms are the host's attention."""
    model, _ = shop.hosted("bert", name).load()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            if f".{CHILD}." in path:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
    inputs = FAMILIES["bert"].inputs(batch=2, length=12, seed=3)
    together = outputs(model, inputs)[0]
    for index, length in enumerate((12, 9)):
        assert int(inputs["attention_mask"][index].sum()) == length
        alone = {key: value[index : index + 1, :length] for key, value in inputs.items()}
        torch.testing.assert_close(
            outputs(model, alone)[0][0], together[index, :length], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_masks_of_both_implementations_mean_the_same(
    family: str, implementation: str, shop: Workshop
) -> None:
    made = shop.hosted(family, "tga")
    inputs = FAMILIES[family].inputs(batch=2, length=8, seed=1)
    right = outputs(made.load()[0], inputs)[0]
    chosen, _ = made.load(attn_implementation=implementation)
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(outputs(chosen, inputs)[0][valid], right[valid])
    chosen.set_attn_implementation("eager" if implementation == "sdpa" else "sdpa")
    torch.testing.assert_close(outputs(chosen, inputs)[0][valid], right[valid])


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "tga"), ("gpt2", "tsa"), ("gpt_neox", "tga"), ("opt", "tsa")]
)
def test_decoders_never_look_ahead(family: str, name: str, shop: Workshop) -> None:
    model, _ = shop.hosted(family, name).load()
    ids = FAMILIES[family].inputs(batch=1, length=8, seed=1)["input_ids"]
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 90 + 4
    before, after = outputs(model, {"input_ids": ids})[0], outputs(model, {"input_ids": other})[0]
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize(
    ("name", "cache", "batch"),
    [("tga", None, 1), ("tga", "static", 2), ("tsa", None, 2), ("tsa", "static", 1)],
)
def test_generating_with_a_cache_gives_the_same(
    name: str, cache: str | None, batch: int, shop: Workshop
) -> None:
    """One prompt without padding has no mask at all; two are padded on the left."""
    model, _ = shop.hosted("llama", name).load()
    inputs = FAMILIES["llama"].inputs(batch=batch, length=8, seed=1)
    inputs = {key: value.flip(1) for key, value in inputs.items()}
    inputs = inputs if batch > 1 else {"input_ids": inputs["input_ids"]}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **options, use_cache=False)  # type: ignore[operator]
    kept = model.generate(**inputs, **options, cache_implementation=cache)  # type: ignore[operator]
    assert torch.equal(plain, kept)


@pytest.mark.slow
def test_a_pickled_model_runs_in_another_process(shop: Workshop, tmp_path: Path) -> None:
    model, _ = shop.hosted("bert", "tga").load()
    inputs = FAMILIES["bert"].inputs(batch=2, length=8, seed=1)
    torch.save((model, inputs, outputs(model, inputs)[0]), tmp_path / "whole.pt")
    code = (
        "import sys, torch, tcompress\n"
        "model, inputs, wanted = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.allclose(model(**inputs).logits, wanted, atol=1e-6)\n"
    )
    in_tree(ROOT, "-c", code, tmp_path / "whole.pt")


def test_training_after_a_pass_in_inference_mode(shop: Workshop) -> None:
    model, _ = shop.hosted("vit", "favor").load()
    inputs = FAMILIES["vit"].inputs(batch=2, length=8, seed=1)
    with torch.inference_mode():
        model(**inputs)
    model.train()(**inputs).logits.sum().backward()


def test_copies_for_several_devices_are_refused(shop: Workshop) -> None:
    model, _ = shop.hosted("bert", "tga").load()
    with pytest.raises(InputError, match="start one process for each device"):
        model.get_submodule(
            "bert.encoder.layer.0.attention.self." + CHILD
        )._replicate_for_data_parallel()


def test_other_heads_find_the_mechanisms(shop: Workshop, tmp_path: Path) -> None:
    made = shop.hosted("bert", "tga")
    inputs = FAMILIES["bert"].inputs(batch=2, length=8, seed=1)
    states = made.load()[0].bert(**inputs).last_hidden_state
    base = transformers.AutoModel.from_pretrained(made.folder).eval()
    torch.testing.assert_close(base(**inputs).last_hidden_state, states)
    folder = tmp_path / "base"
    base.save_pretrained(folder)
    head = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    torch.testing.assert_close(head.bert(**inputs).last_hidden_state, states)


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [False, True])
def test_plain_transformers_stops(guarded: bool, shop: Workshop, tmp_path: Path) -> None:
    """The last line of the failure names the cure; what others saved again has a guard at least."""
    code = (
        "import sys, transformers\n"
        "for folder in sys.argv[1:]:\n"
        "    try: transformers.AutoModelForMaskedLM.from_pretrained(folder)\n"
        "    except (ValueError, RuntimeError) as error: print(str(error).splitlines()[-1])"
    )
    folders = [shop.hosted("bert", name).folder for name in ("tga", "tam")]
    if guarded:
        for index, folder in enumerate(folders):
            model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
            folders[index] = tmp_path / str(index)
            model.save_pretrained(folders[index])
    ended = in_tree(ROOT, "-c", code, *folders)
    cure = "ignore_mismatched_sizes" if guarded else "then `import tcompress` before loading it"
    assert [cure in line for line in ended.splitlines()] == [True, True], ended


def test_one_guard_is_enough_and_none_is_needed_beside_layers(shop: Workshop) -> None:
    made = shop.hosted("vit", "hot")
    guards = [entry.guard is not None for entry in made.plan.attention]
    assert guards == [True, False]
    kinds = [type(module) for module in made.load()[0].modules()]
    assert kinds.count(GuardedLinear) == 1
    source = SourceModel.open(str(shop.source("vit")))
    both = make_plan(recipe_for("hot", method={"name": "lprod", "p": 4}), source)
    assert not any(entry.guard for entry in both.attention)
    model, _ = shop.hosted("vit", "tga").load()
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(UnusedProjection), kinds.count(GuardedLinear)) == (2, 0)


def test_both_axes_combine_and_layers_make_up_for_the_mechanism(
    tmp_path: Path, shop: Workshop
) -> None:
    folder = shop.source("vit")
    recipe = recipe_for("hot", method={"name": "svd", "rank": 8})
    data = calibration("vit", 16)
    errors = {}
    for aware in (False, True):
        source = {"source": "builtin" if aware else "none"}
        own = recipe.model_copy(update={"calibration": recipe.calibration.model_validate(source)})
        done = convert(str(folder), own, tmp_path / str(aware), data=data if aware else None)
        model = transformers.AutoModelForImageClassification.from_pretrained(done.folder).eval()
        dense = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        inputs = FAMILIES["vit"].inputs(batch=16, length=0, seed=9)
        states = [m(**inputs, output_hidden_states=True).hidden_states[-1] for m in (model, dense)]
        errors[aware] = float(((states[0] - states[1]).norm() / states[1].norm()).detach())
        roles = [entry.role for entry in done.manifest.plan.layers[:6]]
        assert roles == ["q", "k", "v", "o", "up", "down"]
    assert errors[True] < 0.9 * errors[False]


@pytest.mark.often("alone")
@pytest.mark.parametrize("layers", [False, True], ids=["alone", "with-svd"])
def test_a_small_core_keeps_the_scores_that_matter(
    layers: bool, shop: Workshop, tmp_path: Path
) -> None:
    """Of the same rank, factors from data lose less of held-out scores than those from weights."""
    folder = shop.source("bert")
    data = calibration("bert", 12)
    dense = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval().bert
    own = dense.encoder.layer[0].attention.self
    inputs = FAMILIES["bert"].inputs(batch=8, length=12, seed=9)
    with torch.no_grad():
        states = dense.embeddings(inputs["input_ids"])
        q, k = (part(states).unflatten(-1, (4, 8)).transpose(1, 2) for part in (own.query, own.key))
    valid = inputs["attention_mask"].bool()
    pairs = valid[:, None, :, None] & valid[:, None, None, :]

    def lost(left: Tensor, right: Tensor) -> float:
        scores = (q @ k.mT - q @ left @ right.mT @ k.mT) * pairs
        mean = scores.sum(-1, keepdim=True) / pairs.sum(-1, keepdim=True).clamp(1)
        return float(((scores - mean) * pairs).norm())  # softmax does not see what keys share

    errors = [lost(torch.eye(8, 4), torch.eye(8, 4))]
    extra = {"method": {"name": "svd", "rank": 8}} if layers else {}
    for source, given in (("none", None), ("builtin", data)):
        recipe = recipe_for("tucker", calibration={"source": source}, **extra)
        done = convert(str(folder), recipe, tmp_path / source, data=given)
        prefix = f"{done.manifest.plan.attention[0].name}.{CHILD}."
        store = Artifact.open(done.folder).store
        core = 8 * store.tensor(f"{prefix}core").mean(0)[..., 0]  # of the first semantics
        left, right = (store.tensor(f"{prefix}factor_{side}") for side in "qk")
        errors.append(lost(left @ core, right))
    assert errors[2] < errors[1] < errors[0]


def test_dropped_queries_count_as_saved(shop: Workshop) -> None:
    made = shop.hosted("bert", "tga")
    model, _ = made.load()
    now = sum(parameter.numel() for parameter in model.parameters())
    assert made.plan.parameters - made.plan.saved == now
    assert made.plan.saved == 2 * (32 * 32 + 32 - 4)


@pytest.mark.parametrize("share", ["heads", "model"])
def test_banks_are_of_the_layers_that_stay(share: str, shop: Workshop, tmp_path: Path) -> None:
    method = {"name": "tucker", "share": share}
    recipe = recipe_for("tga", method=method, target=0.4, calibration={"source": "none"})
    made = convert(str(shop.source("bert")), recipe, tmp_path / "made")
    assert not any(entry.role == "q" for entry in made.manifest.plan.layers)
    model = transformers.AutoModelForMaskedLM.from_pretrained(made.folder)
    now = sum(parameter.numel() for parameter in model.parameters())
    assert made.manifest.plan.parameters - made.manifest.plan.saved == now


def test_only_some_blocks_are_exchanged(shop: Workshop) -> None:
    source = SourceModel.open(str(shop.source("bert")))
    plan = make_plan(recipe_for("tga", attention_layers=(1,)), source)
    assert [entry.name for entry in plan.attention] == ["bert.encoder.layer.1.attention.self"]
    cut = make_plan(recipe_for("tga", attention_layers=(1,), keep_layers=(1,)), source)
    assert [entry.block for entry in cut.attention] == ["bert.encoder.layer.0"]


def test_encoders_are_exchanged_where_decoders_refuse(shop: Workshop) -> None:
    plan = shop.hosted("bart", "tam").plan
    assert all(".encoder." in entry.name for entry in plan.attention)
    reasons = {item.name: item.reason for item in plan.left if item.role == "attention"}
    assert set(reasons.values()) == {"`tam` would look ahead, and this attention is causal"}
    assert len(reasons) == 2


def test_damage_is_named(shop: Workshop, tmp_path: Path) -> None:
    convert(str(shop.source("bert")), recipe_for("tga"), tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    with edited(config) as data:
        assert data["quantization_config"]["format_version"] == 2
        data["quantization_config"]["plan"]["attention"][0]["layout"]["heads"] = 2
    with pytest.raises(ArtifactError, match=r"layer.0.attention.self` differs in `layout`"):
        transformers.AutoModel.from_pretrained(tmp_path / "out")
    with edited(config) as data:
        data["quantization_config"]["plan"]["attention"][0]["layout"]["mechanism"] = "graf"
    with pytest.raises(ArtifactError, match=r"damaged at attention `bert.encoder.layer.0"):
        Artifact.open(tmp_path / "out")


def test_mechanisms_cannot_be_multiplied_out(tmp_path: Path, shop: Workshop) -> None:
    made = shop.hosted("vit", "hot")
    with pytest.raises(InputError, match="by `kronecker` attention, which no plain model does"):
        export_dense(made.folder, tmp_path / "dense")
