"""Checksums of the files of a model folder: whether it still holds what was written.

Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tcompress.errors import ArtifactError, first_line, parse_json, read_settings
from tcompress.models.names import FORMAT_VERSION, MANIFEST
from tcompress.project import UPDATE

AGAIN = "copy the folder again, or convert the model again"
ZEROS = "0" * 64  # stand in a manifest for its own digest


def digest_of(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp_of(name: str) -> str | None:
    """Changes with a local file or folder that is named; None for all other names.

    Of a file it is the SHA-256; of a folder, which may be large, that of names, sizes and times.
    """
    path = Path(name).expanduser()
    if name and path.is_file():
        return digest_of(path)
    if not name or not path.is_dir():
        return None
    # Hidden files are no data: a run that is unfinished may keep its own there. Nor are results.
    named = (item for item in path.rglob("*") if "/." not in f"/{item.relative_to(path)}")
    files = sorted(item for item in named if item.is_file() and item.suffix != ".html")
    models = {item.parent for item in files if item.name == MANIFEST}
    files = [item for item in files if models.isdisjoint(item.parents)]
    facts = [(str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def stamps_of(names: Iterable[str]) -> dict[str, str]:
    """Stamp the local files and folders among names of data, by name.

    What cannot be read has none: its reader says what is wrong.
    """
    stamps: dict[str, str | None] = {}
    for name in names:
        with suppress(OSError, RuntimeError):
            stamps[name] = stamp_of(name)
    return {name: stamp for name, stamp in stamps.items() if stamp is not None}


def changed_since(stamps: Mapping[str, str]) -> list[str]:
    """List names of files and folders that are others now; those that are gone count as same."""
    now = stamps_of(stamps)
    return [name for name, stamp in stamps.items() if now.get(name, stamp) != stamp]


def is_whole(path: Path, checksum: str | None) -> bool:
    """True where a file that an interrupted run had finished is still as it was."""
    return checksum is not None and path.is_file() and digest_of(path) == checksum


def files_in(folder: Path) -> list[str]:
    """Names of all files below a folder but the manifest and hidden ones, sorted."""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return sorted(name.as_posix() for name in shown if name.as_posix() != MANIFEST)


def seal(
    folder: Path, sums: Mapping[str, str] | None = None, coming: Mapping[str, bytes] | None = None
) -> dict[str, dict[str, Any]]:
    """Make the fields `checksums` and `sizes` of a manifest.

    Those in `sums` are not computed again; the content of files that are `coming` is not there yet.
    """
    names, sums = files_in(folder), sums or {}
    checksums = {name: sums.get(name) or digest_of(folder / name) for name in names}
    sizes = {name: (folder / name).stat().st_size for name in checksums}
    for name, content in (coming or {}).items():
        checksums[name], sizes[name] = hashlib.sha256(content).hexdigest(), len(content)
    return {"checksums": dict(sorted(checksums.items())), "sizes": dict(sorted(sizes.items()))}


def check_format_version(version: Any) -> None:
    """Refuse a format that is newer than this version of tcompress."""
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ArtifactError(
            f"the model has format version `{version}`, this tcompress reads up to "
            f"{FORMAT_VERSION}",
            f"upgrade: `{UPDATE}`",
        )


def damaged(folder: Path, how: str) -> ArtifactError:
    """Says that a manifest cannot be used."""
    text = f"`{folder / MANIFEST}` is damaged: {how}"
    return ArtifactError(text, "convert the model again, or restore the file")


def read_sealed(folder: Path) -> dict[str, Any] | None:
    """Reads the manifest as plain data; None if there is none.

    A newer format, and any damage, is an `ArtifactError`.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
        raw = parse_json(content, strict=True)
    except OSError as error:
        raise damaged(folder, error.strerror or type(error).__name__) from error
    except ValueError as error:
        raise damaged(folder, first_line(error)) from error
    if not isinstance(raw, dict):
        raise damaged(folder, f"it holds a {type(raw).__name__}, expected an object")
    check_format_version(raw.get("format_version"))
    digest = raw.get("digest")
    if digest is not None:
        blank = content.replace(str(digest).encode(), ZEROS.encode(), 1)
        if hashlib.sha256(blank).hexdigest() != digest:
            raise damaged(folder, "it was changed since it was written (its digest differs)")
    return raw


def read_converted_config(folder: Path, *, strict: bool = False) -> dict[str, Any]:
    """Reads the `config.json` of a folder that is taken for a converted model."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ArtifactError(f"there is no folder `{folder}`", "check the path")
    if not path.is_file():
        text = f"`{folder}` has no `config.json`"
        raise ArtifactError(text, "give the folder that `tcompress convert` wrote")
    try:
        return read_settings(path, strict=strict)
    except ValueError as error:
        raise ArtifactError(f"`{path}` {error}", AGAIN) from error


def check_converted(folder: Path) -> None:
    """Refuse a folder that is none, or has nothing in it that can be read as a model's."""
    if not (folder / MANIFEST).is_file():  # which says what is missing beside it
        read_converted_config(folder, strict=True)


def looks_whole(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """True where files have the recorded sizes, and `config.json` the recorded content."""
    sizes = manifest.get("sizes")
    if not sizes or not isinstance(sizes, dict) or not manifest.get("digest"):
        return False
    on_disk = {name: (folder / name).stat().st_size for name in files_in(folder)}
    config = digest_of(folder / "config.json")
    return on_disk | sizes == on_disk and manifest["checksums"].get("config.json") == config
