"""Labelled and unlabelled examples out of a data set, for training and measuring."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tcompress.data.chats import as_plain_text
from tcompress.data.column_names import COLUMN_NAMES, ROLES, plain_name
from tcompress.data.folders import names_picture, with_cells
from tcompress.data.grids import ARCHIVE, Volumes, Windows, read_archive, volumes_of, windows_of
from tcompress.data.label_columns import LISTS, Labels, columns_of_marks, read_labels
from tcompress.data.labels import Classes, Targets, few
from tcompress.data.numbers import decimals, has_doubtful_commas, is_missing, number, whole_numbers
from tcompress.data.tables import (
    Table,
    check_column,
    content,
    hash_of,
    kinds_of,
    opened,
    text_columns,
    with_derived,
    with_pairs,
)
from tcompress.errors import DataError, listed
from tcompress.progress import tell

Target = Literal["class", "score"]
_MOST_COLUMNS = 12  # that a message names
_TEXTS = ("text", "pair", "semantics", "source", "target")


@dataclass(frozen=True)
class Needs:
    """Kinds of data that a task reads."""

    texts: tuple[int, int] = (0, 0)  # fewest and most texts in an example
    image: bool = False  # whether an example has a picture
    target: Target | None = None  # `class`, `score`, or None if nothing is to be predicted
    volume: bool = False  # whether an example has a volume
    unlabelled: bool = False  # whether data without targets will do
    several: bool = False  # whether an example may have several classes
    chats: bool = False  # whether a text may be a chat, which each model writes by its template
    generates: bool = False  # whether the second text is made of the first: `source`, `target`
    instead: str = "give other data"  # what else may be done where targets are missing
    # Time steps of a series that are seen, and those that are forecast; None without.
    window: tuple[int, int] | None = None


@dataclass(frozen=True)
class Examples:
    """Examples of a task."""

    name: str  # name of the data, such as `train.parquet:sentence,label`
    split: str  # split that was read
    fingerprint: str  # SHA-256 of all contents
    # One to three texts for each example, in columns; empty for pictures alone.
    texts: tuple[list[str], ...] = ()
    images: tuple[bytes, ...] = ()  # contents of picture files
    chats: tuple[Any, ...] = ()  # cells of the texts, where these are chats
    # Class ids, or scores; None if nothing is to be predicted.
    targets: Targets | None = None
    labels: Classes = field(default_factory=Classes)  # what the ids mean
    volumes: Volumes | None = None  # (examples, *shape)
    windows: Windows | None = None  # windows of a series
    whole: bool = True  # whether the file holds one split only, so that the name of it says nothing

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their ids; none for scores."""
        return self.labels.names

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of an input on a grid, as `inputs.grid_shape` has a model's; None without one."""
        if self.windows is not None:
            return self.windows.context, len(self.windows.variables)
        return None if self.volumes is None else (1, *self.volumes.shape[1:])

    def __len__(self) -> int:
        grids = [grid for grid in (self.volumes, self.windows) if grid is not None]
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
    """Read examples of a task out of a file, folder or hub id, as `data.tables.opened` takes it.

    `columns` are named by role (`ROLES`) where they are not guessed; several texts are joined by
    `+`. At most `limit` examples are drawn by the seed, and kept in the order of the data.
    """
    if needs.volume and Path(name).suffix.lower() == ARCHIVE and Path(name).is_file():
        return _from_archive(Path(name), split, needs, limit, seed)
    with opened(name, split) as table:
        if needs.window is not None:
            windows = windows_of(table, split, needs.window)
            windows = windows.chosen(_sampled(len(windows), limit, seed).tolist())
            return Examples(table.label, split, windows.fingerprint, windows=windows, whole=False)
        named = dict(columns or {})
        combined = named.pop("label", "") if _is_joined(table, named.get("label", "")) else ""
        table = with_derived(table, named.values())
        lacks_pair = needs.texts[0] == 2 and [*kinds_of(table).values()].count("text") < 2
        if lacks_pair and not needs.generates:
            table = with_pairs(table)
        table = with_numbers(table, needs.target, named)
        chosen = _chosen(table, needs, named, combined)
        labels = None
        if "label" in chosen:
            labels = read_labels(table, chosen["label"], several=needs.several)
        if needs.unlabelled and _is_withheld(table, chosen, labels):  # as test splits often are
            chosen = {role: name for role, name in chosen.items() if role not in ("label", "score")}
            labels = None
        rows = table.rows.select_columns([name for name in chosen.values() if name != combined])
        places = np.arange(len(rows)) if labels is None else _labelled(table, chosen, labels)
        if limit is not None and limit < len(places):
            tell(f"{table.label}: {limit:,} of {len(places):,} rows are drawn")
            places = places[_sampled(len(places), limit, seed)]
        if len(places) < len(rows):
            rows = rows.select(places)
        data = rows.to_dict()
        if labels is not None:
            data[chosen["label"]] = [labels.ids[row] for row in places.tolist()]
        if needs.texts[0] == 2:
            data = _pairs(table, data, chosen)
        # Classes are those of the whole data, whichever of it is drawn.
        classes = Classes() if labels is None else labels.classes
        return _read(table, data, chosen, places.tolist(), classes, split)


def _is_joined(table: Table, name: str) -> bool:
    """Tell whether a name stands for several columns, joined by `+`."""
    parts, columns = name.split("+"), table.rows.column_names
    return len(parts) > 1 and name not in columns and all(part in columns for part in parts)


def _is_withheld(table: Table, chosen: Mapping[str, str], labels: Labels | None) -> bool:
    """Tell whether a column of labels or scores holds none."""
    if labels is not None:
        return not len(labels.classes)
    return "score" in chosen and {*table.rows.unique(chosen["score"])} <= {None, -1}


def _labelled(table: Table, chosen: Mapping[str, str], labels: Labels) -> NDArray[np.int64]:
    """Rows with a label; those without are left out only where the data says so itself."""
    missing = [row for row, value in enumerate(labels.ids) if value is None]
    if not missing:
        return np.arange(len(labels.ids))
    text = "rows without a label"
    if not len(labels.classes):
        raise _incomplete(table, chosen["label"], text, "choose a labelled split")
    if not labels.partial:
        text += f": {len(missing):,} of {len(labels.ids):,}, row {missing[0] + 1} first"
        raise _incomplete(table, chosen["label"], text, "remove those rows")
    return np.setdiff1d(np.arange(len(labels.ids)), missing)


def with_numbers(table: Table, target: Target | None, columns: Mapping[str, str]) -> Table:
    """Read columns of labels and scores as the numbers that they are, whatever their type."""
    if target is None:
        return table
    role = "label" if target == "class" else "score"
    usable = ("int", "classlabel", "bool") if target == "class" else ("int", "float")
    named, rows = columns.get(role), table.rows
    for name, kind in kinds_of(table).items():
        fits = name == named if named else plain_name(name) in COLUMN_NAMES[role]
        if not fits or any(word in kind for word in usable):
            continue
        cells = rows[name]
        numbers = whole_numbers(cells) if target == "class" else decimals(cells)
        if numbers is not None:
            rows = with_cells(rows, name, numbers)
    return replace(table, rows=rows)


def places_of(texts: Sequence[str], among: Sequence[str]) -> NDArray[np.int64]:
    """Find texts in a list in which each stands once."""
    index = {text: position for position, text in enumerate(among)}
    return np.array([index[text] for text in texts])


def others(right: NDArray[np.int64], count: int, total: int, seed: int) -> NDArray[np.int64]:
    """Draw, for each right place of so many, different wrong ones.  # (right, count)."""
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
        labels=Classes(classes, tuple(range(len(classes)))) if needs.target else Classes(),
        volumes=volumes,
        whole=False,
    )


def _chosen(table: Table, needs: Needs, named: dict[str, str], combined: str) -> dict[str, str]:
    """Choose a column for each role; `combined` are several of labels."""
    kinds = kinds_of(table)
    roles = _roles(needs)
    check_columns(table, kinds, named, needs)
    chosen = {role: column for role, column in named.items() if role in roles}
    if combined and not needs.several:
        text = f"`{combined}` are several columns of labels, of which this task reads one"
        raise DataError(text, "name one column")
    if combined:
        chosen["label"] = combined
    unavailable = {*named.values(), *combined.split("+")}
    for role in (role for role in roles if role not in chosen):
        occupied = unavailable | {*chosen.values()}
        if (guess := _guess(table, kinds, role, occupied, needs)) is not None:
            chosen[role] = guess
    missing = [role for role, needed in roles.items() if needed and role not in chosen]
    if missing:
        raise _without(missing, table, kinds, {*named.values(), *chosen.values()}, needs)
    return {role: chosen[role] for role in ROLES if role in chosen}


def _without(
    missing: Sequence[str], table: Table, kinds: Mapping[str, str], occupied: set[str], needs: Needs
) -> DataError:
    """Say which columns are missing, why those of such a name do not do, and which others may."""
    has = ", ".join(f"`{column}` ({kind})" for column, kind in [*kinds.items()][:_MOST_COLUMNS])
    has += f" and {len(kinds) - _MOST_COLUMNS} more" if len(kinds) > _MOST_COLUMNS else ""
    text = f"the task needs a column for {listed(missing)}, but `{table.label}` has {has}"
    offers: dict[str, str] = {}
    mend = ""
    for role in missing:
        named = [column for column in kinds if plain_name(column) in COLUMN_NAMES[role]]
        named += [column for column in kinds if role == "text" and kinds[column] == "chat"]
        reasons = [why for column in named if (why := _unfit(table, kinds, role, column, needs))]
        text += "".join(f"; {why}" for why in reasons)
        mend = "mend it, or " if reasons else mend
        free = [column for column in kinds if column not in {*occupied, *offers.values()}]
        fits = [column for column in free if _unfit(table, kinds, role, column, needs) == ""]
        fits = _likely(table, kinds, fits) if role == "label" else fits
        marks = columns_of_marks({name: kinds[name] for name in fits}, table)
        if role == "label" and needs.several and len(marks) > 1:  # one for each class
            fits = ["+".join(marks)]
        offers |= {role: fits[0]} if fits else {}
    if missing == ["label"] and [*kinds.values()] == ["image"]:
        text += "; the names of folders are classes where there are several, all at one depth"
    advice = needs.instead if missing in (["label"], ["score"]) else "give other data"
    if len(offers) < len(missing):
        advice = "" if advice == "give other data" else f", or {advice}"
        return DataError(text, f"{mend}give data with such a column{advice}")
    names = ",".join(f"{role}={column}" for role, column in offers.items())
    how = f"name it: `--columns {names}` (where there is no such option, rename it in the data)"
    return DataError(text, f"{how}, or {advice}")


def _unfit(table: Table, kinds: Mapping[str, str], role: str, column: str, needs: Needs) -> str:
    """Say why a column cannot have a role; nothing if it can."""
    kind = kinds[column]
    if role == "label" and kind in LISTS:
        if not needs.several:
            return f"`{column}` holds lists, and an example of this task can have one label only"
        if _lists_labels(table, column):
            return ""
        return f"`{column}` holds lists of other things than names or numbers"
    if role == "text" and kind == "chat":
        if needs.chats:
            return ""
        return f"`{column}` holds chats, which this task does not read; write them as text"
    if role != "score" and not (role == "label" and "float" in kind):
        if role == "image" and kind == "text":
            return f"`{column}` names {_named_pictures(table, column)}"
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


def _named_pictures(table: Table, column: str) -> str:
    """Say what a column of text holds that should hold pictures."""
    first = next((cell for cell in table.rows[:50][column] if cell), "")
    if re.match(r"https?://", first):
        return f"addresses such as `{first[:60]}`, from which nothing is fetched"
    if names_picture(first):
        return f"files such as `{first[:60]}`, which are not beside `{table.label}`"
    return "no pictures"


def _likely(table: Table, kinds: Mapping[str, str], columns: Sequence[str]) -> list[str]:
    """Put columns with few different values first, and leave those out that number the rows."""
    lists = {name: {*map(str, table.rows[name][:])} for name in columns if kinds[name] in LISTS}
    counts = {name: len(lists.get(name) or table.rows.unique(name)) for name in columns}
    total = len(table.rows)
    several = [name for name in columns if counts[name] < total or total < 3]
    return sorted(several, key=counts.__getitem__)


def _lists_labels(table: Table, column: str) -> bool:
    """Tell whether a column holds lists of names, of numbers or of yes and no."""
    inner = getattr(table.rows.features[column], "feature", None)
    kind = str(getattr(inner, "dtype", ""))
    return "string" in kind or "int" in kind or "float" in kind or kind == "bool"


def check_columns(
    table: Table, kinds: Mapping[str, str], named: Mapping[str, str], needs: Needs
) -> None:
    """Refuse columns named by role that are not there, or do not fit."""
    for role, column in named.items():
        if role not in ROLES:
            text = f"`{role}={column}` names no role of a column; roles are {listed(ROLES)}"
            raise DataError(text, "write, for example, `text=review,label=stars`")
        check_column(table, kinds, column)
        why = _unfit(table, kinds, role, column, needs)
        if why and not _fits(role, kinds[column]):
            text = f"column `{column}` of `{table.label}` holds {kinds[column]}, which is no {role}"
            raise DataError(f"{text}; {why}", "name another column")


def _roles(needs: Needs) -> dict[str, bool]:
    """Roles of use, and whether they are needed."""
    fewest, limit = needs.texts
    roles = {"image": True} if needs.image else {}
    if needs.volume:
        roles |= {"volume": True, "shape": True}
    if needs.target is not None:
        roles["label" if needs.target == "class" else "score"] = not needs.unlabelled
    pair = ("source", "target") if needs.generates else ("text", "pair")
    texts = (*pair, "semantics")[:limit]
    return roles | {role: index < fewest for index, role in enumerate(texts)}


def _guess(
    table: Table, kinds: Mapping[str, str], role: str, unavailable: set[str], needs: Needs
) -> str | None:
    free = {column: kind for column, kind in kinds.items() if column not in unavailable}
    by_name = {
        plain_name(column): column
        for column, kind in reversed([*free.items()])  # of equal names the first one counts
        if _fits(role, kind)
        or (role == "label" and kind in LISTS and not _unfit(table, kinds, role, column, needs))
    }
    guesses = [by_name[name] for name in COLUMN_NAMES[role] if name in by_name]
    if role == "text" and needs.chats:
        guesses = [column for column, kind in free.items() if kind == "chat"] or guesses
    if not guesses and role in ("image", "text"):
        guesses = [column for column, kind in free.items() if kind == role]
        if role == "text":  # a single one beside chats is their id
            guesses = [] if "chat" in free.values() else text_columns(table, guesses)
    return next(iter(guesses), None)


def _fits(role: str, kind: str) -> bool:
    is_number = "int" in kind
    return {
        **dict.fromkeys(_TEXTS, kind == "text"),
        "image": kind in ("image", "bytes"),
        "volume": kind == "bytes",
        "shape": kind in LISTS,
        "label": kind in ("classlabel", "text", "bool") or is_number,
        "score": is_number or "float" in kind or kind == "bool",
    }[role]


def _pairs(table: Table, data: dict[str, list[Any]], chosen: Mapping[str, str]) -> dict[str, Any]:
    """Leaves out pairs of which a text is empty: there is nothing to compare."""
    columns = [data[chosen[role]] for role in _TEXTS if role in chosen]
    rows = [row for row, cells in enumerate(zip(*columns, strict=True)) if all(map(content, cells))]
    count, total = len(rows), len(columns[0])
    if not count:
        each = f"all {total:,} pairs of `{table.label}` have"
        each = each if total > 1 else f"the only pair of `{table.label}` has"
        raise DataError(f"{each} an empty text", "name other columns, or give other data")
    if count == total:
        return data
    have = "has" if total - count == 1 else "have"
    tell(f"{table.label}: {total - count:,} of {total:,} pairs {have} an empty text: left out")
    return {name: [cells[row] for row in rows] for name, cells in data.items()}


def _read(
    table: Table,
    data: Mapping[str, list[Any]],
    chosen: Mapping[str, str],
    rows: Sequence[int],
    classes: Classes,
    split: str,
) -> Examples:
    """Reads cells of so numbered rows."""
    texts = [
        [str(content(as_plain_text(cell)) or "") for cell in data[chosen[role]]]
        for role in _TEXTS
        if role in chosen
    ]
    is_chat = kinds_of(table).get(chosen.get("text", "")) == "chat"
    images: list[bytes] = []
    for row, cell in zip(rows, data[chosen["image"]] if "image" in chosen else (), strict=False):
        if not isinstance(picture := content(cell, row + 1), bytes):
            what = f"no picture in row {row + 1}"
            raise _incomplete(table, chosen["image"], what, "remove that row")
        images.append(picture)
    volumes = None
    if "volume" in chosen:
        cells, shapes = data[chosen["volume"]], data[chosen["shape"]]
        volumes = volumes_of(cells, shapes, rows, f"`{table.label}`")
        images = list(cells)  # for the fingerprint
    targets = data[chosen["label"]] if "label" in chosen else _scores(table, data, chosen)
    return Examples(
        name=f"{table.label}:{','.join(chosen.values())}",
        split=split,
        fingerprint=_fingerprint(chain(map(str.encode, chain(*texts)), images), targets),
        texts=tuple(texts),
        images=tuple(images) if volumes is None else (),
        chats=tuple(data[chosen["text"]]) if is_chat else (),
        targets=targets,
        labels=classes,
        volumes=volumes,
    )


def _scores(
    table: Table, data: Mapping[str, list[Any]], chosen: Mapping[str, str]
) -> list[float] | None:
    if "score" not in chosen:
        return None
    scores = [float("nan") if cell is None else float(cell) for cell in data[chosen["score"]]]
    if not np.isfinite(scores).all():
        what = "rows without a finite score"
        raise _incomplete(table, chosen["score"], what, "remove those rows")
    return scores


def _fingerprint(contents: Iterable[bytes], targets: Sequence[Any] | None) -> str:
    digest = hash_of(contents)
    digest.update(repr(targets).encode())
    return digest.hexdigest()


def _incomplete(table: Table, column: str, what: str, instead: str) -> DataError:
    has = f"column `{column}` of `{table.label}` has {what}"
    return DataError(has, hint=f"{instead}, or name another column")
