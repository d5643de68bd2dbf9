"""The text and the exit code of every kind of failure."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest
import typer

from tcompress.cli.main import main
from tcompress.cli.terminal import describe, suggestion
from tcompress.errors import FitError, TCompressError
from tests.support.cli import error, run


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_unexpected_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("lost\nmore")

    monkeypatch.setattr("tcompress.inspection.inspect_model", fail)
    done = run("inspect", "m", "--json")
    assert done.code == 1
    assert done.document["error"]["type"] == "KeyError"
    hint = "run again with `TCOMPRESS_TRACEBACK=1` to see where, and report it"
    assert done.err == error("unexpected `KeyError`: 'lost\\nmore'", hint)


def test_traceback_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCOMPRESS_TRACEBACK", "1")
    done = run("inspect", "./nowhere")
    assert done.code == 2
    assert done.err.startswith("Traceback (most recent call last):")
    assert "error: there is no folder `./nowhere`; " in done.err


def test_full_disk_says_what_to_do() -> None:
    found = describe(OSError(errno.ENOSPC, "No space left on device"))
    assert found.code == 2
    assert found.message.startswith("there is no space for `.`: ")
    assert "free some disk space, then run the same command again" in (found.hint or "")


def test_lack_of_memory_says_what_to_do() -> None:
    found = describe(MemoryError())
    assert found.message == "unexpected `MemoryError`"
    assert found.hint == (
        "give fewer or shorter examples at a time (`--batch-size`, `--max-length`, "
        "`convert.calibration.batch_size` in a recipe), or another `--device`"
    )


def test_exit_codes_of_errors() -> None:
    assert describe(TCompressError("x")).code == 1
    assert describe(FitError("x")).code == 2
    assert describe(KeyboardInterrupt()).code == 130
    assert describe(typer.Abort()).code == 130


def test_suggestion_only_where_something_is_close() -> None:
    assert suggestion("targt", ["--x", "target"]) == "did you mean `target`?"
    assert suggestion("zzz", ["target"]) is None


@pytest.mark.parametrize("arguments", [["recipes", "list"], ["--help"], ["recipes", "list", "-x"]])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_reader_that_has_gone_changes_nothing(
    arguments: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(*arguments).code
    for closed in (True, False):  # as after `| head -0`, and after `>&-`
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, name, None if closed else stream)
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        assert ended.value.code == wanted


def test_a_disk_that_is_full_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with pytest.raises(SystemExit) as ended:
        main(["recipes", "list"])
    assert ended.value.code == 2
    assert errors.getvalue().count("error: ") == 1


def test_commands_to_copy_are_written_for_a_shell() -> None:
    done = run("recipes", "copy", "encoder/minilm-lprod", "a folder/my recipe.yaml")
    assert done.lines == [
        "Wrote `a folder/my recipe.yaml`. Next: `tcompress run 'a folder/my recipe.yaml'`"
    ]
