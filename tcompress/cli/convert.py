"""`tcompress convert`."""

from __future__ import annotations

from pathlib import Path

from tcompress.cli.job import Job, default_output, perform, show_plan
from tcompress.options.commands import (
    MODEL,
    REPORT,
    Access,
    Converted,
    Manner,
    OneModel,
    Planned,
    Written,
)
from tcompress.options.convert import BLOCKS, FIT, GOAL, METHOD, OUTPUT, SCRATCH, Convert
from tcompress.options.read import Given

EXAMPLES = (
    "tcompress convert bert-base --method lprod --p 4",
    "tcompress convert minilm --method svd --target 0.25 --calib train.csv -o small",
    "tcompress convert minilm --method auto --target 0.25",
    "tcompress convert bert-base --method svd --target 0.5 --drop-layers 6",
    "tcompress convert vit-base --method hot --structure lprod --p 4",
    "tcompress convert ./my-model --recipe encoder/minilm-lprod --calib none",
)

SETTINGS = {"panels": (GOAL, METHOD, "Data", OUTPUT, REPORT, MODEL, BLOCKS, SCRATCH, FIT)}


def convert(
    one: OneModel,
    written: Written,
    said: Given[Convert],
    call: Converted,
    planned: Planned,
    access: Access,
    manner: Manner,
) -> None:
    """Does what `tcompress convert` says."""
    from tcompress.options import find_recipe, parse_recipe
    from tcompress.options.choose import conversion

    recipe = parse_recipe(*find_recipe(call.recipe)) if call.recipe is not None else None
    settings = conversion(said.values(), recipe, structure=call.structure, typed=said)
    folder = written.output or (recipe and recipe.output)
    job = Job(
        model=one.model,
        convert=settings,
        output=Path(folder or default_output(one.model, settings)),
        force=written.force,
        access=access,
        manner=manner,
    )
    show_plan(job) if planned.dry_run else perform(job)
