"""What is done on the second device and on the CPU, to compare what comes out.

All of this runs in the process that has the device, where `auto` chooses it.
"""

import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tcompress.api import bench, evaluate
from tcompress.blockwise import streams
from tcompress.blockwise.prefetch import Prefetch
from tcompress.conversion.converter import convert
from tcompress.exports.dense import export_dense
from tcompress.hf.opening import pick_device
from tcompress.models import read_finite
from tcompress.planning.entries import Plan
from tcompress.progress import Silent
from tcompress.timing_model.clocks import LayerTimes, ModelClock
from tcompress.training import loop, mixing
from tcompress.training.finetuning import Finetuned
from tests.support import second_device
from tests.support.conversions import Made, calibration, distance, few_steps, make, outputs, recipe
from tests.support.evaluation import encoder, labelled_file, pairs_file
from tests.support.grids import grid_folder, series_file, volume_file
from tests.support.second_device import Device
from tests.support.sentence_folders import OTHERS
from tests.support.tiny import build
from tests.support.training import (
    AtStep,
    curve,
    interrupt,
    picture_rows,
    small,
    small_classifier,
    small_encoder,
    texts,
    train,
)

DEVICES = ("auto", "cpu")
_few_steps = few_steps()  # until the process ends


def begin() -> None:
    """Makes the device, once for all that this process does."""
    os.fsync = lambda _: None
    torch.set_num_threads(1)
    second_device.install()
    _few_steps.__enter__()


class Compared(NamedTuple):
    """One conversion on both devices."""

    plans: list[dict[str, Any]]
    distance: float  # of what the models put out, on the CPU
    operations: list[int]  # of the second device, in each of the two


def converted(family: str, folder: Path, changes: dict[str, Any]) -> Compared:
    """Converts a tiny model on both devices."""
    made, counts = [], []
    for device in DEVICES:
        before = Device.operations
        made.append(make(family, folder / device, device=device, **changes))
        counts.append(Device.operations - before)
    return _compared(made, counts)


def converted_condensed(folder: Path) -> Compared:
    """The same by weights that are condensed, as those of large layers are."""
    with patch("tcompress.search.candidates.LARGE", 8):
        return converted("llama", folder, {"option": "svd", "aware": True})


def _compared(made: list[Made], counts: list[int]) -> Compared:
    one, two = (outputs(own.load(), own.inputs()) for own in made)
    return Compared([_facts(own.plan) for own in made], distance(one, two), counts)


def _facts(plan: Plan) -> dict[str, Any]:
    """What a plan says, without numbers that were summed."""
    facts: dict[str, Any] = plan.model_dump(mode="json", include={"layers", "embeddings", "depth"})
    for block in (facts["depth"] or {}).get("dropped", ()):
        block.pop("loss", None)
    return facts


def converted_in_time(folder: Path) -> list[float]:
    """Converts to a speed, with times that are measured and then counted; gives both speeds."""
    measure, speedups = LayerTimes._measure, ModelClock.speedups

    def measured(times: LayerTimes, layer: nn.Module) -> float:
        assert measure(times, layer) > 0
        return 1e-6 * sum(parameter.numel() for parameter in layer.parameters())

    def counted(clock: ModelClock, *plans: Plan) -> list[float]:
        assert len(speedups(clock, *plans)) == len(plans)
        saved = [
            sum(entry.dense_parameters - entry.parameters for entry in plan.layers)
            for plan in plans
        ]
        whole = 1e6 * clock.seconds
        return [whole / (whole - own) for own in saved]

    changes = {"method": {"name": "width"}, "target": None, "speedup": 1.25, "at": "2x8"}
    with (
        patch.object(LayerTimes, "_measure", measured),
        patch.object(ModelClock, "speedups", counted),
        patch.object(ModelClock, "_median", lambda *_: 0.06),
        patch("tcompress.conversion.converter.bench"),
        patch("tcompress.timing_model.clocks.MOST_SECONDS", 0.0),
    ):
        made = [make("bert", folder / own, aware=True, device=own, **changes) for own in DEVICES]
    return [own.plan.budget.speedup for own in made if own.plan.budget is not None]


class _Stop(Silent):
    """Stops a conversion as Ctrl-C does, once its first block is fitted."""

    def __init__(self) -> None:
        self._blocks: list[str] = []

    def stage(self, name: str, total: int, unit: str) -> None:
        self._is_fitting = name == "fitting blocks"

    def advance(self, amount: int = 1, note: str = "") -> None:
        if self._is_fitting:
            self._blocks.append(note.partition(" ")[0])
            if self._blocks[-1] != self._blocks[0]:
                raise KeyboardInterrupt


def converted_again(folder: Path) -> Compared:
    """Converts on the device until it is stopped, and again; on the CPU without a stop."""
    changes: dict[str, Any] = {"option": "tucker-model", "aware": True}
    build("bert").save_pretrained(folder / "auto" / "dense")
    chosen = recipe(changes["option"], aware=True, device="auto")
    places = str(folder / "auto" / "dense"), chosen, folder / "auto" / "small"
    with pytest.raises(KeyboardInterrupt):
        convert(*places, data=calibration("bert"), progress=_Stop())
    assert list((folder / "auto").glob(".small.partial/blocks/*"))
    return converted("bert", folder, changes)


@cache
def _models(folder: Path) -> Path:
    """Models and data to train and to measure on."""
    for kind in ("bert", "gpt2", "llama", "vit", "tga"):
        (folder / kind).mkdir(parents=True)
    small_encoder(folder)
    small_classifier(folder / "bert")
    small("gpt2", folder / "gpt2")
    small("llama", folder / "llama", method={"name": "width"}, target=0.6, device="cpu")
    small("vit", folder / "vit")
    small("bert", folder / "tga", method=None, attention={"name": "tga"})
    OTHERS["all at once"](folder / "encoder")
    mean = {"pooling_mode_mean_tokens": True}
    encoder(folder / "wide", 1, mean, hidden_size=48, intermediate_size=64)
    texts(folder, 16)
    labelled_file(folder / "rows.jsonl", 24)
    pairs_file(folder / "pairs.jsonl", 20)
    picture_rows(folder / "pictures.parquet")
    grid_folder("tcompress_grid", folder / "grid")
    grid_folder("tcompress_grid-series", folder / "series")
    volume_file(folder / "volumes.parquet", 12)
    series_file(folder / "s.csv")
    return folder


_TRAINED: dict[str, dict[str, Any]] = {
    "muon": {"model": "bert-small", "optimizer": "muon"},
    "blocks": {"model": "gpt2/gpt2-small", "block_steps": 1, "gradient_checkpointing": True},
    "narrow": {"model": "llama/llama-small"},
    "attention": {"model": "tga/bert-small"},
    "pictures": {"model": "vit/vit-small", "data": "pictures.parquet"},
    "sts": {"model": "bert", "task": "sts", "data": "pairs.jsonl"},
    "teachers": {"model": "bert-small", "teacher": ["wide", "encoder"]},
    "classification": {
        "model": "bert/bert-small", "task": "classification", "data": "rows.jsonl"
    },
    "image-classification": {
        "model": "vit/vit-small", "task": "image-classification", "data": "pictures.parquet"
    },
    "masked-lm": {"model": "tga/bert-small", "task": "masked-lm"},
    "causal-lm": {"model": "gpt2/gpt2-small", "task": "causal-lm", "train": "all"},
}  # fmt: skip
TRAINED = tuple(_TRAINED)
_TRAINED["stopped"] = {"model": "bert-small", "optimizer": "muon"}


class Curves(NamedTuple):
    """One training on both devices."""

    points: list[list[tuple[int, float | None, float | None]]]
    devices: list[str]


_MIXED = ("muon", "teachers")  # healing of the others ends with their last weights


def trained(kind: str, models: Path, folder: Path) -> Curves:
    """Trains on both devices."""
    made = [_train(kind, models, folder / own, device=own) for own in DEVICES]
    return Curves([curve(own) for own in made], [_device_of(own) for own in made])


def trained_again(models: Path, folder: Path) -> Curves:
    """Trains on the device until it is stopped, and again; on the CPU without a stop."""
    options = {"steps": 4, "checkpoint_every": 1, "device": "auto"}
    with pytest.raises(KeyboardInterrupt):
        _train("stopped", models, folder / "auto", progress=AtStep(2, interrupt), **options)
    made = [
        _train("stopped", models, folder / own, **{**options, "device": own}) for own in DEVICES
    ]
    assert [own.resumed for own in made] == [True, False]
    return Curves([curve(own) for own in made], [_device_of(own) for own in made])


def _train(kind: str, models: Path, output: Path, **more: Any) -> Finetuned:
    options = {"steps": 2, "evaluate_every": 2, "learning_rate": 3e-3, **_TRAINED[kind], **more}
    place = _models(models)
    data = {"source": [str(place / options.pop("data", "texts.txt"))]}
    if names := options.pop("teacher", None):
        options["teacher"] = [str(place / name) for name in names]
    mixes = patch.multiple(mixing, SHARES=(0.0, 0.5, 1.0), JUDGED=16)
    with mixes if kind in _MIXED else patch.object(loop, "mixing_validations", lambda _: 0.0):
        return train(place / options.pop("model"), output, data=data, **options)


def _device_of(done: Finetuned) -> str:
    return done.facts.environment["device"]


def evaluated(task: str, model: str, data: str, models: Path) -> list[list[float | None]]:
    """Measures a model on both devices; gives all numbers."""
    place = _models(models)
    options = {"bootstrap": 20, "save": False, "split": "test" if data == "s.csv" else None}
    found = [
        evaluate([place / model], task, place / data, device=own, **options) for own in DEVICES
    ]
    return [[metric.value for own in scores for metric in own.metrics] for scores in found]


def timed(models: Path) -> tuple[int, list[str]]:
    """Times a model; gives how often the device was waited for, and its name in all protocols."""
    place, before = _models(models) / "gpt2", Device.synchronized
    found = bench(
        [place / "gpt2-small"], place / "gpt2", device="auto", batch=[1], length=[8], repeats=2,
        generate=2, save=False,
    )  # fmt: skip
    return Device.synchronized - before, [own.protocol["device"] for own in found[0].speed]


class Prefetched(NamedTuple):
    """One conversion on the device, with weights read ahead and without."""

    read: list[tuple[str, bool]]  # parameters with whether the main thread read them, in order
    weights: list[dict[str, bytes]]  # files of both by name


def prefetched(folder: Path) -> Prefetched:
    """Converts with passes in both directions, with weights read ahead and without."""
    read: list[tuple[str, bool]] = []

    def reading(store: Any, keymap: Any, name: str, device: torch.device) -> torch.Tensor:
        read.append((name, threading.current_thread() is threading.main_thread()))
        return read_finite(store, keymap, name, device)

    with patch.object(streams, "read_finite", reading):
        ahead = make("llama", folder / "ahead", "svd", aware=True, device="auto")
    with patch.object(Prefetch, "start_after"):
        plain = make("llama", folder / "plain", "svd", aware=True, device="auto")
    return Prefetched(read, [_files(ahead.folder), _files(plain.folder)])


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def exported(folder: Path) -> float:
    """Converts on the device and multiplies out; gives how far that is from what it was."""
    made = make("bert", folder, "residual", aware=True, device="auto")
    export_dense(made.folder, folder / "whole")
    return distance(*(outputs(made.load(own), made.inputs()) for own in (None, folder / "whole")))


def refusals() -> dict[str, str]:
    """What fails as on a GPU, and how."""
    here, there = torch.ones(2, 2), torch.ones(2, 2, device=pick_device("auto"))
    tried: dict[str, Callable[[], object]] = {
        "product": lambda: there @ here,
        "sum": lambda: here + there,
        "rows": lambda: here[torch.zeros(1, dtype=torch.long, device=there.device)],
        "gathered": lambda: there.gather(0, torch.zeros(1, 2, dtype=torch.long)),
        "numpy": there.numpy,
        "drawn": lambda: torch.randn(2, generator=torch.Generator(), device=there.device),
        "one number": lambda: there + here.sum(),
        "rows by index": lambda: there[torch.zeros(1, dtype=torch.long)],
    }
    return {name: _error(function) for name, function in tried.items()}


def _error(function: Callable[[], object]) -> str:
    try:
        function()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""
