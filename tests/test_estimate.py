"""Estimates before a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tcompress.conversion.estimate import Estimate, estimate
from tcompress.models import SourceModel, WeightStore
from tcompress.planning.planner import make_plan
from tests.support.converted import LPROD, converted, recipe
from tests.support.tiers import tiered
from tests.support.tiny import build

DATA = {"source": "builtin"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for family in ("llama", "mixtral", "vit", "whisper"):
        build(family).save_pretrained(folder / family)
    return folder


def estimated(folder: Path, **options: Any) -> Estimate:
    source, wanted = SourceModel.open(str(folder)), recipe(**options)
    return estimate(make_plan(wanted, source), source, wanted)


@pytest.mark.parametrize(
    "family", tiered(["bert", "gpt2", "mixtral", "t5"], lambda row: row in ("gpt2", "mixtral"))
)
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"method": {"name": "svd"}, "target": 0.3}],
    ids=["lprod", "bfloat16", "svd"],
)
def test_the_size_of_the_output_is_exact(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    folder = converted(family, tmp_path, **options).folder
    assert estimated(tmp_path / family, **options).disk_bytes == (
        WeightStore.open(folder).total_bytes
    )


def test_the_memory_of_a_fit_without_data(sources: Path) -> None:
    # Gate and up, float32, share a transform: (4 + 8 + 8) bytes of each, and temporaries of one.
    assert estimated(sources / "llama").memory_bytes == 20 * 2 * 32 * 64 + 24 * 32 * 64


def test_all_experts_of_a_layer_are_in_memory(sources: Path) -> None:
    assert estimated(sources / "mixtral").memory_bytes == 20 * 4 * 32 * 128 + 24 * 32 * 128


def test_data_and_gradients_cost_memory(sources: Path) -> None:
    plain = estimated(sources / "llama").memory_bytes
    fitted = estimated(sources / "llama", method=LPROD | {"transform": "fitted"}).memory_bytes
    aware = estimated(sources / "llama", calibration=DATA).memory_bytes
    more = estimated(sources / "llama", calibration=DATA | {"samples": 2048}).memory_bytes
    assert plain < fitted < aware < more
    assert more - aware == 1024 * 20 * 32 * 4 * 2  # tokens, width, bytes, streams


def test_pictures_and_sounds_have_their_own_lengths(sources: Path) -> None:
    def difference(family: str, **options: Any) -> int:
        few, many = ({**options, "samples": count} for count in (10, 20))
        sizes = [
            estimated(sources / family, calibration=chosen).memory_bytes for chosen in (few, many)
        ]
        return (sizes[1] - sizes[0]) // (10 * 32 * 4 * 2)

    assert difference("vit", source="builtin") == 17
    assert difference("whisper", source="builtin") == 20 + 16
    assert difference("llama", source="texts.txt", max_length=100) == 25


def test_ranks_transforms_and_data_cost_time(sources: Path) -> None:
    def seconds(**options: Any) -> float:
        return estimated(sources / "llama", **options).seconds

    assert seconds() < 1
    assert seconds(calibration=DATA) > seconds()
    assert seconds(calibration=DATA | {"samples": 10**6}) > 100
