"""Checksums of the files of a model folder: whether it still holds what was written.

Reading files takes time, so what was found of a file is remembered, outside of the folder, for as
long as the file stays as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tcompress.errors import parse_json
from tcompress.models.names import CARD, MANIFEST

_RECENT_NS = 2 * 10**9
"""Younger files may change again within the same tick of a file system's clock."""

CACHE: Path | None = None
"""Where states are remembered, if not in the user's cache folder."""

States = dict[str, list[Any]]


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_whole(path: Path, checksum: str | None) -> bool:
    """Whether a file that an interrupted run had finished is still as it was."""
    return checksum is not None and path.is_file() and digest_of(path) == checksum


def files_in(folder: Path) -> list[str]:
    """Names of all files below a folder but the manifest and hidden ones, sorted."""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return sorted(name.as_posix() for name in shown if name.as_posix() != MANIFEST)


def seal(
    folder: Path, known: Mapping[str, str] | None = None, coming: Mapping[str, bytes] | None = None
) -> dict[str, dict[str, Any]]:
    """Makes the fields `checksums` and `sizes` of a manifest.

    Args:
        folder: Folder of the model.
        known: Checksums of files that were taken while they were written.
        coming: Content of files that will be written later.
    """
    known, coming = known or {}, coming or {}
    sums = {name: known.get(name) or digest_of(folder / name) for name in files_in(folder)}
    sizes = {name: (folder / name).stat().st_size for name in sums}
    for name, content in coming.items():
        sums[name], sizes[name] = hashlib.sha256(content).hexdigest(), len(content)
    return {"checksums": dict(sorted(sums.items())), "sizes": dict(sorted(sizes.items()))}


def damages(
    folder: Path,
    checksums: Mapping[str, str],
    sizes: Mapping[str, int],
    *,
    used: Collection[str] = (),
    again: bool = False,
) -> list[str]:
    """Compares files with what the manifest says of them.

    Args:
        folder: Folder of the model.
        checksums: SHA-256 by name; that of the card, which people rewrite and downloads leave
            out, counts only with `again`, and where there is one.
        sizes: Bytes by name; older manifests have none.
        used: Files that must have a checksum.
        again: Read every file, whatever is remembered of it.

    Returns:
        A line for each file that is missing, unknown or not as it was written.
    """
    before = _remembered(folder)
    states: States = {} if again else dict(before)
    found = [f"`{name}` is not in `{MANIFEST}`" for name in used if name not in checksums]
    for name, wanted in checksums.items():
        if name != CARD or (again and (folder / CARD).exists()):
            problem = _damage(folder, name, wanted, sizes.get(name), states)
            found += [] if problem is None else [problem]
    if states != before:
        _remember(folder, states)
    return found


def _damage(folder: Path, name: str, wanted: str, size: int | None, states: States) -> str | None:
    """Says what is wrong with a file; it is read where its state is a new one."""
    path, parts = folder / name, PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name:
        return f"`{MANIFEST}` names `{name}`, outside the folder"
    try:
        if not path.is_file():
            return f"`{name}` is missing"
        state = [wanted, *_state(path)]
        if size not in (None, state[1]):
            return f"`{name}` has {state[1]} bytes, written were {size}"
        if states.get(name) != state:
            if digest_of(path) != wanted:
                return f"`{name}` differs from its checksum"
            states[name] = state
    except OSError as error:
        return f"`{name}` cannot be read ({error.strerror})"
    return None


def _state(path: Path) -> list[int]:
    """What changes whenever a file does."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _is_state(value: Any) -> bool:
    kinds = [str, int, int, int, int]
    return isinstance(value, list) and [type(item) for item in value] == kinds


def _place(folder: Path) -> Path:
    base = CACHE or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return base / "tcompress" / "checked" / f"{name}.json"


def _remembered(folder: Path) -> States:
    """States in which files were right, by name; what cannot be read is as if it were not there."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, RecursionError):
        states = json.loads(_place(folder).read_text(encoding="utf-8"))
        if isinstance(states, dict):
            return {name: state for name, state in states.items() if _is_state(state)}
    return {}


def _remember(folder: Path, states: States) -> None:
    """Writes down states; files that have only just been written are left out."""
    young = time.time_ns() - _RECENT_NS
    old = {name: state for name, state in states.items() if state[2] < young}
    with contextlib.suppress(OSError, RuntimeError):
        place = _place(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(old), encoding="utf-8")
        beside.replace(place)


ZEROS = "0" * 64
"""Stand in a manifest for its own digest."""


def read_sealed(
    folder: Path, check_version: Callable[[Any], None] = lambda _: None
) -> dict[str, Any] | None:
    """Reads the manifest as plain data, whose digest is compared if it has one.

    Args:
        folder: Folder of the model.
        check_version: Refuses formats of which nothing more is known.

    Returns:
        Its content; None if there is no manifest.

    Raises:
        ValueError: It cannot be read, or was changed; the message says how.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(error.strerror or type(error).__name__) from error
    raw = parse_json(content, strict=True)
    if not isinstance(raw, dict):
        raise ValueError(f"it holds a {type(raw).__name__}, expected an object")
    check_version(raw.get("format_version"))
    digest = raw.get("digest")
    if digest is not None:
        blank = content.replace(str(digest).encode(), ZEROS.encode(), 1)
        if hashlib.sha256(blank).hexdigest() != digest:
            raise ValueError("it was changed since it was written (its digest differs)")
    return raw


def looks_whole(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether all files have the sizes that they were written with, and `config.json` its content.

    Older manifests do not say.
    """
    sizes, config = manifest.get("sizes"), folder / "config.json"
    if not sizes or not isinstance(sizes, dict) or not manifest.get("digest"):
        return False
    found = {name: (folder / name).stat().st_size for name in files_in(folder)}
    whole = found | sizes == found
    return whole and manifest["checksums"].get("config.json") == digest_of(config)
