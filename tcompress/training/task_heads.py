"""The head that a task needs: a new one, or the one there with its order of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tcompress.data.labels import Classes, are_numbers, is_independent, label_names, matched
from tcompress.errors import DataError
from tcompress.hf.opening import has_head
from tcompress.models import SourceModel
from tcompress.training.tasks import TrainingTask
from tcompress.training.training_data import Data

SEVERAL = "multi_label_classification"
"""Name in Transformers of heads of which each label is a yes or no of its own."""


def with_head(
    task: TrainingTask | None, data: Data, source: SourceModel, teacher: SourceModel | None
) -> tuple[Data, Mapping[str, Any]]:
    """Number the classes of the data like a head, and choose the model's options on loading.

    A head that the model has is checked; a new one numbers its classes like the teacher's.
    """
    if task is None or task.head in (None, "pretraining"):  # the latter is of no classes
        return data, {}
    has = has_head(source, task.head)
    if task.head == "regression":
        if has:
            _check_labels(data.name, 1, source.config.num_labels, "score")
        return data, {"num_labels": 1, "problem_type": "regression"}
    if not len(data.labels):
        return data, {}
    if has:
        data = _numbered_like(data, source)
        _check_labels(data.name, len(data.labels), source.config.num_labels, "classes")
        return _of_kind(data, source)
    if len(data.labels) == 1 and not data.labels.several:
        [only] = data.labels.names
        text = f"`{data.name}` has one class, `{only}`: there is nothing to tell apart"
        raise DataError(text, "name another label column, or give data with all classes")
    if teacher is not None and has_head(teacher, task.head):
        data = _numbered_like(data, teacher)
    names = dict(enumerate(data.labels.names))
    numbers = {name: index for index, name in names.items()}
    kind = {"problem_type": SEVERAL} if data.labels.several else {}
    return data, {"num_labels": len(names), "id2label": names, "label2id": numbers, **kind}


def _of_kind(data: Data, source: SourceModel) -> tuple[Data, Mapping[str, Any]]:
    """Keep the kind of the head in the model's config, or have several labels where data has.

    A head that has a yes or no for each label learns them so, of one label too.
    """
    if data.labels.several:
        if not is_independent(source.config):
            note = (
                "the data has several labels an example: the head gives each by itself from now "
                f"on (`problem_type: {SEVERAL}`)"
            )
            data = replace(data, notes=(*data.notes, note))
        return data, {"problem_type": SEVERAL}
    if is_independent(source.config):
        count = len(data.labels)
        data = _relabelled(data, lambda ids: torch.nn.functional.one_hot(ids, count).float())
        data = replace(data, labels=replace(data.labels, several=True))
    return data, {}


def _check_labels(name: str, count: int, head: int, what: str) -> None:
    if count != head:
        text = f"`{name}` has {count} {what}, but the model's head has {head} labels"
        raise DataError(text, "give data that the head was made for, or a model without head")


def _numbered_like(data: Data, model: SourceModel) -> Data:
    """Number the classes of the data as a model does."""
    labels, several = label_names(model.config), data.labels.several
    # That numbers are among others says too little: the head may be of another task.
    if len(data.labels) != len(labels) and are_numbers(data.labels.names):
        return data  # whoever compares them refuses
    match = matched(labels, data.labels, data.name)
    order = torch.tensor(match.labels)

    def renumbered(marks: Tensor) -> Tensor:
        if not several:
            return order[marks]
        columns = torch.zeros(len(marks), len(labels))
        columns[:, order[order >= 0]] = marks[:, order >= 0]
        return columns

    classes = data.labels
    if match.by == "name" or classes.absent:
        classes = Classes(tuple(labels), tuple(range(len(labels))), several=several)
    notes = (*data.notes, match.doubt) if match.doubt else data.notes
    return replace(_relabelled(data, renumbered), labels=classes, notes=notes)


def _relabelled(data: Data, change: Callable[[Tensor], Tensor]) -> Data:
    train, validation = (
        part if part.labels is None else replace(part, labels=change(part.labels))
        for part in (data.train, data.validation)
    )
    return replace(data, train=train, validation=validation)
