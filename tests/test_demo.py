"""The demonstration: on a tiny model, and on what ships."""

from __future__ import annotations

import json
import math
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tcompress.demo import (
    VARIANTS,
    DemoData,
    perplexity,
    run_demo,
    shipped_data,
)
from tcompress.errors import InputError
from tests.support.cli import run
from tests.support.conversions import few_steps
from tests.support.model_folders import WORDS, model_folder

FITTING = 10


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    """A tiny model that knows nothing, and texts of different lengths."""
    draw = random.Random(0)
    texts = tuple(" ".join(draw.choices(WORDS, k=draw.randint(5, 40))) for _ in range(FITTING + 20))
    return DemoData(model_folder("llama", tmp_path_factory.mktemp("demo") / "llama"), texts)


def test_perplexity_is_that_of_each_text_on_its_own(data: DemoData) -> None:
    model = AutoModelForCausalLM.from_pretrained(data.model)
    tokenizer = AutoTokenizer.from_pretrained(data.model)
    loss, count = 0.0, 0
    for text in data.texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            one = model(input_ids=ids, labels=ids).loss.item()
        loss += one * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    expected = math.exp(loss / count)
    assert perplexity(model, tokenizer, data.texts) == pytest.approx(expected, rel=1e-5)


def test_demo_converts_with_every_variant(
    data: DemoData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_steps(monkeypatch)
    monkeypatch.setattr("tcompress.demo.FITTING_STORIES", FITTING)
    report = run_demo(data, tmp_path / "models")
    assert [row.label for row in report.rows] == ["dense", *(item.label for item in VARIANTS)]
    assert (report.fitting_stories, report.measured_stories) == (FITTING, 20)
    dense, *others = report.rows
    assert (dense.kept, dense.error) == (1.0, None)
    for row, variant in zip(others, VARIANTS, strict=True):
        assert row.parameters == round(row.kept * dense.parameters) < dense.parameters
        assert row.bytes < dense.bytes
        assert (row.error is None) is not variant.calibrated
        assert (tmp_path / "models" / variant.folder / "tcompress.json").is_file()


def test_demo_refuses_a_folder_that_is_in_use(data: DemoData, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match="is not empty"):
        run_demo(data, tmp_path)


def test_demo_command(data: DemoData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcompress.demo.shipped_data", lambda: nullcontext(data))
    monkeypatch.setattr("tcompress.demo.VARIANTS", VARIANTS[:2])
    monkeypatch.setattr("tcompress.demo.FITTING_STORIES", FITTING)
    few_steps(monkeypatch)
    done = run("demo", "--keep-dir", tmp_path / "kept")
    assert done.code == 0
    assert "perplexity" in done.out
    assert done.out.count("Once upon a time there was") == 3
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "lprod-p4",
        "lprod-p4-dct",
        "stories.txt",
    ]
    document = run("demo", "--json", "--quiet").document
    assert [row["label"] for row in document["rows"]] == [
        "dense",
        "lprod p=4, dct, no data",
        "lprod p=4, fitted",
    ]


def test_what_ships() -> None:
    with shipped_data() as data:
        assert 100 <= len(data.texts) <= 1000
        assert json.loads((data.model / "config.json").read_text())["model_type"] == "llama"
        size = sum(path.stat().st_size for path in data.model.iterdir())
    assert 1e6 < size < 4e6


@pytest.mark.slow
def test_more_parameters_are_better_with_what_ships(tmp_path: Path) -> None:
    low_rank = [item for item in VARIANTS if item.folder.startswith("svd")]
    with shipped_data() as data:
        rows = {row.label: row for row in run_demo(data, tmp_path / "models", low_rank).rows}
    half, quarter = rows["svd, half"], rows["svd, a quarter"]
    assert rows["dense"].perplexity < half.perplexity < quarter.perplexity
    assert half.error is not None
    assert quarter.error is not None
    assert 0 < half.error < quarter.error < 1


@pytest.mark.slow
def test_demo_tells_its_story(tmp_path: Path) -> None:
    """What data, fitted transforms and sums of terms add."""
    with shipped_data() as data:
        rows = {row.label: row for row in run_demo(data, tmp_path / "models").rows}
    best = rows["lprod p=16 + low rank, half"].perplexity
    assert rows["dense"].perplexity < best < rows["svd, half"].perplexity
    assert rows["lprod p=4, fitted"].perplexity < rows["lprod p=4, dct, no data"].perplexity
    assert sum(row.seconds for row in rows.values()) < 60
