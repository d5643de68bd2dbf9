"""Timing: its grid, its order, its records. How fast anything is does not matter here."""

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tcompress.artifact.manifest import read_manifest, record
from tcompress.errors import InputError
from tcompress.latency import benchmark, paired_timing
from tcompress.latency.benchmark import bench, same_pass
from tcompress.latency.paired_timing import threads
from tcompress.latency.passes import Pass, spread, turns
from tcompress.latency.sizes import RandomInputs
from tcompress.models import SourceModel
from tcompress.options import Bench
from tests.support.cli import completed, run
from tests.support.converted import converted
from tests.support.records import MACHINE, record_dense, speed
from tests.support.tiny import IMAGE, SERIES, VOLUME, build

FEW = {"batch": (1, 2), "length": (4,), "repeats": 2}


class Ticking:
    """A clock that goes on by what it is told, at every second look."""

    def __init__(self, *steps: float) -> None:
        self.steps, self.now, self.looks = list(steps), 0.0, 0

    def __call__(self) -> float:
        self.looks += 1
        if self.looks % 2 == 0:
            self.now += self.steps[(self.looks // 2 - 1) % len(self.steps)]
        return self.now


Sources = Callable[[str], SourceModel]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A conversion, beside what it was made from."""
    return converted("bert", tmp_path).folder


# -- the order
def test_passes_alternate_and_take_turns_at_going_first() -> None:
    order: list[str] = []
    clock = Ticking(1.0, 10.0, 20.0, 2.0)
    runs = [Pass(lambda _: order.append("a")), Pass(lambda _: order.append("b"))]
    times = list(islice(turns(runs, clock), 2))
    assert order == ["a", "b", "b", "a"]
    assert times == [[1.0, 10.0], [2.0, 20.0]]


def test_the_device_is_waited_for_before_every_look_at_the_clock() -> None:
    log: list[str] = []

    def noted(word: str) -> Callable[..., None]:
        return lambda *_: log.append(word)

    def clock() -> float:
        log.append("clock")
        return 0.0

    next(turns([Pass(noted("a"), noted("fill")), Pass(noted("b"))], clock, noted("wait")))
    assert log[:6] == ["fill", "wait", "clock", "a", "wait", "clock"]


def test_medians_and_ratios(folder: Path) -> None:
    # Turns: model, dense; dense, model; model, dense.
    clock = Ticking(1.0, 4.0, 6.0, 2.0, 90.0, 5.0)
    settings = Bench(batch=(2,), length=(4,), repeats=3)
    found = bench([str(folder)], settings=settings, save=False, clock=clock)[0].speed[0]
    assert (found.milliseconds, found.baseline_milliseconds) == (2000, 5000)
    assert (found.ratio, found.tokens_per_second) == (2.5, 4.0)


# -- the inputs
def test_texts(sources: Sources) -> None:
    inputs = RandomInputs.of(sources("bert"), sources("bert"))
    made = inputs.batch(3, 8, 0, torch.device("cpu"), torch.float32)
    assert set(made) == {"input_ids", "attention_mask"}
    assert made["input_ids"].shape == (3, 8)
    assert 2 <= int(made["input_ids"].min()) <= int(made["input_ids"].max()) < 100
    assert bool(made["attention_mask"].all())
    again = inputs.batch(3, 8, 0, torch.device("cpu"), torch.float32)
    assert torch.equal(made["input_ids"], again["input_ids"])
    other = inputs.batch(3, 8, 1, torch.device("cpu"), torch.float32)
    assert not torch.equal(made["input_ids"], other["input_ids"])


@pytest.mark.parametrize(
    ("family", "shapes", "words"),
    [
        ("t5", {"input_ids": (2, 5), "decoder_input_ids": (2, 5)}, None),
        (
            "vit",
            {"pixel_values": (2, 3, IMAGE, IMAGE)},
            f"random pictures of 3 x {IMAGE} x {IMAGE}",
        ),
        ("tcompress_grid", {"grid_values": (2, 1, *VOLUME)}, "random volumes of 1 x 8 x 8 x 4"),
        ("tcompress_grid-series", {"past_values": (2, *SERIES[::-1])}, "random series of 16 x 3"),
    ],
)
def test_other_inputs(
    family: str, shapes: dict[str, tuple[int, ...]], words: str | None, sources: Sources
) -> None:
    inputs = RandomInputs.of(sources(family), sources(family))
    made = inputs.batch(2, 5, 0, torch.device("cpu"), torch.bfloat16)
    assert inputs.has_length is (words is None)
    if words is None:
        assert {name: tuple(made[name].shape) for name in shapes} == shapes
    else:
        assert {name: tuple(tensor.shape) for name, tensor in made.items()} == shapes
        assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
        assert inputs.words() == words


def test_a_token_that_a_model_does_not_know_ends_no_text(sources: Sources) -> None:
    known = sources("gpt2")
    config = copy.deepcopy(known.config)
    for last, expected in ((99, 99), (100, None), (50256, None)):
        config.eos_token_id = last
        assert RandomInputs.of(replace(known, config=config), known).last == expected


def test_models_with_other_inputs_cannot_be_compared(sources: Sources) -> None:
    with pytest.raises(InputError) as caught:
        RandomInputs.of(sources("vit"), sources("bert"))
    assert f"/vit` takes pictures of 3 x {IMAGE} x {IMAGE}, `" in caught.value.message
    assert caught.value.message.endswith("/bert` takes token ids under a full mask")


# -- whole runs
@pytest.mark.often("gpt2")
@pytest.mark.parametrize("family", ["gpt2", "t5", "whisper", "clip"])
def test_the_grid_is_measured(family: str, tmp_path: Path) -> None:
    folder = converted(family, tmp_path).folder
    done = bench([str(folder)], settings=Bench(**FEW, threads=1))[0]
    assert (done.model, done.baseline, done.saved) == (str(folder), str(tmp_path / family), True)
    assert [(item.batch, item.length, item.mode) for item in done.speed] == [
        (1, 4, "eager"),
        (2, 4, "eager"),
    ]
    assert tuple(read_manifest(folder).speed) == done.speed
    protocol = done.speed[0].protocol
    assert protocol["device"] == "cpu"
    assert protocol["device_name"]
    assert (protocol["dtype"], protocol["threads"], protocol["repeats"]) == ("float32", 1, 2)
    assert protocol["torch"] == torch.__version__
    assert all((item.peak_bytes or 0) > 0 for item in done.speed)


def test_pictures_have_their_own_length(tmp_path: Path) -> None:
    folder = converted("vit", tmp_path).folder
    done = bench([str(folder)], settings=Bench(batch=(1,), repeats=1))[0]
    assert [item.length for item in done.speed] == [(IMAGE // 4) ** 2 + 1]
    with pytest.raises(InputError, match="reads pictures or sounds, whose length is fixed"):
        bench([str(folder)], settings=Bench(batch=(1,), length=(8,)))


def test_a_dense_model_is_measured_but_not_kept(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "a")
    build("bert").to(torch.bfloat16).save_pretrained(tmp_path / "b")
    done = bench([str(tmp_path / "a")], str(tmp_path / "b"), Bench(**FEW))[0]
    assert not done.saved
    assert done.speed[0].protocol["dtype"] == "bfloat16"  # as the baseline
    assert not (tmp_path / "a" / "tcompress.json").exists()
    record_dense(tmp_path / "a")
    assert bench([str(tmp_path / "a")], str(tmp_path / "b"), Bench(**FEW))[0].saved


def test_other_heads_are_noted(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "a")
    build("bert").bert.save_pretrained(tmp_path / "b")
    done = bench([str(tmp_path / "a")], str(tmp_path / "b"), Bench(**FEW))[0]
    assert done.notes[0].endswith("a BertModel: what their heads cost is part of the times")


def test_what_was_measured_before_an_error_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Mock(side_effect=[speed(1), InputError("too large")])
    monkeypatch.setattr(paired_timing.PairedTiming, "measure", measured)
    with pytest.raises(InputError, match="too large"):
        bench([str(folder)], settings=Bench(**FEW))
    assert [item.batch for item in read_manifest(folder).speed] == [1]


def test_a_pass_that_fails_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def failing(*_: Any, input_ids: Any = None, attention_mask: Any = None) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("transformers.BertForMaskedLM.forward", failing)
    with pytest.raises(InputError) as caught:
        bench([str(folder)], settings=Bench(**FEW))
    assert caught.value.message == (
        f"`{folder}` cannot run batch 1, length 4: the memory is too small"
    )


def test_a_source_that_is_not_here_is_not_downloaded(tmp_path: Path, folder: Path) -> None:
    shutil.rmtree(tmp_path / "bert")
    with pytest.raises(InputError) as caught:
        bench([str(folder)])
    assert f"was made from `{tmp_path / 'bert'}`, which is not on this machine" in str(caught.value)


def test_a_source_that_changed_is_refused(tmp_path: Path, folder: Path) -> None:
    build("bert", seed=1).save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="no longer holds the weights that"):
        bench([str(folder)])
    assert bench([str(folder)], str(tmp_path / "bert"), Bench(**FEW))[0].speed


# -- the manifest
def test_equal_passes_are_replaced(folder: Path) -> None:
    others = [
        speed(mode="compiled"),
        speed(length=64),
        speed(baseline="bigger"),
        speed(protocol={**MACHINE, "threads": 4}),
        speed(protocol={**MACHINE, "dtype": "bfloat16"}),
        speed(protocol={**MACHINE, "device_name": "another"}),
    ]
    assert record(folder, "speed", [speed(), *others], same_pass)
    newer = speed(ratio=3.0, protocol={**MACHINE, "repeats": 9})
    assert record(folder, "speed", [newer], same_pass)
    assert read_manifest(folder).speed == [*others, newer]


# -- the machine
def test_peak_memory_is_what_the_pass_holds_at_once() -> None:
    x = torch.zeros(256, 256)

    def work(_: object) -> None:
        one = x + 1
        two = one + 1
        del one
        del two
        x + 1

    peak = Pass(work).peak_bytes(torch.device("cpu"))
    assert 2 * x.nbytes <= peak < 2.1 * x.nbytes
    assert Pass(work).peak_bytes(torch.device("meta")) is None
    ready = Pass(work, lambda: x + 2).peak_bytes(torch.device("cpu"))
    assert ready is not None
    assert 0.9 * x.nbytes < ready - peak < 1.1 * x.nbytes


def test_threads_are_set_for_a_while() -> None:
    before = torch.get_num_threads()
    with threads(before + 1) as count:
        assert torch.get_num_threads() == count == before + 1
    assert torch.get_num_threads() == before


# -- the compiler
def test_a_compiler_that_does_not_work_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = RuntimeError("no working C++ compiler.\nmany\nlines")
    monkeypatch.setattr(torch, "compile", Mock(side_effect=broken))
    with pytest.raises(InputError) as caught:
        bench([str(folder)], settings=Bench(**FEW, mode=("compiled",)))
    assert caught.value.message == (
        "`torch.compile` cannot run here (RuntimeError: no working C++ compiler)"
    )
    assert caught.value.hint.startswith("use `--mode eager`")
    assert caught.value.exit_code == 2


def test_compiled_passes_are_compiled_for_every_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def compiled(model: torch.nn.Module, **_: Any) -> Callable[..., object]:
        log.append("compiled")
        return model

    monkeypatch.setattr(paired_timing, "require_compiler", lambda _: log.append("tried"))
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "reset", lambda: log.append("forgot"))
    settings = Bench(**FEW, mode=("eager", "compiled"))
    done = bench([str(folder)], settings=settings, save=False)[0]
    assert [item.mode for item in done.speed] == ["eager", "eager", "compiled", "compiled"]
    assert log == ["tried", *2 * ["forgot", "compiled", "compiled"]]


def test_the_baseline_is_loaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(side_effect=benchmark.load_model)
    monkeypatch.setattr(benchmark, "load_model", load)
    bench([str(folder), str(folder)], settings=Bench(**FEW), save=False)
    loaded = [asked.args[0].folder.name for asked in load.call_args_list]
    assert loaded == ["bert", "bert-small", "bert-small"]


def test_spread_is_that_of_the_middle_half() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(2 / 3)
    assert spread([1.0, 2.0, 3.0]) is None


# -- as it is typed
TYPED = ("--batch", "1,2", "--length", "4", "--repeats", "1", "--quiet")


@pytest.fixture
def gpt2_folder(tmp_path: Path, own_folder: None) -> None:
    converted("gpt2", tmp_path)


@pytest.mark.usefixtures("gpt2_folder")
def test_a_table() -> None:
    done = completed("bench", "gpt2-small", "--against", "gpt2", *TYPED, "--threads", "1")
    assert done.lines[0] == "gpt2-small against gpt2"
    names = "batch length mode time dense ratio tokens/s memory dense"
    assert done.lines[1].split() == names.split()
    assert [line.split()[:3] for line in done.lines[3:5]] == [
        ["1", "4", "eager"],
        ["2", "4", "eager"],
    ]
    assert done.lines[5].startswith("cpu, 1 thread, float32")
    assert done.lines[-1] == "Kept in `gpt2-small/tcompress.json`."
    kept = read_manifest(Path("gpt2-small")).speed
    assert [speed.baseline for speed in kept] == ["gpt2", "gpt2"]
    for item in kept:  # the smaller model takes less memory
        assert (item.weight_bytes or 0) < (item.baseline_weight_bytes or 0)


@pytest.mark.usefixtures("gpt2_folder")
def test_one_document() -> None:
    both = ("gpt2-small", "gpt2", "--against", "gpt2")
    first, second = completed("bench", *both, *TYPED, "--no-save", "--json").document["benches"]
    assert (first["model"], first["baseline"], first["saved"]) == ("gpt2-small", "gpt2", False)
    assert second["model"] == "gpt2"
    assert {"ratio", "milliseconds", "peak_bytes", "protocol"} <= set(first["speed"][0])
    assert read_manifest(Path("gpt2-small")).speed == []


@pytest.mark.usefixtures("gpt2_folder")
def test_kept_weights() -> None:
    arguments = ("bench", "gpt2-small", "--against", "gpt2", *TYPED, "--keep-weights")
    done = completed(*arguments, "--threads", "1")
    assert done.lines[5].startswith("cpu, 1 thread, float32, weights kept")
    size = 4 * 2 * (32 * 96 + 32 * 32 + 2 * 32 * 64)  # two blocks: qkv, o, up and down, float32
    assert f"note: kept weights take {size:,} bytes of memory beside " in done.out
    run(*arguments[:-1], "--threads", "1")  # times without are other times
    speeds = read_manifest(Path("gpt2-small")).speed
    kept = [speed.protocol.get("kept_weights_bytes") for speed in speeds]
    assert kept == [size, size, None, None]


@pytest.mark.usefixtures("gpt2_folder")
def test_a_dense_model_keeps_nothing() -> None:
    done = run("bench", "gpt2", "--against", "gpt2", *TYPED)
    assert done.lines[-1] == "Not kept: `gpt2` is no folder with a `tcompress.json` to write to."
