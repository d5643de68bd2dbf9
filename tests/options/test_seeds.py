"""Runs and sweeps with several seeds: what is repeated, what is kept, and what tables show."""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import yaml

from tcompress.options import Recipe
from tcompress.options.load import repetitions
from tcompress.reporting.formatting import deviation_text, value_text
from tests.support.cli import completed, run
from tests.support.evaluation import labelled_file
from tests.support.scratch import BERT, LPROD
from tests.support.sweeps import (  # noqa: F401 - fixtures
    HEAL,
    quick,
    recipe,
    sweep_folder,
    sweep_models,
)
from tests.support.sweeps import run as swept


def test_everything_but_measurements_has_another_seed() -> None:
    said = recipe(convert={"calibration": {"source": "builtin", "seed": 5}}, finetune=HEAL)
    said = said.model_copy(update={"sweep": None, "output": "out", "name": "small"})
    made = repetitions(said, 3)
    assert [seed for seed, _ in made] == [0, 1, 2]
    _, last = made[-1]
    assert (last.finetune.seed, last.convert.calibration.seed) == (2, 7)
    assert (last.output, last.name) == ("out-seed-2", "small-seed-2")
    assert last.evaluate == said.evaluate
    assert last.convert.seed == said.convert.seed  # no weights are drawn
    assert made[0][1].convert == said.convert
    lprod = {"method": {"name": "lprod", "p": 2, "transform": "random", "seed": 3}}
    drawn = said.model_copy(update={"convert": recipe(convert=lprod).convert, "finetune": None})
    assert [(seed, made.convert.method.seed) for seed, made in repetitions(drawn, 2)] == [
        (3, 3), (4, 4),
    ]  # fmt: skip


def _scratch(**changes: Any) -> None:
    data = {"source": ["rows.jsonl"], "max_length": 16, "holdout": 0.2}
    said = {
        "recipe_version": 1,
        "architecture": {**BERT, "vocab_size": 100, "tokenizer": {"words": "builtin", "size": 100}},
        "output": "made",
        "convert": {"init": "random", "seed": 42, "method": LPROD},
        "finetune": {"task": "classification", "data": data, "steps": 2, "batch_size": 4},
        "evaluate": [{"task": "classification", "data": "rows.jsonl", "bootstrap": 0}],
        "paper": [{"row": "Std", "metric": "accuracy", "value": 91.4, "deviation": 0.31,
                   "source": "Table 8", "why": "fewer rows"}],
        **changes,
    }  # fmt: skip
    labelled_file(Path("rows.jsonl"))
    Path("r.yaml").write_text(yaml.safe_dump(said))


def test_a_run_with_seeds_keeps_each_and_shows_their_mean(
    own_folder: None, one_thread: None
) -> None:
    _scratch()
    done = completed("run", "r.yaml", "--seeds", 2, "--quiet", columns=160)
    assert done.lines[-2:] == ["Wrote `made-seed-42`.", "Wrote `made-seed-43`."]
    again = run("run", "r.yaml", "--seeds", 2, "--json", "-q")
    assert again.document["runs"][1]["skipped"] == ["convert", "finetune"]
    (group,) = again.document["seeds"]
    assert group["seeds"] == [42, 43]
    number = next(item for item in group["numbers"] if item["name"] == "accuracy")
    assert number["mean"] == pytest.approx(fmean(number["values"]))
    assert number["deviation"] == pytest.approx(stdev(number["values"]))
    text = f"{100 * number['mean']:#.4g} ± {100 * number['deviation']:.2f} of 2 seeds"
    row = next(line for line in done.lines if line.startswith("Std "))
    assert all(part in row for part in ("91.4 ± 0.31", "Table 8", "no: fewer rows", text)), row
    both = ("made-seed-42", "made-seed-43")
    shown = run("report", *both, columns=160).out
    assert text in shown
    assert "made, 2 seeds" in shown
    assert run("report", *both, "--html", "page.html").code == 0
    page = Path("page.html").read_text("utf-8").partition("<h3>made, 2 seeds</h3>")[2]
    cells = [
        deviation_text(number["mean"], number["deviation"]),
        *map(value_text, number["values"]),
    ]
    row = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    assert f'<tr><th scope="row">accuracy</th>{row}</tr>' in page.partition("</table>")[0]
    weights = [Path(f"made-seed-{seed}/model.safetensors").read_bytes() for seed in (42, 43)]
    assert weights[0] != weights[1]


def test_a_seed_is_needed_to_be_of_use_before_any_work(own_folder: None) -> None:
    plain = {"method": "svd", "target": 0.5, "calibration": {"source": "none"}}
    _scratch(architecture=None, model="nowhere", convert=plain, finetune=None)
    done = run("run", "r.yaml", "--seeds", 3)
    assert done.code == 2
    assert "`--seeds 3` repeats what depends on chance, and nothing of this does" in done.err


@pytest.mark.usefixtures("sweep_folder", "quick")
def test_a_sweep_with_seeds_compares_means() -> None:
    said: Recipe = recipe(["svd"], [0.5], finetune=HEAL)
    done = swept(said, seeds=2)
    row = next(row for row in done.front.rows if row.name == "svd-50")
    assert len(row.values) == 2
    assert row.quality == pytest.approx(fmean(row.values))
    assert row.deviation == pytest.approx(stdev(row.values))
    assert row.interval is None
    names = ["svd-50-seed-0", "svd-50-seed-1"]
    assert [item.cell.name for item in done.cells] == names
    assert all(Path("out", f"{name}-healed", "config.json").is_file() for name in names)
    kept = json.loads(Path("out/sweep.json").read_text())
    assert [cell["name"] for cell in kept["cells"]] == names
    said_again: list[str] = []
    swept(said, seeds=3, say=said_again.append)
    assert said_again[:2] == [f"`{name}` is already done" for name in names]
