"""Tables in files, and pictures that stand alone."""

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tcompress.files import check_drawings
from tcompress.reporting.model_report import report_of
from tcompress.reporting.overview_charts import all_pictures, shown_models
from tcompress.reporting.pareto import Candidate, front_of, front_printed
from tcompress.reporting.table_files import (
    Printed,
    csv_text,
    escaped,
    front_sheet,
    latex_text,
    metrics_sheet,
    metrics_table,
    report_sheet,
    report_table,
    write_figures,
)
from tcompress.reporting.table_rows import Cell, rows_of
from tcompress.reporting.tree import ModelReport, other_baseline
from tests.support.cli import run, worked
from tests.support.converted import converted
from tests.support.records import metric, onnx_file, record, speed, training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = converted("gpt2", tmp_path_factory.mktemp("models")).folder
    record(folder, metrics=[metric()], speed=[speed()], training=[training()])
    return folder


@pytest.fixture
def report(folder: Path) -> ModelReport:
    return report_of(folder, 16)


def test_the_dense_model_gets_no_number_of_another_baseline(report: ModelReport) -> None:
    rival = metric().difference.model_copy(update={"baseline": "rival"})
    number = metric(difference=rival)
    file = onnx_file(8, 9_100).model_copy(update={"metrics": [number]})
    shown = report.model_copy(update={"metrics": (number,), "exports": (file,)})
    assert "0.9000" not in latex_text(report_table([shown]))
    assert "0.944" not in latex_text(report_table([shown]))
    rows = csv.DictReader(csv_text(report_sheet([shown])).splitlines())
    told = [(row["dense"], row["ratio"]) for row in rows if row["quantity"] == "accuracy"]
    assert told == [("", "")] * 2
    assert not any("rival" in item.svg for item in all_pictures(shown_models([shown])))


@pytest.mark.parametrize("name", ["gpt2", "a/gpt2", "c/models--ai--gpt2/snapshots/0f3e", "b/rival"])
def test_the_dense_model_is_known_by_any_of_its_names(name: str, report: ModelReport) -> None:
    beside = metric().difference.model_copy(update={"baseline": name})
    other = other_baseline(report, metric(difference=beside))
    assert other == ("rival" if "rival" in name else None)


def test_csv_has_every_number(report: ModelReport) -> None:
    rows = list(csv.DictReader(csv_text(report_sheet([report])).splitlines()))
    by_name = {row["quantity"]: row for row in rows}
    total = report.parameters.total
    assert by_name["parameters"]["value"] == str(total.now)
    assert float(by_name["parameters"]["ratio"]) == total.kept
    accuracy = by_name["accuracy"]
    assert (accuracy["value"], accuracy["dense"], accuracy["of"]) == ("0.85", "0.9", "sst2")
    assert float(accuracy["difference_low"]) == pytest.approx(-0.06)
    assert (by_name["milliseconds"]["value"], by_name["milliseconds"]["ratio"]) == ("5.0", "2.0")
    assert {row["model"] for row in rows} == {"gpt2-small"}


def test_latex_is_escaped_and_has_intervals(report: ModelReport) -> None:
    named = report.model_copy(update={"name": "a_b & 50%"})
    lines = latex_text(report_table([named])).splitlines()
    head, dense, own = (line.strip() for line in (lines[3], *lines[5:7]))
    assert head.startswith("model & bytes & of dense & accuracy & of dense & time")
    assert dense.startswith(r"dense & 89.6 kB &  & 0.9000 &  & 10.0 ms &")
    assert own.startswith(r"a\_b \& 50\% & 44.2 kB & 49.3\% & 0.8500 {\small [0.8300, 0.8700]}")
    assert own.endswith(r"0.944$\times$ & 5.00 ms & 2.00$\times$ \\")
    assert lines[2].strip() == r"\toprule"


def test_both_stand_in_the_table_at_int8(report: ModelReport) -> None:
    ours = speed(mode="onnx-int8", milliseconds=2.0, ratio=5.0, same_runtime_milliseconds=4.0)
    facts = {"dense_exports": (onnx_file(8, 23_300),), "exports": (onnx_file(8, 9_100),)}
    both = report.model_copy(update={**facts, "speed": (speed(), ours)})
    rows = [[cell.value for cell in row] for row in report_table([both]).rows]
    assert rows[1] == ["dense, int8", "23.3 kB", "", "", "", "4.00 ms", "2.50×"]
    assert rows[3] == ["gpt2-small, int8", "9.1 kB", "10.2%", "", "", "2.00 ms", "5.00×"]
    (line,) = (row for row in rows_of(both) if row.label == "bytes of int8 file")
    assert (line.value, line.dense) == ("9.1 kB", "23.3 kB")


def test_every_character_that_latex_reads_is_escaped() -> None:
    assert escaped("\\{x}~^\n&%$#_") == (
        r"\textbackslash{}\{x\}\textasciitilde{}\textasciicircum{} \&\%\$\#\_"
    )
    table = Printed(("a", "b"), ((Cell("x", "n_1"), Cell("−0.1")),))
    assert r"x {\small n\_1} & $-$0.1 \\" in latex_text(table)


def test_tables_of_measurements_and_of_sweeps(report: ModelReport) -> None:
    scores = [("big", [metric(0.9, None)]), ("small", [metric()])]
    sheet = metrics_sheet(scores)
    assert [row[:4] for row in sheet.rows] == [
        ("big", "accuracy", "sst2", 0.9), ("small", "accuracy", "sst2", 0.85),
    ]  # fmt: skip
    printed = metrics_table(scores)
    assert printed.rows[1][3] == Cell("−0.0500", "[−0.0600, −0.0400]")
    front = front_of([Candidate("dense", report), Candidate("a", report, metric(0.8))])
    assert len(front_sheet(front).rows) == 2
    columns, rows = front_printed(front)
    assert rows[0][columns.index("accuracy")] == Cell("0.8500", "[0.830, 0.870]")


def test_pictures_stand_alone(report: ModelReport, tmp_path: Path) -> None:
    written = write_figures([report], tmp_path / "drawn")
    names = [path.name.partition("-")[0] for path in written]
    assert names == ["quality", "quality", "layers", "training", "training"]
    for path in written:
        text = path.read_text(encoding="utf-8")
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert float(root.attrib["width"]) > 0
        assert "var(" not in text
        assert "class=" not in text
        assert {item.attrib["fill"] for item in root.iter() if "fill" in item.attrib} > {"#fdfdfc"}


def test_the_command(folder: Path, tmp_path: Path) -> None:
    sheet, printed, drawn = (tmp_path / name for name in ("a.csv", "a.tex", "f"))
    files = ["--csv", sheet, "--latex", printed, "--figures", drawn]
    told = [f"Wrote `{sheet}`.", f"Wrote `{printed}`.", f"Wrote 5 pictures to `{drawn}`."]
    assert worked("report", folder, *files).lines[-3:] == told
    document = worked("report", folder, *files, "--json").document
    assert (document["csv"], len(document["figures"])) == (str(sheet), 5)


def test_a_folder_for_pictures_stays(tmp_path: Path) -> None:
    check_drawings(tmp_path)
    check_drawings(tmp_path / "new")
    assert (tmp_path.is_dir(), [*tmp_path.iterdir()]) == (True, [])


@pytest.mark.parametrize("command", ["report", "evaluate", "sweep"])
def test_paths_are_refused_before_any_work(command: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    files = ["--csv", tmp_path / "notes.txt", "--latex", tmp_path / "none" / "a.tex"]
    needed = {"evaluate": ["--task", "perplexity", "--data", tmp_path / "notes.txt"]}
    more = {"report": ["--figures", tmp_path / "notes.txt", "--html", tmp_path / "notes.txt"]}
    done = run(command, folder, *files, *needed.get(command, ()), *more.get(command, ()))
    assert done.code == 2
    assert "does not look like CSV" in done.err
    assert "there is no folder" in done.err
    assert ("name one file" in done.err) == (command == "report")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
