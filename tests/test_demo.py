"""The demonstration: on a tiny model, and on what ships."""

import json
import math
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tcompress.demonstration import (
    VARIANTS,
    DemoData,
    Variant,
    perplexity,
    run_demo,
    shipped_data,
    written_stories,
)
from tcompress.errors import InputError
from tcompress.options import Bench
from tcompress.structures.lowrank import LowRankSpec
from tests.support.cli import completed, run
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


TRIED = (
    VARIANTS[3],
    Variant("svd-25", "svd", {"keep_layers": [0], "method": LowRankSpec(), "target": 0.5}),
    Variant("block", "1 of 2 blocks", {"keep_layers": [1]}, healed=True),
)
"""Of the two blocks that the tiny model has."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work for a model that knows nothing."""
    timed = Bench(batch=(1,), length=(8,), repeats=1, dtype="float32")
    less = {"FITTING_STORIES": FITTING, "WRITTEN_STORIES": 4, "HEALING_STEPS": 2, "TIMED": timed}
    less |= {"COMPRESS": None}
    for name, value in {"VARIANTS": TRIED, **less}.items():
        monkeypatch.setattr(f"tcompress.demonstration.{name}", value)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_demo_leads_with_what_is_healed(data: DemoData, tmp_path: Path) -> None:
    report = run_demo(data, tmp_path / "models")
    labels = [item.label for item in TRIED]
    assert [row.label for row in report.rows] == ["dense", "1 of 2 blocks, healed", *labels]
    assert (report.fitting_stories, report.measured_stories) == (FITTING, 20)
    assert (report.written_stories, report.healing_steps) == (4, 2)
    dense, healed, *converted = report.rows
    assert (dense.kept, dense.speed, dense.error) == (1.0, 1.0, None)
    for row, variant in zip(converted, TRIED, strict=True):
        assert 0 < row.kept < 1
        assert row.parameters < dense.parameters
        assert row.bytes < dense.bytes
        assert row.speed > 0
        folder = tmp_path / "models" / variant.folder
        assert (folder / "tcompress.json").is_file()
        assert folder.with_name(f"{variant.folder}-healed").is_dir() is variant.healed
    assert converted[0].error is None  # nothing was held out
    assert converted[1].error is not None
    assert (healed.healed, healed.error) == (True, None)
    same = ("kept", "parameters", "bytes", "speed")
    assert [getattr(healed, n) for n in same] == [getattr(converted[2], n) for n in same]
    lessons = (tmp_path / "models" / "lessons.txt").read_text("utf-8").splitlines()
    assert lessons[:FITTING] == list(data.texts[:FITTING])
    assert len(lessons) == FITTING + 4


def test_stories_are_written_alike_and_disturb_no_draw(data: DemoData) -> None:
    tokenizer = AutoTokenizer.from_pretrained(data.model)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = written_stories(data.model, tokenizer, 3)
    assert torch.rand(3).equal(expected)
    assert written_stories(data.model, tokenizer, 3) == first
    assert len({*first}) == 3


def test_demo_refuses_a_folder_that_is_in_use(data: DemoData, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match="is not empty"):
        run_demo(data, tmp_path)


@pytest.mark.usefixtures("short")
def test_demo_command(data: DemoData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcompress.demonstration.shipped_data", lambda: nullcontext(data))
    monkeypatch.setattr("tcompress.demonstration.VARIANTS", TRIED[::2])
    monkeypatch.setenv("HOME", str(tmp_path))
    done = completed("demo", "--keep-dir", "~/kept")
    assert "1 of 2 blocks, healed: " in done.out
    assert "times smaller on disk" in done.out
    assert "stories that the dense model wrote" in " ".join(done.out.split())
    assert done.out.count("Once upon a time there was") == 4
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "block", "block-healed", "lessons.txt", "lprod-p4-dct", "stories.txt",
    ]  # fmt: skip
    monkeypatch.setattr("tcompress.demonstration.VARIANTS", TRIED[:1])
    document = run("demo", "--json", "--quiet").document
    labels = [row["label"] for row in document["rows"]]
    assert labels == ["dense", "lprod p=4, dct, no data"]
    assert "wrote" not in run("demo", "--quiet").out


def test_what_ships() -> None:
    with shipped_data() as data:
        assert 100 <= len(data.texts) <= 1000
        assert json.loads((data.model / "config.json").read_text())["model_type"] == "llama"
        size = sum(path.stat().st_size for path in data.model.iterdir())
    assert 1e6 < size < 4e6


@pytest.mark.slow
def test_more_parameters_are_better_with_what_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low_rank = [
        Variant(f"svd-{target}", f"svd {target}", {"method": LowRankSpec(), "target": target})
        for target in (0.5, 0.25)
    ]
    monkeypatch.setattr("tcompress.demonstration.VARIANTS", low_rank)
    monkeypatch.setattr("tcompress.demonstration.COMPRESS", None)
    with shipped_data() as data:
        dense, half, quarter = run_demo(data, tmp_path / "models").rows
    assert dense.perplexity < half.perplexity < quarter.perplexity
    assert 0 < half.error < quarter.error < 1


@pytest.mark.slow
def test_demo_tells_its_story(tmp_path: Path) -> None:
    """Healing wins back most of what is lost, and data what the paper's layer loses without."""
    with shipped_data() as data:
        rows = {row.label: row for row in run_demo(data, tmp_path / "models").rows}
    dense = rows["dense"]
    for label in ("svd in 4 of 5 blocks", "3 of 5 blocks"):
        raw, healed = rows[label], rows[f"{label}, healed"]
        assert dense.perplexity < healed.perplexity < 1.3 * dense.perplexity < raw.perplexity
        assert raw.bytes < 0.7 * dense.bytes
    compressed = rows["compress --size 1.3MB"]
    assert compressed.perplexity < 1.3 * dense.perplexity
    assert compressed.bytes <= 1.3e6
    fitted = rows["lprod p=16, dct + low rank"].perplexity
    assert fitted < rows["lprod p=4, dct, no data"].perplexity
    assert sum(row.seconds for row in rows.values()) < 120
