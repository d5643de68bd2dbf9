"""Calibration data from files, folders and the hub."""

import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from tcompress.blockwise.output_sampler import sampler_of
from tcompress.conversion.converter import convert
from tcompress.data.calibration import MOST_PICTURES, load_batches
from tcompress.data.encoding import image_reader, pixels_of
from tcompress.data.examples import Needs, load_examples
from tcompress.data.synthetic import picture, speech
from tcompress.errors import DataError
from tcompress.models import SourceModel
from tcompress.options import Calibration, Convert
from tcompress.options.convert_options import FEWEST
from tcompress.progress import listening
from tcompress.reporting.model_report import report_of
from tcompress.reporting.table_rows import rows_of
from tests.support.calibrating import drawn
from tests.support.conversions import Told
from tests.support.evaluation import rows_file
from tests.support.model_folders import MEAN, SPREAD, WORDS, model_folder, sentences, text_file
from tests.support.tiny import IMAGE
from tests.support.vocabularies import KINDS


@pytest.fixture
def bert(tmp_path: Path) -> SourceModel:
    return SourceModel.open(str(model_folder("bert", tmp_path / "bert")))


# Files
def test_a_column_of_a_table_is_read_as_a_text_file_is(bert: SourceModel, tmp_path: Path) -> None:
    texts = sentences(12)
    frame = pd.DataFrame({"id": range(12), "text": texts, "label": ["good", "bad"] * 6})
    frame.to_csv(tmp_path / "data [1].tsv", index=False, sep="\t")
    data = drawn(bert, tmp_path / "data [1].tsv")
    plain = drawn(bert, text_file(tmp_path / "texts.txt", texts))
    assert data.name == "data [1].tsv:text"
    assert plain.name == "texts.txt"
    assert data.fingerprint == plain.fingerprint


def test_both_sentences_of_a_pair_are_samples(bert: SourceModel, tmp_path: Path) -> None:
    texts = sentences(40)
    frame = pd.DataFrame(
        {
            "key": [f"{index:032x}" for index in range(20)],
            "premise": texts[:20],
            "date": ["2016-07-01 00:00:00"] * 20,
            "hypothesis": texts[20:],
            "label": ["not entailed at all", "clearly entailed"] * 10,
            "score": np.linspace(0, 5, 20),
        }
    )
    frame.to_parquet(tmp_path / "pairs.parquet")
    data = drawn(bert, tmp_path / "pairs.parquet")
    assert data.name == "pairs.parquet:premise,hypothesis"
    assert data.samples == 40


def test_named_columns_are_used_whatever_they_hold(bert: SourceModel, tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": sentences(6), "word": WORDS[:6]})
    frame.to_csv(tmp_path / "words.csv", index=False)
    data = drawn(bert, tmp_path / "words.csv", columns=("word",))
    assert data.name == "words.csv:word"
    assert data.tokens == 6 * 3


def test_a_data_set_saved_to_disk_is_read_by_split(bert: SourceModel, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": sentences(9)})
    datasets.DatasetDict({"dev": rows}).save_to_disk(str(tmp_path / "more"))
    assert drawn(bert, tmp_path / "more", split="dev").samples == 9
    with pytest.raises(DataError, match="no such split"):
        drawn(bert, tmp_path / "more")


def test_nothing_is_left_behind(
    bert: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("temporary", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    file = text_file(tmp_path / "texts.txt", sentences(9))
    before = datasets.logging.get_verbosity()
    drawn(bert, file)
    assert [*(tmp_path / "temporary").iterdir(), *(tmp_path / "cache").iterdir()] == []
    assert datasets.logging.get_verbosity() == before
    assert not datasets.utils.are_progress_bars_disabled()


# Files that cannot be used
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("blank.txt", b"\n \n\n", "all 3 rows of `blank.txt` are empty in the columns `text`"),
        ("one.txt", b"\n", "the only row of `one.txt` is empty in the columns `text`"),
        ("header.csv", b"text,label\n", "holds no rows"),
        ("list.json", b"[]", "holds no rows|cannot be read"),
        ("cut.json", b'{"text": "a b"', "cannot be read as data"),
        ("cut.parquet", b"PAR1", "cannot be read as data"),
        ("other.txt", b"\xff\xfe\x00", "line 1: the byte 0x00 does not belong to text"),
        ("numbers.csv", b"a,b\n1,2.5\n", r"it has `a` \(int64\), `b` \(float64\)"),
        ("notes.docx", b"PK", "is of no known kind; data files end in `.arrow`, `.csv`"),
    ],
)
def test_unusable_files_are_explained(
    name: str, content: bytes, message: str, bert: SourceModel, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        drawn(bert, tmp_path / name)
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_a_missing_file_lists_what_is_there(
    bert: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    text_file(tmp_path / "sub" / "train.txt", ["a"])
    monkeypatch.chdir(tmp_path)
    for name in ("sub/trian.txt", str(tmp_path / "sub" / "tran.txt"), "sub/train.text"):
        with pytest.raises(DataError, match=r"holds `train\.txt`") as caught:
            drawn(bert, name)
        assert caught.value.hint == "did you mean `train.txt`"
    for name in ("texts.csv", ""):
        with pytest.raises(DataError, match=r"there is no file|name .* is empty"):
            drawn(bert, name)


def test_a_folder_without_data_is_refused(bert: SourceModel, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes.md").touch()
    with pytest.raises(DataError, match=r"has no data files; it holds `notes\.md`"):
        drawn(bert, tmp_path / "docs")


def test_named_columns_are_checked(bert: SourceModel, tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    pd.DataFrame({"sentence": sentences(3), "label": [0, 1, 0]}).to_csv(file, index=False)
    with pytest.raises(DataError, match="has no column `sentense`") as caught:
        drawn(bert, file, columns=("sentense",))
    assert caught.value.hint == "did you mean `sentence`"
    with pytest.raises(DataError, match="holds int64, but `BertForMaskedLM` takes text"):
        drawn(bert, file, columns=("label",))


# Data of the hub
def test_a_hub_data_set_is_asked_for_split_and_configuration(
    bert: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_dataset = Mock(return_value=datasets.Dataset.from_dict({"text": sentences(5)}))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = drawn(bert, "owner/name", split="train[:5]")
    drawn(bert, "name:config")
    assert data.name == "owner/name:text"
    asked = [call("owner/name", None, split="train[:5]"), call("name", "config", split="train")]
    assert load_dataset.call_args_list == asked


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("Couldn't reach it"), "the hub gives no such data set"),
        (datasets.exceptions.DatasetNotFoundError("gone"), "the hub gives no such data set"),
        (ValueError("Config name is missing.\nPick one: ['a']"), r"several .* Pick one: \['a'\]"),
        (RuntimeError("odd.\nmore"), "cannot be read as data .RuntimeError: odd"),
    ],
)
def test_failures_of_the_hub_are_explained(
    error: Exception, message: str, bert: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=error))
    with pytest.raises(DataError, match=message) as caught:
        drawn(bert, "owner/name")
    assert caught.value.hint
    assert "\n" not in caught.value.message


# Calibration data for models that see and hear
@pytest.fixture
def vit(tmp_path: Path) -> SourceModel:
    return SourceModel.open(str(model_folder("vit", tmp_path / "vit", tokenizer=False)))


def png(color: tuple[int, int, int]) -> bytes:
    return stored(Image.new("RGB", (20, 24), color), "png")


def stored(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
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


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (image_folder, "pictures"),
        (byte_file, "raw.parquet:image"),
        (feature_file, "typed.parquet:picture"),
    ],
)
def test_pictures_are_normalised_as_the_model_wants(
    write: Callable[[Path], Path], name: str, vit: SourceModel, tmp_path: Path
) -> None:
    data = drawn(vit, write(tmp_path / "pictures"))
    assert data.name == name
    pixels = torch.cat([batch["pixel_values"] for batch in data.batches])
    assert pixels.shape == (4, 3, IMAGE, IMAGE)
    expected = (torch.tensor(COLORS) / 255 - torch.tensor(MEAN)) / torch.tensor(SPREAD)
    found: Tensor = pixels.mean((2, 3))
    assert _rounded(found) == _rounded(expected)
    assert data.samples == 4
    assert data.tokens == 0


def test_pictures_are_the_same_whatever_is_installed(
    vit: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torchvision processors have a second form, which keeps pictures as tensors."""
    pixels = pixels_of(png(COLORS[0]), 3, "here")
    assert pixels.flags.writeable  # torch warns of others
    opened = Mock(wraps=AutoImageProcessor.from_pretrained)
    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", opened)
    found = image_reader(vit, needed=True)(pixels)
    assert opened.call_args.kwargs["backend"] == "pil"
    plain = AutoImageProcessor.from_pretrained(vit.folder, backend="pil")
    wanted = plain(images=[Image.fromarray(pixels)], return_tensors="pt")["pixel_values"][0]
    assert torch.equal(found, wanted)


def test_a_model_of_the_other_kind_is_refused(
    bert: SourceModel, vit: SourceModel, tmp_path: Path
) -> None:
    file = text_file(tmp_path / "texts.txt", sentences(3))
    with pytest.raises(DataError, match=r"takes images, but no column of `texts.txt`"):
        drawn(vit, file)
    folder = str(image_folder(tmp_path / "pictures"))
    with pytest.raises(DataError, match=r"takes text, .* it has `image` \(image\)"):
        drawn(bert, folder)


def test_bytes_that_are_no_pictures_are_refused(vit: SourceModel, tmp_path: Path) -> None:
    file = tmp_path / "bytes.parquet"
    pd.DataFrame({"volume": [bytes(27), bytes(8)]}).to_parquet(file)
    with pytest.raises(DataError, match=r"it has `volume` \(bytes\)"):
        drawn(vit, file)
    with pytest.raises(DataError, match=r"of `bytes\.parquet` cannot be decoded"):
        drawn(vit, file, columns=("volume",))


def test_real_pictures_need_the_models_processor(tmp_path: Path) -> None:
    folder = model_folder("vit", tmp_path / "vit", processor=False)
    source = SourceModel.open(str(folder))
    pictures = str(image_folder(tmp_path / "pictures"))
    with pytest.raises(DataError, match="has no usable image processor"):
        drawn(source, pictures)
    data = load_batches(source, Calibration(samples=3))
    assert data.name == "builtin images (synthetic, without the model's image processor)"
    assert data.batches[0]["pixel_values"].abs().max() <= 1


def test_real_pictures_need_pillow(
    vit: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(byte_file(tmp_path / "pictures"))
    drawn(vit, file)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="needs Pillow") as caught:
        drawn(vit, file)
    assert caught.value.hint == "pip install pillow"


def test_builtin_pictures_need_no_pillow(vit: SourceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = load_batches(vit, Calibration(samples=6))
    error = ImportError("requires the PIL library")
    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", Mock(side_effect=error))
    plain = load_batches(vit, Calibration(samples=6))
    assert plain.name == usual.name
    assert plain.fingerprint == usual.fingerprint
    torch.testing.assert_close(plain.batches, usual.batches)


def test_texts_with_pictures_fill_both_towers(tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder("clip", tmp_path / "clip")))
    file = tmp_path / "captions.parquet"
    frame = {"image": [png(color) for color in COLORS], "caption": sentences(4)}
    pd.DataFrame(frame).to_parquet(file)
    data = drawn(source, file)
    assert (data.name, data.samples) == ("captions.parquet:image,caption", 4)
    texts = text_file(tmp_path / "captions.txt", sentences(MOST_PICTURES + 9))
    data = drawn(source, texts)
    assert data.name == "captions.txt + builtin images (synthetic)"
    assert data.samples == MOST_PICTURES  # nine of them with two texts
    assert all(batch["input_ids"].shape[0] == len(batch["pixel_values"]) for batch in data.batches)


def test_sound_cannot_be_read_from_files(tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder("whisper", tmp_path / "whisper")))
    file = text_file(tmp_path / "texts.txt", sentences(3))
    with pytest.raises(DataError, match="takes sound, which cannot be read from"):
        drawn(source, file)


# What is made up
def test_made_up_pictures_vary_and_have_a_natural_spectrum() -> None:
    pictures = [picture(64, 64, 3, np.random.default_rng([0, index])) for index in range(24)]
    assert all(item.shape == (64, 64, 3) and item.dtype == np.uint8 for item in pictures)
    assert picture(8, 12, 1, np.random.default_rng(0)).shape == (8, 12, 1)  # grey, and oblong
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


def test_made_up_speech_is_scaled_like_log_mel_features() -> None:
    sounds = [speech(80, 400, np.random.default_rng(index)) for index in range(8)]
    for sound in sounds:
        assert sound.shape == (80, 400)
        assert sound.dtype == np.float32
        assert sound.max() - sound.min() <= 2.0 + 1e-5  # eight powers of ten, divided by four
        assert 0.5 < sound.max() < 2.5
    assert np.std([sound[:, :100].mean(1) for sound in sounds], axis=1).mean() > 0.05


# Several sources


def pair_of_sources(folder: Path, *counts: int) -> list[str]:
    """Files of equal name in folders of their own, with texts that are all different."""
    texts = iter(sentences(sum(counts)))
    found = []
    for name, count in zip("ab", counts, strict=True):
        (folder / name).mkdir()
        found.append(text_file(folder / name / "t.txt", [next(texts) for _ in range(count)]))
    return found


def test_sources_have_equal_shares_and_batches_held_out_of_their_own(
    bert: SourceModel, tmp_path: Path
) -> None:
    both = pair_of_sources(tmp_path, 40, 8)
    data = drawn(bert, both, samples=20, holdout=0.4, batch_size=4)
    assert (data.name, data.samples) == ("a/t.txt + b/t.txt", 20)
    assert {*data.origins} == {*data.holdout}
    assert {*data.origins.values()} == {"a/t.txt", "b/t.txt"}
    alone = drawn(bert, both[1], samples=20)
    assert alone.samples == 8  # all of them are in the mixture: twelve are of the other one
    assert drawn(bert, both[0], samples=12).tokens == (data.tokens - alone.tokens)


def test_a_short_file_has_built_in_text_beside_it(bert: SourceModel, tmp_path: Path) -> None:
    file = text_file(tmp_path / "few.txt", sentences(9))
    data = load_batches(bert, Calibration(source=file))
    assert (data.name, data.samples) == ("few.txt + builtin text", FEWEST)
    assert drawn(bert, file, samples=FEWEST).samples == 9


def test_columns_are_those_of_any_source(bert: SourceModel, tmp_path: Path) -> None:
    pd.DataFrame({"one": sentences(9), "other": WORDS[:9]}).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame({"two": sentences(9)}).to_csv(tmp_path / "b.csv", index=False)
    both = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    data = drawn(bert, both, columns=("one",), samples=50)
    assert data.name == "a.csv:one + b.csv:two"
    with pytest.raises(DataError, match="none of the data has the columns `three`") as caught:
        drawn(bert, both, columns=("one", "three"), samples=50)
    assert "`one`, `other`, `two`" in str(caught.value.hint)


def test_pictures_of_several_folders_have_equal_shares(vit: SourceModel, tmp_path: Path) -> None:
    both = [str(image_folder(tmp_path / name)) for name in ("a", "b")]
    data = drawn(vit, both, samples=4)
    assert (data.name, data.samples) == ("a + b", 4)


def test_a_report_says_what_the_fit_changed_on_each_source(
    bert: SourceModel, tmp_path: Path
) -> None:
    both = pair_of_sources(tmp_path, 30, 30)
    recipe = Convert.model_validate(
        {
            "method": {"name": "svd"},
            "target": 0.3,
            "calibration": {"source": both, "samples": 60, "holdout": 0.3, "batch_size": 4},
        }
    )
    done = convert(bert, recipe, tmp_path / "out")
    changes = done.manifest.calibration.changes
    assert [*changes] == ["a/t.txt", "b/t.txt"]
    data = load_batches(bert, recipe.calibration)
    dense = bert.model_class.from_pretrained(bert.folder).eval()
    model = bert.model_class.from_pretrained(done.folder).eval()
    for name, change in changes.items():
        sampler = sampler_of(bert)
        own = [
            sampler.with_variants(data.batches[index])
            for index, origin in data.origins.items()
            if origin == name
        ]
        with torch.no_grad():
            found = [sampler.change(dense(**batch), model(**batch), batch) for batch in own]
        count = sum(
            len(data.batches[i]["input_ids"]) for i in data.origins if data.origins[i] == name
        )
        assert change == pytest.approx(sum(found) / count, rel=1e-3)
    agreement = done.manifest.calibration.agreement
    assert agreement.keys() == changes.keys()
    assert all(0 < own < 1 for own in agreement.values())
    labels = [row.label for row in rows_of(report_of(done.folder))]
    assert [f"  agreement, {name}" in labels for name in changes] == [True, True]
    alone = recipe.calibration.model_copy(update={"source": (both[0],)})
    one = convert(bert, recipe.model_copy(update={"calibration": alone}), tmp_path / "one")
    assert one.manifest.calibration.changes == {}


def test_nothing_stands_beside_none() -> None:
    with pytest.raises(ValueError, match="`none` stands beside other data"):
        Calibration(source=("none", "texts.txt"))


def test_long_documents_are_several_samples(bert: SourceModel, tmp_path: Path) -> None:
    """A corpus in one line is read as its lines are."""
    line = " ".join(sentences(200))
    data = drawn(bert, text_file(tmp_path / "one.txt", [line]), max_length=16)
    assert data.name == "one.txt"
    tokens = len(line.split())
    assert tokens <= data.tokens - 2 * data.samples <= 1.2 * tokens
    few = text_file(tmp_path / "two.txt", [line, line[9:]])
    assert drawn(bert, few, samples=5).samples == 5


def test_characters_of_more_tokens_than_a_sample_holds(tmp_path: Path) -> None:
    kind = KINDS["byte-level BPE"]
    model = kind.folder(tmp_path / "model", kind.train(["no more than bytes"], 300))
    file = text_file(tmp_path / "one.txt", ["\U0001f600 " * 20])  # of four bytes
    assert drawn(SourceModel.open(str(model)), file, samples=5, max_length=3).samples > 1


def test_chats_are_written_by_the_template(bert: SourceModel, tmp_path: Path) -> None:
    texts = sentences(8)
    chats = [
        [{"from": "human", "value": text}, {"from": "system", "value": "w2"}] for text in texts
    ]
    file = rows_file(tmp_path / "chats.jsonl", prompt=texts, conversations=chats)
    with pytest.raises(DataError, match="holds chats, and the model's tokenizer has no chat temp"):
        drawn(bert, file, max_length=64)
    template = "{% for m in messages %}{{ m.content }} {{ 'w1' if m.role == 'user' }}{% endfor %}"
    (Path(bert.folder) / "chat_template.jinja").write_text(template)
    data = drawn(bert, file, max_length=64)
    assert (data.name, data.samples) == ("chats.jsonl:conversations", 8)
    lines = text_file(tmp_path / "plain.txt", [f"{text} w1w2 " for text in texts])
    assert data.tokens == drawn(bert, lines, max_length=64).tokens


@pytest.mark.parametrize("words", [True, False])
def test_texts_in_lists_are_samples(words: bool, bert: SourceModel, tmp_path: Path) -> None:
    """As sets of sentences are, and sentences as lists of words."""
    texts = sentences(8)
    cells: list[Any] = [text.split() for text in texts] if words else [texts[:4], texts[4:]]
    cells[-1].append(None)
    file = rows_file(tmp_path / "sets.jsonl", set=cells)
    data = drawn(bert, file, max_length=64)
    lines = text_file(tmp_path / "plain.txt", texts)
    assert (data.name, data.samples) == ("sets.jsonl:set", 8)
    assert data.tokens == drawn(bert, lines, max_length=64).tokens


RAMP = np.arange(0, 256, 17, dtype=np.uint8).reshape(4, 4)
_RGBA = np.dstack([RAMP, RAMP, RAMP, np.full_like(RAMP, 255)])
_INK = np.dstack([np.zeros_like(RAMP)] * 3 + [255 - RAMP])  # black, as thick as it is dark
_CHALK = np.dstack([np.full_like(RAMP, 255)] * 3 + [RAMP])
_HIDDEN = np.dstack([RAMP, RAMP, RAMP, np.zeros_like(RAMP)])
MODES: dict[str, tuple[Any, str]] = {
    "8 bits": (RAMP, "png"),
    "16 bits": (RAMP.astype(np.uint16) * 257, "png"),
    "16 bits of TIFF": (RAMP.astype(np.uint16) * 257, "tiff"),
    "32 bits that hold 8": (RAMP.astype(np.int32), "tiff"),
    "from 0 to 1": (RAMP.astype(np.float32) / 255, "tiff"),
    "colours": (np.dstack([RAMP] * 3), "png"),
    "opaque": (_RGBA, "png"),
    "ink": (_INK, "png"),
    "chalk": (_CHALK, "png"),
    "nothing seen": (_HIDDEN, "png"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_every_mode_are_what_their_values_mean(mode: str, channels: int) -> None:
    values, kind = MODES[mode]
    pixels = pixels_of(stored(Image.fromarray(values), kind), channels, "`here`")
    assert pixels.shape == (4, 4, channels)
    assert (pixels == RAMP[..., None]).all()


def test_palettes_with_a_transparent_colour_and_cameras_on_their_side() -> None:
    palette = Image.fromarray(RAMP).convert("P")
    found = pixels_of(stored(palette, "png", transparency=0), 3, "`here`")
    assert (found[0, 0] == 255).all()  # white lies behind it
    assert (found[1:, :, 0] == RAMP[1:]).all()
    turned = Image.fromarray(RAMP)
    exif = turned.getexif()
    exif[0x0112] = 3  # by half a turn
    assert (
        pixels_of(stored(turned, "png", exif=exif), 1, "`here`")[..., 0] == RAMP[::-1, ::-1]
    ).all()


@pytest.mark.parametrize("values", [RAMP.astype(np.float32), RAMP.astype(np.int32) * 300])
def test_pictures_whose_values_mean_nothing_are_refused(values: Any) -> None:
    with pytest.raises(DataError, match=r"a picture of `here`, of mode `[FI]`, has values from 0"):
        pixels_of(stored(Image.fromarray(values), "tiff"), 3, "`here`")


def test_pictures_of_12_bits_are_told_of() -> None:
    with listening(heard := Told()):
        pixels_of(stored(Image.fromarray(RAMP.astype(np.uint16) * 16), "png"), 1, "`here`")
    assert "values up to 4095 only are dark" in heard.texts[0]


def test_a_damaged_picture_is_named(vit: SourceModel, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "pictures")
    damaged = sorted(folder.rglob("*.png"))[1]
    damaged.write_bytes(damaged.read_bytes()[:60])
    with pytest.raises(DataError, match=rf"{damaged.name}`, a picture of `pictures` cannot be dec"):
        drawn(vit, folder)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_a_damaged_picture_without_a_name_is_known_by_its_row(
    plain: bool, content: bytes | None, vit: SourceModel, tmp_path: Path
) -> None:
    """As parquet has them: bytes, or an object of bytes and path."""
    good = sorted(image_folder(tmp_path / "pictures").rglob("*.png"))[0].read_bytes()
    cells: list[Any] = [good, good[::-1] if content is None else content, good]
    named = cells if plain else [{"bytes": cell, "path": None} for cell in cells]
    path = tmp_path / "rows.parquet"
    pd.DataFrame({"image": named, "label": [0, 1, 0]}).to_parquet(path)
    needs = Needs(image=True, target="class")
    if content == b"":
        with pytest.raises(DataError, match=r"`image` of `rows.parquet` has no picture in row 2"):
            load_examples(str(path), "train", needs)
        return
    examples = load_examples(str(path), "train", needs)
    with pytest.raises(DataError, match=r"row 2, a picture of `here` cannot be decoded \(of no kn"):
        pixels_of(examples.images[1], 3, "`here`")
    with pytest.raises(DataError, match=r"row 2, a picture of `rows.parquet` cannot be decoded"):
        drawn(vit, path)
