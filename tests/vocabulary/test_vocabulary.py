"""Models with fewer tokens: any text is written, and known ones give the same output."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tcompress.api import convert, plan
from tcompress.conversion.converter import Converted
from tcompress.data.calibration import builtin_texts
from tcompress.errors import PlanError, RecipeError
from tcompress.models.vocabulary import Vocabulary, as_runs
from tcompress.vocabulary.pieces import read_pieces
from tcompress.vocabulary.tokenizer_files import renumbered, required_ids, tokenizer_json
from tests.support.conversions import outputs
from tests.support.model_folders import edited, save_tokenizer, text_file
from tests.support.tiny import TINY, VOCAB, build
from tests.support.vocabularies import KINDS, save_letters

TEXTS = builtin_texts()
TRAINED, NEEDED, SIZE = 600, 40, 1000
SOME = ("WordPiece", "BPE with bytes", "Unigram of a decoder")  # the others wait for the grid
ODD = ["naïve café — 你好 мир", "x\u0301 y\t z  q", "🙂 emoji 🤷‍♀️", "ZZTOP qqqq 12345 $%^", ""]
SAMPLE = [*TEXTS[:NEEDED], *TEXTS[NEEDED:TRAINED:3], *TEXTS[-40:], *ODD]


@cache
def trained(kind: str) -> Tokenizer:
    return KINDS[kind].train(TEXTS[:TRAINED], SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a model of a kind; its embedding has more rows than its tokenizer has tokens."""
    root = tmp_path_factory.mktemp("vocabularies")
    return cache(
        lambda kind: KINDS[kind].folder(root / kind.replace(" ", "-"), trained(kind), padding=13)
    )


@pytest.fixture
def data(tmp_path: Path) -> str:
    return text_file(tmp_path / "data.txt", TEXTS[:NEEDED])


def cut(model: Path, data: str | None, output: Path, **options: Any) -> Converted:
    given = {"vocab": "data", "method": "none", **options}
    return convert(model, calibration=data, output=output, **given)


# Tokenizers


def cut_tokenizer(old: Tokenizer, texts: Sequence[str]) -> tuple[Tokenizer, dict[int, int], Any]:
    """A tokenizer of what must stay and what texts need, with new ids by old ones and its model."""
    settings = json.loads(old.to_str())
    pieces = read_pieces(settings, "here")
    added = {token["content"]: token["id"] for token in settings["added_tokens"]}
    used = {token for text in texts for token in old.encode(text).tokens} | added.keys()
    parts = [pieces.needs(piece) for piece in used & pieces.ids.keys()]
    kept = {pieces.ids[piece] for piece in pieces.required.union(*parts)}
    assert len(kept) < 0.9 * len(pieces.ids)
    numbers = {was: now for now, was in enumerate(sorted({*kept, *added.values()}))}
    model = pieces.cut({pieces.names[was]: numbers[was] for was in sorted(kept)})
    new = Tokenizer.from_str(json.dumps(tokenizer_json(settings, model, numbers)))
    return new, numbers, model


@pytest.mark.often(*SOME)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_kept_pieces_are_written_as_before(kind: str) -> None:
    old = trained(kind)
    new, numbers, model = cut_tokenizer(old, TEXTS[:NEEDED])
    assert new.get_vocab_size() == len(numbers)
    same = 0
    for text in SAMPLE:
        one, two = old.encode(text, text), new.encode(text, text)
        if numbers.keys() >= {*one.ids}:
            assert [numbers[index] for index in one.ids] == two.ids
            same += 1
        assert old.decode(one.ids) == new.decode(two.ids)
    assert NEEDED <= same < len(SAMPLE)
    if model["type"] == "BPE":  # no merge makes what has gone, and all that stays can be made
        made = {"".join(pair) for pair in map(tuple, model["merges"])}
        assert made <= model["vocab"].keys()
        again = [new.encode(TEXTS[index]).tokens for index in range(NEEDED)]
        assert again == [old.encode(TEXTS[index]).tokens for index in range(NEEDED)]


@pytest.mark.often(*SOME)
@pytest.mark.parametrize("kind", KINDS)
def test_any_text_can_be_written_where_only_what_must_stay_stays(kind: str) -> None:
    old = trained(kind)
    new, *_ = cut_tokenizer(old, [])
    for text in SAMPLE:
        one, two = old.encode(text), new.encode(text)
        assert old.decode(one.ids) == new.decode(two.ids)


def test_ids_in_settings_follow_their_tokens() -> None:
    numbers = {0: 0, 5: 1, 7: 2, 9: 3}
    settings = {
        "pad_token_id": 0,
        "eos_token_id": [5, 9],
        "bos_token_id": None,
        "image_token_index": 7,
        "forced_decoder_ids": [[1, 9], [2, 5]],
        "lang_to_id": {"<|de|>": 7},
        "suppress_tokens": [6, 7],
        "bad_words_ids": [[6], [5, 7]],
        "begin_suppress_tokens": [8],
        "sequence_bias": [[[5], -1.0], [[8], 2.0]],
        "num_beams": 5,
        "position_id": 9,
    }
    assert {*required_ids(settings)} == {0, 5, 7, 9}
    assert renumbered(settings, numbers) == {
        **settings,
        "eos_token_id": [1, 3],
        "image_token_index": 2,
        "forced_decoder_ids": [[1, 3], [2, 1]],
        "lang_to_id": {"<|de|>": 2},
        "suppress_tokens": [2],
        "bad_words_ids": [[1, 2]],
        "begin_suppress_tokens": None,
        "sequence_bias": [[[1], -1.0]],
    }
    assert as_runs([0, 1, 2, 9, 7, 8]) == "0-2 9 7-8"


# Models


@pytest.mark.often(*SOME)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_models_give_the_same_output(
    kind: str, folder: Callable[[str], Path], data: str, tmp_path: Path
) -> None:
    done = cut(folder(kind), data, tmp_path / "cut")
    vocabulary = done.manifest.plan.vocabulary
    assert vocabulary.required < vocabulary.rows < vocabulary.before - 13
    assert (vocabulary.texts, vocabulary.covered) == (NEEDED, 1.0)
    paths = (folder(kind), done.folder)
    old, new = (AutoTokenizer.from_pretrained(path) for path in paths)
    kind_of = getattr(transformers, KINDS[kind].model)
    dense, small = (kind_of.from_pretrained(path).eval() for path in paths)
    numbers = {was: now for now, was in enumerate(vocabulary.ids)}
    rows = torch.tensor(vocabulary.ids)
    assert small.config.vocab_size == vocabulary.rows == len(new)
    assert small.get_input_embeddings().num_embeddings == vocabulary.rows
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        token = getattr(dense.config, name, None)
        if token is not None and token < vocabulary.before:
            assert getattr(small.config, name) == numbers[token]
            if hasattr(small, "generation_config"):
                assert getattr(small.generation_config, name) in (numbers[token], None)
    compared = 0
    for text in SAMPLE:
        one, two = (tokenizer(text)["input_ids"] for tokenizer in (old, new))
        if not one or not numbers.keys() >= {*one}:
            continue
        assert two == [numbers[token] for token in one]
        if compared < 12:
            before, after = dense(torch.tensor([one]))[0], small(torch.tensor([two]))[0]
            if before.shape[-1] == vocabulary.before:
                before = before[..., rows]
            assert torch.equal(before, after)
            compared += 1
    assert compared == 12
    gone = vocabulary.before - vocabulary.rows
    saved = sum(p.numel() for p in dense.parameters()) - sum(p.numel() for p in small.parameters())
    assert vocabulary.parameters == done.manifest.plan.saved == saved >= 32 * gone


READERS = [name for name, tiny in TINY.items() if {"text", "decoder"} & {*tiny.needs}]


@pytest.mark.often("bart", "clip")
@pytest.mark.parametrize("family", READERS)
@torch.no_grad()
def test_every_family_gives_the_same_output(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path / family)
    save_letters(tmp_path / family, VOCAB)
    data = text_file(tmp_path / "data.txt", [text.lower() for text in TEXTS[:3]])
    done = cut(tmp_path / family, data, tmp_path / "cut")
    small = type(model).from_pretrained(done.folder).eval()
    kept = torch.tensor(done.manifest.plan.vocabulary.ids)  # type: ignore[union-attr]
    assert len(kept) < 0.9 * VOCAB
    inputs = TINY[family].inputs(2, 8, seed=0)
    names = [name for name in inputs if name.endswith("input_ids")]
    new = {name: inputs[name] % len(kept) for name in names}
    one = outputs(model, {**inputs, **{name: kept[ids] for name, ids in new.items()}})
    two = outputs(small, {**inputs, **new})
    assert one
    for before, after in zip(one, two, strict=True):
        same = before if before.shape == after.shape else before[..., kept]
        assert torch.equal(same, after)


def test_files_of_old_tokenizers_are_written_too(
    folder: Callable[[str], Path], data: str, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(folder("byte-level BPE"), tmp_path / "gpt2"))
    settings = json.loads((source / "tokenizer.json").read_text())
    (source / "vocab.json").write_text(json.dumps(settings["model"]["vocab"]))
    merges = [" ".join(pair) for pair in settings["model"]["merges"]]
    (source / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (source / "tokenizer.model").write_bytes(b"of another program")
    made = cut(source, data, tmp_path / "cut").folder
    assert not (made / "tokenizer.model").exists()
    whole = AutoTokenizer.from_pretrained(made)
    (made / "tokenizer.json").unlink()
    parts = AutoTokenizer.from_pretrained(made)
    assert parts.get_vocab() == whole.get_vocab()
    assert [parts(text)["input_ids"] for text in SAMPLE] == [
        whole(text)["input_ids"] for text in SAMPLE
    ]


def test_all_of_the_data_is_counted(folder: Callable[[str], Path], tmp_path: Path) -> None:
    source = folder("byte-level BPE")
    rows = [*TEXTS[:NEEDED], " ".join(TEXTS[100:140])]
    text_file(tmp_path / "data.jsonl", [json.dumps({"text": row, "label": 1}) for row in rows])
    calibration = {"source": [str(tmp_path / "data.jsonl")], "samples": 2, "max_length": 8}
    done = cut(source, calibration, tmp_path / "cut")  # type: ignore[arg-type]
    old, new = (AutoTokenizer.from_pretrained(path) for path in (source, done.folder))
    assert all(old.tokenize(row) == new.tokenize(row) for row in rows)


@pytest.mark.often("WordPiece", "Unigram")
@pytest.mark.parametrize("kind", ["WordPiece", "byte-level BPE", "Unigram"])
def test_a_number_of_tokens(kind: str, folder: Callable[[str], Path], data: str) -> None:
    def left(vocab: int | str, calibration: str | None = data) -> Vocabulary:
        options: dict[str, Any] = {"vocab": vocab, "calibration": calibration, "method": "none"}
        return plan(folder(kind), **options).vocabulary

    whole = left("data")
    fewer = (whole.rows + whole.required) // 2
    few, more = left(fewer), left(whole.rows + 9)
    assert (few.rows, more.rows) == (fewer, whole.rows + 9)
    assert {*few.ids} < {*whole.ids} < {*more.ids}  # frequent ones of the data, then others
    assert 0.5 < few.covered < 1
    with pytest.raises(PlanError, match=f"at least {whole.required} of"):
        left(whole.required - 1)
    with pytest.raises(PlanError, match="leaves no token out"):
        left(10_000)
    if kind == "WordPiece":
        with pytest.raises(PlanError, match="does not say how frequent"):
            left(fewer, None)
    else:
        ranks = left(fewer, None)
        assert (ranks.rows, ranks.chosen, ranks.covered) == (fewer, "ranks", None)


# What cannot be cut


def test_other_tokenizers_and_models_are_refused_by_name(
    data: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    words = tmp_path / "words"
    shutil.copytree(tiny("bert"), words)
    with pytest.raises(PlanError, match="no usable tokenizer"):
        cut(words, data, tmp_path / "no")
    save_tokenizer(words)
    with edited(words / "tokenizer_config.json") as settings:
        settings["tokenizer_class"] = "CanineTokenizer"
    (words / "tokenizer.json").unlink()
    with pytest.raises(PlanError, match="`CanineTokenizer`, is written in Python"):
        cut(words, data, tmp_path / "no")
    with pytest.raises(PlanError, match="`ViTForImageClassification` has no word embedding"):
        cut(tiny("vit"), None, tmp_path / "no", vocab=50)
    with pytest.raises(RecipeError, match="leaves out tokens of a trained model"):
        cut(words, None, tmp_path / "no", init="random", vocab=50)
    assert not (tmp_path / "no").exists()
