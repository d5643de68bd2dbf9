"""Tiny models with heads and tokenizers, and data files, for tests of measuring."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.model_folders import save_tokenizer, sentences
from tests.support.tiny import TINY, TinyModel

_CLASSIFIERS = {"bert": "BertForSequenceClassification", "gpt2": "GPT2ForSequenceClassification"}


def headed(family: str, folder: Path, model: str, seed: int = 0, **options: Any) -> Path:
    """Write a tiny model of a family with another head, and a tokenizer."""
    tiny = TINY[family]
    made = TinyModel(tiny.config, model, {**tiny.options, **options}).build(seed)
    made.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def classifier(
    folder: Path, labels: Sequence[str] | int = 2, family: str = "bert", seed: int = 0, **more: Any
) -> Path:
    """Write a tiny model that classifies texts."""
    names = [f"LABEL_{index}" for index in range(labels)] if isinstance(labels, int) else labels
    id2label = dict(enumerate(names))
    label2id = {name: index for index, name in id2label.items()}
    options = {"id2label": id2label, "label2id": label2id, **more}
    return headed(family, folder, _CLASSIFIERS[family], seed, **options)


def turn_labels(folder: Path, labels: Sequence[str]) -> None:
    """Write a classifier again with its labels in another order."""
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    order = [model.config.label2id[name] for name in labels]
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data[order].clone()
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {name: index for index, name in enumerate(labels)}
    model.save_pretrained(folder)


def encoder(
    folder: Path, seed: int = 0, pooling: Mapping[str, Any] | None = None, **more: Any
) -> Path:
    """Write a tiny sentence encoder; with `pooling` as sentence-transformers does."""
    headed("bert", folder, "BertModel", seed, **more)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"any.models.{kind}"}
            for index, (path, kind) in enumerate(kinds.items())
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def rows_file(path: Path, **columns: Sequence[Any]) -> Path:
    """Write columns as a file of JSON lines."""
    rows = zip(*columns.values(), strict=True)
    lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def pairs_file(path: Path, count: int = 20) -> Path:
    """Write pairs of sentences with a score."""
    texts = sentences(2 * count)
    scores = [float(index * 7 % 11) for index in range(count)]
    return rows_file(path, sentence1=texts[:count], sentence2=texts[count:], score=scores)


def labelled_file(path: Path, count: int = 24, classes: Sequence[Any] = (0, 1)) -> Path:
    """Write sentences with labels."""
    labels = [classes[index * 5 % 7 % len(classes)] for index in range(count)]
    return rows_file(path, text=sentences(count), label=labels)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: for tiny models, waiting for others takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def loaded(folder: Path, kind: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer without anything of this project."""
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)
