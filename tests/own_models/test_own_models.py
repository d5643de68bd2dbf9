"""The hosts compute what the papers write, and are ordinary Transformers models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from tcompress.conversion.converter import convert
from tcompress.errors import DataError, InputError
from tcompress.own_models.configs import TCompressGridConfig, TCompressTextConfig
from tcompress.own_models.grid import (
    TCompressGridForForecasting,
    TCompressGridForImageClassification,
    patches,
)
from tcompress.own_models.text import TCompressTextForSequenceClassification
from tcompress.roles.find import attentions_of, find_roles
from tests.support.converted import recipe
from tests.support.copied_tree import ROOT, in_tree
from tests.support.depth import drawn
from tests.support.tiny import HORIZON, SERIES, TINY, VOLUME, build

HOSTS = ("tcompress_text", "tcompress_grid", "tcompress_grid-series")


def test_a_padded_batch_of_texts_equals_single_ones() -> None:
    """That single ones are the papers', `tests/reference` says."""
    model: Any = build("tcompress_text")
    batch = TINY["tcompress_text"].inputs(batch=3, length=8, seed=0)
    with torch.no_grad():
        logits = model(**batch).logits
    for words, mask, row in zip(batch["input_ids"], batch["attention_mask"], logits, strict=True):
        torch.testing.assert_close(row, model(words[mask.bool()][None]).logits[0])


def test_dropout_is_where_the_paper_has_it() -> None:
    model: Any = build("tcompress_text").train()
    head = model.classifier
    pooled = torch.ones(4000, 16)
    dropped = (head.dropout(pooled) == 0).float().mean()
    assert 0.08 < float(dropped) < 0.12
    assert [name for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout)] == [
        "classifier.dropout"
    ]


@pytest.mark.parametrize("name", HOSTS)
def test_implementations_of_attention_agree(name: str, tiny: Callable[[str], Path]) -> None:
    model: Any = build(name)
    batch = TINY[name].inputs(batch=2, length=8, seed=0)
    eager = type(model).from_pretrained(tiny(name), attn_implementation="eager").eval()
    with torch.no_grad():
        found, other = model(**batch), eager(**batch, output_attentions=True)
    key = "prediction_outputs" if name.endswith("series") else "logits"
    torch.testing.assert_close(found[key], other[key])
    assert torch.equal(model(**batch, return_dict=False)[0], found[key])
    states = model(**batch, output_hidden_states=True).hidden_states
    assert len(states) == 3
    for weights in other.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_patches_are_blocks_of_the_input() -> None:
    config = TCompressGridConfig(input_size=(4, 6), patch_size=(2, 3), num_channels=2)
    values = torch.randn(1, 2, 4, 6)
    cut = patches(values, config)
    assert cut.shape == (1, 2, 2, 12)
    for row in range(2):
        for column in range(2):
            own = values[0, :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
            assert torch.equal(cut[0, row, column], own.flatten())


def test_positions_of_all_axes_are_added() -> None:
    model: Any = build("tcompress_grid")
    place = model.model.embeddings
    for module in (place.projection, *place.positions):
        torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(place.projection.bias)
    states = {}
    for axis, table in enumerate(place.positions):
        torch.nn.init.ones_(table.weight[1])
        states[axis] = place(torch.zeros(1, 1, *VOLUME)).view(4, 2, 2, -1)[..., 0].detach()
        torch.nn.init.zeros_(table.weight)
    for axis, found in states.items():
        wanted = torch.zeros(4, 2, 2)
        wanted.select(axis, 1).fill_(1)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("instance_norm", [True, False])
def test_forecasts_move_with_their_series(instance_norm: bool) -> None:
    config = TCompressGridConfig(
        input_size=SERIES, patch_size=(1, 4), horizon=HORIZON, instance_norm=instance_norm
    )
    torch.manual_seed(0)
    model = TCompressGridForForecasting(config).eval()
    past = torch.randn(2, 16, 3)
    scale, shift = torch.tensor([2.0, 3.0, 0.5]), torch.tensor([1.0, -5.0, 7.0])
    with torch.no_grad():
        plain = model(past_values=past).prediction_outputs
        moved = model(past_values=past * scale + shift).prediction_outputs
    assert plain.shape == (2, HORIZON, 3)
    assert torch.allclose(moved, plain * scale + shift, atol=1e-3) == instance_norm


def test_a_patch_of_several_variables_forecasts_each() -> None:
    config = TCompressGridConfig(input_size=(4, 8), patch_size=(2, 4), horizon=3)
    model = TCompressGridForForecasting(config).eval()
    past = torch.randn(1, 8, 4)
    with torch.no_grad():
        out = model(past_values=past, labels=torch.zeros(1, 3, 4))
    assert out.prediction_outputs.shape == (1, 3, 4)
    assert float(out.loss) == pytest.approx(float(out.prediction_outputs.square().mean()))


PLANE = {"input_size": (4, 4), "patch_size": (2, 2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_size": (8, 8), "patch_size": (2, 2, 2)}, "differ in their number of axes"),
        ({"input_size": (8, 8), "patch_size": (3, 2)}, "patches do not fill the input"),
        ({"hidden_size": 30}, "4 heads do not divide the width 30"),
        ({"stem": "conv"}, "`stem: conv` is not known; allowed are `linear` and `convolution`"),
        ({"stem": "convolution", "patch_size": (7, 7, 7)}, r"`patch_size` is \[7, 7, 7\]"),
        ({"stem": "convolution", "patch_size": (1, 1, 1)}, r"`patch_size` is \[1, 1, 1\]"),
        (
            {"stem": "convolution", "input_size": (4,) * 4, "patch_size": (2,) * 4},
            "halves up to 3 axes",
        ),
        ({"positions": "sinus"}, "`positions: sinus` is not known"),
        *(
            ({**PLANE, "positions": "rotary", "rotary_axes": axes}, "cannot rotate heads")
            for axes in ([2], [0, 0], [], [-1])
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TCompressGridConfig(**options)


@pytest.mark.parametrize(
    ("size", "patch", "strides"),
    [
        ((8, 8, 4), (2, 4, 2), [(2, 2, 2), (1, 2, 1)]),
        ((3, 16), (1, 8), [(1, 2), (1, 2), (1, 2)]),
        ((8,), (2,), [(2,)]),
    ],
)
def test_convolutions_make_the_same_grid(
    size: tuple[int, ...], patch: tuple[int, ...], strides: list[tuple[int, ...]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = TCompressGridConfig(
        input_size=size, patch_size=patch, hidden_size=16, stem="convolution", num_channels=2
    )
    TCompressGridForImageClassification(config).save_pretrained(tmp_path)
    model = TCompressGridForImageClassification.from_pretrained(tmp_path).eval()
    stem = model.model.embeddings.projection
    assert [layer.stride for layer in stem.layers] == strides
    values = torch.rand(2, 2, *size)
    with torch.no_grad():
        found = stem(values)
        states = values
        for place, layer in enumerate(stem.layers):
            states = layer(states)
            if layer is not stem.layers[-1]:
                states = stem.norms[place](states)
                states = torch.nn.functional.gelu(states)
    assert found.shape == (2, *config.grid, 16)
    torch.testing.assert_close(found, states.movedim(1, -1))
    assert model(grid_values=values).logits.shape == (2, 2)


def test_what_is_no_series_is_refused() -> None:
    with pytest.raises(InputError, match=r"needs a grid of variables x time.*`horizon` None"):
        TCompressGridForForecasting(TCompressGridConfig(input_size=(4, 8), patch_size=(1, 4)))
    with pytest.raises(DataError, match=r"shape \(1, 3, 3\), the model takes \(1, 8, 8, 4\)"):
        build("tcompress_grid")(grid_values=torch.zeros(2, 1, 3, 3))


@pytest.mark.parametrize(("name", "grid"), [("tcompress_grid", (4, 2, 2)), (HOSTS[2], (3, 4))])
def test_kronecker_attention_sees_the_grid(name: str, grid: tuple[int, ...]) -> None:
    model = build(name)
    for attention in attentions_of(model, find_roles(model)):
        assert (attention.grid, attention.special, attention.reason) == (grid, 0, None)
        assert not attention.causal


FIRST = (
    "import tcompress.own_models.grid", "import transformers.modeling_layers, tcompress",
    "import tcompress; from transformers import AutoModel", "import tcompress, transformers",
    "import tcompress, transformers.modeling_layers",
    "from transformers import AutoConfig; import tcompress",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.often("import tcompress.own_models.grid")
@pytest.mark.parametrize("first", FIRST)
def test_auto_classes_know_the_hosts_whatever_is_imported_first(
    first: str, tiny: Callable[[str], Path]
) -> None:
    code = (
        f"{first}\nimport sys\n"
        "from transformers import AutoModel, AutoModelForImageClassification as Images\n"
        "assert type(AutoModel.from_pretrained(sys.argv[1])).__name__ == 'TCompressTextModel'\n"
        "assert Images.from_pretrained(sys.argv[2]).model.config.grid == (4, 2, 2)\n"
    )
    in_tree(ROOT, "-c", code, *map(tiny, HOSTS[:2]))


def test_hosts_are_saved_and_loaded(tmp_path: Path) -> None:
    model = TCompressTextForSequenceClassification(TCompressTextConfig(num_labels=3))
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).head_dim == 64
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = torch.randint(1, 20_000, (2, 5))
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
    base = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    volumes = TCompressGridForImageClassification(TCompressGridConfig(num_labels=3))
    labels = torch.tensor([0, 2])
    for host, inputs in ((model, ids), (volumes, torch.rand(2, 1, 28, 28, 28))):
        with torch.no_grad():
            out = host(inputs, labels=labels)
        torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))


def test_rotary_hosts_have_no_tables_and_convert_on_data(tmp_path: Path) -> None:
    tiny = TINY["tcompress_grid-series"]
    tiny = replace(tiny, options={**tiny.options, "positions": "rotary", "rotary_axes": [1]})
    model: Any = tiny.build()
    assert not list(model.model.embeddings.positions.parameters())
    model.save_pretrained(tmp_path / "dense")
    chosen = recipe(
        attention={"name": "hot", "kernel": "smreg", "pool": "sum"},
        method={"name": "svd", "rank": 4},
        calibration={"source": "builtin"},
    )
    done = convert(str(tmp_path / "dense"), chosen, tmp_path / "out", data=drawn(tiny))
    loaded = TCompressGridForForecasting.from_pretrained(done.folder).eval()
    with torch.no_grad():
        found = loaded(**tiny.inputs(batch=2, length=0, seed=5)).prediction_outputs
    assert torch.isfinite(found).all()
