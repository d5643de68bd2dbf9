"""Training models on volumes and series."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tcompress.conversion.converter import convert
from tcompress.errors import DataError
from tcompress.training.tasks import TASKS
from tests.support.evaluation import classifier
from tests.support.grids import archive_file, grid_folder, series_file, volume_file
from tests.support.model_folders import model_folder
from tests.support.own_models import recipe_for
from tests.support.tiny import HORIZON, SERIES, VOLUME
from tests.support.training import data_of, taught, train


def test_a_classifier_of_volumes_learns(tmp_path: Path) -> None:
    model = grid_folder("tcompress_grid", tmp_path / "model")
    data = {"source": [str(volume_file(tmp_path / "v.parquet", 60))], "holdout": 0.3}
    done = taught(model, "volume-classification", data, steps=40)
    assert done.facts.validation == "auc"
    assert done.facts.best > 0.95
    assert done.facts.curve[-1].loss < 0.7 * done.facts.curve[1].loss  # type: ignore[operator]


@pytest.mark.often("tga")
@pytest.mark.parametrize("name", ["hot", "tga"])
def test_a_converted_forecaster_learns(name: str, tmp_path: Path) -> None:
    model = grid_folder("tcompress_grid-series", tmp_path / "model")
    convert(str(model), recipe_for(name), tmp_path / "small")
    data = {"source": [str(series_file(tmp_path / "s.csv"))], "validation_samples": 20}
    done = taught(tmp_path / "small", "forecasting", data, steps=60, evaluate_every=20)
    assert done.facts.validation == "mae"
    assert done.facts.best < 0.6 * float(done.facts.curve[0].validation or 0)


@pytest.mark.often("tcompress_grid")
@pytest.mark.parametrize("kind", ["tcompress_grid", "tcompress_grid-series"])
def test_healing_reads_no_labels(kind: str, tmp_path: Path) -> None:
    model = grid_folder(kind, tmp_path / "model")
    convert(str(model), recipe_for("hot"), tmp_path / "small")
    path = (
        series_file(tmp_path / "s.csv")
        if kind.endswith("series")
        else volume_file(tmp_path / "v.parquet", label=[-1] * 24)
    )
    data = {"source": [str(path)]}
    done = train(tmp_path / "small", tmp_path / "out", data=data, steps=20, learning_rate=3e-3)
    assert set(done.facts.objectives) <= {"hidden", "logits"}
    assert done.facts.best < 0.9 * done.facts.curve[0].validation


def test_files_with_parts_are_validated_on_their_own(tmp_path: Path) -> None:
    model = grid_folder("tcompress_grid-series", tmp_path / "model")
    series = str(series_file(tmp_path / "s.csv"))
    data = data_of(model, "forecasting", source=[series])
    assert (len(data.train), len(data.validation)) == (210 - 19, 30 - 3)
    (row,) = data.validation[0]
    assert row["past_values"].shape == (SERIES[1], SERIES[0])
    assert row["labels"].shape == (HORIZON, SERIES[0])
    (before,) = data.train[len(data.train) - 1]
    # The first forecast of the second part begins where the last one of the first part ends.
    assert np.array_equal(before["labels"], row["past_values"][-HORIZON:])
    model = grid_folder("tcompress_grid", tmp_path / "volumes")
    archive = str(archive_file(tmp_path / "v.npz"))
    data = data_of(model, "volume-classification", source=[archive])
    assert (len(data.train), len(data.validation)) == (24, 23)
    both = data_of(model, "volume-classification", source=[archive, archive])
    assert (len(both.train), len(both.validation)) == (48, 46)
    (row,) = data.train[0]
    assert row["grid_values"].shape == (1, *VOLUME)
    assert 0 <= float(row["grid_values"].min()) < float(row["grid_values"].max()) <= 1


def test_volumes_are_joined_and_series_are_not(tmp_path: Path) -> None:
    model = grid_folder("tcompress_grid", tmp_path / "model")
    one, two = (volume_file(tmp_path / f"{name}.parquet", 10) for name in "ab")
    data = data_of(model, "volume-classification", source=[str(one), str(two)], holdout=0.2)
    assert (len(data.train), len(data.validation)) == (16, 4)
    model = grid_folder("tcompress_grid-series", tmp_path / "series")
    paths = [str(series_file(tmp_path / f"{name}.csv")) for name in "ab"]
    with pytest.raises(DataError, match="are series, of which one can be trained on"):
        data_of(model, "forecasting", source=paths)


def test_tasks_and_models_that_do_not_go_together(tmp_path: Path) -> None:
    volumes = str(volume_file(tmp_path / "v.parquet"))
    grid = grid_folder("tcompress_grid", tmp_path / "model")
    bert, vit = classifier(tmp_path / "bert"), model_folder("vit", tmp_path / "vit")
    for model, task, message in (
        (grid, "forecasting", "reads volumes, the task `forecasting` series"),
        (grid, "image-classification", "reads volumes, the task `image-classification` pictures"),
        (bert, "forecasting", "reads texts, the task `forecasting` series"),
        (bert, "image-classification", "reads texts, the task `image-classification` pictures"),
        (vit, "sts", "reads pictures, the task `sts` texts"),
    ):
        with pytest.raises(DataError, match=message):
            data_of(model, task, source=[volumes])
    other = grid_folder("tcompress_grid", tmp_path / "other", input_size=(8, 8, 8))
    with pytest.raises(DataError, match=r"inputs of shape \(1, 8, 8, 4\), the model takes"):
        data_of(other, "volume-classification", source=[volumes])
    with pytest.raises(DataError, match="the data `builtin` has no volumes or series"):
        data_of(grid, None)


def test_areas_are_means_over_classes_that_occur() -> None:
    task = TASKS["volume-classification"]()
    shares = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.5, 0.5], [0.5, 0.5]])
    assert task.score(shares, torch.tensor([1, 0, 0, 1])) == pytest.approx(0.875)
    assert task.score(shares, torch.tensor([1, 1, 1, 1])) == 0.0
    three = torch.eye(3)
    assert task.score(three, torch.tensor([0, 1, 1])) == pytest.approx(0.875)
