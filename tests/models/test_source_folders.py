"""Folders as others write them: names of wrappers, words for dtypes, adapters."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tcompress.api import convert
from tcompress.errors import InputError, SourceError
from tcompress.hf.opening import load_model
from tcompress.inspection import inspect_model
from tcompress.models import SourceModel
from tcompress.models.adapters import base_of
from tcompress.models.keymap import plain_names
from tcompress.models.store import plain_types
from tcompress.pipeline import dense_folder
from tcompress.training.teacher import find_teacher
from tests.support.cli import run
from tests.support.model_folders import edited, save_tokenizer
from tests.support.tiny import build

pytestmark = pytest.mark.usefixtures("one_thread")
DATA_FREE: dict[str, Any] = {"method": "svd", "target": 0.5, "calibration": "none"}
FAMILY = "llama"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(FAMILY).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _renamed(folder: Path, change: Callable[[str], str], kind: str = "safetensors") -> None:
    weights = {change(key): item for key, item in load_file(folder / "model.safetensors").items()}
    if kind == "safetensors":
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    files = ["pytorch_model.bin"]
    if kind == "shards":
        files = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
        where = {key: files[place % 2] for place, key in enumerate(weights)}
        index = json.dumps({"metadata": {}, "weight_map": where})
        (folder / "pytorch_model.bin.index.json").write_text(index)
    for place, file in enumerate(files):
        held = dict([*weights.items()][place :: len(files)])
        torch.save(held, folder / file)


WRAPPED: dict[str, Callable[[str], str]] = {
    "compiled": lambda key: f"_orig_mod.{key}",
    "parallel": lambda key: f"module.{key}",
    "both": lambda key: f"module._orig_mod.{key}",
    "blocks": lambda key: re.sub(r"(layers\.\d+)\.", r"\1._orig_mod.", key),
    "sharded": lambda key: f"_fsdp_wrapped_module.{key}".replace("mlp.", "mlp._orig_mod."),
}


@pytest.mark.parametrize(
    ("wrapper", "kind"), [*((name, "safetensors") for name in WRAPPED), ("both", "shards")]
)
def test_names_that_wrappers_gave_are_read(wrapper: str, kind: str, folder: Path) -> None:
    """By whatever opens the model, and by whatever loads it."""
    plain = SourceModel.open(str(folder))
    keys = plain.store.keys()
    wanted = {key: plain.store.tensor(key) for key in keys}
    _renamed(folder, WRAPPED[wrapper], kind)
    source = SourceModel.open(str(folder))
    assert (source.id, source.origin, source.notes) == (str(folder), folder, ())
    assert source.store.keys() == keys
    assert all(torch.equal(source.store.tensor(key), wanted[key]) for key in keys)
    loaded = load_model(source).state_dict()
    assert all(torch.equal(loaded[key], wanted[key]) for key in keys)


def test_results_of_wrapped_models_are_plain(folder: Path, tmp_path: Path) -> None:
    save_tokenizer(folder)
    _renamed(folder, WRAPPED["both"])
    assert len(inspect_model(str(folder)).blocks) == 2
    with pytest.raises(InputError, match="is the model's own folder"):
        convert(folder, output=folder, force=True, **DATA_FREE)
    done = convert(folder, output=tmp_path / "small", **DATA_FREE)
    assert not [key for key in load_file(done.folder / "model.safetensors") if "module" in key]
    assert done.manifest.source.id == str(folder)
    assert (done.folder / "tokenizer.json").is_file()
    teacher = find_teacher("source", done.manifest)  # which is as it was
    assert teacher is not None


def test_names_without_wrappers_stay() -> None:
    assert plain_names(["a.weight", "module.a.weight"]) == {}  # not all of them
    assert plain_names(["a._orig_mod.w", "a.w"]) == {}  # two of one name
    assert plain_names(["module", "module.w"]) == {}
    assert plain_names([]) == {}


def _says(folder: Path, **changes: Any) -> None:
    with edited(folder / "config.json") as config:
        config.pop("dtype", None)
        config |= changes


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("word", "wanted"),
    [("auto", None), ("bf16", "bfloat16"), ("torch.float16", "float16"), ("FP32", "float32")],
)
def test_words_for_dtypes_are_read(key: str, word: str, wanted: str | None, folder: Path) -> None:
    _says(folder, **{key: word})
    source = SourceModel.open(str(folder))
    assert source.config.dtype == (None if wanted is None else getattr(torch, wanted))
    assert source.settings.get(key) == wanted
    parts = plain_types({"text_config": {key: word, "size": 1}}, folder)["text_config"]
    assert parts == ({"size": 1} if wanted is None else {key: wanted, "size": 1})
    wanted_type = torch.float32 if wanted is None else getattr(torch, wanted)
    assert load_model(source).dtype == wanted_type


def test_a_mended_folder_keeps_odd_shards_and_tells_of_links(folder: Path, tmp_path: Path) -> None:
    shard = (folder / "model.safetensors").rename(folder / "weights-1.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(shard), shard.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "terms").write_text("free")
    (folder / "LICENSE").symlink_to(tmp_path / "terms")
    _says(folder, dtype="torch.float32")
    done = convert(folder, output=tmp_path / "small", **DATA_FREE)
    assert any("`LICENSE`" in warning for warning in done.manifest.plan.warnings)


@pytest.mark.parametrize("word", ["nonsense", "nn", 16, {"": "bfloat16"}])
def test_other_words_for_dtypes_are_named(word: Any, folder: Path) -> None:
    _says(folder, torch_dtype=word)
    with pytest.raises(SourceError, match=r"as `torch_dtype`, expected `float32`, .* or `auto`"):
        SourceModel.open(str(folder))


RANK, SCALE = 2, 2.0
Q_PROJ = "model.layers.0.self_attn.q_proj"


def _adapt(folder: Path, base: str = "") -> torch.Tensor:
    """Writes a LoRA by hand; gives what it adds to the weight of one layer."""
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": RANK,
        "lora_alpha": RANK * SCALE, "target_modules": ["q_proj"], "layers_to_transform": [0],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    down, up = torch.randn(RANK, 32), torch.randn(32, RANK)
    names = (f"base_model.model.{Q_PROJ}.lora_{part}.weight" for part in "AB")
    weights = dict(zip(names, (down, up), strict=True))
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    return SCALE * up @ down


def test_an_adapter_is_never_dropped(folder: Path, tmp_path: Path) -> None:
    """By no command, whether the whole model or the adapter alone lies there."""
    alone = tmp_path / "alone"
    for place, base in ((folder, ""), (alone, str(folder))):
        _adapt(place, base)
        done = [run("convert", place, "-o", tmp_path / "out", "--method", "lprod")]
        done += [run(name, place) for name in ("inspect", "report", "bench")]
        for told in done:
            assert told.code == 2
            said = " ".join(told.err.split())
            assert "holds an adapter (`adapter_config.json`, `adapter_model.safetensors`)" in said
            assert "`convert` merges it with `--adapter merge`" in said
        with pytest.raises(SourceError, match="holds an adapter"):
            SourceModel.open(str(place), converted=True)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(SourceError, match=r"holds an adapter \(`adapter_model.safetensors`\)"):
        convert(folder, output=tmp_path / "out", **DATA_FREE)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "alone"}


def test_merging_takes_peft(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcompress.models.adapters.find_spec", lambda _: None)
    _adapt(folder)
    options = ("--method", "svd", "--target", "0.5", "--calib", "none", "--adapter", "merge")
    told = run("convert", folder, "-o", tmp_path / "out", *options)
    assert (told.code, "pip install peft" in told.err) == (2, True)


def test_what_cannot_be_merged_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no adapter to merge"):
        SourceModel.open(str(folder), adapter="merge")
    _adapt(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"`adapter_model.safetensors` is missing"):
        SourceModel.open(str(folder), adapter="merge")


@pytest.mark.parametrize(("base", "revision"), [("someone/base", "v2"), ("", None)])
def test_an_adapter_names_the_revision_of_its_base(
    base: str, revision: str | None, folder: Path
) -> None:
    name = base or str(folder)
    _adapt(folder, name)
    with edited(folder / "adapter_config.json") as config:
        config["revision"] = "v2"
    assert base_of(folder) == (name, revision)


@pytest.mark.doors
@pytest.mark.parametrize("where", ["beside", "alone", "wrapped"])
def test_an_adapter_is_merged(where: str, folder: Path, tmp_path: Path) -> None:
    weight = f"{Q_PROJ}.weight"
    before = load_file(folder / "model.safetensors")
    place = tmp_path / "alone" if where == "alone" else folder
    if where == "wrapped":
        _renamed(folder, WRAPPED["both"])
    added = _adapt(place, str(folder) if where == "alone" else "elsewhere")
    save_tokenizer(place)
    source = SourceModel.open(str(place), adapter="merge")
    assert dense_folder(source) == source.folder != place
    assert source.store.keys() == sorted(before)
    for key, old in before.items():
        wanted = old + added if key == weight else old
        assert torch.allclose(source.store.tensor(key), wanted, atol=1e-5)
        assert torch.equal(load_model(source).state_dict()[key], source.store.tensor(key))
    assert "is merged into its weights" in source.notes[0]
    done = convert(place, output=tmp_path / "out", adapter="merge", **DATA_FREE)
    assert (done.folder / "tokenizer.json").is_file()
    assert not [*done.folder.glob("adapter*")]
    teacher = find_teacher("source", done.manifest)
    assert teacher.store.fingerprint() == source.store.fingerprint()


@pytest.mark.doors
def test_an_adapter_with_a_head_of_its_own_is_merged(folder: Path, tmp_path: Path) -> None:
    """A classifier of three labels on a language model; what has no place is refused."""
    _adapt(folder)
    with edited(folder / "adapter_config.json") as config:
        config |= {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    file = folder / "adapter_model.safetensors"
    head = torch.randn(3, 32)
    save_file(load_file(file) | {"base_model.model.score.weight": head}, file)
    source = SourceModel.open(str(folder), adapter="merge")
    assert source.model_class.__name__ == "LlamaForSequenceClassification"
    assert torch.equal(source.store.tensor("score.weight"), head)
    assert source.config.num_labels == 3
    save_file(load_file(file) | {"base_model.model.other.weight": head}, file)
    with pytest.raises(SourceError, match=r"has no place for `base_model.model.other.weight`"):
        SourceModel.open(str(folder), adapter="merge")
