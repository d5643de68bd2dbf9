"""`tcompress finetune`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tcompress.cli import options as opt
from tcompress.cli import training as given_as
from tcompress.cli.errors import Interrupted
from tcompress.errors import RecipeError

if TYPE_CHECKING:
    from tcompress.recipe.schema import Finetune
    from tcompress.training.run import Finetuned

EPILOG = opt.examples(
    "tcompress finetune minilm-lprod-p4 --data sentences.txt",
    "tcompress finetune small --task classification --data train.csv",
    "tcompress finetune small --data text.jsonl --max-minutes 30 -o healed",
    "tcompress finetune minilm --task sts --data pairs.csv --teacher none",
    "torchrun --nproc_per_node 2 -m tcompress finetune small --data a.txt",
)

# What `evaluate` calls tasks that it knows under another name, or not at all.
_MEASURED_AS = {"": "...", "regression": "...", "causal-lm": "perplexity"}

# A good start is left at a high rate, and takes many steps to be reached again.
_START_KEPT = (
    "No step did better than the start: give more steps (`--steps`), or a lower rate (`--lr`)."
)

# Options that only change a value of the recipe, and the field they change.
_FIELDS = {
    "task": "task",
    "teacher": "teacher",
    "temperature": "temperature",
    "stage": "stage",
    "block_steps": "block_steps",
    "train": "train",
    "steps": "steps",
    "epochs": "epochs",
    "max_minutes": "max_minutes",
    "batch_size": "batch_size",
    "accumulate": "accumulate",
    "learning_rate": "learning_rate",
    "evaluate_every": "evaluate_every",
    "checkpoint_every": "checkpoint_every",
    "patience": "patience",
    "mixed_precision": "mixed_precision",
    "track": "trackers",
    "seed": "seed",
    "device": "device",
}
_DATA_FIELDS = {
    "data": "source",
    "split": "split",
    "samples": "samples",
    "max_length": "max_length",
    "validation": "validation",
}
_FLAGS = {
    "learning_rate": "--lr",
    "objectives": "--objective",
    "trackers": "--track",
    "source": "--data",
}


def finetune(
    context: typer.Context,
    model: given_as.ModelArgument,
    recipe: opt.RecipeOption = None,
    task: given_as.Task = None,
    teacher: given_as.Teacher = None,
    teacher_blocks: given_as.TeacherBlocks = None,
    objective: given_as.Objective = None,
    temperature: given_as.Temperature = None,
    stage: given_as.Stage = None,
    block_steps: given_as.BlockSteps = None,
    train: given_as.Train = None,
    data: given_as.Data = None,
    split: given_as.Split = None,
    columns: given_as.Columns = None,
    samples: given_as.Samples = None,
    max_length: given_as.MaxLength = None,
    validation: given_as.Validation = None,
    steps: given_as.Steps = None,
    epochs: given_as.Epochs = None,
    max_minutes: given_as.MaxMinutes = None,
    batch_size: given_as.BatchSize = None,
    accumulate: given_as.Accumulate = None,
    learning_rate: given_as.LearningRate = None,
    evaluate_every: given_as.EvaluateEvery = None,
    checkpoint_every: given_as.CheckpointEvery = None,
    patience: given_as.Patience = None,
    mixed_precision: given_as.MixedPrecision = None,
    gradient_checkpointing: given_as.GradientCheckpointing = False,
    track: given_as.Track = None,
    seed: given_as.Seed = None,
    device: given_as.Device = None,
    output: given_as.Output = None,
    force: opt.Force = False,
    token: opt.Token = None,
    allow_remote_code: opt.AllowRemoteCode = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Heal a converted model by imitating the dense one, or teach a model a task."""
    from tcompress.cli.output import say, silence_libraries
    from tcompress.cli.progress import shown_progress

    silence_libraries(verbose=verbose)
    settings = settings_of(context.params)
    folder = Path(output) if output else default_output(model, settings)
    from tcompress.artifact.reader import open_checked
    from tcompress.artifact.workplace import check_output
    from tcompress.training.run import finetune as train_model

    if not Path(model).exists():
        check_output(folder, force=force)  # before a long download
    quiet = quiet or not is_main_process()
    with one_voice(), resumable(folder), shown_progress(quiet=quiet) as progress:
        source = open_checked(model, token=token, trust=allow_remote_code)
        done = train_model(
            source, settings, folder, force=force, token=token, progress=progress, say=say
        )
    if is_main_process():
        show_result(done, as_json=json)


def settings_of(given: Mapping[str, Any]) -> Finetune:
    """Settings of a run: the recipe's, changed by options.

    Raises:
        RecipeError: An option has a value that is not allowed; names all of them.
    """
    from pydantic import ValidationError

    from tcompress.cli.settings import refuse_huge
    from tcompress.recipe import find_recipe, parse_recipe
    from tcompress.recipe.schema import Finetune

    data: dict[str, Any] = {}
    if given.get("recipe") is not None:
        text, origin = find_recipe(given["recipe"])
        said = parse_recipe(text, origin).finetune
        if said is None:
            raise RecipeError(
                f"recipe `{origin}` has no `finetune`", "choose another recipe, or leave it out"
            )
        data = said.model_dump()
    # A list that is not given is None or empty, by version of the parser.
    said_now = {name: value for name, value in given.items() if value not in (None, [], ())}
    refuse_huge(said_now)
    if {"steps", "epochs"} <= said_now.keys():
        raise RecipeError("`--steps` and `--epochs` both say how long to train", "give one of them")
    if "epochs" in said_now:
        data["steps"] = None  # the recipe's
    data |= {field: said_now[name] for name, field in _FIELDS.items() if name in said_now}
    inner = {field: said_now[name] for name, field in _DATA_FIELDS.items() if name in said_now}
    if given.get("columns"):
        inner["columns"] = pairs("--columns", given["columns"], "text=review")
    data["data"] = {**data.get("data", {}), **inner}
    if given.get("objective"):
        data["objectives"] = pairs("--objective", given["objective"], "hidden=1")
    if given.get("teacher_blocks"):
        data["teacher_blocks"] = [word.strip() for word in given["teacher_blocks"].split(",")]
    if given.get("gradient_checkpointing"):
        data["gradient_checkpointing"] = True
    try:
        return Finetune.model_validate(data)
    except ValidationError as error:
        raise _in_words(error) from error


def pairs(option: str, given: list[str], example: str) -> dict[str, str]:
    """Reads `name=value`, repeated or with commas between."""
    found = {}
    for word in ",".join(given).split(","):
        name, equals, value = word.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise RecipeError(
                f"`{option}` is `{word}`, expected a pair such as `{example}`",
                f"write, for example, `{option} {example}`",
            )
        found[name.strip()] = value.strip()
    return found


def default_output(model: str, settings: Finetune) -> Path:
    """Names the folder to write, such as `bert-base-lprod-p4-healed`."""
    from tcompress.source import default_output_name
    from tcompress.source.names import local_folder

    name = default_output_name(model, settings.task or "healed")
    folder = local_folder(model)
    return Path(name) if folder is None else folder.parent / name


def is_main_process() -> bool:
    """Tells whether this process talks to the user; launchers start several."""
    import os

    return os.environ.get("RANK", "0") == "0"


GRACE = 20.0
"""Seconds that the main process has to report what is wrong."""


@contextmanager
def one_voice() -> Iterator[None]:
    """Leaves it to the main process to report what all processes meet.

    Others wait for it: launchers end all processes as soon as one ends, and the first to find what
    is wrong is often not the main one. What it alone has found a process reports itself.
    """
    from tcompress.errors import InputError

    try:
        yield
    except Interrupted as error:
        if is_main_process():
            raise
        sys.exit(error.exit_code)
    except InputError:
        if not is_main_process():
            time.sleep(GRACE)
        raise


@contextmanager
def resumable(output: Path) -> Iterator[None]:
    """Says after an interruption how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        state = (
            "is written, but what comes after it is not finished"
            if (output / "config.json").is_file()
            else "was not written, but the training so far is kept"
        )
        raise Interrupted(
            f"interrupted; `{output}` {state}",
            "run the same command again: it goes on where it stopped",
        ) from error


def show_result(done: Finetuned, *, as_json: bool) -> None:
    """Prints what training did, and what to do next."""
    from tcompress.cli.job import relative
    from tcompress.cli.output import print_json, results, table, typed

    facts, name = done.facts, relative(done.folder)
    if as_json:
        record = facts.model_dump(mode="json")
        print_json({"output": str(done.folder), "resumed": done.resumed, "training": record})
        return
    screen = results()
    names = ("step", "loss", facts.validation, "learning rate", "minutes")
    rows = table(*names, right=names)
    for point in _shown(facts.curve):
        rows.add_row(
            f"{point.step:,}" + (" *" if point.step == facts.best_step else "  "),
            "" if point.loss is None else f"{point.loss:.4f}",
            "" if point.validation is None else f"{point.validation:.4f}",
            "" if point.learning_rate is None else f"{point.learning_rate:.2e}",
            f"{point.seconds / 60:.1f}",
        )
    screen.print(rows)
    screen.print(
        f"{facts.samples:,} examples of {facts.data} in {facts.seconds / 60:.1f} minutes"
        + (f", taught by {facts.teacher}" if facts.teacher else ""),
        soft_wrap=True,
    )
    screen.print(f"Wrote `{name}`, with the weights of step {facts.best_step:,}.", soft_wrap=True)
    if not facts.best_step and facts.steps:
        screen.print(_START_KEPT, soft_wrap=True)
    measured = _MEASURED_AS.get(facts.task or "", facts.task)
    following = f"tcompress evaluate {typed(name)} --task {measured} --data ..."
    screen.print(f"Next: `{following}`", soft_wrap=True)


def _shown(curve: list[Any], most: int = 12) -> list[Any]:
    """At most so many points, the first and the last among them."""
    if len(curve) <= most:
        return curve
    return [curve[round(index * (len(curve) - 1) / (most - 1))] for index in range(most)]


def _in_words(error: Any) -> RecipeError:
    """Names options, where validation names fields, and says what they take."""
    from tcompress.recipe import json_schema
    from tcompress.recipe.words import describe, inside, meant

    schema = json_schema()
    lines = []
    for item in error.errors(include_url=False):
        if item["type"] == "value_error":  # it says itself what is wrong
            lines.append(str(item["ctx"]["error"]))
            continue
        # Keys and indices inside a field come after it.
        of_data = item["loc"][0] == "data" and len(item["loc"]) > 1
        place, *steps = item["loc"][of_data:]
        fields = schema["$defs"]["TrainingData" if of_data else "Finetune"]["properties"]
        fragment = inside(fields[place], steps, schema)
        allowed = describe(fragment, schema) + meant(item["input"], fragment, schema)
        option = _FLAGS.get(place, "--" + place.replace("_", "-"))
        lines.append(f"`{option}` is `{item['input']}`, allowed is {allowed}")
    return RecipeError("; ".join(lines), "see `tcompress finetune --help`")
