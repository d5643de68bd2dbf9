"""Classes of data, and which label of a head each of them is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tcompress.errors import DataError, counted
from tcompress.progress import tell

_NUMBER = re.compile(r"(?:label[_ ]?)?(\d+)", re.IGNORECASE)
_PARTING = re.compile(r"[\s_-]+")

Targets = list[int] | list[float] | list[tuple[int, ...]]
"""A class or score for each example, or all classes that it has."""


@dataclass(frozen=True)
class Classes:
    """Classes of data: names in the order of their ids, and their numbers in the data."""

    names: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()  # one for each class, or none where the data has names alone
    absent: frozenset[int] = frozenset()  # ids of classes that no example has
    several: bool = False  # whether an example may have several, or none

    @property
    def used(self) -> list[int]:
        """Ids of the classes that examples have."""
        return [index for index in range(len(self.names)) if index not in self.absent]

    def __len__(self) -> int:
        return len(self.names)


def classes_of_names(names: Sequence[str]) -> Classes:
    """Make classes of names; names such as `2` or `LABEL_2` are numbers as well."""
    called = [_called(name) for name in names]
    numbers = [item for item in called if isinstance(item, int)]
    has_numbers = len({*numbers}) == len(names)
    return Classes(tuple(names), tuple(numbers) if has_numbers else ())


def classes_of_numbers(values: set[int], where: str) -> Classes:
    """Make classes of whole numbers: as they are, from 0 to the largest, or from 1.

    Numbers that are not there are classes like others where they are few: a part of the data may
    lack them. `where` names the column.
    """
    low, high = min(values), max(values)
    if low < 0:
        raise DataError(
            f"{where} has the label {low}; labels count from 0",
            "remove the rows with -1 if they have no label; if it is a class like others, write "
            "names in place of numbers",
        )
    # Stars, and other labels that count from 1: a class that there is not is not to be learnt.
    start = 1 if low == 1 and high > 1 and len(values) == high else 0
    every = range(start, high + 1)
    sparse = 2 * len(values) < len(every)
    numbers = sorted(values) if sparse else every
    absent = frozenset(at for at, value in enumerate(numbers) if value not in values)
    classes = Classes(tuple(map(str, numbers)), tuple(numbers), absent)
    if sparse:
        tell(f"{where} has {len(values):,} different numbers up to {high:,}: each is a class")
    elif absent:
        missing = few([classes.names[index] for index in sorted(absent)])
        tell(f"{where} has no row with {missing}, counted as classes like others")
    return classes


class Match(NamedTuple):
    """Labels of a head that the classes of data are, and how that was found."""

    labels: tuple[int, ...]  # of each class by its id; -1 for one that no example has
    by: Literal["name", "index", "number"]
    doubt: str | None = None


def label_names(config: Any) -> list[str]:
    """The names that a model gives its labels, in their order; `LABEL_0` and so on without any."""
    names = config.id2label or {index: f"LABEL_{index}" for index in range(config.num_labels)}
    return [str(names[index]) for index in sorted(names)]


def is_independent(config: Any) -> bool:
    """Tell whether each label of a head is a yes or no of its own."""
    return getattr(config, "problem_type", None) == "multi_label_classification"


def matched(labels: Sequence[str], classes: Classes, data: str) -> Match:
    """Find the label of a head for each class of data.

    It is the one of the same name (case and what parts words do not count, `LABEL_3` is called 3,
    and `03` is too, unless `3` is another label), else of the same number. Numbers that count from
    1 to the number of labels are moved by one. Where there are only other names, the order decides,
    and that is doubted.
    """
    names = [classes.names[index] for index in classes.used]
    called_as = _comparison(labels, names)
    places = {called_as(name): index for index, name in enumerate(labels)}
    is_clear = len(places) == len(labels)
    called = [called_as(name) for name in names]
    if is_clear and len({*called}) == len(called) and {*called} <= {*places}:
        doubt = None
        if called_as is _as_written and classes.numbers:
            doubt = (
                f"labels of the model differ in zeros in front alone ({few(labels)}), the data has "
                f"numbers, which are taken for those without: {_END}"
            )
        return _match(classes, [places[name] for name in called], "name", doubt)
    if len(labels) < len(names):
        raise DataError(
            f"the model's head has {counted(len(labels), 'label')}, but `{data}` has {len(names)} "
            f"classes ({few(names)})",
            "give a model that was trained on this task, or name another label column",
        )
    shared = {name for name in called if isinstance(name, str) and is_clear and name in places}
    if not classes.numbers:
        if shared or len(labels) != len(names):
            raise _disagree(labels, names, data)
        return _match(classes, range(len(names)), "index", _doubt_of_order(labels, names))
    match = _by_number(labels, classes, data)
    for index, name in zip(classes.used, called, strict=True):
        if name in shared and called_as(labels[match.labels[index]]) != name:
            raise _disagree(labels, names, data, classes.names[index])
    return match


def _match(
    classes: Classes,
    places: Iterable[int],
    by: Literal["name", "index", "number"],
    doubt: str | None = None,
) -> Match:
    label_of = dict(zip(classes.used, places, strict=True))
    return Match(tuple(label_of.get(index, -1) for index in range(len(classes))), by, doubt)


def _by_number(labels: Sequence[str], classes: Classes, data: str) -> Match:
    """Match numbers with those in names (`2 stars`), with ids, or with ids from 1."""
    names = [classes.names[index] for index in classes.used]
    numbers = [classes.numbers[index] for index in classes.used]
    count, called = len(labels), [*map(_called, labels)]
    inner = [_inner_number(name) for name in labels]
    of_names = are_numbers(names) and not are_numbers(labels) and None not in inner
    if of_names and len({*inner}) == count and {*numbers} <= {*inner}:
        places = [inner.index(value) for value in numbers]
        doubt = _doubt(labels, places[0], names[0], "which are matched with those in its names")
        return _match(classes, places, "number", doubt)
    if max(numbers) < count:
        doubt = _doubt(labels, numbers[0], names[0], "which are taken for ids from 0")
        if not are_numbers(names):
            doubt = _doubt_of_order(labels, names, "numbers")
        return _match(classes, numbers, "index", None if called == [*range(count)] else doubt)
    if min(numbers) > 0 and max(numbers) == count:
        places = [value - 1 for value in numbers]
        doubt = _doubt(labels, places[0], names[0], "which count from 1")
        return _match(classes, places, "number", doubt)
    raise DataError(
        f"`{data}` has labels up to {max(numbers)}, the model's head has "
        f"{counted(count, 'label')} ({few(labels)})",
        "give a model that was trained on this task, or write the names of its labels in place of "
        "numbers",
    )


_END = (
    "if they mean others, write names in place of numbers, or name a column that has them: "
    "`--columns label=COLUMN`"
)


def _doubt(labels: Sequence[str], index: int, name: str, how: str) -> str:
    return (
        f"the model calls its labels {few(labels)}, the data has numbers, {how} ({name} is "
        f"`{labels[index]}`): {_END}"
    )


def _doubt_of_order(labels: Sequence[str], names: Sequence[str], what: str = "order") -> str:
    return (
        f"the model calls its labels {few(labels)}, the data {few(names)}; they are matched by "
        f"their {what}: if that is another, {_change(labels)}"
    )


def _change(labels: Sequence[str]) -> str:
    if are_numbers(labels):
        return "name them as `id2label` in the model's `config.json`"
    return "call the classes as the model does"


def _disagree(
    labels: Sequence[str], names: Sequence[str], data: str, wrong: str | None = None
) -> DataError:
    called = f"the model calls its {counted(len(labels), 'label')} {few(labels)}"
    text = f"{called}, `{data}` has {few(names)}"
    reason = f", and numbers `{wrong}` otherwise" if wrong else ": not the same names"
    return DataError(text + reason, _change(labels))


def order_of(labels: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Find the label of another head for each of a head's, by name or else by number.

    None where they have other names, or not as many.
    """
    called_as = _comparison(labels, names)
    places = {called_as(name): index for index, name in enumerate(names)}
    if len(labels) != len(names):
        return None
    if len(places) == len(names) and {*map(called_as, labels)} == {*places}:
        return [places[called_as(name)] for name in labels]
    return [*range(len(labels))] if are_numbers(labels) or are_numbers(names) else None


def _comparison(*lists: Sequence[str]) -> Callable[[str], str | int]:
    """Decide what names are compared by: numbers as they are written where two would be the same.

    So `01` and `1` stay apart where a list has both, and are one number where none has.
    """
    for names in lists:
        numbers = [item for item in map(_called, names) if isinstance(item, int)]
        if len({*numbers}) < len(numbers):
            return _as_written
    return _called


def _as_written(name: str) -> str:
    return _PARTING.sub(" ", name.casefold()).strip()


def _called(name: str) -> str | int:
    number_of = _NUMBER.fullmatch(name.strip())
    return int(number_of[1]) if number_of else _as_written(name)


def _inner_number(name: str) -> int | None:
    """The number in a name such as `4 stars`."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[0]) if len(numbers) == 1 else None


def are_numbers(names: Sequence[str]) -> bool:
    """Tell whether some are numbers, or as good as numbers."""
    return any(isinstance(_called(name), int) for name in names)


def few(names: Sequence[str]) -> str:
    """List the first names."""
    shown = ", ".join(f"`{name}`" for name in names[:4])
    return shown + (", ..." if len(names) > 4 else "")
