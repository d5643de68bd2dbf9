"""Batches of training data: their order, their labels, and what does not go together."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoTokenizer

from tcompress.data.calibration import builtin_texts
from tcompress.data.inputs import IGNORED
from tcompress.errors import DataError
from tcompress.models import SourceModel
from tcompress.progress import listening
from tcompress.training import setup, training_data
from tcompress.training.batches import Encoded, LengthBatches, in_order, loader
from tcompress.training.losses import examples_in, pieces, tokens_in
from tcompress.training.task_heads import with_head
from tcompress.training.tasks import TASKS
from tcompress.training.training_data import Data, check_training_data, load_data
from tests.support.conversions import Told
from tests.support.evaluation import (
    classifier,
    encoder,
    headed,
    labelled_file,
    pairs_file,
    rows_file,
)
from tests.support.model_folders import edited, model_folder, save_tokenizer, sentences, text_file
from tests.support.tiny import IMAGE
from tests.support.training import data_of, losses_of, picture_rows, pictures, settings

LENGTHS = [index * 7 % 23 + 1 for index in range(50)]


def _batches(size: int, processes: int, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    sampler = LengthBatches(LENGTHS, size, processes, seed)
    sampler.epoch = epoch
    found = list(sampler)
    assert len(found) == len(sampler)
    return found


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_batches_of_one(processes: int) -> None:
    shared = _batches(8 // processes, processes)
    steps = [shared[first : first + processes] for first in range(0, len(shared), processes)]
    joined = [[index for batch in step for index in batch] for step in steps]
    assert joined == _batches(8, 1)


def test_order_depends_on_seed_and_epoch() -> None:
    assert _batches(8, 1) == _batches(8, 1)
    assert _batches(8, 1) != _batches(8, 1, seed=1)
    assert _batches(8, 1) != _batches(8, 1, epoch=1)


def test_every_example_at_most_once_in_an_epoch() -> None:
    for epoch in range(3):
        found = [index for batch in _batches(8, 1, epoch=epoch) for index in batch]
        assert len(found) == len(set(found)) == 48
    seen = {index for epoch in range(9) for batch in _batches(8, 1, epoch=epoch) for index in batch}
    assert seen == set(range(50))


def test_batches_are_of_similar_length() -> None:
    def spread(batches: Sequence[Sequence[int]]) -> float:
        return float(np.mean([np.ptp([LENGTHS[index] for index in batch]) for batch in batches]))

    mixed = np.random.default_rng(0).permutation(48).reshape(-1, 8).tolist()
    assert spread(_batches(8, 1)) < spread(mixed) / 3


def test_fewer_examples_than_a_batch() -> None:
    assert sorted(*LengthBatches([3, 1, 2], 8, 1, 0)) == [0, 1, 2]
    assert [len(batch) for batch in LengthBatches([3, 1, 2], 8, 2, 0)] == [1, 1]
    with pytest.raises(DataError, match="1 examples for 2 processes"):
        LengthBatches([3], 8, 2, 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: `bert` predicts tokens and has a mask, `gpt2` writes, `encoder` and `vit`."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("bert", "gpt2"):
        model_folder(family, folder / family, tokenizer=False)
        save_tokenizer(folder / family, mask_token="w99", bos_token="<s>")
    encoder(folder / "encoder")
    model_folder("vit", folder / "vit")
    return folder


def _all(data: Data, part: str = "train", size: int = 64) -> dict[str, torch.Tensor]:
    found = getattr(data, part)
    return next(iter(loader(found, data.pad, [list(range(min(size, len(found))))])))


def test_causal_windows(place: Path, tmp_path: Path) -> None:
    """Texts follow one another; labels are the next tokens; only the tail may be shorter."""
    texts = sentences(30)
    path = text_file(tmp_path / "t.txt", texts)
    data = data_of(place / "gpt2", "causal-lm", source=[path], validation=path, max_length=10)
    batch = _all(data)
    ids, labels, mask = (batch[name] for name in ("input_ids", "labels", "attention_mask"))
    lengths = mask.sum(1).tolist()
    assert lengths[:-1] == [10] * (len(lengths) - 1)
    for row, length in enumerate(lengths):
        assert labels[row, : length - 1].tolist() == ids[row, 1:length].tolist()
        assert (labels[row, length - 1 :] == IGNORED).all()
    found = [token for row, length in enumerate(lengths) for token in ids[row, :length].tolist()]
    ends = [index + 1 for index, token in enumerate(found) if token == 2]
    lines = [found[first:last] for first, last in pairwise([0, *ends])]
    whole = [_ids(place / "gpt2", text) for text in texts]
    # The order is drawn; all texts are there.
    assert sorted(lines) == sorted(whole)


def _ids(folder: Path, text: str) -> list[int]:
    found: list[int] = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return found


def test_healing_a_writing_model_reads_windows_too(place: Path, tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.txt", sentences(30))
    batch = _all(data_of(place / "gpt2", source=[path], max_length=10))
    assert "labels" not in batch
    assert batch["attention_mask"].sum(1).float().mean() > 9


def test_masks_are_drawn_anew_in_each_epoch(place: Path, tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.txt", sentences(30))
    data = data_of(place / "bert", "masked-lm", source=[path], max_length=64)
    first, again = _all(data), _all(data)
    data.train.epoch = 1
    later = _all(data)
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert torch.equal(first["labels"], again["labels"])
    assert not torch.equal(first["labels"], later["labels"])
    # What was there can be put back together from inputs and labels.
    for batch in (first, later):
        chosen = batch["labels"] != IGNORED
        whole = torch.where(chosen, batch["labels"], batch["input_ids"])
        assert torch.equal(whole, torch.where(first["labels"] != IGNORED, first["labels"],
                                              first["input_ids"]))  # fmt: skip
        inside = batch["attention_mask"].bool()
        assert chosen[inside].float().mean() == pytest.approx(0.15, abs=0.08)
        assert chosen.any(1).all()
        assert not chosen[~inside].any()
        assert not chosen[:, 0].any()  # special tokens stay


def test_a_model_without_mask_token(place: Path, tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.txt", sentences(30))
    with pytest.raises(DataError, match="has no mask token"):
        data_of(place / "encoder", "masked-lm", source=[path])


def test_pairs_are_two_rows_each(place: Path, tmp_path: Path) -> None:
    path = pairs_file(tmp_path / "pairs.jsonl", 20)
    data = data_of(place / "encoder", "sts", source=[str(path)], holdout=0.25)
    assert (len(data.train), len(data.validation)) == (15, 5)
    batch = _all(data)
    assert (len(batch["labels"]), len(batch["input_ids"]), examples_in(batch)) == (15, 30, 15)
    assert (batch["labels"].min(), batch["labels"].max()) == (0, 1)
    row = 2 * 4
    first, second = batch["input_ids"][row : row + 2]
    alone = next(iter(loader(data.train, data.pad, [[4]])))
    assert alone["input_ids"][0].tolist() == first[: alone["input_ids"].shape[1]].tolist()
    assert alone["input_ids"][1].tolist() == second[: alone["input_ids"].shape[1]].tolist()
    assert data.train.lengths[4] == alone["attention_mask"].sum(1).max()


@pytest.mark.parametrize("parts", [1, 2, 4, 99])
def test_pieces_keep_pairs_together(parts: int, place: Path, tmp_path: Path) -> None:
    path = pairs_file(tmp_path / "pairs.jsonl", 20)
    batch = _all(data_of(place / "encoder", "sts", source=[str(path)], holdout=0.25))
    cut = list(pieces(batch, parts))
    assert len(cut) == min(parts, 15)
    assert max(len(piece["labels"]) for piece in cut) == -(-15 // len(cut))
    assert [2 * len(piece["labels"]) for piece in cut] == [len(p["input_ids"]) for p in cut]
    for name, value in batch.items():
        assert torch.equal(torch.cat([piece[name] for piece in cut]), value)
    assert sum(map(tokens_in, cut)) == tokens_in(batch)


def test_texts_in_pairs_are_one_row_for_a_classifier(tmp_path: Path) -> None:
    texts = sentences(20)
    path = rows_file(
        tmp_path / "nli.jsonl", premise=texts[:10], hypothesis=texts[10:], label=[0, 1] * 5
    )
    model = classifier(tmp_path / "bert")
    batch = _all(data_of(model, "classification", source=[str(path)], max_length=64))
    alone = [len(_ids(model, text)) for text in texts[:10]]
    assert len(batch["input_ids"]) == len(batch["labels"])
    assert batch["attention_mask"].sum(1).max() > max(alone)


def test_several_sources_are_joined(place: Path, tmp_path: Path) -> None:
    texts = sentences(30)
    one, two = (
        text_file(tmp_path / f"{n}.txt", part) for n, part in enumerate((texts[:10], texts[10:]))
    )
    both = data_of(place / "encoder", source=[one, two], max_length=64)
    assert both.name == "0.txt:text + 1.txt:text"
    assert len(both.train) + len(both.validation) == 30
    assert both.fingerprint != data_of(place / "encoder", source=[one]).fingerprint
    rows = rows_file(tmp_path / "rows.jsonl", one=texts[:9], two=texts[:9])
    joined = data_of(place / "encoder", source=[str(rows)], columns={"text": "one+two"})
    assert "one+two" in joined.name


def test_long_documents_are_several_samples(place: Path, tmp_path: Path) -> None:
    line = " ".join(sentences(200))
    source = [text_file(tmp_path / "one.txt", [line])]
    data = data_of(place / "encoder", source=source, max_length=18)
    parts = [_all(data, part, 10**4) for part in ("train", "validation")]
    read = sum(int(part["attention_mask"].sum()) - 2 * len(part["input_ids"]) for part in parts)
    assert read >= 0.98 * len(line.split())
    with listening(heard := Told()):
        assert len(data_of(place / "encoder", source=source, samples=9, max_length=18).train) < 9
    assert heard.texts == [
        "one.txt: texts longer than 18 tokens: 1; further samples cut off them: 8; what is beyond "
        "is not read"
    ]


def test_sources_with_other_classes(place: Path, tmp_path: Path) -> None:
    one = labelled_file(tmp_path / "one.jsonl", classes=("a", "b"))
    two = labelled_file(tmp_path / "two.jsonl", classes=("a", "b", "c"))
    with pytest.raises(DataError, match="do not go together: they have 2 and 3 classes"):
        data_of(place / "encoder", "classification", source=[str(one), str(two)])


def test_validation_data_number_classes_alike(place: Path, tmp_path: Path) -> None:
    """Names are numbered by what is there, which may be less in held-out data."""
    train = rows_file(tmp_path / "train.jsonl", text=sentences(6), label=list("abcabc"))
    held = rows_file(tmp_path / "held.jsonl", text=sentences(3), label=list("cac"))
    data = data_of(place / "encoder", "classification", source=[str(train)], validation=str(held))
    assert data.validation.labels.tolist() == [2, 0, 2]
    other = rows_file(tmp_path / "other.jsonl", text=sentences(3), label=list("cad"))
    with pytest.raises(DataError, match="has the classes `d`, which"):
        data_of(place / "encoder", "classification", source=[str(train)], validation=str(other))


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_classes_of_validation_data_alone_have_labels(kind: str, tmp_path: Path) -> None:
    model = classifier(tmp_path / "bert", 4, problem_type=f"{kind}_label_classification")
    train = rows_file(tmp_path / "train.jsonl", text=sentences(6), label=[0, 1, 3] * 2)
    for labels in ([0, 1, 2], [0, 1, 2, 3]):
        held = rows_file(tmp_path / "held.jsonl", text=sentences(len(labels)), label=labels)
        data = data_of(model, "classification", source=[str(train)], validation=str(held))
        data, _ = with_head(TASKS["classification"](), data, SourceModel.open(str(model)), None)
        marks = data.validation.labels
        assert (marks if kind == "single" else marks.argmax(1)).tolist() == labels


def test_held_out_examples_are_not_trained_on(place: Path, tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.txt", sentences(30))
    how: dict[str, Any] = {"source": [path], "holdout": 0.3, "max_length": 64}
    data = data_of(place / "encoder", **how)
    parts = [
        {tuple(row["input_ids"].tolist()) for (row,) in map(part.__getitem__, range(len(part)))}
        for part in (data.train, data.validation)
    ]
    assert [len(part) for part in parts] == [21, 9]
    assert not parts[0] & parts[1]
    few = data_of(place / "encoder", **how, validation_samples=4)
    assert (len(few.train), len(few.validation)) == (26, 4)


def test_too_little_data(place: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves nothing to train on"):
        data_of(place / "encoder", source=[text_file(tmp_path / "t.txt", ["one text"])])


def test_validation_data_without_a_token_to_predict(place: Path, tmp_path: Path) -> None:
    save = headed("gpt2", tmp_path / "gpt2", "GPT2LMHeadModel")
    save_tokenizer(save, start=False, eos_token=None)
    train = text_file(tmp_path / "t.txt", sentences(30))
    held = text_file(tmp_path / "v.txt", ["fox"])
    with pytest.raises(DataError, match="leaves nothing to validate on"):
        data_of(save, "causal-lm", source=[train], validation=held)


def test_builtin_text(place: Path) -> None:
    data = data_of(place / "encoder")
    assert data.name == "builtin text"
    assert len(data.train) + len(data.validation) == len(builtin_texts())
    with pytest.raises(DataError, match="the data `builtin` has no labels"):
        data_of(place / "encoder", "sts")


def test_a_teacher_writes_its_own_data(place: Path, tmp_path: Path) -> None:
    model = headed("gpt2", tmp_path / "gpt2", "GPT2LMHeadModel")
    save_tokenizer(model, bos_token="<s>")
    source, options = SourceModel.open(str(model)), settings(data={"source": ["teacher"]}).data
    options = options.model_copy(update={"samples": 70})
    first, again = (load_data(source, options, None, 0, source) for _ in range(2))
    assert first.name == "text that the teacher wrote"
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != load_data(source, options, None, 1, source).fingerprint
    assert {*first.held} == {"text that the teacher wrote", "builtin text"}
    # Probabilities are the model's own, whatever its folder makes of them.
    with edited(model / "generation_config.json") as settings_of_model:
        settings_of_model |= {"do_sample": True, "temperature": 0.1, "min_p": 0.5, "num_beams": 2}
    assert first.fingerprint == load_data(source, options, None, 0, source).fingerprint
    check_training_data(source, options, None, 0, source)
    with pytest.raises(DataError, match="what the teacher writes, but there is none"):
        load_data(source, options, None, 0)
    writer = SourceModel.open(str(place / "encoder"))
    with pytest.raises(DataError, match="a `BertModel` writes no text"):
        load_data(writer, options, None, 0, writer)
    with pytest.raises(DataError, match="the data `teacher` has no labels"):
        data_of(place / "encoder", "sts", source=["teacher"])


def test_a_teacher_writes_on_the_device_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = headed("gpt2", tmp_path / "gpt2", "GPT2LMHeadModel")
    save_tokenizer(model, bos_token="<s>")
    devices: list[str] = []

    def write(teacher: Any, *how: Any) -> list[str]:
        devices.append(teacher.device.type)
        return sentences(30)

    monkeypatch.setattr(training_data, "written_texts", write)
    monkeypatch.setattr(setup, "pick_device", lambda name: torch.device("meta"))
    losses_of(model, teacher=[str(model)], data={"source": ["teacher"]})
    assert devices == ["meta"]


def test_sources_are_seen_as_often_as_their_weights_say(place: Path, tmp_path: Path) -> None:
    one = text_file(tmp_path / "one.txt", ["fox " * i for i in range(1, 11)])
    two = text_file(tmp_path / "two.txt", ["dog " * i for i in range(1, 11)])
    plain = data_of(place / "encoder", source=[one, two], holdout=0.5)
    found = data_of(place / "encoder", source=[one, two], holdout=0.5, weights=[2.5, 0.3])
    assert (len(plain.train), len(found.train)) == (10, 12 + 2)
    rows = [tuple(found.train[place][0]["input_ids"].tolist()) for place in range(14)]
    assert sorted(Counter(rows[:12]).values()) == [2] * 3 + [3] * 2
    assert len({*rows[12:]}) == 2
    assert {n: len(held) for n, held in found.held.items()} == {
        n: len(held) for n, held in plain.held.items()
    }
    with pytest.raises(ValidationError, match="`weights` are 1 for 2 sources"):
        settings(data={"source": [one, two], "weights": [1]})


def test_pictures(place: Path, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "pictures", 10)
    batch = _all(data_of(place / "vit", source=[str(folder)]))
    assert {name: value.shape for name, value in batch.items()} == {
        "pixel_values": (8, 3, IMAGE, IMAGE)
    }
    rows = picture_rows(tmp_path / "p.parquet", 12)
    data = data_of(place / "vit", "image-classification", source=[str(rows)])
    assert sorted(_all(data)) == ["labels", "pixel_values"]
    assert tokens_in(_all(data)) == len(data.train)


def test_validation_batches_are_longest_first(place: Path, tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.txt", sentences(30))
    data = data_of(place / "encoder", source=[path], max_length=64)
    order = [index for batch in in_order(data.train, 7) for index in batch]
    assert sorted(order) == list(range(len(data.train)))
    lengths = [data.train.lengths[index] for index in order]
    assert lengths == sorted(lengths, reverse=True)


def test_the_first_examples_of_so_many_tokens() -> None:
    whole = Encoded.of([({"input_ids": torch.arange(length)},) for length in [10] * 100])
    assert whole.first(505).lengths == [10] * 50
    assert whole.first(20).lengths == [10] * 32
    assert len(whole.first(10**6)) == 100
    assert whole.first(505)[49][0]["input_ids"].tolist() == [*range(10)]
