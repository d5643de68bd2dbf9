"""Which of a model's labels is which class of the data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcompress.errors import DataError
from tcompress.reading.examples import Examples

_UNNAMED = re.compile(r"(label[_ ]?)?\d+", re.IGNORECASE)


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
    """Matches labels with classes: by name if the names are the same, else by their order.

    Args:
        config: The model's configuration.
        examples: Examples with classes.

    Raises:
        DataError: The model has fewer labels than the data has classes.
    """
    names = [str(config.id2label[index]) for index in sorted(config.id2label)]
    classes = examples.classes
    if len(names) < len(classes):
        raise DataError(
            f"the model's head has {_counted(len(names), 'label')}, but `{examples.name}` has "
            f"{_counted(len(classes), 'class', 'classes')} ({_few(classes)})",
            "give a model that was trained on this task, or name another label column",
        )
    note, by = None, "index"
    of_class = np.arange(len(classes))
    if _named(names) and _named(classes):
        place = {name.casefold(): index for index, name in enumerate(names)}
        folded = [name.casefold() for name in classes]
        if len(place) == len(names) and len(set(folded)) == len(folded) and {*folded} <= {*place}:
            of_class, by = np.array([place[name] for name in folded]), "name"
        else:
            note = (
                f"the model calls its labels {_few(names)}, the data {_few(classes)}; "
                "they are matched by their order"
            )
    class_of = np.full(len(names), -1)
    class_of[of_class] = np.arange(len(classes))
    return Labels(of_class, class_of, by, note)


def _named(names: Sequence[str]) -> bool:
    return not any(_UNNAMED.fullmatch(name) for name in names)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:4])
    return shown + (", ..." if len(names) > 4 else "")


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
