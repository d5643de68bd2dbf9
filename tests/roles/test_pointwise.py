"""Convolutions with kernels of one point are linear layers on channels."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    SqueezeBertConfig,
    SqueezeBertModel,
)

from tcompress import api
from tcompress.conversion.converter import convert
from tcompress.data.calibration import CalibrationData
from tcompress.options import Convert
from tcompress.roles.find import find_roles
from tcompress.roles.projections import is_pointwise
from tcompress.structures.modules.linear import PointwiseConvolution, channels_last

KERNELS = [
    nn.Conv1d(8, 6, 1),
    nn.Conv1d(8, 6, 1, stride=2, bias=False),
    nn.Conv2d(8, 6, 1),
    nn.Conv2d(8, 6, (1, 1), stride=(2, 3)),
    nn.Conv3d(8, 6, 1, stride=2),
]


class _Config(PreTrainedConfig):
    model_type = "stages"


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(8, 16, 1, stride=2)
        self.spread = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.narrow = nn.Conv2d(16, 8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.spread(self.wide(x)).relu())  # type: ignore[no-any-return]


class _Stages(PreTrainedModel):
    config_class = _Config

    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.stages = nn.ModuleList([_Stage(), _Stage()])
        self.post_init()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            pixel_values = stage(pixel_values)
        return pixel_values


@pytest.mark.parametrize("layer", KERNELS, ids=str)
def test_rows_are_those_of_a_linear_layer(layer: nn.Module) -> None:
    assert is_pointwise(layer)
    x = torch.randn(2, 8, *[7] * len(layer.kernel_size))
    want = layer(x)
    rows = channels_last(layer, x)
    got = nn.functional.linear(rows, layer.weight.flatten(1), layer.bias)
    torch.testing.assert_close(got, channels_last(layer, want, output=True))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(8, 6, 3),
        nn.Conv2d(8, 6, 1, padding=1),
        nn.Conv2d(8, 6, (1, 3)),
        nn.Conv2d(8, 1, 1),
        nn.Conv2d(8, 8, 1, groups=8),
        nn.ConvTranspose2d(8, 6, 1),
        nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 6, 1)),
        nn.Linear(8, 6),
    ],
    ids=str,
)
def test_other_layers_are_none(layer: nn.Module) -> None:
    assert not is_pointwise(layer)


def test_kernels_in_groups_stay_dense() -> None:
    stage = _Stage()
    stage.wide = nn.Conv2d(8, 16, 1, groups=2)
    model = nn.Sequential(stage, _Stage())
    refused = {item.name: item.reason for item in find_roles(model).refused}
    assert refused == {"0.wide": "it is a convolution in groups"}


@pytest.mark.parametrize("method", ["svd", "lprod", "tt", "tucker"])
def test_stages_with_strides_convert_load_and_export(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = _Stages(_Config()).eval()
    with torch.no_grad():
        for stage in dense.stages:
            for weight in (stage.wide.weight, stage.narrow.weight):
                low = torch.randn(len(weight), 2) @ torch.randn(2, weight.shape[1])
                weight.copy_(low.view(weight.shape) / 4)
    AutoModel.register(_Config, _Stages, exist_ok=True)
    AutoConfig.register("stages", _Config, exist_ok=True)
    dense.save_pretrained(tmp_path / "dense")
    options = {"method": method, "calibration": "none", "target": 0.5}
    result = api.convert(tmp_path / "dense", output=tmp_path / "small", **options)
    assert {layer.kind for layer in result.manifest.plan.layers} == {"pointwise"}
    small = _Stages.from_pretrained(tmp_path / "small")
    layer = small.stages[0].wide
    assert isinstance(layer, PointwiseConvolution)
    assert (layer.kernel_size, layer.stride, layer.out_channels) == ((1, 1), (2, 2), 16)
    x = torch.randn(2, 8, 9, 9)
    with torch.no_grad():
        want, got = dense(x), small(x)
        small.stages[0].wide.keep_weight()
        kept = small(x), small(x)
    for again in kept:
        torch.testing.assert_close(again, got, rtol=1e-4, atol=1e-5)
    if method == "svd":  # rank 2 fits into half
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    api.export_dense(tmp_path / "small", tmp_path / "plain")
    plain = _Stages.from_pretrained(tmp_path / "plain")
    assert plain.stages[1].narrow.weight.shape == (8, 16, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(plain(x), got, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model whose layers are all convolutions."""
    groups = {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate")}
    config = SqueezeBertConfig(
        vocab_size=100, embedding_size=32, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=64, output_groups=1, **groups,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("texts")
    SqueezeBertModel(config).save_pretrained(folder)
    return folder


def _batches() -> CalibrationData:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(3):
        tokens = torch.randint(0, 100, (4, 12), generator=generator)
        mask = (torch.arange(12) < torch.tensor([12, 9, 5, 12])[:, None]).long()
        batches.append({"input_ids": tokens, "attention_mask": mask})
    return CalibrationData(batches, [2], "tiny", 12, 144, "squeezebert")


def test_data_reach_them_by_channels_without_padding(texts: Path, tmp_path: Path) -> None:
    data = _batches()
    recipe = {"method": {"name": "svd"}, "target": 0.3, "allocation": "uniform"}
    recipe["calibration"] = {"source": "builtin", "output_moments": False, "damping": 0.0}
    made = convert(str(texts), Convert.model_validate(recipe), tmp_path / "small", data=data)
    name = "encoder.layers.0.attention.query"
    read: list[torch.Tensor] = []
    dense, small = (AutoModel.from_pretrained(path).eval() for path in (texts, tmp_path / "small"))
    layer = dense.get_submodule(name)
    layer.register_forward_pre_hook(lambda _, args: read.append(args[0].mT))
    with torch.no_grad():
        for batch in data.batches[:2]:
            dense(**batch)
    masks = torch.cat([batch["attention_mask"] for batch in data.batches[:2]]).bool()
    rows = torch.cat(read)[masks].double()
    centred = rows - rows.mean(0)
    kernel = layer.weight.detach().flatten(1).double()
    change = kernel - small.get_submodule(name).dense_weight().detach()
    lost = (centred @ change.mT).norm() / (centred @ kernel.mT).norm()
    found = next(item for key, item in made.manifest.fit.items() if key.endswith(f"{name}.weight"))
    assert found["calibration"] == pytest.approx(float(lost) ** 2, rel=1e-3)


@pytest.mark.often("tt")
@pytest.mark.parametrize("method", ["lprod", "tt", "auto"])
def test_other_fits_with_data(method: str, texts: Path, tmp_path: Path) -> None:
    recipe = {"method": {"name": method}, "target": 0.5, "calibration": {"source": "builtin"}}
    made = convert(str(texts), Convert.model_validate(recipe), tmp_path / "small", data=_batches())
    assert {entry.kind for entry in made.manifest.plan.layers} == {"pointwise"}
    for name, errors in made.manifest.fit.items():
        if "attention.value" in name:  # queries and keys matter only as far as scores change
            assert 0 <= errors["calibration"] < 0.3, name
