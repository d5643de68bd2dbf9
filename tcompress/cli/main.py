"""The program `tcompress`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from tcompress import processes
from tcompress.cli.terminal import (
    INTERRUPTED,
    TERMINATED,
    describe,
    outliving_readers,
    report_failure,
)
from tcompress.errors import InputError
from tcompress.memory import keep_freed_memory, use_huge_pages
from tcompress.progress import Silent, listening

_EPILOG = """\
[bold]Exit codes[/bold]
  0    done
  1    unexpected failure; `TCOMPRESS_TRACEBACK=1` shows where
  2    bad option, recipe or input, numbers that are not finite,
       or a sweep with a failed cell
  3    done, but a declared threshold, or the goal of `compress`, was missed
  130  interrupted; 143 where a SIGTERM did it

[bold]Examples[/bold]
  tcompress demo
  tcompress convert bert-base --method lprod --p 4
  tcompress report bert-base-lprod-p4"""

_COMPLETION = "_TCOMPRESS_COMPLETE"
"""Environment variable by which shells ask what may be typed."""

_COMMANDS = {
    "compress": "Reach a size or a speed in one command: convert, heal, export and measure.",
    "convert": "Turn a model into a smaller one that `from_pretrained` loads: pretrained, or from "
    "scratch.",
    "finetune": "Heal a converted model by imitating the dense one, or teach a model a task.",
    "inspect": "Show the blocks and layers of a model, and what cannot be rewritten.",
    "report": "Show parameters, bytes, errors, quality and speed, side by side.",
    "evaluate": "Measure models on the same examples, with intervals and paired differences.",
    "bench": "Time passes and generation beside the dense model's, and record it.",
    "export": "Write a model in another format: ONNX files, or dense weights.",
    "run": "Do what a recipe says: convert, fine-tune, evaluate, bench, report; or a sweep.",
    "sweep": "Compare methods and sizes: convert, heal, measure and time each, in one table.",
    "methods": "List the methods and their options.",
    "lm-eval": "Run lm-evaluation-harness so that it can load converted models.",
    "demo": "Make a small language model that ships smaller, and heal it; needs no network.",
    "recipes": "List, show, copy, check and explain recipes.",
}


_TOGETHER = ("compress", "convert", "finetune", "lm-eval")
"""Commands that several processes do together."""


def program(typed: Sequence[str] | None = None) -> typer.Typer:
    """Makes the program; of commands that which is `typed` alone is imported: help is quick."""
    app = typer.Typer(
        name="tcompress",
        help="Compress pretrained transformers with tensor methods.",
        epilog=_EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    wanted = None if typed is None else next((word for word in typed if word[:1] != "-"), "")
    for name, summary in _COMMANDS.items():
        if wanted not in (None, name):
            app.command(name, help=summary)(lambda: None)
            continue
        module = import_module(f"tcompress.cli.{name.replace('-', '_')}")
        if name == "recipes":
            app.add_typer(module.app, name=name, help=summary)
            continue
        from tcompress.cli.flags import command

        function = getattr(module, name.replace("-", "_"))
        settings = getattr(module, "SETTINGS", {})
        detail = "\n\n".join([summary, *getattr(module, "DETAIL", ())])
        command(app, name, *module.EXAMPLES, help=detail, **settings)(function)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        import tcompress

        typer.echo(f"tcompress {tcompress.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command, by default what was typed, and ends the program with its exit code."""
    keep_freed_memory()
    use_huge_pages()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed[:1] == ["help"]:  # what other programs mean by `help`, and `help convert`
        typed = [*typed[1:], "--help"]
    with outliving_readers(), _one_voice(), _stoppable() as heard:
        code = _run(typed)
    sys.exit(TERMINATED if code == INTERRUPTED and heard else code)


@contextmanager
def _one_voice() -> Iterator[None]:
    """Leave it to the first of several processes to show results and progress."""
    if processes.is_first():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def _check_processes(typed: Sequence[str]) -> None:
    """Refuse to have several processes write the same files, each by itself."""
    command = next((word for word in typed if word in _COMMANDS), None)
    if processes.is_launched() and command not in (None, *_TOGETHER):
        raise InputError(
            f"`{command}` runs in one process, and a launcher has started several",
            "leave it out; with one, `compress`, `convert` and `finetune` share their work out",
        )


def _failed(error: BaseException, *, as_json: bool) -> int:
    """Report what went wrong, unless another process has: launchers end all as soon as one ends."""
    return report_failure(error, as_json=as_json) if processes.speaks() else describe(error).code


@contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Treats SIGTERM as Ctrl-C, so that what can go on later keeps its state; lists the signals."""
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        as_interrupt = signal.getsignal(signal.SIGINT)  # training stops after a step
        if not callable(as_interrupt):
            raise KeyboardInterrupt
        as_interrupt(number, frame)

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _run(typed: list[str]) -> int:
    as_json = "--json" in typed
    try:
        _check_processes(typed)
        # A shell that asks what may follow says what is typed so far.
        so_far = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
        asked = so_far.split()[1:] if _COMPLETION in os.environ else typed
        whole: Any = typer.main.get_command(program(asked))
        for item in whole.params:
            if getattr(item, "is_flag", False):
                item.metavar = ""  # as in `cli/flags.py`, also of what the parser adds
        # Scripts that read the document are not told what files were taken for.
        with listening(Silent()) if as_json else nullcontext():
            code = whole.main(args=typed, prog_name="tcompress", standalone_mode=False)
        sys.stdout.flush()  # a full disk shows here, not when the program ends
    except (Exception, KeyboardInterrupt) as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2  # the help is already printed
        return _failed(error, as_json=as_json)
    if code == INTERRUPTED:  # as newer versions of Typer return it
        return _failed(KeyboardInterrupt(), as_json=as_json)
    return code if isinstance(code, int) else 0
