"""Our modules' weights in the shapes of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tcompress  # noqa: F401 -- Auto classes know our models
from tcompress.models import SourceModel
from tcompress.options.steps import Architecture
from tcompress.own_models.architecture import open_architecture
from tests.reference import lprod
from tests.support.scratch import scratch

Array = np.ndarray
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def array(x: Tensor) -> Array:
    """A tensor as numpy's, float64."""
    return x.detach().double().numpy()


def drawn(*shape: int, seed: int) -> Tensor:
    """Random numbers, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model_of(folder: Path, kind: Any, recipe: dict[str, Any], **sizes: Any) -> Any:
    """A model from scratch as `convert --init random` writes it, in float64, nothing at zero.

    `sizes` are those of its configuration, `recipe` the options of the conversion.
    """
    source: SourceModel = open_architecture(Architecture.model_validate(sizes), 0)
    scratch(folder / "model", source, **recipe)
    model = kind.from_pretrained(folder / "model").double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise)
    return model


def linear(layer: nn.Module) -> tuple[Array, Array]:
    """Weight (in, out) and bias of a dense layer."""
    weight = array(getattr(layer, "tc_weight", layer.weight)).T  # the latter is empty by the former
    bias = np.zeros(weight.shape[1]) if layer.bias is None else array(layer.bias)  # type: ignore[arg-type]
    return weight, bias


def norm(layer: nn.Module) -> dict[str, Array]:
    """Scale and shift of a layer norm."""
    return {"gamma": array(layer.weight), "beta": array(layer.bias)}  # type: ignore[arg-type]


def sliced_norm(layer: nn.Module, p: int) -> dict[str, Array]:
    """The same, (ds, p)."""
    return {name: value.reshape(p, -1).T for name, value in norm(layer).items()}


def slices(layer: Any, z: Array, *, returns: bool) -> tuple[Array, Array]:
    """W hat (in / p, out / p, p) and the bias (out / p, p) in the transform domain.

    A layer that `returns` to the original domain adds its bias there.
    """
    weight = array(layer.tc_slices).transpose(2, 1, 0)
    bias = array(layer.bias).reshape(z.shape[0], -1).T
    return weight, lprod.mode_product(bias[None], z, 3)[0] if returns else bias
