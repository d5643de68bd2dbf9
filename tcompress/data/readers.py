"""Files and folders as rows: which builder of `datasets` reads them, whatever they are called.

The library expands `$HOME` and `~`, patterns and addresses in paths. So it is given links with
names that mean nothing else.
"""

from __future__ import annotations

import glob
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tcompress.data.dialects import EMPTY, dialect_of, types_of
from tcompress.data.folders import (
    IMAGES,
    METADATA,
    files_by_split,
    files_of,
    read_documents,
    read_pictures,
    with_listed_pictures,
    with_named_pictures,
    with_written_pictures,
)
from tcompress.data.json_forms import as_lines, first_bad_line
from tcompress.data.plain_files import (
    ending,
    in_utf8,
    kind_of_bytes,
    kind_of_text,
    tagged_rows,
    unpacked,
)
from tcompress.errors import DataError, counted, folder_content, listed
from tcompress.progress import tell

BUILDERS = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".psv": "csv",
    ".tab": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
_PREFERRED = ("parquet", "arrow", "csv", "json", "text")  # of as many files of each kind
_SEPARATORS = {".psv": "|", ".tab": "\t", ".tsv": "\t"}  # of others: a comma
_JSON_PART = 10 << 20  # bytes that the library takes at a time, and finds types of
_MOST_NAMES = 12
_HINTS = {
    **dict.fromkeys((".7z", ".rar", ".tar", ".tgz", ".zip", ".zst"), "unpack it"),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "save the table as CSV in UTF-8"),
    **dict.fromkeys(
        (".feather", ".h5", ".hdf5", ".npy", ".npz", ".orc", ".pickle", ".pkl", ".pt"),
        "write it as parquet: `pandas.DataFrame.to_parquet`",
    ),
    **dict.fromkeys(
        (".log", ".md", ".raw", ".text", ".tokens", ""),
        "a file with a text in each line is called `.txt`",
    ),
}
_CONFIGURED = re.compile(r"\A---\n(?:.*\n)*?(configs|dataset_info):")


def read_local(path: Path, split: str, cache: Path) -> tuple[Any, bool]:
    """Read a file or folder as a `datasets.Dataset`, with copies in `cache`.

    Also tells whether it is a list of texts, or a folder of pictures, whose column needs no name.
    """
    import datasets

    if path.is_file():
        return _with_pictures(path, split, cache), BUILDERS.get(ending(path)) == "text"
    if (path / "state.json").is_file():  # written by `Dataset.save_to_disk`
        return datasets.load_from_disk(str(linked(path, cache))), False
    if (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(linked(path, cache)))[split], False
    files = [file for of_split in files_by_split(path).values() for file in of_split]
    kinds = Counter(BUILDERS.get(ending(file)) for file in files)
    tables = sum(count for kind, count in kinds.items() if kind)
    images = sum(file.suffix.lower() in IMAGES for file in files)
    packed = any(file.suffix.lower() == ".zip" for file in files)
    if not images and not tables and not packed:
        hint = f"give a folder of images, or of files that end in {listed(BUILDERS)}"
        raise DataError(f"`{path}` has no data files; it holds {folder_content(path)}", hint)
    if packed or _is_configured(path):
        of_images, link = packed and images >= tables, str(linked(path, cache))
        name, where = ("imagefolder", link) if of_images else (link, None)
        rows = datasets.load_dataset(name, data_dir=where, split=split, cache_dir=str(cache))
        return rows, of_images
    chosen = files_of(path, split, of_classes=images >= tables)
    if images >= tables:
        lists = [file for file in chosen if file.name in METADATA]
        if not lists:
            return read_pictures(path, split), True
        pictures = [file for file in chosen if file.suffix.lower() in IMAGES]
        parts = [
            with_listed_pictures(read_file(file, split, cache), file, pictures) for file in lists
        ]
        return _joined(parts, lists), False
    kind = max((kind for kind in kinds if kind), key=lambda k: (kinds[k], -_PREFERRED.index(k)))
    tabular = [file for file in chosen if BUILDERS.get(ending(file)) == kind]
    others = [file for file in chosen if BUILDERS.get(ending(file)) not in (kind, None)]
    if others:
        tell(f"{path.name}: {listed(file.name for file in others)}: of another kind, not read")
    if kind == "text" and (rows := read_documents(path, split, cache)) is not None:
        return rows, False
    parts = [_with_pictures(file, split, cache) for file in tabular]
    return _joined(parts, tabular), kind == "text"


def _with_pictures(path: Path, split: str, cache: Path) -> Any:
    """Read one file; columns that name pictures, or have them written out, are these."""
    return with_written_pictures(with_named_pictures(read_file(path, split, cache), path))


def linked(path: Path, cache: Path) -> Path:
    """Make a link to a file or folder, with its ending, in a folder of its own in `cache`."""
    suffix = ending(path) if path.is_file() else ""
    link = Path(tempfile.mkdtemp(dir=cache)) / f"data{suffix}"
    try:
        link.symlink_to(path.absolute(), target_is_directory=path.is_dir())
    except OSError:  # as on Windows, where not everybody may make links
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, link)
    return link


def _is_configured(folder: Path) -> bool:
    """Tell whether a card says which files belong to which split."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    return bool(_CONFIGURED.match(text))


def read_file(path: Path, split: str, cache: Path) -> Any:
    """Read one file as a `datasets.Dataset`."""
    import datasets

    kind = BUILDERS.get(ending(path))
    if kind is None:
        text = f"`{path}` is of no known kind; data files end in {listed(BUILDERS)}"
        hint = _HINTS.get(ending(path), "give such a file, a folder of images or a hub id")
        raise DataError(text, hint)
    if not path.stat().st_size:
        raise without_rows(str(path))
    cache = Path(tempfile.mkdtemp(dir=cache))
    plain = unpacked(path, cache)
    kind = kind_of_bytes(plain, kind, path.name)
    if kind in ("csv", "json", "text"):
        plain = in_utf8(plain, cache, path.name)
        kind = kind_of_text(plain, kind, path.name)
    if kind == "tagged":
        rows = datasets.Dataset.from_list([*tagged_rows(plain)])
        how = "lines that begin with labels"
    elif kind in ("csv", "tabs"):
        usual = "\t" if kind == "tabs" else _SEPARATORS.get(ending(path), ",")
        dialect = dialect_of(plain, path.name, usual)
        if not dialect.rows:
            raise without_rows(str(path))
        types = types_of(plain, dialect)
        features = {name: datasets.Value(kind) for name, kind in types.items()}
        typed: Any = {"features": datasets.Features(features)} if features else {}
        rows = _built("csv", plain, cache, **dialect.options, **EMPTY, **typed)
        how = dialect.words
    elif kind == "json":
        lines, how = as_lines(plain, cache / "lines.jsonl", path.name, split)
        rows = _read_lines(lines, path, cache)
    else:
        rows, how = _built(kind, plain, cache), ""
    if how:
        _tell(path, rows, how)
    return rows


def _read_lines(lines: Path, path: Path, cache: Path) -> Any:
    """Read JSON lines; types that differ between parts of a file are those of all of it."""
    try:
        return _built("json", lines, cache, chunksize=_JSON_PART)
    except Exception as error:
        if (bad := first_bad_line(lines)) is not None:
            text = f"`{path.name}`, line {bad[0]}: it is no JSON ({bad[1]})"
            raise DataError(text, "mend or remove that line") from error
        size = lines.stat().st_size + 1
        if size <= _JSON_PART:
            raise
        return _built("json", lines, cache, chunksize=size)


def _built(kind: str, path: Path, cache: Path, **options: Any) -> Any:
    import datasets

    files = [glob.escape(str(linked(path, cache)))]
    return datasets.load_dataset(
        kind, data_files=files, split="train", cache_dir=str(cache), **options
    )


def _tell(path: Path, rows: Any, how: str) -> None:
    names = ", ".join(f"`{name}`" for name in rows.column_names[:_MOST_NAMES])
    rest = len(rows.column_names) - _MOST_NAMES
    columns = f"columns {names}" + (f" and {rest} more" if rest > 0 else "")
    tell(f"{path.name}: {counted(len(rows), 'row')}, {how}, {columns}")


def _joined(parts: Sequence[Any], files: Sequence[Path]) -> Any:
    """Put the rows of several files together, which must have the same columns."""
    import datasets
    import pyarrow

    first = parts[0]
    for part, file in zip(parts, files, strict=True):
        if {*part.column_names} != {*first.column_names}:
            text = (
                f"`{file.name}` has the columns {listed(part.column_names)}, `{files[0].name}` "
                f"{listed(first.column_names)}"
            )
            raise DataError(text, "give files with the same columns, or one of them")
    if any(part.features != first.features for part in parts):
        names = first.column_names
        schemas = [part.select_columns(names).features.arrow_schema for part in parts]
        try:
            joint = pyarrow.unify_schemas(
                [schema.remove_metadata() for schema in schemas], promote_options="permissive"
            )
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise _apart(parts, files) from error
        features = datasets.Features.from_arrow_schema(joint)
        classes = [
            {name: item for name, item in part.features.items() if hasattr(item, "names")}
            for part in parts
        ]
        if any(of_part != classes[0] for of_part in classes):
            raise _apart(parts, files)
        features |= classes[0]
        parts = [part.select_columns(names).cast(features) for part in parts]
    return datasets.concatenate_datasets(list(parts))


def _apart(parts: Sequence[Any], files: Sequence[Path]) -> DataError:
    """Say which column has another type in another file."""
    for name, feature in parts[0].features.items():
        for part, file in zip(parts, files, strict=True):
            differing = part.features[name]
            kinds = {str(getattr(item, "dtype", item)) for item in (feature, differing)} - {"null"}
            if differing != feature and len(kinds) > 1:
                return DataError(
                    f"column `{name}` is `{kinds.pop()}` in one of `{files[0].name}` and "
                    f"`{file.name}`, `{kinds.pop()}` in the other",
                    "write it alike in all files, or give one of them",
                )
    return DataError(f"`{files[0].name}` and others have columns of other types", "give one")


def without_rows(label: str) -> DataError:
    """Say that data is empty."""
    return DataError(f"`{label}` holds no rows", hint="give other data")
