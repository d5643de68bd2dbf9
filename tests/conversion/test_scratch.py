"""Models that begin at random: where their weights come from, and how large they are."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, GPT2Config

from tcompress.artifact.reader import Artifact, verify_files
from tcompress.attention.module import ReplacementModule
from tcompress.errors import RecipeError, SourceError
from tcompress.fitting.first_values import scaled
from tcompress.models import SourceModel
from tcompress.models.keymap import read_parameter
from tcompress.models.model import draw_model
from tcompress.options import Convert
from tcompress.own_models.architecture import open_architecture
from tcompress.planning.planner import make_plan
from tcompress.structures.base import dense_of
from tests.support.conversions import OPTIONS, dense_weight, load_whole, outputs, structured
from tests.support.scratch import LPROD, architecture, config_folder, scratch
from tests.support.structure_cases import Case, marked_cases
from tests.support.structures import random_bank, random_operators
from tests.support.tiny import TINY

# ------------------------------------------------------------- weights of the dense model


@pytest.mark.often("bert", "gpt2", "mixtral", "t5", "vit")
@pytest.mark.parametrize("family", TINY)
def test_drawn_weights_are_a_checkpoint_like_any_other(family: str, tmp_path: Path) -> None:
    source = SourceModel.open(str(config_folder(family, tmp_path / "config")), seed=3)
    dense = draw_model(source.model_class, source.config, 3)
    dense.save_pretrained(tmp_path / "saved")
    saved = SourceModel.open(str(tmp_path / "saved")).store
    assert source.store.keys() == saved.keys()
    for key in saved.keys():  # noqa: SIM118 - not a mapping
        assert torch.equal(source.store.tensor(key), saved.tensor(key)), key
    assert source.keymap.missing == ()
    for name, parameter in dense.named_parameters():
        assert torch.equal(read_parameter(source.store, source.keymap, name), parameter), name


def test_nothing_is_drawn_for_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = config_folder("bert", tmp_path / "bert")
    monkeypatch.setattr("tcompress.models.model.draw_model", lambda *_: pytest.fail("drawn"))
    source = SourceModel.open(str(folder), seed=0)
    plan = make_plan(Convert.model_validate({"init": "random", "method": LPROD}), source)
    assert plan.kept == 0.25


def test_seeds_are_told_apart_and_global_generators_are_left_alone(tmp_path: Path) -> None:
    folder = str(config_folder("bert", tmp_path / "bert"))
    one, same, two = (SourceModel.open(folder, seed=seed) for seed in (0, 0, 1))
    key = "bert.embeddings.word_embeddings.weight"
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(one.store.tensor(key), same.store.tensor(key))
    assert not torch.equal(one.store.tensor(key), two.store.tensor(key))
    assert torch.equal(torch.rand(1), wanted)
    assert one.store.fingerprint() == same.store.fingerprint() != two.store.fingerprint()


def test_weights_that_are_there_are_not_read(tmp_path: Path) -> None:
    folder = config_folder("bert", tmp_path / "bert")
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert SourceModel.open(str(folder), seed=0).seed == 0


def test_sizes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(SourceError, match="no `BertForSequenceClassification` can be built with"):
        open_architecture(architecture(hidden_size=30), 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": "1e4"}, "`architecture.vocab_size` is `1e4`, expected a whole number"),
        ({"type_vocab_size": "2"}, "`architecture.type_vocab_size` is `2`, expected a whole"),
        ({"class": None, "architectures": [5]}, "`architecture.class` is `5`, which is no class"),
    ],
)
def test_values_of_another_kind_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        open_architecture(architecture(**changes), 0)


# ------------------------------------------------------------- first values of structures
@pytest.mark.parametrize("case", marked_cases(), ids=str)
def test_a_weight_is_linear_in_each_tensor_that_is_scaled(case: Case) -> None:
    layout, kind = case.layout(), case.kind
    drawn = {k: t.double() for k, t in kind.start(layout, torch.Generator()).items()}
    bank, operators = random_bank(layout), random_operators(layout)
    dense = dense_of(layout, {**drawn, **bank}, operators)
    larger = dense_of(layout, {**scaled(drawn, 3.0), **bank}, operators)
    torch.testing.assert_close(larger, 3 * dense)
    nothing = scaled(drawn, 0.0)
    assert not dense_of(layout, {**nothing, **bank}, operators).any()
    assert sum(bool(tensor.any()) for tensor in nothing.values()) == len(nothing) - 1


FAMILIES = ("bert", "gpt2", "mixtral", "phi3", "t5", "vit")


@pytest.mark.often("tucker-model-phi3")
@pytest.mark.parametrize(("option", "family"), [*product(OPTIONS, FAMILIES)])
def test_weights_are_as_large_as_the_host_draws_them(
    option: str, family: str, tmp_path: Path
) -> None:
    source = SourceModel.open(str(config_folder(family, tmp_path / "config")), seed=2)
    made = scratch(tmp_path / "made", source, seed=2, **OPTIONS[option])
    dense = draw_model(source.model_class, source.config, 2)
    model = type(dense).from_pretrained(made.folder)
    layers = structured(model)
    assert len(layers) == len(made.manifest.plan.layers) > 0
    for name, layer in layers.items():
        ratio = _size(layer.dense_weight()) / _size(dense_weight(dense, name))
        assert 0.9 < ratio < 1.1, (name, ratio)
        bias = getattr(dense.get_submodule(name.rpartition(".")[0]), "bias", None)
        if layer.bias is not None and bias is not None:
            assert torch.equal(layer.bias, bias)
    rest = {name for name, _ in model.named_parameters() if "tc_" not in name}
    for name, parameter in dense.named_parameters():
        if name in rest:
            assert torch.equal(model.get_parameter(name), parameter), name
    verify_files(made.folder)
    model.save_pretrained(tmp_path / "again")
    again = type(dense).from_pretrained(tmp_path / "again")
    inputs = TINY[family].inputs(2, 8, 0)
    for one, two in zip(outputs(model, inputs), outputs(again, inputs), strict=True):
        assert torch.equal(one, two)


def _size(weight: Tensor) -> float:
    return float(weight.detach().double().square().mean().sqrt())


@pytest.mark.often("svd")
@pytest.mark.parametrize("option", ["dct", "residual", "svd", "tt", "tucker-model"])
def test_activations_keep_their_scale_through_depth(option: str, tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=100, n_embd=64, n_layer=8, n_head=4, n_positions=32, initializer_range=0.125
    )
    config.architectures = ["GPT2Model"]
    config.save_pretrained(tmp_path / "config")
    source = SourceModel.open(str(tmp_path / "config"), seed=0)
    made = scratch(tmp_path / "made", source, **OPTIONS[option])
    models = (
        draw_model(source.model_class, source.config, 0),
        AutoModel.from_pretrained(made.folder),
    )
    sizes = [_before_the_last_norm(model) for model in models]
    assert 0.8 < sizes[1] / sizes[0] < 1.25, sizes


def _before_the_last_norm(model: nn.Module) -> float:
    found: list[Tensor] = []
    model.get_submodule("ln_f").register_forward_pre_hook(lambda _, args: found.append(args[0]))
    ids = torch.randint(0, 100, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids)
    return _size(found[0])


def test_tables_of_words_begin_like_the_hosts(tmp_path: Path) -> None:
    source = SourceModel.open(str(config_folder("gpt2", tmp_path / "config")), seed=0)
    embeddings = {"method": {"name": "svd"}, "target": 0.5}
    made = scratch(tmp_path / "made", source, embeddings=embeddings)
    dense = draw_model(source.model_class, source.config, 0)
    model: Any = type(dense).from_pretrained(made.folder)
    table = model.transformer.wte.dense_weight()
    assert _size(table) == pytest.approx(_size(dense.get_input_embeddings().weight), rel=0.02)
    with torch.no_grad():  # the head is tied
        scores = model(input_ids=torch.tensor([[5, 6]])).logits
        states = model.transformer(input_ids=torch.tensor([[5, 6]])).last_hidden_state
    torch.testing.assert_close(scores, states @ table.float().T)


def test_mechanisms_begin_as_their_papers_say(tmp_path: Path) -> None:
    made = scratch(tmp_path / "made", attention={"name": "multilinear", "length": 12})
    model = AutoModelForSequenceClassification.from_pretrained(made.folder)
    named = {name: t for name, t in model.named_parameters() if ".tc_attn." in name}
    layers = [[t for name, t in named.items() if f"layer.{i}." in name] for i in (0, 1)]
    assert layers[0]
    assert any(not torch.equal(one, two) for one, two in zip(*layers, strict=True))
    cores = [tensor for name, tensor in named.items() if name.endswith("core")]
    for core in cores:  # a softmax of noise
        torch.testing.assert_close(core.sum(-1), torch.ones(core.shape[:-1]))
        assert 0.1 < float(core.detach().std() * core.shape[-1]) < 0.5


def test_tam_begins_with_semantics_at_work(tmp_path: Path) -> None:
    """A trained host begins as its own attention, where semantics are closed out; this must not."""
    made = scratch(tmp_path / "made", attention={"name": "tam", "memory": "gru"})
    model = AutoModelForSequenceClassification.from_pretrained(made.folder)
    for module in model.modules():
        if isinstance(module, ReplacementModule):
            spread = module.layout.head_dim**-0.5
            assert float(module.semantic_weight.detach().std()) == pytest.approx(spread, rel=0.2)
            assert not module.semantic_bias.any()
            assert bool((module.context_gate == 1).all())


REPLACEMENTS = (
    {"name": "tga"},
    {"name": "tsa", "filter_order": 3},
    {"name": "hot", "fold": 4},
    {"name": "hot", "fold": 4, "kernel": "favor"},
    {"name": "tam"},
    {"name": "tam", "core": "tucker", "memory": "gru"},
)
"""All but multilinear attention: products of three small numbers are as small as its paper has."""


@pytest.mark.often("{'name': 'tga'}")
@pytest.mark.parametrize("attention", REPLACEMENTS, ids=str)
def test_what_mechanisms_mix_keeps_its_scale(attention: dict[str, Any], tmp_path: Path) -> None:
    """No more than values have, and not next to nothing; softmax attention averages too."""
    made = scratch(tmp_path / "made", attention=attention)
    model = AutoModelForSequenceClassification.from_pretrained(made.folder)
    ratios: list[float] = []
    for module in model.modules():
        if isinstance(module, ReplacementModule):
            module.register_forward_hook(
                lambda _, args, mixed: ratios.append(_size(mixed) / _size(args[2]))
            )
    ids = torch.randint(4, 40, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids)
    assert len(ratios) == 2
    assert all(0.1 < ratio < 3 for ratio in ratios), ratios


# ------------------------------------------------------------- what is written
def test_without_a_method_the_dense_model_is_written(tmp_path: Path) -> None:
    made = scratch(tmp_path / "made")
    source = open_architecture(architecture(), 0)
    model = load_whole(AutoModelForSequenceClassification, made.folder)
    dense = draw_model(source.model_class, source.config, 0)
    for name, parameter in dense.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    assert "quantization_config" not in (made.folder / "config.json").read_text()
    assert made.manifest.plan.method == "dense"


def test_seeds_decide_the_structures_too(tmp_path: Path) -> None:
    stored = [
        Artifact.open(scratch(tmp_path / str(i), method=LPROD, seed=seed).folder).store
        for i, seed in enumerate((0, 0, 1))
    ]
    keys = [key for key in stored[0].keys() if "tc_" in key]  # noqa: SIM118 - not a mapping
    assert keys
    for key in keys:
        one, same, other = (store.tensor(key) for store in stored)
        assert torch.equal(one, same)
        # They differ in more than their size, which follows the dense weights.
        assert not torch.allclose(one / one.norm(), other / other.norm())


@pytest.mark.parametrize("budget", [{"target": 0.5}, {"target_params": 15_000}])
def test_budgets_are_shared_out_alike(budget: dict[str, Any], tmp_path: Path) -> None:
    made = scratch(tmp_path / "made", method={"name": "svd"}, **budget)
    plan = made.manifest.plan
    assert plan.budget.chosen == "uniform"
    assert 0.2 < plan.kept <= 0.5
    assert plan.parameters - plan.saved <= budget.get("target_params", plan.parameters)
