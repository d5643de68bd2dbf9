"""Recipes and options of models that begin at random."""

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
    BertForMaskedLM,
    BertModel,
    PreTrainedModel,
)

from tcompress.artifact.manifest import read_manifest
from tcompress.errors import DataError, InputError, RecipeError, SourceError
from tcompress.latency.benchmark import bench
from tcompress.models.store import WeightStore
from tcompress.options import Bench, Convert, Finetune, parse_recipe
from tcompress.options.steps import Words
from tcompress.own_models.architecture import open_architecture, word_tokenizer
from tcompress.reporting.model_report import report_of
from tcompress.training.finetuning import finetune
from tcompress.training.schedule import SCRATCH_RATE, TASK_RATE, highest_rate
from tests.support.cli import completed, run
from tests.support.evaluation import labelled_file
from tests.support.model_folders import model_folder, save_tokenizer, text_file
from tests.support.scratch import LPROD, architecture, config_folder, scratch
from tests.support.tiny import build
from tests.support.typed import conversion


def test_without_a_word_on_data_there_is_none() -> None:
    convert = Convert.model_validate({"init": "random", "method": LPROD, "target": 0.5})
    assert convert.calibration.is_none
    assert not convert.by_loss
    assert not convert.measures_sensitivity


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
    assert {str(path) for path in source.auxiliary_files()} >= {"tokenizer.json"}
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


@pytest.mark.parametrize(
    ("said", "kind"), [({}, BertModel), ({"architectures": ["BertForMaskedLM"]}, BertForMaskedLM)]
)
def test_the_class_is_that_of_a_config_file_or_has_no_head(said: Any, kind: type) -> None:
    assert open_architecture(architecture(**{"class": None}, **said), 0).model_class is kind


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
def test_the_most_frequent_words_are_kept(tmp_path: Path) -> None:
    file = text_file(tmp_path / "t.txt", ["The cat. THE cat!", "the dog?", "one ému"])
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
    file = text_file(tmp_path / "t.txt", ["a cat", "a dog"])
    made = word_tokenizer(Words(words=file, size=100))
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
    with pytest.raises(DataError, match="no words"):
        word_tokenizer(Words(words=text_file(tmp_path / "t.txt", [" ", " "]), size=100))


def test_options_become_a_conversion() -> None:
    plain = conversion({"init": "random"})
    assert (plain.init, plain.method, plain.seed) == ("random", None, 0)
    forms = {"positions": "linear", "norm": "tensor"}
    made = conversion({"init": "random", "method": "lprod", "p": 2, "seed": 4, **forms})
    assert (made.seed, made.method.p, made.positions, made.norm) == (4, 2, "linear", "tensor")
    assert made.calibration.is_none
    assert conversion({"init": "random", "p": 2}).method.name == "lprod"
    assert conversion({"method": "lprod", "seed": 4}).seed == 0  # that of the calibration


def test_a_recipe_of_a_fit_can_begin_at_random() -> None:
    text = "recipe_version: 1\nconvert: {method: {name: lprod}, calibration: {source: builtin}}\n"
    made = conversion({"init": "random"}, parse_recipe(text, "a"))
    assert (made.init, made.calibration.is_none) == ("random", True)


# Training, reporting and timing models that began at random
WORDS = {"words": "builtin", "size": 100}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model and labelled texts."""
    folder = tmp_path_factory.mktemp("scratch")
    labelled_file(folder / "rows.jsonl")
    source = open_architecture(architecture(tokenizer=WORDS), 0)
    scratch(folder / "made", source, method=LPROD, positions="linear", norm="tensor")
    return folder


def _short(place: Path, **changes: Any) -> Finetune:
    data = {"source": [str(place / "rows.jsonl")], "max_length": 16, "holdout": 0.2}
    short = {"task": "classification", "steps": 3, "batch_size": 4, "device": "cpu", "data": data}
    return Finetune.model_validate({**short, **changes})


@pytest.mark.slow
def test_training_begins_from_scratch(place: Path, tmp_path: Path) -> None:
    done = finetune(str(place / "made"), _short(place), tmp_path / "trained")
    assert done.facts.teacher is None
    assert done.facts.objectives == {"task": 1.0}
    assert max(point.learning_rate or 0 for point in done.facts.curve) > TASK_RATE
    before, after = WeightStore.open(place / "made"), WeightStore.open(tmp_path / "trained")
    table = "bert.embeddings.position_embeddings.weight"
    assert torch.equal(before.tensor(table), after.tensor(table))  # fixed, and still there
    for key in ("bert.embeddings.word_embeddings.weight", "classifier.weight"):
        assert not torch.equal(before.tensor(key), after.tensor(key))
    manifest = read_manifest(tmp_path / "trained")
    assert manifest.source.init == "random"
    assert not manifest.is_untrained
    assert "Fine-tuned for classification" in (tmp_path / "trained" / "README.md").read_text()
    again = finetune(str(tmp_path / "trained"), _short(place, steps=2), tmp_path / "again")
    assert again.facts.teacher is None
    assert max(point.learning_rate or 0 for point in again.facts.curve) <= TASK_RATE


def test_without_a_task_there_is_nothing_to_learn(place: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        finetune(str(place / "made"), _short(place, task=None), tmp_path / "never")
    assert caught.value.message.endswith(
        "began at random, so that there is no dense model to imitate: it needs a task"
    )
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_a_teacher_can_be_named_and_all_is_trained(place: Path, tmp_path: Path) -> None:
    source = open_architecture(architecture(tokenizer=WORDS), 1)
    dense = scratch(tmp_path / "dense", source, seed=1).folder
    options = _short(place, task=None, teacher=str(dense))
    done = finetune(str(place / "made"), options, tmp_path / "taught")
    assert done.facts.teacher == str(dense)
    before, after = WeightStore.open(place / "made"), WeightStore.open(tmp_path / "taught")
    key = "bert.embeddings.word_embeddings.weight"  # which healing would leave as it is
    assert not torch.equal(before.tensor(key), after.tensor(key))


def test_the_learning_rate_depends_on_the_start() -> None:
    options = Finetune(task="classification")
    assert highest_rate(options, untrained=True) == SCRATCH_RATE
    given = options.model_copy(update={"learning_rate": 0.5})
    assert highest_rate(given, untrained=True) == 0.5


def test_times_are_compared_with_the_dense_model_of_the_same_sizes(place: Path) -> None:
    settings = Bench(batch=(1,), length=(8,), repeats=1, device="cpu")
    found = bench([str(place / "made")], settings=settings, save=False)[0]
    assert found.baseline == "dense, at random"
    assert found.speed[0].baseline_milliseconds > 0


def test_the_report_says_how_it_began(place: Path) -> None:
    report = report_of(place / "made")
    assert (report.init, report.seed, report.errors) == ("random", 0, {})
    assert report.parameters.rewritten.kept == 0.25
    shown = run("report", place / "made").out
    assert "weights at random, seed 0 · no teacher" in shown
    assert "calibration" not in shown
    assert "error" not in shown


def test_the_command_says_what_comes_next(tmp_path: Path) -> None:
    folder = open_architecture(architecture(), 0)
    path = folder.folder / "config.json"
    drawn = ("--init", "random", "--seed", "3")
    done = completed("convert", path, *drawn, "-o", tmp_path / "plain", "-q")
    assert done.lines[-2] == "Not trained yet: all weights are as they were drawn at random."
    assert done.lines[-1].startswith("Next: `tcompress finetune ")
    assert done.lines[-1].endswith(" --task ... --data ...`")
    assert "bert · dense · weights at random, seed 3 · no teacher" in done.out
    planned = completed("convert", path, "--init", "random", "--method", "lprod", "--dry-run")
    assert "Weights will be drawn at random, with seed 0; none are read." in planned.lines


@pytest.mark.usefixtures("own_folder")
def test_a_model_that_is_named_is_that_of_all_variants() -> None:
    text = """
        recipe_version: 1
        architecture: {model_type: bert, hidden_size: 16, vocab_size: 50}
        convert: {init: random}
        variants: {a: {convert.seed: 1}, wide: {architecture.hidden_size: 24}}
        sweep: {variants: [a, wide]}
        """
    Path("r.yaml").write_text(text)
    named = ("--dry-run", "--json", "--model", config_folder("bert", Path("bare")) / "config.json")
    (cell,) = completed("run", "r.yaml", *named, "--set=sweep.variants=[a]").document["cells"]
    assert cell["parameters"] == build("bert").num_parameters()
    done = run("run", "r.yaml", *named)
    assert done.code == 2
    assert "variants change it: `wide`" in done.err


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ("model: minilm", "`model` and `architecture` are both given"),
        ("sweep: {}", "`sweep` compares conversions of one trained model"),
    ],
)
def test_what_does_not_go_with_an_architecture(beside: str, message: str) -> None:
    text = "recipe_version: 1\narchitecture: {model_type: bert}\nconvert: {init: random}\n"
    parse_recipe(text, "a")
    with pytest.raises(RecipeError, match=message):
        parse_recipe(text + beside, "a")
