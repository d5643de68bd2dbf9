"""What is shown while work goes on, and where."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout

import pytest

from tcompress.cli import terminal
from tcompress.cli.terminal import shown_progress


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def work(file: io.StringIO, *, quiet: bool = False) -> str:
    """Two stages, with stderr going to a file; gives what was shown."""
    with redirect_stderr(file), shown_progress(quiet=quiet) as shown:
        shown.stage("fitting blocks", 2, "groups")
        shown.advance(1, "layer.0 q, k, v")
        shown.advance(1, "layer.0 o")
        shown.stage("writing", 3_000_000, "bytes")
        shown.advance(3_000_000)
    return file.getvalue()


@pytest.fixture(autouse=True)
def _colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_files_get_a_line_for_each_stage() -> None:
    lines = work(io.StringIO()).splitlines()
    assert [line.partition(" in ")[0] for line in lines] == [
        "fitting blocks: 2 of 2 groups",
        "writing: 3.0 of 3.0 MB",
    ]


def test_files_get_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_SECONDS_BETWEEN_LINES", 0.0)
    assert work(io.StringIO()).splitlines()[0] == "fitting blocks: 1 of 2 groups"


def test_files_get_ten_lines_of_a_stage_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_SECONDS_BETWEEN_LINES", 0.0)
    file = io.StringIO()
    with redirect_stderr(file), shown_progress(quiet=False) as shown:
        shown.stage("writing", 1000, "bytes")
        for _ in range(1000):
            shown.advance()
        assert len(file.getvalue().splitlines()) == 10
        assert " in " in file.getvalue().splitlines()[-1]  # what follows is no part of it
    assert len(file.getvalue().splitlines()) == 10


def fail() -> None:
    with shown_progress(quiet=False) as shown:
        shown.stage("writing", 1, "bytes")
        raise ValueError("lost")


def test_failed_stage_is_not_said_to_be_over() -> None:
    file = io.StringIO()
    with redirect_stderr(file), pytest.raises(ValueError, match="lost"):
        fail()
    assert file.getvalue() == ""


def test_quiet_shows_nothing() -> None:
    assert work(io.StringIO(), quiet=True) == ""
    assert work(Terminal(), quiet=True) == ""


def test_terminals_get_bars() -> None:
    shown = work(Terminal())
    assert "fitting blocks" in shown
    assert "2 of 2 groups" in shown
    assert "3.0 of 3.0 MB" in shown
    assert "\x1b[" in shown


@pytest.mark.parametrize("plain", [False, True])
def test_no_color_leaves_out_colours(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    with redirect_stderr(file):
        terminal.notices().print("warning", style="yellow")
    assert ("\x1b[33m" in file.getvalue()) is not plain


def test_libraries_are_silenced_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HF_HUB_VERBOSITY": "debug"})
    terminal.silence_libraries(verbose=True)
    assert os.environ == {"HF_HUB_VERBOSITY": "debug"}
    terminal.silence_libraries(verbose=False, downloads=True)
    assert os.environ["HF_HUB_VERBOSITY"] == "debug"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    assert "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ


def test_tables_in_files_are_100_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with redirect_stdout(io.StringIO()):
        assert terminal.results().width == 100
