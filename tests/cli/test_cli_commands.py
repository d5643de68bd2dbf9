"""Commands that look at models and recipes, failures and their exit codes, and progress."""

import errno
import io
import json
import os
import shutil
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from rich.console import Console
from transformers import SuperPointConfig, SuperPointForKeypointDetection

from tcompress.cli import terminal
from tcompress.cli.live import LiveView
from tcompress.cli.main import main
from tcompress.cli.terminal import describe, shown_progress
from tcompress.errors import FitError, TCompressError
from tcompress.options import recipe_text
from tcompress.progress import Overview
from tests.support.cli import error, run, worked
from tests.support.model_folders import model_folder
from tests.support.tiny import build

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models, and one that is converted."""
    folder = tmp_path_factory.mktemp("models")
    model_folder("gpt2", folder / "gpt2")
    assert run("convert", folder / "gpt2", "--calib", "none", "-o", folder / "small").code == 0
    return folder


def test_inspect_where_nothing_can_be_rewritten(tmp_path: Path) -> None:
    config = SuperPointConfig(encoder_hidden_sizes=[8, 8, 8, 8], decoder_hidden_size=8)
    SuperPointForKeypointDetection(config).save_pretrained(tmp_path)
    done = run("inspect", tmp_path, "--json")
    assert (done.code, done.document["layers"]) == (0, [])
    assert any("no repeated block" in warning for warning in done.document["warnings"])


def test_export_of_a_host_of_our_own(tmp_path: Path) -> None:
    build("tcompress_grid").save_pretrained(tmp_path / "grid")  # type: ignore[attr-defined]
    made = tmp_path / "small"
    run("convert", tmp_path / "grid", "--method", "svd", "--rank", 2, "--calib", "none", "-o", made)
    done = run("export", made, "-o", tmp_path / "plain", "--quiet")
    assert done.out == f"Wrote `{tmp_path / 'plain'}`, which loads with `import tcompress`.\n"
    assert "import tcompress\nfrom transformers" in (tmp_path / "plain" / "README.md").read_text()


def test_export(models: Path, tmp_path: Path) -> None:
    target = tmp_path / "plain"
    small = models / "small"
    done = worked("export", small, "--to", "dense", "-o", target, "--quiet")
    assert done.out == f"Wrote `{target}`, which loads without tcompress.\n"
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    assert "import tcompress" not in (target / "README.md").read_text()
    done = run("export", small, "-o", target, "--quiet", "--force", "--json")
    assert done.document == {"schema": 1, "output": str(target), "format": "dense"}
    (inside := Path(shutil.copytree(small, tmp_path / "mine")) / "sub").mkdir()
    with chdir(inside):
        assert run("export", "..", "--json").document["output"] == str(inside / "mine-dense")


def test_recipes_show_copy_validate() -> None:
    """Commands to copy are written for a shell."""
    name, file = "encoder/minilm-lprod", "a folder/my recipe.yaml"
    assert run("recipes", "show", name).out == recipe_text(name)
    done = run("recipes", "copy", name, file)
    assert done.out == f"Wrote `{file}`. Next: `tcompress run '{file}'`\n"
    assert Path(file).read_text() == recipe_text(name)
    assert run("recipes", "copy", name, file, "--force", "--json").document["file"] == file
    done = run("recipes", "validate", file)
    assert (done.code, done.out) == (0, f"`{file}` is valid\n")


HOSTILE = "a\x1b[2J\x1b]0;b\x07\x9bc\u202ed\r[red]e"
COMMANDS = set("\x1b\x07\x9b\u202e\r\x7f\udcff")


def test_terminals_get_no_commands_from_models(models: Path, tmp_path: Path) -> None:
    """Not from names of folders or layers, nor from options, on stdout or stderr."""
    folder = tmp_path / HOSTILE
    shutil.copytree(models / "small", folder)
    for name in ("tcompress.json", "config.json"):
        word = json.dumps(HOSTILE)[1:-1]
        (folder / name).write_text((folder / name).read_text().replace("GPT2LMHeadModel", word))
    for command in (["inspect"], ["report"], ["report", "--layers"], ["export", "--to", HOSTILE]):
        done = run(command[0], folder, *command[1:])
        said = done.out + done.err
        assert "a\ufffd[2J\ufffd]0;b" in said
        assert "[red]e" in said  # no markup
        assert not set(said) & COMMANDS


def test_terminals_get_no_commands_from_recipes(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(json.dumps({"recipe_version": 1, HOSTILE: 2}))
    done = run("recipes", "validate", tmp_path / "my.yaml")
    assert "`a\ufffd[2J\ufffd]0;b" in done.err
    assert not set(done.err) & COMMANDS


@pytest.mark.parametrize("name", ["half \udcff", "c1 \x9b", "delete \x7f"])
def test_json_is_safe_to_print(name: str, tmp_path: Path) -> None:
    """Names of folders may hold what is no character at all."""
    done = run("inspect", tmp_path / name, "--json")
    assert name in done.document["error"]["message"]
    assert not set(done.out + done.err) & COMMANDS


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_results_are_printed_in_any_encoding(
    encoding: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables hold middle dots, and names what they like."""
    folder = Path(shutil.copytree(models / "small", tmp_path / "modèle→"))
    for flags in ([], ["--json"]):
        stream = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            main(["report", str(folder), *flags])
        stream.seek(0)
        assert ended.value.code == 0
        said = stream.read()
        assert "gpt2" in said
    assert json.loads(said)["reports"][0]["name"] == str(folder)


# The text and the exit code of every kind of failure
def test_unexpected_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcompress.cli.inspect.reach", Mock(side_effect=KeyError("lost\nmore")))
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


@pytest.mark.often("stdout-arguments2", "stderr-arguments2")
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


# What is shown while work goes on, and where


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


def test_a_command_of_many_stages_has_one_view() -> None:
    seconds = iter([0.0, 0.0, 30.0, 30.0, 90.0, 95.0])
    console = Console(file=io.StringIO(), width=100)
    view = LiveView(console, clock=lambda: next(seconds))
    assert isinstance(view, Overview)
    view.begin("Converting", 2.0)
    view.stage("fitting blocks", 24, "groups")
    view.begin("Healing", 1.5)  # after 30 seconds
    view.stage("training", 100, "steps")
    view.advance(25, "loss 0.5")
    view.learn("agreement", 0.98)
    console.print(view.rendered())
    done, top, bar, numbers = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert done == "Converting: 30.0 s"
    assert top.split() == ["Healing", "1:00", "0:30", "left"]
    assert bar.strip().endswith("training: 25 of 100 steps")
    assert numbers.split("   ") == ["loss 0.5", "agreement so far 0.9800"]


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
