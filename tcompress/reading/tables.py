"""Opening data sets: files, folders and hub ids, all through the `datasets` library."""

from __future__ import annotations

import glob
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tcompress.errors import DataError
from tcompress.source.hub import cached_where_unreachable
from tcompress.source.text import first_line, folder_content, listed

# Words such as `None` or `NA` are texts and classes like others; nothing at all is missing.
_EMPTY: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".arrow": ("arrow", {}),
    ".csv": ("csv", _EMPTY),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
    ".parquet": ("parquet", {}),
    ".tsv": ("csv", {"sep": "\t", **_EMPTY}),
    ".txt": ("text", {}),
}
_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True)
class Table:
    """An opened data set.

    Attributes:
        rows: The `datasets.Dataset`.
        label: Short name: the file's or folder's name, or the hub id.
    """

    rows: Any
    label: str


@contextmanager
def opened(name: str, split: str) -> Iterator[Table]:
    """Open a data set for the time of a `with` block.

    Nothing of a local data set stays behind. One from the hub goes through the usual cache, so
    that it can be read again without network.

    Args:
        name: File, folder, or hub id; `id:config` selects a configuration of a hub data set.
        split: Split of a folder or hub data set.

    Raises:
        DataError: If there is no such data, or it cannot be read.
    """
    check_data([name])
    path = Path(name).expanduser()
    with ExitStack() as stack:
        if path.is_file():
            stack.enter_context(_quiet())
            rows = _read_file(path, stack)
        elif path.is_dir():
            stack.enter_context(_quiet())
            rows = _read_folder(path, split, stack)
        else:
            rows = _read_hub(name, split)
        if not len(rows):
            raise _without_rows(name)
        yield Table(rows, path.resolve().name if path.exists() else name)


def check_data(names: Iterable[str]) -> None:
    """Make sure that files and folders are there; the hub is not asked.

    Args:
        names: Names as `opened` takes them.

    Raises:
        DataError: If some are not; the message lists all of them.
    """
    found = [problem for name in dict.fromkeys(names) if (problem := _problem(name)) is not None]
    if len(found) == 1:
        raise found[0]
    if found:
        lines = "".join(f"\n  - {problem.message}" for problem in found)
        raise DataError(f"{len(found)} names of data lead nowhere:{lines}", hint="check the paths")


def _problem(name: str) -> DataError | None:
    """Why a name cannot be one of data, if that shows without opening it."""
    if not name.strip():  # as a path it would mean the current folder
        return DataError(
            "the name of the data is empty",
            hint="give `builtin`, a file, a folder or a hub id",
        )
    there = Path(name).expanduser().exists()
    return None if there or not _looks_like_path(name) else _missing(name)


def _read_file(path: Path, stack: ExitStack) -> Any:
    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise DataError(
            f"`{path}` is of no known kind; data files end in {listed(_BUILDERS)}",
            hint="give such a file, a folder of images or a hub id",
        )
    if not path.stat().st_size:
        raise _without_rows(str(path))
    kind, options = builder
    files = [glob.escape(str(path.absolute()))]
    return _load(str(path), stack, kind, data_files=files, split="train", **options)


def _read_folder(path: Path, split: str, stack: ExitStack) -> Any:
    import datasets

    place = str(path)
    if (path / "state.json").is_file():  # written by `Dataset.save_to_disk`
        return _explained(place, lambda: datasets.load_from_disk(place))
    if (path / "dataset_dict.json").is_file():
        return _explained(place, lambda: datasets.load_from_disk(place)[split])
    found = Counter(file.suffix.lower() for file in path.rglob("*") if file.is_file())
    images = sum(found[suffix] for suffix in _IMAGES)
    tables = sum(found[suffix] for suffix in _BUILDERS)
    if not images and not tables:
        raise DataError(
            f"`{place}` has no data files; it holds {folder_content(path)}",
            hint=f"give a folder of images, or of files that end in {listed(_BUILDERS)}",
        )
    folder = str(path.absolute())
    if images >= tables:
        # Named, because the library would take the commonest ending, be it a stray note's.
        return _load(place, stack, "imagefolder", data_dir=folder, split=split)
    return _load(place, stack, folder, split=split)


def _load(place: str, stack: ExitStack, kind: str, **options: Any) -> Any:
    import datasets

    cache = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
    counts = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # nobody has to hear of files of one's own
    try:
        return _explained(place, lambda: datasets.load_dataset(kind, cache_dir=cache, **options))
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts


def _read_hub(name: str, split: str) -> Any:
    import datasets

    repo, _, config = name.partition(":")
    with cached_where_unreachable():
        return _explained(name, lambda: datasets.load_dataset(repo, config or None, split=split))


def _explained(place: str, read: Callable[[], Any]) -> Any:
    """Call `read`, and say in one line why it failed."""
    try:
        return read()
    except Exception as error:
        # Builders, readers of file formats and the hub client each raise their own classes.
        raise _explanation(place, error) from error


def _explanation(place: str, error: Exception) -> DataError:
    from datasets.exceptions import DatasetNotFoundError

    cause = error.__cause__ or error  # the library wraps what went wrong
    text = first_line(cause)
    if "corresponds to no data" in text or type(cause).__name__ == "SchemaInferenceError":
        return _without_rows(place)
    if "Unknown split" in text or isinstance(error, KeyError):
        return DataError(
            f"`{place}` has no such split ({text})",
            hint="name one of its splits",
        )
    if "Config name is missing" in text:
        return DataError(
            f"`{place}` has several configurations ({' '.join(str(error).split())})",
            hint="give one of its files or folders"
            if Path(place).exists()
            else f"write the one you mean after a colon: `{place}:CONFIGURATION`",
        )
    if isinstance(error, DatasetNotFoundError | ConnectionError):
        return DataError(
            f"there is no file or folder `{place}`, and the hub gives no such data set ({text})",
            hint="check the name; without network give a local file",
        )
    return DataError(
        f"`{place}` cannot be read as data ({type(cause).__name__}: {text})",
        hint="check the file; it must be complete, with text in UTF-8",
    )


def _without_rows(place: str) -> DataError:
    return DataError(f"`{place}` holds no rows", hint="give other data")


def _looks_like_path(name: str) -> bool:
    # A hub id is `name` or `owner/name`; everything else can only be meant as a path.
    return (
        name.startswith((".", "/", "~"))
        or name.endswith("/")
        or "\\" in name
        or name.count("/") > 1
        or Path(name).suffix.lower() in {*_BUILDERS, *_IMAGES}
        or (Path(name).parent != Path() and Path(name).parent.is_dir())
    )


def _missing(name: str) -> DataError:
    path = Path(name).expanduser()
    parent = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    try:
        content = folder_content(parent)
        near = get_close_matches(path.name, [item.name for item in parent.iterdir()], n=3)
    except OSError:
        content, near = "files that may not be listed", []
    return DataError(
        f"there is no file or folder `{name}`; `{parent}` holds {content}",
        hint=f"did you mean {listed(near)}" if near else "check the path",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library from drawing bars and logging errors that are reported anyway."""
    import datasets

    level = datasets.logging.get_verbosity()
    bars = datasets.utils.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()
