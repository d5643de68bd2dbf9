"""Sides that several layers share: computed once, and exact in gradients."""

import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tcompress.structures import structure
from tcompress.structures.modules.linear import PartLayout, StructuredLinear
from tests.support.sharing import LPROD, METHODS, OUTPUTS, WIDTH, Trio, terms_of
from tests.support.structures import fill_random, randn


def _wanted(trio: Trio, x: Tensor) -> Tensor:
    """What three layers give that keep nothing."""
    alone = [getattr(trio, name).dense_weight(x.dtype) for name in trio.names]
    bias = [getattr(trio, name).bias for name in trio.names]
    return x @ torch.cat(alone).T + torch.cat(bias)


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """Collects what every call of `encode` of `lprod` returned."""
    kind, found = structure("lprod"), []
    encode = type(kind).encode

    def counting(self: object, *args: Any) -> Tensor:
        result = encode(self, *args)  # type: ignore[arg-type]
        found.append(weakref.ref(result))
        return result

    monkeypatch.setattr(type(kind), "encode", counting)
    return found


# ---------------------------------------------------------------- computed once
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
}  # fmt: skip
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@every_mode
@pytest.mark.parametrize("method", LPROD)
def test_every_input_is_encoded_once_and_dropped_when_all_have_read_it(
    method: str, mode: Any, encodings: list[weakref.ref[Tensor]]
) -> None:
    trio = Trio(method).train()
    with mode():
        for step in range(3):
            x = randn(2, 3, WIDTH, seed=step)
            y = trio(x)
            assert len(encodings) == step + 1
            assert_close(y, _wanted(trio, x))
            encodings[:] = encodings[: step + 1]
    del y
    gc.collect()
    assert [encoding() for encoding in encodings] == [None] * 3


def test_parts_of_a_fused_layer_share_one_encoding(encodings: list[weakref.ref[Tensor]]) -> None:
    parts = [PartLayout(name=f"p{n}", terms=terms_of("fitted", n)) for n in OUTPUTS]
    layer = StructuredLinear(parts, dtype=torch.float64)
    fill_random(layer)
    x = randn(5, WIDTH)
    y = layer(x)
    assert len(encodings) == 1
    assert_close(y, x @ layer.dense_weight().T)


@every_mode
def test_inputs_that_not_all_layers_read(mode: Any) -> None:
    trio = Trio("fitted")
    with mode():
        for step in range(4):  # freed inputs may come back at the same address
            x = randn(5, WIDTH, seed=step)
            assert_close(trio.q(x), x @ trio.q.dense_weight().T + trio.q.bias)
            del x
        x, other = randn(5, WIDTH, seed=8), randn(5, WIDTH, seed=9)
        q, k = trio.q(x), trio.k(other)
        assert_close(q, x @ trio.q.dense_weight().T + trio.q.bias)
        assert_close(k, other @ trio.k.dense_weight().T + trio.k.bias)
        assert_close(trio(x), _wanted(trio, x))


@pytest.mark.parametrize(
    ("mode", "reader"),
    [
        *((mode, "q") for mode in MODES.values()),
        # Tensors of inference mode do not count their versions.
        *((mode, "k") for name, mode in MODES.items() if name != "inference"),
    ],
)
def test_in_place_changes_of_the_input_are_seen(mode: Any, reader: str) -> None:
    trio = Trio("fitted")
    again = getattr(trio, reader)
    with mode():
        x = randn(5, WIDTH)
        trio.q(x)
        x.mul_(2)
        assert_close(again(x), x @ again.dense_weight().T + again.bias)


def test_gradient_mode_between_readers() -> None:
    trio, x = Trio("fitted"), randn(5, WIDTH)
    with torch.no_grad():
        trio.q(x)
    trio.k(x).sum().backward()
    assert trio.generators.grad is not None
    with torch.no_grad():
        assert not trio.v(x).requires_grad


def test_autocast_between_readers() -> None:
    trio, x = Trio("fitted").float(), randn(5, WIDTH).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert trio.q(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert_close(trio.k(x), x @ trio.k.dense_weight(torch.float32).T + trio.k.bias)


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("residual", [0, 2])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_equal_the_sum_of_unshared_ones(method: str, residual: int) -> None:
    trio, alone = (Trio(method, shared=shared, residual=residual) for shared in (True, False))
    x = randn(5, WIDTH).requires_grad_()
    mixing = randn(5, sum(OUTPUTS), seed=1)
    sides = {name for name, _ in trio.named_parameters() if "tc_in" in name}
    own = dict(alone.named_parameters())
    with torch.no_grad():
        for name, parameter in trio.named_parameters():
            for reader in "qkv" if name in sides else name[0]:
                own[reader + name[1:]].copy_(parameter)
    (trio(x) * mixing).sum().backward()
    x_grad, x.grad = x.grad, None
    (alone(x) * mixing).sum().backward()
    assert_close(x_grad, x.grad)
    for name, parameter in trio.named_parameters():
        readers = "qkv" if name in sides else name[0]
        wanted = torch.stack([own[reader + name[1:]].grad for reader in readers]).sum(0)
        assert_close(parameter.grad, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    plain, saved, x = Trio("fitted"), Trio("fitted"), randn(5, WIDTH).requires_grad_()
    for _ in range(2):  # the same input in both steps, with changed generators
        results = []
        for trio in (plain, saved):
            trio.zero_grad()
            x.grad = None
            y = trio(x) if trio is plain else checkpoint(trio, x, use_reentrant=reentrant)
            y.square().sum().backward()
            results.append([x.grad, *(parameter.grad for parameter in trio.parameters())])
            torch.optim.SGD(trio.parameters(), lr=0.01).step()
        assert_close(*results)


def test_one_reader_may_run_backward_again() -> None:
    trio, x = Trio("fitted"), randn(5, WIDTH)
    trio.q(x).sum().backward()
    first = trio.generators.grad.clone()
    trio.q(x).sum().backward()
    assert_close(trio.generators.grad, 2 * first)


def test_one_reader_sees_a_change_of_the_side() -> None:
    trio, x = Trio("fitted"), randn(5, WIDTH)
    with torch.no_grad():
        trio.q(x)
        trio.generators.add_(0.1)
        assert_close(trio.q(x), x @ trio.q.dense_weight().T + trio.q.bias)


# ---------------------------------------------------------------- threads
@pytest.fixture
def often_switched() -> Any:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def _in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Does work in several threads; raises what one of them does."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


@pytest.mark.usefixtures("often_switched")
@pytest.mark.parametrize("grad", [False, True])
def test_threads_with_their_own_inputs(grad: bool) -> None:
    trio = Trio("fitted")
    inputs = [randn(5, WIDTH, seed=seed) for seed in range(4)]
    wanted = [_wanted(trio, x).detach() for x in inputs]

    def work(index: int) -> None:
        for _ in range(20):
            with torch.set_grad_enabled(grad):
                assert_close(trio(inputs[index]).detach(), wanted[index])

    _in_threads(work)


@pytest.mark.usefixtures("often_switched")
def test_threads_in_different_dtypes() -> None:
    trio, x = Trio("fitted").float(), randn(5, WIDTH).float()

    def work(index: int) -> None:
        for _ in range(30):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
                assert trio(x).dtype == (torch.float32 if index % 2 else torch.bfloat16)

    _in_threads(work)


@pytest.mark.parametrize("method", ["dct", "fitted"])
def test_gradients_of_each_sample(method: str) -> None:
    """By `torch.func`, whose tensors have no memory of their own."""
    trio = Trio(method).train()
    parameters = {name: value.detach() for name, value in trio.named_parameters()}
    x = randn(3, 2, WIDTH)

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(trio, values, (row,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    trio(x).square().sum().backward()
    for name, value in trio.named_parameters():
        assert_close(each[name].sum(0), value.grad)
