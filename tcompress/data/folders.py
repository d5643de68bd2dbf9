"""Folders of data: which files belong to a split, and pictures with classes or a table beside."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tcompress.data.plain_files import ending, in_utf8, unpacked
from tcompress.errors import DataError, counted, listed
from tcompress.progress import tell

IMAGES = {
    ".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png",
    ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp",
}  # fmt: skip
METADATA = {"metadata.csv", "metadata.jsonl", "metadata.parquet"}
_IGNORED = {
    "README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json",
}  # fmt: skip
# Words in names of folders and files, as the library `datasets` has them.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_CALLED = {
    split: re.compile(rf"(^|[-._ 0-9])({'|'.join(words)})($|[-._ 0-9])", re.IGNORECASE)
    for split, words in _WORDS.items()
}
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}.*\..*")
_MOST_PROBED = 50
# JPEG, PNG, GIF, WebP and BMP in base 64, of which each begins with the same letters.
_WRITTEN = re.compile(
    r"(data:image/[\w.+-]+;base64,)?(/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk[0-9A-Za-z])"
)


def files_by_split(folder: Path, *, of_classes: bool = False) -> dict[str, list[Path]]:
    """Find the data files of all splits by their names, or by those of their folders.

    The rules are those of `datasets`, but case does not count, and the outermost folder decides:
    shards in `data/`, folders that are called like a split, files that are, else all is `train`.
    Folders may be those `of_classes`, of which one is called like a split (`valid`, beside
    `invalid`; `train`, beside `bus`).
    """
    files = {path.relative_to(folder).as_posix(): path for path in _walked(folder)}
    shards: dict[str, list[Path]] = {}
    for name, path in files.items():
        if (match := _SHARD.fullmatch(name)) is not None:
            shards.setdefault(match[1], []).append(path)
    if shards:
        return shards
    for of_folder in (True, False):
        called = {}
        for name, path in files.items():
            *parts, last = name.split("/")
            called[path] = next(filter(None, map(_splits_of, parts if of_folder else [last])), [])
        splits = {
            split: paths
            for split in _WORDS
            if (paths := [path for path, of_path in called.items() if split in of_path])
        }
        others = [path for path, of_path in called.items() if not of_path]
        if splits and not (of_classes and others and _is_class(splits, others)):
            return splits
    return {"train": [*files.values()]} if files else {}


def _splits_of(name: str) -> list[str]:
    """Give the splits that a folder or file is called like."""
    return [split for split, word in _CALLED.items() if word.search(name)]


def _is_class(splits: Mapping[str, Sequence[Path]], others: Sequence[Path]) -> bool:
    """Tell whether what is called like a split is a class: `others` are of no split.

    With `train` alone they may be left over, unless they lie in folders beside its own.
    """
    if [*splits] != ["train"]:
        return "train" not in splits
    folders = {path.parent for path in splits["train"]}
    around = {folder.parent for folder in folders}
    beside = {path.parent for path in others if ending(path) in (".txt", *IMAGES)} - folders
    return any(folder.parent in around for folder in beside)


def _walked(folder: Path) -> Iterator[Path]:
    """Find all files in order, also in folders that are links; hidden ones are no data."""
    visited = set[str]()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in visited:  # a link back
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        for name in sorted(names):
            if not name.startswith(".") and name not in _IGNORED:
                yield Path(parent, name)


def files_of(folder: Path, split: str, *, of_classes: bool = False) -> list[Path]:
    """Find the data files of one split."""
    splits = files_by_split(folder, of_classes=of_classes)
    usual = next((name for name, words in _WORDS.items() if split in words), split)
    name = split if split in splits else usual
    if name not in splits:
        text = f"`{folder}` has no split `{split}`; it has {listed(splits)}"
        raise DataError(text, "choose one of its splits, or give one of its files")
    return splits[name]


def read_pictures(folder: Path, split: str) -> Any:
    """Read pictures with the names of their folders as classes, if there are several at one depth.

    The result is a `datasets.Dataset` with the paths of the pictures.
    """
    import datasets

    files = files_of(folder, split, of_classes=True)
    pictures = [path for path in files if path.suffix.lower() in IMAGES]
    if others := [path.name for path in files if path.suffix.lower() not in IMAGES]:
        files_are = counted(len(others), "other file is", "other files are")
        tell(f"{folder.name}: {files_are} not read: {listed({*others})}")
    cells, image = [*map(_cell, pictures)], datasets.Image(decode=False)
    return _of_files("image", image, cells, pictures, _classes(folder, IMAGES))


def _classes(folder: Path, endings: Collection[str]) -> list[str]:
    """Names of the folders of files, if these are several at one depth; else none."""
    splits = files_by_split(folder, of_classes=True)
    files = [path for paths in splits.values() for path in paths if ending(path) in endings]
    names = sorted({path.parent.name for path in files})
    return names if len(names) > 1 and len({len(path.parts) for path in files}) == 1 else []


def _of_files(
    column: str, feature: Any, cells: list[Any], files: Sequence[Path], classes: list[str]
) -> Any:
    """Make rows of cells, each with the class that the folder of its file is, if there are any."""
    import datasets

    columns, features = {column: cells}, {column: feature}
    if classes:
        columns["label"] = [classes.index(path.parent.name) for path in files]
        features["label"] = datasets.ClassLabel(names=classes)
    return datasets.Dataset.from_dict(columns, datasets.Features(features))


def read_documents(folder: Path, split: str, cache: Path) -> Any:
    """Read text files in folders of several classes, each file a text; None if they are not so.

    They are unpacked, and written in UTF-8, in `cache`.
    """
    import datasets

    classes = _classes(folder, (".txt",))
    files = [path for path in files_of(folder, split, of_classes=True) if ending(path) == ".txt"]
    if not classes or len(files) < 2 * len(classes):
        return None
    texts = []
    for path in files:
        plain = in_utf8(unpacked(path, cache), cache, path.relative_to(folder).as_posix())
        texts.append(plain.read_text(encoding="utf-8").strip())
    return _of_files("text", datasets.Value("string"), texts, files, classes)


def _cell(path: Path) -> dict[str, Any]:
    return {"path": str(path), "bytes": None}


def with_listed_pictures(rows: Any, table: Path, pictures: Sequence[Path]) -> Any:
    """Read a table that lists pictures by `file_name`, beside the pictures of its folder."""
    names = [name for name in rows.column_names if name.endswith("file_name")]
    if not names:
        text = f"`{table.name}` has no column `file_name`; it has {listed(rows.column_names)}"
        raise DataError(text, "name the column of pictures so, or take the table away")
    listed_files = set[str]()
    for name in names:
        rows, files = _as_pictures(rows, name, table)
        listed_files |= files
        rows = rows.rename_column(name, name.removesuffix("file_name").removesuffix("_") or "image")
    if count := sum(os.path.normpath(path) not in listed_files for path in pictures):
        tell(f"{table.name}: {counted(count, 'picture is', 'pictures are')} not in it: left out")
    return rows


def with_named_pictures(rows: Any, table: Path) -> Any:
    """Read columns of a table that hold paths of pictures, from its folder on, as pictures."""
    for name, cells in _texts(rows).items():
        if all(map(names_picture, cells)) and (table.parent / cells[0]).is_file():
            rows, _ = _as_pictures(rows, name, table)
    return rows


def _texts(rows: Any) -> dict[str, list[str]]:
    """Give the first cells of columns of text, without empty ones."""
    types = {name: str(getattr(item, "dtype", "")) for name, item in rows.features.items()}
    names = [name for name, dtype in types.items() if "string" in dtype]
    first = rows.select_columns(names)[:_MOST_PROBED] if names else {}
    cells = {name: [*filter(None, column)] for name, column in first.items()}
    return {name: column for name, column in cells.items() if column}


def names_picture(cell: Any) -> bool:
    """Tell whether a cell may be the path of a picture."""
    return isinstance(cell, str) and Path(cell).suffix.lower() in IMAGES


def with_written_pictures(rows: Any) -> Any:
    """Read columns of pictures that are written in base 64, alone or as addresses of such data."""
    for name, cells in _texts(rows).items():
        if all(map(_WRITTEN.match, cells)):
            contents = [cell and base64.b64decode(cell.partition("base64,")[2] or cell)
                        for cell in rows[name]]  # fmt: skip
            rows = with_cells(rows, name, contents)
    return rows


def with_cells(rows: Any, name: str, cells: Sequence[Any], feature: Any = None) -> Any:
    """Replace the cells of a column, which keeps its place."""
    replaced = rows.remove_columns([name]).add_column(name, cells, feature=feature)
    return replaced.select_columns(rows.column_names)


def _as_pictures(rows: Any, name: str, table: Path) -> tuple[Any, set[str]]:
    """Replace a column of paths by pictures, all of which must be there."""
    import datasets

    column: list[Mapping[str, Any] | None] = []
    files = set[str]()
    for row, cell in enumerate(rows[name], 1):
        path = table.parent / str(cell or "")
        if cell and not path.is_file():
            text = f"`{table.name}`, row {row}: there is no picture `{path}`"
            raise DataError(text, "mend the path, or remove the row")
        column.append(_cell(path) if cell else None)
        files.add(os.path.normpath(path))
    return with_cells(rows, name, column, datasets.Image(decode=False)), files
