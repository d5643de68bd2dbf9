"""Opening data sets: files, folders and hub ids; which columns hold texts and pictures."""

from __future__ import annotations

import errno
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tcompress.data.chats import as_plain_text, is_chat, joined_chats
from tcompress.data.folders import IMAGES
from tcompress.data.plain_files import ending
from tcompress.data.readers import BUILDERS, read_local, without_rows
from tcompress.data.synthetic import COPY, copy_rows
from tcompress.errors import DataError, after_colon, counted, first_line, listed
from tcompress.models.names import cached_where_unreachable, expanded, is_path, missing_path
from tcompress.progress import tell


@dataclass(frozen=True)
class Table:
    """An opened data set, and its short name: the file's or folder's name, or the hub id."""

    rows: Any  # a `datasets.Dataset`
    label: str
    is_plain: bool = False  # whether it is a list of texts or pictures: a column needs no name


@contextmanager
def opened(name: str, split: str) -> Iterator[Table]:
    """Open a data set (file, folder, hub id or `id:config`) for the time of a `with` block.

    Nothing of a local data set stays behind. One from the hub goes through the usual cache, so
    that it can be read again without network. Pictures stay the bytes of their files.
    """
    import datasets

    if name == COPY:
        yield Table(copy_rows(split), COPY)
        return
    check_data([name])
    path = expanded(name)
    local, is_plain = path.exists(), False
    with ExitStack() as stack:
        cache = ""
        stack.enter_context(_quiet() if local else cached_where_unreachable())
        try:
            folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            cache = stack.enter_context(folder)
            if local:
                rows, is_plain = read_local(path, split, Path(cache))
            else:
                repo, _, config = name.partition(":")
                rows = datasets.load_dataset(repo, config or None, split=split)
        except DataError:
            raise
        except Exception as error:
            # Builders, readers of file formats and the hub client each raise their own classes.
            shown = str(path) if local else name
            raise _full(shown, cache, error) or _explanation(shown, error) from error
        if not len(rows):
            raise without_rows(name)
        for column, feature in rows.features.items():
            if isinstance(feature, datasets.Image):
                rows = rows.cast_column(column, datasets.Image(decode=False))
        rows = _flat(joined_chats(rows))
        yield Table(rows, path.resolve().name if local else name, is_plain)


def _flat(rows: Any) -> Any:
    """Make columns of the parts of objects, such as `translation.en`; not of chats and pictures."""
    objects = [name for name, feature in rows.features.items() if isinstance(feature, dict)]
    separate = [name for name in objects if "bytes" in rows.features[name]]
    separate += [name for name in objects if any(map(is_chat, rows[:1][name]))]
    pictures = any(not isinstance(f, dict) and hasattr(f, "decode") for f in rows.features.values())
    return rows if not objects or separate or pictures else rows.flatten()


def check_data(names: Iterable[str]) -> None:
    """Refuse names of files and folders that are not there, all at once; the hub is not asked."""
    problems = [problem for name in dict.fromkeys(names) if (problem := _problem(name)) is not None]
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = after_colon([problem.message for problem in problems])
        text = f"{len(problems)} names of data lead nowhere:{lines}"
        raise DataError(text, hint="check the paths")


def _problem(name: str) -> DataError | None:
    """Why a name cannot be one of data, if that shows without opening it."""
    if not name.strip():  # as a path it would mean the current folder
        return DataError(
            "the name of the data is empty", hint="give `builtin`, a file, a folder or a hub id"
        )
    path = Path(name)
    meant = (
        is_path(name)
        or ending(path) in {*BUILDERS, *IMAGES}
        or (path.parent != Path() and path.parent.is_dir())
    )
    if not meant or expanded(name).exists():
        return None
    return DataError(*missing_path(name, "file or folder"))


def _full(name: str, cache: str, error: BaseException) -> DataError | None:
    """Says that the folder that data is copied to is full, if that is why it cannot be read."""
    cause: BaseException | None = error
    while cause is not None:
        if not cache and isinstance(cause, OSError):
            reason = first_line(cause)
            hint = "set `TMPDIR` to a folder that can be written to"
            return DataError(f"`{name}` cannot be copied to a temporary folder ({reason})", hint)
        is_full, text = getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT), str(cause)
        if is_full or "No space left on device" in text or "Not enough disk space" in text:
            folder = Path(cache).parent
            what = f"`{name}` is copied to `{folder}` while it is read, and that folder is full"
            return DataError(what, "free space there, or set `TMPDIR` to a folder with more")
        cause = cause.__cause__ or cause.__context__
    return None


def _explanation(label: str, error: Exception) -> DataError:
    from datasets.exceptions import DatasetNotFoundError

    cause = error.__cause__ or error  # the library wraps what went wrong
    text = first_line(cause)
    if "corresponds to no data" in text or type(cause).__name__ == "SchemaInferenceError":
        return without_rows(label)
    if "Unknown split" in text or isinstance(error, KeyError):
        return DataError(f"`{label}` has no such split ({text})", hint="name one of its splits")
    if "Config name is missing" in text:
        return DataError(
            f"`{label}` has several configurations ({' '.join(str(error).split())})",
            hint="give one of its files or folders"
            if Path(label).exists()
            else f"write the one you mean after a colon: `{label}:CONFIGURATION`",
        )
    if isinstance(error, DatasetNotFoundError | ConnectionError):
        return DataError(
            f"there is no file or folder `{label}`, and the hub gives no such data set ({text})",
            hint="check the name; without network give a local file",
        )
    hint = "check the file; it must be complete, with text in UTF-8"
    return DataError(f"`{label}` cannot be read as data ({type(cause).__name__}: {text})", hint)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library from bars, from errors that are reported anyway, and from counting uses."""
    import datasets

    level, counts = datasets.logging.get_verbosity(), datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    bars = datasets.utils.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # nobody has to hear of one's own files
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


Kind = Literal["text", "image"]

_MAGIC = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
_PROBED_ROWS = 200
_PROBED_CHATS = 20
_BLOCK = 128  # cells that are read at a time; of pictures more would take memory


def columns_of(
    table: Table, named: Sequence[str], useful_kinds: set[Kind], needed: set[Kind], model: str
) -> dict[Kind, tuple[str, ...]]:
    """Choose the columns to draw from, by kind: the ones `named`, else guesses.

    Columns of `useful_kinds` are of use, one of a kind `needed` must be there; `model` is the
    name of its class, for errors.
    """
    kinds = kinds_of(table)
    alike = {"bytes": "image", "chat": "text"}
    uses = {name: alike.get(kind, kind) for name, kind in kinds.items()}
    for name in named:
        check_column(table, kinds, name)
        if uses[name] not in useful_kinds:
            raise DataError(
                f"column `{name}` of `{table.label}` holds {kinds[name]}, "
                f"but `{model}` takes {_words(useful_kinds)}",
                hint=f"name other columns; there are {listed(kinds)}",
            )
    usable = [*named]
    if not named:
        sampler = _sampler(table)
        useful = {kind: [name for name in uses if uses[name] == kind] for kind in useful_kinds}
        usable = [name for name in useful.get("image", ()) if _looks_like_images(sampler[name])]
        chats = [name for name in useful.get("text", ()) if kinds[name] == "chat"]
        usable += chats[:1] or text_columns(table, useful.get("text", []))
    chosen: dict[Kind, tuple[str, ...]] = {
        kind: tuple(name for name in usable if uses[name] == kind) for kind in sorted(useful_kinds)
    }
    if not any(map(chosen.get, needed)):
        columns = ", ".join(f"`{name}` ({kind})" for name, kind in kinds.items())
        raise DataError(
            f"`{model}` takes {_words(needed)}, but no column of `{table.label}` looks like that; "
            f"it has {columns}",
            hint="name the columns to read, or give other data",
        )
    return chosen


def kinds_of(table: Table) -> dict[str, str]:
    """Columns and what they hold: `text`, `chat`, `image`, `bytes`, `classlabel`, or a type."""
    import datasets

    def kind(feature: Any) -> str:
        dtype = getattr(feature, "dtype", None)
        fields = feature if isinstance(feature, dict) else {}
        if isinstance(feature, datasets.Image) or "bytes" in fields:
            return "image"
        if dtype in ("binary", "large_binary", "binary_view"):  # of a picture's file, perhaps
            return "bytes"
        if isinstance(feature, datasets.Value):
            return "text" if dtype in ("string", "large_string", "string_view") else str(dtype)
        return type(feature).__name__.lower()

    kinds = {name: kind(feature) for name, feature in table.rows.features.items()}
    maybe = [name for name, kind in kinds.items() if kind in ("text", "list", "dict", "json")]
    if maybe:
        first = table.rows.select_columns(maybe)[:_PROBED_CHATS]
        filled = {name: [*filter(None, first[name])] for name in maybe}
        chats = [name for name, cells in filled.items() if cells and all(map(is_chat, cells))]
        kinds |= dict.fromkeys(chats, "chat")
    return kinds


def text_columns(table: Table, names: Sequence[str]) -> list[str]:
    """Those of some string columns that read like text; the only one, whatever it holds."""
    if len(names) == 1:
        return list(names)
    sampler = _sampler(table)
    return [name for name in names if _reads_like_text(sampler[name])]


def draw_cells(
    table: Table,
    columns: Sequence[str],
    count: int,
    seed: int,
    write: Callable[[Any], Any] = as_plain_text,
) -> Iterator[str | bytes]:
    """Yield up to `count` distinct samples that are not empty, in seeded random order.

    `write` makes text of chats.
    """
    order = np.random.default_rng(seed).permutation(len(table.rows) * len(columns))
    cells = _cells(table, columns, order)
    return _distinct((content(write(cell), row + 1) for cell, row in cells), count)


def _cells(table: Table, columns: Sequence[str], order: Any) -> Iterator[tuple[Any, int]]:
    """Yield cells with their rows, in an order of all of them; read many at a time."""
    parts = [table.rows.select_columns([name]) for name in columns]
    for first in range(0, len(order), _BLOCK):
        rows, ats = np.divmod(order[first : first + _BLOCK], len(columns))
        read = [
            iter(part[rows[ats == at]][name])
            for at, (part, name) in enumerate(zip(parts, columns, strict=True))
        ]
        for row, at in zip(rows.tolist(), ats.tolist(), strict=True):
            yield next(read[at]), row


def draw_texts(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """Draw up to `count` distinct texts that are not empty, in seeded random order."""
    order = np.random.default_rng(seed).permutation(len(texts))
    return [str(text) for text in _distinct((content(texts[index]) for index in order), count)]


def _distinct(items: Iterator[str | bytes | None], count: int) -> Iterator[str | bytes]:
    hashes: set[bytes] = set()
    for item in (item for item in items if item):
        same = item.strip().encode() if isinstance(item, str) else item
        key = hashlib.sha256(same).digest()
        if key not in hashes:
            hashes.add(key)
            yield item
        if len(hashes) == count:
            return


def hash_of(contents: Iterable[bytes], digest: Any = None) -> Any:
    """Hash contents (SHA-256), one after another, each with its length; may go on with a hash."""
    digest = digest or hashlib.sha256()
    for item in contents:
        digest.update(f"{len(item)} ".encode() + item)
    return digest


class Picture(bytes):
    """Content of a picture's file, which knows what the file is called, or which row has it."""

    file: str = ""

    @classmethod
    def of(cls, content: bytes, file: str) -> Picture:
        picture = cls(content)
        picture.file = file
        return picture


def content(cell: Any, row: int | None = None) -> str | bytes | None:
    """Give a cell's text or the bytes of its picture; None if it is empty.

    A picture whose file has no name is known by its `row`, from 1.
    """
    if isinstance(cell, dict):
        path, cell = cell.get("path"), cell.get("bytes")
        if cell is None and path:
            try:
                cell = Path(path).read_bytes()
            except OSError as error:
                text = f"the picture `{path}` cannot be read ({error.strerror})"
                raise DataError(text, "check that the file is where the data set says") from error
        if path and not cell:
            raise DataError(f"the picture `{path}` is empty", "remove it")
        if cell and path:
            return Picture.of(cell, f"`{path}`")
    if isinstance(cell, str):
        return cell if cell.strip() else None  # blanks within a text belong to it
    if isinstance(cell, bytes) and cell and row is not None:
        return Picture.of(cell, f"row {row}")
    return cell or None


def all_empty(table: Table, columns: str) -> DataError:
    """Say that nothing is in the columns of a table."""
    rows = f"all {len(table.rows)} rows of `{table.label}` are"
    rows = rows if len(table.rows) > 1 else f"the only row of `{table.label}` is"
    hint = "name other columns in `calibration.columns`, or give other data"
    return DataError(f"{rows} empty in the columns {columns}", hint)


def check_column(table: Table, kinds: Mapping[str, str], name: str) -> None:
    """Refuse a column that is not there."""
    if name not in kinds:
        close = get_close_matches(name, kinds, n=3)
        raise DataError(
            f"`{table.label}` has no column `{name}`; it has {listed(kinds)}",
            hint=f"did you mean {listed(close)}" if close else "check the names of the columns",
        )


def _words(kinds: set[Kind]) -> str:
    return " and ".join(sorted(kinds, reverse=True)).replace("image", "images")


def _sampler(table: Table) -> dict[str, list[Any]]:
    step = max(1, len(table.rows) // _PROBED_ROWS)
    return table.rows.select(range(0, len(table.rows), step)[:_PROBED_ROWS]).to_dict()


def _looks_like_images(cells: list[Any]) -> bool:
    for cell in cells:
        if isinstance(cell, dict) and cell.get("path") and not cell.get("bytes"):
            return True
        if data := content(cell):
            return isinstance(data, bytes) and data.startswith(_MAGIC)
    return False


def _reads_like_text(cells: list[Any]) -> bool:
    """Tell sentences from labels, names, dates, hashes and numbers."""
    texts = [text for cell in cells if isinstance(text := content(cell), str)]
    if not texts:
        return False
    several_words = sum(any(map(str.isspace, text)) or not text.isascii() for text in texts)
    letters = sum(sum(map(str.isalpha, text)) for text in texts)
    length = sum(map(len, texts))
    return (
        length >= 8 * len(texts)
        and 2 * several_words >= len(texts)
        and 2 * letters >= length
        and 4 * len(set(texts)) > len(texts)
    )


def with_derived(table: Table, named: Iterable[str]) -> Table:
    """Add the columns that a user names and that have to be made of others.

    `question+passage` is the text of both with a space between; a list of texts counts as its
    first one. What cannot be made is then reported as any missing column.
    """
    rows = table.rows
    for name in dict.fromkeys(named):
        parts = name.split("+")
        if any(part not in rows.column_names for part in parts) or name == "":
            continue
        if len(parts) > 1 and name not in rows.column_names:
            columns = [[_text(cell) for cell in rows[part]] for part in parts]
            texts = [" ".join(filter(None, cells)) for cells in zip(*columns, strict=True)]
            rows = rows.add_column(name, texts)
        elif _holds_lists(rows, name):
            texts = [_text(cell) for cell in rows[name]]
            rows = rows.remove_columns([name]).add_column(name, texts)
    return replace(table, rows=rows)


def with_listed_texts(table: Table) -> Table:
    """Make rows of the texts in lists, where no column holds texts; of lists of words one text."""
    kinds, rows = kinds_of(table), table.rows
    names = [name for name in rows.column_names if _holds_lists(rows, name)]
    if not names or {*kinds.values()} & {"text", "chat"}:
        return table
    texts: list[str] = []
    for name in names:
        cells = [[text for text in cell if text is not None] for cell in rows[name] if cell]
        words = all(len(item.split()) <= 1 for cell in cells[:_PROBED_ROWS] for item in cell)
        texts += [" ".join(cell) for cell in cells] if words else [*chain.from_iterable(cells)]
    name = "+".join(names)
    tell(f"{table.label}: {counted(len(texts), 'text')} in the lists of {listed(names)}")
    return replace(table, rows=type(rows).from_dict({name: texts}))


def with_pairs(table: Table) -> Table:
    """Add the two texts of each cell as columns, where one column has lists of two."""
    rows = table.rows
    for name in [name for name in rows.column_names if _holds_lists(rows, name)]:
        cells = rows[name][:]
        if all(cell is not None and len(cell) == 2 for cell in cells):
            for index in range(2):
                column = f"sentence{index + 1}"
                column = column if column not in rows.column_names else f"{name}.{column}"
                rows = rows.add_column(column, [cell[index] for cell in cells])
            return replace(table, rows=rows)
    return table


def _holds_lists(rows: Any, name: str) -> bool:
    cells = [cell for cell in rows[:50][name] if cell is not None]
    return bool(cells) and all(
        isinstance(cell, list) and all(isinstance(item, str | None) for item in cell)
        for cell in cells
    )


def _text(cell: Any) -> str:
    first = next(iter(cell), None) if isinstance(cell, list) else cell
    return str(content(first) or "").strip()
