"""Which of a model's labels is which class of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcompress.errors import DataError
from tcompress.reading.classes import by_name, doubts, few, label_names
from tcompress.reading.examples import Examples


@dataclass(frozen=True)
class Labels:
    """How labels and classes correspond.

    Attributes:
        of_class: The label of each class.  # (classes,)
        class_of: The class of each label, -1 if the data has no such class.  # (labels,)
        by: `name` or `index`.
        note: What is doubtful about it, if anything.
    """

    of_class: NDArray[Any]
    class_of: NDArray[Any]
    by: str
    note: str | None = None


def match_labels(config: Any, examples: Examples) -> Labels:
    """Matches labels with classes: by name if every class is called as a label is, else by order.

    Args:
        config: The model's configuration.
        examples: Examples with classes.

    Raises:
        DataError: The model has fewer labels than the data has classes.
    """
    names, classes = label_names(config), examples.classes
    if len(names) < len(classes):
        raise DataError(
            f"the model's head has {_counted(len(names), 'label')}, but `{examples.name}` has "
            f"{_counted(len(classes), 'class', 'classes')} ({few(classes)})",
            "give a model that was trained on this task, or name another label column",
        )
    order = by_name(names, classes)
    by, note = ("name", None) if order is not None else ("index", doubts(names, classes))
    of_class = np.arange(len(classes)) if order is None else np.array(order)
    class_of = np.full(len(names), -1)
    class_of[of_class] = np.arange(len(classes))
    return Labels(of_class, class_of, by, note)


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
