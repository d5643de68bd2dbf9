"""What shell completion offers where it is more than the words that a field allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

_RECIPE_FILES = (".yaml", ".yml", ".json")
_DATA_FILES = (".txt", ".csv", ".jsonl", ".parquet", ".npz")


def methods(incomplete: str) -> list[str]:
    """Offers structures, mechanisms, and to rewrite no layer."""
    from tcompress.options.method_options import mechanism_names

    return _starting((*_structures(), *mechanism_names()), incomplete)


def structures(incomplete: str) -> list[str]:
    """Offers structures, and none."""
    return _starting(_structures(), incomplete)


def method_lists(incomplete: str) -> list[str]:
    """Offers structures with commas between."""
    return listed(_structures(), incomplete)


def devices(incomplete: str) -> list[str]:
    """Offers kinds of devices."""
    return _starting(("auto", "cpu", "cuda", "mps"), incomplete)


def models(incomplete: str) -> list[str]:
    """Offers local folders, then short names of well-known models."""
    from tcompress.models import ALIASES

    return [*_paths(incomplete, ()), *_starting(ALIASES, incomplete)]


def folders(incomplete: str) -> list[str]:
    """Offers local folders."""
    return list(_paths(incomplete, ()))


def calibrations(incomplete: str) -> list[str]:
    """Offers what ships, then local files and folders."""
    return [*_starting(("builtin", "none"), incomplete), *_paths(incomplete, _DATA_FILES)]


def data(incomplete: str) -> list[str]:
    """Offers local data files and folders."""
    return list(_paths(incomplete, _DATA_FILES))


def shipped_recipes(incomplete: str) -> list[str]:
    """Offers recipes that ship."""
    from tcompress.options import recipe_names

    return _starting(recipe_names(), incomplete)


def recipes(incomplete: str) -> list[str]:
    """Offers recipes that ship, then local files."""
    return [*shipped_recipes(incomplete), *_paths(incomplete, _RECIPE_FILES)]


def listed(words: Iterable[str], incomplete: str) -> list[str]:
    """Offers words, also behind others and a comma."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in _starting(words, last)]


def _structures() -> tuple[str, ...]:
    from tcompress.options.method_options import method_names

    return (*method_names(), "none")


def _starting(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Offers folders, with a slash, and files that end as given."""
    head, slash, start = incomplete.rpartition("/")
    folder = Path(head + slash).expanduser() if slash else Path()
    try:
        items = sorted(folder.iterdir())
    except OSError:
        return
    for item in items:
        hidden = item.name.startswith(".") and not start.startswith(".")
        if hidden or not item.name.startswith(start):
            continue
        if item.is_dir():
            yield f"{head}{slash}{item.name}/"
        elif suffixes and item.name.endswith(suffixes):
            yield f"{head}{slash}{item.name}"
