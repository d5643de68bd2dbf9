"""Models with copies of their last block on top of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tcompress
from tcompress.conversion.converter import convert
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.schema import short_name
from tcompress.planning.planner import make_plan
from tcompress.reporting.model_report import report_of
from tests.support.conversions import densified, distance, outputs, structured
from tests.support.depth import deep, drawn, stacks, without
from tests.support.tiers import tiered
from tests.support.tiny import TINY

pytestmark = pytest.mark.usefixtures("one_thread")

NONE: dict[str, Any] = {"calibration": {"source": "none"}}
ONE_STACK = tuple(name for name in TINY if len(stacks(deep(name).build())) == 1)
LAST = (0, 1, 2, 3, 3, 3)  # what a model of four blocks becomes


def _recipe(**changes: Any) -> Convert:
    return Convert.model_validate({**NONE, **changes})


def _made(family: str, folder: Path, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """The model that was made, and what it should compute: the blocks by hand."""
    tiny = deep(family)
    dense: Any = tiny.build()
    dense.save_pretrained(folder / "dense")
    aware = "calibration" in changes
    data = drawn(tiny) if aware else None
    done = convert(str(folder / "dense"), _recipe(**changes), folder / "out", data=data)
    model, info = type(dense).from_pretrained(folder / "out", output_loading_info=True)
    assert {name: found for name, found in info.items() if found} == {}
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


# Of each way to say how many blocks there are and what they are.
OFTEN = ("bert", "distilbert", "deberta-v2", "modernbert", "gpt2", "opt", "gemma3", "mixtral")
OFTEN += ("qwen3_moe", "vit", "tcompress_grid")


@pytest.mark.parametrize("family", tiered(ONE_STACK, lambda row: row in OFTEN))
def test_copies_compute_what_the_last_block_does(family: str, tmp_path: Path) -> None:
    model, right = _made(family, tmp_path, append_layers=2)
    inputs = deep(family).inputs(2, 8, 50)
    assert distance(outputs(model, inputs), outputs(right, inputs)) == 0


@pytest.mark.parametrize(
    ("family", "source"), [("bert", "builtin"), ("llama", "none"), ("vit", "builtin")]
)
def test_with_a_structure(family: str, source: str, tmp_path: Path) -> None:
    svd = {"method": {"name": "svd"}, "target": 0.5}
    more = {} if source == "none" else {"calibration": {"source": source}}
    model, right = _made(family, tmp_path, append_layers=2, **svd, **more)
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
    deep("bert").build().save_pretrained(tmp_path / "dense")  # type: ignore[attr-defined]
    source = SourceModel.open(str(tmp_path / "dense"))
    recipe = _recipe(append_layers=2, method={"name": "svd"}, target=0.5, keep=["*.layer.5.*"])
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
