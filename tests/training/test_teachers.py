"""Teachers of another width, depth, tokenizer or family, and several of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch
from torch.nn.functional import normalize
from torch.testing import assert_close

from tcompress.artifact.reader import verify_files
from tcompress.data.labels import order_of
from tcompress.errors import InputError
from tcompress.models import SourceModel
from tcompress.progress import Silent
from tcompress.training import targets
from tcompress.training.encoded_examples import without_words
from tcompress.training.losses import Losses
from tcompress.training.objectives import Setting, Similarities
from tcompress.training.targets import TextTeacher, _joined, _turning
from tcompress.training.teaching import arranged
from tests.support.evaluation import classifier, encoder, headed, labelled_file, turn_labels
from tests.support.interrupted import partial_folder
from tests.support.model_folders import edited
from tests.support.training import (
    batch_of,
    curve,
    gradients,
    losses_of,
    settings,
    texts,
    train,
    train_until_killed,
    weights,
)

MEAN = {"pooling_mode_mean_tokens": True}
WIDE: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1}
pytestmark = pytest.mark.usefixtures("one_thread")


def _with_other_tokens(folder: Path) -> Path:
    """Give words the numbers of others."""
    with edited(folder / "tokenizer.json") as content:
        words = content["model"]["vocab"]
        last = len(words) + 3
        words |= {word: last - place for word, place in words.items() if place >= 4}
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoders: a student, and teachers of other width, depth, tokens and family."""
    folder = tmp_path_factory.mktemp("models")
    encoder(folder / "student", pooling=MEAN)
    _with_other_tokens(encoder(folder / "wide", 1, pooling=MEAN, **WIDE))
    encoder(folder / "narrow", 2, pooling=MEAN, hidden_size=16, intermediate_size=24)
    encoder(folder / "plain", 3, **WIDE)
    headed("gpt2", folder / "writer", "GPT2LMHeadModel")
    texts(folder)
    return folder


def _options(place: Path, *teachers: str) -> dict[str, Any]:
    chosen = [str(place / name) for name in teachers]
    data = {"source": [str(place / "texts.txt")]}
    return {"teacher": chosen, "data": data, "learning_rate": 3e-3, "train": "all"}


@pytest.mark.parametrize("teachers", [("wide",), ("wide", "narrow")])
def test_an_encoder_learns_from_those_that_are_not_alike(
    teachers: tuple[str, ...], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = create_autospec(TextTeacher.outputs, side_effect=TextTeacher.outputs)
    monkeypatch.setattr(TextTeacher, "outputs", outputs)
    options = _options(place, *teachers)
    done = train(place / "student", tmp_path / "out", **options, steps=12)
    passes = [Path(call.args[0].source.id).name for call in outputs.call_args_list]
    assert passes == [*teachers]  # once for all texts, however many steps there are
    facts = done.facts
    assert facts.teacher == " + ".join(options["teacher"])
    assert facts.objectives == {"similarities": 1.0, "embedding": 1.0}
    assert facts.best < 0.9 * (facts.curve[0].validation or 0)
    assert {own.name.partition(":")[0] for own in facts.sources} == {"texts.txt", "builtin text"}
    assert all(own.start is not None and own.kept is not None for own in facts.sources)
    verify_files(done.folder)


def test_what_harms_agreement_is_not_written(place: Path, tmp_path: Path) -> None:
    """A rate that leads away from the teacher on all sources."""
    options = {**_options(place, "wide"), "objectives": {"similarities": 1.0}, "steps": 2}
    done = train(place / "student", tmp_path / "out", **{**options, "learning_rate": 5.0})
    assert done.facts.keeps_start
    assert weights(done.folder) == weights(place / "student")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["mapping", "training"])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(
    when: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**_options(place, "wide", "narrow"), "steps": 7, "checkpoint_every": 2}
    whole = train(place / "student", tmp_path / "whole", **options)
    moment: int | str = "tcompress.training.targets.Targets.fit_map"
    if when == "training":
        moment = _texts_read(place, tmp_path) + 5
    train_until_killed(place / "student", tmp_path / "out", moment, **options)
    assert len([*partial_folder(tmp_path / "out").rglob("*.outputs")]) >= 2
    monkeypatch.setattr(TextTeacher, "outputs", None)  # none are computed again
    again = train(place / "student", tmp_path / "out", **options)
    assert curve(again) == curve(whole)
    assert weights(again.folder) == weights(whole.folder)


def _texts_read(place: Path, folder: Path) -> int:
    losses = losses_of(place / "student", **_options(place, "wide", "narrow"))
    progress = Mock()
    losses.teachers.with_targets(folder / "count", progress)
    return int(progress.stage.call_args.args[1])


def _with_targets(losses: Losses, folder: Path) -> Losses:
    return replace(losses, teachers=losses.teachers.with_targets(folder, Silent()))


@pytest.mark.parametrize("teachers", [("wide",), ("student", "narrow")])
def test_pieces_have_the_gradient_of_the_whole(
    teachers: tuple[str, ...], place: Path, tmp_path: Path
) -> None:
    found = []
    for parts in (1, 3):
        losses = losses_of(place / "student", **_options(place, *teachers))
        losses = _with_targets(losses, tmp_path / "kept")
        losses.prepare_objectives()
        loss = losses.gradients(batch_of(losses), parts, alone=False)
        found.append((loss, gradients(losses.setup.model)))
    assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_similarities_have_half_of_their_gradient() -> None:
    own = normalize(torch.randn(5, 8), dim=-1).requires_grad_()
    taught = normalize(torch.randn(5, 12), dim=-1)
    objective = Similarities(Setting())
    half = torch.autograd.grad(objective.between(own, taught, own.detach(), taught), own)[0]
    whole = (own @ own.mT - taught @ taught.mT).square().mean(-1).sum() * 8
    assert_close(2 * half, torch.autograd.grad(whole, own)[0])


def test_an_alike_teacher_can_be_imitated_by_similarities(place: Path, tmp_path: Path) -> None:
    encoder(tmp_path / "alike", 5, pooling=MEAN)
    options = {**_options(place), "teacher": str(tmp_path / "alike"), "steps": 6}
    done = train(place / "student", tmp_path / "out", **options, objectives={"similarities": 1.0})
    assert done.facts.best < (done.facts.curve[0].validation or 0)


@pytest.mark.parametrize("widths", [(12, 8), (8, 12)])
def test_the_map_turns_into_the_students_space(widths: tuple[int, int]) -> None:
    """Of a teacher that is the student, turned, nothing is lost; cosines stay as they are."""
    wide, narrow = max(widths), min(widths)
    generator = torch.Generator().manual_seed(0)
    turned = torch.linalg.qr(torch.randn(wide, wide, generator=generator).double())[0]
    core = normalize(torch.randn(40, narrow, generator=generator).double(), dim=-1)
    spread = core @ turned[:narrow]
    taught, own = (spread, core) if widths[0] == wide else (core, spread)
    map_ = _turning(taught, taught[:20], own[:20])
    assert map_.shape == widths
    assert_close(taught @ map_, own)


def test_cosines_of_several_are_their_mean() -> None:
    tables = [normalize(torch.randn(6, width), dim=-1) for width in (4, 7, 5)]
    joined = _joined(tables, "vectors", independent=False)
    mean = torch.stack([table @ table.mT for table in tables]).mean(0)
    assert_close(joined @ joined.mT, mean)


@pytest.mark.parametrize("independent", [False, True])
def test_classes_of_several_are_their_mean(independent: bool) -> None:
    tables = [torch.randn(6, 3), torch.randn(6, 3)]
    likely = (lambda x: x.sigmoid()) if independent else (lambda x: x.softmax(-1))
    joined = _joined(tables, "classes", independent=independent)
    assert_close(likely(joined), (likely(tables[0]) + likely(tables[1])) / 2)


def test_a_classifier_learns_from_another_family(tmp_path: Path) -> None:
    """Labels are told apart by name, whatever their order; both columns of pairs are read."""
    student = classifier(tmp_path / "student", ["good", "bad"])
    teacher = classifier(tmp_path / "teacher", ["Bad", "Good"], "gpt2", 3, pad_token_id=0)
    _with_other_tokens(teacher)
    path = labelled_file(tmp_path / "rows.jsonl", 40)
    options = {"teacher": str(teacher), "data": {"source": [str(path)]}, "train": "all"}
    losses = losses_of(student, **options)
    losses = _with_targets(losses, tmp_path / "kept")
    seen = losses.teachers.of_batch(batch_of(losses), losses.setup.data.train)
    [reader] = losses.setup.readers
    model = targets.load_model(reader.source)
    rows = reader.rows([text for (text,) in (losses.setup.data.train.texts or [])[:6]])
    with torch.no_grad():
        alone = [model(**{key: item[None] for key, item in row.items()}).logits[0] for row in rows]
    assert_close(seen.logits, torch.stack(alone).flip(-1), rtol=1e-4, atol=1e-5)
    done = train(student, tmp_path / "out", **options, steps=8, learning_rate=3e-3)
    assert done.facts.objectives == {"logits": 1.0}
    assert done.facts.best < (done.facts.curve[0].validation or 0)
    assert all(own.kept is not None for own in done.facts.sources)


@pytest.mark.parametrize("teachers", [("wide",), ("wide", "other")])
def test_a_language_model_learns_logits_of_another_width(
    teachers: tuple[str, ...], tmp_path: Path
) -> None:
    for seed, (name, width) in enumerate({"student": 32, "wide": 64, "other": 32}.items()):
        headed("gpt2", tmp_path / name, "GPT2LMHeadModel", seed, n_embd=width)
    named = [str(tmp_path / name) for name in teachers]
    options = {"teacher": named, "data": texts(tmp_path), "steps": 6, "train": "all"}
    losses = losses_of(tmp_path / "student", **options)
    inputs = {name: item for name, item in batch_of(losses).items() if name != "labels"}
    models = [targets.load_model(SourceModel.open(name)) for name in named]
    with torch.no_grad():
        mean = torch.stack([model(**inputs).logits.softmax(-1) for model in models]).mean(0)
    assert_close(losses.teachers.of_inputs(inputs).logits.softmax(-1), mean)  # type: ignore[union-attr]
    done = train(tmp_path / "student", tmp_path / "out", **options)
    assert done.facts.objectives == {"logits": 1.0}
    assert done.facts.best < (done.facts.curve[0].validation or 0)
    assert all(own.kept is not None for own in done.facts.sources)


REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any], list[str]]] = {
    "no pooling, and no encoder": (
        ("plain", "writer"),
        {},
        ["does not say how its tokens become one", "`GPT2LMHeadModel`, embeds none"],
    ),
    "states": (
        ("wide",),
        {"objectives": {"hidden": 1, "attention": 1}},
        ["`attention`, `hidden` cannot be compared with"],
    ),
    "blocks": (("wide",), {"stage": "blocks"}, ["`block_steps` and `teacher_blocks` are about"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_work(case: str, place: Path, tmp_path: Path) -> None:
    teachers, changes, wanted = REFUSED[case]
    with pytest.raises(InputError) as error:
        train(place / "student", tmp_path / "out", **{**_options(place, *teachers), **changes})
    assert all(text in error.value.message for text in wanted)
    assert [*tmp_path.iterdir()] == []


def test_labels_in_another_order_are_learnt_by_name(tmp_path: Path) -> None:
    names = ["neutral", "entails", "denies"]
    for name in ("student", "teacher", "stranger"):
        classifier(tmp_path / name, names)
    turn_labels(tmp_path / "teacher", sorted(names))
    with edited(tmp_path / "stranger" / "config.json") as config:
        config["id2label"] = {"0": "good", "1": "bad", "2": "evil"}
    how = {"data": texts(tmp_path), "objectives": {"logits": 1.0}, "learning_rate": 1e-4}
    done = train(tmp_path / "student", tmp_path / "out", teacher=[str(tmp_path / "teacher")], **how)
    assert done.facts.curve[0].validation == pytest.approx(0, abs=1e-6)
    with pytest.raises(InputError, match=r"predicts `denies`, .*, its teacher `bad`, `evil`"):
        train(tmp_path / "student", tmp_path / "no", teacher=[str(tmp_path / "stranger")], **how)


def test_other_labels_are_refused(tmp_path: Path) -> None:
    student = classifier(tmp_path / "student", ["good", "bad"])
    others = [
        classifier(tmp_path / "three", ["good", "bad", "ugly"]),
        classifier(tmp_path / "names", ["good", "evil"]),
    ]
    models = [SourceModel.open(str(folder)) for folder in (student, *others)]
    with pytest.raises(InputError, match="2 problems") as error:
        arranged(models[0], models[1:], settings())
    assert "2 classes (`good`, `bad`), its teacher" in error.value.message
    assert "3 (`good`, `bad`, `ugly`)" in error.value.message


def test_a_new_head_is_numbered_like_the_teachers(tmp_path: Path) -> None:
    student, path = encoder(tmp_path / "student"), tmp_path / "rows.jsonl"
    labelled_file(path, 40, ("a", "b"))
    wide = {"hidden_size": 48, "intermediate_size": 64}
    teacher = classifier(tmp_path / "teacher", ["b", "a"], seed=3, **wide)
    options = {"task": "classification", "data": {"source": [str(path)]}, "steps": 2}
    alike = classifier(tmp_path / "alike", ["b", "a"], seed=3)
    for model, shared in ((teacher, {}), (alike, {"hidden": 1.0})):
        done = train(student, tmp_path / f"{model.name}-out", teacher=str(model), **options)
        assert done.facts.objectives == {"task": 1.0, **shared, "logits": 1.0}
        config = json.loads((done.folder / "config.json").read_text(encoding="utf-8"))
        assert config["id2label"] == {"0": "b", "1": "a"}
    three = classifier(tmp_path / "three", 3, seed=3, **wide)
    labelled_file(path, 40)
    with pytest.raises(InputError, match="the model predicts 2 classes, its teacher"):
        train(student, tmp_path / "other", teacher=str(three), **options)


@pytest.mark.parametrize("changes", [{"vocab_size": 120}, {}])
def test_another_vocabulary_is_refused_where_logits_are_asked_for(
    changes: dict[str, int], tmp_path: Path
) -> None:
    student = headed("gpt2", tmp_path / "student", "GPT2LMHeadModel")
    teacher = headed("gpt2", tmp_path / "teacher", "GPT2LMHeadModel", **changes)
    _with_other_tokens(teacher)
    models = [SourceModel.open(str(folder)) for folder in (student, teacher)]
    with pytest.raises(InputError, match="compares tokens one by one, but the model has") as error:
        arranged(models[0], models[1:], settings())
    assert error.value.hint == "give a teacher with the model's own tokenizer"


def test_order_of_labels() -> None:
    assert order_of(["a", "b c"], ["B-C", "A"]) == [1, 0]
    assert order_of(["a", "b"], ["LABEL_0", "LABEL_1"]) == [0, 1]
    assert order_of(["a", "b"], ["a", "c"]) is None
    assert order_of(["a", "b"], ["a"]) is None


def test_texts_without_some_words() -> None:
    text = "one two three four five six seven eight nine ten"
    assert without_words(text, 0.45) == without_words(text, 0.45)
    assert 0 < len(without_words(text, 0.45).split()) < 10
    assert without_words("word", 0.99) == "word"


def test_what_teachers_say_must_be_numbers(place: Path, tmp_path: Path) -> None:
    reader = TextTeacher.of(SourceModel.open(str(place / "wide")), 16, "vectors")
    model = targets.load_model(reader.source)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(targets.TrainingError, match=r"`.*wide` gives NaN or infinity"):
        reader.outputs(model, [("w20 w21",)])


def test_too_many_texts_are_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so many as the hint names are not."""
    options = {**_options(place, "wide"), "steps": 1}
    hints = []
    monkeypatch.setattr(targets, "MOST_BYTES", 1000)
    for _ in range(2):
        with pytest.raises(InputError, match="at most") as refused:
            train(place / "student", tmp_path / "out", **options)
        assert [*tmp_path.iterdir()] == []
        hints.append((refused.value.hint or "").split("`")[1].split())
        texts_of_teachers = int(refused.value.message.split()[5].replace(",", ""))
        row = WIDE["hidden_size"] * 2  # in float16
        monkeypatch.setattr(targets, "MOST_BYTES", (texts_of_teachers - 12) * row)
    assert hints[0] == ["--samples", "1"]
    samples = int(hints[1][1])
    assert 10 < samples < 40
    data = {**options["data"], "samples": samples}
    train(place / "student", tmp_path / "out", **{**options, "data": data})
