"""Everything runs on another device than the CPU, and comes out as it does there.

The device lives in the CPU's memory, and mixing it with the CPU fails as it does on a GPU
(`tests.support.second_device`). A process keeps such a device until it ends, so that there is one
process for all of this file, and no other test meets the device.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.support import device_work as work
from tests.support.interrupted import MODULES

AUTO: dict[str, Any] = {"method": {"name": "auto", "offer": ["svd", "width"]}, "target": 0.5}
TABLE: dict[str, Any] = {"method": None, "target": None, "aware": True}
CONVERSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "width without data": ("bert", {"option": "svd-width"}),
    "width": ("llama", {"option": "width", "aware": True}),
    "auto without data": ("bert", AUTO),
    "auto": ("bert", {**AUTO, "aware": True}),
    "largest error": ("gpt2", {"option": "svd", "aware": True, "target": None, "max_error": 0.1}),
    "largest loss": ("bert", {"option": "svd", "aware": True, "target": None, "max_loss": 0.5}),
    "dct without data": ("bert", {"option": "dct"}),
    "dct": ("bert", {"option": "residual", "aware": True}),
    "dft": ("bert", {"option": "dft", "aware": True}),
    "fitted": ("bert", {"option": "fitted", "aware": True}),
    "tubal rank": ("bert", {"option": "tubal_rank", "aware": True}),
    "tt without data": ("bert", {"option": "tt"}),
    "tt": ("bert", {"option": "tt-3", "aware": True}),
    "qtt without data": ("bert", {"option": "qtt"}),
    "tucker": ("bert", {"option": "tucker", "aware": True}),
    "experts": ("mixtral", {"option": "svd", "aware": True}),
    "narrow experts": ("mixtral", {"option": "width"}),
    "svd of words": ("bert", {**TABLE, "embeddings": {"method": {"name": "svd"}, "target": 0.5}}),
    "tt of words": ("gpt2", {**TABLE, "embeddings": {"method": {"name": "tt"}, "target": 0.5}}),
    "qtt of words": ("bert", {**TABLE, "embeddings": {"method": {"name": "qtt", "rank": 4}}}),
    "plain": ("llama", {"option": "width", "aware": True, "plain": True}),
    "depth": ("llama", {"option": "svd", "aware": True, "drop_layers": 1}),
    "more depth": ("bert", {"option": "svd", "append_layers": 1}),
    "random": ("bert", {"option": "dct", "init": "random"}),
    "tga": ("bert", {"option": "svd", "attention": {"name": "tga"}}),
    "hot": ("vit", {"option": "svd", "aware": True, "attention": {"name": "hot"}}),
    "tam": ("bert", {"option": "svd", "aware": True, "attention": {"name": "tam"}}),
    "tam of a core": (
        "bert",
        {"option": "svd", "aware": True, "attention": {"name": "tam", "core": "tucker", "rank": 4}},
    ),
    "multilinear": ("bert", {"option": "svd", "attention": {"name": "multilinear", "length": 8}}),
}

EVALUATIONS = {
    "sts": ("bert-small", "pairs.jsonl"),
    "retrieval": ("encoder", "pairs.jsonl"),
    "response-selection": ("bert-small", "pairs.jsonl"),
    "classification": ("bert/bert-small", "rows.jsonl"),
    "perplexity": ("gpt2/gpt2-small", "texts.txt"),
    "masked-lm": ("tga/bert-small", "texts.txt"),
    "image-classification": ("vit/vit-small", "pictures.parquet"),
    "volume-classification": ("grid", "volumes.parquet"),
    "forecasting": ("series", "s.csv"),
}


@pytest.fixture(scope="module")
def there() -> Iterator[Callable[..., Any]]:
    """Calls functions in the process that has the device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)  # imports once, for others that are started later too
    with ProcessPoolExecutor(1, context, initializer=work.begin) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models and data to train and to measure on are made, when the first test asks."""
    return tmp_path_factory.mktemp("models")


def test_mixing_devices_fails_as_on_a_gpu(there: Callable[..., Any]) -> None:
    said = there(work.refusals)
    fine = {name for name, error in said.items() if not error}
    assert fine == {"one number", "rows by index"}
    for name in ("product", "sum", "gathered"):
        assert "Expected all tensors to be on the same device" in said[name]


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions(name: str, there: Callable[..., Any], tmp_path: Path) -> None:
    _assert_same(there(work.converted, CONVERSIONS[name][0], tmp_path, CONVERSIONS[name][1]))


def test_condensed_weights(there: Callable[..., Any], tmp_path: Path) -> None:
    _assert_same(there(work.converted_condensed, tmp_path))


def test_a_conversion_that_was_stopped(there: Callable[..., Any], tmp_path: Path) -> None:
    _assert_same(there(work.converted_again, tmp_path))


def _assert_same(found: work.Compared) -> None:
    one, two = found.plans
    assert one == two
    assert found.distance <= 2e-4
    assert found.operations[0] > 0 == found.operations[1]


def test_the_next_block_is_read_while_one_computes(
    there: Callable[..., Any], tmp_path: Path
) -> None:
    found = there(work.prefetched, tmp_path)
    blocks = [(name.split(".")[2], main) for name, main in found.read if ".layers." in name]
    runs = [key for key, _ in groupby(blocks)]
    forward, back = [("0", True), ("1", False)], [("1", True), ("0", False)]
    # Sensitivity, corrections of predicted losses, fits: each waits for its first block alone.
    assert runs == [*forward, *back, *forward, *forward]
    assert found.weights[0] == found.weights[1] != {}


def test_a_conversion_in_time(there: Callable[..., Any], tmp_path: Path) -> None:
    one, two = there(work.converted_in_time, tmp_path)
    assert one == two >= 1.25 * 0.98


@pytest.mark.parametrize("kind", work.TRAINED)
def test_training(kind: str, models: Path, there: Callable[..., Any], tmp_path: Path) -> None:
    _assert_alike(there(work.trained, kind, models, tmp_path))


def test_a_training_that_was_stopped(
    models: Path, there: Callable[..., Any], tmp_path: Path
) -> None:
    _assert_alike(there(work.trained_again, models, tmp_path))


def _assert_alike(found: work.Curves) -> None:
    assert found.devices == ["second", "cpu"]
    one, two = found.points
    assert [step for step, *_ in one] == [step for step, *_ in two]
    for (_, *numbers), (_, *others) in zip(one, two, strict=True):
        assert numbers == [other and pytest.approx(other, rel=1e-3) for other in others]


@pytest.mark.parametrize("task", EVALUATIONS)
def test_measuring(task: str, models: Path, there: Callable[..., Any]) -> None:
    one, two = there(work.evaluated, task, *EVALUATIONS[task], models)
    assert one
    assert one == pytest.approx(two, rel=1e-4, abs=1e-6)


def test_timing_waits_for_the_device(models: Path, there: Callable[..., Any]) -> None:
    waited, devices = there(work.timed, models)
    assert {*devices} == {"second"}
    assert waited >= 2 * len(devices)


def test_export(there: Callable[..., Any], tmp_path: Path) -> None:
    assert there(work.exported, tmp_path) <= 1e-4
