"""The recipes of higher-order attention: tiny runs of each, from nothing to a report."""

from pathlib import Path

import pytest

from tcompress.reporting.formatting import value_text
from tests.support.cli import run, worked
from tests.support.grids import archive_file, series_file
from tests.support.tiny import VOLUME

SMALL = ("architecture.hidden_size=16", "finetune.batch_size=8", "finetune.device=cpu")
SERIES = (*SMALL, "finetune.steps=2", "architecture.input_size=[7, 96]", "evaluate.0.limit=20")
VOLUMES = (
    *SMALL[1:],
    "architecture.hidden_size=32",
    "finetune.epochs=1",
    f"architecture.input_size={list(VOLUME)}",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven series long enough for a horizon of 96 in every part, and volumes of three parts."""
    folder = tmp_path_factory.mktemp("data")
    series_file(folder / "series.csv", 1200, "abcdefg")
    archive_file(folder / "volumes.npz")
    return folder


def _changes(data: Path, name: str) -> list[str]:
    file = data / ("volumes.npz" if name == "adrenal-hot" else "series.csv")
    own = [f"finetune.data.source=[{file}]", f"evaluate.0.data={file}"]
    if name == "adrenal-hot":
        own += [f"finetune.data.validation={file}", *VOLUMES]
    else:
        own += SERIES
    return [f"--set={change}" for change in own]


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
def test_a_variant_runs_and_is_reported(
    name: str, variants: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [f"--variant={variant}" for variant in variants.split(",")]
    done = run("run", f"scratch/{name}", *chosen, *_changes(data, name), "-q")
    assert done.code == 0, done.err
    folder = f"{name}-{variants.replace(',', '-')}"
    report = worked("report", folder)
    if name == "adrenal-hot":
        assert "auc" in report.out
        return
    protocol = worked("report", folder, "--json").document["reports"][0]["metrics"][0]["protocol"]
    shown = (*report.lines, *worked("report", folder, folder, columns=160).lines)
    for label, errors in protocol["naive"].items():
        for name, value in errors.items():
            lines = [line for line in shown if line.startswith(f"{name} of {label} (no model)")]
            assert [line.split()[-1] for line in lines] == [value_text(value)] * 2
    page = tmp_path / "page.html"
    assert worked("report", folder, "--html", page).code == 0
    assert "mae of context mean (no model)" in page.read_text("utf-8")
