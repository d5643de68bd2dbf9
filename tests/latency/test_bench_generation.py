"""Timing of generated text: what is decoded, what is held in memory, what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tcompress.artifact.manifest import read_manifest
from tcompress.data.inputs import inputs_of
from tcompress.errors import InputError
from tcompress.latency import paired_timing
from tcompress.latency.benchmark import bench
from tcompress.latency.generation import Generation, check_generates
from tcompress.latency.sizes import Cell, RandomInputs, cells
from tcompress.models import SourceModel
from tcompress.options import Bench
from tests.support.cli import completed
from tests.support.converted import converted
from tests.support.tiny import TINY, build

FEW = {"batch": (2,), "length": (8,), "repeats": 1, "threads": 1}
BOTH = ("dynamic", "static")
LAYERS, HEADS, SIZE = 2, 2, 8  # of the tiny Llama, keys and values


def saved(family: str, folder: Path, **options: Any) -> SourceModel:
    tiny = TINY[family]
    replace(tiny, options={**tiny.options, **options}).build().save_pretrained(folder / family)
    return SourceModel.open(str(folder / family))


def made_of(source: SourceModel, tokens: int, cache: str) -> tuple[Any, dict[str, Tensor], Any]:
    """Loads a model; gives it, inputs, and its generation."""
    model = source.model_class.from_pretrained(source.folder).eval()
    inputs = RandomInputs.of(source, source)
    batch = inputs.batch(2, 8, 0, torch.device("cpu"), torch.float32)
    return model, batch, Generation(model, inputs.inputs, batch, tokens, cache)


def greedy(model: Any, inputs: dict[str, Tensor], tokens: int) -> Tensor:
    """Decodes by whole passes, without a cache.  # -> (batch, tokens)."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    given = {key: value for key, value in inputs.items() if key != "attention_mask"}
    ids = inputs[name]
    ids = ids[:, :1] if len(given) > 1 and "input_ids" in given else ids
    start = ids.shape[1]
    for _ in range(tokens):
        scores = model(**{**given, name: ids}, use_cache=False).logits
        ids = torch.cat([ids, scores[:, -1:].argmax(-1)], 1)
    return ids[:, start:]


# -- the grid
def test_compiled_steps_have_a_static_cache() -> None:
    assert cells((1,), (4,), ("compiled", "eager"), BOTH) == [
        Cell(1, 4, "eager"),
        Cell(1, 4, "eager", "prefill", "dynamic"),
        Cell(1, 4, "eager", "prefill", "static"),
        Cell(1, 4, "eager", "decode", "dynamic"),
        Cell(1, 4, "eager", "decode", "static"),
        Cell(1, 4, "compiled"),
        Cell(1, 4, "compiled", "decode", "static"),
    ]


def test_batches_follow_from_what_is_timed() -> None:
    assert (Bench().batches, Bench(generate=4).batches) == ((1, 8, 32), (1, 8))
    assert Bench(generate=4, batch=(3,)).batches == (3,)
    assert (Bench().caches, Bench(generate=4).caches) == ((), ("dynamic",))


# -- what is decoded
@pytest.mark.often("whisper-static")
@pytest.mark.parametrize("cache", BOTH)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "t5", "whisper"])
def test_steps_see_all_that_came_before(family: str, cache: str, tmp_path: Path) -> None:
    window = {"sliding_window": 6} if family == "mistral" else {}  # shorter than the prompt
    with torch.inference_mode():
        model, inputs, text = made_of(saved(family, tmp_path, **window), 3, cache)
        wanted = greedy(model, inputs, 4)[:, -1:]
        steps = text.decoding()
        for _ in range(2):  # the second time begins after the prompt again
            given = steps.ready()
            steps.run(given)
            ids = given.get("decoder_input_ids", given.get("input_ids"))
            assert torch.equal(ids, wanted)


# -- memory
@pytest.mark.parametrize("cache", BOTH)
def test_memory_counts_the_cache(cache: str, tmp_path: Path) -> None:
    text = made_of(saved("llama", tmp_path), 40, cache)[-1]
    whole = LAYERS * 2 * 2 * HEADS * SIZE * 4 * (8 + 40)  # keys and values, batch 2, float32
    with torch.inference_mode():
        for timed in (text.prefilling(), text.decoding()):
            given = timed.ready()
            at_start = 0 if given is None else whole if cache == "static" else whole * 8 / 48
            peak = timed.peak_bytes(torch.device("cpu")) or 0
            assert peak > at_start
        assert whole < peak < 2 * whole  # what a step needs is small beside it


# -- whole runs
@pytest.mark.often("llama")
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_generation_is_measured(family: str, tmp_path: Path) -> None:
    folder = converted(family, tmp_path).folder
    done = bench([str(folder)], settings=Bench(**FEW, generate=5, cache=BOTH))[0]
    assert [item.how for item in done.speed] == [
        "eager", "prefill", "prefill, static", "decode", "decode, static",
    ]  # fmt: skip
    assert tuple(read_manifest(folder).speed) == done.speed
    for item in done.speed[1:]:
        assert (item.batch, item.length, item.protocol["new_tokens"]) == (2, 8, 5)
        assert min(item.peak_bytes or 0, item.weight_bytes or 0) > 0
    assert "new_tokens" not in done.speed[0].protocol
    bench([str(folder)], settings=Bench(**FEW, generate=5))
    bench([str(folder)], settings=Bench(**FEW, generate=6))
    numbers = [item.protocol.get("new_tokens") for item in read_manifest(folder).speed]
    assert numbers.count(5) == 4  # measured anew
    assert numbers.count(6) == 2  # another measurement


def test_times_are_of_one_token(tmp_path: Path) -> None:
    folder, looks = converted("llama", tmp_path).folder, iter(range(10**6))
    settings = Bench(**FEW, generate=4)
    found = bench([str(folder)], settings=settings, save=False, clock=lambda: float(next(looks)))
    forward, prefill, decode = found[0].speed  # each pass takes a second by this clock
    assert [item.milliseconds for item in (forward, prefill, decode)] == [1000, 1000, 250]
    assert [item.tokens_per_second for item in (forward, prefill, decode)] == [16, 16, 8]


def test_steps_are_compiled_once_for_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, log = converted("llama", tmp_path).folder, []

    def compiled(model: torch.nn.Module, **options: Any) -> Callable[..., object]:
        log.append(options["dynamic"])
        return model

    monkeypatch.setattr(paired_timing, "require_compiler", lambda _: None)
    monkeypatch.setattr(torch, "compile", compiled)
    settings = Bench(**FEW, mode=("compiled",), generate=2, cache=("static",))
    done = bench([str(folder)], settings=settings, save=False)[0]
    assert [item.how for item in done.speed] == ["compiled", "decode, static, compiled"]
    assert log == [False, False, None, None]


# -- what is refused
def test_a_model_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved("gpt2", tmp_path)
    check_generates(source)
    names = inputs_of(source).names - {"past_key_values"}
    bare = replace(inputs_of(source), names=names)
    monkeypatch.setattr("tcompress.latency.generation.inputs_of", lambda _: bare)
    with pytest.raises(InputError, match="fills no cache of Transformers"):
        check_generates(source)


def test_prompts_leave_room(tmp_path: Path) -> None:
    source = saved("llama", tmp_path)  # 64 positions
    inputs = RandomInputs.of(source, source)
    assert inputs.fitting((32, 128), 4) == (32,)
    assert inputs.fitting((100, 200), 4) == (60,)
    with pytest.raises(InputError, match="length 61 with 4 tokens after it was asked") as caught:
        inputs.check((8, 61), 4)
    assert caught.value.hint == "give `--length 60` or less, or `--at` with so many tokens"
    with pytest.raises(InputError, match="64 tokens after a prompt were asked for"):
        inputs.fitting((32,), 64)


# -- as it is typed
def test_a_table_of_generation(tmp_path: Path, own_folder: None) -> None:
    build("gpt2").save_pretrained("gpt2")
    options = ("--batch", "1", "--length", "4", "--repeats", "1", "--threads", "1", "--quiet")
    done = completed("bench", "gpt2", "--against", "gpt2", *options, "--generate", "3")
    assert [line.split()[:3] for line in done.lines[3:6]] == [
        ["1", "4", "eager"],
        ["1", "4", "prefill"],
        ["1", "4", "decode"],
    ]
    assert "decode is one token after the prompt, the mean of 3" in done.out
