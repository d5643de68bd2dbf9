"""The folder beside the output in which long work is done: what is finished survives a kill.

Nothing in it loads as a model: `config.json` is written last, and the finished model folder takes
the output's name in one step. What a kill leaves half done there, the next run on the same output
completes, or takes back.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from tcompress import files
from tcompress.artifact.disk_cache import read_record
from tcompress.errors import DiskError, InputError, ProcessError, TCompressError, WriteError
from tcompress.models.names import MANIFEST
from tcompress.processes import by_first

_MARK, _LOCK = "publishing", "lock"
SWEEP = ".sweep"  # folder inside the output of a sweep with what is known so far


def partial_folder(output: Path) -> Path:
    """Name the working folder of an output."""
    output = Path(os.path.abspath(output))
    return output.parent / f".{output.name}.partial"


def unfinished(output: Path) -> dict[Path, int]:
    """List working folders beside an output that nobody works in, with their bytes."""
    bytes_of = {}
    for folder in sorted(Path(os.path.abspath(output)).parent.glob(".*.partial")):
        with suppress(OSError, Timeout):  # no run's, or one is at work there
            if (folder / "identity").is_file() and (folder / _LOCK).is_file():
                with FileLock(folder / _LOCK).acquire(timeout=0):
                    sizes = (p.stat().st_size for p in folder.rglob("*") if p.is_file())
                    bytes_of[folder] = sum(sizes)
    return bytes_of


def holds_other_work(output: Path, identity: str) -> bool:
    """True where a run with other options left work beside an output, which a new one clears."""
    folder = partial_folder(output)
    try:
        begun = (folder / "journal.jsonl").is_file() and not (folder / _MARK).is_file()
        return begun and (folder / "identity").read_bytes() != identity.encode()
    except OSError:
        return False


def check_place(output: Path) -> None:
    """Refuse, before any work, a place where no folder can be written, with an `InputError`."""
    output = Path(os.path.abspath(output.expanduser()))
    try:
        kind = files.kind_of(output)
        if kind == "a link":
            raise InputError(
                f"output `{output}` is a link to `{output.readlink()}`, and links are not replaced",
                "give the folder that it leads to, or another one with `-o`",
            )
        if kind:
            raise InputError(f"output `{output}` is {kind}", "choose another folder with `-o`")
        if kind is None and os.path.ismount(output):
            text = f"output `{output}` is where another disk is mounted: it cannot be replaced"
            raise InputError(text, f"choose a folder inside it, such as `-o {output / 'model'}`")
        _check_own(partial_folder(output))
        files.try_folder(partial_folder(output))
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise files.unwritable(output, error) from error


def check_output(output: Path, *, force: bool) -> None:
    """Refuse, before any work, to write where that is impossible, or over something.

    With `force`, a model may be replaced, but nothing else. Nor is the current folder, or one
    around it: a new folder takes its name, and whoever works in the old one is nowhere.
    """
    check_empty(output, force=force)
    if Path.cwd().is_relative_to(output.expanduser().resolve()):
        raise InputError(
            f"output `{output}` is the current folder, or contains it, and is written as a whole",
            f"give a folder inside it, such as `-o {output / 'model'}`, or work from another one: "
            "`cd ..`",
        )


def check_empty(output: Path, *, force: bool = False) -> None:
    """Refuse, before any work, a folder that holds something, or that cannot be written.

    With `force`, it may hold a model.
    """
    check_place(output)
    folder = partial_folder(output)
    if not (folder / _MARK).is_file() and not (folder / "replaced").is_dir():
        _check_contents(output, force=force)  # else what a kill left is put right first


def check_sweep(output: Path, *, force: bool) -> None:
    """Refuse, before any work, to write a sweep where that is impossible, or over something."""
    check_place(output)
    if not (output / SWEEP).is_dir() and not force:
        check_empty(output)


def check_apart(output: Path, folder: Path, what: str) -> None:
    """Refuse an output that is `what`, which lies in a folder, or contains it."""
    output_path, folder = output.resolve(), folder.resolve()
    if output_path == folder or output_path in folder.parents:
        text = f"output `{output}` is {what}, or contains it"
        raise InputError(text, "choose another folder with `-o`")


def remove_model(folder: Path) -> None:
    """Remove a model folder, if there is one; an `InputError` if it does not look like a model."""
    _check_contents(folder, force=True)
    if folder.is_dir():
        files.remove(folder)


def _check_contents(output: Path, *, force: bool) -> None:
    """Refuse a folder that is not empty; with `force`, one that does not look like a model."""
    names = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if names and not force:
        hint = "choose another one with `-o`, or replace it with `--force`"
        raise InputError(f"output folder `{output}` is not empty", hint)
    weights = any(name.endswith((".safetensors", ".bin")) for name in names)
    ours = MANIFEST in names or ("config.json" in names and weights)
    if names and (not ours or ".git" in names):
        shown = ", ".join(f"`{name}`" for name in names[:3])
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        what = "a `.git`" if ours else "no model"
        raise InputError(
            f"output folder `{output}` holds {shown}{rest} and {what}, so that `--force` does not "
            "replace it",
            "choose another one with `-o`, or empty it yourself",
        )


def _check_own(folder: Path) -> None:
    kind = files.kind_of(folder)
    if kind:
        text = f"the working folder `{folder}` is {kind}, which no run of tcompress makes"
        raise InputError(text, "remove it, or choose another output with `-o`")
    owner = os.geteuid() if kind == "" else folder.lstat().st_uid
    if owner != os.geteuid() and owner != files.owner_given(folder.parent):
        raise InputError(
            f"the working folder `{folder}` belongs to user {owner}, and its "
            "contents are not trusted",
            "remove it, work as that user, or choose another output with `-o`",
        )


def _digest(folder: Path) -> str:
    config = folder / "config.json"
    return hashlib.sha256(config.read_bytes() if config.is_file() else b"").hexdigest()


def _read_mark(folder: Path) -> dict[str, Any]:
    mark = read_record(folder / _MARK, json.loads)
    facts = {"folder", "config", "identity"}
    return mark if isinstance(mark, dict) and mark.keys() >= facts else {}


class Workplace:
    """Working folder of one conversion or training run.

    Everything in `identity` determines the result: another one starts afresh. `resumed` tells
    whether there is work of an interrupted run, `published` that it had finished, and only its
    working folder was left. An `InputError` says that another run is writing the same output, that
    it cannot be written, or that the working folder is a link or somebody else's.
    """

    def __init__(self, output: Path, identity: str, *, force: bool = False) -> None:
        self.output = Path(os.path.abspath(output))
        self.folder = partial_folder(output)
        self.model = self.folder / "model"
        self._journal = self.folder / "journal.jsonl"
        self._needed: int | None = None
        self._finished = False
        self._identity = hashlib.sha256(identity.encode()).hexdigest()
        self._lock: FileLock | None = None  # which the first of several processes has
        self.published, self.resumed = self._opened(identity, force)
        if not self.folder.is_dir():
            text = f"not all processes see the working folder `{self.folder}`"
            raise InputError(text, "write to a folder that all machines share, with `-o`")

    @by_first
    def _opened(self, identity: str, force: bool) -> tuple[bool, bool]:
        """Lock the folder and make it ready; tell if it is published, and if work is left in it."""
        self._lock = self._locked()
        try:
            if self._recover():
                return True, True
            _check_contents(self.output, force=force)
            return False, self._prepare(identity)
        except BaseException:
            self.close() if (self.folder / "identity").is_file() else self.discard()
            raise

    def _locked(self) -> FileLock:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.folder.mkdir(mode=0o700)
            except FileExistsError:
                _check_own(self.folder)
            if (self.folder / _LOCK).is_symlink():  # what it leads to stays
                (self.folder / _LOCK).unlink()
            lock = FileLock(self.folder / _LOCK)
            lock.acquire(timeout=0)
            for path in self.folder.rglob("*"):
                if path.is_symlink():  # of a run that has ended
                    path.unlink()
        except FileNotFoundError:  # another run has just removed the folder
            return self._locked()
        except Timeout as error:
            hint = "wait for it, or choose another output with `-o`"
            raise InputError(f"another run is writing `{self.output}`", hint) from error
        except OSError as error:
            raise files.unwritable(self.output, error) from error
        return lock

    def _prepare(self, identity: str) -> bool:
        """Make the folder ready; return true where there is work to go on with."""
        state = self.folder / "identity"
        open_to_others = files.close_to_others(self.folder)
        same = state.is_file() and state.read_bytes() == identity.encode()
        if open_to_others or not same:
            self._clear({_LOCK})
            files.write_text(state, identity)
        for cut_off in self.folder.rglob("*.tmp"):
            files.remove(cut_off)
        self.model.mkdir(exist_ok=True)
        return self._journal.is_file()

    def _recover(self) -> bool:
        """Complete what a killed run was publishing, or take it back; nothing old is lost.

        Returns true where the output is what this run would write.
        """
        mark, old = _read_mark(self.folder), self.folder / "replaced"
        if old.is_dir():  # the system needed two steps
            if not files.holds_something(self.output):
                complete = bool(mark) and mark["folder"] == files.number_of(self.model)
                (self.model if complete else old).rename(self.output)
            if old.is_dir():
                files.remove(old)
        if not mark:
            return False
        if mark["folder"] == files.number_of(self.output) and mark["config"] == _digest(
            self.output
        ):
            if mark["identity"] == self._identity:
                return True
            self._clear({_LOCK})
        elif mark["folder"] != files.number_of(self.model):
            self._clear({_LOCK})  # it is not known what `model` is
        return False

    @by_first
    def note(self, kind: str, **facts: Any) -> None:
        """Append a line to the journal; it is on disk when this returns."""
        with self._journal.open("a", encoding="utf-8") as file:
            # A line that a kill or a full disk has cut off ends here.
            file.write("\n" + json.dumps({"kind": kind, **facts}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Read the journal's lines of one kind; a line cut off by a kill is left out."""
        if not self._journal.is_file():
            return []
        facts = []
        for line in self._journal.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                facts.append(json.loads(line))
        return [fact for fact in facts if isinstance(fact, dict) and fact.get("kind") == kind]

    @by_first
    def need(self, size: int) -> None:
        """Refuse to go on where the disk has no room for so many bytes, written ones included."""
        self._needed = size
        if (lacking := self._lacking() or 0) > files.free_bytes(self.output):
            raise files.full_disk(self.output, lacking)

    def _lacking(self) -> int | None:
        return None if self._needed is None else max(0, self._needed - self.written_bytes)

    @property
    def written_bytes(self) -> int:
        """Bytes of tensors that an interrupted run, or this one, has written here."""
        files = (path for path in self.folder.rglob("*.safetensors") if path.is_file())
        return sum(path.stat().st_size for path in files)

    @property
    def result(self) -> dict[str, Any] | None:
        """Facts of an output that is published, while this folder is still there."""
        facts: dict[str, Any] | None = _read_mark(self.folder).get("result")
        return facts

    @by_first
    def publish(self, *, force: bool, result: Mapping[str, Any] | None = None) -> None:
        """Put the finished model folder in the place of the output, and remove the rest.

        A kill from then on leaves at least the `result` for the same command.
        """
        self._finished = True
        _check_contents(self.output, force=force)
        for path in self.model.rglob("*"):
            if not path.is_symlink():  # of a folder that has them; from here they may lead nowhere
                files.sync(path)
        files.sync(self.model)
        number, config = files.number_of(self.model), _digest(self.model)
        mark = {"folder": number, "config": config, "identity": self._identity, "result": result}
        files.write_text(self.folder / _MARK, json.dumps(mark))
        if files.holds_something(self.output):
            files.swap(self.model, self.output, self.folder / "replaced")
        else:
            self.model.rename(self.output)
        files.sync(self.output.parent)
        self._finished = False
        self.discard()

    @contextmanager
    def working(self, keeps: Callable[[BaseException], bool] | None = None) -> Iterator[Self]:
        """Leave the folder for a later run, or remove it, if the block fails.

        `keeps` tells whether what is done is worth keeping after an error. Default: unless the
        error says that the same command will fail again.
        """
        try:
            yield self
        except BaseException as error:
            refused = files.disk_error(error, self.output, self._lacking())
            failure = refused or error
            # The same command may end well later, on a mended disk or with other versions.
            passing = not isinstance(failure, TCompressError)
            passing = passing or isinstance(failure, DiskError | WriteError | ProcessError)
            stays = keeps(failure) if keeps is not None else passing
            if isinstance(error, WriteError) and self._lock is not None:
                self._distrust()
                state = (_LOCK, _MARK, "identity", self._journal.name)
                present = (path for path in self.folder.rglob("*") if path.is_file())
                if stays and any(path.name not in state for path in present):
                    error.hint = (
                        f"{error.hint}; what was fitted is kept in `{self.folder}`, where the same "
                        "command goes on, with the same versions of tcompress and torch"
                    )
            # Without looking for other processes, which may be gone: what lasts, the first has.
            self.close() if stays else self.discard()
            if refused is not None:
                raise refused from error
            raise

    def _distrust(self) -> None:
        """Remove what was written, which is not what was fitted; the fits stay."""
        with suppress(OSError):  # what went wrong first counts
            for note in self.notes("shard"):
                self.note(**{**note, "sha256": None})
        with suppress(OSError):
            files.remove(self.model)

    def discard(self) -> None:
        """Remove the working folder; what is finished and could not be moved stays."""
        if not self._finished and self._lock is not None:
            with suppress(OSError):
                self._clear({_LOCK, _MARK})
                # In this order: what a kill leaves says that the output is finished.
                (self.folder / _LOCK).unlink(missing_ok=True)
                (self.folder / _MARK).unlink(missing_ok=True)
                self.folder.rmdir()
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _clear(self, spared: set[str]) -> None:
        for item in self.folder.iterdir():
            if item.name not in spared:
                files.remove(item)


def tidy(output: Path) -> None:
    """Remove what a killed clean-up left beside a finished output; work to go on with stays."""
    folder = partial_folder(output)
    with suppress(InputError, FileNotFoundError):  # another run is at work there
        if files.kind_of(folder) is None and _is_over(folder, output):
            Workplace(output, "", force=True).discard()


def _is_over(folder: Path, output: Path) -> bool:
    """True where the result of a working folder is published, or nothing was done in it."""
    if mark := _read_mark(folder):
        return bool(mark["folder"] == files.number_of(output))
    if (folder / "replaced").is_dir():  # as earlier versions left it
        return not files.holds_something(folder / "model")
    return all(path.name in (_LOCK, _MARK) or path.is_dir() for path in folder.rglob("*"))


def identity_of(parts: Mapping[str, Any]) -> str:
    """Render what determines a result; the version of torch changes rounding."""
    import torch  # places are looked at before anything is imported that takes seconds

    return json.dumps({**parts, "torch": torch.__version__}, sort_keys=True, default=str)
