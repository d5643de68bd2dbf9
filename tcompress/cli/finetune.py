"""`tcompress finetune`, and its options."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tcompress.cli import terminal
from tcompress.cli.first_look import first_look, reach
from tcompress.errors import RecipeError, listed
from tcompress.models.names import default_output_name, local_folder
from tcompress.options.commands import FromRecipe, Hub, Manner, OneModel, Written
from tcompress.options.read import Given
from tcompress.options.steps import Finetune
from tcompress.processes import is_first

if TYPE_CHECKING:
    from tcompress.artifact.manifest import TrainingFacts
    from tcompress.training.finetuning import Finetuned

EXAMPLES = (
    "tcompress finetune minilm-lprod-p4 --data sentences.txt",
    "tcompress finetune small --task classification --data train.csv",
    "tcompress finetune small --data text.jsonl --minutes 30 -o healed",
    "tcompress finetune minilm --task sts --data pairs.csv --teacher none",
    "torchrun --nproc_per_node 2 -m tcompress finetune small --data a.txt",
)
# What `evaluate` calls tasks that it knows under another name, or not at all.
_MEASURED_AS = {"": "...", "regression": "...", "causal-lm": "perplexity"}
# A good start is left at a high rate, and takes many steps to be reached again.
_START_KEPT = (
    "No step did better than the start: give more steps (`--steps`), or a lower rate (`--lr`)."
)
_NO_STEP = "There was no time for a step: give more minutes (`--minutes`)."
_MOST_POINTS = 12  # of the course of training


def finetune(
    one: OneModel,
    call: FromRecipe,
    said: Given[Finetune],
    written: Written,
    hub: Hub,
    manner: Manner,
) -> None:
    """Does what `tcompress finetune` says."""
    begun = time.perf_counter()
    settings = settings_of(said, call.recipe)
    folder = Path(written.output or default_output(one.model, settings)).expanduser()
    with first_look() as look:
        look.output(folder.absolute(), one.model, force=written.force)
        look.data([*settings.data.source, *filter(None, [settings.data.validation])])
        look.models(one.model)
        look.teacher(settings)
    reach(one.model, token=hub.token)
    from tcompress.artifact.reader import open_checked
    from tcompress.training.finetuning import finetune as train_model

    what = partial(terminal.unwritten, folder)
    with terminal.resumable(what, quiet=manner.quiet, output=folder) as heard:
        source = open_checked(one.model, token=hub.token, trust=hub.allow_remote_code)
        heard["say"] = terminal.say  # what the user should know is no progress
        heard["begun"] = begun
        done = train_model(source, settings, folder, force=written.force, token=hub.token, **heard)
    if is_first():
        _show_result(done, as_json=manner.as_json)


def settings_of(said: Given[Finetune], name: str | None) -> Finetune:
    """Settings of a run: those of a recipe, if one is named, changed by options."""
    from tcompress.options import find_recipe, parse_recipe

    base = None
    if name is not None:
        text, origin = find_recipe(name)
        base = parse_recipe(text, origin).finetune
        if base is None:
            message = f"recipe `{origin}` has no `finetune`"
            raise RecipeError(message, "choose another recipe, or leave it out")
    if {("steps",), ("epochs",)} <= said.texts.keys():
        raise RecipeError("`--steps` and `--epochs` both say how long to train", "give one of them")
    if base is not None and ("epochs",) in said.texts:
        base = base.model_copy(update={"steps": None})
    return said.over(base)


def default_output(model: str, settings: Finetune) -> Path:
    """Names the folder to write, such as `bert-base-lprod-p4-healed`."""
    name = default_output_name(model, settings.task or "healed")
    folder = local_folder(model)
    if folder is not None and folder.name in ("", ".."):  # beside it, not inside
        folder = folder.resolve()
    return Path(name) if folder is None else folder.parent / name


def _show_sources(facts: TrainingFacts) -> None:
    """Prints what healing won and lost on each source of samples held out."""
    columns = ("before", f"step {facts.best_step:,}", "written")
    sources = [(own.name, *map(_four, (own.start, own.end, own.kept))) for own in facts.sources]
    first = "agreement with the teacher"
    terminal.results().print(terminal.table(first, *columns, right=columns, rows=sources))
    harmed = [own.name for own in facts.sources if own.harmed]
    if harmed and facts.share < 1:
        terminal.tell(f"Step {facts.best_step:,} is farther from the teacher on {listed(harmed)}.")


def _four(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _tell_data(facts: TrainingFacts) -> None:
    """Says what was read, what was guessed about it, and what numbers are of."""
    said = facts.settings.get("data", {})
    guessed = facts.task is not None and ":" in facts.data and "columns" not in said
    columns = " (columns guessed: `--columns` names others)" if guessed else ""
    taught = f", taught by {facts.teacher}" if facts.teacher else ""
    minutes = facts.seconds / 60
    terminal.tell(
        f"{facts.samples:,} examples of {facts.data}{columns} in {minutes:.1f} minutes{taught}"
    )
    if facts.task is not None and "validation" not in said:
        terminal.tell(
            f"`{facts.validation}` is of a held-out part of {facts.data}, which the dense model "
            "may have learnt: `--validation FILE` measures on other data."
        )


def _show_result(done: Finetuned, *, as_json: bool) -> None:
    facts, name = done.facts, terminal.relative(done.folder)
    if as_json:
        record = facts.model_dump(mode="json")
        terminal.print_json(
            {"output": str(done.folder), "resumed": done.resumed, "training": record}
        )
        return
    names = ("step", "loss", facts.validation, "learning rate", "minutes")
    rows = terminal.table(*names, right=names)
    last = len(facts.curve) - 1
    count = min(last, _MOST_POINTS - 1)
    for place in range(count + 1):  # the first and the last among them
        point = facts.curve[round(place * last / max(1, count))]
        rows.add_row(
            f"{point.step:,}" + (" *" if point.step == facts.best_step else "  "),
            _four(point.loss),
            _four(point.validation),
            "" if point.learning_rate is None else f"{point.learning_rate:.2e}",
            f"{point.seconds / 60:.1f}",
        )
    terminal.results().print(rows)
    _tell_data(facts)
    if facts.sources:
        _show_sources(facts)
    step = facts.best_step if facts.share else 0
    part = f"weights {100 * facts.share:.0f} % of the way to"
    way = part if 0 < facts.share < 1 else "the weights of"
    terminal.tell(f"Wrote `{name}`, with {way} step {step:,}.")
    if not facts.steps:
        terminal.tell(_NO_STEP)
    elif facts.keeps_start:
        terminal.tell(_START_KEPT)
    measured = _MEASURED_AS.get(facts.task or "", facts.task)
    terminal.tell(f"Next: `tcompress evaluate {terminal.typed(name)} --task {measured} --data ...`")
