"""Models as a whole: config, class, companions, refusals."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import dynamic_module_utils

from tcompress.errors import SourceError, check_counts
from tcompress.models import SourceModel
from tcompress.models.names import auxiliary_files, stray_links
from tests.support.checkpoints import save
from tests.support.tiny import build

REMOTE_CODE = """
from transformers import BertConfig, BertModel


class OwnConfig(BertConfig):
    model_type = "tcompress_test_own"


class OwnModel(BertModel):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save("bert_base", folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(kept))


def refusal(folder: Path, **options: Any) -> SourceError:
    with pytest.raises(SourceError) as caught:
        SourceModel.open(str(folder), **options)
    assert caught.value.hint
    return caught.value


def test_meta_models_are_new_and_have_the_type_of_the_config(folder: Path) -> None:
    edit_config(folder, dtype="bfloat16")
    model = SourceModel.open(str(folder))
    before = model.config.to_dict()
    first, second = model.meta_model(), model.meta_model()
    assert first is not second
    assert {parameter.device.type for parameter in first.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in first.parameters()} == {torch.bfloat16}
    assert not first.training
    assert model.config.to_dict() == before
    assert model.keymap is model.keymap
    assert torch.get_default_dtype() == torch.float32


def test_the_first_architecture_that_exists_is_taken(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["OwnBert", "AutoModel", "BertForMaskedLM"])
    assert SourceModel.open(str(tmp_path)).model_class is transformers.BertForMaskedLM


@pytest.mark.parametrize("architectures", [None, ["OwnBert"]])
def test_without_a_known_architecture_the_bare_model_is_taken(
    folder: Path, architectures: list[str] | None
) -> None:
    edit_config(folder, architectures=architectures)
    assert SourceModel.open(str(folder)).model_class is transformers.BertModel


def test_companions_are_listed_and_the_rest_is_not(folder: Path) -> None:
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense")]
    (folder / "modules.json").write_text(json.dumps(modules))
    carried = [
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "LICENSE"),
        *("additional_chat_templates/tool.jinja", "chat_template.jinja", "merges.txt"),
        *("config_sentence_transformers.json", "generation_config.json", "modules.json"),
        *("preprocessor_config.json", "processor_config.json", "sentence_bert_config.json"),
        *("special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer.model"),
        *("tokenizer_config.json", "vocab.json", "vocab.txt", "added_tokens.json"),
        *("video_preprocessor_config.json", "normalizer.json", "qwen.tiktoken"),
    ]
    left = [
        *("README.md", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", ".gitattributes"),
        *("onnx/model.onnx", "onnx/config.json", "openvino/openvino_model.bin", "training.log"),
        *("1_Pooling/README.md", "modeling_own.py", "trainer_state.json", "rust_model.ot"),
    ]
    for name in [*carried, *left]:
        (folder / name).parent.mkdir(exist_ok=True)
        if name != "modules.json":
            (folder / name).touch()
    found = [path.as_posix() for path in SourceModel.open(str(folder)).auxiliary_files()]
    assert found == sorted(found, key=Path)
    assert set(found) == set(carried)


@pytest.mark.parametrize("name", ["../../etc", "/etc", "linked", "linked/deeper"])
def test_modules_outside_the_folder_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / "linked").symlink_to(tmp_path)
    (folder / "modules.json").write_text(json.dumps([{"path": name}]))
    with pytest.raises(SourceError, match=f"names `{name}`, outside the folder"):
        SourceModel.open(str(folder)).auxiliary_files()


def test_a_module_that_is_the_model_itself_brings_no_weights(folder: Path) -> None:
    (folder / "modules.json").write_text('[{"path": "."}, {"path": ""}]')
    found = SourceModel.open(str(folder)).auxiliary_files()
    assert [path.name for path in found] == ["modules.json"]


def test_links_out_of_the_folder_are_not_followed(folder: Path, tmp_path: Path) -> None:
    """Links within it are."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "shadow").touch()
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text('[{"path": "1_Pooling"}]')
    (folder / "LICENSE").symlink_to(secret / "shadow")
    (folder / "additional_chat_templates").symlink_to(secret)
    (folder / "1_Pooling" / "config.json").symlink_to(secret / "shadow")
    (folder / "merges.txt").touch()
    (folder / "vocab.txt").symlink_to("merges.txt")
    found = SourceModel.open(str(folder)).auxiliary_files()
    assert [str(path) for path in found] == ["merges.txt", "modules.json", "vocab.txt"]
    assert stray_links(folder) == ["1_Pooling/config.json", "LICENSE"]


def _linked(folder: Path, names: tuple[str, ...], blobs: Path) -> None:
    """Puts files where the hub's cache would, and links to them where they were."""
    blobs.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()  # where there is none yet
        target = (folder / name).rename(blobs / f"sha-{name.replace('/', '-')}")
        (folder / name).symlink_to(os.path.relpath(target, (folder / name).parent.resolve()))


@pytest.mark.parametrize("part", ["", "text_encoder"])
@pytest.mark.parametrize("form", ["plain", "on another disk", "shared by models"])
def test_snapshots_of_every_form_carry_their_files(
    part: str, form: str, folder: Path, tmp_path: Path
) -> None:
    cache, disk = tmp_path / "hub" / "models--a--b", tmp_path / "disk"
    disk.mkdir()
    cache.mkdir(parents=True)
    if form == "on another disk":
        (cache / "blobs").symlink_to(disk)
    model = cache / "snapshots" / "abc" / part
    shutil.copytree(folder, model)
    (model / "modules.json").write_text('[{"path": "1_Pooling"}]')
    names = ("config.json", "tokenizer.json", "1_Pooling/config.json", "modules.json")
    _linked(model, names, cache / "blobs")
    (model / "LICENSE").symlink_to("/etc/passwd")
    store = tmp_path / "hub" / "blobs" / "ab"
    store.mkdir(parents=True)
    (store / "another").touch()
    (model / "merges.txt").symlink_to(store / "another")
    if form == "shared by models":
        blob = cache / "blobs" / "sha-tokenizer.json"
        blob.rename(store / "abc")
        blob.symlink_to(os.path.relpath(store / "abc", blob.parent))
        (cache / "blobs" / "odd").symlink_to("/etc/passwd")
        (model / "vocab.txt").symlink_to(cache / "blobs" / "odd")
    found = [str(path) for path in auxiliary_files(model)]
    assert found == ["1_Pooling/config.json", "modules.json", "tokenizer.json"]
    assert set(stray_links(model)) - {"vocab.txt"} == {"LICENSE", "merges.txt"}


@pytest.mark.parametrize("known_by", ["config.json", "model.safetensors"])
def test_a_folder_of_links_into_the_hub_cache(known_by: str, folder: Path, tmp_path: Path) -> None:
    """As `huggingface-cli download --local-dir` made them: of large files, or of all."""
    cache, other = tmp_path / "models--a--b", tmp_path / "models--c--d"
    for repo in (cache, other):
        (repo / "snapshots").mkdir(parents=True)
    _linked(folder, (known_by, "tokenizer.json"), cache / "blobs")
    _linked(folder, ("vocab.txt",), other / "blobs")
    (tmp_path / "blobs").mkdir()
    _linked(folder, ("merges.txt",), tmp_path / "blobs")
    (folder / "LICENSE").symlink_to("/etc/passwd")
    assert [str(path) for path in auxiliary_files(folder)] == ["tokenizer.json"]
    assert stray_links(folder) == ["LICENSE", "merges.txt", "vocab.txt"]


def test_a_module_list_of_another_form_is_refused(folder: Path) -> None:
    (folder / "modules.json").write_text('{"a": 1}')
    with pytest.raises(SourceError, match="is no list of sentence-transformers modules"):
        SourceModel.open(str(folder)).auxiliary_files()


def test_a_folder_without_config_lists_what_is_there(folder: Path) -> None:
    (folder / "config.json").unlink()
    error = refusal(folder)
    assert error.message == f"`{folder}` has no `config.json`; it holds `model.safetensors`"
    assert error.hint == "give a folder written by `save_pretrained`"


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("adapter_config.json", "merges it with `--adapter merge`"),
        ("model_index.json", "the folder of one transformer inside it"),
        ("checkpoint-10/config.json", "did you mean `{folder}/checkpoint-10`"),
    ],
)
def test_other_kinds_of_folders_are_recognised(folder: Path, file: str, hint: str) -> None:
    (folder / "config.json").unlink()
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("{}")
    assert hint.format(folder=folder) in str(refusal(folder).hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no valid JSON"),
        ("[]", "holds a list, expected an object"),
        ('{"model_type": "bert", "hidden_size": "many"}', "the configuration in `{folder}` cannot"),
    ],
)
def test_a_config_of_another_form_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    assert message.format(folder=folder) in refusal(folder).message


TAKEN = "`{folder}` is already quantised with "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, TAKEN + "`gptq`"),
        ({"quantization_config": {"bits": 4}}, TAKEN + "`unknown`"),
        ({"compression_config": {"quant_method": "fp8"}}, TAKEN + "`fp8`"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, TAKEN + "`awq`"),
        (
            {"model_type": "tcompress_test_none"},
            "`{folder}` has the model type `tcompress_test_none`, which Transformers "
            f"{transformers.__version__} does not know",
        ),
        ({"model_type": None}, "`config.json` in `{folder}` has no `model_type`"),
        (
            {"model_type": "blip_text_model", "architectures": ["Own"]},
            "`config.json` in `{folder}` names no model class that Transformers has "
            "(architectures ['Own'], model type `blip_text_model`)",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(folder, **changes)
    assert refusal(folder).message == message.format(folder=folder)


def test_large_numbers_that_count_no_layers_are_taken() -> None:
    labels = {"ballplayer, baseball player": 17_500}
    check_counts({"vocab_size_per_layer_input": 262_144, "label2id": labels, "num_layers": 12})
    for wrong in ({"num_hidden_layers": 10**9}, {"text_config": {"n_layer": 10**9}}):
        with pytest.raises(ValueError, match="expected at most 10,000"):
            check_counts(wrong)


def own_code(folder: Path, model_type: str) -> None:
    (folder / "modeling_own.py").write_text(REMOTE_CODE)
    edit_config(
        folder,
        model_type=model_type,
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"},
    )


def test_code_of_the_model_is_refused_unless_allowed(folder: Path) -> None:
    own_code(folder, "tcompress_test_own")
    error = refusal(folder)
    assert "needs Python code that comes with the model" in error.message
    assert "`--allow-remote-code`" in str(error.hint)


def test_code_of_a_model_that_transformers_knows_is_left_alone(folder: Path) -> None:
    own_code(folder, "bert")
    model = SourceModel.open(str(folder))
    assert model.model_class is transformers.BertModel
    assert "modeling_own.py" not in map(str, model.auxiliary_files())


def test_code_of_the_model_runs_if_allowed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    own_code(folder, "tcompress_test_own")
    model = SourceModel.open(str(folder), trust_remote_code=True)
    assert model.model_class.__name__ == "OwnModel"
    assert model.model_class is not transformers.BertModel
    assert (model.keymap.missing, model.keymap.unmatched) == ((), ())
    assert "modeling_own.py" in map(str, model.auxiliary_files())
