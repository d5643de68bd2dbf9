"""Models with fewer blocks: what is written is what is left of the dense model."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import tcompress
from tcompress.conversion.converter import Converted, convert
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.schema import short_name
from tcompress.planning.depth import plan_depth, spread, stacks_of
from tcompress.planning.entries import StackPlan
from tcompress.planning.planner import make_plan
from tcompress.progress import Silent
from tcompress.reporting.model_report import report_of
from tcompress.roles.find import find_roles
from tcompress.search.depth_search import DepthWalk, choose_blocks
from tests.support.conversions import (
    assert_same_without_a_cache,
    calibration,
    densified,
    distance,
    first_outputs,
    load_whole,
    outputs,
    structured,
)
from tests.support.depth import deep, divergence, drawn, idle_llama, stacks, without
from tests.support.interrupted import contents, convert_until_killed
from tests.support.tiny import IMAGE, TINY, VOCAB, TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")
SVD: dict[str, Any] = {"method": {"name": "svd"}, "target": 0.5}
AWARE: dict[str, Any] = {"calibration": {"source": "builtin"}, **SVD}
NONE: dict[str, Any] = {"calibration": {"source": "none"}}


# Of ModernBERT and of a DeBERTa with a convolution the first block has to stay.
KEPT = {"modernbert": (0, 2)}
USUAL = ("bert", "gpt2", "gemma3", "qwen3_moe", "t5", "bart", "clip", "vit", "modernbert")


def _saved(tiny: TinyModel, folder: Path) -> tuple[Any, SourceModel]:
    model: Any = tiny.build()
    model.save_pretrained(folder)
    return model, SourceModel.open(str(folder))


def _recipe(**changes: Any) -> Convert:
    return Convert.model_validate({**NONE, **changes})


def _asked(source: SourceModel, path: str, kept: tuple[int, ...]) -> Any:
    """What a recipe says to keep these blocks of one stack."""
    names = {stack.path: stack.name for stack in _stacks(source)}
    return kept if len(names) == 1 else {names[path]: list(kept)}


def _stacks(source: SourceModel) -> tuple[StackPlan, ...]:
    return stacks_of(find_roles(source.meta_model()))


def _assert_left(
    tiny: TinyModel, folder: Path, kept: tuple[int, ...] = (1, 3), **changes: Any
) -> None:
    dense, source = _saved(tiny, folder / "dense")
    data = drawn(tiny) if "calibration" in changes else None
    for path in stacks(dense):
        asked = _asked(source, path, kept)
        output = folder / f"small-{path}"
        done = convert(source, _recipe(keep_layers=asked, **changes), output, data=data)
        cut = without(dense, path, kept)
        model = load_whole(type(dense), output)
        assert len(structured(model)) == len(done.manifest.plan.layers)
        assert bool(structured(model)) is ("method" in changes)
        model.config.use_cache = False
        inputs = tiny.inputs(2, 8, 50)
        expected = outputs(densified(model, cut), inputs)
        assert distance(outputs(model, inputs), expected) <= (1e-4 if structured(model) else 0)
        depth = done.manifest.plan.depth
        assert {item.path: item.kept for item in depth.stacks}[path] == kept


@pytest.mark.often("modernbert", "gpt2")
@pytest.mark.parametrize("family", USUAL)
def test_what_is_left_computes_as_before(family: str, tmp_path: Path) -> None:
    _assert_left(deep(family), tmp_path, KEPT.get(family, (1, 3)))


def test_kinds_of_blocks_go_with_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "bos_token_id": 1}
    kinds = {"attention_types": [[["global", "local"], 2]], "window_size": 4, "eos_token_id": 2}
    options = {**sizes, **kinds, "vocab_size": VOCAB, "max_position_embeddings": 64}
    tiny = TinyModel("GPTNeoConfig", "GPTNeoForCausalLM", options)
    _assert_left(tiny, tmp_path, (0, 1, 2))


def test_stages_of_a_backbone_go_with_blocks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    options = {**sizes, "image_size": IMAGE, "patch_size": 4, "out_indices": [1, 2, 4]}
    tiny = TinyModel("Dinov2Config", "Dinov2ForImageClassification", options, ("image",))
    _assert_left(tiny, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "small-dinov2.encoder.layer")
    assert config.out_indices == [0, 1, 2]
    assert config.out_features == ["stem", "stage1", "stage2"]


@pytest.mark.grid
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("aware", [False, True])
def test_with_a_structure(family: str, aware: bool, tmp_path: Path) -> None:
    changes = AWARE if aware else SVD
    _assert_left(deep(family), tmp_path, KEPT.get(family, (1, 3)), **changes)


def test_a_model_without_structures_is_plain(tmp_path: Path) -> None:
    _, source = _saved(deep("bert"), tmp_path / "dense")
    done = convert(source, _recipe(keep_layers=[0, 2]), tmp_path / "out")
    config = json.loads((done.folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["num_hidden_layers"] == 2
    assert AutoModel.from_pretrained(done.folder).config.num_hidden_layers == 2
    card = (done.folder / "README.md").read_text()
    assert "4 -> 2 blocks, from 0: 0, 2" in card
    assert "import tcompress" not in card
    manifest = done.manifest
    assert manifest.calibration.name == "none"  # nothing was to be fitted, so nothing was read
    assert manifest.plan.method == "depth"
    assert manifest.plan.saved == manifest.plan.block_parameters // 2


def test_fits_aim_at_the_whole_model(tmp_path: Path) -> None:
    """Outputs of the dense block, from what the blocks before it leave of its input."""
    tiny = deep("llama")
    dense, source = _saved(tiny, tmp_path / "dense")
    recipe = _recipe(keep_layers=[1, 3], allocation="uniform", **AWARE)
    data = drawn(tiny)
    done = convert(source, recipe, tmp_path / "out", data=data)
    small: Any = AutoModelForCausalLM.from_pretrained(done.folder)
    for name, now, was in (("self_attn.q_proj", 0, 1), ("mlp.up_proj", 1, 3)):
        wanted, made = (
            torch.cat(
                [_output(model, f"model.layers.{index}.{name}", item) for item in data.batches[:2]]
            )
            for model, index in ((dense, was), (small, now))
        )
        error = float((wanted - made).square().sum() / wanted.square().sum())
        fit = done.manifest.fit[f"model.layers.{now}.{name}.weight"]
        assert fit["calibration"] == pytest.approx(error, rel=1e-3)


def _output(model: nn.Module, name: str, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Outputs of a layer for tokens that are not padding."""
    return first_outputs(model, [name], batch)[name][batch["attention_mask"].flatten().bool()]


@pytest.mark.slow
def test_what_is_left_makes_up_for_what_is_gone(tmp_path: Path) -> None:
    """Fitted to the whole model, outputs are nearer to its own than fitted to the cut one."""
    tiny = deep("llama")
    dense, source = _saved(tiny, tmp_path / "dense")
    cut: Any = without(dense, "model.layers", (0, 3))
    cut.config.num_hidden_layers = 2
    cut.save_pretrained(tmp_path / "cut")
    data = drawn(tiny, 9)
    whole = convert(source, _recipe(keep_layers=[0, 3], **AWARE), tmp_path / "one", data=data)
    alone = convert(str(tmp_path / "cut"), _recipe(**AWARE), tmp_path / "two", data=data)
    moved = [
        divergence(dense, AutoModelForCausalLM.from_pretrained(done.folder), data.batches[8:])
        for done in (whole, alone)
    ]
    assert moved[0] < moved[1]


def test_generation_with_a_cache(tmp_path: Path) -> None:
    _, source = _saved(deep("llama"), tmp_path / "dense")
    done = convert(source, _recipe(keep_layers=[0, 3], **SVD), tmp_path / "out")
    ids = TINY["llama"].inputs(1, 8, 3)["input_ids"]
    assert_same_without_a_cache(AutoModelForCausalLM.from_pretrained(done.folder), ids, 8)


# Choosing
def _block_losses(source: Any, data: Any, gone: Any = frozenset()) -> tuple[Any, ...]:
    roles = find_roles(source.meta_model())
    left = [block.name for block in roles.blocks if block.name not in gone]
    return tuple(DepthWalk(source, data, torch.device("cpu")).losses(left, gone))


def test_losses_are_those_of_models_without_the_block(tmp_path: Path) -> None:
    tiny = deep("bert", 3)
    dense, source = _saved(tiny, tmp_path)
    data = drawn(tiny)
    found = _block_losses(source, data)
    assert [item.path for item in found] == [f"bert.encoder.layer.{index}" for index in range(3)]
    for index, item in enumerate(found):
        kept = [other for other in range(3) if other != index]
        cut = without(dense, "bert.encoder.layer", kept)
        assert item.loss == pytest.approx(divergence(dense, cut, data.batches[:2]), rel=1e-4)
        block = dense.get_submodule(item.path)
        assert item.parameters == sum(part.numel() for part in block.parameters())
    gone = frozenset({found[0].path})
    after = _block_losses(source, data, gone)
    cut = without(dense, "bert.encoder.layer", (2,))
    assert [item.path for item in after] == [item.path for item in found[1:]]
    assert after[0].loss == pytest.approx(divergence(dense, cut, data.batches[:2]), rel=1e-4)


def test_memory_and_samples_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither how many run together, nor that few samples stand for all, moves what is lost."""
    tiny = deep("bert", 3)
    _, source = _saved(tiny, tmp_path)
    together = _block_losses(source, drawn(tiny))
    with monkeypatch.context() as patch:
        patch.setattr("tcompress.search.depth_search.MOST_BYTES", 1)
        assert _block_losses(source, drawn(tiny)) == together
    monkeypatch.setattr("tcompress.search.depth_search.SAMPLES", 4)
    half = _block_losses(source, drawn(tiny))
    one = _block_losses(source, replace(drawn(tiny), holdout=[0, 2]))
    assert [item.loss for item in half] == pytest.approx([2 * item.loss for item in one])


def test_blocks_without_effect_go_first(tmp_path: Path) -> None:
    tiny, dense = deep("llama", 5), idle_llama(tmp_path / "dense")
    recipe = _recipe(drop_layers=2, calibration={"source": "builtin"})
    done = convert(str(tmp_path / "dense"), recipe, tmp_path / "out", data=drawn(tiny))
    depth = done.manifest.plan.depth
    assert (depth.chosen, depth.stacks[0].kept) == ("measured", (0, 2, 4))
    assert [item.loss for item in depth.dropped] == pytest.approx([0, 0], abs=1e-6)
    assert done.manifest.calibration.name == "tiny"
    model = AutoModelForCausalLM.from_pretrained(done.folder)
    inputs = tiny.inputs(2, 8, 50)
    assert distance(outputs(model, inputs), outputs(dense, inputs)) <= 1e-5


def test_two_blocks_that_replace_each_other_do_not_both_go(tmp_path: Path) -> None:
    """Alone each of them changes little; what is chosen second is judged without the first."""
    tiny = deep("llama", 4)
    _, source = _saved(tiny, tmp_path)
    recipe = _recipe(drop_layers=2, calibration={"source": "builtin"})
    depth = plan_depth(recipe, source)
    chosen = choose_blocks(source, depth, drawn(tiny), torch.device("cpu"), Silent()).dropped
    first = _block_losses(source, drawn(tiny))
    assert chosen[0] == min(first, key=lambda item: item.loss)
    gone = frozenset({chosen[0].path})
    second = _block_losses(source, drawn(tiny), gone)
    assert chosen[1] == min(second, key=lambda item: item.loss)


@pytest.mark.often("clip")
@pytest.mark.parametrize("family", ["t5", "whisper", "clip", "vit", "modernbert"])
def test_stacks_of_other_models(family: str, tmp_path: Path) -> None:
    """Position biases of a first block, blocks that must stay, pictures and sounds."""
    tiny = deep(family, 3)
    dense, source = _saved(tiny, tmp_path / "dense")
    names = [stack.name for stack in _stacks(source)]
    asked: Any = 1 if len(names) == 1 else dict.fromkeys(names, 1)
    recipe = _recipe(drop_layers=asked, calibration={"source": "builtin"})
    done = convert(source, recipe, tmp_path / "out", data=drawn(tiny))
    depth = done.manifest.plan.depth
    assert [len(stack.kept) for stack in depth.stacks] == [2] * len(names)
    cut = dense
    for stack in depth.stacks:
        cut = without(cut, stack.path, stack.kept)
    model = type(dense).from_pretrained(done.folder)  # type: ignore[attr-defined]
    model.config.use_cache = False
    inputs = tiny.inputs(2, 8, 50)
    assert distance(outputs(model, inputs), outputs(cut, inputs)) == 0


def test_without_data_blocks_are_spread(tmp_path: Path) -> None:
    assert spread(6, 3, first=False) == (1, 3, 5)
    assert spread(12, 1) == (11,)
    assert spread(12, 6) == (0, 2, 4, 6, 8, 11)
    _, source = _saved(deep("modernbert"), tmp_path)
    plan = make_plan(_recipe(drop_layers=2), source)
    assert (plan.depth.chosen, plan.depth.stacks[0].kept) == ("spread", (0, 3))


# Going on after a kill
RESUMED = {
    "one": _recipe(drop_layers=1, max_shard_size="20KB", **AWARE),
    "weighed": _recipe(drop_layers="auto", **AWARE),
}
STATE = "tcompress.fitting.workdir.FitWorkplace"
MOMENTS: tuple[tuple[str, tuple[str, int] | str], ...] = (
    ("one", ("choosing blocks", 1)),
    ("one", f"{STATE}.keep_depth"),
    ("one", ("fitting blocks", 2)),
    ("one", ("writing", 20)),
    ("weighed", ("fitting blocks", 3)),
    ("weighed", f"{STATE}.keep_distance"),
    ("weighed", f"{STATE}.adopt"),
    ("weighed", f"{STATE}.keep_depth"),
    ("weighed", ("writing", 20)),
)


@pytest.fixture(scope="module")
def whole(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Converted]:
    """Conversions that nothing interrupts, each made once."""
    source, data, root = str(tiny("bert")), calibration("bert"), tmp_path_factory.mktemp("whole")
    return cache(lambda name: convert(source, RESUMED[name], root / name, data=data))


@pytest.mark.often("one-moment3", "weighed-tcompress.fitting.workdir.FitWorkplace.adopt")
@pytest.mark.parametrize(("name", "moment"), MOMENTS)
def test_killed_and_run_again(
    name: str,
    moment: tuple[str, int] | str,
    tiny: Callable[[str], Path],
    whole: Callable[[str], Converted],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, output, recipe = tiny("bert"), tmp_path / "out", RESUMED[name]
    convert_until_killed(source, recipe, output, "bert", moment)
    assert not output.exists()
    chosen = (name, moment) == ("one", ("fitting blocks", 2))
    if chosen:  # the choice is not made again
        monkeypatch.setattr("tcompress.conversion.converter.choose_blocks", None)
    done = convert(str(source), recipe, output, data=calibration("bert"))
    assert done.resumed or (name == "one" and not chosen)
    assert contents(output) == contents(whole(name).folder)


# Models with copies of their last block on top of it


ONE_STACK = tuple(name for name in TINY if len(stacks(deep(name).build())) == 1)
LAST = (0, 1, 2, 3, 3, 3)  # what a model of four blocks becomes


def _made(family: str, folder: Path, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """The model that was made, and what it should compute: the blocks by hand."""
    tiny = deep(family)
    dense, source = _saved(tiny, folder / "dense")
    data = drawn(tiny) if "calibration" in changes else None
    done = convert(source, _recipe(**changes), folder / "out", data=data)
    model = load_whole(type(dense), folder / "out")
    assert done.manifest.plan.depth.stacks[0].kept == LAST
    model.config.use_cache = False
    for name in ("num_hidden_layers", "layer_types", "mlp_layer_types"):  # decoders go by these
        if hasattr(dense.config, name):
            setattr(dense.config, name, getattr(model.config, name))
    right = without(dense, stacks(dense)[0], LAST)
    own: Any = right.get_submodule(stacks(dense)[0])
    for index in range(len(LAST)):
        own[index] = copy.deepcopy(own[index])
    return model.eval(), right


@pytest.mark.often("modernbert")
@pytest.mark.parametrize("family", ONE_STACK)
def test_copies_compute_what_the_last_block_does(family: str, tmp_path: Path) -> None:
    model, right = _made(family, tmp_path, append_layers=2)
    inputs = deep(family).inputs(2, 8, 50)
    assert distance(outputs(model, inputs), outputs(right, inputs)) == 0


@pytest.mark.often("llama-none")
@pytest.mark.parametrize(
    ("family", "source"), [("bert", "builtin"), ("llama", "none"), ("vit", "builtin")]
)
def test_with_a_structure_appended(family: str, source: str, tmp_path: Path) -> None:
    more = {} if source == "none" else {"calibration": {"source": source}}
    model, right = _made(family, tmp_path, append_layers=2, **SVD, **more)
    layers = structured(model)
    assert {name.partition(".5.")[1] for name in layers} == {"", ".5."}
    inputs = deep(family).inputs(2, 8, 50)
    assert distance(outputs(model, inputs), outputs(densified(model, right), inputs)) <= 1e-4


def test_a_mechanism_stands_on_top(tmp_path: Path) -> None:
    """TAM begins as softmax attention, in the copies alone."""
    tam = {"name": "tam"}
    model, right = _made("bert", tmp_path, append_layers=2, attention=tam)
    plan = report_of(tmp_path / "out").attention
    assert [entry.name.split(".")[3] for entry in plan] == ["4", "5"]
    inputs = deep("bert").inputs(2, 8, 50)
    assert distance(outputs(model, inputs), outputs(right, inputs)) <= 1e-5
    own = tcompress.convert(
        tmp_path / "dense", method="tam", structure="none", append_layers=2, attention_layers=[5],
        calibration=NONE["calibration"], output=tmp_path / "one",
    )  # fmt: skip
    assert [entry.block for entry in own.manifest.plan.attention] == ["bert.encoder.layer.5"]


def test_copies_are_counted_on_from_the_last_block(tmp_path: Path) -> None:
    _, source = _saved(deep("bert"), tmp_path / "dense")
    recipe = _recipe(append_layers=2, keep=["*.layer.5.*"], **SVD)
    plan = make_plan(recipe, source)
    blocks = {layer.name.split(".")[3] for layer in plan.layers}
    assert blocks == {"0", "1", "2", "3", "4"}
    report = plan.dropped_parameters
    one = sum(item.numel() for item in source.keymap.model.bert.encoder.layer[0].parameters())
    assert report == -2 * one
    assert short_name(recipe) == "svd-50-append2"


def test_gradients_reach_copies_apart(tmp_path: Path) -> None:
    model, _ = _made("bert", tmp_path, append_layers=2)
    layers: Any = model.get_submodule("bert.encoder.layer")
    first, second = (layers[index].output.dense.weight for index in (4, 5))
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
