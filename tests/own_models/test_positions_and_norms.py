"""Positions and layer norms by slices, for models that are trained from scratch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForSequenceClassification

from tcompress.artifact.reader import Artifact
from tcompress.errors import ArtifactError, InputError, PlanError
from tcompress.exports.dense import export_dense
from tcompress.hf.build import SliceNorm, slice_positions, slice_scales
from tcompress.models import SourceModel
from tcompress.own_models.architecture import open_architecture
from tests.reference import lprod
from tests.reference.copied import CLOSE, array
from tests.support.scratch import LPROD, architecture, config_folder, scratch


@pytest.mark.parametrize("scaling", ["standard", "linear", "exponential", "harmonic"])
def test_positions_of_slices_of_an_odd_width(scaling: Any) -> None:
    """Of definition 13; `tests/reference` has an even width."""
    wanted = lprod.positions(5, 3, lprod.frequency_scales(scaling, 4))
    ours = array(slice_positions(5, 12, 4, scaling))
    np.testing.assert_allclose(ours, lprod.unfold(wanted), **CLOSE)


def test_one_slice_has_no_scaling() -> None:
    assert slice_scales(1, "exponential").tolist() == [1]
    assert_close(slice_positions(4, 6, 1, "linear"), slice_positions(4, 6, 1, "standard"))


def test_the_norm_of_one_slice_is_the_hosts() -> None:
    """That of several is the paper's, `tests/reference` says."""
    one = SliceNorm(12, 1, 1e-3, dtype=torch.float64)
    host = nn.LayerNorm(12, 1e-3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.copy_(torch.randn(12, generator=generator))
    host.load_state_dict(one.state_dict())
    x = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
    assert_close(one(x), host(x))


def test_both_come_back_when_the_model_is_loaded(tmp_path: Path) -> None:
    made = scratch(tmp_path / "made", method=LPROD, positions="harmonic", norm="tensor")
    model: Any = AutoModelForSequenceClassification.from_pretrained(made.folder)
    table = model.bert.embeddings.position_embeddings.weight
    wanted = slice_positions(64, 32, 4, "harmonic")
    assert_close(table.double() / table.double().norm(), wanted / wanted.norm())
    assert float(table.square().mean().sqrt()) == pytest.approx(0.02, rel=0.05)  # the host's size
    assert not any("position_embeddings" in name for name, _ in model.named_parameters())
    norms = [module for module in model.bert.encoder.modules() if isinstance(module, nn.LayerNorm)]
    assert [(type(norm), norm.p, norm.eps) for norm in norms] == [(SliceNorm, 4, 1e-12)] * 4
    assert type(model.bert.embeddings.LayerNorm) is nn.LayerNorm  # outside of the blocks
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    with torch.no_grad():
        found = model(**inputs).logits
        norms[0].p = 1
        assert not torch.equal(model(**inputs).logits, found)
        norms[0].p = 4
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, found)
    base: Any = AutoModel.from_pretrained(tmp_path / "again")  # names lack a prefix here
    assert torch.equal(base.embeddings.position_embeddings.weight, table)
    assert isinstance(base.encoder.layer[0].output.LayerNorm, SliceNorm)


def test_learned_positions_begin_as_the_host_draws_them(tmp_path: Path) -> None:
    made = scratch(tmp_path / "made", method=LPROD, positions="learned")
    model: Any = AutoModelForSequenceClassification.from_pretrained(made.folder)
    table = model.bert.embeddings.position_embeddings.weight
    assert isinstance(table, nn.Parameter)
    source = open_architecture(architecture(), 0)
    assert torch.equal(table, source.store.tensor("bert.embeddings.position_embeddings.weight"))


@pytest.mark.parametrize(
    ("family", "path", "before"),
    [("opt", "model.decoder.embed_positions", 2), ("gpt2", "transformer.wpe", 0)],
)
def test_rows_before_the_first_position_are_empty(
    family: str, path: str, before: int, tmp_path: Path
) -> None:
    source = SourceModel.open(str(config_folder(family, tmp_path / "config")), seed=0)
    made = scratch(tmp_path / "made", source, method=LPROD, positions="standard")
    model: Any = type(source.meta_model()).from_pretrained(made.folder)
    table = model.get_submodule(path).weight
    assert not table[:before].any()
    wanted = slice_positions(64, 32, 4, "standard")
    assert_close(table[before:].double() / table.double().norm(), wanted / wanted.norm())
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=torch.tensor([[5, 6]])).logits).all()


def test_a_host_without_them_is_refused_with_all_reasons(tmp_path: Path) -> None:
    source = SourceModel.open(str(config_folder("llama", tmp_path / "config")), seed=0)
    with pytest.raises(PlanError) as caught:
        scratch(tmp_path / "made", source, method=LPROD, positions="linear", norm="tensor")
    assert caught.value.message == (
        "`positions: linear` is about a table of positions for tokens of text, and this `llama` "
        "model has none; `norm: tensor` is about layer norms of all features, and the blocks of "
        "this `llama` model have none"
    )
    assert not (tmp_path / "made").exists()


def test_slices_must_divide_the_features() -> None:
    recipe = {"method": {"name": "lprod", "p": 5, "pad": True}, "norm": "tensor"}
    source = open_architecture(architecture(), 0)
    with pytest.raises(PlanError, match="has 32 features, which p=5 does not divide"):
        scratch(Path("never"), source, **recipe)


def test_a_damaged_plan_is_named(tmp_path: Path) -> None:
    made = scratch(tmp_path / "made", method=LPROD, norm="tensor")
    config = made.folder / "config.json"
    config.write_text(config.read_text().replace('"kind": "norm"', '"kind": "nrm"', 1))
    with pytest.raises(ArtifactError, match=r"damaged at module `bert\.encoder\.layer\.0"):
        Artifact.open(made.folder)


def test_only_positions_can_be_exported(tmp_path: Path) -> None:
    fixed = scratch(tmp_path / "fixed", method=LPROD, positions="linear")
    plain = export_dense(fixed.folder, tmp_path / "plain")
    ids = torch.tensor([[5, 6, 7]])
    models = [
        AutoModelForSequenceClassification.from_pretrained(folder)
        for folder in (fixed.folder, plain)
    ]
    with torch.no_grad():
        one, two = (model(input_ids=ids).logits for model in models)
    assert_close(one, two)
    norms = scratch(tmp_path / "norms", method=LPROD, norm="tensor")
    with pytest.raises(InputError, match="normalises its features slice by slice"):
        export_dense(norms.folder, tmp_path / "never")
