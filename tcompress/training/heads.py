"""The head that a task needs, and which of its labels is which class of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tcompress.errors import DataError
from tcompress.integration.models import has_head
from tcompress.reading.classes import are_numbers, by_name, doubts, label_names
from tcompress.source import SourceModel
from tcompress.training.data import Data
from tcompress.training.tasks import Task, check_labels


def head_options(
    task: Task | None, data: Data, source: SourceModel, teacher: SourceModel | None
) -> Mapping[str, Any]:
    """Options of a head that is added, or a check of the one that is there.

    The classes of the data are numbered as the head, or else the teacher, numbers its labels.

    Args:
        task: The task, if there is one.
        data: The data; its labels may be numbered anew.
        source: The student.
        teacher: The teacher whose logits are imitated, if they are.

    Raises:
        DataError: The labels do not fit the head, or there is one class only.
    """
    if task is None or task.head is None:
        return {}
    has = has_head(source, task.head)
    if task.head == "regression":
        if has:
            check_labels(data.name, 1, source.config.num_labels, "score")
        return {"num_labels": 1, "problem_type": "regression"}
    if not data.classes:
        return {}
    if has:
        _number_like(data, source)
        check_labels(data.name, len(data.classes), source.config.num_labels)
        return {}
    if len(data.classes) == 1:
        raise DataError(
            f"`{data.name}` has one class, `{data.classes[0]}`: there is nothing to tell apart",
            "name another label column, or give data with all classes",
        )
    if teacher is not None and has_head(teacher, task.head):
        _number_like(data, teacher)
    names = dict(enumerate(data.classes))
    return {
        "num_labels": len(names),
        "id2label": names,
        "label2id": {name: index for index, name in names.items()},
    }


def _number_like(data: Data, model: SourceModel) -> None:
    """Numbers the classes of the data as a model does, if it calls them by the same names."""
    labels = label_names(model.config)
    order = by_name(labels, data.classes)
    # That numbers are among others says too little: the head may be of another task.
    if order is None or (len(order) < len(labels) and are_numbers(data.classes)):
        note = doubts(labels, data.classes)
        data.notes += [note] if note else []
        return
    for part in (data.train, data.validation):
        if part.labels is not None:
            part.labels = torch.tensor(order)[part.labels]
    data.classes = tuple(labels)
