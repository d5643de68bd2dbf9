"""Recipes and options of models that begin at random."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedModel,
)

from tcompress.errors import DataError, RecipeError, SourceError
from tcompress.options import Convert, dump_recipe, parse_recipe
from tcompress.options.steps import Words
from tcompress.own_models.architecture import open_architecture, word_tokenizer
from tests.support.model_folders import model_folder, save_tokenizer
from tests.support.scratch import LPROD, architecture

RECIPE = """\
recipe_version: 1
architecture:
  model_type: bert
  class: BertForSequenceClassification
  hidden_size: 32
  num_labels: 4
  tokenizer: {words: builtin, size: 500}
convert:
  init: random
  method: {name: lprod, p: 4}
  positions: linear
paper:
- {row: Std, metric: accuracy, value: 91.4, source: Table 8, why: fewer rows}
"""


def test_a_recipe_comes_back_as_it_was() -> None:
    recipe = parse_recipe(RECIPE, "a")
    assert recipe.architecture.sizes == {"hidden_size": 32, "num_labels": 4}
    assert parse_recipe(dump_recipe(recipe), "b") == recipe
    assert "class: BertForSequenceClassification" in dump_recipe(recipe)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("model_type: bert", "model_typ: bert", "`architecture.model_type`: missing"),
        ("init: random", "init: pretrained", "`positions: linear` is for models that are trained"),
        (
            "init: random\n  method: {name: lprod, p: 4}\n  positions: linear",
            "method: {name: lprod, p: 4}",
            "it needs `convert.init: random`",
        ),
        ("size: 500", "size: 5", "`architecture.tokenizer"),
        ("architecture:", "model: minilm\narchitecture:", "`model` and `architecture` are both"),
        ("paper:", "sweep: {}\npaper:", "`sweep` compares conversions of one trained model"),
        ("positions: linear", "positions: round", "allowed is one of `host`, `standard`, `linear`"),
        ("value: 91.4", "value: high", "`paper[0].value`"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, wanted: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(RECIPE.replace(old, new), "a")
    assert wanted in caught.value.message


def test_what_needs_data_is_refused_all_at_once() -> None:
    wrong = {
        "init": "random",
        "method": {"name": "auto"},
        "calibration": {"source": "builtin"},
        "max_error": 0.1,
        "drop_layers": 1,
    }
    with pytest.raises(ValueError, match="nothing is fitted") as caught:
        Convert.model_validate(wrong)
    for name in ("`calibration`", "`auto`", "`drop_layers`", "`max_error`"):
        assert name in str(caught.value)
    with pytest.raises(ValueError, match="`tol` limits an error"):
        Convert.model_validate({"init": "random", "method": {"name": "svd", "tol": 0.1}})


def test_without_a_word_on_data_there_is_none() -> None:
    convert = Convert.model_validate({"init": "random", "method": LPROD, "target": 0.5})
    assert convert.calibration.source == "none"
    assert not convert.by_loss
    assert not convert.surveys


# ------------------------------------------------------------- configurations


def test_the_architecture_becomes_a_model_with_its_tokenizer() -> None:
    words = {"words": "builtin", "size": 300}
    source = open_architecture(
        architecture(vocab_size=None, num_labels=4, tokenizer=words, bos_token_id=900), 0
    )
    assert source.model_class.__name__ == "BertForSequenceClassification"
    assert (source.config.vocab_size, source.config.num_labels) == (300, 4)
    assert (source.config.pad_token_id, source.config.bos_token_id) == (0, 900)
    assert len(AutoTokenizer.from_pretrained(source.folder)) == 300
    assert {str(path) for path in source.companion_files()} >= {"tokenizer.json"}
    settings = json.loads((source.folder / "config.json").read_text())
    assert settings["architectures"] == ["BertForSequenceClassification"]


@pytest.mark.parametrize("segments", [1, 2])
def test_its_tokenizer_tells_the_texts_of_a_pair_apart(segments: int) -> None:
    words = {"words": "builtin", "size": 300}
    said = architecture(vocab_size=None, tokenizer=words, type_vocab_size=segments)
    source = open_architecture(said, 0)
    encoded = AutoTokenizer.from_pretrained(source.folder)("the", "and")
    assert encoded.get("token_type_ids") == ([0, 0, 0, 1, 1] if segments == 2 else None)


def test_its_folder_is_gone_when_nothing_needs_it() -> None:
    source = open_architecture(architecture(), 0)
    folder = source.folder
    cut = source.at_random(1)
    del source
    gc.collect()
    assert folder.is_dir()
    del cut
    gc.collect()
    assert not folder.exists()


def test_the_class_without_a_head_is_the_default() -> None:
    assert open_architecture(architecture(**{"class": None}), 0).model_class is BertModel


def test_the_key_of_a_config_file_names_the_class_too() -> None:
    said = architecture(**{"class": None}, architectures=["BertForMaskedLM"])
    assert open_architecture(said, 0).model_class.__name__ == "BertForMaskedLM"


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = model_folder("bert", tmp_path / "other", tokenizer=False)
    save_tokenizer(folder)
    source = open_architecture(architecture(vocab_size=None, tokenizer=str(folder)), 0)
    assert source.config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    empty = model_folder("bert", tmp_path / "empty", tokenizer=False)
    with pytest.raises(SourceError, match="has no usable tokenizer"):
        open_architecture(architecture(tokenizer=str(empty)), 0)


def test_unknown_families_keys_and_classes_are_named() -> None:
    with pytest.raises(RecipeError) as caught:
        open_architecture(architecture(model_type="brt"), 0)
    assert "`architecture.model_type` is `brt`, which Transformers" in caught.value.message
    assert "`bert`" in str(caught.value.hint)
    with pytest.raises(RecipeError) as caught:
        open_architecture(architecture(hiden_size=3, **{"class": "BertForFun"}), 0)
    assert "is no key of `BertConfig`, did you mean `hidden_size`" in caught.value.message
    assert "`architecture.class` is `BertForFun`, which is no class for `bert`" in (
        caught.value.message
    )
    with pytest.raises(RecipeError, match="is no class for `bert`"):
        open_architecture(architecture(**{"class": "GPT2Model"}), 0)
    with pytest.raises(RecipeError, match="has `2000000000` as `num_hidden_layers`"):
        open_architecture(architecture(num_hidden_layers=2 * 10**9), 0)  # would never be built
    with pytest.raises(RecipeError, match="`BertConfig` refuses the sizes"):
        open_architecture(architecture(hidden_size="wide"), 0)


class OwnConfig(BertConfig):  # type: ignore[misc]
    """A configuration that Transformers does not know by itself."""

    model_type = "own-bert"


class OwnModel(BertModel):  # type: ignore[misc]
    """A class that does not lie in the namespace of Transformers."""

    config_class = OwnConfig


class OwnClassifier(BertModel):  # type: ignore[misc]
    """One that no Auto class is asked for by default."""

    config_class = OwnConfig


def test_registered_classes_are_found(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    AutoConfig.register("own-bert", OwnConfig, exist_ok=True)
    AutoModel.register(OwnConfig, OwnModel, exist_ok=True)
    AutoModelForSequenceClassification.register(OwnConfig, OwnClassifier, exist_ok=True)
    found: list[type[PreTrainedModel]] = [
        open_architecture(architecture(model_type="own-bert", **{"class": name}), 0).model_class
        for name in (None, "OwnModel", "OwnClassifier")
    ]
    assert found == [OwnModel, OwnModel, OwnClassifier]


# ------------------------------------------------------------- words


def _text_file(folder: Path, lines: list[str]) -> str:
    path = folder / "texts.txt"
    path.write_text("\n".join(lines))
    return str(path)


def test_the_most_frequent_words_are_kept(tmp_path: Path) -> None:
    file = _text_file(tmp_path, ["The cat. THE cat!", "the dog?", "one ému"])
    made = word_tokenizer(Words(words=file, size=9))
    vocabulary = made.get_vocab()
    assert [made.convert_ids_to_tokens(i) for i in range(5)] == [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
    ]  # fmt: skip
    assert len(vocabulary) == 9
    assert {"the", "cat"} < set(vocabulary)
    ids = made("The zebra")["input_ids"]
    assert made.convert_ids_to_tokens(ids) == ["[CLS]", "the", "[UNK]", "[SEP]"]


def test_it_is_an_ordinary_tokenizer(tmp_path: Path) -> None:
    made = word_tokenizer(Words(words=_text_file(tmp_path, ["a cat", "a dog"]), size=100))
    made.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    batch = again(["A cat", "dog"], ["a", "cat cat"], padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"][:, 0], torch.full((2,), again.cls_token_id))
    assert (again.pad_token_id, again.unk_token, again.mask_token) == (0, "[UNK]", "[MASK]")
    assert again.decode(batch["input_ids"][0], skip_special_tokens=True) == "a cat a"


def test_columns_are_read_as_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("number,said\n1,some sentence of words\n2,another sentence with words\n")
    guessed = word_tokenizer(Words(words=str(path), size=100)).get_vocab()
    assert {"sentence", "another"} < set(guessed)
    with pytest.raises(DataError, match="has no column `sad`"):
        word_tokenizer(Words(words=str(path), columns=("sad",), size=100))


def test_texts_without_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        word_tokenizer(Words(words=_text_file(tmp_path, [" ", " "]), size=100))


def _options(**given: Any) -> Convert:
    from tests.support.typed import conversion

    return conversion(given)


def test_options_become_a_conversion() -> None:
    plain = _options(init="random")
    assert (plain.init, plain.method, plain.seed) == ("random", None, 0)
    made = _options(init="random", method="lprod", p=2, seed=4, positions="linear", norm="tensor")
    assert (made.seed, made.method.p, made.positions, made.norm) == (4, 2, "linear", "tensor")
    assert made.calibration.source == "none"
    assert _options(init="random", p=2).method.name == "lprod"
    assert _options(method="lprod", seed=4).seed == 0  # that of the calibration
    with pytest.raises(RecipeError, match="nothing is fitted"):
        _options(init="random", method="lprod", calib="builtin")
    with pytest.raises(RecipeError, match="`--init` is `rnd`, allowed is"):
        _options(init="rnd", method="lprod")


def test_a_recipe_of_a_fit_can_begin_at_random() -> None:
    from tests.support.typed import conversion

    text = "recipe_version: 1\nconvert: {method: {name: lprod}, calibration: {source: builtin}}\n"
    made = conversion({"init": "random"}, parse_recipe(text, "a"))
    assert (made.init, made.calibration.source) == ("random", "none")
