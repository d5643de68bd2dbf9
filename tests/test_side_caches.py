"""Sides that are built once: never stale, and no hindrance to autograd, compilers and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tcompress.structures import Site, structure
from tests.support.sharing import METHODS, WIDTH, Trio
from tests.support.structures import make_layer, randn, reference_of
from tests.support.tiers import tiered


def _step(optimiser: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], None]:
    def change(layer: nn.Module) -> None:
        stepping = optimiser(layer.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
        layer(randn(5, WIDTH, seed=4)).square().sum().backward()
        stepping.step()

    return change


def _load(assign: bool) -> Callable[[nn.Module], None]:
    def change(layer: nn.Module) -> None:
        state = {name: tensor + 0.1 for name, tensor in layer.state_dict().items()}
        layer.load_state_dict(state, assign=assign)

    return change


def _in_place(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1)


def _through_data(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.data.add_(0.1)


def _new_data(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.data = parameter.data + 0.1


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "sgd": _step(torch.optim.SGD),
    "adamw": _step(torch.optim.AdamW),
    "adamw foreach": _step(torch.optim.AdamW, foreach=True),
    "adamw fused": _step(torch.optim.AdamW, fused=True),  # the default of Trainer
    "sgd fused": _step(torch.optim.SGD, fused=True),
    "load_state_dict": _load(False),
    "load_state_dict assign": _load(True),
    "in place": _in_place,
    "in place through data": _through_data,
    "new data": _new_data,
    "to float16 and back": lambda layer: layer.half().double(),
    "to float32": lambda layer: layer.float(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("place", ["in", "out"])
def test_blocks_follow_the_generators(change: Callable[[nn.Module], None], place: Any) -> None:
    kind = structure("lprod")
    spec = kind.spec(transform="fitted", block=4, placement=place)
    layer = make_layer(kind.layout(spec, Site(WIDTH, 24, place)))
    x = randn(5, WIDTH)
    with torch.no_grad():
        before = layer(x)  # builds the blocks
    change(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            assert bool(parameter.isfinite().all())
        x = x.to(layer.weight.dtype)
        wanted = x.double() @ reference_of(layer).T
        assert_close(layer(x).double(), wanted, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(before, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_training_after_inference_mode(method: str) -> None:
    trio, x = Trio(method), randn(5, WIDTH)
    for name, parameter in trio.named_parameters():
        parameter.requires_grad_("generators" not in name)
    with torch.inference_mode():
        wanted = trio(x).clone()
    y = trio(x.clone().requires_grad_())
    assert_close(y.detach(), wanted)
    y.sum().backward()


@pytest.mark.parametrize(
    ("method", "grad"),
    tiered(
        [*((name, True) for name in METHODS), ("dct", False), ("fitted", False)],
        lambda row: row[0] in ("lowrank", "fitted", "tt"),
    ),
)
def test_compiles_into_one_graph(method: str, grad: bool) -> None:
    torch._dynamo.reset()
    trio, x = Trio(method, residual=2), randn(5, WIDTH)
    compiled = torch.compile(trio, backend="eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        assert_close(compiled(x), trio(x))
    if grad:
        got = torch.autograd.grad(compiled(x).sum(), list(trio.parameters()))
        wanted = torch.autograd.grad(trio(x).sum(), list(trio.parameters()))
        for ours, theirs in zip(got, wanted, strict=True):
            assert_close(ours, theirs)
    torch._dynamo.reset()


@pytest.mark.parametrize("method", ["lowrank", "tt", "tt-contract", "dct", "fitted"])
def test_exports_with_any_number_of_tokens(method: str) -> None:
    trio = Trio(method).eval().requires_grad_(False)
    tokens = torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(
        trio, (randn(5, WIDTH),), dynamic_shapes={"x": {0: tokens}}, strict=False
    )
    x = randn(9, WIDTH, seed=1)
    assert_close(program.module()(x), trio(x))
