"""Calibration data: where it comes from, what is drawn, and what the model gets."""

from __future__ import annotations

import io
import json
import sys
import tempfile
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

from tcompress.calibrate.builtin import MOST_PICTURES, MOST_SOUNDS, picture, speech
from tcompress.calibrate.data import CalibrationData, load_batches
from tcompress.errors import CalibrationError
from tcompress.recipe.schema import Calibration
from tcompress.source import SourceModel
from tests.support.model_folders import MEAN, SPREAD, WORDS, model_folder, save_tokenizer
from tests.support.tiny import FRAMES, IMAGE, MELS, TINY, VOCAB

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture
def bert(tmp_path: Path) -> SourceModel:
    return SourceModel.open(str(model_folder("bert", tmp_path / "bert")))


@pytest.fixture
def vit(tmp_path: Path) -> SourceModel:
    return SourceModel.open(str(model_folder("vit", tmp_path / "vit", tokenizer=False)))


def sentences(count: int) -> list[str]:
    """Distinct sentences of 3 to 16 words."""
    return [
        " ".join([f"w{20 + index % 80}", *WORDS[: 2 + index % 14], f"w{20 + index // 80}"])
        for index in range(count)
    ]


def text_file(path: Path, texts: list[str]) -> str:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(path)


def rows(data: CalibrationData, indices: list[int] | None = None) -> list[tuple[int, ...]]:
    """The token ids of every sample without padding, sorted."""
    found = [
        tuple(ids[mask.bool()].tolist())
        for index, batch in enumerate(data.batches)
        if indices is None or index in indices
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return sorted(found)


def png(color: tuple[int, int, int] | int, size: tuple[int, int] = (20, 24)) -> bytes:
    file = io.BytesIO()
    Image.new("L" if isinstance(color, int) else "RGB", size, color).save(file, "png")
    return file.getvalue()


# Built-in data and the inputs of every kind of model


@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_runs_on_the_builtin_data(family: str, tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder(family, tmp_path)))
    data = load_batches(source, Calibration(samples=5, batch_size=2))
    assert data.samples == 5
    assert [len(next(iter(batch.values()))) for batch in data.batches] == [2, 2, 1]
    assert data.holdout == [2]
    model = source.model_class.from_pretrained(tmp_path).eval()
    for batch in data.batches:
        with torch.no_grad():
            model(**batch)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "builtin text"),
        ("t5", "builtin text"),
        ("vit", "builtin images (synthetic)"),
        ("clip", "builtin images (synthetic) + builtin text"),
        ("whisper", "builtin audio (synthetic) + builtin text"),
    ],
)
def test_the_name_tells_what_was_used(family: str, name: str, tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder(family, tmp_path)))
    assert load_batches(source, Calibration(samples=2)).name == name


def test_padding_is_on_the_right_and_masked(bert: SourceModel, tmp_path: Path) -> None:
    file = text_file(tmp_path / "texts.txt", ["red fox runs", "tree"])
    data = load_batches(bert, Calibration(source=file, samples=9))
    assert rows(data) == [(1, 5, 6, 7, 2), (1, WORDS.index("tree") + 4, 2)]
    assert data.tokens == 8
    assert data.samples == 2


def test_a_decoder_reads_the_text_shifted_right(tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder("t5", tmp_path / "t5")))
    file = text_file(tmp_path / "texts.txt", ["red fox", "the old stone"])
    for batch in load_batches(source, Calibration(source=file)).batches:
        assert torch.equal(batch["decoder_input_ids"][:, 0], torch.tensor([0]))
        assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["input_ids"][:, :-1])
        assert torch.equal(batch["decoder_attention_mask"], batch["attention_mask"])


def test_a_start_token_is_not_doubled(tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder("bart", tmp_path / "bart")))
    file = text_file(tmp_path / "texts.txt", ["red fox", "the old stone"])
    for batch in load_batches(source, Calibration(source=file)).batches:
        assert torch.equal(batch["decoder_input_ids"], batch["input_ids"])


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
    with pytest.raises(CalibrationError, match="whose input is `input_values`") as caught:
        load_batches(SourceModel.open(str(tmp_path)), Calibration())
    assert caught.value.hint == "convert without calibration: `--calib none`"


# Drawing and holding out


def test_drawing_is_repeatable_and_follows_the_seed(bert: SourceModel) -> None:
    options = Calibration(samples=20)
    first, second = load_batches(bert, options), load_batches(bert, options)
    other = load_batches(bert, Calibration(samples=20, seed=1))
    assert first.fingerprint == second.fingerprint
    for left, right in zip(first.batches, second.batches, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert first.fingerprint != other.fingerprint


def test_the_batch_size_changes_no_sample(bert: SourceModel, tmp_path: Path) -> None:
    file = text_file(tmp_path / "texts.txt", sentences(60))
    small, large = (
        load_batches(bert, Calibration(source=file, batch_size=size, holdout=0.2))
        for size in (3, 16)
    )
    assert small.fingerprint == large.fingerprint
    assert small.tokens == large.tokens
    assert rows(small, small.holdout) == rows(large, large.holdout)
    assert rows(small) == rows(large)


def test_held_out_samples_are_of_all_lengths(bert: SourceModel, tmp_path: Path) -> None:
    file = text_file(tmp_path / "texts.txt", sentences(140))
    data = load_batches(bert, Calibration(source=file, holdout=0.2, batch_size=10))
    held = [len(row) for row in rows(data, data.holdout)]
    everything = [len(row) for row in rows(data)]
    assert len(held) == 28
    assert {min(held), max(held)} == {min(everything), max(everything)}
    assert np.mean(held) == pytest.approx(np.mean(everything), rel=0.05)


def test_samples_of_like_length_go_together(bert: SourceModel, tmp_path: Path) -> None:
    file = text_file(tmp_path / "texts.txt", sentences(140))
    data = load_batches(bert, Calibration(source=file, batch_size=10))
    stored = sum(batch["input_ids"].numel() for batch in data.batches)
    assert data.tokens > 0.9 * stored


@pytest.mark.parametrize(("count", "batches", "holdout"), [(1, 1, []), (2, 2, [1]), (9, 2, [1])])
def test_few_samples_are_split_all_the_same(
    count: int, batches: int, holdout: list[int], bert: SourceModel, tmp_path: Path
) -> None:
    file = text_file(tmp_path / "texts.txt", sentences(count))
    data = load_batches(bert, Calibration(source=file))
    assert (len(data.batches), data.holdout, data.samples) == (batches, holdout, count)


def test_samples_are_distinct_and_not_empty(bert: SourceModel, tmp_path: Path) -> None:
    texts = ["red fox", "", "   ", "red fox ", "stone bridge", "red fox"]
    data = load_batches(bert, Calibration(source=text_file(tmp_path / "texts.txt", texts)))
    assert data.samples == 2


# Tokenizers and limits


@pytest.mark.parametrize(
    ("family", "options", "max_length", "expected"),
    [
        ("bert", {}, 10, 10),
        ("bert", {}, 1000, 64),
        ("bert", {"model_max_length": 12}, 1000, 12),
        ("roberta", {}, 1000, 63),  # one position belongs to the padding token
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
    data = load_batches(source, Calibration(source=file, max_length=max_length))
    assert {batch["input_ids"].shape[1] for batch in data.batches} == {expected}
    model = source.model_class.from_pretrained(folder).eval()
    with torch.no_grad():
        model(**data.batches[0])


@pytest.mark.parametrize(
    ("options", "filler"), [({"pad_token": None}, 2), ({"pad_token": "<new>"}, 2)]
)
def test_a_model_without_padding_token_is_padded_with_a_known_one(
    options: dict[str, Any], filler: int, tmp_path: Path
) -> None:
    folder = model_folder("gpt2", tmp_path / "model", tokenizer=False)
    save_tokenizer(folder, start=False, **options)
    file = text_file(tmp_path / "texts.txt", ["fox", "fox runs over", "tree"])
    data = load_batches(SourceModel.open(str(folder)), Calibration(source=file, holdout=0.3))
    batch = data.batches[0]
    masks = batch["attention_mask"].sum(1).tolist()
    assert masks == [3, 1]
    assert batch["input_ids"][1, 1:].tolist() == [filler, filler]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "whisper", "mpnet"])
def test_a_missing_tokenizer_is_named(family: str, tmp_path: Path) -> None:
    source = SourceModel.open(str(model_folder(family, tmp_path, tokenizer=False)))
    with pytest.raises(CalibrationError, match="has no usable tokenizer") as caught:
        load_batches(source, Calibration())
    assert caught.value.hint is not None
    assert "--calib none" in caught.value.hint


def test_a_foreign_tokenizer_is_noticed(tmp_path: Path) -> None:
    folder = model_folder("bert", tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["newword"])
    tokenizer.save_pretrained(folder)
    file = text_file(tmp_path / "texts.txt", ["one newword"])
    with pytest.raises(CalibrationError, match=f"gives token {VOCAB} for `one newword`"):
        load_batches(SourceModel.open(str(folder)), Calibration(source=file))


def test_a_tokenizer_that_gives_nothing_is_noticed(tmp_path: Path) -> None:
    folder = model_folder("gpt2", tmp_path / "model", tokenizer=False)
    save_tokenizer(folder, start=False)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = "none"
    tokenizer["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "."},
        "behavior": "Removed",
        "invert": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CalibrationError, match="gives no tokens for any text"):
        load_batches(SourceModel.open(str(folder)), Calibration(samples=3))


# Files


def write_arrow(path: Path, frame: pd.DataFrame) -> None:
    with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
        for row in frame.to_dict("records"):
            writer.write(row)
        writer.finalize()


WRITERS: dict[str, Callable[[Path, pd.DataFrame], Any]] = {
    "csv": lambda path, frame: frame.to_csv(path, index=False),
    "tsv": lambda path, frame: frame.to_csv(path, index=False, sep="\t"),
    "json": lambda path, frame: frame.to_json(path, orient="records"),
    "jsonl": lambda path, frame: frame.to_json(path, orient="records", lines=True),
    "parquet": lambda path, frame: frame.to_parquet(path),
    "arrow": write_arrow,
}


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_every_format_gives_the_same(kind: str, bert: SourceModel, tmp_path: Path) -> None:
    texts = sentences(12)
    frame = pd.DataFrame({"id": range(12), "text": texts, "label": ["good", "bad"] * 6})
    file = tmp_path / f"data [1].{kind}"
    WRITERS[kind](file, frame)
    data = load_batches(bert, Calibration(source=str(file)))
    plain = load_batches(bert, Calibration(source=text_file(tmp_path / "texts.txt", texts)))
    assert data.name == f"data [1].{kind}:text"
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
    data = load_batches(bert, Calibration(source=str(tmp_path / "pairs.parquet")))
    assert data.name == "pairs.parquet:premise,hypothesis"
    assert data.samples == 40


def test_named_columns_are_used_whatever_they_hold(bert: SourceModel, tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": sentences(6), "word": WORDS[:6]})
    frame.to_csv(tmp_path / "words.csv", index=False)
    options = Calibration(source=str(tmp_path / "words.csv"), columns=("word",))
    data = load_batches(bert, options)
    assert data.name == "words.csv:word"
    assert data.tokens == 6 * 3


def test_a_folder_is_read_by_split(bert: SourceModel, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "README.md").write_text("# Data\n")
    pd.DataFrame({"text": sentences(9)}).to_parquet(folder / "train.parquet")
    pd.DataFrame({"text": sentences(4)}).to_parquet(folder / "test.parquet")
    assert load_batches(bert, Calibration(source=str(folder))).samples == 9
    assert load_batches(bert, Calibration(source=str(folder), split="test")).samples == 4
    with pytest.raises(CalibrationError, match=r"no such split .*'train', 'test'"):
        load_batches(bert, Calibration(source=str(folder), split="dev"))


def test_a_data_set_saved_to_disk_is_read(bert: SourceModel, tmp_path: Path) -> None:
    found = datasets.Dataset.from_dict({"text": sentences(9)})
    found.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"dev": found}).save_to_disk(str(tmp_path / "more"))
    one = load_batches(bert, Calibration(source=str(tmp_path / "one")))
    more = load_batches(bert, Calibration(source=str(tmp_path / "more"), split="dev"))
    assert one.fingerprint == more.fingerprint
    with pytest.raises(CalibrationError, match="no such split"):
        load_batches(bert, Calibration(source=str(tmp_path / "more")))


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
    load_batches(bert, Calibration(source=file))
    assert [*(tmp_path / "temporary").iterdir(), *(tmp_path / "cache").iterdir()] == []
    assert datasets.logging.get_verbosity() == before
    assert not datasets.utils.are_progress_bars_disabled()


# Files that cannot be used


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "holds no rows"),
        ("blank.txt", b"\n \n\n", "all 3 rows of `blank.txt` are empty in the columns `text`"),
        ("header.csv", b"text,label\n", "holds no rows"),
        ("list.json", b"[]", "holds no rows|cannot be read"),
        ("cut.json", b'{"text": "a b"', "cannot be read as data"),
        ("cut.parquet", b"PAR1", "cannot be read as data"),
        ("other.txt", b"\xff\xfe\x00", "cannot be read as data .UnicodeDecodeError"),
        ("numbers.csv", b"a,b\n1,2.5\n", r"it has `a` \(int64\), `b` \(float64\)"),
        ("notes.docx", b"PK", "is of no known kind; data files end in `.arrow`, `.csv`"),
    ],
)
def test_unusable_files_are_explained(
    name: str, content: bytes, message: str, bert: SourceModel, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message) as caught:
        load_batches(bert, Calibration(source=str(tmp_path / name)))
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_a_missing_file_lists_what_is_there(
    bert: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    text_file(tmp_path / "sub" / "train.txt", ["a"])
    monkeypatch.chdir(tmp_path)
    for name in ("sub/trian.txt", str(tmp_path / "sub" / "trian"), "sub/trian"):
        with pytest.raises(CalibrationError, match="holds `train.txt`") as caught:
            load_batches(bert, Calibration(source=name))
        assert caught.value.hint == "did you mean `train.txt`"
    for name in ("texts.csv", ""):
        with pytest.raises(CalibrationError, match="there is no file|name .* is empty"):
            load_batches(bert, Calibration(source=name))


def test_a_folder_without_data_is_refused(bert: SourceModel, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes.md").touch()
    with pytest.raises(CalibrationError, match="has no data files; it holds `notes.md`"):
        load_batches(bert, Calibration(source=str(tmp_path / "docs")))


def test_named_columns_are_checked(bert: SourceModel, tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    pd.DataFrame({"sentence": sentences(3), "label": [0, 1, 0]}).to_csv(file, index=False)
    with pytest.raises(CalibrationError, match="has no column `sentense`") as caught:
        load_batches(bert, Calibration(source=str(file), columns=("sentense",)))
    assert caught.value.hint == "did you mean `sentence`"
    with pytest.raises(CalibrationError, match="holds int64, but `BertForMaskedLM` takes text"):
        load_batches(bert, Calibration(source=str(file), columns=("label",)))


# Data of the hub


def test_a_hub_data_set_is_asked_for_split_and_configuration(
    bert: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, **options: Any) -> datasets.Dataset:
        calls.append((*args, options))
        return datasets.Dataset.from_dict({"text": sentences(5)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load_batches(bert, Calibration(source="owner/name", split="train[:5]"))
    load_batches(bert, Calibration(source="name:config"))
    assert data.name == "owner/name:text"
    assert calls == [
        ("owner/name", None, {"split": "train[:5]"}),
        ("name", "config", {"split": "train"}),
    ]


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
    def load_dataset(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(CalibrationError, match=message) as caught:
        load_batches(bert, Calibration(source="owner/name"))
    assert caught.value.hint
    assert "\n" not in caught.value.message


# Pictures

COLORS = [(200, 10, 30), (0, 255, 0), (7, 7, 250), (90, 90, 90)]


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
    order = lambda rows: sorted(tuple(round(x, 4) for x in row) for row in rows.tolist())  # noqa: E731
    assert order(found) == order(expected)
    assert data.samples == 4
    assert data.tokens == 0


def test_the_name_of_a_folder_of_pictures_is_plain(vit: SourceModel, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "pictures")
    assert load_batches(vit, Calibration(source=str(folder))).name == "pictures"


def test_a_model_of_the_other_kind_is_refused(
    bert: SourceModel, vit: SourceModel, tmp_path: Path
) -> None:
    file = text_file(tmp_path / "texts.txt", sentences(3))
    with pytest.raises(CalibrationError, match=r"takes images, but no column of `texts.txt`"):
        load_batches(vit, Calibration(source=file))
    folder = str(image_folder(tmp_path / "pictures"))
    with pytest.raises(CalibrationError, match=r"takes text, .* it has `image` \(image\)"):
        load_batches(bert, Calibration(source=folder))


def test_other_bytes_are_not_taken_for_pictures(vit: SourceModel, tmp_path: Path) -> None:
    file = tmp_path / "volumes.parquet"
    pd.DataFrame({"volume": [bytes(27), bytes(8)]}).to_parquet(file)
    with pytest.raises(CalibrationError, match=r"it has `volume` \(bytes\)"):
        load_batches(vit, Calibration(source=str(file)))
    with pytest.raises(CalibrationError, match="a picture of `volumes.parquet` cannot be decoded"):
        load_batches(vit, Calibration(source=str(file), columns=("volume",)))


def test_a_damaged_picture_is_named(vit: SourceModel, tmp_path: Path) -> None:
    file = tmp_path / "cut.parquet"
    pd.DataFrame({"image": [png(COLORS[0])[:60]]}).to_parquet(file)
    with pytest.raises(CalibrationError, match="a picture of `cut.parquet` cannot be decoded"):
        load_batches(vit, Calibration(source=str(file)))


def test_real_pictures_need_the_models_processor(tmp_path: Path) -> None:
    folder = model_folder("vit", tmp_path / "vit", processor=False)
    source = SourceModel.open(str(folder))
    pictures = str(image_folder(tmp_path / "pictures"))
    with pytest.raises(CalibrationError, match="has no usable image processor"):
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
    with pytest.raises(CalibrationError, match="needs Pillow") as caught:
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
    with pytest.raises(CalibrationError, match="takes sound, which cannot be read from"):
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
