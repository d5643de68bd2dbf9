"""Paused forward passes, and what a data-aware conversion sees through them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bert import modeling_bert

from tcompress.blockwise.streams import (
    Call,
    PartialModel,
    Readings,
    Stream,
    intercept_blocks,
    token_rows,
)
from tcompress.conversion.converter import convert
from tcompress.data.calibration import CalibrationData
from tcompress.errors import DataError
from tcompress.fitting import block_rewrite
from tcompress.fitting.layer_fits import FittedLayer, LayerMoments, fit_layers
from tcompress.linalg.moments import Moments
from tcompress.models import SourceModel
from tcompress.planning.entries import LayerPlan
from tcompress.roles.find import find_roles
from tcompress.structures.modules.experts import StructuredExperts
from tests.support.calibrating import one_by_one
from tests.support.conversions import calibration, distance, outputs, recipe, threads
from tests.support.tiny import TINY, build

Tiny = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threads()
    yield
    assert threads() == before


def _names(model: nn.Module) -> list[str]:
    return [block.name for block in find_roles(model).blocks]


@pytest.mark.parametrize("family", TINY)
def test_answering_with_the_own_forward_changes_nothing(family: str) -> None:
    model, batches = build(family), [TINY[family].inputs(2, 8, seed) for seed in (0, 1)]
    model.config.use_cache = False
    wanted = [outputs(model, batch) for batch in batches]
    results: dict[int, Any] = {}

    def keep(index: int) -> Callable[..., None]:
        return lambda **batch: results.update({index: model(**batch)})

    own = intercept_blocks(model, _names(model))
    streams = [Stream(keep(index), batch) for index, batch in enumerate(batches)]
    for stream in streams:
        stream.start()
    order: list[str] = []
    while (call := streams[0].call) is not None:
        order.append(call.block)
        for stream in streams:
            assert stream.call.block == order[-1]
            with torch.no_grad():
                stream.answer(own[order[-1]](*stream.call.args, **stream.call.kwargs))
    for stream in streams:
        stream.close()
    assert sorted(order) == sorted(own)
    for index, expected in enumerate(wanted):
        assert distance(outputs(lambda index: results[index], {"index": index}), expected) == 0


class _Chain(nn.Module):
    """Blocks in a row, some of which may run again."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.h[index](x)
        return x


def _started(model: nn.Module) -> Stream:
    intercept_blocks(model, ["h.0", "h.1"])
    stream = Stream(model, {"x": torch.ones(2, 4)})
    stream.start()
    return stream


def test_gradients_are_off_in_streams() -> None:
    stream = _started(_Chain((0, 1)))
    stream.answer(stream.call.args[0] * 1.0)
    assert not stream.call.args[0].requires_grad
    stream.close()


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_closing_ends_the_thread(answers: int) -> None:
    before = threads()
    stream = _started(_Chain((0, 1)))
    assert threads() == before + 1
    for _ in range(answers):
        stream.answer(torch.zeros(2, 4))
    stream.close()
    stream.close()


def test_closing_what_never_started() -> None:
    Stream(_Chain((0,)), {"x": torch.ones(2, 4)}).close()


class _Fails(_Chain):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise ArithmeticError("in the model")


def test_errors_before_the_first_block_surface_in_the_main_thread() -> None:
    model = _Fails(())
    intercept_blocks(model, ["h.0"])
    stream = Stream(model, {"x": torch.ones(2, 4)})
    with pytest.raises(ArithmeticError, match="in the model"):
        stream.start()
    stream.close()


def test_errors_after_a_block_surface_in_the_main_thread() -> None:
    stream = _started(_Fails((0,)))
    with pytest.raises(ArithmeticError, match="in the model"):
        stream.answer(torch.ones(2, 4))
    stream.close()


def test_errors_of_the_model_leave_no_thread(tiny: Tiny, tmp_path: Path) -> None:
    data = calibration("llama")
    data.batches[1]["input_ids"][0, 0] = 10_000  # no such token
    with pytest.raises(IndexError):
        convert(str(tiny("llama")), recipe(aware=True), tmp_path / "out", data=data)


def _run_in_order(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the order in which the encoder of bert runs its two blocks."""

    def forward(self: Any, x: Tensor, mask: Any = None, *args: Any, **options: Any) -> Any:
        for index in order:
            x = self.layer[index](x, mask)
        return modeling_bert.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=x)

    monkeypatch.setattr(modeling_bert.BertEncoder, "forward", forward)


@pytest.mark.parametrize("order", [(0, 0, 1), (0, 1, 0, 1)])
def test_a_block_that_runs_twice_is_refused(
    order: tuple[int, ...], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run_in_order(order, monkeypatch)
    with pytest.raises(DataError, match="runs more than once") as failed:
        _convert(tiny("bert"), tmp_path, calibration("bert"))
    assert "--calib none" in (failed.value.hint or "")


def test_blocks_are_fitted_in_the_order_in_which_they_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run_in_order((1, 0), monkeypatch)
    seen = _convert(tiny("bert"), tmp_path, calibration("bert"))
    blocks = dict.fromkeys(entry.block for entry, _ in seen)
    assert list(blocks) == ["bert.encoder.layer.1", "bert.encoder.layer.0"]


Seen = list[tuple[LayerPlan, list[LayerMoments]]]


def _convert(source: Path, folder: Path, data: CalibrationData) -> Seen:
    """Convert a saved model; gives what its layers were fitted on."""
    seen: Seen = []

    def fit(layers: Any, **options: Any) -> list[FittedLayer]:
        seen.extend((layer.entry, layer.moments) for layer in layers)
        return fit_layers(layers, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_rewrite, "fit_layers", fit)
        output = folder / f"out{len(list(folder.iterdir()))}"
        convert(str(source), recipe(aware=True), output, data=data)
    return seen


# Lengths of two examples, for the encoder (or the only model) and for the decoder.
LENGTHS = {
    "bert": ((8, 5), ()),
    "llama": ((8, 5), ()),
    "opt": ((8, 5), ()),  # flattens what its feed-forward layers read
    "mixtral": ((8, 5), ()),
    "clip, as long as its pictures": ((17, 5), ()),
    "t5": ((8, 5), (6, 8)),
    "bart": ((8, 5), (8, 6)),
    "whisper": ((), (8, 6)),
    "whisper, as long as its encoder": ((), (16, 6)),
}


def _padded(
    family: str, lengths: tuple[tuple[int, ...], tuple[int, ...]], seed: int
) -> dict[str, Tensor]:
    """Two examples in one batch, with padding."""
    batch: dict[str, Tensor] = {}
    drawn = TINY[family].inputs(2, max(max(own, default=1) for own in lengths), seed)
    for prefix, own in zip(("", "decoder_"), lengths, strict=True):
        if not own:
            continue
        ids = torch.randint(4, 100, (2, max(own)), generator=torch.Generator().manual_seed(seed))
        mask = torch.arange(max(own)) < torch.tensor(own)[:, None]
        batch[f"{prefix}input_ids"] = ids * mask
        batch[f"{prefix}attention_mask"] = mask.long()
    others = ("pixel_values", "input_features")
    return batch | {name: drawn[name] for name in others if name in drawn}


@pytest.mark.often("opt")
@pytest.mark.parametrize("case", LENGTHS)
def test_padding_is_left_out(case: str, tiny: Tiny, tmp_path: Path) -> None:
    family = case.partition(",")[0]
    padded = [_padded(family, LENGTHS[case], seed) for seed in range(4)]
    single = [example for batch in padded for example in one_by_one(batch)]
    one = _convert(tiny(family), tmp_path, CalibrationData(padded, [3], "padded", 8, 0, "a"))
    two = _convert(tiny(family), tmp_path, CalibrationData(single, [6, 7], "single", 8, 0, "b"))
    assert len(one) == len(two) > 0
    for (entry, with_padding), (other, without) in zip(one, two, strict=True):
        assert entry == other
        for found, wanted in zip(with_padding, without, strict=True):
            _assert_close(entry, found.train, wanted.train)
            _assert_close(entry, found.holdout, wanted.holdout)


def _assert_close(entry: LayerPlan, found: Moments | None, wanted: Moments | None) -> None:
    if found is None or wanted is None:  # an expert that no token chose
        assert found is wanted, entry.name
        return
    assert found.rows == wanted.rows, entry.name
    for name in ("gram", "cross", "dense", "mean", "dense_mean"):
        one, two = getattr(found, name), getattr(wanted, name)
        assert float((one - two).norm()) <= 2e-3 * max(float(two.norm()), 1e-3), (entry.name, name)


MASK = {"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}


KEPT = (True, False)


def test_passes_whose_output_nobody_keeps_end_at_the_head(tiny: Tiny) -> None:
    model = PartialModel(SourceModel.open(str(tiny("llama"))), torch.device("cpu"), head=True)
    batches, rows = [TINY["llama"].inputs(2, 8, seed) for seed in (0, 1)], []
    model.model.get_output_embeddings().register_forward_hook(lambda *it: rows.append(len(it[2])))
    streams = [model.stream(batch, keep=keep) for batch, keep in zip(batches, KEPT, strict=True)]
    for _ in model.walk(streams):
        for stream in streams:
            stream.answer(model.answer_of(stream))
    assert tuple(stream.output is not None for stream in streams) == KEPT
    assert rows == [2]


def test_a_mask_of_another_shape_is_not_taken() -> None:
    assert token_rows(torch.zeros(3, 2, 4), MASK, "layers.0", "q")[1] is None
    assert token_rows(torch.zeros(2, 5, 4), MASK, "layers.0", "q")[1] is None


def test_running_up_to_a_layer() -> None:
    model = _Chain((0, 1))
    x = torch.ones(2, 4)
    call = Call("chain", (), {"x": x})
    assert torch.equal(call.input_of(model.h[1], model), model.h[0](x))
    assert call.input_of(nn.Linear(4, 4), model) is None
    assert not model.h[1]._forward_pre_hooks


class _Half(nn.Module):
    """Two layers, the second of which reads what is changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.up(x)
        out = self.down(hidden)
        hidden.mul_(2)
        return out


@pytest.mark.parametrize(("room", "calls"), [(2**20, 2), (0, 3)])
def test_a_block_runs_once_for_all_that_is_read(room: int, calls: int) -> None:
    block, x = _Half(), torch.ones(2, 3, 4)
    stream: Any = SimpleNamespace(waiting=Call("half", (x,), {}))
    readings = Readings(block, block.forward, ("up", "down"), room)
    assert torch.equal(readings.of(stream, "up"), x)
    found = readings.of(stream, "down")  # asked for again: what was kept has changed
    assert torch.equal(found, block.up(x))
    assert torch.equal(readings.answer(stream), block.down(block.up(x)))
    assert block.calls == calls


def test_what_layers_read_is_forgotten() -> None:
    block, x = _Half(), torch.ones(2, 3, 4)
    stream: Any = SimpleNamespace(waiting=Call("half", (x,), {}))
    readings = Readings(block, block.forward, ("up", "down"), 2**20)
    assert readings.of(stream, "up") is x
    readings.drop(["up"])
    assert readings.of(stream, "up") is x  # it is computed again
    assert block.calls == 2
    answer = readings.answer(stream)
    assert block.calls == 2
    readings.drop()
    assert torch.equal(readings.answer(stream), answer)
    assert block.calls == 3


def _routes(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> list[list[Tensor]]:
    """Which experts the tokens of each batch go to, block by block."""
    found: list[list[Tensor]] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: found[-1].append(args[1]))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    for batch in batches:
        found.append([])
        outputs(model, batch)
    for handle in handles:
        handle.remove()
    return found


def test_routing_is_that_of_the_dense_model(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, data = build("mixtral"), calibration("mixtral")
    replayed: list[Tensor] = []
    own = StructuredExperts.forward

    def forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        replayed.append(index)
        return own(self, hidden, index, weights)

    with monkeypatch.context() as patch:
        patch.setattr(StructuredExperts, "forward", forward)
        seen = _convert(tiny("mixtral"), tmp_path, data)
    wanted = _routes(dense, data.batches)
    # Only the first block runs whole in the compressed stream: nothing comes after the second.
    assert all(torch.equal(a, b[0]) for a, b in zip(replayed, wanted, strict=True))
    small = type(dense).from_pretrained(tmp_path / "out0")
    free = _routes(small, data.batches)
    assert any(not torch.equal(a[0], b[0]) for a, b in zip(free, wanted, strict=True))
    experts = [item for item in seen if item[0].kind == "experts"]
    assert len(experts) == 4
    for entry, moments in experts:
        block = int(entry.block.rpartition(".")[2])
        for flag, batches in ((False, [0, 1]), (True, [2])):
            counts = torch.zeros(4, dtype=torch.long)
            for index in batches:
                real = data.batches[index]["attention_mask"].flatten().bool()
                counts += torch.bincount(wanted[index][block][real].flatten(), minlength=4)
            parts = [item.holdout if flag else item.train for item in moments]
            assert [0 if part is None else part.rows for part in parts] == counts.tolist()
