"""Sides and dense weights that are built once: never stale, and no hindrance to anything."""

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tcompress
from tcompress.structures.modules.linear import StructuredLinear
from tests.support.sharing import METHODS, WIDTH, Trio
from tests.support.structure_cases import Case, six_cases
from tests.support.structures import make_layer, randn, reference_of


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


@pytest.mark.often("tt-True")
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("method", "grad"),
    [*((name, True) for name in METHODS), ("dct", False), ("fitted", False)],
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
        assert_close(got, wanted)
    torch._dynamo.reset()


@pytest.mark.often("dct")
@pytest.mark.smoke
@pytest.mark.parametrize("method", ["lowrank", "tt", "tt-contract", "dct", "fitted"])
def test_exports_with_any_number_of_tokens(method: str) -> None:
    trio = Trio(method).eval().requires_grad_(False)
    tokens = torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(
        trio, (randn(5, WIDTH),), dynamic_shapes={"x": {0: tokens}}, strict=False
    )
    x = randn(9, WIDTH, seed=1)
    assert_close(program.module()(x), trio(x))


# Dense weights that layers keep for inference: never stale, and nobody else's business


# What is written through `.data` is not noticed: it leaves neither a version nor an address.
NOTICED = {name: change for name, change in CHANGES.items() if name != "in place through data"}
TT = Case("tt", "kept", {"rank": 3})


def kept_layer(case: Case = TT, **options: Any) -> StructuredLinear:
    """A layer in evaluation mode that has built its weight."""
    layer = make_layer(case.layout(), bias=True, **options).eval()
    tcompress.keep_weights(layer)
    quietly(layer, randn(2, case.inputs))
    return layer


def quietly(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = module(x)
    return result


def built(layer: StructuredLinear) -> Tensor | None:
    """The weight that the layer holds in memory."""
    return None if layer._kept is None else layer._kept.weight


@pytest.mark.parametrize("case", six_cases(), ids=str)
def test_results_are_those_of_the_structure(case: Case) -> None:
    layer = make_layer(case.layout(), bias=True).eval()
    x = randn(2, 3, case.inputs)
    wanted = quietly(layer, x)
    size = tcompress.keep_weights(layer)
    for _ in range(2):
        assert_close(quietly(layer, x), wanted)
    weight = built(layer)
    assert size == weight.nbytes == 8 * case.inputs * case.outputs
    assert tcompress.keep_weights(layer, keep=False) == 0
    assert layer._kept is None


def test_the_kept_weight_is_used() -> None:
    layer = kept_layer()
    weight = built(layer)
    weight.zero_()  # a change that nothing can notice: it is no tensor of the layer
    x = randn(5, 16)
    assert_close(quietly(layer, x), layer.bias.detach().expand(5, -1))
    with torch.inference_mode():
        assert_close(layer(x), layer.bias.expand(5, -1))


def test_nothing_is_kept_by_default_or_in_training() -> None:
    layer = make_layer(TT.layout()).eval()
    quietly(layer, randn(2, 16))
    assert layer._kept is None
    tcompress.keep_weights(layer.train())
    quietly(layer, randn(2, 16))
    assert built(layer) is None


DROPS: dict[str, Callable[[StructuredLinear], object]] = {
    "train": lambda layer: layer.train(),
    "cast": lambda layer: layer.float(),
    "move": lambda layer: layer.to("meta"),
    "state dict": lambda layer: layer.load_state_dict(layer.state_dict()),
    "state dict assigned": lambda layer: layer.load_state_dict(layer.state_dict(), assign=True),
    "pass with gradients": lambda layer: layer(randn(2, 16)),
}


@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
def test_what_drops_the_weight(drop: Callable[[StructuredLinear], object]) -> None:
    layer = kept_layer()
    assert built(layer) is not None
    drop(layer)
    assert built(layer) is None


def test_gradients_of_frozen_layers_keep_the_weight() -> None:
    layer = kept_layer().requires_grad_(False)
    x = randn(2, 16).requires_grad_()
    layer(x).sum().backward()
    assert built(layer) is not None
    assert_close(x.grad, reference_of(layer).sum(0).expand(2, -1))


@pytest.mark.parametrize(
    ("place", "name"),
    [*product(("in", "out"), CHANGES), *product(("kept",), NOTICED)],
)
def test_no_result_is_stale(place: Any, name: str) -> None:
    """Of blocks that are built of generators on either side, and of a weight that is kept."""
    if place == "kept":
        layer = kept_layer()
    else:
        options = {"transform": "fitted", "block": 4, "placement": place}
        layer = make_layer(Case("lprod", "fitted", options, side=place).layout(), bias=True)
    x = randn(5, WIDTH)
    before = quietly(layer, x)
    CHANGES[name](layer)
    assert all(bool(parameter.isfinite().all()) for parameter in layer.parameters())
    x = x.to(layer.weight.dtype)
    wanted = (x.double() @ reference_of(layer).T + layer.bias.double()).detach()
    assert_close(quietly(layer, x).double(), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, wanted, rtol=1e-9, atol=1e-9)


OF_OWNERS = {
    **{name: change for name, change in NOTICED.items() if name != "to float32"},
    "same address, same version": lambda owner: owner._apply(lambda tensor: tensor.data.mul_(0.5)),
}


@pytest.mark.parametrize("name", OF_OWNERS)
def test_layers_that_share_an_input_follow_its_owner(name: str) -> None:
    trio, x = Trio("fitted").eval(), randn(5, WIDTH)
    tcompress.keep_weights(trio)
    before = quietly(trio.k, x)
    assert built(trio.k) is not None
    OF_OWNERS[name](trio.q)  # the other layers take no part
    after = quietly(trio.k, x)
    tcompress.keep_weights(trio, keep=False)
    assert_close(after, quietly(trio.k, x))
    assert name == "to float16 and back" or not torch.allclose(before, after)


def test_other_tensors_for_one_call() -> None:
    layer, x = kept_layer(), randn(5, 16)
    other = {name: 2 * tensor for name, tensor in layer.state_dict().items()}
    with torch.no_grad():
        found = torch.func.functional_call(layer, other, (x,))
    twice = make_layer(TT.layout(), bias=True).eval()
    twice.load_state_dict(other)
    assert_close(found, quietly(twice, x))
    assert_close(quietly(layer, x), quietly(make_layer(TT.layout(), bias=True), x))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_do_not_carry_the_weight(copied: Callable[[Any], Any]) -> None:
    layer, x = kept_layer(), randn(5, 16)
    made = copied(layer)
    assert built(made) is None
    assert built(layer) is not None
    assert made.state_dict().keys() == layer.state_dict().keys()
    assert_close(quietly(made, x), quietly(layer, x))
    assert built(made) is not None
    assert built(made) is not built(layer)
    more = len(pickle.dumps(made)) - len(pickle.dumps(layer))
    assert abs(more) < layer.in_features * layer.out_features  # names may be stored once or twice


def test_autocast_and_low_precision() -> None:
    layer, x = kept_layer().float(), randn(5, 16).float()
    wanted = quietly(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = quietly(layer, x)
    assert found.dtype == torch.bfloat16
    assert_close(found.float(), wanted, rtol=0.05, atol=0.05)
    half = layer.half()
    quietly(half, x.half())
    weight = built(half)
    assert_close(weight, reference_of(half).half(), rtol=0, atol=1e-2)
    assert weight.dtype == torch.float16


def test_compiled_passes_do_without() -> None:
    torch._dynamo.reset()
    layer, x = kept_layer(), randn(5, 16)
    wanted = quietly(make_layer(TT.layout(), bias=True), x)
    weight = built(layer)
    weight.zero_()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert_close(quietly(compiled, x), wanted)
    assert_close(compiled(x).detach(), wanted)
    assert built(layer) is None  # dropped by a pass with gradients, compiled or not
    torch._dynamo.reset()


def test_tensors_that_are_elsewhere() -> None:
    layer = kept_layer().to("meta")
    y = quietly(layer, torch.empty(5, 16, dtype=torch.float64, device="meta"))
    assert y.shape == (5, 24)
    assert built(layer) is None
