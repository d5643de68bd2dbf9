"""Where things go: results to stdout, everything else to stderr.

Names and texts come from models, recipes and folders of strangers. Nothing that a terminal would
take for a command gets through: the consoles made here, and `print_json`, are the only way out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA = 1
"""Version of the JSON documents that commands print."""

# Control characters but for line breaks and tabs, marks of direction, halves of characters.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_PIPE_WIDTH = 100  # of tables in files and pipes, unless COLUMNS says otherwise
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
        def render(self, *given: Any, **options: Any) -> Iterable[Segment]:
            for text, style, control in super().render(*given, **options):
                yield Segment(text if control else visible(text), style, control)

    width = None if file.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Safe(file=file, width=width, highlight=False, emoji=False, markup=False)


def visible(text: str) -> str:
    """Shows that there are commands to a terminal, in place of giving them."""
    return _COMMANDS.sub("\ufffd", text)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Lets work go on where nobody reads stdout or stderr any more, as behind `| head`.

    What is still written is thrown away, here and when the program ends.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = streams = [*map(_outliving, before)]
    try:
        yield
    finally:
        for stream in streams:
            try:
                stream.flush()
            except OSError:  # said already
                stream.throw_away()
        sys.stdout, sys.stderr = before


def _outliving(stream: TextIO | None) -> Any:
    if stream is None:  # closed before the program began
        return StringIO()
    return _Outliving(stream)


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


def table(*names: str, right: Collection[str] = ()) -> Table:
    """Makes an empty table.

    Args:
        names: Headings.
        right: Those whose columns are aligned to the right.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in names:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def print_json(document: dict[str, Any]) -> None:
    """Prints the one JSON document of a command; `schema` comes first."""
    text = json.dumps({"schema": SCHEMA, **document}, indent=2, ensure_ascii=False)
    sys.stdout.write(_COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def say(text: str, *, quiet: bool = False) -> None:
    """Tells the user something that is not a result."""
    if not quiet:
        notices().print(text, soft_wrap=True)


def silence_libraries(*, verbose: bool, downloads: bool = False) -> None:
    """Keeps other libraries' log lines and progress bars off the terminal.

    Has to run before they are imported.

    Args:
        verbose: Leave them as they are.
        downloads: Show the bars of downloads all the same.
    """
    if verbose:
        return
    warnings.simplefilter("ignore")
    for name, value in _SILENCED.items():
        if not (downloads and name == "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, value)
