"""The tables of reports and plans, as they look 100 columns wide without colour."""

from collections.abc import Callable
from typing import Any

import pytest

from tcompress.artifact.manifest import CalibrationFacts, Metric
from tcompress.conversion.estimate import Estimate
from tcompress.models import SourceModel
from tcompress.planning.entries import Plan
from tcompress.reporting.console import layer_table, render, render_plan, speed_table
from tcompress.reporting.headline import headline_of
from tcompress.reporting.model_report import report_of
from tcompress.reporting.tree import ModelReport, mean_errors
from tests.support.cli import shown
from tests.support.converted import converted
from tests.support.golden import Golden
from tests.support.records import MACHINE, metric, speed, training

SUM = {"name": "lprod", "p": 8}
Planned = Callable[..., Plan]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelReport]:
    """A converted and a dense model, with errors and a source that do not vary."""
    folder = tmp_path_factory.mktemp("models")
    small = report_of(
        converted("gpt2", folder, method=SUM, target=0.5, keep=["h.1.mlp.*"]).folder, 16
    )
    layers = [
        layer.model_copy(update={"errors": {"held_out": 0.1 + index / 100, "calibration": 0.1}})
        for index, layer in enumerate(small.layers)
    ]
    facts = CalibrationFacts(name="builtin text", samples=1024, tokens=19971)
    metric = Metric(name="perplexity", value=12.3456, protocol={})
    small = small.model_copy(
        update={
            "layers": tuple(layers),
            "errors": mean_errors(layers),
            "source": "tests/gpt2",
            "calibration": facts,
            "metrics": (metric,),
        }
    )
    return {"small": small, "dense": report_of(folder / "gpt2", 16)}


def test_one_model(reports: dict[str, ModelReport], golden: Golden) -> None:
    found = shown(render([reports["small"]]))
    golden.text("console/one.txt", found)
    older = reports["small"].model_copy(update={"coverage": None})  # of a version without it
    assert set(shown(render([older])).splitlines()) < set(found.splitlines())


def test_models_side_by_side(reports: dict[str, ModelReport], golden: Golden) -> None:
    both = [reports["dense"], reports["small"]]
    found = shown(render(both, per_layer=True))
    golden.text("console/side-by-side.txt", found)
    assert found.startswith(shown(render(both)) + "gpt2-small\n")


def test_models_one_below_the_other_in_a_narrow_terminal(reports: dict[str, ModelReport]) -> None:
    lines = shown(render([reports["dense"], reports["small"]]), width=60).splitlines()
    assert lines[0].split() == ["gpt2"]
    tables = lines[: lines.index(next(line for line in lines if line.startswith("errors:")))]
    assert [line.split() for line in tables].index(["gpt2-small"]) == len(tables) // 2 - 1


def test_models_of_one_name_are_told_apart(reports: dict[str, ModelReport]) -> None:
    both = [reports["small"].model_copy(update={"name": name}) for name in ("a/small", "b/small")]
    assert shown(render(both)).splitlines()[0].split() == ["a/small", "b/small"]


def test_layers_in_a_narrow_terminal(reports: dict[str, ModelReport], golden: Golden) -> None:
    golden.text("console/narrow.txt", shown(layer_table(reports["small"].layers), width=60))


def test_many_layers_are_shown_by_role(reports: dict[str, ModelReport], golden: Golden) -> None:
    layers = reports["small"].layers * 7
    golden.text("console/by-role.txt", shown(layer_table(layers)))
    assert len(shown(layer_table(layers, per_layer=True)).splitlines()) == 3 + 42


def test_blocks_of_several_stacks_keep_their_names(reports: dict[str, ModelReport]) -> None:
    layer = reports["small"].layers[0]
    names = ("encoder.block.0", "decoder.block.0")
    layers = [layer.model_copy(update={"block": name}) for name in names]
    lines = shown(layer_table(layers)).splitlines()
    assert [line.split()[0] for line in lines[3:]] == list(names)


def test_a_plan(planned: Planned, sources: Callable[[str], SourceModel], golden: Golden) -> None:
    plan, size = planned("mixtral", keep=["self_attn.*"]), sources("mixtral").store.total_bytes
    costs = Estimate(memory_bytes=376_832, disk_bytes=100_864, seconds=7300)
    plan = plan.model_copy(update={"source": "tests/mixtral"})
    golden.text("console/plan.txt", shown(render_plan(plan, costs, size)))


def test_a_plan_without_estimate(planned: Planned) -> None:
    text = shown(render_plan(planned("mixtral").model_copy(update={"warnings": ("careful",)})))
    assert "bytes on disk" not in text
    assert text.splitlines()[-1] == "warning: careful"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "roughly 1 s"), (99, "roughly 99 s"), (600, "roughly 10 min"), (7200, "roughly 2.0 h")],
)
def test_times_are_rough(planned: Planned, seconds: float, words: str) -> None:
    costs = Estimate(memory_bytes=5, disk_bytes=3 * 10**12, seconds=seconds)
    text = shown(render_plan(planned("mixtral"), costs))
    assert words in text
    assert "about 5 B" in text
    assert "3.00 TB" in text


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> ModelReport:
    """A converted model that nobody trained or measured."""
    folder = converted("gpt2", tmp_path_factory.mktemp("models")).folder
    names = {"name": "gpt2-small", "source": "tests/gpt2"}
    return report_of(folder, 16).model_copy(update=names)


def with_records(bare: ModelReport, **records: Any) -> ModelReport:
    full = {"metrics": (metric(),), "training": (training(),), "speed": (speed(),)}
    return bare.model_copy(update=records or full)


def test_what_was_measured(bare: ModelReport, golden: Golden) -> None:
    full, other = (
        with_records(bare),
        with_records(bare, name="other", speed=(speed(mode="compiled"),)),
    )
    gpu = speed(protocol={"device": "cuda", "dtype": "float16"})
    machines = with_records(bare, speed=(speed(), gpu))
    for name, models in {"one": [full], "two": [full, other], "machines": [machines]}.items():
        golden.text(f"console/measured-{name}.txt", shown(render(models), width=110))


def test_times(golden: Golden) -> None:
    """With a spread; a ratio is in doubt where the machine was busy. Memory counts weights."""
    plain = [speed(), speed(32, mode="compiled", baseline_peak_bytes=3_000)]
    known = {"weight_bytes": 4_000_000, "baseline_weight_bytes": 8_000_000}
    calm = speed(spread=0.04, baseline_spread=0.1, **known)
    noisy = speed(32, spread=0.04, baseline_spread=0.5, **known)
    new = {"protocol": MACHINE | {"new_tokens": 32}, **known}
    text = [calm, speed(phase="prefill", cache="dynamic", **new)]
    text.append(speed(mode="compiled", phase="decode", cache="static", **new))
    tables = [shown(speed_table(speeds), 110) for speeds in (plain, [calm], [calm, noisy], text)]
    golden.text("console/times.txt", "\n".join(tables))


def test_verdicts(bare: ModelReport, golden: Golden) -> None:
    """The sentence that reports begin with."""
    full, measured = with_records(bare), with_records(bare, metrics=(metric(),))
    gap = metric().difference
    assert gap is not None
    rival = metric().model_copy(update={"difference": gap.model_copy(update={"baseline": "a/b"})})
    models = {
        "one": [full],
        "not measured": [bare.model_copy(update={"errors": {"held_out": 0.25}})],
        "against b": [with_records(bare, metrics=(rival,))],
        "dense, small": [with_records(bare, method="dense", layers=(), attention=()), measured],
        "small, other": [measured, bare],
        "far, near": [full, with_records(bare, metrics=(metric(0.895),))],
    }
    said = [
        f"{names}: {headline_of(of, names.split(', ')).sentence}" for names, of in models.items()
    ]
    for speeds in ([0.42], [0.42, 0.5], [0.42, 1.5]):
        timed = tuple(speed(batch, ratio=ratio) for batch, ratio in enumerate(speeds, 1))
        said.append(f"{speeds}: {headline_of([with_records(bare, speed=timed)], ['one']).sentence}")
    noisy = with_records(bare, speed=(speed(spread=0.5),))
    said.append(f"noisy: {headline_of([noisy], ['one']).sentence}")
    for index, figure in enumerate(headline_of([full], ["one"]).figures):
        said.append(f"figure {index}: {'; '.join([*figure[:3], *figure.notes])}")
    golden.text("console/verdicts.txt", "\n".join(said))
