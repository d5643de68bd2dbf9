"""Names in checkpoints and in models, and parameters read through them."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.core_model_loading import WeightRenaming

from tcompress.errors import SourceError
from tcompress.models import KeyMap, SourceModel, WeightStore, keymap, read_parameter
from tests.support.checkpoints import MODELS, save

Saved = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Folder and model of a name, sharded; written once."""

    @cache
    def write(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name)
        return folder, save(name, folder, max_shard_size="20KB")

    return write


def map_as(folder: Path, model_class: str) -> tuple[WeightStore, KeyMap]:
    """Read a checkpoint as another class than the one that wrote it."""
    store = WeightStore.open(folder)
    kind: Any = getattr(transformers, model_class)
    with torch.device("meta"):
        model = kind._from_config(transformers.AutoConfig.from_pretrained(folder))
    return store, KeyMap(model, store.keys())


def assert_prefixes_lead_back(keys: KeyMap) -> None:
    names = [name for name, _ in keys.model.named_modules() if name]
    for name in names:
        prefix = keys.checkpoint_prefix(name)
        assert keys.runtime_name(prefix) == name


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_found_and_read(saved: Saved, name: str) -> None:
    folder, model = saved(name)
    source = SourceModel.open(str(folder))
    assert (source.keymap.unmatched, source.keymap.missing) == ((), ())
    for parameter, tensor in model.state_dict().items():
        assert torch.equal(read_parameter(source.store, source.keymap, parameter), tensor)
    assert_prefixes_lead_back(source.keymap)


@pytest.mark.parametrize(
    ("name", "model_class"),
    [
        ("bert", "BertModel"),
        ("bert", "BertForSequenceClassification"),
        ("bert_base", "BertForMaskedLM"),
        ("vit", "ViTModel"),
        ("mixtral", "MixtralModel"),
        ("llama_tied", "LlamaModel"),
        ("gpt2", "GPT2Model"),
        ("t5", "T5Model"),
        ("t5", "T5ForSequenceClassification"),
        ("nomic_bert", "NomicBertForMaskedLM"),
    ],
)
def test_heads_and_bare_models_read_each_others_checkpoints(
    saved: Saved, name: str, model_class: str
) -> None:
    """Everything equals what `from_pretrained` makes of the same files."""
    folder, _ = saved(name)
    store, keys = map_as(folder, model_class)
    kind: Any = getattr(transformers, model_class)
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert set(keys.missing) == set(report["missing_keys"])
    assert {keys._module_keys[key] for key in keys.unmatched} == set(report["unexpected_keys"])
    for parameter, tensor in model.state_dict().items():
        if parameter not in keys.missing:
            read = read_parameter(store, keys, parameter)
            assert torch.equal(read, tensor), parameter
            assert read.untyped_storage().nbytes() == read.nbytes
    assert_prefixes_lead_back(keys)


@pytest.mark.parametrize(
    ("name", "module", "prefix"),
    [
        (
            "bert",
            "bert.encoder.layer.0.attention.self.query",
            "bert.encoder.layer.0.attention.self.query",
        ),
        ("vit", "vit.layers.1.attention.q_proj", "vit.encoder.layer.1.attention.attention.query"),
        ("vit", "vit.layers.1.mlp.fc2", "vit.encoder.layer.1.output.dense"),
        ("vit", "vit.layers.1.attention", "vit.encoder.layer.1.attention"),
        ("mixtral", "model.layers.0.mlp.experts", "model.layers.0.block_sparse_moe.experts"),
        ("mixtral", "model.layers.0.mlp", "model.layers.0.block_sparse_moe"),
        ("qwen3_moe", "model.layers.1.mlp.experts", "model.layers.1.mlp.experts"),
        ("gpt2", "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_attn"),
        # A third of a stored tensor has no stored name: what saving would call it is free to use.
        ("nomic_bert", "layers.0.self_attn.q_proj", "encoder.layers.0.self_attn.q_proj"),
        ("nomic_bert", "layers.0.self_attn.o_proj", "encoder.layers.0.attn.out_proj"),
    ],
)
def test_stored_names_of_modules(saved: Saved, name: str, module: str, prefix: str) -> None:
    keys = SourceModel.open(str(saved(name)[0])).keymap
    assert keys.checkpoint_prefix(module) == prefix
    assert keys.runtime_name(prefix) == module


def test_stored_names_are_found_without_the_checkpoint_and_across_heads() -> None:
    with torch.device("meta"):
        config = transformers.ViTConfig(num_hidden_layers=1)
        bare = KeyMap(transformers.ViTModel(config), ())
        head = KeyMap(transformers.ViTForImageClassification(config), ())
    stored = "vit.encoder.layer.0.output.dense"
    assert bare.runtime_name(stored) == "layers.0.mlp.fc2"
    assert head.runtime_name(stored) == "vit.layers.0.mlp.fc2"
    assert head.runtime_name(stored.removeprefix("vit.")) == "vit.layers.0.mlp.fc2"
    assert head.runtime_name("classifier") == "classifier"
    assert bare.runtime_name("classifier") is None


def test_only_the_tensors_of_one_parameter_are_read(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SourceModel.open(str(saved("mixtral")[0]))
    tensor = Mock(wraps=source.store.tensor)
    monkeypatch.setattr(source.store, "tensor", tensor)
    name = "model.layers.1.mlp.experts.down_proj"
    read_parameter(source.store, source.keymap, name)
    read = [call.args[0] for call in tensor.call_args_list]
    assert sorted(read) == sorted(source.keymap.sources(name).keys)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("renamed", [True, False])
def test_experts_that_are_stored_merged_are_read(
    saved: Saved, tmp_path: Path, name: str, renamed: bool
) -> None:
    folder, model = saved(name)
    tensors = {
        key.replace(".mlp.", ".block_sparse_moe.") if renamed and name == "mixtral" else key: tensor
        for key, tensor in model.state_dict().items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    source = SourceModel.open(str(tmp_path))
    experts = "model.layers.0.mlp.experts"
    assert source.keymap.sources(f"{experts}.gate_up_proj").converter is None
    for parameter, tensor in model.state_dict().items():
        assert torch.equal(read_parameter(source.store, source.keymap, parameter), tensor)
    assert_prefixes_lead_back(source.keymap)


def test_a_fused_tensor_is_taken_apart(saved: Saved) -> None:
    """Who rewrites one part must store the others."""
    keys = SourceModel.open(str(saved("nomic_bert")[0])).keymap
    one, *names = (f"layers.0.self_attn.{part}_proj.weight" for part in ("q", "k", "v"))
    for name in (one, *names):
        assert keys.sources(name).keys == ("encoder.layers.0.attn.Wqkv.weight",)
    assert keys.apart([one]) == {f"encoder.{name}": name for name in names}
    assert keys.apart([one, *names]) == {}
    assert keys.apart(["layers.0.self_attn.o_proj.weight"]) == {}


def test_tied_parameters_share_their_source(saved: Saved) -> None:
    keys = SourceModel.open(str(saved("llama_tied")[0])).keymap
    assert keys.tied("lm_head.weight") == ("model.embed_tokens.weight",)
    assert keys.tied("model.norm.weight") == ()
    assert keys.sources("lm_head.weight").keys == ("model.embed_tokens.weight",)


def test_a_tie_is_followed_in_both_directions(saved: Saved, tmp_path: Path) -> None:
    folder, model = saved("llama_tied")
    store, keys = map_as(folder, "LlamaForCausalLM")
    tensors = {key: store.tensor(key) for key in store.keys()}  # noqa: SIM118 - not a mapping
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    keys = KeyMap(keys.model, tensors)
    store = WeightStore.open(tmp_path)
    assert keys.missing == ()
    embeddings = read_parameter(store, keys, "model.embed_tokens.weight")
    assert torch.equal(embeddings, model.get_input_embeddings().weight)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_tensor_that_is_stored_again_is_left_out(
    file: str, differs: bool, saved: Saved, tmp_path: Path
) -> None:
    folder, model = saved("llama_tied")
    shutil.copy(folder / "config.json", tmp_path)
    state = model.state_dict()
    if differs:
        state["lm_head.weight"] = state["lm_head.weight"] + 1
    if file.endswith(".bin"):
        torch.save(state, tmp_path / file)
    else:
        save_file({key: tensor.clone() for key, tensor in state.items()}, tmp_path / file)
    store = SourceModel.open(str(tmp_path)).store
    assert {*state} - {*store.keys()} == (set() if differs else {"lm_head.weight"})
    assert store.total_bytes == sum(state[key].nbytes for key in store.keys())  # noqa: SIM118


def test_old_names_and_harmless_leftovers_are_known(saved: Saved) -> None:
    _, keys = map_as(saved("bert_base")[0], "BertModel")
    extra = ["embeddings.position_ids", "bert.encoder.layer.7.x", "pooler.dense.weight"]
    keys = KeyMap(keys.model, [*extra, "embeddings.LayerNorm.gamma"])
    assert keys.ignored == ("embeddings.position_ids",)
    assert keys.unmatched == ("bert.encoder.layer.7.x",)
    assert "embeddings.LayerNorm.weight" not in keys.missing
    assert "embeddings.LayerNorm.bias" in keys.missing


def test_of_two_keys_for_one_parameter_the_first_counts(saved: Saved) -> None:
    _, keys = map_as(saved("bert_base")[0], "BertModel")
    keys = KeyMap(keys.model, ["pooler.dense.bias", "bert.pooler.dense.bias"])
    assert keys.sources("pooler.dense.bias").keys == ("bert.pooler.dense.bias",)
    assert keys.unmatched == ("pooler.dense.bias",)


def test_a_parameter_that_the_checkpoint_lacks_is_named(saved: Saved) -> None:
    store, keys = map_as(saved("bert")[0], "BertModel")
    assert keys.missing == ("pooler.dense.weight", "pooler.dense.bias")
    with pytest.raises(SourceError, match=r"for parameter `pooler\.dense\.weight`"):
        read_parameter(store, keys, "pooler.dense.weight")


def test_a_module_that_transformers_would_not_fill_is_refused(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    swallowed = [WeightRenaming(r"self\.query", "self.key")]
    monkeypatch.setattr(keymap, "get_model_conversion_mapping", lambda _, **__: swallowed)
    _, keys = map_as(saved("bert_base")[0], "BertModel")
    with pytest.raises(SourceError, match="has no name of its own in the checkpoint"):
        keys.checkpoint_prefix("encoder.layer.0.attention.self.query")


def test_a_shape_that_the_config_does_not_give_is_refused(saved: Saved, tmp_path: Path) -> None:
    _, keys = map_as(saved("bert_base")[0], "BertModel")
    save_file({"pooler.dense.bias": torch.ones(31)}, tmp_path / "model.safetensors")
    with pytest.raises(SourceError) as caught:
        read_parameter(WeightStore.open(tmp_path), keys, "pooler.dense.bias")
    assert caught.value.message == (
        "`pooler.dense.bias` has shape [31] in the checkpoint, but [32] by `config.json`"
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [((32, 63), "`{name}` cannot be made of"), (None, "has no tensor `{key}`")],
)
def test_experts_that_make_no_stack_are_refused(
    shape: tuple[int, int] | None, message: str, saved: Saved, tmp_path: Path
) -> None:
    keys = SourceModel.open(str(saved("mixtral")[0])).keymap
    name = "model.layers.0.mlp.experts.down_proj"
    key, *others = keys.sources(name).keys
    tensors = {other: torch.ones(32, 64) for other in others}
    if shape is not None:
        tensors[key] = torch.ones(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=message.format(name=name, key=key)):
        read_parameter(WeightStore.open(tmp_path), keys, name)
