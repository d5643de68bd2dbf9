"""Every variant of the recipes that train from scratch, tiny, from nothing to a report."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tcompress.options import choose_variants, parse_recipe
from tcompress.options.library import recipe_names, recipe_text
from tests.support.cli import run
from tests.support.evaluation import labelled_file, rows_file
from tests.support.grids import archive_file, series_file
from tests.support.model_folders import sentences
from tests.support.tiny import VOLUME

ELSEWHERE = ("copy-lprod", "r8-sizes")  # with tests of their own
BERT = ("hidden_size=32", "num_hidden_layers=1", "intermediate_size=64")
SMALL = ("r8-tsa", "newsgroups-tga")  # as they are
TAM = ("hidden_size=12", "num_hidden_layers=1", "intermediate_size=16")
GRID = ("hidden_size=16", "input_size=[7, 96]")
VOLUMES = ("hidden_size=32", f"input_size={list(VOLUME)}")


def _cases() -> Iterator[str]:
    for name in recipe_names():
        folder, _, own = name.partition("/")
        if folder == "scratch" and own not in ELSEWHERE:
            yield own
            for variant in parse_recipe(recipe_text(name), name).variants:
                if variant not in ("full", "smoke"):  # of these the schedule alone is another
                    yield f"{own} {variant}"


def _changes(name: str, folder: Path) -> list[str]:
    """Tiny sizes and data in place of a recipe's own."""
    said = [
        "finetune.steps=2",
        "finetune.batch_size=4",
        "finetune.device=cpu",
        "evaluate.0.limit=11",
    ]
    if name == "adrenal-hot":
        file, sizes = archive_file(folder / "volumes.npz"), VOLUMES
        said += [f"finetune.data.validation={file}"]
    elif name.endswith("-hot"):
        file = series_file(folder / "series.csv", 7600, "abcdefg")
        sizes = GRID
    elif name == "tweetqa-tam":
        texts, sizes = sentences(36), TAM
        rows = {"Tweet": texts[:12], "Question": texts[12:24], "Answer": texts[24:]}
        file = rows_file(folder / "rows.jsonl", **rows)
    else:
        file = labelled_file(folder / "rows.jsonl")
        sizes = () if name in SMALL else BERT
        said += ["architecture.num_labels=2", "finetune.data.holdout=0.2"]
    said += [f"finetune.data.source=[{file}]", f"evaluate.0.data={file}"]
    said += [f"architecture.{size}" for size in sizes]
    if not name.endswith("-hot"):
        said += [f"architecture.tokenizer={{words: {file}, size: 60}}"]
    if name in SMALL:
        said += [f"evaluate.1.data={file}", "evaluate.1.limit=11"]
    return said


@pytest.mark.often("r8-tsa", "tweetqa-tam without-fusing")
@pytest.mark.parametrize("case", [*_cases()])
def test_a_variant_runs(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, *variants = case.split()
    recipe = choose_variants(parse_recipe(recipe_text(f"scratch/{name}"), name), variants)
    said = _changes(name, tmp_path)
    if recipe.pretrain is not None:
        said += [f"pretrain.data.source=[{tmp_path / 'rows.jsonl'}]", "pretrain.steps=2"]
    chosen = [f"--variant={variant}" for variant in variants]
    done = run("run", f"scratch/{name}", *chosen, *(f"--set={it}" for it in said), "--json", "-q")
    assert done.code == 0, done.err
    (report,) = done.document["reports"]
    assert bool(report["layers"]) == (recipe.convert.method is not None)
    assert bool(report["attention"]) == (recipe.convert.attention is not None)
    measured = {metric["name"] for metric in report["metrics"]}
    assert {row.metric for row in recipe.paper} <= measured


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("convert.attention.axes=[0,1,2,3]", "names `2`, `3`, and a grid of 7 x 6 has 2 axes"),
        ("architecture.rotary_axes=[2]", "cannot rotate heads of width 4 over 2 axes; name each"),
    ],
)
def test_axes_that_are_not_there_are_named(change: str, words: str, tmp_path: Path) -> None:
    said = (*_changes("etth1-hot", tmp_path), "architecture.positions=rotary", change)
    done = run("run", "scratch/etth1-hot", *(f"--set={it}" for it in said), "--dry-run", "-q")
    assert done.code == 2
    assert sum(words in line for line in done.err.splitlines()) == 1
