"""Measuring models on volumes and series."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from tcompress.api import evaluate
from tcompress.cli.evaluate import score_table
from tcompress.data.examples import Needs, load_examples
from tcompress.data.grids import Windows
from tcompress.errors import DataError
from tcompress.evaluation.labelled_tasks import naive_errors
from tcompress.evaluation.statistics import auc
from tcompress.own_models.grid import (
    TCompressGridForForecasting,
    TCompressGridForImageClassification,
)
from tests.support.cli import shown
from tests.support.evaluation import classifier
from tests.support.grids import archive_file, grid_folder, series_file, volume_file
from tests.support.numerics import quick
from tests.support.tiny import HORIZON, SERIES


def _auc(scores: Any, own: Any) -> float:
    pairs = mannwhitneyu(scores[own], scores[~own], alternative="two-sided")
    return float(pairs.statistic) / (own.sum() * (~own).sum())


@quick
@given(st.integers(0, 10_000), st.integers(2, 4), st.booleans())
def test_area_under_the_curve_is_that_of_mann_and_whitney(
    seed: int, classes: int, tied: bool
) -> None:
    rng = np.random.default_rng(seed)
    truth = np.concatenate([np.arange(classes), rng.integers(0, classes, 20)])
    scores = rng.random((len(truth), classes))
    scores = scores.round(1) if tied else scores
    if classes == 2:
        scores[:, 0] = 1 - scores[:, 1]
    wanted = np.mean([_auc(scores[:, index], truth == index) for index in range(classes)])
    found = auc(scores, truth)
    assert found.value() == pytest.approx(wanted)
    counts = rng.multinomial(len(truth), np.full(len(truth), 1 / len(truth)))
    rows = np.repeat(np.arange(len(truth)), counts)
    resampled = found.resampled(counts[None].astype(float))[0]
    if len({*truth[rows]}) < classes:
        assert np.isnan(resampled)
        return
    drawn = [_auc(scores[rows, index], truth[rows] == index) for index in range(classes)]
    assert resampled == pytest.approx(np.mean(drawn))


@pytest.mark.parametrize("classes", [2, 3])
def test_volumes(classes: int, tmp_path: Path) -> None:
    folder = grid_folder("tcompress_grid", tmp_path / "model", num_labels=classes)
    data = volume_file(tmp_path / "v.parquet", 30, classes)
    examples = load_examples(str(data), "train", Needs(volume=True, target="class"))
    model = TCompressGridForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(examples.volumes[:, None] / 255).float()).logits
    truth, shares = np.array(examples.targets), logits.softmax(-1).numpy()
    chosen = [1] if classes == 2 else range(3)
    for size in (7, 64):
        scores = evaluate([folder], "volume-classification", data, batch_size=size, bootstrap=50)
        found = {metric.name: metric for metric in scores[0].metrics}
        assert found["accuracy"].value == pytest.approx((shares.argmax(-1) == truth).mean())
        area = np.mean([_auc(shares[:, index], truth == index) for index in chosen])
        assert found["auc"].value == pytest.approx(area, abs=1e-6)
        assert found["auc"].interval is not None
        assert found["auc"].protocol["split"] is None


def test_volumes_of_an_archive_are_told_by_split(tmp_path: Path) -> None:
    folder = grid_folder("tcompress_grid", tmp_path / "model")
    data = archive_file(tmp_path / "v.npz")
    scores = evaluate([folder, folder], "volume-classification", data, split="test", bootstrap=20)
    protocol = scores[0].metrics[0].protocol
    assert (protocol["split"], protocol["examples"]) == ("test", 22)
    assert protocol["data"] == f"{tmp_path.name}/v.npz"


@pytest.mark.parametrize("label", [0, 1])
def test_volumes_of_one_class_have_no_area(label: int, tmp_path: Path) -> None:
    folder = grid_folder("tcompress_grid", tmp_path / "model")
    data = volume_file(tmp_path / "v.parquet", 6, label=[label] * 6)
    names = [m.name for m in evaluate([folder], "volume-classification", data)[0].metrics]
    assert names[0] == "accuracy"
    assert "auc" not in names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_size": (8, 8, 8)}, r"volumes of shape \(1, 8, 8, 4\), the model takes \(1, 8, 8"),
        ({"num_labels": 1}, "the model's head has 1 label"),
    ],
)
def test_volumes_of_other_models(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = volume_file(tmp_path / "v.parquet")
    folder = grid_folder("tcompress_grid", tmp_path / "model", **options)
    with pytest.raises(DataError, match=message):
        evaluate([folder], "volume-classification", data)
    with pytest.raises(DataError, match="which forecasts no series"):
        evaluate([folder], "forecasting", data)
    with pytest.raises(DataError, match="which reads no volumes"):
        evaluate([classifier(tmp_path / "bert")], "volume-classification", data)


def test_forecasts(tmp_path: Path) -> None:
    folder = grid_folder("tcompress_grid-series", tmp_path / "model")
    data = series_file(tmp_path / "s.csv")
    needs = Needs(window=(SERIES[1], HORIZON))
    windows = load_examples(str(data), "test", needs).windows
    model = TCompressGridForForecasting.from_pretrained(folder).eval()
    errors = []
    with torch.no_grad():
        for index in range(len(windows)):
            forecast = model(windows.past(index)[None]).prediction_outputs[0]
            errors.append((forecast - windows.future(index)).numpy())
    for size in (5, 64):
        (scores,) = evaluate(
            [folder], "forecasting", data, split="test", batch_size=size, bootstrap=20
        )
        mse, mae = scores.metrics
        assert (mse.name, mae.name) == ("mse", "mae")
        assert mse.value == pytest.approx(np.square(errors).mean(), rel=1e-5)
        assert mae.value == pytest.approx(np.abs(errors).mean(), rel=1e-5)
        assert not mse.higher_is_better
        facts = {name: mse.protocol[name] for name in ("split", "context", "horizon", "examples")}
        assert facts == {"split": "test", "context": 16, "horizon": 4, "examples": len(windows)}
        naive = mse.protocol["naive"]
        for name, value in (("last value", lambda x: x[-1]), ("context mean", lambda x: x.mean(0))):
            gaps = [
                np.asarray(value(windows.past(i).numpy()) - windows.future(i).numpy())
                for i in range(len(windows))
            ]
            assert naive[name]["mse"] == pytest.approx(np.square(gaps).mean(), rel=1e-5)
            assert naive[name]["mae"] == pytest.approx(np.abs(gaps).mean(), rel=1e-5)
        assert "context mean (no model)" in shown(score_table([scores]), width=120)
    assert scores.unit == "windows"


def test_the_linear_forecast_is_a_regression_on_the_training_part() -> None:
    """Of values less the last one; waves that follow a recurrence are forecast exactly."""
    time = np.arange(400)
    values = np.stack([np.sin(0.3 * time), np.cos(0.3 * time + 1)], 1).astype(np.float32)
    windows = Windows(values, np.arange(300, 380), 16, 4, ("a", "b"), 300)
    found = naive_errors(windows)
    assert found["linear"]["mse"] < 1e-3 < 0.1 < found["context mean"]["mse"]
    assert "linear" not in naive_errors(replace(windows, train=10))


def test_models_that_forecast_differently_are_not_compared(tmp_path: Path) -> None:
    one = grid_folder("tcompress_grid-series", tmp_path / "one")
    two = grid_folder("tcompress_grid-series", tmp_path / "two", horizon=8)
    data = series_file(tmp_path / "s.csv")
    with pytest.raises(DataError, match=r"windows of different sizes.*16 \+ 4.*16 \+ 8"):
        evaluate([one, two], "forecasting", data)
    data = series_file(tmp_path / "t.csv", names=("a", "b"))
    with pytest.raises(DataError, match=r"`t\.csv` has 2 series, the model takes 3"):
        evaluate([one], "forecasting", data)
