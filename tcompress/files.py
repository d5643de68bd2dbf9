"""Files that are written whole or not at all, and words for disks that refuse them."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tcompress.errors import DiskError, InputError, TCompressError

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux
_HERE = -100  # AT_FDCWD
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
_REFUSED = (*_FULL, *_FORBIDDEN, errno.EIO, errno.EFBIG, errno.ENAMETOOLONG, errno.EXDEV)
_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
# By the letter that `ls -l` shows first.
_KINDS = {"-": "a file", "l": "a link", "p": "a named pipe", "s": "a socket"}
_KINDS |= dict.fromkeys("bc", "a device")


def kind_of(path: Path) -> str | None:
    """Says what a path is, links not followed: None for a folder, "" where there is nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return _KINDS.get(stat.filemode(mode)[0])


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces a file once all is on the disk.

    A kill, or an `OSError` of the disk, leaves the file as it was, and at most something that ends
    in `.tmp`. A link is replaced, not followed.
    """
    other = _beside(path)
    try:
        other.unlink(missing_ok=True)
        yield other
        sync(other)
        other.replace(path)
    except BaseException:
        with suppress(OSError):  # what went wrong first counts
            other.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.{os.getpid()}.tmp")


def write_text(path: Path, text: str) -> None:
    """Writes a text file; see `beside`."""
    with beside(path) as other, other.open("x", encoding="utf-8") as file:
        file.write(text)


def write_named(path: Path, text: str) -> None:
    """Writes a text file that a user has named, or says why that cannot be."""
    try:
        write_text(path, text)
    except OSError as error:
        raise unwritable(path, error) from error


def sync(path: Path) -> None:
    """Waits until a file is on the disk, or the names in a folder, where disks can do that."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDERS or not path.is_dir():
            raise


def remove(path: Path) -> None:
    """Removes a file, a folder with what is in it, or a link; never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def second_name(path: str, other: str) -> str:
    """Link a file under another name; copy it where the disk has one name for each file."""
    try:
        os.link(path, other)
    except OSError:
        shutil.copy2(path, other)
    return other


def holds_something(folder: Path) -> bool:
    """Return whether there is a folder that is not empty."""
    return folder.is_dir() and any(folder.iterdir())


def number_of(folder: Path) -> int | None:
    """Identifies a folder under any name; None where there is none."""
    return folder.stat().st_ino if folder.is_dir() else None


def swap(new: Path, old: Path, aside: Path) -> None:
    """Puts a folder in the place of another one, at once where the system can do that.

    Then `new` is the other one; or nothing, and the other one is `aside`, where two steps are
    needed.
    """
    if _exchange(new, old):
        return
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; tells whether the system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or not sys.platform.startswith("linux"):
        return False
    sys.audit("os.rename", str(one), str(other), -1, -1)
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def disk_error(
    error: BaseException, place: Path | None = None, needed: int | None = None
) -> DiskError | None:
    """Puts what a disk refuses into words; None for what has other reasons.

    Place and number of the bytes that are still to be written may be unknown.
    """
    number, named = getattr(error, "errno", None), getattr(error, "filename", None)
    # Other libraries wrap it in errors of their own.
    if number is None and (found := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(found[1])
    if isinstance(error, TCompressError) or number not in _REFUSED:
        return None
    if number in _FULL:
        return full_disk(place or Path(named or "."), needed)
    hint = "change its permissions, or choose another place"
    return DiskError(f"`{named or place or 'a file'}` cannot be used ({os.strerror(number)})", hint)


def full_disk(place: Path, needed: int | None = None) -> DiskError:
    """Makes the error of a full disk, with the bytes that are needed, if they are known."""
    free = free_bytes(place)
    lacking = "" if needed is None else f" of {_size(needed)} that are needed"
    if needed is not None and needed > free:
        lacking += f": {_size(needed - free)} are missing"
    return DiskError(
        f"there is no space for `{place}`: {free_text(place)} on its disk{lacking}",
        "free some disk space, then run the same command again: what was done is kept",
    )


def free_bytes(place: Path) -> int:
    """Bytes that are free where something is, or will be, written."""
    place = place.absolute()
    while not place.is_dir():
        place = place.parent
    return shutil.disk_usage(place).free


def free_text(place: Path) -> str:
    """Says how much is free where something is, or will be, written."""
    return f"{_size(free_bytes(place))} are free"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} bytes"


def check_file(path: Path) -> None:
    """Refuses, before any work, what is no ordinary file, or one that cannot be written."""
    try:
        kind = kind_of(path)
        if kind is None:
            hint = f"such as `{path / 'report.html'}`"
            raise InputError(f"`{path}` is a folder, expected the name of a file", hint)
        if kind not in ("", "a file", "a link") or not (path.is_file() or not path.exists()):
            raise InputError(f"`{path}` is {kind}, not an ordinary file", "give another name")
        if not path.parent.is_dir():
            hint = "make the folder first"
            raise InputError(f"there is no folder `{path.parent}` to write `{path.name}` to", hint)
        _beside(path).unlink(missing_ok=True)  # of a process that was killed
        _beside(path).open("x").close()
        _beside(path).unlink()
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from error


def _check_kind(kind: str, endings: tuple[str, ...], path: Path) -> None:
    """Refuses a file that cannot be written, or would take the place of another kind of file."""
    check_file(path)
    if path.exists() and path.suffix.lower() not in endings:
        raise InputError(
            f"`{path}` exists and does not look like {kind}",
            f"give a name that ends in `{endings[0]}`",
        )


check_page = partial(_check_kind, "a page", (".html", ".htm"))
check_sheet = partial(_check_kind, "CSV", (".csv",))
check_latex = partial(_check_kind, "LaTeX", (".tex",))


def check_drawings(folder: Path) -> None:
    """Refuses a folder that drawings cannot be written to; what else is in it stays."""
    kind = kind_of(folder)
    if kind and not folder.is_dir():
        raise InputError(f"`{folder}` is {kind}, expected a folder", "give another name")
    if not folder.parent.is_dir():
        text = f"there is no folder `{folder.parent}` to make `{folder.name}` in"
        raise InputError(text, "make the folder first")
    try:
        if folder.is_dir():
            close = _beside(folder / "drawing")
            close.open("x").close()
            close.unlink()
        else:
            try_folder(folder)
    except (OSError, ValueError) as error:
        raise unwritable(folder, error) from error


def try_folder(folder: Path) -> None:
    """Makes a folder and removes it if it is empty: nothing else tells whether that is possible."""
    made = [folder, *(place for place in folder.parents if not place.exists())]
    try:
        for place in reversed(made):
            place.mkdir(exist_ok=True)
        if not os.access(folder.parent, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()


def owner_given(folder: Path) -> int:
    """To whom new things in a folder belong: some disks have no owners, or map ours to others."""
    with TemporaryDirectory(prefix=".tcompress-", dir=folder) as made:
        return Path(made).lstat().st_uid


def close_to_others(folder: Path) -> bool:
    """Remove all rights of others, and return whether they could write there until now.

    A bit that hands the folder's group down stays. A disk without modes does not tell: False.
    """
    before = stat.S_IMODE(folder.stat().st_mode)
    with suppress(OSError):  # some disks refuse other modes
        folder.chmod(before & ~0o077 | stat.S_IRWXU)
    return bool(before & ~folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def unwritable(path: Path, error: Exception) -> TCompressError:
    """Says why something cannot be written."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return full_disk(path)
    reason = getattr(error, "strerror", None) or str(error)
    shown = str(path) if len(str(path)) <= 120 else f"{str(path)[:60]}…{str(path)[-20:]}"
    return InputError(f"`{shown}` cannot be written ({reason})", "choose another place")
