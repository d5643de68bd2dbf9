"""The terminal: results to stdout, everything else to stderr; messages, exit codes and bars."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from tcompress.errors import TCompressError
from tcompress.files import disk_error
from tcompress.processes import is_first
from tcompress.progress import Job, Progress, Silent, listening
from tcompress.reporting.formatting import table as table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


# Names and texts come from models, recipes and folders of strangers. Nothing that a terminal would
# take for a command gets through: the consoles made here, and `print_json`, are the only way out.

SCHEMA = 1
"""Version of the JSON documents that commands print."""

# Control characters but for line breaks and tabs, marks of direction, halves of characters.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_PIPE_COLUMNS = 100  # of tables in files and pipes, unless COLUMNS says otherwise
_SILENCED = {
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def results() -> Console:
    """Opens stdout for tables and text."""
    return _console(sys.stdout)


def notices() -> Console:
    """Opens stderr for messages and progress."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    from rich.console import Console
    from rich.segment import Segment

    class Safe(Console):
        """Shows that there are commands to a terminal, in place of giving them."""

        def render(self, *given: Any, **options: Any) -> Iterable[Segment]:
            for text, style, control in super().render(*given, **options):
                yield Segment(text if control else _COMMANDS.sub("\ufffd", text), style, control)

    width = None if file.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
    return Safe(file=file, width=width, highlight=False, emoji=False, markup=False)


def tell(text: str, style: str | None = None) -> None:
    """Prints a line of a result."""
    results().print(text, soft_wrap=True, style=style)


def tell_written(paths: Iterable[str]) -> None:
    """Prints which files were written."""
    for path in paths:
        tell(f"Wrote `{path}`.")


def say(text: str, *, quiet: bool = False) -> None:
    """Print something that is not a result."""
    if not quiet and is_first():
        notices().print(text, soft_wrap=True)


def print_json(document: dict[str, Any]) -> None:
    """Prints the one JSON document of a command; `schema` comes first."""
    escaped = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = json.dumps({"schema": SCHEMA, **document}, indent=2, ensure_ascii=escaped)
    sys.stdout.write(_COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Go on where nobody reads stdout or stderr any more, as behind `| head`."""
    before = sys.stdout, sys.stderr
    if isinstance(sys.stdout, TextIOWrapper):  # what it has no character for is no reason to fail
        sys.stdout.reconfigure(errors="replace")
    # A stream that was closed before the program began is None.
    streams = [stream and _Outliving(stream) for stream in before]
    sys.stdout, sys.stderr = [stream or StringIO() for stream in streams]  # type: ignore[assignment]
    try:
        yield
    finally:
        for stream in filter(None, streams):
            try:
                stream.flush()
            except OSError:  # said already
                stream.throw_away()
        sys.stdout, sys.stderr = before


class _Outliving:
    """A stream that ignores that its reader has gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self.throw_away()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self.throw_away()

    def throw_away(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError):  # a stream without a file, as in notebooks
            os.dup2(nowhere, self._stream.fileno())  # what is buffered goes there too
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def typed(name: object) -> str:
    """Writes a path or name as a shell takes it, to be copied into a command."""
    text = shlex.quote(str(name))
    return f"./{text}" if text.startswith("-") else text


def relative(folder: Path) -> Path:
    """Shortens a path to what a user would type."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def silence_libraries(*, verbose: bool, downloads: bool = False) -> None:
    """Keeps the log lines and bars of libraries, not yet imported, off the terminal."""
    if verbose:
        return
    warnings.simplefilter("ignore")
    for name, value in _SILENCED.items():
        if not (downloads and name == "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, value)


# From exceptions to messages and exit codes.

UNEXPECTED, USAGE, THRESHOLD, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143

TRACEBACK = "TCOMPRESS_TRACEBACK"
"""Environment variable that asks for tracebacks."""

_NO_HOME = "write the path in full, or `./~name` for a file of that name"
_LESS_AT_A_TIME = (
    "give fewer or shorter examples at a time (`--batch-size`, `--max-length`, "
    "`convert.calibration.batch_size` in a recipe), or another `--device`"
)
# Typer brings its parser along or imports it, by version; either way this is its base class.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


class Interrupted(TCompressError):
    """The user stopped a command that can go on later."""

    exit_code = INTERRUPTED


@contextmanager
def resumable(
    what: Callable[[], str], *, quiet: bool, output: Path | None = None, overview: bool = False
) -> Iterator[dict[str, Any]]:
    """Shows work: gives what hears of it, and says after an interruption what became of it.

    With an `output` it names the hidden folder in which work on it was left, and at the end those
    of others beside it.
    """
    try:
        with shown_progress(quiet=quiet, overview=overview) as progress:
            yield {"progress": progress, "say": lambda text: say(text, quiet=quiet)}
    except KeyboardInterrupt as error:
        hint = "run the same command again: it goes on where it stopped"
        if left := _left_beside(output, others=False):
            hint += f"; or delete what is kept for that: {left}"
        raise Interrupted(f"interrupted; {what()}", hint) from error
    if left := _left_beside(output):
        text = f"Runs that were stopped left work in {left}: go on with the same command, or delete"
        say(f"{text} it.", quiet=quiet)


def _left_beside(output: Path | None, *, others: bool = True) -> str:
    """Names folders of work that was left, with their sizes; without `others`, that of `output`."""
    from tcompress.artifact.workplace import partial_folder, unfinished
    from tcompress.reporting.formatting import bytes_text

    if output is None:
        return ""
    mine, sizes = partial_folder(output), unfinished(output)
    return ", ".join(
        f"`{relative(path)}` ({bytes_text(size)})"
        for path, size in sizes.items()
        if others or path == mine
    )


def unwritten(output: Path, kept: str = "the training so far is kept") -> str:
    """Says what became of a run that was interrupted."""
    if (output / "config.json").is_file():
        return f"`{output}` is written, but what comes after it is not finished"
    return f"`{output}` was not written, but {kept}"


@dataclass(frozen=True)
class Failure:
    """Description of an exception: its class, a sentence, what to do next, and the code."""

    kind: str
    message: str
    hint: str | None
    code: int


def describe(error: BaseException) -> Failure:
    """Puts an exception into words."""
    kind = type(error).__name__
    if isinstance(error, TCompressError):
        return Failure(kind, error.message, error.hint, error.exit_code)
    if isinstance(error, _UsageError):
        return Failure("UsageError", *_usage_words(error), USAGE)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return Failure("Interrupted", "interrupted", None, INTERRUPTED)
    if (refused := disk_error(error)) is not None:
        return describe(refused)
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of `~name`
        return Failure(kind, "a path begins with `~` and a user that there is not", _NO_HOME, USAGE)
    lines = str(error).strip().splitlines()
    message = f"unexpected `{kind}`" + (f": {lines[0]}" if lines else "")
    hint = f"run again with `{TRACEBACK}=1` to see where, and report it"
    memory = isinstance(error, MemoryError) or kind == "OutOfMemoryError"
    return Failure(kind, message, _LESS_AT_A_TIME if memory else hint, UNEXPECTED)


def report_failure(error: BaseException, *, as_json: bool) -> int:
    """Prints what went wrong, as JSON to stdout too if asked for, and returns the exit code."""
    from rich.text import Text

    failure = describe(error)
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        notices().print("".join(traceback.format_exception(error)), soft_wrap=True)
    if as_json:
        facts = {"type": failure.kind, "message": failure.message, "hint": failure.hint}
        with suppress(OSError):  # where stdout is what is wrong
            print_json({"error": facts})
    text = Text.assemble(("error", "bold red"), f": {failure.message}")
    if failure.hint:
        text.append("\n\n").append("hint", "bold cyan").append(f": {failure.hint}")
    notices().print(text, soft_wrap=True)
    return failure.code


def _usage_words(error: Any) -> tuple[str, str | None]:
    """Rewords what the parser says about the command line."""
    from tcompress.options.words import meant, quoted, suggestion

    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context else "tcompress"
    hint = f"see `{path} --help`"
    text = str(error.format_message())
    if type(error).__name__ == "NoSuchOption":
        known = [name for item in context.command.get_params(context) for name in item.opts]
        name = error.option_name
        if other := meant(name, known):
            return f"unknown option `{name}`", f"here it is `{other}`; {hint}"
        return f"unknown option `{name}`", suggestion(name, known, hint)
    if found := re.match(r"No such command '(.*?)'", text):
        known = context.command.commands
        message = f"unknown command `{found[1]}`; commands are {quoted(known)}"
        return message, suggestion(found[1], known, hint)
    text = re.sub(r"'([^' ]+)'", r"`\1`", text.rstrip("."))
    return text[:1].lower() + text[1:], hint


# Progress of long work: bars on a terminal, a line now and then elsewhere.

_SECONDS_BETWEEN_LINES = 15.0
_MOST_LINES = 10  # of a stage


@contextmanager
def shown_progress(*, quiet: bool, overview: bool = False) -> Iterator[Progress]:
    """Shows progress on stderr while the block runs, or nothing if `quiet`.

    With an `overview`, a terminal shows one view of all stages in place of a bar for each.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights; downloads keep theirs
    if quiet or not is_first():
        yield Silent()
    elif sys.stderr.isatty() and overview:
        from tcompress.cli.live import LiveView

        with LiveView(notices()).shown() as view, listening(view):
            yield view
    elif sys.stderr.isatty():
        shown = _Bars()
        with shown.bars, listening(shown):
            yield shown
    else:
        lines = _Lines()
        with listening(lines):
            yield lines
        lines.close()


class _Bars:
    """One bar for each stage."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=notices(),
        )
        self._job = Job("", 0, "")
        self._task: TaskID | None = None
        self._parts: TaskID | None = None

    def stage(self, name: str, total: int, unit: str) -> None:
        if self._task is not None:
            self.bars.update(self._task, note="")
        self._job = Job(name, total, unit)
        self._task = self.bars.add_task(name, total=total, count=self._job, note="")

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._job.done += amount
        if self._task is not None:
            self.bars.update(self._task, advance=amount, note=note)

    def shorten(self, total: int) -> None:
        self._job.total = total
        if self._task is not None:
            self.bars.update(self._task, total=total)

    def part(self, name: str, number: int, total: int) -> None:
        """Shows how many jobs are done, and leaves out the bars of the one before."""
        if self._parts is None:
            self._parts = self.bars.add_task("cells", total=total, count="", note="")
        for task in [task for task in self.bars.task_ids if task != self._parts]:
            self.bars.remove_task(task)
        self._task = None
        count = f"{number} of {total}"
        self.bars.update(self._parts, completed=number - 1, count=count, note=name)

    def tell(self, text: str) -> None:
        self.bars.console.print(text, soft_wrap=True)  # above the bars


class _Lines:
    """A line when a stage ends, and now and then before: ten of a stage at most."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._began, self._last, self._said = 0.0, 0.0, 0

    def stage(self, name: str, total: int, unit: str) -> None:
        self.close()
        self._job, self._began = Job(name, total, unit), time.monotonic()
        self._last, self._said = self._began, 0

    def advance(self, amount: int = 1, note: str = "") -> None:
        if (job := self._job) is None:
            return
        job.done += amount
        if job.done >= job.total:  # what comes after it is no part of it
            self.close()
            return
        part = (job.done - self._said) * _MOST_LINES >= job.total
        if part and time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last, self._said = time.monotonic(), job.done
            said = f"  {note}" if note and job.unit == "steps" else ""
            say(f"{job.name}: {job}{said}")

    def shorten(self, total: int) -> None:
        if self._job is not None:
            self._job.total = total

    def part(self, name: str, number: int, total: int) -> None:
        self.close()
        say(f"{name}: {number} of {total}")

    def tell(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        """Says that the stage is over."""
        if self._job is not None:
            seconds = time.monotonic() - self._began
            say(f"{self._job.name}: {self._job} in {seconds:.1f} s")
        self._job = None
