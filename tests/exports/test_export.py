"""Exports: plain models that compute what the converted ones compute."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
import yaml

from tcompress.artifact.manifest import head_of, loading_code, render_head
from tcompress.artifact.reader import Artifact
from tcompress.conversion.converter import convert
from tcompress.errors import FitError, InputError, WriteError
from tcompress.exports import dense as exports
from tcompress.exports.dense import dense_weight, export_dense
from tests.support.conversions import distance, outputs
from tests.support.converted import converted, recipe
from tests.support.model_folders import edited, model_folder, sentences, text_file
from tests.support.other_python import there
from tests.support.tiny import TINY, named
from tests.support.training import train

SUM = {"method": {"name": "lprod", "p": 16}, "target": 0.6}
FITTED = {"method": {"name": "lprod", "p": 4, "transform": "fitted", "block": 4}}
RECIPES: dict[str, dict[str, Any]] = {
    "bert": FITTED,
    "gpt2": SUM,
    "llama": {"method": {"name": "svd"}, "target": 0.5, "max_shard_size": "10KB"},
    "t5": FITTED,
    "vit": {},
    "mixtral": FITTED,
    "qwen3_moe": {"keep": ["experts_gate_up"]},
    "phi3": SUM,
    "electra": {"method": {"name": "tt", "rank": 4, "order": 3}},
}

# Runs in a process of its own that must not know of tcompress.
_RUN = """
import json, sys, torch, transformers
for kind, folder, inputs, expected in torch.load(*json.loads(sys.argv[1])):
    model, found = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), (folder, found)
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
assert "tcompress" not in sys.modules
print("\\n" + json.dumps(None))
"""


@pytest.mark.slow
@pytest.mark.often("gpt2 qwen3_moe")
@pytest.mark.parametrize("families", ["gpt2 qwen3_moe", "vit electra bert llama t5 mixtral phi3"])
def test_exports_compute_the_same_without_tcompress(families: str, tmp_path: Path) -> None:
    cases = []
    for family in families.split():
        folder = converted(family, tmp_path, **RECIPES[family]).folder
        inputs = TINY[family].inputs(batch=2, length=8, seed=1)
        written = export_dense(folder, tmp_path / f"{family}-plain")
        expected = outputs(named(TINY[family].model).from_pretrained(folder), inputs)[0]
        cases.append((TINY[family].model, str(written), inputs, expected))
    torch.save(cases, tmp_path / "cases.pt")
    there(sys.executable, _RUN, str(tmp_path / "cases.pt"))


def test_an_export_is_an_ordinary_folder(tmp_path: Path) -> None:
    model_folder("llama", tmp_path / "llama")
    folder = converted("llama", tmp_path).folder
    written = export_dense(folder, tmp_path / "plain")
    assert written == tmp_path / "plain"
    assert sorted(path.name for path in written.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors",
        "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((written / "config.json").read_text())
    source = json.loads((tmp_path / "llama" / "config.json").read_text())
    assert config == source
    card = (written / "README.md").read_text()
    assert "# Dense form of `llama`, compressed with `lprod`" in card
    assert "compressed 14 layers of `llama` with `lprod` to 25.0% of their parameters." in card
    assert str(tmp_path) not in card
    assert not list(tmp_path.glob(".*"))


def test_all_is_written_and_what_was_not_rewritten_stays_as_it_is(tmp_path: Path) -> None:
    from tcompress.models import WeightStore

    folder, progress = converted("gpt2", tmp_path).folder, Mock()
    before = WeightStore.open(tmp_path / "gpt2")
    after = WeightStore.open(export_dense(folder, tmp_path / "plain", progress=progress))
    written = sum(call.args[0] for call in progress.advance.call_args_list)
    progress.stage.assert_called_once_with("writing", written, "bytes")
    assert written > 0
    assert after.keys() == before.keys()
    planned = {f"{layer.name}.weight" for layer in Artifact.open(folder).layers}
    for key in before.keys():  # noqa: SIM118 - not a mapping
        assert after.shape(key) == before.shape(key)
        if key not in planned:
            assert torch.equal(after.tensor(key), before.tensor(key))


def test_the_dtype_of_the_conversion_is_kept(tmp_path: Path) -> None:
    folder = converted("gpt2", tmp_path, dtype="bfloat16").folder
    export_dense(folder, tmp_path / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}


def test_a_model_saved_again_is_exported(tmp_path: Path) -> None:
    folder = converted("bert", tmp_path, **FITTED).folder
    model = transformers.AutoModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")
    export_dense(tmp_path / "again", tmp_path / "plain")
    plain = transformers.AutoModel.from_pretrained(tmp_path / "plain")
    inputs = TINY["bert"].inputs(batch=2, length=8, seed=1)
    assert distance(outputs(model, inputs), outputs(plain, inputs)) < 1e-5
    assert "# Dense form of a model, compressed\n" in (tmp_path / "plain" / "README.md").read_text()


def test_an_output_is_replaced_if_forced_but_for_the_model_itself(tmp_path: Path) -> None:
    folder = converted("gpt2", tmp_path).folder
    output = export_dense(folder, tmp_path / "plain")
    (output / "old.txt").write_text("old")
    export_dense(folder, output, force=True)
    assert not (output / "old.txt").exists()
    with pytest.raises(InputError, match="is the converted model itself"):
        export_dense(folder, tmp_path / "." / folder.name, force=True)


def test_a_weight_beyond_the_dtype_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted("gpt2", tmp_path, method={"name": "svd", "rank": 4}, dtype="float16").folder
    artifact = Artifact.open(folder)
    read = artifact.store.tensor
    monkeypatch.setattr(artifact.store, "tensor", lambda key: torch.full_like(read(key), 6e4))
    with pytest.raises(FitError, match=r"h\.0\.attn\.c_attn` is not finite in torch\.float16"):
        dense_weight(artifact, artifact.layers[0])


@pytest.mark.parametrize(("family", "end"), [("gpt2", "c_fc.weight"), ("mixtral", "down_proj")])
def test_a_writer_that_errs_publishes_nothing(
    family: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted(family, tmp_path, method={"name": "svd"}, target=0.5).folder

    for weight, error, said in (
        (Mock(side_effect=FitError("no")), FitError, "no"),
        (lambda *given: -dense_weight(*given), WriteError, "dense weight computes something else"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("tcompress.exports.dense.dense_weight", weight)
            with pytest.raises(error, match=said):
                export_dense(folder, tmp_path / "out")
        assert {path.name for path in tmp_path.iterdir()} == {family, folder.name}
    keep = exports._outputs

    def fewer(*given: Any) -> list[Any]:
        return [item for item in keep(*given) if not item.key.endswith(end)]

    monkeypatch.setattr("tcompress.exports.dense._outputs", fewer)
    with pytest.raises(WriteError, match="nothing is stored for"):
        export_dense(folder, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {family, folder.name}


@pytest.mark.parametrize("architecture", ["JinaBertModel", "BertForMaskedLM"])
def test_own_code_is_not_taken_for_a_class_of_transformers(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model type that Transformers has says nothing where the class came with the model."""
    folder = converted("bert", tmp_path, method={"name": "svd"}, target=0.5).folder
    (folder / "tcompress.json").unlink()
    with edited(folder / "config.json") as config:
        config["auto_map"] = {"AutoModel": f"modeling_own.{architecture}"}
        config["architectures"] = [architecture]
    monkeypatch.setattr(
        "tcompress.exports.dense.SourceModel.open", Mock(side_effect=AssertionError)
    )
    assert (export_dense(folder, tmp_path / "plain") / "model.safetensors").is_file()


def test_what_is_said_beside_weights_goes_on_and_code_stays_behind(tmp_path: Path) -> None:
    """Licence, library, base model and tags go through healing and export.

    Code of a family that Transformers knows is named nowhere: what is left loads whether code may
    run or not.
    """
    folder = model_folder("bert", tmp_path / "bert")
    (folder / "modeling_own.py").write_text("raise ImportError")
    for name in ("config.json", "tokenizer_config.json"):
        with edited(folder / name) as settings:
            settings["auto_map"] = {"AutoModel": "modeling_own.A", "AutoTokenizer": ["own.A", None]}
    said = {"license": "other", "license_name": "so-so", "library_name": "sentence-transformers",
            "base_model": ["some/base"], "tags": ["kept", "tcompress"]}  # fmt: skip
    other = {"widget": [{"text": "a"}], "language": "en"}
    head = yaml.safe_dump(said | other)
    (folder / "README.md").write_text(f"---\r\n{head}---\r\n# Title\n---\n", encoding="utf-8")
    small = convert(str(folder), recipe(**RECIPES["llama"]), tmp_path / "small").folder
    texts = {"source": [text_file(tmp_path / "t.txt", sentences(20))]}
    healed = train(small, tmp_path / "healed", steps=1, data=texts).folder
    plain = export_dense(healed, tmp_path / "plain")
    for made, tags in ((small, ["compressed"]), (healed, ["compressed"]), (plain, [])):
        text = (made / "README.md").read_text()
        assert 'AutoModelForMaskedLM.from_pretrained("PATH")' in text
        found = yaml.safe_load(text.split("---")[1])
        assert found == said | {"tags": ["kept", "tcompress", *tags]}
        assert "auto_map" not in "".join(path.read_text() for path in made.glob("*config.json"))
        transformers.AutoModel.from_pretrained(made, trust_remote_code=True)
        transformers.AutoTokenizer.from_pretrained(made, trust_remote_code=True)


@pytest.mark.parametrize(
    ("architecture", "loader"),
    [
        ("BertModel", "AutoModel"),
        ("BertForSequenceClassification", "AutoModelForSequenceClassification"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM"),
        ("ViTForImageClassification", "AutoModelForImageClassification"),
        ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
        ("T5EncoderModel", "AutoModelForTextEncoding"),
        ("TCompressTextForSequenceClassification", "AutoModelForSequenceClassification"),
        ("NobodysModel", "AutoModel"),
    ],
)
def test_cards_name_the_class_that_loads_the_head(
    architecture: str, loader: str, tmp_path: Path
) -> None:
    code = loading_code(tmp_path, architecture, plain=True)
    assert code == f'from transformers import {loader}\n\nmodel = {loader}.from_pretrained("PATH")'


def test_cards_of_sentence_encoders_show_their_library(tmp_path: Path) -> None:
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    code = loading_code(tmp_path, "BertModel", plain=False)
    assert code.startswith("import tcompress\nfrom sentence_transformers import")
    assert code.endswith('SentenceTransformer("PATH")')


@pytest.mark.parametrize(
    "text", ["", "# Title", "---\n- a\n---", "---\n{\n---", "---\na: b", b"\xff"]
)
def test_cards_without_a_head_say_nothing(text: str | bytes, tmp_path: Path) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "README.md").write_bytes(data)
    assert head_of(tmp_path) == {}
    assert render_head({}, ["tcompress"], base_model=None) == (
        "---\nlibrary_name: transformers\ntags:\n- tcompress\n---"
    )
