"""The recipes that train from scratch: every variant, tiny, from nothing to a report."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tcompress.artifact.manifest import read_manifest
from tcompress.options import choose_variants, parse_recipe
from tcompress.options.library import recipe_names, recipe_text
from tcompress.reporting.formatting import value_text
from tests.support.cli import completed, run, worked
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


def _changes(name: str, folder: Path, rows: int = 7600) -> list[str]:
    """Options that set tiny sizes and data in place of a recipe's own."""
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
        file = series_file(folder / "series.csv", rows, "abcdefg")
        sizes = GRID
    elif name == "tweetqa-tam":
        texts, sizes = sentences(36), TAM
        columns = {"Tweet": texts[:12], "Question": texts[12:24], "Answer": texts[24:]}
        file = rows_file(folder / "rows.jsonl", **columns)
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
    return [f"--set={it}" for it in said]


def _pretraining(folder: Path) -> list[str]:
    """The same for what comes before."""
    source = f"[{folder / 'rows.jsonl'}]"
    return [f"--set=pretrain.data.source={source}", "--set=pretrain.steps=2"]


@pytest.mark.usefixtures("own_folder")
@pytest.mark.often("r8-tsa", "tweetqa-tam without-fusing")
@pytest.mark.parametrize("case", [*_cases()])
def test_a_variant_runs(case: str, tmp_path: Path) -> None:
    name, *variants = case.split()
    recipe = choose_variants(parse_recipe(recipe_text(f"scratch/{name}"), name), variants)
    said = _changes(name, tmp_path)
    if recipe.pretrain is not None:
        said += _pretraining(tmp_path)
    chosen = [f"--variant={variant}" for variant in variants]
    done = completed("run", f"scratch/{name}", *chosen, *said, "--json", "-q")
    (report,) = done.document["reports"]
    assert bool(report["layers"]) == (recipe.convert.method is not None)
    assert bool(report["attention"]) == (recipe.convert.attention is not None)
    measured = {metric["name"] for metric in report["metrics"]}
    assert {row.metric for row in recipe.paper} <= measured
    if recipe.pretrain is not None:
        manifest = read_manifest(tmp_path / recipe.output)
        assert manifest is not None
        assert [item.task for item in manifest.training] == ["pretraining", "response-selection"]
        losses = [point.validation for point in manifest.training[0].curve]
        assert manifest.training[0].best == min(losses) < losses[0]


@pytest.mark.usefixtures("own_folder")
@pytest.mark.often("etth1-hot-paper", "weather-hot-paper,along-time", "adrenal-hot-paper")
@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("etth1-hot", "paper"),
        ("weather-hot", "paper,along-time"),
        ("weather-hot", "paper,along-variables"),
        ("weather-hot", "paper,without-attention"),
        ("adrenal-hot", "paper"),
    ],
)
def test_a_variant_of_a_grid_is_reported(name: str, variants: str, tmp_path: Path) -> None:
    """With 1200 rows, long enough for a horizon of 96 in every part."""
    chosen = [f"--variant={variant}" for variant in variants.split(",")]
    completed("run", f"scratch/{name}", *chosen, *_changes(name, tmp_path, rows=1200), "-q")
    folder = f"{name}-{variants.replace(',', '-')}"
    report = worked("report", folder)
    if name == "adrenal-hot":
        assert "auc" in report.out
        return
    protocol = worked("report", folder, "--json").document["reports"][0]["metrics"][0]["protocol"]
    shown = (*report.lines, *worked("report", folder, folder, columns=160).lines)
    for label, errors in protocol["naive"].items():
        for measure, value in errors.items():
            lines = [line for line in shown if line.startswith(f"{measure} of {label} (no model)")]
            assert [line.split()[-1] for line in lines] == [value_text(value)] * 2
    page = tmp_path / "page.html"
    worked("report", folder, "--html", page)
    assert "mae of context mean (no model)" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("convert.attention.axes=[0,1,2,3]", "names `2`, `3`, and a grid of 7 x 6 has 2 axes"),
        ("architecture.rotary_axes=[2]", "cannot rotate heads of width 4 over 2 axes; name each"),
    ],
)
def test_axes_that_are_not_there_are_named(change: str, words: str, tmp_path: Path) -> None:
    said = (*_changes("etth1-hot", tmp_path), "--set=architecture.positions=rotary")
    done = run("run", "scratch/etth1-hot", *said, f"--set={change}", "--dry-run", "-q")
    assert done.code == 2
    assert sum(words in line for line in done.err.splitlines()) == 1


def test_a_recipe_pretrains_trains_measures_and_draws(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    said = [*_changes("tweetqa-tam", tmp_path), *_pretraining(tmp_path)]
    said += ["--set=architecture.attention_size=8", f"--set=report={page}"]
    output = tmp_path / "out"
    command = ("run", "scratch/tweetqa-tam", "--variant", "smoke", "-o", output, *said)
    completed(*command)
    manifest = read_manifest(output)
    assert manifest is not None
    assert {"recall@1", "recall@5"} <= {metric.name for metric in manifest.metrics}
    shown = manifest.attention_map
    assert shown is not None
    assert shown.rows[0] == "[CLS]"
    assert len(shown.rows) < len(shown.columns)
    text = page.read_text()
    assert "What attention looks at" in text
    assert "weights of queries (rows) and keys (columns)" in text
    before = json.loads((tmp_path / "out-pretrained" / "config.json").read_text())
    assert before["architectures"] == ["TCompressTamForPreTraining"]
    again = completed(*command)
    assert "is already trained" in again.err + again.out


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("{text: Tweet, pair: Answer}", "reads three texts (query, response, semantics), and"),
        ("{text: Tweet, pair: Answer, semantics: Topic}", "has no column `Topic`"),
    ],
)
def test_data_without_the_third_text_is_refused_before_any_work(
    columns: str, words: str, tmp_path: Path
) -> None:
    said = [*_changes("tweetqa-tam", tmp_path), *_pretraining(tmp_path)]
    said += [f"--set=pretrain.data.columns={columns}"]
    done = run("run", "scratch/tweetqa-tam", "-o", tmp_path / "out", *said)
    assert done.code == 2
    assert words in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]
