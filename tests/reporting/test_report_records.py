"""What reports say of training, metrics and times."""

import json
from pathlib import Path
from typing import Any

import pytest

from tcompress.artifact.manifest import Metric
from tcompress.options.steps import PaperRow
from tcompress.reporting.console import render
from tcompress.reporting.formatting import metric_labels, value_text
from tcompress.reporting.headline import headline_of
from tcompress.reporting.model_report import report_of
from tcompress.reporting.page import render_html
from tcompress.reporting.table_rows import healed_text, published, rows_of
from tcompress.reporting.tree import ModelReport, main_metrics, main_speeds, metric_key
from tests.support.cli import shown
from tests.support.converted import converted
from tests.support.records import metric, onnx_file, record, record_dense, speed, training


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> ModelReport:
    return report_of(converted("gpt2", tmp_path_factory.mktemp("models")).folder, 16)


def test_the_manifest_is_in_the_report(tmp_path: Path) -> None:
    folder = converted("bert", tmp_path).folder
    manifest = record(folder, metrics=[metric()], training=[training()], speed=[speed()])
    report = report_of(folder)
    assert report.metrics == (metric(),)
    assert report.training == (training(),)
    assert report.speed == (speed(),)
    assert report.recipe == manifest.recipe
    assert report.environment == manifest.environment
    document = json.loads(json.dumps(report.to_json()))
    assert document["training"][0]["curve"][2]["validation"] == 0.8
    assert ModelReport.model_validate(document) == report


def test_a_dense_model_with_records(tmp_path: Path) -> None:
    converted("bert", tmp_path)
    record_dense(tmp_path / "bert", metrics=[metric(0.9, None)], training=[training()])
    report = report_of(tmp_path / "bert")
    assert (report.method, report.source, report.layers) == ("dense", "the-base", ())
    assert report.metrics[0].value == 0.9
    assert healed_text(report) == "400 steps, 2 min"
    assert "trained 400 steps, 2 min" in " ".join(shown(render([report])).split())


def test_healing_that_found_nothing_better_is_called_so(tmp_path: Path) -> None:
    folder = converted("bert", tmp_path).folder
    for facts in ({"best_step": 0}, {"share": 0.0}):
        record(folder, training=[training(**facts)])
        assert healed_text(report_of(folder)) == "no (400 steps tried, none better)"
    record(folder, training=[training(), training(best_step=0)])
    assert healed_text(report_of(folder)) == "yes, 400 steps, 2 min"


def test_metrics_of_one_name_are_told_apart() -> None:
    def made(**protocol: str) -> Metric:
        return Metric(name="f1", value=1.0, protocol=protocol)

    labels = metric_labels([made(task="a", data="x"), made(task="a", data="y"), made(task="b")])
    assert labels == ["f1, a, x", "f1, a, y", "f1, b"]
    assert metric_labels([made(), made()]) == ["f1", "f1, 2"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.8672, "0.8672"), (1.81, "1.810"), (12.3456, "12.35"), (30452.1, "30,452")],
)
def test_values_have_four_digits(value: float, text: str) -> None:
    assert value_text(value) == text


def test_what_stands_for_several_models(bare: ModelReport) -> None:
    rare = metric(0.1, None, name="loss")
    one = bare.model_copy(update={"metrics": (rare, metric()), "speed": (speed(1), speed(8))})
    two = bare.model_copy(update={"metrics": (metric(0.7),), "speed": (speed(1), speed(8))})
    assert main_metrics([one, two, bare]) == [metric(), metric(0.7), None]
    assert main_speeds([one, two, bare]) == [speed(8), speed(8), None]
    longer = speed(64, phase="decode", cache="dynamic")
    both = bare.model_copy(update={"speed": (speed(1), longer)})
    assert main_speeds([both]) == [speed(1)]


def test_a_baseline_that_is_not_the_dense_model_is_named(bare: ModelReport) -> None:
    for name in ("elsewhere/rival", bare.name):  # the latter are its weights in PyTorch
        rival = metric().difference.model_copy(update={"baseline": name})
        shown = bare.model_copy(update={"metrics": (metric(difference=rival),)})
        assert f"accuracy, against {Path(name).name}" in [row.label for row in rows_of(shown)]


def test_lines_side_by_side_have_labels_of_their_own(bare: ModelReport) -> None:
    numbers = [metric(), metric(0.7, name="f1")]
    file = onnx_file(8, 9_100).model_copy(update={"metrics": numbers})
    protocols = [{"device": "cpu", "new_tokens": count} for count in (32, 512)]
    steps = [speed(1, phase="decode", cache="dynamic", protocol=facts) for facts in protocols]
    report = bare.model_copy(update={"metrics": tuple(numbers), "exports": (file,), "speed": steps})
    labels = [row.label for row in rows_of(report, [report])]
    assert len({*labels}) == len(labels)
    assert {"  f1 of int8 file", "decode B=1 T=32 + 512"} <= {*labels}


def test_files_are_compared_by_one_number(bare: ModelReport) -> None:
    file = onnx_file(8, 9_100).model_copy(update={"metrics": [metric(0.99, name="f1")]})
    fields = ({"metrics": (metric(),)}, {"exports": (file,)})
    reports = [bare.model_copy(update=own) for own in fields]
    assert headline_of(reports, ["one", "two"]).model == 0


def test_numbers_of_other_examples_are_not_compared(bare: ModelReport) -> None:
    kinds: tuple[dict[str, Any], ...] = ({"data_fingerprint": "b"}, {"max_length": 64})
    for change in kinds:
        one, two = metric(), metric()
        two = two.model_copy(update={"protocol": {**two.protocol, **change}})
        assert metric_key(one) != metric_key(two)
        shown = [bare.model_copy(update={"metrics": (item,)}) for item in (one, two)]
        one_label, two_label = (
            next(row.label for row in rows_of(item, shown) if row.value == "0.8500")
            for item in shown
        )
        assert one_label != two_label


# Several sets


def on(data: str, value: float = 0.85, name: str = "accuracy", **more: Any) -> Metric:
    facts = {"task": "classification", "data": f"{data}.csv:text,label", "data_fingerprint": data}
    own = metric(value, None if name == "agreement" else 0.9, name=name)
    return own.model_copy(update={"protocol": {**facts, **more}})


def test_several_sets_have_a_mean(bare: ModelReport) -> None:
    numbers = [on("a/x", 0.8), on("a/x", 0.7, "agreement"), on("b/x", 0.6), on("b/x", 0.9, "f1")]
    both = bare.model_copy(update={"metrics": tuple(numbers)})
    labels = [row.label for row in rows_of(both)]
    mean = labels.index("mean accuracy of 2 sets")
    for label in ("accuracy, a/x", "accuracy, b/x", "agreement", "f1"):
        assert labels.index(label) < mean
    row = rows_of(both)[mean]
    assert (row.value, row.dense, row.kept) == ("0.7000", "0.9000", "0.778×")
    page, console = render_html([both]), shown(render([both]))
    for text in ("mean accuracy of 2 sets", "accuracy, b/x", "agreement"):
        assert text in page.partition("</table>")[0]  # the summary
    one = bare.model_copy(update={"metrics": (on("a/x"),)})
    for found in (page, console):
        assert "Measured on one set" not in found
    for found in (render_html([one]), shown(render([one]))):
        assert "Measured on one set" in found


def test_means_are_over_the_sets_that_models_share(bare: ModelReport) -> None:
    three = bare.model_copy(update={"metrics": (on("a"), on("b", 0.6), on("c", 0.1))})
    two = bare.model_copy(update={"metrics": (on("a", 0.7), on("b", 0.5))})
    first, second = main_metrics([three, two])
    assert (first.value, second.value) == (pytest.approx(0.725), pytest.approx(0.6))
    (alone,) = main_metrics([three])
    assert alone.label == "mean accuracy of 3 sets"


def test_of_a_set_the_newest_examples_count(bare: ModelReport) -> None:
    fewer = on("a", 0.2, data_fingerprint="less")
    report = bare.model_copy(update={"metrics": (fewer, on("a"), on("b", 0.75))})
    (mean,) = main_metrics([report])
    assert mean.value == pytest.approx(0.8)
    once = bare.model_copy(update={"metrics": (fewer, on("a"))})
    assert main_metrics([once]) == [on("a")]
    assert main_metrics([once, bare.model_copy(update={"metrics": (fewer,)})]) == [fewer, fewer]


def test_agreement_with_another_model_is_named(bare: ModelReport) -> None:
    for name, label in (("elsewhere/rival", "agreement, against rival"), ("gpt2", "agreement")):
        shown = bare.model_copy(update={"metrics": (on("a", 0.9, "agreement", baseline=name),)})
        assert label in [row.label for row in rows_of(shown)]


# Published numbers, beside those of the model that they are about


STD = {"row": "Std", "metric": "accuracy", "value": 91.4, "source": "Table 8", "why": "fewer rows"}
SLICED = {**STD, "row": "T4", "value": 90.76}


def cites(report: ModelReport, *rows: dict[str, object], **more: object) -> ModelReport:
    paper = tuple(PaperRow.model_validate(row) for row in rows)
    return report.model_copy(update={"paper": paper, **more})


def test_only_a_recipes_own_rows_get_its_number(bare: ModelReport) -> None:
    model = cites(bare, {**STD, "ours": False}, SLICED, metrics=(metric(0.85),))
    std, sliced = published([model])
    assert (std.row, std.paper, std.ours) == ("Std", "91.4", "")
    assert (sliced.row, sliced.paper, sliced.ours) == ("T4", "90.76", "85.00")
    assert std.comparable == "no: fewer rows"


def test_models_side_by_side_share_a_table(bare: ModelReport) -> None:
    sliced = cites(bare, {**STD, "ours": False}, SLICED, metrics=(metric(0.85),))
    dense = cites(bare, STD, {**SLICED, "ours": False}, metrics=(metric(0.9),))
    for order in ([sliced, dense], [dense, sliced]):
        assert {row.row: row.ours for row in published(order)} == {"Std": "90.00", "T4": "85.00"}


def test_several_models_of_a_row_are_named_or_averaged(bare: ModelReport) -> None:
    mse = {**STD, "metric": "mse", "value": 0.25}
    for mean, ours in ((False, "one 0.2000; two 0.4000"), (True, "0.3000, mean of 2")):
        row = {**mse, "mean": mean}
        one = cites(bare, row, name="runs/one", metrics=(metric(0.2, name="mse"),))
        two = cites(bare, row, name="runs/two", metrics=(metric(0.4, name="mse"),))
        alone = cites(bare, row, name="runs/three")
        (found,) = published([one, two, alone])
        assert found.ours == ours


def test_of_several_sets_the_last_is_named(bare: ModelReport) -> None:
    (row,) = published([cites(bare, SLICED, metrics=(on("training", 0.9), on("paper")))])
    assert row.ours == "85.00 on paper.csv:text,label"


def test_fractions_stay_fractions_and_unmeasured_rows_empty(bare: ModelReport) -> None:
    mse = {**STD, "metric": "mse", "value": 0.25, "comparable": True, "why": None}
    model = cites(bare, mse, STD, metrics=(metric(0.3, name="mse"),))
    assert [(row.ours, row.comparable) for row in published([model])] == [
        ("0.3000", "yes"),
        ("", "no: fewer rows"),
    ]


def test_the_page_has_them(bare: ModelReport) -> None:
    page = render_html([cites(bare, SLICED, metrics=(metric(0.85),))])
    assert "Published numbers" in page
    assert '<td class="number">90.76</td><td class="number">85.00</td>' in page
    assert "Published numbers" not in render_html([bare])
