"""Which label of a model is which class of the data, as far as their names tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NUMBER = re.compile(r"(?:label[_ ]?)?(\d+)", re.IGNORECASE)


def label_names(config: Any) -> list[str]:
    """The names that a model gives its labels, in their order."""
    return [str(config.id2label[index]) for index in sorted(config.id2label)]


def by_name(labels: Sequence[str], classes: Sequence[str]) -> list[int] | None:
    """The label of each class, if names say so: every class is called as one label is.

    Case does not count, and `LABEL_3` is called 3.

    Args:
        labels: Names of the model's labels.
        classes: Names of the data's classes.
    """
    place = {_key(name): index for index, name in enumerate(labels)}
    wanted = [_key(name) for name in classes]
    if len(place) < len(labels) or len(set(wanted)) < len(wanted) or not {*wanted} <= {*place}:
        return None
    return [place[key] for key in wanted]


def doubts(labels: Sequence[str], classes: Sequence[str]) -> str | None:
    """What is doubtful about matching by order: that classes have names, and labels other ones.

    Args:
        labels: Names of the model's labels.
        classes: Names of the data's classes.
    """
    if are_numbers(classes):
        return None
    return (
        f"the model calls its labels {few(labels)}, the data {few(classes)}; they are matched "
        "by their order"
    )


def are_numbers(names: Sequence[str]) -> bool:
    """Tells whether some are numbers, or as good as numbers."""
    return any(_NUMBER.fullmatch(name) for name in names)


def _key(name: str) -> str | int:
    number = _NUMBER.fullmatch(name)
    return int(number[1]) if number else name.casefold()


def few(names: Sequence[str]) -> str:
    """Lists the first names."""
    shown = ", ".join(f"`{name}`" for name in names[:4])
    return shown + (", ..." if len(names) > 4 else "")
