"""Labelled and unlabelled examples out of a data set, for training and measuring."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tcompress.data.column_names import COLUMN_NAMES, ROLES
from tcompress.data.grids import ARCHIVE, Volumes, Windows, read_archive, volumes_of, windows_of
from tcompress.data.numbers import (
    decimals,
    has_doubtful_commas,
    is_missing,
    number,
    whole_numbers,
)
from tcompress.data.tables import (
    Table,
    check_column,
    content,
    hash_of,
    kinds_of,
    opened,
    text_columns,
    with_derived,
)
from tcompress.errors import DataError, listed
from tcompress.progress import tell

_NUMBER = re.compile(r"(?:label[_ ]?)?(\d+)", re.IGNORECASE)
_PARTING = re.compile(r"[\s_-]+")


def label_names(config: Any) -> list[str]:
    """The names that a model gives its labels, in their order."""
    return [str(config.id2label[index]) for index in sorted(config.id2label)]


def by_name(labels: Sequence[str], classes: Sequence[str]) -> list[int] | None:
    """The label of each class, if every class is called as one label is; `LABEL_3` is called 3.

    Case does not count, nor what parts words: `not_entailment` is `Not entailment`.
    """
    place = {_called(name): index for index, name in enumerate(labels)}
    wanted = [_called(name) for name in classes]
    if len(place) < len(labels) or len(set(wanted)) < len(wanted) or not {*wanted} <= {*place}:
        return None
    return [place[name] for name in wanted]


def _called(name: str) -> str | int:
    number = _NUMBER.fullmatch(name)
    return int(number[1]) if number else _PARTING.sub(" ", name.casefold()).strip()


def doubts(labels: Sequence[str], classes: Sequence[str]) -> str | None:
    """What is doubtful about matching by order, and how to end it; None if there are no names."""
    head, data = f"the model calls its labels {few(labels)}", f"the data {few(classes)}"
    if not are_numbers(classes):
        change = "call the classes as the model does"
        if are_numbers(labels):
            change = "name them as `id2label` in the model's `config.json`"
        return f"{head}, {data}; they are matched by their order: if that is another, {change}"
    if are_numbers(labels):
        return None
    return (
        f"{head}, the data has numbers, which are matched by order ({classes[0]} is "
        f"`{labels[0]}`): if they mean others, write names in place of numbers, or name a column "
        "that has them: `--columns label=COLUMN`"
    )


def are_numbers(names: Sequence[str]) -> bool:
    """Tells whether some are numbers, or as good as numbers."""
    return any(_NUMBER.fullmatch(name) for name in names)


def few(names: Sequence[str]) -> str:
    """Lists the first names."""
    shown = ", ".join(f"`{name}`" for name in names[:4])
    return shown + (", ..." if len(names) > 4 else "")


Target = Literal["class", "score"]
_LISTS = ("list", "largelist", "sequence")  # kinds of columns


@dataclass(frozen=True)
class Needs:
    """What a task reads."""

    texts: tuple[int, int] = (0, 0)  # fewest and most texts in an example
    image: bool = False  # whether an example has a picture
    target: Target | None = None  # `class`, `score`, or None if nothing is to be predicted
    volume: bool = False  # whether an example has a volume
    unlabelled: bool = False  # whether data without targets will do
    instead: str = "give other data"  # what else may be done where targets are missing
    # Time steps of a series that are seen, and those that are forecast; None without.
    window: tuple[int, int] | None = None


@dataclass(frozen=True)
class Examples:
    """Examples of a task."""

    name: str  # name of the data, such as `train.parquet:sentence,label`
    split: str  # split that was read
    fingerprint: str  # SHA-256 of all contents
    # One or two texts for each example, in columns; empty for pictures alone.
    texts: tuple[list[str], ...] = ()
    images: tuple[bytes, ...] = ()  # contents of picture files
    # Class ids, or scores; None if nothing is to be predicted.
    targets: list[int] | list[float] | None = None
    classes: tuple[str, ...] = ()  # names of the classes in the order of their ids; () for scores
    volumes: Volumes | None = None  # (examples, *shape)
    windows: Windows | None = None  # windows of a series
    whole: bool = True  # whether the file holds one split only, so that the name of it says nothing

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of an input on a grid, as `inputs.grid_shape` has a model's; None without one."""
        if self.windows is not None:
            return self.windows.context, len(self.windows.variables)
        return None if self.volumes is None else (1, *self.volumes.shape[1:])

    def __len__(self) -> int:
        grids = [found for found in (self.volumes, self.windows) if found is not None]
        return len(grids[0] if grids else self.images or self.texts[0])


def load_examples(
    name: str,
    split: str,
    needs: Needs,
    *,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Examples:
    """Reads examples of a task out of a file, folder or hub id, as `data.tables.opened` takes it.

    `columns` are named by role (`ROLES`) where they are not guessed; several texts are joined by
    `+`. At most `limit` examples are drawn by the seed, and kept in the order of the data.
    """
    if needs.volume and Path(name).suffix.lower() == ARCHIVE and Path(name).is_file():
        return _from_archive(Path(name), split, needs, limit, seed)
    with opened(name, split) as table:
        if needs.window is not None:
            made = windows_of(table, split, needs.window)
            made = made.chosen(_sampled(len(made), limit, seed).tolist())
            return Examples(table.label, split, made.fingerprint, windows=made, whole=False)
        table = with_derived(table, (columns or {}).values())
        table = with_numbers(table, needs.target, columns or {})
        chosen = _chosen(table, needs, dict(columns or {}))
        if needs.unlabelled:  # as test splits often are
            chosen = {
                role: column
                for role, column in chosen.items()
                if role not in ("label", "score") or not {*table.rows.unique(column)} <= {None, -1}
            }
        rows = table.rows.select_columns(list(chosen.values()))
        # Classes are those of the whole data, whichever of it is drawn.
        classes = _classes(table, chosen["label"]) if "label" in chosen else Classes()
        if limit is not None and limit < len(rows):
            tell(f"{table.label}: {limit:,} of {len(rows):,} rows are drawn")
            rows = rows.select(_sampled(len(rows), limit, seed))
        data = rows.to_dict()
        if needs.texts[0] == 2:
            data = _pairs(table, data, chosen)
        return _read(table, data, chosen, classes, split)


def with_numbers(table: Table, target: Target | None, columns: Mapping[str, str]) -> Table:
    """Reads columns of labels and scores as the numbers that they are, whatever their type."""
    role = {"class": "label", "score": "score", None: None}[target]
    if role is None:
        return table
    kinds, rows = kinds_of(table), table.rows
    names = [columns[role]] if role in columns else COLUMN_NAMES[role]
    for name in [name for name in kinds if name in names or name.lower() in names]:
        if (role == "label" and kinds[name] in ("classlabel", "bool")) or "int" in kinds[name]:
            continue
        if role == "score" and "float" in kinds[name]:
            continue
        cells, order = rows[name], list(rows.column_names)
        numbers = whole_numbers(cells) if role == "label" else decimals(cells)
        if numbers is not None:
            rows = rows.remove_columns([name]).add_column(name, numbers).select_columns(order)
    return replace(table, rows=rows)


def places_of(texts: Sequence[str], among: Sequence[str]) -> NDArray[np.int64]:
    """Finds texts in a list in which each stands once."""
    index = {text: place for place, text in enumerate(among)}
    return np.array([index[text] for text in texts])


def others(right: NDArray[np.int64], count: int, total: int, seed: int) -> NDArray[np.int64]:
    """Draws, for each right place of so many, different wrong ones.  # (right, count)."""
    rng, right = np.random.default_rng(seed), right[:, None]
    drawn = np.stack([rng.choice(total - 1, count, replace=False) for _ in right])
    return drawn + (drawn >= right)  # numbers from the right one on mean the next


def _sampled(count: int, limit: int | None, seed: int) -> NDArray[np.int64]:
    return np.sort(np.random.default_rng(seed).permutation(count)[:limit])


def _from_archive(path: Path, split: str, needs: Needs, limit: int | None, seed: int) -> Examples:
    volumes, labels = read_archive(path, split)
    places = _sampled(len(volumes), limit, seed)
    classes = tuple(str(index) for index in range(int(labels.max()) + 1))
    targets = labels[places].tolist() if needs.target else None
    volumes = volumes[places]
    return Examples(
        name=path.resolve().name,
        split=split,
        fingerprint=_fingerprint((item.tobytes() for item in volumes), targets),
        targets=targets,
        classes=classes if needs.target else (),
        volumes=volumes,
        whole=False,
    )


def _chosen(table: Table, needs: Needs, given: dict[str, str]) -> dict[str, str]:
    kinds = kinds_of(table)
    wanted = _roles(needs)
    check_columns(table, kinds, given)
    chosen = {role: column for role, column in given.items() if role in wanted}
    for role in (role for role in wanted if role not in chosen):
        guess = _guess(table, kinds, role, {*given.values(), *chosen.values()})
        if guess is not None:
            chosen[role] = guess
    missing = [role for role, needed in wanted.items() if needed and role not in chosen]
    if missing:
        raise _without(missing, table, kinds, {*given.values(), *chosen.values()}, needs)
    return {role: chosen[role] for role in ROLES if role in chosen}


def _without(
    missing: Sequence[str], table: Table, kinds: Mapping[str, str], taken: set[str], needs: Needs
) -> DataError:
    """Says which columns are missing, why those of such a name do not do, and which others may."""
    has = ", ".join(f"`{column}` ({kind})" for column, kind in kinds.items())
    text = f"the task needs a column for {listed(missing)}, but `{table.label}` has {has}"
    offers: dict[str, str] = {}
    mend = ""
    for role in missing:
        named = [column for column in kinds if column.lower() in COLUMN_NAMES[role]]
        named += [column for column in kinds if role == "text" and kinds[column] == "chat"]
        reasons = [why for column in named if (why := _unfit(table, kinds, role, column))]
        text += "".join(f"; {why}" for why in reasons)
        mend = "mend it, or " if reasons else mend
        free = [column for column in kinds if column not in {*taken, *offers.values()}]
        fits = [column for column in free if _unfit(table, kinds, role, column) == ""]
        offers |= {role: fits[0]} if fits else {}
    other = needs.instead if missing in (["label"], ["score"]) else "give other data"
    if len(offers) < len(missing):
        other = "" if other == "give other data" else f", or {other}"
        return DataError(text, f"{mend}give data with such a column{other}")
    names = ",".join(f"{role}={column}" for role, column in offers.items())
    return DataError(text, f"name it: `--columns {names}`, or {other}")


def _unfit(table: Table, kinds: Mapping[str, str], role: str, column: str) -> str:
    """Why a column cannot have a role; nothing if it can."""
    kind = kinds[column]
    numbers = role == "score" or (role == "label" and "float" in kind)
    if role == "label" and kind in _LISTS:
        return f"`{column}` holds lists, and an example can have one label only"
    if role == "text" and kind == "chat":
        return f"`{column}` holds chats, which this task does not read; write them as text"
    if not numbers:
        return "" if _fits(role, kind) else f"`{column}` holds {kind}"
    cells = table.rows[column]
    for row, cell in enumerate(cells):
        value = number(cell)
        if not is_missing(cell) and (value is None or (role == "label" and value % 1)):
            what = "no number" if value is None else "no whole number"
            return f"`{column}` has {what} in row {row + 1} ({few([str(cell)[:40]])})"
    if has_doubtful_commas(cells):
        return f"commas in numbers of `{column}` may be of decimals or of thousands"
    return ""


def check_columns(table: Table, kinds: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Refuses columns named by role that are not there, or do not fit."""
    for role, column in given.items():
        if role not in ROLES:
            text = f"`{role}={column}` names no role of a column; roles are {listed(ROLES)}"
            raise DataError(text, "write, for example, `text=review,label=stars`")
        check_column(table, kinds, column)
        if not _fits(role, kinds[column]):
            text = f"column `{column}` of `{table.label}` holds {kinds[column]}, which is no {role}"
            why = _unfit(table, kinds, role, column) if role in ("label", "score") else ""
            raise DataError(f"{text}; {why}" if why else text, "name another column")


def _roles(needs: Needs) -> dict[str, bool]:
    """Roles of use, and whether they are needed."""
    fewest, most = needs.texts
    roles = {"image": True} if needs.image else {}
    if needs.volume:
        roles |= {"volume": True, "shape": True}
    if needs.target is not None:
        roles["label" if needs.target == "class" else "score"] = not needs.unlabelled
    if most:
        roles["text"] = fewest > 0
    if most > 1:
        roles["pair"] = fewest > 1
    return roles


def _guess(table: Table, kinds: Mapping[str, str], role: str, taken: set[str]) -> str | None:
    free = {column: kind for column, kind in kinds.items() if column not in taken}
    by_name = {column.lower(): column for column, kind in free.items() if _fits(role, kind)}
    guesses = [by_name[name] for name in COLUMN_NAMES[role] if name in by_name]
    if not guesses and role in ("image", "text"):
        guesses = [column for column, kind in free.items() if kind == role]
        guesses = text_columns(table, guesses) if role == "text" else guesses
    return next(iter(guesses), None)


def _fits(role: str, kind: str) -> bool:
    number = "int" in kind
    return {
        "text": kind == "text",
        "pair": kind == "text",
        "image": kind in ("image", "bytes"),
        "volume": kind == "bytes",
        "shape": kind in _LISTS,
        "label": kind in ("classlabel", "text", "bool") or number,
        "score": number or "float" in kind,
    }[role]


def _pairs(table: Table, data: dict[str, list[Any]], chosen: Mapping[str, str]) -> dict[str, Any]:
    """Leaves out pairs of which a text is empty: there is nothing to compare."""
    columns = [data[chosen[role]] for role in ("text", "pair")]
    rows = [row for row, cells in enumerate(zip(*columns, strict=True)) if all(map(content, cells))]
    count, total = len(rows), len(columns[0])
    if not count:
        what = f"all {total:,} pairs of `{table.label}` have an empty text"
        raise DataError(what, "name other columns, or give other data")
    if count == total:
        return data
    tell(f"{table.label}: {total - count:,} of {total:,} pairs have an empty text: left out")
    return {name: [cells[row] for row in rows] for name, cells in data.items()}


def _read(
    table: Table,
    data: Mapping[str, list[Any]],
    chosen: Mapping[str, str],
    classes: Classes,
    split: str,
) -> Examples:
    texts = [
        [str(content(cell) or "") for cell in data[chosen[role]]]
        for role in ("text", "pair")
        if role in chosen
    ]
    images: list[bytes] = []
    for cell in data[chosen["image"]] if "image" in chosen else ():
        if not isinstance(picture := content(cell), bytes):
            raise _incomplete(table, chosen["image"], "a row without a picture", "remove that row")
        images.append(picture)
    volumes = None
    if "volume" in chosen:
        cells, shapes = data[chosen["volume"]], data[chosen["shape"]]
        volumes = volumes_of(cells, shapes, f"`{table.label}`")
        images = list(cells)  # for the fingerprint
    targets = _targets(table, data, chosen, classes)
    return Examples(
        name=f"{table.label}:{','.join(chosen.values())}",
        split=split,
        fingerprint=_fingerprint(chain(map(str.encode, chain(*texts)), images), targets),
        texts=tuple(texts),
        images=tuple(images) if volumes is None else (),
        targets=targets,
        classes=classes.names,
        volumes=volumes,
    )


def _targets(
    table: Table, data: Mapping[str, list[Any]], chosen: Mapping[str, str], classes: Classes
) -> list[int] | list[float] | None:
    if "label" in chosen:
        index = {name: index for index, name in enumerate(classes.names)}
        cells = data[chosen["label"]]
        return [
            index[cell] if isinstance(cell, str) else int(cell) - classes.start for cell in cells
        ]
    if "score" not in chosen:
        return None
    scores = [float("nan") if cell is None else float(cell) for cell in data[chosen["score"]]]
    if not np.isfinite(scores).all():
        what = "rows without a finite score"
        raise _incomplete(table, chosen["score"], what, "remove those rows")
    return scores


def _fingerprint(contents: Iterable[bytes], targets: Sequence[float] | None) -> str:
    digest = hash_of(contents)
    digest.update(repr(targets).encode())
    return digest.hexdigest()


def _incomplete(table: Table, column: str, what: str, instead: str) -> DataError:
    has = f"column `{column}` of `{table.label}` has {what}"
    return DataError(has, hint=f"{instead}, or name another column")


@dataclass(frozen=True)
class Classes:
    """Names of classes in the order of their ids, and the number that the first has in the data."""

    names: tuple[str, ...] = ()
    start: int = 0


def _classes(table: Table, column: str) -> Classes:
    """Classes of a column of labels."""
    names = getattr(table.rows.features[column], "names", None)
    labels = set(table.rows.unique(column))
    if None in labels or labels == {-1}:
        raise _incomplete(table, column, "rows without a label", "choose a labelled split")
    if names and min(labels) >= 0:
        return Classes(tuple(names))
    if any(isinstance(label, str) for label in labels):
        return Classes(tuple(sorted(labels)))
    if min(labels) < 0:
        raise DataError(
            f"column `{column}` of `{table.label}` has the label {min(labels)}; "
            "labels count from 0",
            hint="renumber the labels, or give their names",
        )
    count = int(max(labels))
    # Stars, and other labels that count from 1: a class that there is not is not to be learnt.
    start = 1 if labels == {*range(1, count + 1)} and count > 1 else 0
    return Classes(tuple(str(label) for label in range(start, count + 1)), start)
