"""What shell completion offers where it is more than the words that a field allows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tcompress.options.library import recipe_names
from tcompress.options.method_options import method_names, replacement_names

_RECIPE_FILES = (".yaml", ".yml", ".json")
_DATA_FILES = (".txt", ".csv", ".jsonl", ".parquet", ".npz")


def methods(incomplete: str) -> list[str]:
    """Offers structures, attention replacements, and to rewrite no layer."""
    return _starting((*method_names(), "none", *replacement_names()), incomplete)


def structures(incomplete: str) -> list[str]:
    """Offers structures, and none."""
    return _starting((*method_names(), "none"), incomplete)


def method_lists(incomplete: str) -> list[str]:
    """Offers structures with commas between."""
    return listed((*method_names(), "none"), incomplete)


def devices(incomplete: str) -> list[str]:
    """Offers kinds of devices."""
    return _starting(("auto", "cpu", "cuda", "mps"), incomplete)


def models(incomplete: str) -> list[str]:
    """Offers local folders, then short names of well-known models."""
    from tcompress.models import ALIASES

    return [*_paths(incomplete, ()), *_starting(ALIASES, incomplete)]


def folders(incomplete: str) -> list[str]:
    """Offers local folders."""
    return _paths(incomplete, ())


def calibrations(incomplete: str) -> list[str]:
    """Offers what ships, then local files and folders."""
    return [*_starting(("builtin", "none"), incomplete), *data(incomplete)]


def data(incomplete: str) -> list[str]:
    """Offers local data files and folders."""
    return _paths(incomplete, _DATA_FILES)


def shipped_recipes(incomplete: str) -> list[str]:
    """Offers recipes that ship."""
    return _starting(recipe_names(), incomplete)


def recipes(incomplete: str) -> list[str]:
    """Offers recipes that ship, then local files."""
    return [*shipped_recipes(incomplete), *_paths(incomplete, _RECIPE_FILES)]


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
    except OSError:
        return []
    fits = [item for item in items if item.name.startswith(start)]
    shown = [item for item in fits if start.startswith(".") or not item.name.startswith(".")]
    return [
        f"{head}{slash}{item.name}{'/' if item.is_dir() else ''}"
        for item in shown
        if item.is_dir() or (suffixes and item.name.endswith(suffixes))
    ]
