"""Models with fewer blocks as users meet them: options, refusals, reports, healing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel

import tcompress
from tcompress.artifact.manifest import read_manifest
from tcompress.cli.convert import default_output
from tcompress.errors import ArtifactError, FitError, PlanError
from tcompress.exports.dense import export_dense
from tcompress.latency.benchmark import baseline_of
from tcompress.models import SourceModel, WeightStore
from tcompress.models.fewer_layers import cut_blocks
from tcompress.options import Convert, dump_recipe, parse_recipe
from tcompress.planning.depth import stacks_of
from tcompress.planning.planner import make_plan
from tcompress.planning.sites import roles_of
from tcompress.reporting.model_report import report_of
from tcompress.training.setup import set_up
from tests.support.cli import completed, run
from tests.support.conversions import distance, outputs
from tests.support.depth import deep
from tests.support.model_folders import edited, save_tokenizer
from tests.support.training import settings, texts, train
from tests.support.typed import conversion

NONE: dict[str, Any] = {"calibration": {"source": "none"}}
SVD: dict[str, Any] = {"method": {"name": "svd"}, "target": 0.5}


def planned(source: SourceModel, **changes: Any) -> Any:
    return make_plan(Convert.model_validate({**NONE, **changes}), source)


def saved(family: str, folder: Path, blocks: int = 4, **options: Any) -> str:
    deep(family, blocks, **options).build().save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("bert", tmp_path_factory.mktemp("models") / "bert")


def cut(source: str, output: Path, **changes: Any) -> Path:
    options = {"keep_layers": [1, 3], "calibration": "none", **changes}
    return Path(tcompress.convert(source, output=output, **options).folder)


# What is asked
@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"keep_layers": ["1, 3,5"]}, {"keep_layers": (1, 3, 5)}),
        ({"keep_layers": ["0-2,5"]}, {"keep_layers": (0, 1, 2, 5)}),
        (
            {"keep_layers": ["encoder:1", "decoder:0,2"]},
            {"keep_layers": {"encoder": (1,), "decoder": (0, 2)}},
        ),
        ({"drop_layers": ["3"]}, {"drop_layers": 3}),
        ({"drop_layers": ["decoder:2"]}, {"drop_layers": {"decoder": 2}}),
        (
            {"drop_layers": ["3"], "target": 0.5},
            {"drop_layers": 3, "target": 0.5},
        ),
        ({"drop_layers": ["3"], "method": "none"}, {"drop_layers": 3}),
    ],
)
def test_options(options: dict[str, Any], made: dict[str, Any]) -> None:
    chosen = conversion(options)
    method = None if chosen.method is None else chosen.method.name
    assert {name: getattr(chosen, name) for name in made} == made
    assert method == ("svd" if "target" in made else None)


def test_options_take_the_place_of_a_recipe_s() -> None:
    text = "recipe_version: 1\nconvert: {method: {name: svd, rank: 4}, keep_layers: [1, 3]}\n"
    recipe = parse_recipe(text, "test.yaml")
    assert parse_recipe(dump_recipe(recipe), "again") == recipe
    made = conversion({"drop_layers": ["2"]}, recipe)
    assert (made.keep_layers, made.drop_layers) == (None, 2)
    assert made.label == "svd + depth"
    alone = conversion({"method": "none"}, recipe)
    assert (alone.method, alone.keep_layers, alone.label) == (None, (1, 3), "depth")
    assert default_output("bert-base", made) == "bert-base-svd-r4-drop2"
    assert default_output("bert-base", conversion({"keep_layers": ["t:1,2"]})) == "bert-base-keep2"


# What the model says
def test_all_stacks_are_checked_at_once(tmp_path: Path) -> None:
    source = SourceModel.open(saved("bart", tmp_path))
    asked = {"keep_layers": {"encoder": [7], "decoder": [], "tower": [1]}}
    with pytest.raises(PlanError) as caught:
        planned(source, **asked)
    for text in ("no block 7: `encoder`", "none of the 4 blocks of `decoder`", "stack `tower`"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("family", "options", "kept", "message"),
    [
        ("modernbert", {}, [1, 3], "whose `attn_norm` is a Identity and not a LayerNorm"),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            [0, 2],
            "block 2 of `transformer.h` would become block 1, whose `attn.scaling` is",
        ),
        ("deberta-v2", {"conv_kernel_size": 3}, [1, 3], "a convolution belongs to its first block"),
    ],
)
def test_blocks_that_know_their_place(
    family: str, options: dict[str, Any], kept: list[int], message: str, tmp_path: Path
) -> None:
    source = SourceModel.open(saved(family, tmp_path, **options))
    with pytest.raises(PlanError) as caught:
        planned(source, keep_layers=kept)
    assert f"blocks of this `{family}` model cannot be dropped or repeated: " in str(caught.value)
    assert message in str(caught.value)
    planned(source, keep_layers=[0, 1])


def test_stacks_of_one_name_are_told_apart(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 50, "intermediate_size": 64, "max_position_embeddings": 16}
    vision = {**sizes, "intermediate_size": 64, "image_size": 16, "patch_size": 4}
    config = transformers.CLIPSegConfig(
        text_config=text, vision_config=vision, projection_dim=32, extract_layers=[0, 1],
        reduce_dim=16, decoder_num_attention_heads=2, decoder_intermediate_size=32,
    )  # fmt: skip
    transformers.CLIPSegForImageSegmentation(config).save_pretrained(tmp_path)
    source = SourceModel.open(str(tmp_path))
    names = [stack.name for stack in stacks_of(roles_of(source))]
    assert names == ["clip.text_model", "clip.vision_model", "decoder"]
    depth = planned(source, drop_layers={"clip.text_model": 1}).depth
    assert [len(stack.kept) for stack in depth.stacks] == [1, 2, 2]
    with pytest.raises(PlanError, match=r"`extract_layers` of its config has the blocks 0, 1"):
        planned(source, drop_layers={"clip.vision_model": 1})


def test_numbers_of_kinds_of_blocks_follow_them(tmp_path: Path) -> None:
    vision = {
        "depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64,
        "out_hidden_size": 32, "fullatt_block_indexes": [1, 3],
    }  # fmt: skip
    text = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=text)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(tmp_path)
    source = SourceModel.open(str(tmp_path))
    path = next(stack.path for stack in stacks_of(roles_of(source)) if "visual" in stack.path)
    config = cut_blocks(source, {path: (0, 1, 3)}).config.vision_config
    assert (config.depth, config.fullatt_block_indexes) == (3, [1, 2])


def test_heads_that_time_words_move_with_their_blocks(tmp_path: Path) -> None:
    source = saved("whisper", tmp_path / "whisper")
    for kept, heads in (([0, 3], [[1, 1]]), ([2, 3], [[0, 0], [1, 1]]), ([0, 1], None)):
        with edited(tmp_path / "whisper" / "generation_config.json") as generation:
            generation["alignment_heads"] = [[2, 0], [3, 1]]
        made = cut(source, tmp_path / f"out{kept}", keep_layers={"decoder": kept})
        generation = json.loads((made / "generation_config.json").read_text(encoding="utf-8"))
        assert generation.get("alignment_heads") == heads


@pytest.mark.often("qwen3_moe-options2-changed2", "t5-options3-changed3")
@pytest.mark.parametrize(
    ("family", "options", "changed"),
    [
        # Every sixth block of this one attends to all tokens.
        (
            "gemma3",
            {"sliding_window_pattern": 2},
            {"layer_types": ["full_attention", "full_attention"], "num_hidden_layers": 2},
        ),
        ("qwen3_moe", {"mlp_only_layers": [1]}, {"mlp_only_layers": [0], "num_hidden_layers": 2}),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2},
         {"mlp_only_layers": [], "decoder_sparse_step": 1}),
        ("t5", {}, {"num_layers": 4, "num_decoder_layers": 2}),
        ("gpt2", {}, {"n_layer": 2}),
        ("distilbert", {}, {"n_layers": 2}),
    ],
)  # fmt: skip
def test_configs_are_cut_alongside(
    family: str, options: dict[str, Any], changed: dict[str, Any], tmp_path: Path
) -> None:
    source = saved(family, tmp_path / "dense", **options)
    keep: Any = {"decoder": [1, 3]} if family == "t5" else [1, 3]
    folder = cut(source, tmp_path / "out", keep_layers=keep)
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in changed} == changed


def test_patterns_name_layers_as_the_whole_model_does(bert: str) -> None:
    source, asked = SourceModel.open(bert), {**SVD, "keep_layers": [1, 3]}
    layers = planned(source, **asked, keep=["*.layer.3.output.dense"]).layers
    names = [entry.name for entry in layers if entry.role == "down"]
    assert names == ["bert.encoder.layer.0.output.dense"]
    # Of a block that is dropped: no mistake.
    assert len(planned(source, **asked, keep=["*.layer.0.*"]).layers) == 12
    with pytest.raises(PlanError, match="no layer matches"):
        planned(source, **asked, keep=["*.layer.4.*"])


def test_a_damaged_tensor_is_named_as_in_its_file(tmp_path: Path) -> None:
    dense: Any = deep("bert").build()
    with torch.no_grad():
        dense.get_submodule("bert.encoder.layer.3.output.dense").weight[0, 0] = torch.nan
    dense.save_pretrained(tmp_path / "dense")
    for more in ({}, {"method": "svd", "rank": 4}):
        with pytest.raises(FitError) as caught:
            cut(str(tmp_path / "dense"), tmp_path / "out", **more)
        assert "`bert.encoder.layer.3.output.dense.weight` of the source" in str(caught.value)
    # That of a block that is dropped does not matter.
    cut(str(tmp_path / "dense"), tmp_path / "out", keep_layers=[0, 1])


# The command line
def _blocks(*options: Any) -> list[str]:
    """What the table of a conversion says of its blocks."""
    ran = completed("convert", *options)
    return next(line for line in ran.lines if line.startswith("blocks")).split()


@pytest.mark.usefixtures("own_folder")
def test_dry_run_reads_no_weight(bert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two, kept = ["blocks", "4", "2:"], ["1,", "3", "50.0%"]
    assert _blocks(bert, "--keep-layers", "1,3", "-o", "out", "-q") == [*two, *kept]
    monkeypatch.setattr(WeightStore, "tensor", None)
    later = ["chosen", "when", "converting", "50.0%"]
    assert _blocks(bert, "--drop-layers", 2, "--dry-run") == [*two, *later]
    svd = ("--method", "svd", "--rank", 4)
    assert _blocks(bert, "--keep-layers", "1,3", *svd, "--dry-run") == [*two, *kept]
    ran = run("convert", bert, "--keep-layers", "1,3", "--dry-run", "--json")
    plan = ran.document["plan"]
    assert plan["depth"]["stacks"][0]["kept"] == [1, 3]
    assert (plan["layers"], plan["left"], plan["method"]) == ([], [], "depth")
    assert ran.document["estimate"]["disk_bytes"] < SourceModel.open(bert).store.total_bytes


# What follows
@pytest.mark.parametrize("method", ["none", "svd"])
def test_all_is_compared_with_the_whole_model(method: str, bert: str, tmp_path: Path) -> None:
    more = {"target": 0.5} if method == "svd" else {}
    report = report_of(cut(bert, tmp_path / "out", method=method, **more))
    dense, plan = report_of(bert), tcompress.plan(bert, method="svd", target=0.5)
    assert report.parameters.total.dense == dense.parameters.total.dense
    assert report.parameters.blocks.dense == dense.parameters.blocks.dense
    assert report.macs_per_token.dense == dense.macs_per_token.dense
    assert report.bytes_on_disk.dense == SourceModel.open(bert).store.total_bytes
    kept = dense.parameters.blocks.dense // 2
    kept -= (plan.dense_rewritten - plan.structured_rewritten) // 2 if method == "svd" else 0
    assert report.parameters.blocks.now == kept
    real: Any = AutoModel.from_pretrained(tmp_path / "out")
    assert kept == sum(part.numel() for part in real.encoder.parameters())
    assert report.is_smaller
    assert report.depth.which == "1, 3"
    assert report.method == ("svd + depth" if method == "svd" else "depth")
    if method == "none":
        assert 2 * report.parameters.blocks.now == report.parameters.blocks.dense
        assert report.macs_per_token.now < dense.macs_per_token.dense
        name, source = baseline_of(SourceModel.open(str(tmp_path / "out")))
        assert (name, source.config.num_hidden_layers) == (bert, 4)
        with pytest.raises(ArtifactError, match="it is a plain model already"):
            export_dense(tmp_path / "out", tmp_path / "other")


def test_exports(bert: str, tmp_path: Path) -> None:
    folder = cut(bert, tmp_path / "small", method="svd", target=0.5)
    plain = export_dense(folder, tmp_path / "plain")
    inputs = deep("bert").inputs(2, 8, 0)
    both = (outputs(AutoModel.from_pretrained(path), inputs) for path in (folder, plain))
    assert distance(*(found[:1] for found in both)) <= 1e-5  # its states: the pooler is drawn
    config = json.loads((plain / "config.json").read_text())
    assert (config["num_hidden_layers"], "quantization_config" in config) == (2, False)


@pytest.mark.often("kept2-imitated2")
@pytest.mark.parametrize(("kept", "imitated"), [([1, 3], [1, 3]), ([0, 2], [0, 3]), ([2], [3])])
def test_healing_knows_what_blocks_stand_for(
    kept: list[int], imitated: list[int], bert: str, tmp_path: Path
) -> None:
    folder = cut(bert, tmp_path / "small", keep_layers=kept)
    student, teacher = SourceModel.open(str(folder)), SourceModel.open(bert)
    options = settings(data=texts(tmp_path))
    setup = set_up(student, [teacher], options, read_manifest(folder))
    blocks = setup.teacher_observer.model.bert.encoder.layer
    wanted = [blocks[index] for index in imitated]
    assert setup.teacher_observer.modules == wanted


@pytest.mark.slow
def test_healing_needs_no_option(bert: str, tmp_path: Path) -> None:
    folder = cut(bert, tmp_path / "small")
    done = train(
        folder, tmp_path / "healed", data=texts(tmp_path), steps=20, learning_rate=3e-3,
        evaluate_every=10,
    )  # fmt: skip
    assert done.facts.teacher == bert
    assert done.facts.best < 0.9 * done.facts.curve[0].validation
    report = report_of(done.folder)
    assert report.method == "depth"
    assert report.parameters.blocks.kept == 0.5
    assert AutoModel.from_pretrained(done.folder).config.num_hidden_layers == 2
    assert "4 -> 2 blocks" in (done.folder / "README.md").read_text()


def test_both_stacks(tmp_path: Path) -> None:
    source = saved("t5", tmp_path / "dense")
    keep = {"encoder": [0, 3], "decoder": [0, 1]}
    plan = tcompress.plan(source, keep_layers=keep, calibration="none")
    assert plan.depth.target_blocks == (0, 3, 4, 7)
    assert plan.depth.which == "encoder 0, 3; decoder 0, 1"
    assert (plan.depth.kept, plan.depth.blocks) == (4, 8)
