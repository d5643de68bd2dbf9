"""What shell completion offers where it is more than the words that a field allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tcompress.options.library import RECIPE_FILES, recipe_names
from tcompress.options.method_options import method_names, replacement_names

_DATA_FILES = (".txt", ".csv", ".jsonl", ".parquet", ".npz")


def _offering(*words: str, files: tuple[str, ...] | None = None) -> Callable[[str], list[str]]:
    """Makes a function that offers words, then folders and files that end as given, if any."""

    def offer(incomplete: str) -> list[str]:
        paths = [] if files is None else _paths(incomplete, files)
        return [*_starting(words, incomplete), *paths]

    return offer


_STRUCTURES = (*method_names(), "none")
structures = _offering(*_STRUCTURES)
methods = _offering(*_STRUCTURES, *replacement_names())
devices = _offering("auto", "cpu", "cuda", "mps")
folders = _offering(files=())
data = _offering(files=_DATA_FILES)
calibrations = _offering("builtin", "none", files=_DATA_FILES)


def method_lists(incomplete: str) -> list[str]:
    """Offers structures with commas between."""
    return listed(_STRUCTURES, incomplete)


def models(incomplete: str) -> list[str]:
    """Offers local folders, then short names of well-known models."""
    from tcompress.models import ALIASES

    return [*folders(incomplete), *_starting(ALIASES, incomplete)]


def shipped_recipes(incomplete: str) -> list[str]:
    """Offers recipes that ship."""
    return _starting(recipe_names(), incomplete)


def recipes(incomplete: str) -> list[str]:
    """Offers recipes that ship, then local files."""
    return [*shipped_recipes(incomplete), *_paths(incomplete, RECIPE_FILES)]


def listed(words: Iterable[str], incomplete: str) -> list[str]:
    """Offers words, also behind others and a comma."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in _starting(words, last)]


def _starting(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    """Offers folders, with a slash, and files that end as given."""
    head, slash, start = incomplete.rpartition("/")
    try:
        items = sorted(Path(head + slash).expanduser().iterdir())
    except (OSError, RuntimeError):  # of `~name` for nobody
        return []
    fits = [item for item in items if item.name.startswith(start)]
    shown = [item for item in fits if start.startswith(".") or not item.name.startswith(".")]
    return [
        f"{head}{slash}{item.name}{'/' if item.is_dir() else ''}"
        for item in shown
        if item.is_dir() or (suffixes and item.name.endswith(suffixes))
    ]
