"""Checkpoints that hold less, or more, than the class they name, and data that reaches not all."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from tcompress.blockwise.output_sampler import OutputSampler
from tcompress.blockwise.sensitivity import BackwardWalk
from tcompress.blockwise.streams import PartialModel
from tcompress.conversion.converter import convert
from tcompress.errors import FitError, PlanError, SourceError
from tcompress.inspection import inspect_model
from tcompress.models import SourceModel
from tcompress.reporting.model_report import report_of
from tests.support.conversions import calibration, make, recipe
from tests.support.model_folders import edited, save_tokenizer
from tests.support.tiny import TINY, build

pytestmark = pytest.mark.usefixtures("one_thread")


def _claiming(model: Any, folder: Path, name: str) -> SourceModel:
    """A model that is saved under the name of another class."""
    model.save_pretrained(folder)
    with edited(folder / "config.json") as config:
        config["architectures"] = [name]
    return SourceModel.open(str(folder))


@pytest.mark.parametrize("changes", [{}, {"drop_layers": 1, "method": None, "target": None}])
def test_an_encoder_saved_without_the_head_that_it_names(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """As many sentence encoders are."""
    source = _claiming(build("mpnet").mpnet, tmp_path / "dense", "MPNetForMaskedLM")
    assert source.model_class.__name__ == "MPNetModel"
    chosen = recipe("svd", aware=True, **changes)
    convert(source, chosen, tmp_path / "out", data=calibration("mpnet"))
    named = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]
    assert named == ["MPNetModel"]
    model, info = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not {name for name in info["missing_keys"] if "pooler" not in name}
    assert type(model).__name__ == "MPNetModel"


def test_a_language_model_whose_head_is_not_stored_is_no_language_model(tmp_path: Path) -> None:
    """An engine that goes by `architectures` would draw its head at random."""
    name = _stored_otherwise(
        tmp_path / "dense", "llama", lambda weights: weights.pop("lm_head.weight")
    )
    said = "names a `LlamaForCausalLM`, but nothing is stored of its head: it is taken as a `Llama"
    assert said in inspect_model(name, plan=True).warnings[0]
    done = convert(name, recipe("svd"), tmp_path / "out")
    assert said in done.manifest.plan.warnings[0]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaModel"]
    assert "stored_as" not in config["quantization_config"]
    _, info = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]


def test_a_head_that_is_tied_is_there(tmp_path: Path) -> None:
    source = _claiming(build("gpt2").transformer, tmp_path, "GPT2LMHeadModel")
    assert source.model_class.__name__ == "GPT2LMHeadModel"


def test_a_model_without_its_pooler(tmp_path: Path) -> None:
    build("vit").vit.save_pretrained(tmp_path / "dense")
    assert SourceModel.open(str(tmp_path / "dense")).keymap.missing
    chosen = recipe("svd", aware=True)
    done = convert(str(tmp_path / "dense"), chosen, tmp_path / "out", data=calibration("vit"))
    layers = done.manifest.plan.layers
    assert len({entry.parameters / entry.dense_parameters for entry in layers}) > 2


@pytest.mark.parametrize("head", [False, True])
def test_sinusoids_that_are_not_stored_are_computed(head: bool, tmp_path: Path) -> None:
    marian = replace(TINY["bart"], config="MarianConfig", model="MarianMTModel")
    marian.build().save_pretrained(tmp_path)
    name = "model.decoder.embed_positions.weight"
    assert name not in load_file(tmp_path / "model.safetensors")
    partial = PartialModel(SourceModel.open(str(tmp_path)), torch.device("cpu"), head=head)
    expected = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).get_parameter(name)
    assert partial.model.get_parameter(name).equal(expected)


def test_what_a_block_need_not_store_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model: Any = build("llama")
    state = {k: v for k, v in model.state_dict().items() if "input_layernorm" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    kind: Any = type(model)
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_missing", [r"input_layernorm\.weight"])
    partial = PartialModel(SourceModel.open(str(tmp_path)), torch.device("cpu"))
    block = next(iter(partial.blocks))
    with closing(partial.prefetch([block])) as reader, partial.loaded(block, reader) as module:
        assert bool(module.input_layernorm.weight.eq(1).all())


def test_old_buffers_stay_behind(tmp_path: Path) -> None:
    model: Any = build("gpt2")
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    state |= {f"transformer.h.{block}.attn.bias": torch.ones(1, 1, 8, 8) for block in range(2)}
    model.save_pretrained(tmp_path / "dense", state_dict=state)
    source = SourceModel.open(str(tmp_path / "dense"))
    assert len(source.keymap.stale) == 2
    done = convert(source, recipe("svd"), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in stored if name.endswith(".attn.bias")]
    assert done.manifest.plan.layers


def _stored_otherwise(
    folder: Path, family: str, change: Callable[[dict[str, Tensor]], object], **config: Any
) -> str:
    """Writes a tiny model with other tensors, and other words in its config."""
    build(family).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with edited(folder / "config.json") as settings:
        settings |= config
    return str(folder)


def _cast(dtype: torch.dtype) -> Callable[[dict[str, Tensor]], object]:
    def change(weights: dict[str, Tensor]) -> None:
        weights |= {key: item.to(dtype) for key, item in weights.items() if item.ndim == 2}

    return change


Q0, Q1 = (f"model.layers.{index}.self_attn.q_proj.weight" for index in range(2))
WRONG: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], dict[str, Any], list[str]]] = {
    "tensors": (
        "llama",
        lambda weights: [weights.pop(key) for key in (Q0, Q1, "model.norm.weight")],
        {},
        ["`model.layers.0.self_attn.q_proj`", "layers.1.self_attn.q_proj`", "`model.norm` (3 te"],
    ),
    "blocks": (
        "llama",
        lambda _: None,
        {"num_hidden_layers": 4},
        ["nothing is stored for `model.layers.2`, `model.layers.3` (18 tensors)"],
    ),
    "head": (
        "llama",
        lambda weights: weights.pop("model.norm.weight"),
        {},
        ["nothing is stored for `model.norm`"],
    ),
    "shapes": ("llama", lambda _: None, {"intermediate_size": 48}, ["[64, 32], not [48, 32]"]),
    "several": (
        "llama",
        lambda weights: (weights.pop(Q0), _cast(torch.int8)(weights)),
        {"intermediate_size": 48},
        [f"`{Q0[:-7]}", "[64, 32], not [48, 32]", "are stored as `int8`"],
    ),
    "experts": (
        "mixtral",
        lambda _: None,
        {"intermediate_size": 48},
        ["gate_up_proj` has shape [4, 128, 32], not [4, 96, 32]"],
    ),
    **{
        str(dtype): ("llama", _cast(dtype), {}, ["and no `quantization_config` says what"])
        for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn)
    },
    "class": (
        "bert",
        lambda _: None,
        {"architectures": ["Foo"]},
        ["`architectures` names `Foo`, which nobody knows, and a `BertModel`", "place for `cls` ("],
    ),
}


@pytest.mark.often("class")
@pytest.mark.parametrize("case", WRONG)
def test_weights_that_the_config_does_not_describe(case: str, tmp_path: Path) -> None:
    """All is said at once, before anything is done, by whatever opens the model."""
    family, change, config, said = WRONG[case]
    name = _stored_otherwise(tmp_path / "dense", family, change, **config)
    for use in (
        lambda: inspect_model(name, plan=case == "head"),  # headers do not tell that it is missing
        lambda: report_of(name),
        lambda: SourceModel.open(name, converted=True),  # as `evaluate`, `bench`, `finetune` do
        lambda: convert(name, recipe("svd"), tmp_path / "out"),
    ):
        with pytest.raises(SourceError) as refused:
            use()
        assert all(text in refused.value.message for text in said), refused.value.message
        assert refused.value.hint
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}
    SourceModel.open(name, seed=0)  # weights do not count where they are drawn


def test_weights_beyond_the_config_stay_behind_and_are_named(tmp_path: Path) -> None:
    name = _stored_otherwise(tmp_path / "dense", "llama", lambda _: None, num_hidden_layers=1)
    done = convert(name, recipe("svd"), tmp_path / "out")
    note = "has no place for `model.layers.1` (9 tensors)"
    assert note in done.manifest.plan.warnings[0]
    assert note in inspect_model(name).warnings[0]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not [key for key in stored if ".layers.1." in key]


def test_a_class_that_nobody_knows(tmp_path: Path) -> None:
    (note,) = _claiming(build("bert").bert, tmp_path, "Foo").notes[:1]
    assert note == "nobody knows the class `Foo`: a `BertModel` is taken instead"


@pytest.mark.often("bert", "mixtral")
@pytest.mark.parametrize("family", TINY)
def test_whole_models_are_whole(family: str, sources: Callable[[str], SourceModel]) -> None:
    assert sources(family).notes == ()


def test_budgets_by_loss_of_experts_alone(tmp_path: Path) -> None:
    """Nothing predicts what they lose."""
    only: dict[str, Any] = {"aware": True, "only": ["experts_*"]}
    assert 0.3 < make("mixtral", tmp_path / "target", "svd", target=0.5, **only).plan.kept <= 0.5
    with pytest.raises(PlanError, match="no error is predicted for any of these layers"):
        make("mixtral", tmp_path / "error", "svd", target=None, max_error=0.1, **only)


def test_outputs_of_calibration_are_held_one_at_a_time(
    sources: Callable[[str], SourceModel], tmp_path: Path
) -> None:
    source, cpu = sources("llama"), torch.device("cpu")
    batches = [TINY["llama"].inputs(2, 8, seed) for seed in range(4)]
    others: list[int] = []

    class Counting(OutputSampler):
        def __call__(self, *drawn: Any) -> list[tuple[Tensor, Tensor]]:
            others.append(sum(one.output is not None for one in walk._streams.values()))
            return super().__call__(*drawn)

    walk = BackwardWalk(source, batches, Counting(None), tmp_path, cpu)
    assert len(list(walk.run())) == 2
    assert others == [0, 0, 0, 0]


def test_layers_that_no_data_reaches_are_named(tmp_path: Path) -> None:
    text = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=119
    )
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    chosen = recipe(aware=True, method={"name": "lprod", "p": 2, "transform": "dct"})
    done = convert(str(tmp_path / "dense"), chosen, tmp_path / "out")
    note = done.manifest.plan.warnings[-1]
    assert note.startswith("the calibration data does not reach 6 of 13 layers (such as ")


@pytest.mark.parametrize("independent", [False, True])
def test_a_change_of_the_output_is_never_below_zero(independent: bool) -> None:
    """Float32 has room for errors of 1e-7 in every logarithm; the divergences are far smaller."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(3, 50, generator=generator)
    dense[0, 7] = -torch.inf  # ruled out
    sampler = OutputSampler(None, independent=independent)
    assert sampler.change(SimpleNamespace(logits=dense), SimpleNamespace(logits=dense), {}) == 0
    moved = torch.randn(3, 50, generator=generator).double()
    for size in (1e-1, 1e-4, 1e-7):
        one = dense.double()
        found = sampler.change(
            SimpleNamespace(logits=one), SimpleNamespace(logits=one + size * moved), {}
        )
        p = one.sigmoid() if independent else one.softmax(-1)
        mean = 0 if independent else (p * moved).sum(-1, keepdim=True)
        spread = p * (1 - p) * moved.square() if independent else p * (moved - mean).square()
        assert found == pytest.approx(size**2 * float(spread.sum()), rel=3 * size + 1e-6)
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(FitError, match="holds NaN or infinity"):
            sampler(SimpleNamespace(logits=torch.full((1, 3), wrong)), {})
        with pytest.raises(FitError, match="holds NaN or infinity"):
            sampler.change(SimpleNamespace(logits=one), SimpleNamespace(logits=one * wrong), {})


def test_scores_that_are_a_yes_or_no_each() -> None:
    """The drawn gradients have the curvature of the divergence, padding left out."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(2, 6, generator=generator)
    change = 1e-3 * torch.randn(2, 6, generator=generator)
    batch = {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])}
    sampler = OutputSampler(None, independent=True, per_token=True)
    output = SimpleNamespace(logits=dense)
    moved = sampler.change(output, SimpleNamespace(logits=dense + change), batch)
    chance = dense.sigmoid()
    wanted = (chance * (1 - chance) * change.square() * batch["attention_mask"]).sum()
    assert moved == pytest.approx(float(wanted), rel=0.05)
    drawn = torch.stack([sampler(output, batch, index)[0][1] for index in range(4000)])
    own = (drawn * change).sum(-1).square().mean(0).sum()
    assert float(own) == pytest.approx(float(wanted), rel=0.1)
    assert (drawn[:, 1, 2:] == 0).all()
