"""Calibration data for models that see and hear."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from tcompress.data.calibration import MOST_PICTURES, load_batches, picture, speech
from tcompress.errors import DataError
from tcompress.models import SourceModel
from tcompress.options import Calibration
from tests.support.model_folders import MEAN, SPREAD, model_folder, sentences, text_file
from tests.support.tiny import IMAGE


@pytest.fixture
def bert(tmp_path: Path) -> SourceModel:
    return SourceModel.open(str(model_folder("bert", tmp_path / "bert")))


@pytest.fixture
def vit(tmp_path: Path) -> SourceModel:
    return SourceModel.open(str(model_folder("vit", tmp_path / "vit", tokenizer=False)))


def png(color: tuple[int, int, int] | int, size: tuple[int, int] = (20, 24)) -> bytes:
    file = io.BytesIO()
    Image.new("L" if isinstance(color, int) else "RGB", size, color).save(file, "png")
    return file.getvalue()


# Pictures

COLORS = [(200, 10, 30), (0, 255, 0), (7, 7, 250), (90, 90, 90)]


def _rounded(colors: Tensor) -> list[tuple[float, ...]]:
    return sorted(tuple(round(value, 4) for value in color) for color in colors.tolist())


def image_folder(folder: Path) -> Path:
    for index, color in enumerate(COLORS):
        (folder / str(index % 2)).mkdir(parents=True, exist_ok=True)
        (folder / str(index % 2) / f"{index}.png").write_bytes(png(color))
    (folder / "readme.txt").write_text("pictures\n")
    return folder


def byte_file(folder: Path) -> Path:
    folder.mkdir()
    pd.DataFrame({"image": [png(color) for color in COLORS], "label": range(4)}).to_parquet(
        folder / "raw.parquet"
    )
    return folder / "raw.parquet"


def feature_file(folder: Path) -> Path:
    folder.mkdir()
    images = [{"bytes": png(color), "path": None} for color in COLORS]
    features = datasets.Features({"picture": datasets.Image()})
    datasets.Dataset.from_dict({"picture": images}, features=features).to_parquet(
        folder / "typed.parquet"
    )
    return folder / "typed.parquet"


@pytest.mark.parametrize("write", [image_folder, byte_file, feature_file])
def test_pictures_are_normalised_as_the_model_wants(
    write: Callable[[Path], Path], vit: SourceModel, tmp_path: Path
) -> None:
    data = load_batches(vit, Calibration(source=str(write(tmp_path / "pictures"))))
    pixels = torch.cat([batch["pixel_values"] for batch in data.batches])
    assert pixels.shape == (4, 3, IMAGE, IMAGE)
    expected = (torch.tensor(COLORS) / 255 - torch.tensor(MEAN)) / torch.tensor(SPREAD)
    found: Tensor = pixels.mean((2, 3))
    assert _rounded(found) == _rounded(expected)
    assert data.samples == 4
    assert data.tokens == 0


def test_the_name_of_a_folder_of_pictures_is_plain(vit: SourceModel, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "pictures")
    assert load_batches(vit, Calibration(source=str(folder))).name == "pictures"


def test_a_model_of_the_other_kind_is_refused(
    bert: SourceModel, vit: SourceModel, tmp_path: Path
) -> None:
    file = text_file(tmp_path / "texts.txt", sentences(3))
    with pytest.raises(DataError, match=r"takes images, but no column of `texts.txt`"):
        load_batches(vit, Calibration(source=file))
    folder = str(image_folder(tmp_path / "pictures"))
    with pytest.raises(DataError, match=r"takes text, .* it has `image` \(image\)"):
        load_batches(bert, Calibration(source=folder))


def test_other_bytes_are_not_taken_for_pictures(vit: SourceModel, tmp_path: Path) -> None:
    file = tmp_path / "volumes.parquet"
    pd.DataFrame({"volume": [bytes(27), bytes(8)]}).to_parquet(file)
    with pytest.raises(DataError, match=r"it has `volume` \(bytes\)"):
        load_batches(vit, Calibration(source=str(file)))
    with pytest.raises(DataError, match=r"of `volumes\.parquet` cannot be decoded"):
        load_batches(vit, Calibration(source=str(file), columns=("volume",)))


def test_a_damaged_picture_is_named(vit: SourceModel, tmp_path: Path) -> None:
    file = tmp_path / "cut.parquet"
    pd.DataFrame({"image": [png(COLORS[0])[:60]]}).to_parquet(file)
    with pytest.raises(DataError, match=r"a picture of `cut\.parquet` cannot be decoded"):
        load_batches(vit, Calibration(source=str(file)))


def test_real_pictures_need_the_models_processor(tmp_path: Path) -> None:
    folder = model_folder("vit", tmp_path / "vit", processor=False)
    source = SourceModel.open(str(folder))
    pictures = str(image_folder(tmp_path / "pictures"))
    with pytest.raises(DataError, match="has no usable image processor"):
        load_batches(source, Calibration(source=pictures))
    data = load_batches(source, Calibration(samples=3))
    assert data.name == "builtin images (synthetic, without the model's image processor)"
    assert data.batches[0]["pixel_values"].abs().max() <= 1


def test_real_pictures_need_pillow(
    vit: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(byte_file(tmp_path / "pictures"))
    load_batches(vit, Calibration(source=file))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="needs Pillow") as caught:
        load_batches(vit, Calibration(source=file))
    assert caught.value.hint == "pip install pillow"


def test_builtin_pictures_need_no_pillow(vit: SourceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = load_batches(vit, Calibration(samples=6))

    def from_pretrained(*_: Any, **__: Any) -> None:
        raise ImportError("requires the PIL library")

    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", from_pretrained)
    plain = load_batches(vit, Calibration(samples=6))
    assert plain.name == usual.name
    assert plain.fingerprint == usual.fingerprint
    for left, right in zip(plain.batches, usual.batches, strict=True):
        torch.testing.assert_close(left["pixel_values"], right["pixel_values"])


def test_texts_and_builtin_pictures_fill_both_towers(tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder("clip", tmp_path / "clip")))
    file = text_file(tmp_path / "captions.txt", sentences(MOST_PICTURES + 9))
    data = load_batches(source, Calibration(source=file))
    assert data.name == "captions.txt + builtin images (synthetic)"
    assert data.samples == MOST_PICTURES  # nine of them with two texts
    assert all(batch["input_ids"].shape[0] == len(batch["pixel_values"]) for batch in data.batches)


def test_pictures_with_captions_fill_both_towers(tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder("clip", tmp_path / "clip")))
    file = tmp_path / "captions.parquet"
    frame = {"image": [png(color) for color in COLORS], "caption": sentences(4)}
    pd.DataFrame(frame).to_parquet(file)
    data = load_batches(source, Calibration(source=str(file)))
    assert data.name == "captions.parquet:image,caption"
    assert data.samples == 4


def test_sound_cannot_be_read_from_files(tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder("whisper", tmp_path / "whisper")))
    file = text_file(tmp_path / "texts.txt", sentences(3))
    with pytest.raises(DataError, match="takes sound, which cannot be read from"):
        load_batches(source, Calibration(source=file))


# What is made up


def test_made_up_pictures_vary_and_have_a_natural_spectrum() -> None:
    pictures = [picture(64, 64, 3, np.random.default_rng([0, index])) for index in range(24)]
    assert all(item.shape == (64, 64, 3) and item.dtype == np.uint8 for item in pictures)
    again = picture(64, 64, 3, np.random.default_rng([0, 5]))
    assert np.array_equal(again, pictures[5])
    assert np.std([item.mean() for item in pictures]) > 15
    assert min(item.std() for item in pictures) > 10
    grey = [item.mean(-1) - item.mean() for item in pictures]
    power = np.mean([np.abs(np.fft.fft2(item)) ** 2 for item in grey], axis=0)
    side = np.fft.fftfreq(64) * 64
    distance = np.hypot(side[:, None], side[None])
    usual = (distance > 2) & (distance < 24)
    slope = np.polyfit(np.log(distance[usual]), np.log(power[usual]), 1)[0]
    assert -2.8 < slope < -1.5  # natural pictures: about -2


def test_pictures_may_be_grey_and_oblong() -> None:
    assert picture(8, 12, 1, np.random.default_rng(0)).shape == (8, 12, 1)


def test_made_up_speech_is_scaled_like_log_mel_features() -> None:
    sounds = [speech(80, 400, np.random.default_rng(index)) for index in range(8)]
    for sound in sounds:
        assert sound.shape == (80, 400)
        assert sound.dtype == np.float32
        assert sound.max() - sound.min() <= 2.0 + 1e-5  # eight powers of ten, divided by four
        assert 0.5 < sound.max() < 2.5
    assert np.std([sound[:, :100].mean(1) for sound in sounds], axis=1).mean() > 0.05
