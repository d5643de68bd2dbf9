"""Variants of a recipe of models that begin at random: each is trained, and all are compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

import tcompress
from tcompress.files import check_page, write_text
from tcompress.options import Recipe, choose_variants
from tcompress.pipeline import Say, run_recipe
from tcompress.planning.planner import make_plan
from tcompress.progress import Progress, Silent
from tcompress.reporting import formatting as fmt
from tcompress.reporting.page import write_html
from tcompress.reporting.tree import ModelReport

Open = Callable[[Recipe], Any]
"""Opens the untrained model of a recipe."""


@dataclass(frozen=True)
class Variants:
    """Trained models by name, in the order of the recipe, and where they are compared."""

    folder: Path
    page: Path
    reports: dict[str, ModelReport]
    missed: dict[str, tuple[str, ...]]
    """Thresholds that models missed, in words."""

    def to_json(self) -> dict[str, Any]:
        """Return sizes and numbers of all as plain data."""
        return {
            "tool_version": tcompress.__version__,
            "output": str(self.folder),
            "html": str(self.page),
            "models": [
                {
                    "name": name,
                    "blocks": report.parameters.blocks.now,
                    "parameters": report.parameters.total.now,
                    "metrics": [metric.model_dump(mode="json") for metric in report.metrics],
                    "missed": list(self.missed[name]),
                }
                for name, report in self.reports.items()
            ],
        }


def variants_of(recipe: Recipe, origin: str = "recipe") -> dict[str, Recipe]:
    """List the recipes that a recipe with `sweep.variants` compares, by name."""
    sweep = recipe.sweep
    assert sweep is not None
    plain = recipe.model_copy(update={"sweep": None, "report": None})
    chosen = {}
    for text in sweep.variants:
        names = [name for part in text.split("+") if (name := part.strip())]
        chosen["-".join(names)] = choose_variants(plain, names, origin)
    return chosen


def sizes_of(chosen: Mapping[str, Recipe], open_model: Open) -> dict[str, int]:
    """Count the parameters that the models of recipes will have, by name."""
    sizes = {}
    for name, recipe in chosen.items():
        plan = make_plan(recipe.convert, open_model(recipe))
        sizes[name] = plan.parameters - plan.saved
    return sizes


def sizes_table(sizes: Mapping[str, int]) -> RenderableType:
    """Render the parameters that models will have."""
    rows = [(name, f"{size:,}") for name, size in sizes.items()]
    return fmt.table("model", "parameters", right=("parameters",), rows=rows)


def sweep_variants(
    recipe: Recipe,
    open_model: Open,
    folder: Path,
    *,
    origin: str = "recipe",
    force: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> Variants:
    """Train and measure each variant in a folder of its own; what is finished is not done again."""
    chosen, folder = variants_of(recipe, origin), Path(folder).expanduser().absolute()
    page = Path(recipe.report or folder / "sweep.html").expanduser()
    if recipe.report is not None:
        check_page(page)
    compared, heard = Variants(folder, page, {}, {}), progress or Silent()
    for number, (name, variant) in enumerate(chosen.items(), 1):
        heard.part(name, number, len(chosen))
        done: dict[str, Any] = {"force": force, "again": force, "token": token}
        done |= {"progress": heard, "say": say}
        outcome = run_recipe(variant, open_model(variant), folder / name, **done)
        compared.reports[name] = outcome.reports[-1].model_copy(update={"name": name})
        compared.missed[name] = tuple(outcome.missed)
        text = json.dumps({"schema": 1, **compared.to_json()}, indent=2, ensure_ascii=False)
        write_text(folder / "sweep.json", text)  # it can be looked at while others are in work
        write_html([*compared.reports.values()], page)
    return compared


def variants_table(compared: Variants) -> RenderableType:
    """Render what each model takes, and what it reaches."""
    measured = next(iter(compared.reports.values())).metrics
    labels = fmt.metric_labels(measured)
    columns = ("in blocks", "parameters", *labels)
    rows = []
    for name, report in compared.reports.items():
        sizes = (report.parameters.blocks.now, report.parameters.total.now)
        numbers = (fmt.around_text(metric.value, metric.interval) for metric in report.metrics)
        rows.append((name, *(f"{size:,}" for size in sizes), *numbers))
    return fmt.table("model", *columns, right=columns, rows=rows)
