"""Several sets in one measurement, and sets without labels."""

import shutil
from math import hypot
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import pytest

from tcompress.api import evaluate
from tcompress.artifact.averages import Mean, means_of
from tcompress.artifact.manifest import Interval, Metric, read_manifest
from tcompress.errors import InputError
from tcompress.evaluation import measuring
from tests.support.cli import completed, run
from tests.support.converted import converted
from tests.support.evaluation import classifier, encoder, labelled_file, pairs_file, rows_file
from tests.support.model_folders import sentences

SETS = ["one/pairs.jsonl", "two/pairs.jsonl"]
STS = ("--task", "sts", "--bootstrap", "50", "--device", "cpu", "--no-save")
BOTH = (*STS, "--data", SETS[0], "--data", SETS[1])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, and pairs with and without scores."""
    folder = tmp_path_factory.mktemp("models")
    encoder(folder / "bert")
    converted("bert", folder)
    for name, count in (("one", 30), ("two", 20)):
        (folder / name).mkdir()
        pairs_file(folder / name / "pairs.jsonl", count)
    texts = sentences(50)
    rows_file(folder / "bare.jsonl", sentence1=texts[:25], sentence2=texts[25:])
    classifier(folder / "classifier")
    classifier(folder / "other", seed=1)
    labelled_file(folder / "labelled.jsonl")
    (folder / "texts.txt").write_text("\n".join(sentences(12)))
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(place: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.chdir(place)


def sts(*models: str, data: Any = SETS, **options: Any) -> Any:
    given = {"device": "cpu", "bootstrap": 50, "save": False, **options}
    return evaluate(models, "sts", data, **given)


def test_each_set_is_measured_as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [sts("bert", "bert-small", data=data)[1] for data in SETS]
    loads = Mock(side_effect=measuring.load_model)
    monkeypatch.setattr(measuring, "load_model", loads)
    dense, small = sts("bert", "bert-small")
    assert loads.call_count == 2  # one for each model
    assert small.metrics == (*alone[0].metrics, *alone[1].metrics)
    assert [item.protocol["data"] for item in small.sets] == [
        f"{name}:sentence1,sentence2,score" for name in SETS
    ]
    assert len(small.sets) == len(dense.baseline) == 2
    assert alone[0].means == []


def test_the_mean_over_the_sets() -> None:
    dense, small = sts("bert", "bert-small")
    (own,) = dense.means
    mean, agreement = small.means
    parts = [item.metrics[0] for item in small.sets]
    assert mean.value == pytest.approx(fmean(part.value for part in parts))
    assert mean.difference.value == pytest.approx(mean.value - own.value)
    known = [part.ratio for part in parts]
    assert mean.ratio == (None if None in known else pytest.approx(fmean(known)))
    assert mean.label == "mean spearman of 2 sets"
    assert mean.protocol["examples"] == [30, 20]
    assert agreement.value == pytest.approx(fmean(i.metrics[-1].value for i in small.sets))
    assert agreement.interval.low < agreement.value < agreement.interval.high


def number(value: float, data: str = "a", name: str = "accuracy", **protocol: Any) -> Metric:
    facts = {"task": "t", "data": data, "data_fingerprint": data, **protocol}
    around = Interval(low=value - 0.03, high=value + 0.04)
    return Metric(name=name, value=value, interval=around, protocol=facts)


def test_intervals_of_means_are_those_of_independent_numbers() -> None:
    mean = Mean.of([number(0.5, "a"), number(0.7, "b")])
    assert mean.value == pytest.approx(0.6)
    assert mean.interval.low == pytest.approx(0.6 - hypot(0.03, 0.03) / 2)
    assert mean.interval.high == pytest.approx(0.6 + hypot(0.04, 0.04) / 2)
    bare = number(0.7, "b").model_copy(update={"interval": None})
    assert Mean.of([number(0.5), bare]).interval is None


def test_means_are_of_what_all_sets_have() -> None:
    first = [number(0.5), number(0.9, name="agreement"), number(0.4, name="f1")]
    assert means_of(first) == []
    second = [number(0.7, "b", "agreement"), number(0.4, "b", "f1")]
    (agreement,) = means_of([*first, *second])
    assert (agreement.name, agreement.value) == ("agreement", pytest.approx(0.8))
    other_task = number(0.7, "b", task="u")
    assert means_of([number(0.5), other_task]) == []


@pytest.mark.slow
def test_records_are_those_of_single_measurements(place: Path) -> None:
    def kept(folder: str, *calls: Any) -> list[Metric]:
        shutil.copytree("bert-small", folder)
        for data in calls:
            sts("bert", folder, data=data, save=True)
        return read_manifest(Path(folder)).metrics

    assert kept("together", SETS) == kept("apart", *SETS)


def test_a_known_baseline() -> None:
    dense, small = sts("bert", "bert-small")
    (again,) = sts("bert-small", baseline=dense.baseline)
    assert again.metrics == small.metrics
    (other,) = sts("bert-small", baseline=dense.baseline, seed=1)
    assert other.metrics[0].difference.value == small.metrics[0].difference.value
    assert other.metrics[0].difference.interval is None  # resamples of another seed make no pairs
    with pytest.raises(InputError, match=f"measured on other examples than `{SETS[1]}`"):
        sts("bert-small", data=SETS[::-1], baseline=dense.baseline)
    with pytest.raises(InputError, match="the baseline was measured on 2 sets, these are 1"):
        sts("bert-small", data=SETS[0], baseline=dense.baseline)


def test_a_set_counts_once(place: Path) -> None:
    shutil.copy(SETS[0], "copy.jsonl")
    for other in (SETS[0], "copy.jsonl"):
        with pytest.raises(InputError, match=f"`{SETS[0]}` and `{other}` hold the same examples"):
            sts("bert", data=[SETS[0], other])


def test_table() -> None:
    done = completed("evaluate", "bert", "bert-small", *BOTH, columns=100)
    assert "one/pairs.jsonl:sentence1,sentence2,score: 30 examples; two/" in done.lines[0]
    rows = [line.split()[0] for line in done.lines if "─" not in line]
    group = ["bert", "pearson", "bert-small", "pearson", "agreement"]
    start = rows.index("model")
    wanted = ["model", "one/pairs", *group, "two/pairs", *group]
    table = [*wanted, "mean", "bert", "bert-small", "agreement"]
    assert rows[start:] == [*table, "warning:"]  # of few examples
    assert "bert-small on two/pairs.jsonl: 40 of 40 inputs in " in done.err


def test_json() -> None:
    document = run("evaluate", "bert", "bert-small", *BOTH, "--json").document
    assert list(document) == ["schema", "task", "sets", "means", "threshold", "missed"]
    alone = run("evaluate", "bert", "bert-small", *STS, "--data", SETS[1], "--json").document
    second = document["sets"][1]
    assert {"schema", "threshold", "missed"} == set(alone) - set(second)
    for name in ("task", "data", "protocol"):
        assert second[name] == alone[name]
    assert second["models"][1]["metrics"] == alone["models"][1]["metrics"]
    assert [[m["name"] for m in item["metrics"]] for item in document["means"]] == [
        ["spearman"], ["spearman", "agreement"],
    ]  # fmt: skip
    assert "ratio" in document["means"][1]["metrics"][0]


def test_the_threshold_is_about_the_mean() -> None:
    values = sorted(item.metrics[0].value for item in sts("bert")[0].sets)
    low, high = (str(fmean(values) + way * (values[1] - values[0]) / 4) for way in (-1, 1))
    assert run("evaluate", "bert", *BOTH, f"--threshold={low}").code == 0
    done = run("evaluate", "bert", *BOTH, f"--threshold={high}", "--quiet")
    assert done.code == 3
    assert done.err.endswith(" on `mean spearman of 2 sets`\n")


def test_pairs_without_scores() -> None:
    dense, small = sts("bert", "bert-small", data="bare.jsonl")
    assert dense.metrics == ()
    (agreement,) = small.metrics
    assert (agreement.name, agreement.difference) == ("agreement", None)
    assert agreement.protocol["baseline"] == "bert"
    assert agreement.interval.low < agreement.value < agreement.interval.high
    done = run("evaluate", "bert", "bert-small", *STS, "--data", "bare.jsonl")
    assert "25 examples without labels, so that only agreement is measured" in done.lines[0]
    first, second, warning = (line.split() for line in done.lines[-3:])
    assert warning[0] == "warning:"  # of few examples
    assert (first[0], len(first)) == ("bert", 2)  # and how fast it was
    assert second[:2] == ["bert-small", "agreement"]


def test_sets_with_and_without_scores() -> None:
    dense, small = sts("bert", "bert-small", data=[SETS[0], "bare.jsonl"])
    assert dense.means == []
    assert [mean.name for mean in small.means] == ["agreement"]
    mixed = (*STS, "--data", SETS[0], "--data", "bare.jsonl", "--quiet", "--threshold", "1.1")
    done = run("evaluate", "bert", "bert-small", *mixed)
    assert done.err == "bert-small: misses the threshold 1.1 on `mean agreement of 2 sets`\n"


@pytest.mark.parametrize("column", ["text", "label"])
def test_texts_without_classes(column: str, place: Path) -> None:
    data = "texts.txt"
    if column == "label":  # as in test splits that are published
        data = "unknown.jsonl"
        rows_file(place / data, text=sentences(12), label=[-1] * 12)
    given: dict[str, Any] = {"device": "cpu", "save": False, "bootstrap": 20}
    small = evaluate(["classifier", "other"], "classification", data, **given)[1]
    assert [metric.name for metric in small.metrics] == ["agreement", "kl"]
    labelled = evaluate(["classifier", "other"], "classification", "labelled.jsonl", **given)[1]
    assert {"accuracy", "agreement"} < {metric.name for metric in labelled.metrics}


def test_one_model_needs_labels() -> None:
    done = run("evaluate", "bert", *STS, "--data", "bare.jsonl")
    assert done.code == 2
    assert "the task needs a column for `score`, but `bare.jsonl` has `sentence1`" in done.err
    assert "or a `--baseline`: agreement with another model can be measured" in done.err


def test_a_share_of_the_baseline_needs_labels() -> None:
    with pytest.raises(
        InputError, match=r"`--threshold 0\.9x` is a share of the baseline's number"
    ):
        sts("bert", "bert-small", data="bare.jsonl", threshold="0.9x")


def test_a_baseline_agrees_with_nothing_and_misses_nothing() -> None:
    typed = ("evaluate", "bert-small", "--baseline", "bert", *STS, "--data", "bare.jsonl")
    assert run(*typed, "--threshold", "0.1", "--quiet").code == 0
