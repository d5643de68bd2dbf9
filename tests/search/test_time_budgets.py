"""Budgets of time: on a machine whose times are counted, so that tests do not depend on one."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from tcompress.attention.module import ReplacementModule
from tcompress.errors import InputError, PlanError
from tcompress.latency.passes import Pass
from tcompress.latency.sizes import RandomInputs
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.limits import Budget
from tcompress.planning.entries import LayerForm, Plan
from tcompress.planning.planner import make_plan
from tcompress.search import predictions
from tcompress.search.candidates import NANOSECONDS, PARAMETERS, Candidate, Site
from tcompress.search.knapsack import allocate_within
from tcompress.search.resources import Time
from tcompress.structures.modules.embedding import StructuredEmbedding, TiedTable
from tcompress.timing_model import clocks
from tcompress.timing_model.clocks import LayerTimes, ModelClock, Workload, interpolated
from tcompress.timing_model.random_weights import RandomWeights
from tcompress.timing_model.timing_cache import TimingCache
from tests.support.cli import completed, run
from tests.support.conversions import make
from tests.support.counted_clock import counted_clock, dense_seconds
from tests.support.depth import deep
from tests.support.evaluation import headed
from tests.support.tiny import build

CPU = torch.device("cpu")
SVD: dict[str, Any] = {"method": {"name": "svd"}}


@pytest.fixture
def counted() -> Iterator[None]:
    """Times are numbers of weights, see `counted_clock`."""
    with counted_clock():
        yield


def _made(folder: Path, **changes: Any) -> Any:
    return make("bert", folder, aware=True, method={"name": "width"}, **changes)


def test_a_slow_machine_makes_no_layer_dearer_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = 1.0

    def seconds(run: Pass, *_: Any, **__: Any) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        return slower * 1e-6 * counter.get_total_flops()

    monkeypatch.setattr(Pass, "seconds", seconds)
    times = LayerTimes(8, 16, CPU)
    unit = times.measured[times.unit_key] = times.unit_pass.seconds()
    layer: Any = SimpleNamespace(in_features=32, out_features=32, bias=True)
    one = times.matrix(16, 32, layer)
    assert one == pytest.approx(2 * unit)
    slower = 1.5
    other = times.matrix(32, 32, layer)
    assert other == pytest.approx(4 * unit)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that times are kept in."""
    folder = tmp_path / "times"
    folder.mkdir()
    monkeypatch.setattr("tcompress.timing_model.timing_cache.cached_assets_path", lambda *_: folder)
    return folder


@pytest.mark.slow
def test_what_was_timed_is_not_timed_again(
    kept: Path, sources: Callable[[str], SourceModel]
) -> None:
    source = sources("bert")
    plan = make_plan(Convert.model_validate({"method": {"name": "svd"}, "target": 0.5}), source)

    def times(work: str) -> list[float]:
        clock = ModelClock(source, Workload.read(work), CPU)
        layer = clock.layer_times(16).of(LayerForm(plan.layers[0].parts))
        return [clock.seconds, *clock.speedups(plan), layer, *clock.speedups(plan)]

    first = times("4x8")
    [file] = kept.iterdir()
    with patch.object(Pass, "seconds", side_effect=AssertionError):
        assert times("4x8") == first
    times("8x8")
    assert len([*kept.iterdir()]) == 2
    assert file.exists()


def test_times_last_for_a_day(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = TimingCache.of(CPU, "a model")
    known.values["dense"] = 2.0
    known.keep()
    assert TimingCache.of(CPU, "a model").values == {"dense": 2.0}
    assert TimingCache.of(CPU, "another").values == {}
    now = time.time()
    monkeypatch.setattr("tcompress.timing_model.timing_cache.time.time", lambda: now + 25 * 3600)
    assert TimingCache.of(CPU, "a model").values == {}


@pytest.mark.parametrize(("speedup", "changes"), [(1.2, False), (1.5, True)])
def test_a_speed_is_that_over_the_model_with_all_blocks(
    speedup: float, changes: bool, counted: None, tmp_path: Path
) -> None:
    """One block of two is 1.29 times as fast by itself."""
    plan = _made(tmp_path, speedup=speedup, keep_layers=[1]).plan
    assert plan.budget.seconds == dense_seconds(SourceModel.open(str(tmp_path / "dense")))
    assert plan.budget.speedup == pytest.approx(1.5 if changes else 1.29, rel=0.02)
    assert bool(plan.layers) == changes


def test_a_time_that_the_dense_model_keeps_asks_for_nothing(counted: None, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"asks for nothing: .* no more than `--latency 36.384ms`"):
        _made(tmp_path, latency="37ms")


@pytest.mark.slow
def test_milliseconds_are_another_way_to_say_it(counted: None, tmp_path: Path) -> None:
    made = _made(tmp_path / "one", speedup=1.25)
    seconds = made.plan.budget.seconds / 1.25
    other = _made(tmp_path / "two", latency=f"{1e3 * seconds:.6f}ms")
    assert other.plan.layers == made.plan.layers


@dataclass(frozen=True)
class _PaperProblem:
    """A budget of which a plan is nothing but its room, and then what is said of it."""

    recipe: Any
    room: int

    def least(self, _: str) -> int:
        return 1_000_000

    def most(self, _: str) -> int:
        return 900_000_000

    def best(self) -> "_PaperProblem":
        return self

    def with_facts(self, facts: Any) -> Any:
        return facts


@pytest.mark.parametrize("extra", [0.5, 0.9, 1.02, 1.09, 1.4, 3.0])
def test_models_slower_or_faster_than_their_layers_are_no_faster_than_asked_for(
    extra: float,
) -> None:
    """Layers take `extra` times what they take by themselves, of a tenth of what is dense."""

    def speedups(plan: _PaperProblem) -> list[float]:
        return [1 / (0.1 + extra * plan.room * 1e-9)]

    clock: Any = SimpleNamespace(seconds=1.0, speedups=speedups, work="4x8")
    recipe = SimpleNamespace(resource_budget=Budget("speedup", 4))
    problem: Any = _PaperProblem(recipe, round(0.15e9))
    facts: Any = Time(clock, entries={}, threads=1).reach(problem)
    speed = facts["speedup"]
    assert 4 * 0.98 <= speed <= 4 * 1.06


@dataclass(frozen=True)
class _DenseAbove(_PaperProblem):
    """The same, refused where there is room for all layers as they are."""

    def best(self) -> "_PaperProblem":
        if self.room >= self.most(""):
            raise PlanError("every layer stays dense", "allow less")
        return self


@pytest.mark.parametrize("saved", [4, 8])
def test_a_try_with_room_for_all_layers_ends_no_search(saved: float) -> None:
    """Models save `saved` times what their layers save by themselves."""

    def speedups(plan: _PaperProblem) -> list[float]:
        return [1 / max(0.1, 1 - saved * (0.9 - plan.room * 1e-9))]

    clock: Any = SimpleNamespace(seconds=1.0, speedups=speedups, work="4x8")
    recipe = SimpleNamespace(resource_budget=Budget("speedup", 1.1))
    problem: Any = _DenseAbove(recipe, round((1 / 1.1 - 0.1) * 1e9))
    facts: Any = Time(clock, entries={}, threads=1).reach(problem)
    assert 1.1 * 0.98 <= facts["speedup"] <= 1.1 * 1.06


@pytest.mark.slow
def test_a_tight_budget_takes_whole_halves(counted: None, tmp_path: Path) -> None:
    plan = _made(tmp_path, speedup=2.1, at="4x8").plan
    assert plan.budget.speedup >= 2.1 * 0.98
    gone = {(entry.block, entry.role) for entry in plan.layers if not entry.inputs_left}
    assert gone
    for block, role in gone:
        own = {entry.role: entry for entry in plan.layers if entry.block == block}
        writers = ("q", "k", "v") if role == "o" else ("up",)
        assert not any(own[name].outputs_left for name in writers)


def test_both_budgets_hold(counted: None, tmp_path: Path) -> None:
    plan = _made(tmp_path, speedup=1.1, target=0.6).plan
    assert plan.structured_rewritten <= 0.6 * plan.dense_rewritten
    for allocation in ("loss", "uniform"):
        changes = {"speedup": 1.6, "target": 0.9, "allocation": allocation}
        tighter = make("bert", tmp_path / allocation, aware=True, **SVD, **changes).plan
        assert tighter.budget is not None
        assert (tighter.budget.speedup or 0) >= 1.6 * 0.98


def test_attentions_and_tables_of_other_forms_are_timed_as_such(
    counted: None, sources: Callable[[str], SourceModel]
) -> None:
    other = {"attention": {"name": "additive"}, "embeddings": {**SVD, "target": 0.25}}
    source = sources("bert")
    plan = make_plan(Convert.model_validate({**SVD, "target": 0.5, **other}), source)
    clock = ModelClock(source, Workload.read("2x8"), CPU, fixed=plan)
    for model in (clock._dense, clock._small(plan)):
        kinds = [type(module) for module in model.modules()]
        assert kinds.count(ReplacementModule) == len(plan.attention) > 0
        assert kinds.count(StructuredEmbedding) == len(plan.embeddings) == 1
        assert kinds.count(TiedTable) == 1
        clock._pass(model)()
    assert clock.key != ModelClock(source, Workload.read("2x8"), CPU).key
    assert ModelClock(source, Workload.read(None), CPU, named=False, longest=8).work.length == 8


def test_inputs_that_cannot_be_drawn_are_an_error_of_the_pass(
    sources: Callable[[str], SourceModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RandomInputs, "batch", Mock(side_effect=RuntimeError("no memory")))
    with pytest.raises(InputError, match=r"cannot run at 9x8 \(no memory\)"):
        ModelClock(sources("bert"), Workload.read("9x8"), CPU)


def test_an_encoder_does_not_decode(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--at decode"):
        _made(tmp_path, speedup=2, at="decode")


@pytest.mark.slow
def test_a_decoder_decodes(counted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Mock()
    monkeypatch.setattr("tcompress.conversion.converter.bench", measure)
    made = make("llama", tmp_path, aware=True, method={"name": "width"}, speedup=1.1, at="decode")
    assert made.plan.budget is not None
    assert made.plan.budget.at == "decode"
    settings = measure.call_args.kwargs["settings"]
    assert (settings.batch, settings.length, settings.generate) == ((1,), (60,), clocks.STEPS)


@pytest.mark.slow
def test_a_window_decodes_beyond_its_end(tmp_path: Path) -> None:
    deep("mistral", 2, sliding_window=8).build().save_pretrained(tmp_path)
    clock = ModelClock(SourceModel.open(str(tmp_path)), Workload.read("decode"), CPU)
    assert clock.work.length > 8
    assert clock.seconds > 0
    assert min(clock.speedups(Plan(layers=()), Plan(layers=()))) > 0


@pytest.mark.parametrize("text", ["32", "0x8", "8x", "x8", "decoder", "8x8x8"])
def test_passes_are_read_strictly(text: str) -> None:
    with pytest.raises(ValueError, match="at"):
        Convert.model_validate({"method": {"name": "svd"}, "speedup": 2, "at": text})
    with pytest.raises(ValueError, match="32x128"):
        Workload.read(text)


def test_times_between_sizes_are_interpolated() -> None:
    asked: list[int] = []

    def measure(index: int) -> float:
        asked.append(index)
        return 2.0 * index

    assert interpolated(range(101), measure, 5) == pytest.approx([2.0 * n for n in range(101)])
    assert asked == [0, 25, 50, 75, 100]


def test_a_real_pass_is_timed(sources: Callable[[str], SourceModel]) -> None:
    clock = ModelClock(sources("bert"), Workload.read("2x8"), CPU)
    assert clock.rows == 16
    assert clock.seconds > 0
    assert min(clock.speedups(Plan(layers=()), Plan(layers=()))) > 0
    # What is not replaced is timed with the same weights.
    small = clock._small(Plan(layers=()))
    assert [*map(id, small.parameters())] == [*map(id, clock._dense.parameters())]
    assert small is not clock._dense


@pytest.mark.often("bert")
@pytest.mark.parametrize("family", ["bert", "t5", "gpt2", "vit"])
def test_models_of_any_depth_take_the_memory_of_a_ring(
    family: str, sources: Callable[[str], SourceModel]
) -> None:
    model, source = build(family), sources(family)
    largest = 4 * max(own.numel() for own in model.parameters())
    weights = RandomWeights(CPU, torch.float32, ring_bytes=largest)
    drawn = [weights.model(source, source.config) for _ in range(3)]
    for own in drawn:
        assert {n: p.shape for n, p in own.named_parameters()} == {
            n: p.shape for n, p in model.named_parameters()
        }  # what is tied is named once
    matrices = [p for own in drawn for p in own.parameters() if p.ndim > 1]
    assert len({p.untyped_storage().data_ptr() for p in matrices}) == 1
    assert len({p.data_ptr() for p in matrices}) > 1
    assert all(0 < p.abs().max() <= 0.02 for p in matrices)


def test_two_budgets_are_met_at_the_least_loss() -> None:
    """Every choice of two sites is tried."""

    def costs(parameters: int, time: int) -> dict[str, int]:
        return {PARAMETERS: parameters, NANOSECONDS: time}

    offered = [(2, 9, 5.0), (5, 5, 4.0), (9, 2, 4.5), (7, 7, 1.0)]
    candidates = tuple(Candidate("", (), loss, costs(size, time)) for size, time, loss in offered)
    sites = [Site((f"s{index}",), "", costs(10, 10), candidates) for index in range(2)]
    found = allocate_within(sites, costs(15, 14))
    every = [
        (one.loss + two.loss)
        for one in sites[0].every
        for two in sites[1].every
        if all(one.costs[name] + two.costs[name] <= most for name, most in costs(15, 14).items())
    ]
    assert found.loss == pytest.approx(min(every))
    with pytest.raises(PlanError, match="contradict"):
        allocate_within(sites, costs(3, 3))


def test_several_speeds_are_models_of_one_measurement(
    counted: None, own_folder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    headed("bert", Path("dense"), "BertModel", num_hidden_layers=2)
    walked = Mock(side_effect=predictions.BackwardWalk)
    monkeypatch.setattr(predictions, "BackwardWalk", walked)
    options = ("--method", "width", "--at", "4x8", "--calib-samples", "200", "--device", "cpu")
    done = completed("convert", "dense", "--speedup", "1.2,1.4", *options, "-o", "out")
    assert walked.call_count == 1
    names = {line.lstrip("*t ").split()[0] for line in done.lines}
    assert {"dense", "width-1.2x", "width-1.4x", "drop1"} <= names
    found = json.loads(Path("out/sweep.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert found["metric"] == "agreement"
    for name, speed in (("width-1.2x", 1.2), ("width-1.4x", 1.4)):
        assert rows[name]["predicted"] == pytest.approx(speed, rel=0.06)
        assert 0 < rows[name]["quality"] < rows["dense"]["quality"] == 1
        AutoModel.from_pretrained(f"out/{name}")
    assert rows["drop1"]["quality"] is not None
    completed("convert", "dense", "--speedup", "1.4", *options, "-o", "alone")
    one, other = (load_file(f"{name}/model.safetensors") for name in ("alone", "out/width-1.4x"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    planned = run("convert", "dense", "--speedup", "1.2,1.4", *options, "--dry-run")
    assert "Nothing was written" in planned.out


def test_a_speed_is_predicted_alike_beside_others(counted: None, own_folder: None) -> None:
    headed("bert", Path("dense"), "BertModel", num_hidden_layers=2)
    options = ("--at", "4x8", "--calib-samples", "200", "--device", "cpu")
    for speeds, out in (("2.2", "alone"), ("1.05,2.2", "both")):
        completed("convert", "dense", "--speedup", speeds, *options, "-o", out)
    alone, beside = (
        json.loads(Path(folder, "tcompress.json").read_text())["plan"]
        for folder in ("alone", "both/auto-2.2x")
    )
    assert alone["budget"]["error"] == beside["budget"]["error"]
    assert alone["layers"] == beside["layers"]


def test_one_conversion_has_one_speed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="asks for 2 models"):
        _made(tmp_path, speedup=[2, 4])
