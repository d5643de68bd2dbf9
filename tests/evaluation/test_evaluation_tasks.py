"""Tasks on tiny models, against computations one example at a time."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image
from transformers import AutoImageProcessor

from tcompress.conversion.converter import convert
from tcompress.data.calibration import CalibrationData
from tcompress.data.examples import Examples, load_examples
from tcompress.errors import DataError, InputError
from tcompress.evaluation import embedding_tasks
from tcompress.evaluation.measuring import TASKS, evaluate
from tcompress.evaluation.task_base import EvaluationTask, Runner
from tcompress.hf.opening import load_model
from tcompress.models import SourceModel
from tcompress.options import Convert, Evaluate
from tests.support.cli import run
from tests.support.evaluation import (
    classifier,
    encoder,
    headed,
    labelled_file,
    loaded,
    pairs_file,
    rows_file,
    turn_labels,
)
from tests.support.model_folders import model_folder, save_processor, save_tokenizer, sentences
from tests.support.training import picture_rows

pytestmark = pytest.mark.usefixtures("one_thread")


def examples_of(task: str, data: Path, **columns: str) -> Examples:
    return load_examples(str(data), "train", TASKS[task].needs, columns=columns)


def ready(task: str, folder: Path, data: Path, length: int | None = None, **options: Any) -> Any:
    """Examples made ready for a model, and the model."""
    source = SourceModel.open(str(folder), converted=True)
    wanted = Evaluate.model_validate({"task": task, "data": str(data), **options})
    prepared = TASKS[task](source, examples_of(task, data), length, wanted)
    return prepared, load_model(source)


def rows_of(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.read_text().splitlines()]


def logits_of(model: Any, tokenizer: Any, *texts: str) -> torch.Tensor:
    """Scores of a text, or of a pair of texts, on its own."""
    with torch.no_grad():
        found: torch.Tensor = model(**tokenizer(*texts, return_tensors="pt")).logits[0]
    return found


def numbers(prepared: EvaluationTask, model: Any, batch_size: int = 4) -> dict[str, float]:
    measured = prepared.measure(model, batch_size, lambda amount: None)
    return {item.name: item.value() for item in measured.statistics}


def measured(task: str, folder: Path, data: Path, *length: int, **options: Any) -> Any:
    """Examples made ready, the model, and its numbers, on which batches of 1 and of 7 agree."""
    prepared, model = ready(task, folder, data, *length, **options)
    alone, together = (numbers(prepared, model, batch_size=size) for size in (1, 7))
    assert together == pytest.approx(alone, abs=1e-5)
    return prepared, model, together


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_classification(family: str, tmp_path: Path) -> None:
    more = {"pad_token_id": None} if family == "gpt2" else {}
    folder = classifier(tmp_path / "model", 3, family, **more)
    data = labelled_file(tmp_path / "data.jsonl", classes=(0, 1, 2))
    _, _, found = measured("classification", folder, data)
    model, tokenizer = loaded(folder, "AutoModelForSequenceClassification")
    rows = rows_of(data)
    guesses = [int(logits_of(model, tokenizer, row["text"]).argmax()) for row in rows]
    hits = sum(guess == row["label"] for guess, row in zip(guesses, rows, strict=True))
    assert list(found) == ["accuracy", "macro_f1"]
    assert found["accuracy"] == pytest.approx(hits / len(rows))


def test_classes_are_matched_by_name(tmp_path: Path) -> None:
    names = ["good", "bad"]
    numbered = classifier(tmp_path / "numbered", 2)
    named = classifier(tmp_path / "named", ["GOOD", "BAD"])
    other = classifier(tmp_path / "other", ["yes", "no"])
    data = labelled_file(tmp_path / "data.jsonl", classes=names)  # the data sorts: bad, good
    scores, facts, notes = [], [], []
    for folder in (numbered, named, other):
        prepared, model = ready("classification", folder, data)
        scores.append(numbers(prepared, model)["accuracy"])
        facts.append(prepared.prepared.facts["labels_matched_by"])
        notes.append(prepared.prepared.notes)
    assert facts == ["index", "name", "index"]
    assert scores[1] == pytest.approx(1 - scores[0])  # the same weights, labels swapped
    assert scores[2] == scores[0]
    doubt = "the model calls its labels {}, the data `bad`, `good`; they are matched by their order"
    assert notes[0][0].startswith(doubt.format("`LABEL_0`, `LABEL_1`"))
    assert notes[2][0].startswith(doubt.format("`yes`, `no`"))
    assert notes[1] == ()


def test_numbers_for_labels_with_names_are_doubted(tmp_path: Path) -> None:
    """Nothing says that 0 is the first label."""
    folder = classifier(tmp_path / "named", ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"])
    plain = classifier(tmp_path / "plain", 3)
    data = labelled_file(tmp_path / "data.jsonl", classes=(0, 1, 2))
    done = run("evaluate", str(folder), str(plain), "--task", "classification", "--data", str(data))
    said = " ".join(done.err.split())
    assert (
        said.count("the data has numbers, which are taken for ids from 0 (0 is `CONTRADICTION`)")
        == 1
    )
    assert "name a column that has them: `--columns label=COLUMN`" in said


def test_long_and_empty_texts(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "model")
    texts = ["", "a red fox", "fox " * 100]
    data = rows_file(tmp_path / "data.jsonl", text=texts, label=[0, 1, 0])
    prepared, _, found = measured("classification", folder, data, 16)
    assert prepared.prepared.facts["truncated"] == 1
    assert list(found) == ["accuracy", "macro_f1", "matthews"]


def embedding(folder: Path, text: str) -> np.ndarray:
    model, tokenizer = loaded(folder, "AutoModel")
    with torch.no_grad():
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
    vector = states.mean(0)
    return vector / np.linalg.norm(vector)


def test_pooling_is_told_of_and_unknown_pooling_is_refused(tmp_path: Path) -> None:
    data = pairs_file(tmp_path / "pairs.jsonl")
    folder = encoder(tmp_path / "first", pooling={"pooling_mode": "cls"})
    assert ready("sts", folder, data)[0].prepared.facts["pooling"] == "cls"
    folder = encoder(tmp_path / "model", pooling={"pooling_mode": "attention"})
    with pytest.raises(DataError, match="is pooled by `attention`; known are cls, max"):
        ready("sts", folder, data)


def test_similarity_by_a_head_with_one_output(tmp_path: Path) -> None:
    data = pairs_file(tmp_path / "pairs.jsonl", 12)
    folder = classifier(tmp_path / "model", 1)
    prepared, _, found = measured("sts", folder, data)
    plain, tokenizer = loaded(folder, "AutoModelForSequenceClassification")
    rows = rows_of(data)
    logits = [
        float(logits_of(plain, tokenizer, row["sentence1"], row["sentence2"])) for row in rows
    ]
    scores = [row["score"] for row in rows]
    assert found["spearman"] == pytest.approx(scipy.stats.spearmanr(logits, scores).statistic)
    wide = classifier(tmp_path / "wide", 3)
    with pytest.raises(DataError, match="head has 3 labels; a score for a pair"):
        numbers(prepared, load_model(SourceModel.open(str(wide))))


def nats(folder: Path, windows: list[list[int]], context: int) -> tuple[float, int]:
    """Sum of the losses of all tokens but the first ones of each window, one at a time."""
    model, _ = loaded(folder, "AutoModelForCausalLM")
    total, count = 0.0, 0
    for ids in windows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for position in range(context, len(ids)):
            total -= float(logits[position - 1, ids[position]])
            count += 1
    return total, count


@pytest.mark.often("newline-False", "none-False")
@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("pack", ["eos", "newline", "none"])
def test_perplexity(pack: str, start: bool, tmp_path: Path) -> None:
    folder = model_folder("llama", tmp_path / "model", processor=False)
    save_tokenizer(folder, start=start)
    texts = sentences(9)
    data = rows_file(tmp_path / "texts.jsonl", text=texts)
    prepared, _, found = measured("perplexity", folder, data, 16, pack=pack)
    _, tokenizer = loaded(folder, "AutoModelForCausalLM")
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    end = [2] if pack == "eos" else []
    joined = [token for ids in plain for token in [*end, *ids]][len(end) :]
    windows = []
    for stream in plain if pack == "none" else [joined]:
        if start:
            windows += [[1, *stream[at : at + 15]] for at in range(0, len(stream), 15)]
        else:
            whole = [2, *stream]
            windows += [whole[at : at + 16] for at in range(0, len(whole) - 1, 15)]
    total, count = nats(folder, windows, context=1)
    # Every token is predicted once, whatever the windows.
    assert prepared.prepared.facts["tokens"] == count
    assert count == sum(map(len, plain)) + len(end) * (len(texts) - 1)
    assert found["nats_per_token"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    size = sum(len(text.encode()) for text in texts)
    size += len(texts) - 1 if pack == "newline" else 0
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)


def test_perplexity_tells_of_unknown_words_and_its_options(tmp_path: Path) -> None:
    folder = model_folder("gpt2", tmp_path / "model", processor=False)
    data = rows_file(tmp_path / "texts.jsonl", text=["a fox", "xyzzy runs", ""])
    prepared, _ = ready("perplexity", folder, data, 16)
    assert prepared.prepared.notes == ("1 token stands for text that the tokenizer does not know",)
    packing = prepared.prepared.facts["packing"]
    assert "windows of 16 tokens that begin with its own start token" in packing
    with pytest.raises(DataError, match="leave nothing to predict"):
        ready("perplexity", folder, data, 1)


def test_masked_words(tmp_path: Path) -> None:
    folder = model_folder("bert", tmp_path / "model", processor=False)
    data = rows_file(tmp_path / "texts.jsonl", text=["", *sentences(20)])
    with pytest.raises(DataError, match="has no mask token"):
        ready("masked-lm", folder, data)
    save_tokenizer(folder, mask_token="w99", bos_token="<s>")
    prepared, model, found = measured("masked-lm", folder, data)
    again, _ = ready("masked-lm", folder, data)
    assert numbers(again, model) == pytest.approx(found)
    plain, _ = loaded(folder, "AutoModelForMaskedLM")
    hits, loss, count = 0, 0.0, 0
    for row in prepared.prepared.rows:
        places = (row["labels"] != -100).nonzero().flatten()
        truth = row["labels"][places]
        assert (row["input_ids"] == 99).nonzero().flatten().tolist() == places.tolist()
        original = row["input_ids"].clone()
        original[places] = truth
        words = int((original > 3).sum())  # not the special tokens
        assert len(places) == (max(round(0.15 * words), 1) if words else 0)
        with torch.no_grad():
            logits = plain(input_ids=row["input_ids"][None]).logits[0].double().log_softmax(-1)
        for place, token in zip(places.tolist(), truth.tolist(), strict=True):
            hits += int(logits[place].argmax()) == token
            loss -= float(logits[place, token])
            count += 1
    assert found["accuracy"] == pytest.approx(hits / count)
    assert found["cross_entropy"] == pytest.approx(loss / count, rel=1e-5)


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = headed("vit", tmp_path / "model", "ViTForImageClassification", num_labels=7)
    data = picture_rows(tmp_path / "pictures.parquet", 14, 7)
    with pytest.raises(DataError, match="has no usable image processor"):
        ready("image-classification", folder, data)
    save_processor(folder)
    prepared, model, found = measured("image-classification", folder, data)
    reader = AutoImageProcessor.from_pretrained(folder, backend="pil")
    examples = examples_of("image-classification", data)
    hits = top = 0
    for content, label in zip(examples.images, examples.targets or [], strict=True):
        inputs = reader(images=[Image.open(io.BytesIO(content))], return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        hits += int(logits.argmax()) == label
        top += label in logits.topk(5).indices.tolist()
    assert found["accuracy"] == pytest.approx(hits / 14)
    assert found["top5"] == pytest.approx(top / 14)
    alike = np.zeros((14, 7)), np.arange(7), np.array(examples.targets)
    assert prepared.of_scores(*alike)[0].value() == 0
    sizes = Mock(return_value=lambda index: torch.zeros(3, 8 + index, 8))
    monkeypatch.setattr(prepared, "reader_of_inputs", sizes)
    with pytest.raises(DataError, match=r"inputs of shapes \(3, 8, 8\) and \(3, 9, 8\)"):
        numbers(prepared, model)


def test_retrieval(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "model")
    texts = sentences(30)
    documents = [*texts[15:29], texts[15]]  # the last one is that of the first row
    data = rows_file(tmp_path / "rows.jsonl", query=texts[:15], document=documents)
    prepared, _, found = measured("retrieval", folder, data)
    corpus = {text: embedding(folder, text) for text in documents}
    places = []
    for query, document in zip(texts[:15], documents, strict=True):
        vector = embedding(folder, query)
        cosines = {text: float(vector @ other) for text, other in corpus.items()}
        places.append(sum(value >= cosines[document] for value in cosines.values()))
    assert prepared.prepared.facts["documents"] == 14
    assert found["recall@1"] == pytest.approx(np.mean([place == 1 for place in places]))
    assert found["mrr@10"] == pytest.approx(np.mean([(p <= 10) / p for p in places]))


@pytest.mark.parametrize("labels", [0, 1, 2])
def test_response_selection(labels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_tasks, "_GATHERED", 20)  # five of the rows at a time
    path = tmp_path / "model"
    folder = classifier(path, labels) if labels else encoder(path)
    texts = sentences(24)
    data = rows_file(tmp_path / "rows.jsonl", context=texts[:12], response=texts[12:])
    prepared, _, found = measured("response-selection", folder, data, candidates=4)
    plain, tokenizer = loaded(
        folder, "AutoModelForSequenceClassification" if labels else "AutoModel"
    )
    places = []
    for row, chosen in enumerate(prepared.prepared.candidates.tolist()):
        assert chosen[0] == row
        assert len({*chosen}) == 4
        scores = []
        for response in chosen:
            one, two = texts[row], texts[12 + response]
            if labels:
                logits = logits_of(plain, tokenizer, one, two)
                scores.append(float(logits[-1] - (logits[0] if labels == 2 else 0)))
            else:
                scores.append(float(embedding(folder, one) @ embedding(folder, two)))
        places.append(sum(score >= scores[0] for score in scores))
    assert found["recall@1"] == pytest.approx(np.mean([place == 1 for place in places]))
    assert found["mrr"] == pytest.approx(np.mean([1 / place for place in places]))
    with pytest.raises(DataError, match="has 12 distinct responses, too few to choose among 13"):
        ready("response-selection", folder, data, candidates=13)


@pytest.mark.parametrize("labelled", [True, False])
def test_heads_whose_labels_are_in_another_order_agree(labelled: bool, tmp_path: Path) -> None:
    names = ["neutral", "entails", "denies"]
    for name in ("dense", "other"):
        classifier(tmp_path / name, names)
    turn_labels(tmp_path / "other", sorted(names))
    classifier(tmp_path / "numbered", 3)  # the first once more
    data = labelled_file(tmp_path / "rows.jsonl", classes=names)
    if not labelled:
        data = rows_file(tmp_path / "bare.jsonl", text=sentences(12))
    options = Evaluate.model_validate({"task": "classification", "data": str(data)})
    folders = [str(tmp_path / name) for name in ("dense", "other", "numbered")]
    for other in evaluate(folders, options)[1:]:
        found = {metric.name: metric.value for metric in other.metrics}
        assert found["agreement"] == 1
        assert found["kl"] == pytest.approx(0, abs=1e-6)


def test_one_output_has_no_classes_to_agree_on(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "bare.jsonl", text=sentences(12))
    options = Evaluate.model_validate({"task": "classification", "data": str(data)})
    folder = str(classifier(tmp_path / "scores", 1))
    with pytest.raises(InputError, match="one output, and so no classes to agree on"):
        evaluate([folder, folder], options)


def test_models_that_read_the_last_place_have_no_padding() -> None:
    rows = [{"input_ids": torch.arange(size)} for size in (3, 5, 3, 4, 5)]
    model: Any = SimpleNamespace(config=SimpleNamespace(summary_type="last"))
    cpu = torch.device("cpu")
    seen = [batch["input_ids"].shape for _, batch in Runner(model, 8, cpu, print).batches(rows, 9)]
    assert seen == [(2, 5), (1, 4), (2, 3)]


def test_a_decoder_without_padding_is_fitted_with_its_head(tmp_path: Path) -> None:
    """Its head reads the last token of a text, and has to know which that is."""
    folder = classifier(tmp_path / "gpt2", family="gpt2", pad_token_id=None)
    mask = (torch.arange(8) < torch.tensor([8, 7, 6, 8])[:, None]).long()
    ids = torch.where(mask == 1, torch.arange(8) + 5, 3)
    texts = [{"input_ids": ids, "attention_mask": mask}] * 2
    data = CalibrationData(texts, [1], "tiny", 8, 64, "tiny")
    recipe = Convert.model_validate({"method": {"name": "svd"}, "target": 0.5, "device": "cpu"})
    assert convert(str(folder), recipe, tmp_path / "small", data=data).manifest.plan.layers
