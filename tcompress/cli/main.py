"""The program `tcompress`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn

import typer

from tcompress.cli import (
    bench,
    convert,
    demo,
    evaluate,
    export,
    finetune,
    inspect,
    lm_eval,
    methods,
    recipes,
    report,
    run,
    sweep,
)
from tcompress.cli.errors import INTERRUPTED, TERMINATED, report_failure
from tcompress.cli.further import FurtherCommand
from tcompress.cli.output import outliving_readers

_EPILOG = """\
[bold]Exit codes[/bold]
  0    done
  1    unexpected failure; `TCOMPRESS_TRACEBACK=1` shows where
  2    bad option, recipe or input, numbers that are not finite,
       or a sweep with a failed cell
  3    done, but a declared threshold was missed
  130  interrupted; 143 where a SIGTERM did it

[bold]Examples[/bold]
  tcompress demo
  tcompress convert bert-base --method lprod --p 4
  tcompress report bert-base-lprod-p4"""

app = typer.Typer(
    name="tcompress",
    help="Compress pretrained transformers with tensor methods.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("convert", cls=FurtherCommand, epilog=convert.EPILOG)(convert.convert)
app.command("finetune", epilog=finetune.EPILOG)(finetune.finetune)
app.command("inspect", epilog=inspect.EPILOG)(inspect.inspect)
app.command("report", epilog=report.EPILOG)(report.report)
app.command("evaluate", epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command("bench", epilog=bench.EPILOG)(bench.bench)
app.command("export", epilog=export.EPILOG)(export.export)
app.command("run", epilog=run.EPILOG)(run.run)
app.command("sweep", epilog=sweep.EPILOG)(sweep.sweep)
app.command("methods", epilog=methods.EPILOG)(methods.methods)
app.add_typer(recipes.app, name="recipes", help="List, show, copy, check and explain recipes.")
app.command("lm-eval", epilog=lm_eval.EPILOG, context_settings=lm_eval.SETTINGS)(lm_eval.lm_eval)
app.command("demo", epilog=demo.EPILOG)(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        import tcompress

        typer.echo(f"tcompress {tcompress.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and ends the program with its exit code.

    Args:
        arguments: What was typed after the program's name; default from the system.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    with outliving_readers(), _stoppable() as heard:
        code = _run(typed)
    sys.exit(TERMINATED if code == INTERRUPTED and heard else code)


@contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Treats SIGTERM as Ctrl-C, so that all that can go on later says so and keeps its state.

    Yields:
        The signals that came.
    """
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        as_interrupt = signal.getsignal(signal.SIGINT)  # training stops after a step
        if not callable(as_interrupt):
            raise KeyboardInterrupt
        as_interrupt(number, frame)

    try:
        before = signal.signal(signal.SIGTERM, hear)
    except ValueError:  # not in the main thread, which alone receives signals
        yield heard
        return
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _run(typed: list[str]) -> int:
    as_json = "--json" in typed
    try:
        command = typer.main.get_command(app)
        code = command.main(args=typed, prog_name="tcompress", standalone_mode=False)
        sys.stdout.flush()  # a full disk shows here, not when the program ends
    except (Exception, KeyboardInterrupt) as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2  # the help is already printed
        return report_failure(error, as_json=as_json)
    if code == INTERRUPTED:  # as newer versions of Typer return it
        return report_failure(KeyboardInterrupt(), as_json=as_json)
    return code if isinstance(code, int) else 0
