"""Reports: numbers that were worked out by hand or measured another way."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import tcompress  # noqa: F401 - lets Transformers load converted models
from tcompress.errors import ArtifactError
from tcompress.models import WeightStore
from tcompress.models.store import SafetensorsShard
from tcompress.reporting.model_report import report_of
from tcompress.reporting.table_rows import amount
from tcompress.reporting.tree import Amount, ModelReport
from tests.support.conversions import make
from tests.support.converted import converted
from tests.support.model_folders import edited
from tests.support.tiny import TINY, build


def amounts(report: ModelReport, part: str) -> tuple[int, int]:
    amount = getattr(report.parameters, part)
    return amount.dense, amount.now


def test_the_parameters_by_part(tmp_path: Path) -> None:
    report = report_of(converted("bert", tmp_path).folder)
    rewritten = 2 * (4 * 32 * 32 + 2 * 32 * 64)
    block = 4 * 32 * 32 + 2 * 32 * 64 + (5 * 32 + 64) + 4 * 32
    embeddings = (100 + 64 + 2) * 32
    other = 64 + (32 * 32 + 3 * 32) + 100  # norm, transform of the head, its bias
    assert amounts(report, "rewritten") == (rewritten, rewritten // 4)
    assert amounts(report, "blocks") == (2 * block, 2 * block - 3 * rewritten // 4)
    assert amounts(report, "embeddings") == (embeddings, embeddings)
    assert amounts(report, "other") == (other, other)
    total = 2 * block + embeddings + other
    assert amounts(report, "total") == (total, total - 3 * rewritten // 4)
    assert total == sum(parameter.numel() for parameter in build("bert").parameters())


def test_generators_are_counted(tmp_path: Path) -> None:
    report = report_of(make("llama", tmp_path, "fitted").folder)
    query, key = report.layers[:2]
    assert query.structure == "lprod p=4 fitted b=4x2"
    assert query.parameters.now == 32 * 32 // 4 + 2 * 8 * 6
    assert (key.input_of, key.parameters.now) == (query.name, 32 * 16 // 4)


def test_bytes_on_disk(tmp_path: Path) -> None:
    done = converted("llama", tmp_path, dtype="bfloat16", max_shard_size="10KB")
    report = report_of(done.folder)
    assert report.bytes_on_disk.dense == WeightStore.open(tmp_path / "llama").total_bytes
    files = list(done.folder.glob("*.safetensors"))
    assert len(files) > 1
    assert report.bytes_on_disk.now == sum(path.stat().st_size for path in files)
    # The dense layer was stored in float32, whatever is stored now.
    layer = report.layers[0]
    assert (layer.bytes.dense, layer.bytes.now) == (4 * 32 * 32, 2 * 32 * 32 // 4)


def test_a_dense_model_is_reported_alike(tmp_path: Path) -> None:
    report = report_of(converted("mixtral", tmp_path).folder)
    dense = report_of(str(tmp_path / "mixtral"))
    assert (dense.method, dense.source, dense.layers, dense.left) == (
        "dense",
        str(tmp_path / "mixtral"),
        (),
        (),
    )
    for part in ("embeddings", "blocks", "other", "total"):
        assert amounts(dense, part) == (amounts(report, part)[0],) * 2
    assert dense.macs_per_token.dense == report.macs_per_token.dense == dense.macs_per_token.now
    size = (tmp_path / "mixtral" / "model.safetensors").stat().st_size
    assert (dense.bytes_on_disk.dense, dense.bytes_on_disk.kept) == (size, 1.0)


def test_a_model_saved_again_is_reported_from_its_config(tmp_path: Path) -> None:
    done = converted("bert", tmp_path)
    model = transformers.BertForSequenceClassification.from_pretrained(done.folder)
    model.save_pretrained(tmp_path / "again")
    report, again = report_of(done.folder), report_of(tmp_path / "again")
    assert (again.method, again.source, again.created, again.calibration) == (
        "lprod", None, None, None,
    )  # fmt: skip
    assert again.parameters.blocks == report.parameters.blocks
    assert [layer.parameters for layer in again.layers] == [
        layer.parameters for layer in report.layers
    ]
    assert again.errors == {}
    dense = transformers.BertForSequenceClassification(model.config)
    plain = sum(tensor.nbytes for tensor in dense.state_dict().values())
    assert again.bytes_on_disk.dense == plain


def test_what_stays_dense_is_listed_with_and_without_manifest(tmp_path: Path) -> None:
    folder = converted("mixtral", tmp_path, keep=["v_proj"]).folder
    first = report_of(folder).left
    (folder / "tcompress.json").unlink()
    again = report_of(folder).left
    assert [item.name for item in first] == [item.name for item in again]
    assert first[0].reason == "kept dense by the recipe"
    assert again[0].reason == "not part of the plan"
    assert again[-1].reason == "it routes tokens to experts, which a small error changes"


def test_a_manifest_of_other_files_is_refused(tmp_path: Path) -> None:
    done = converted("bert", tmp_path)
    transformers.AutoModel.from_pretrained(done.folder).save_pretrained(tmp_path / "again")
    shutil.copy(done.folder / "tcompress.json", tmp_path / "again")
    with pytest.raises(ArtifactError, match="is not as it was written: `config") as caught:
        report_of(tmp_path / "again")
    assert "delete" in str(caught.value.hint)
    (tmp_path / "again" / "tcompress.json").unlink()
    report = report_of(tmp_path / "again")
    assert report.layers[0].name == "encoder.layer.0.attention.self.query"


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = converted("qwen3_moe", tmp_path)
    monkeypatch.setattr(SafetensorsShard, "read", Mock(side_effect=AssertionError))
    assert report_of(done.folder).parameters.rewritten.kept == 0.25
    assert report_of(tmp_path / "qwen3_moe").parameters.total.kept == 1.0


@pytest.mark.often("llama-dense")
@pytest.mark.parametrize("option", ["dense", "dct", "fitted", "svd", "tt-3"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "t5"])
def test_multiply_adds_are_those_that_run(tmp_path: Path, family: str, option: str) -> None:
    length, made = 12, make(family, tmp_path, "dct" if option == "dense" else option)
    folder = made.source if option == "dense" else made.folder
    model = made.load(folder, attn_implementation="eager").eval()
    inputs = TINY[family].inputs(batch=1, length=length, seed=0)
    counter = FlopCounterMode(display=False)
    with torch.no_grad():
        model(**inputs, use_cache=False)  # operators of transforms are built once
        with counter:
            model(**inputs, use_cache=False)
    macs = report_of(folder, length).macs_per_token
    assert macs.length == length
    # What is done once per pass does not divide into tokens evenly: it is rounded up.
    assert macs.now == -(-counter.get_total_flops() // (2 * length))


def test_images_count_their_own_tokens_dense_and_now(tmp_path: Path) -> None:
    """Whatever length is asked for: 16 patches and a class token, on both sides."""
    made = converted("vit", tmp_path, method=None, attention={"name": "hot"}).folder
    dense, now = (report_of(folder, 999).macs_per_token for folder in (tmp_path / "vit", made))
    assert dense.length == now.length == 17
    assert dense.dense == now.dense


def test_tables_without_a_module_are_embeddings(tmp_path: Path) -> None:
    """As in the line about coverage: of pictures, the class token and 17 positions."""
    report = report_of(converted("vit", tmp_path).folder)
    assert amounts(report, "embeddings") == (18 * 32, 18 * 32)
    assert report.coverage.embeddings == report.parameters.embeddings.dense


def test_a_share_of_nothing_is_not_all_of_it() -> None:
    assert Amount.of(0, 36_096).kept is None
    assert Amount.of(0, 0).kept == 1.0
    assert amount("multiply-adds", Amount.of(0, 36_096)).kept == ""


def test_multiply_adds_of_experts_count_those_of_a_token(tmp_path: Path) -> None:
    report = report_of(converted("mixtral", tmp_path).folder, length=10)
    attention = 2 * 32 * 32 + 2 * 32 * 16
    dense = attention + 2 * (3 * 32 * 64) + 4 * 32 + 2 * 10 * 32  # two of four experts, router
    assert report.macs_per_token.dense == 2 * dense + 32 * 100
    up, down = report.layers[4:6]
    assert (up.experts, up.macs.dense) == (4, 2 * 32 * 128)
    assert up.macs.now == 2 * (32 * 128 // 4) + 32 * 4  # the transform of the input runs once
    assert down.macs.now == 2 * (64 * 32 // 4) + 32 * 4  # and that of the output


def test_a_class_without_the_planned_layers_is_refused(tmp_path: Path) -> None:
    folder = converted("bert", tmp_path).folder
    with edited(folder / "config.json") as config:
        config["num_hidden_layers"] = 1
    (folder / "tcompress.json").unlink()  # its checksums would say so before
    with pytest.raises(ArtifactError) as caught:
        report_of(folder)
    assert caught.value.message == (
        "the plan names `bert.encoder.layer.1.attention.self.query`, which a `BertForMaskedLM` "
        "does not have, and 5 more such layers"
    )
