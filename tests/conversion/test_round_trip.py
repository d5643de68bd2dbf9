"""Every family and every structure: convert, load, compare with a dense model, save, load."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from tcompress.artifact.reader import Artifact, verify_files
from tcompress.conversion.converter import convert
from tcompress.models import SourceModel
from tcompress.models.keymap import KeyMap
from tcompress.planning.entries import LayerPlan
from tests.support.conversions import (
    OPTIONS,
    WIDTHS,
    Made,
    calibration,
    dense_weight,
    densified,
    distance,
    first_outputs,
    load_whole,
    make,
    outputs,
    recipe,
    structured,
)
from tests.support.tiny import TINY, TinyModel, build

ALL = (*OPTIONS, *WIDTHS)


def _stored(folder: Path) -> dict[str, Tensor]:
    files = (load_file(path) for path in folder.glob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in file.items()}


def _check_untouched(made: Made, *, aware: bool) -> None:
    """All tensors but those of rewritten layers are carried over, to the bit."""
    before, after = _stored(made.source), _stored(made.folder)
    weights = {f"{layer.name}.{layer.parameter}" for layer in made.plan.layers}
    fitted_biases = {f"{e.name}.bias" for e in made.plan.layers if aware or e.is_narrow}
    for key, tensor in before.items():
        if key in weights | fitted_biases or key not in after:
            # Experts are stored apart before and together after the conversion.
            assert any(key.startswith(f"{layer.name}.") for layer in made.plan.layers), key
        else:
            assert tensor.dtype == after[key].dtype, key
            assert tensor.numpy().tobytes() == after[key].numpy().tobytes(), key
    assert all(key in before or ".tc_" in key or key in weights for key in after)


def _check_errors(made: Made, model: nn.Module) -> None:
    """Layers are fitted to their own weights: others would be further away than nothing is."""
    for name, layer in structured(model).items():
        if layer.reads or any(part.channels for part in layer.parts):
            continue  # fewer channels, which heads have in a basis of their own
        wanted = dense_weight(made.dense, name)
        missed = wanted - layer.dense_weight(torch.float32).detach()
        assert float(missed.square().sum() / wanted.square().sum()) < 0.9, name


@pytest.mark.often(
    "qwen3-svd-width-True",
    "bert-dct-True",
    "distilbert-dft-True",
    "electra-tubal_rank-True",
    "mpnet-residual-True",
    "gpt2-tt-3-True",
    "opt-tucker-model-True",
    "llama-qtt-True",
    "mixtral-dft-False",
    "t5-gated-svd-False",
    "phi3-fitted-False",
)
@pytest.mark.smoke
@pytest.mark.parametrize(("family", "option", "aware"), [*product(TINY, ALL, (False, True))])
def test_round_trip(family: str, option: str, aware: bool, tmp_path: Path) -> None:
    made = make(family, tmp_path, option, aware=aware)
    model = load_whole(type(made.dense), made.folder)
    assert len(structured(model)) == len(made.plan.layers) > 0
    found = outputs(model, made.inputs())
    assert distance(found, outputs(densified(model, made.dense), made.inputs())) <= 1e-4
    _check_untouched(made, aware=aware)
    assert sum(parameter.numel() for parameter in model.parameters()) == (
        made.plan.parameters - made.plan.saved
    )
    if not aware:
        _check_errors(made, model)
    verify_files(made.folder)
    model.save_pretrained(tmp_path / "again")
    again = load_whole(type(made.dense), tmp_path / "again")
    assert distance(found, outputs(again, made.inputs())) <= 1e-6
    Artifact.open(tmp_path / "again")


def _real_rows(batch: Mapping[str, Tensor], entry: LayerPlan) -> Tensor | slice:
    """Rows of a layer's output that are not padding."""
    in_decoder = "decoder" in entry.block and "decoder_input_ids" in batch
    reads_decoder = in_decoder and entry.role not in ("cross_k", "cross_v")
    mask = batch.get("decoder_attention_mask" if reads_decoder else "attention_mask")
    return slice(None) if mask is None or "vision" in entry.block else mask.flatten().bool()


MEASURED = (
    "bert", "deberta-v2", "gpt2", "llama", "phi3", "t5", "bart", "whisper", "vit", "clip",
)  # fmt: skip


@pytest.mark.often("phi3")
@pytest.mark.parametrize("family", MEASURED)
def test_reported_errors_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    made = make(family, tmp_path, aware=True)
    small, data = made.load(), calibration(family)
    keymap = SourceModel.open(str(made.source)).keymap
    layers = {keymap.runtime_name(entry.name): entry for entry in made.plan.layers}
    rows: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for index, batch in enumerate(data.batches):
        kind = "held_out" if index in data.holdout else "calibration"
        one, two = (first_outputs(model, layers, batch) for model in (made.dense, small))
        for name, entry in layers.items():
            real = _real_rows(batch, entry)
            rows[kind, name].append((one[name][real], two[name][real]))
    for (kind, name), found in rows.items():
        y, z = (torch.cat(parts) for parts in zip(*found, strict=True))
        spread = y - y.mean(0) if layers[name].bias else y
        error = float((y - z).square().sum() / spread.square().sum())
        reported = made.converted.manifest.fit[f"{layers[name].name}.weight"][kind]
        assert reported == pytest.approx(error, rel=1e-3), (kind, name)


def _assert_filled(model: nn.Module, made: Made) -> None:
    """All structured layers hold what the conversion wrote."""
    written, layers = _stored(made.folder), structured(model)
    keymap = KeyMap(model, written)
    names = {keymap.runtime_name(entry.name) for entry in made.plan.layers}
    assert len(layers) == len(made.plan.layers)
    assert {name.rpartition(".")[0] for name in layers} == names
    checked = 0
    for key, tensor in written.items():
        if ".tc_" in key:
            prefix, _, leaf = key.partition(".tc_")
            name = f"{keymap.runtime_name(prefix)}.tc_{leaf}"
            assert torch.equal(model.get_parameter(name), tensor), key
            checked += 1
    assert checked >= len(layers)


HEADS = {
    "bert": AutoModelForMaskedLM, "gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM,
    "mixtral": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM,
    "vit": AutoModelForImageClassification,
}  # fmt: skip


@pytest.mark.often("gpt2")
@pytest.mark.parametrize("family", HEADS)
def test_auto_class_of_the_head(family: str, models: Callable[[str, str], Made]) -> None:
    made = models(family, "dct")
    model = load_whole(HEADS[family], made.folder)
    assert type(model) is type(made.dense)
    _assert_filled(model, made)


@pytest.mark.often("vit")
@pytest.mark.parametrize("family", HEADS)
def test_the_base_of_a_model_with_a_head(family: str, models: Callable[[str, str], Made]) -> None:
    made = models(family, "dct")
    base, info = AutoModel.from_pretrained(made.folder, output_loading_info=True)
    assert not info["mismatched_keys"]
    assert not any("tc_" in key or key.startswith("encoder.") for key in info["missing_keys"])
    _assert_filled(base, made)
    whole = made.load()
    inner = getattr(whole, whole.base_model_prefix, whole)
    if family != "t5":  # which is its own base
        inputs = made.inputs()
        assert distance(outputs(base, inputs)[:1], outputs(inner, inputs)[:1]) == 0


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_another_head(family: str, models: Callable[[str, str], Made]) -> None:
    made = models(family, "dct")
    model, info = AutoModelForSequenceClassification.from_pretrained(
        made.folder, num_labels=3, output_loading_info=True
    )
    assert not info["mismatched_keys"]
    assert info["missing_keys"]
    assert all(
        "score" in key or "classif" in key or "pooler" in key for key in info["missing_keys"]
    )
    _assert_filled(model, made)
    tokens = made.inputs()["input_ids"]
    tokens[:, 0] = 2  # T5 reads its result at the one end of a sentence
    assert outputs(model, {"input_ids": tokens})[0].shape == (2, 3)


def _base_alone(family: str, folder: Path) -> Made:
    """Convert a model that was saved without a head."""
    kind = type(build(family).base_model).__name__
    dense = TinyModel(TINY[family].config, kind, TINY[family].options, TINY[family].needs).build()
    dense.save_pretrained(folder / "dense")
    converted = convert(str(folder / "dense"), recipe(), folder / "small")
    return Made(family, dense, folder / "dense", converted)


@pytest.mark.often("vit")
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "vit", "mixtral"])
def test_a_base_model_alone(family: str, tmp_path: Path) -> None:
    made = _base_alone(family, tmp_path)
    base = load_whole(AutoModel, made.folder)
    assert type(base) is type(made.dense)
    _assert_filled(base, made)
    inputs = made.inputs()
    assert distance(outputs(base, inputs), outputs(densified(base, made.dense), inputs)) <= 1e-4
    _assert_filled(HEADS[family].from_pretrained(made.folder), made)


@pytest.mark.often("False-llama")
@pytest.mark.parametrize("family", ["bert", "llama", "mixtral"])
@pytest.mark.parametrize("added", [False, True])
def test_saved_without_its_head_or_with_one_added(
    family: str, added: bool, models: Callable[[str, str], Made], tmp_path: Path
) -> None:
    made = _base_alone(family, tmp_path) if added else models(family, "dct")
    kind = HEADS[family] if added else AutoModel
    model = kind.from_pretrained(made.folder)
    model.save_pretrained(tmp_path / "again")
    Artifact.open(tmp_path / "again")
    again = load_whole(kind, tmp_path / "again")
    assert distance(outputs(model, made.inputs()), outputs(again, made.inputs())) == 0
