"""Published numbers, beside those of the model that they are about."""

from __future__ import annotations

import pytest

from tcompress.options.steps import PaperRow
from tcompress.reporting.model_report import report_of
from tcompress.reporting.page import render_html
from tcompress.reporting.table_rows import published
from tcompress.reporting.tree import ModelReport
from tests.support.cli import run
from tests.support.converted import converted
from tests.support.records import metric

STD = {"row": "Std", "metric": "accuracy", "value": 91.4, "source": "Table 8", "why": "fewer rows"}
SLICED = {**STD, "row": "T4", "value": 90.76}


def cites(report: ModelReport, *rows: dict[str, object], **more: object) -> ModelReport:
    paper = tuple(PaperRow.model_validate(row) for row in rows)
    return report.model_copy(update={"paper": paper, **more})


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> ModelReport:
    folder = tmp_path_factory.mktemp("models")
    converted("gpt2", folder)
    return report_of(folder / "gpt2-small", 16)


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


def test_a_number_of_another_model_is_said_so_in_a_recipe() -> None:
    shown = run("recipes", "show", "scratch/ag-news-lprod").out
    assert "ours: false" in shown.split('row: "Std, d=256"')[1].split("row:")[0]
