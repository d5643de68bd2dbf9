"""Calibration data: what is drawn, and what the model gets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tcompress.data.calibration import MOST_SOUNDS, CalibrationData, load_batches
from tcompress.errors import DataError
from tcompress.latency.benchmark import bench
from tcompress.models import SourceModel
from tcompress.options import Bench, Calibration, TrainingData
from tcompress.training.training_data import load_data
from tests.support.calibrating import drawn
from tests.support.grids import grid_folder, series_file, volume_file
from tests.support.model_folders import (
    WORDS,
    edited,
    model_folder,
    save_tokenizer,
    sentences,
    text_file,
)
from tests.support.own_models import VIDEOMAE
from tests.support.tiny import FRAMES, MELS, SERIES, TINY, VOCAB, VOLUME


@pytest.fixture
def bert(tmp_path: Path) -> SourceModel:
    return SourceModel.open(str(model_folder("bert", tmp_path / "bert")))


def rows(data: CalibrationData, indices: list[int] | None = None) -> list[tuple[int, ...]]:
    """The token ids of every sample without padding, sorted."""
    found = [
        tuple(ids[mask.bool()].tolist())
        for index, batch in enumerate(data.batches)
        if indices is None or index in indices
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return sorted(found)


# Built-in data and the inputs of every kind of model
NAMES = {
    ("text",): "builtin text", ("text", "decoder"): "builtin text",
    ("image",): "builtin images (synthetic)",
    ("text", "image"): "builtin images (synthetic) + builtin text",
    ("audio", "decoder"): "builtin audio (synthetic) + builtin text",
    ("volume",): "builtin volumes (synthetic)", ("series",): "builtin series (synthetic)",
}  # fmt: skip


@pytest.mark.often("tcompress_text", "bert", "clip", "whisper", "tcompress_grid")
@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_runs_on_the_builtin_data(family: str, tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder(family, tmp_path)))
    data = load_batches(source, Calibration(samples=5, batch_size=2))
    assert (data.samples, data.name) == (5, NAMES[TINY[family].needs])
    assert [len(next(iter(batch.values()))) for batch in data.batches] == [2, 2, 1]
    assert data.holdout == [2]
    model = source.model_class.from_pretrained(tmp_path).eval()
    for batch in data.batches:
        with torch.no_grad():
            model(**batch)


def test_clips_are_made_up_and_not_read(tmp_path: Path) -> None:
    VIDEOMAE.build().save_pretrained(tmp_path / "model")
    source = SourceModel.open(str(tmp_path / "model"))
    data = drawn(source, "builtin", samples=6)
    (clips,) = {tuple(batch["pixel_values"].shape[1:]) for batch in data.batches}
    assert clips == (4, 3, 16, 16)
    first = data.batches[0]["pixel_values"][0]
    assert not torch.equal(first[0], first[1])  # things move
    source.model_class.from_pretrained(tmp_path / "model")(**data.batches[0])
    with pytest.raises(DataError, match="takes clips, which cannot be read from"):
        drawn(source, "pictures")
    with pytest.raises(DataError, match="takes clips, which cannot be trained on yet"):
        load_data(source, TrainingData(source=["builtin"]), None, 0)
    (times,) = bench(
        [str(tmp_path / "model")], str(tmp_path / "model"), Bench(batch=(1,), repeats=1), save=False
    )
    assert times.speed


def test_volumes_and_series_are_drawn_from_files(tmp_path: Path) -> None:
    volumes = volume_file(tmp_path / "v.parquet", 24)
    series = series_file(tmp_path / "s.csv")
    for family, path, shape, name in (
        ("tcompress_grid", volumes, (1, *VOLUME), "v.parquet:volume,shape"),
        ("tcompress_grid-series", series, SERIES[::-1], "s.csv"),
    ):
        source = SourceModel.open(str(model_folder(family, tmp_path / family)))
        data = drawn(source, path, samples=6, batch_size=4)
        assert (data.samples, data.name) == (6, name)
        assert next(iter(data.batches[0].values())).shape[1:] == shape
    other = grid_folder("tcompress_grid", tmp_path / "other", input_size=(8, 8, 8))
    with pytest.raises(DataError, match=r"inputs of shape \(1, 8, 8, 4\), the model takes"):
        drawn(SourceModel.open(str(other)), volumes)


def test_samples_are_distinct_not_empty_and_padded_on_the_right(
    bert: SourceModel, tmp_path: Path
) -> None:
    texts = ["red fox runs", "", "   ", "red fox runs ", "tree", "red fox runs"]
    data = drawn(bert, text_file(tmp_path / "texts.txt", texts), samples=9)
    assert rows(data) == [(1, 5, 6, 7, 2), (1, WORDS.index("tree") + 4, 2)]
    assert data.tokens == 8
    assert data.samples == 2


@pytest.mark.parametrize(("family", "start"), [("t5", [0]), ("bart", [])])
def test_a_decoder_reads_the_text_shifted_right(
    family: str, start: list[int], tmp_path: Path
) -> None:
    """A start token that the text begins with is not doubled."""
    source = SourceModel.open(str(model_folder(family, tmp_path / family)))
    file = text_file(tmp_path / "texts.txt", ["red fox", "the old stone"])
    for batch in drawn(source, file).batches:
        ids = batch["input_ids"]
        before = torch.tensor(start, dtype=ids.dtype).expand(len(ids), -1)
        shifted = torch.cat([before, ids], 1)[:, : ids.shape[1]]
        assert torch.equal(batch["decoder_input_ids"], shifted)
        assert torch.equal(batch["decoder_attention_mask"], batch["attention_mask"])


def test_sound_has_the_shape_that_the_model_wants(tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder("whisper", tmp_path)))
    data = load_batches(source, Calibration(samples=1000, batch_size=1000))
    assert data.samples == MOST_SOUNDS
    features = data.batches[0]["input_features"]
    assert features.shape[1:] == (MELS, FRAMES)
    assert features.dtype == torch.float32
    assert data.batches[0]["decoder_input_ids"].shape[1] > 100  # several texts a sound


def test_a_model_that_takes_something_else_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    config = transformers.ASTConfig(**options, num_attention_heads=2, max_length=32)
    transformers.ASTModel(config).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="whose input is `input_values`") as caught:
        load_batches(SourceModel.open(str(tmp_path)), Calibration())
    assert caught.value.hint == "a conversion can do without data: `--calib none`"


# Drawing and holding out
def test_drawing_is_repeatable_and_follows_the_seed(bert: SourceModel) -> None:
    options = Calibration(samples=20)
    first, second = load_batches(bert, options), load_batches(bert, options)
    other = load_batches(bert, Calibration(samples=20, seed=1))
    assert first.fingerprint == second.fingerprint
    torch.testing.assert_close(first.batches, second.batches, rtol=0, atol=0)
    assert first.fingerprint != other.fingerprint


def test_the_batch_size_changes_no_sample(bert: SourceModel, tmp_path: Path) -> None:
    file = text_file(tmp_path / "texts.txt", sentences(60))
    small, large = (drawn(bert, file, batch_size=size, holdout=0.2) for size in (3, 16))
    assert small.fingerprint == large.fingerprint
    assert small.tokens == large.tokens
    assert rows(small, small.holdout) == rows(large, large.holdout)
    assert rows(small) == rows(large)


def test_samples_of_like_length_go_together_and_all_lengths_are_held_out(
    bert: SourceModel, tmp_path: Path
) -> None:
    file = text_file(tmp_path / "texts.txt", sentences(140))
    data = drawn(bert, file, holdout=0.2, batch_size=10)
    held = [len(row) for row in rows(data, data.holdout)]
    everything = [len(row) for row in rows(data)]
    assert len(held) == 28
    assert {min(held), max(held)} == {min(everything), max(everything)}
    assert np.mean(held) == pytest.approx(np.mean(everything), rel=0.05)
    data = drawn(bert, file, batch_size=10)
    assert data.tokens > 0.9 * sum(batch["input_ids"].numel() for batch in data.batches)


@pytest.mark.parametrize(("count", "batches", "holdout"), [(1, 1, []), (2, 2, [1]), (9, 2, [1])])
def test_few_samples_are_split_all_the_same(
    count: int, batches: int, holdout: list[int], bert: SourceModel, tmp_path: Path
) -> None:
    file = text_file(tmp_path / "texts.txt", sentences(count))
    data = drawn(bert, file)
    assert (len(data.batches), data.holdout, data.samples) == (batches, holdout, count)


# Tokenizers and limits
@pytest.mark.often("bert-options2-1000-12")
@pytest.mark.parametrize(
    ("family", "options", "max_length", "expected"),
    [
        ("bert", {}, 10, 10),
        ("bert", {}, 1000, 64),
        ("bert", {"model_max_length": 12}, 1000, 12),
        ("roberta", {}, 1000, 63),  # one position belongs to the padding token
        ("mpnet", {}, 1000, 62),
        ("gpt2", {}, 1000, 64),
        ("t5", {}, 80, 80),  # no limit of its own
        ("clip", {}, 1000, 64),
    ],
)
def test_texts_are_cut_at_the_smallest_limit(
    family: str, options: dict[str, Any], max_length: int, expected: int, tmp_path: Path
) -> None:
    folder = model_folder(family, tmp_path / "model", tokenizer=False)
    save_tokenizer(folder, **options)
    source = SourceModel.open(str(folder))
    file = text_file(tmp_path / "texts.txt", ["fox " * 200, "stone " * 200])
    data = drawn(source, file, max_length=max_length)
    assert {batch["input_ids"].shape[1] for batch in data.batches} == {expected}
    model = source.model_class.from_pretrained(folder).eval()
    with torch.no_grad():
        model(**data.batches[0])


@pytest.mark.parametrize("pad", [None, "<new>"])
def test_a_model_without_padding_token_is_padded_with_a_known_one(
    pad: str | None, tmp_path: Path
) -> None:
    folder = model_folder("gpt2", tmp_path / "model", tokenizer=False)
    save_tokenizer(folder, start=False, pad_token=pad)
    file = text_file(tmp_path / "texts.txt", ["fox", "fox runs over", "tree"])
    data = drawn(SourceModel.open(str(folder)), file, holdout=0.3)
    batch = data.batches[0]
    masks = batch["attention_mask"].sum(1).tolist()
    assert masks == [3, 1]
    assert batch["input_ids"][1, 1:].tolist() == [0, 0]  # as the model's config says


@pytest.mark.parametrize("family", ["bert", "t5", "whisper"])
def test_a_missing_tokenizer_is_named(family: str, tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder(family, tmp_path, tokenizer=False)))
    with pytest.raises(DataError, match=r"has no usable tokenizer \([^)]*\w\)") as caught:
        load_batches(source, Calibration())
    assert "--calib none" in caught.value.hint


def test_a_foreign_tokenizer_is_noticed(tmp_path: Path) -> None:
    folder = model_folder("bert", tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["newword"])
    tokenizer.save_pretrained(folder)
    file = text_file(tmp_path / "texts.txt", ["one newword"])
    with pytest.raises(DataError, match=f"gives token {VOCAB} for `one newword`"):
        drawn(SourceModel.open(str(folder)), file)


def test_a_tokenizer_that_gives_nothing_is_noticed(tmp_path: Path) -> None:
    folder = model_folder("gpt2", tmp_path / "model", tokenizer=False)
    save_tokenizer(folder, start=False)
    split = {"pattern": {"Regex": "."}, "behavior": "Removed", "invert": False}
    with edited(folder / "tokenizer.json") as tokenizer:
        tokenizer["model"]["unk_token"] = "none"
        tokenizer["pre_tokenizer"] = {"type": "Split", **split}
    with pytest.raises(DataError, match="gives no tokens for any text"):
        load_batches(SourceModel.open(str(folder)), Calibration(samples=3))
