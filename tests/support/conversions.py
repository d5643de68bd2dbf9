"""Conversions of tiny models, for tests of what comes out of them."""

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tcompress import linalg
from tcompress.conversion.converter import Converted, convert
from tcompress.data.calibration import CalibrationData
from tcompress.linalg.fits import fit_rotation
from tcompress.linalg.ttfit import fit_tt
from tcompress.options import Convert
from tcompress.planning.entries import LayerPlan, Plan
from tcompress.progress import Silent
from tcompress.structures.modules.experts import StructuredExperts
from tcompress.structures.modules.linear import StructuredLinear, widened
from tests.support.tiny import TINY, build


def _lprod(transform: str, **options: Any) -> dict[str, Any]:
    return {"name": "lprod", "p": 4, "transform": transform, **options}


OPTIONS: Mapping[str, dict[str, Any]] = {
    "dct": {"method": _lprod("dct")},
    "fitted": {"method": _lprod("fitted", block=4)},
    "dft": {"method": _lprod("dft")},
    "tubal_rank": {"method": _lprod("haar", tubal_rank=2)},
    "residual": {"method": _lprod("dct"), "residual_rank": 2},
    "svd": {"method": {"name": "svd"}, "target": 0.4},
    "tt": {"method": {"name": "tt"}, "target": 0.4},
    "tt-3": {"method": {"name": "tt", "order": 3, "rank": [2, 4], "apply": "rebuild"}},
    "tucker": {"method": {"name": "tucker", "share": "none"}, "target": 0.4},
    "tucker-model": {"method": {"name": "tucker", "share": "model"}, "target": 0.4},
    "qtt": {"method": {"name": "qtt", "rank": 6}},
}
WIDTHS: Mapping[str, dict[str, Any]] = {
    "width": {"method": {"name": "width"}, "target": 0.75},
    "svd-width": {"method": {"name": "svd"}, "target": 0.3, "keep_neurons": 0.75, "head_size": 0.5},
}


class Told(Silent):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def tell(self, text: str) -> None:
        self.texts.append(text)


@dataclass(frozen=True, eq=False)
class Made:
    """A tiny model and what became of it."""

    family: str
    dense: nn.Module
    source: Path
    converted: Converted

    @property
    def folder(self) -> Path:
        return self.converted.folder

    @property
    def plan(self) -> Plan:
        return self.converted.manifest.plan

    def load(self, folder: Path | None = None, **options: Any) -> Any:
        """Load the converted model, or a folder made of it, with the class of the dense one."""
        return type(self.dense).from_pretrained(folder or self.folder, **options)  # type: ignore[attr-defined]

    def inputs(self, seed: int = 50) -> dict[str, Tensor]:
        return TINY[self.family].inputs(2, 8, seed)


def recipe(option: str = "dct", *, aware: bool = False, **changes: Any) -> Convert:
    """A recipe with one of `OPTIONS`, or of `WIDTHS`."""
    given = {**OPTIONS, **WIDTHS}[option]
    chosen = {"calibration": {"source": "builtin" if aware else "none"}, **given}
    return Convert.model_validate({**chosen, **changes})


def calibration(family: str, batches: int = 3) -> CalibrationData:
    """Batches of a tiny model's inputs; the last one is held out."""
    drawn = [TINY[family].inputs(4, 8, seed) for seed in range(batches)]
    return CalibrationData(drawn, [batches - 1], "tiny", 4 * batches, 32 * batches, family)


def make(
    family: str, folder: Path, option: str = "dct", *, aware: bool = False, **changes: Any
) -> Made:
    """Save a tiny model and convert it, on its own inputs where `aware`."""
    dense = build(family)
    dense.save_pretrained(folder / "dense")
    data = calibration(family) if aware else None
    chosen = recipe(option, aware=aware, **changes)
    converted = convert(str(folder / "dense"), chosen, folder / "small", data=data)
    return Made(family, dense, folder / "dense", converted)


def short_name(name: str) -> str:
    """The last component of a layer's name, with its block's number."""
    number = next(part for part in name.split(".") if part.isdigit())
    return f"{number} {name.rpartition('.')[2]}"


def by_role(plan: Plan) -> dict[str, LayerPlan]:
    """Layers of the first block."""
    return {layer.role: layer for layer in plan.layers if layer.block == plan.layers[0].block}


def threads() -> int:
    """How many threads run, without the one that progress bars keep."""
    return sum(type(thread).__name__ != "TMonitor" for thread in threading.enumerate())


@contextmanager
def few_steps() -> Iterator[None]:
    """Stop fits that go on in steps early, where their quality does not matter."""
    rotations = patch.object(linalg, "fit_rotation", partial(fit_rotation, steps=4))
    trains = patch.object(linalg, "fit_tt", lambda *args: fit_tt(*args[:3], 1, *args[4:]))
    with rotations, trains:
        yield


@contextmanager
def all_steps() -> Iterator[None]:
    """Undo `few_steps`."""
    rotations = patch.object(linalg, "fit_rotation", fit_rotation)
    with rotations, patch.object(linalg, "fit_tt", fit_tt):
        yield


def outputs(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """All tensors of floats that a model returns, caches left out."""
    with torch.no_grad():
        return list(_floats(model(**inputs)))


def first_outputs(
    model: nn.Module, names: Iterable[str], batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rows that layers return when they first run: later calls need not read tokens."""
    found: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, args: Any, result: Tensor) -> None:
        found.setdefault(name, result.reshape(-1, result.shape[-1]).double())

    handles = [
        model.get_submodule(name).register_forward_hook(partial(keep, name)) for name in names
    ]
    outputs(model, batch)
    for handle in handles:
        handle.remove()
    return found


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)


def distance(one: list[Tensor], two: list[Tensor]) -> float:
    """The largest difference of two lists of results."""
    assert one
    assert [tensor.shape for tensor in one] == [tensor.shape for tensor in two]
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(one, two, strict=True))


def structured(model: nn.Module) -> dict[str, StructuredLinear]:
    """The structured layers of a model; experts give two, named after the dense weights."""
    found: dict[str, StructuredLinear] = {}
    for name, module in model.named_modules():
        if isinstance(module, StructuredExperts):
            found |= {f"{name}.{parameter}": stack for parameter, stack in module.stacks.items()}
        elif isinstance(module, StructuredLinear) and module.experts is None:
            found[f"{name}.weight"] = module
    return found


def dense_weight(dense: nn.Module, name: str) -> Tensor:
    """A view of a dense model's weight, stored in whatever way, that can be written.

    Returns:
        Weight.  # ([experts,] out, in)
    """
    path, _, parameter = name.rpartition(".")
    host = dense.get_submodule(path)
    weight: Tensor = getattr(host, parameter).detach()
    flipped = isinstance(host, Conv1D) or getattr(host, "is_transposed", False)
    return weight.mT if flipped else weight


def densified(model: nn.Module, dense: nn.Module) -> nn.Module:
    """A copy of the dense model with the weights and biases of the structured layers."""
    dense = copy.deepcopy(dense)
    with torch.no_grad():
        for name, layer in structured(model).items():
            form = (layer.parts, layer.reads)
            dense_weight(dense, name).copy_(widened(layer.dense_weight(torch.float32), *form))
            if layer.bias is not None:
                bias = dense.get_submodule(name.rpartition(".")[0]).bias
                bias.copy_(widened(layer.bias, *form))
    return dense


def load_whole(kind: Any, folder: Path) -> Any:
    """Load a model whose checkpoint must fit: nothing is missing, and nothing is left over."""
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert {name: found for name, found in info.items() if found} == {}
    assert not model.training
    return model


def assert_same_without_a_cache(model: Any, ids: Tensor, tokens: int = 6) -> None:
    """Generating with a cache gives the tokens that generating without one does."""
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    cached, plain = (
        model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=flag, **options)
        for flag in (True, False)
    )
    assert torch.equal(cached, plain)
    assert cached.shape[1] == tokens + (1 if model.config.is_encoder_decoder else ids.shape[1])


def assert_same_from_disk(made: Made, on_disk: Sequence[str], offload_folder: Path) -> nn.Module:
    """Load with modules, and all below them, on disk: results are those of the resident model."""
    resident = made.load()
    owners = [name for name, module in resident.named_modules() if owns_tensors(name, module)]
    here = [name for name in owners if not name.startswith(tuple(on_disk))]
    places = {**dict.fromkeys(here, "cpu"), **dict.fromkeys(on_disk, "disk")}
    model: nn.Module = made.load(device_map=places, offload_folder=offload_folder)
    for seed in (1, 2):
        inputs = made.inputs(seed)
        assert distance(outputs(model, inputs), outputs(resident, inputs)) <= 1e-6
    return model


def owns_tensors(name: str, module: nn.Module) -> bool:
    """Whether a module has tensors of its own; parts of structured ones go with their owner."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return bool(own) and ".tc_" not in name


def assert_wired(made: Made) -> nn.Module:
    """Load a conversion, whose checkpoint must fit; its results are those of its dense form."""
    model: nn.Module = load_whole(type(made.dense), made.folder)
    assert len(structured(model)) == len(made.plan.entries)
    inputs = made.inputs()
    assert distance(outputs(model, inputs), outputs(densified(model, made.dense), inputs)) <= 1e-4
    return model
