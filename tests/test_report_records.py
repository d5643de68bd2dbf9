"""What reports say of training, metrics and times."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tcompress.artifact.manifest import Metric
from tcompress.reporting.console import render, speed_table
from tcompress.reporting.formatting import metric_labels, speed_words, value_text
from tcompress.reporting.model_report import report_of
from tcompress.reporting.page import verdict
from tcompress.reporting.table_rows import healed_text, rows_of
from tcompress.reporting.tree import ModelReport, main_metrics, main_speeds, metric_key
from tests.support.converted import converted
from tests.support.records import metric, record, record_dense, speed, training


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> ModelReport:
    return report_of(converted("gpt2", tmp_path_factory.mktemp("models")).folder, 16)


def full(bare: ModelReport) -> ModelReport:
    records = {"metrics": (metric(),), "training": (training(),), "speed": (speed(),)}
    return bare.model_copy(update=records)


def shown(what: object) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=110, no_color=True, force_terminal=False).print(what)
    return [line.split() for line in out.getvalue().splitlines() if line.strip()]


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
    assert ["trained", "400", "steps,", "2", "min"] in shown(render([report]))


def test_bytes_of_layers(tmp_path: Path) -> None:
    layer = report_of(converted("bert", tmp_path, dtype="bfloat16").folder).layers[0]
    assert (layer.bytes.dense, layer.bytes.now) == (2 * 32 * 32, 2 * 32 * 32 // 4)


def test_the_table_of_one_model(bare: ModelReport) -> None:
    lines = shown(render([full(bare)]))
    assert ["healed", "yes,", "400", "steps,", "2", "min"] in lines
    assert ["accuracy", "0.9000", "0.8500", "0.944×"] in lines
    assert ["95%", "interval", "of", "accuracy", "0.8300", "…", "0.8700"] in lines
    assert ["time", "B=8", "T=32", "10.0", "ms", "5.00", "ms", "2.00×"] in lines


def test_the_tables_of_models_side_by_side(bare: ModelReport) -> None:
    other = bare.model_copy(update={"name": "other", "speed": (speed(mode="compiled"),)})
    lines = shown(render([full(bare), other]))
    assert ["healed", "yes,", "400", "steps,", "2", "min", "no"] in lines
    assert ["compiled", "B=8", "T=32", "5.00", "ms", "2.00×"] in lines


def test_machines_are_told_apart(bare: ModelReport) -> None:
    gpu = speed(protocol={"device": "cuda", "dtype": "float16"})
    lines = shown(render([bare.model_copy(update={"speed": (speed(), gpu)})]))
    starts = [" ".join(line) for line in lines if line[0] == "time"]
    assert starts[0].startswith("time B=8 T=32, cpu, 2 threads, float32")
    assert starts[1].startswith("time B=8 T=32, cuda, float16")


def test_the_table_of_times() -> None:
    lines = shown(speed_table([speed(), speed(32, mode="compiled", baseline_peak_bytes=3_000)]))
    assert [
        "8",
        "32",
        "eager",
        "5.00",
        "ms",
        "10.0",
        "ms",
        "2.00×",
        "51,200",
        "2.0",
        "MB",
        "(pass)",
        "unknown",
    ] in lines
    assert lines[-3][-6:] == ["2.0", "MB", "(pass)", "3.0", "kB", "(pass)"]
    assert lines[-2] == ["cpu,", "2", "threads,", "float32"]
    assert lines[-1][:3] == ["(pass)", "memory", "is"]


def test_times_have_a_spread_and_memory_counts_weights() -> None:
    known = {"weight_bytes": 4_000_000, "baseline_weight_bytes": 8_000_000}
    calm = speed(spread=0.04, baseline_spread=0.1, **known)
    noisy = speed(32, spread=0.04, baseline_spread=0.5, **known)
    lines = [" ".join(line) for line in shown(speed_table([calm, noisy]))]
    assert any("5.00 ms ±2% 10.0 ms ±5% 2.00× 51,200 6.0 MB 8.0 MB" in line for line in lines)
    assert any("±25% 2.00× ?" in line for line in lines)
    assert "? the machine was busy" in " ".join(lines)
    assert "? the machine" not in " ".join(" ".join(line) for line in shown(speed_table([calm])))


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


def test_the_verdict_of_one_model(bare: ModelReport) -> None:
    assert verdict([full(bare)], ["small"]) == (
        "keeps 45.1% of the parameters (25.0% of those rewritten; embeddings, 23% of the dense "
        "model, stay as they are), has accuracy 0.8500 (dense 0.9000, 0.944×; difference −0.0500, "
        "95% interval −0.0600 … −0.0400) and runs at 2.00× the dense speed (batch 8, length 32)."
    )


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([0.42], "is slower than the dense model: it runs at 0.42× the dense speed (batch 1"),
        ([0.42, 0.5], "is slower than the dense model: it runs at 0.42× to 0.50× the dense speed"),
        ([0.42, 1.5], "runs at 0.42× to 1.50× the dense speed (batch 1, length 32 and batch 2"),
    ],
)
def test_a_slower_model_is_said_to_be_slower(ratios: list[float], text: str) -> None:
    speeds = [speed(batch, ratio=ratio) for batch, ratio in enumerate(ratios, 1)]
    assert speed_words(speeds).startswith(text)


def test_one_measured_model_comes_closest_to_nothing(bare: ModelReport) -> None:
    dense = bare.model_copy(update={"method": "dense", "layers": (), "attention": ()})
    measured = bare.model_copy(update={"metrics": (metric(),)})
    other = bare.model_copy(update={"name": "other"})
    assert verdict([dense, measured], ["big", "small"]).startswith("small keeps 45.1%")
    assert verdict([measured, other], ["small", "other"]).startswith(
        "small, of 2 conversions the only one measured, keeps 45.1%"
    )


def test_the_verdict_without_measurements(bare: ModelReport) -> None:
    report = bare.model_copy(update={"errors": {"held_out": 0.25}})
    assert verdict([report], ["small"]).endswith(
        "has a mean held-out error of 0.2500 and its quality on a task was not measured."
    )


def test_the_verdict_of_several_models(bare: ModelReport) -> None:
    close = bare.model_copy(update={"metrics": (metric(0.895),)})
    text = verdict([full(bare), close], ["one", "two"])
    assert text.startswith("Of 2 models, two comes closest to the dense quality: it keeps 45.1%")
    assert "the interval of the difference, −0.0150 … +0.0050, holds 0" in text


def test_a_baseline_that_is_not_the_dense_model_is_named(bare: ModelReport) -> None:
    own = metric()
    other = own.model_copy(
        update={"difference": own.difference.model_copy(update={"baseline": "elsewhere/rival"})}
    )
    shown = bare.model_copy(update={"metrics": (other,)})
    assert "accuracy, against rival" in [row.label for row in rows_of(shown)]
    assert "(rival 0.9000" in verdict([shown], ["gpt2-small"])


def test_numbers_of_other_examples_are_not_compared(bare: ModelReport) -> None:
    kinds: tuple[dict[str, Any], ...] = ({"data_fingerprint": "b"}, {"max_length": 64})
    for change in kinds:
        one, two = metric(), metric()
        two = two.model_copy(update={"protocol": {**two.protocol, **change}})
        assert metric_key(one) != metric_key(two)
        shown = [bare.model_copy(update={"metrics": (item,)}) for item in (one, two)]
        one_label, two_label = (
            next(row.label for row in rows_of(item, shown) if row.label.startswith("accuracy"))
            for item in shown
        )
        assert one_label != two_label
