"""What every structure must do, checked against dense weights that are built independently."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from tcompress.errors import RecipeError
from tcompress.planning.entries import LayerPlan
from tcompress.structures import Layout, Refusal, Spec, Structure, structure, structures
from tcompress.structures.base import (
    SIDES,
    SharesFactors,
    dense_of,
    first_operators,
    predicted_loss,
    register,
    shared_of,
    transform_shapes,
)
from tcompress.structures.flops import macs_of
from tcompress.structures.modules.linear import PartLayout, StructuredLinear
from tests.support.structure_cases import (
    CASES,
    LADDERS,
    REFUSALS,
    Case,
    all_cases,
    marked_cases,
    six_cases,
)
from tests.support.structures import (
    REFERENCES,
    dense_reference,
    fitted_weight,
    identity_moments,
    make_layer,
    make_moments,
    randn,
    random_bank,
    random_operators,
    reference_of,
    stored_of,
    target_of,
)

SLACK = 1e-9  # of relative errors: what is left of rounding in float64
few = settings(deadline=None, derandomize=True, max_examples=2)
every_case = pytest.mark.parametrize("case", marked_cases(), ids=str)
some_cases = pytest.mark.parametrize("case", six_cases(), ids=str)


def test_every_registered_structure_has_cases() -> None:
    names = {kind.name for kind in structures()}
    assert names == set(CASES) == set(LADDERS) == set(REFUSALS) == set(REFERENCES)


# ---------------------------------------------------------------- application
@every_case
def test_layer_and_dense_weight_equal_the_reference(case: Case) -> None:
    """With any leading dimensions."""
    layer = make_layer(case.layout(), bias=True)
    weight = reference_of(layer).detach()
    assert weight.shape == (case.outputs, case.inputs)
    assert_close(layer.dense_weight(), weight)
    for shape in ((), (2, 3), (0,), (2, 0), (5,)):
        x = randn(*shape, case.inputs, seed=3).requires_grad_()
        y, wanted = layer(x), x @ weight.T + layer.bias
        assert y.shape == (*shape, case.outputs)
        assert_close(y, wanted)
        y.sum().backward()
        assert x.grad is not None
    with torch.no_grad():  # without gradients sides are cached and products take another path
        for _ in range(2):
            assert_close(layer(x), wanted)


@every_case
def test_gradients_equal_those_of_the_dense_reference(case: Case) -> None:
    layer = make_layer(case.layout())
    x, mixing = randn(5, case.inputs, seed=3).requires_grad_(), randn(5, case.outputs, seed=4)
    wanted_of = [x, *(parameter for parameter in layer.parameters() if parameter.numel())]
    got = torch.autograd.grad((layer(x) * mixing).sin().sum(), wanted_of)
    wanted = torch.autograd.grad((x @ reference_of(layer).T * mixing).sin().sum(), wanted_of)
    assert_close(got, wanted)


SECOND_ORDER = {"wide", "dct-in", "dft-both", "learned-out", "fitted-in", "fitted-out"}


@pytest.mark.parametrize("case", [c for c in all_cases() if c.name in SECOND_ORDER], ids=str)
def test_second_gradients_are_derivatives(case: Case) -> None:
    """Of a layer as a function of its input and tensors."""
    layer = make_layer(case.layout())
    named = {name: tensor for name, tensor in layer.named_parameters() if tensor.numel()}

    def apply(x: Tensor, *tensors: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(named, tensors, strict=True)), (x,))

    start = [randn(3, case.inputs, seed=3), *(tensor.detach() for tensor in named.values())]
    inputs = tuple(tensor.clone().requires_grad_() for tensor in start)
    assert torch.autograd.gradgradcheck(apply, inputs, fast_mode=True)


@every_case
def test_leading_dimensions_of_experts(case: Case) -> None:
    layout, experts = case.layout(), 3
    layer = make_layer(layout, experts=experts)
    stored, own = stored_of(layer), set(case.kind.tensors(layout))
    weights = []
    for expert in range(experts):
        one = {name: t[expert] if name in own else t for name, t in stored.items()}
        weights.append(dense_reference(layout, one))
    assert_close(layer.dense_weight(), torch.stack(weights))
    rows = randn(experts, 4, case.inputs)  # rows dealt out to experts
    encoded = [z.unflatten(0, (experts, 4)) for z in layer.encode(rows)]
    flat = layer.decode([[u.flatten(0, 1) for u in part] for part in layer.core(encoded)])
    assert_close(flat.unflatten(0, (experts, 4)), rows @ torch.stack(weights).mT)


@some_cases
def test_strided_and_expanded_inputs(case: Case) -> None:
    layer = make_layer(case.layout())
    weight = reference_of(layer)
    strided, row = randn(case.inputs, 5, seed=3).T, randn(case.inputs, seed=4)
    assert_close(layer(strided), strided @ weight.T)
    assert_close(layer(row.expand(3, 2, -1)), row.expand(3, 2, -1) @ weight.T)
    assert_close(layer(strided[:, None].expand(5, 2, -1))[:, 1], strided @ weight.T)


# ---------------------------------------------------------------- sizes and cost
@every_case
def test_sizes_equal_what_is_stored(case: Case) -> None:
    layout, kind = case.layout(), case.kind
    layer = make_layer(layout)
    shapes = dict(kind.tensors(layout))
    for side in SIDES:
        own = transform_shapes(layout, side)
        shapes |= {f"{side}.{name}": shape for name, shape in own.items()}
    shapes |= {f"bank.{name}": tensor.shape for name, tensor in random_bank(layout).items()}
    stored = stored_of(layer)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes
    entry = _plan(layer)
    own_names = {name: tuple(tensor.shape) for name, tensor in layer.named_parameters()}
    assert entry.tensor_shapes == own_names
    assert entry.parameters == sum(map(prod, shapes.values()))
    assert entry.parameters == sum(tensor.numel() for tensor in layer.parameters())
    assert (entry.in_features, entry.out_features) == (case.inputs, case.outputs)


COUNTED = ("lowrank-wide", "lprod-dft-both", "lprod-fitted-out", "tt-3-cores", "tucker-heads-out")


@pytest.mark.parametrize("case", [c for c in all_cases() if str(c) in COUNTED], ids=str)
@pytest.mark.parametrize("tokens", [0, 6, 200])
def test_multiply_adds_are_those_of_a_real_pass(case: Case, tokens: int) -> None:
    layer = make_layer(case.layout())
    x = randn(tokens, case.inputs)
    with torch.no_grad():
        layer(x)  # builds the sides
        with FlopCounterMode(display=False) as counter:
            layer(x)
    assert counter.get_total_flops() == 2 * _plan(layer).macs(tokens)


def test_multiply_adds_are_not_counted_twice() -> None:
    layout = CASES["lprod"][0].layout()
    macs = macs_of(layout, 7)
    assert macs == (7 * 16 * 4, 7 * 4 * 6 * 4, 0)  # the transform, then four slices
    assert macs_of(layout.model_copy(), 7) is macs


def _plan(layer: StructuredLinear) -> LayerPlan:
    return LayerPlan(name="w", block="b", role="q", kind="linear", bias=False, parts=layer.parts)


@some_cases
def test_meta_device(case: Case) -> None:
    layout = case.layout()
    real = {name: t.shape for name, t in make_layer(layout).state_dict().items()}
    x = torch.empty(2, 3, case.inputs, dtype=torch.float64, device="meta")
    with torch.device("meta"):
        built = make_layer(layout)
    for layer in (built, make_layer(layout, device="meta")):
        assert all(tensor.is_meta for tensor in layer.state_dict().values())
        assert {name: t.shape for name, t in layer.state_dict().items()} == real
        assert layer(x).shape == (2, 3, case.outputs)


@pytest.mark.parametrize(
    ("case", "reason"), [pair for kind in structures() for pair in REFUSALS[kind.name]], ids=str
)
def test_refusals_say_why(case: Case, reason: str) -> None:
    with pytest.raises(Refusal) as refusal:
        case.layout()
    assert str(refusal.value) == reason


@every_case
def test_layouts_are_read_back_from_json(case: Case) -> None:
    part = PartLayout(name="q", terms=(case.layout(), case.layout()))
    for options in ({}, {"exclude_defaults": True}, {"exclude_unset": True}):
        text = part.model_dump_json(**options)  # type: ignore[arg-type]
        assert PartLayout.model_validate_json(text) == part
    with pytest.raises(ValueError, match="extra"):
        type(case.layout()).model_validate({**case.layout().model_dump(), "unknown": 1})


# ---------------------------------------------------------------- fits
@pytest.mark.parametrize("case", marked_cases(lambda case: case.exact), ids=str)
def test_full_capacity_reproduces_every_weight(case: Case) -> None:
    layout, weight = case.layout(), randn(case.outputs, case.inputs)
    for moments in (None, make_moments(case.inputs, 40, noise=0.0)):
        fitted = fitted_weight(layout, weight, moments, random_operators(layout))
        assert_close(fitted, weight, rtol=1e-6, atol=1e-6)


LADDER_ROWS = [ladder for kind in structures() for ladder in LADDERS[kind.name]]


def _ladder_id(ladder: list[Case]) -> str:
    return f"{ladder[0]}-{ladder[0].side}"


@pytest.mark.often(*(_ladder_id(ladder) for ladder in LADDER_ROWS if ladder[0].side == "in"))
@pytest.mark.parametrize("ladder", LADDER_ROWS, ids=_ladder_id)
@few
@given(seed=st.integers(0, 10**6))
def test_error_never_grows_with_capacity(ladder: list[Case], seed: int) -> None:
    first = ladder[0]
    weight = randn(first.outputs, first.inputs, seed=seed)
    moments = make_moments(first.inputs, 50, seed=seed + 1)
    measured = identity_moments(first.inputs)
    for data, evaluation in ((None, measured), (moments, moments)):
        errors = []
        for case in ladder:
            layout = case.layout()
            fitted = fitted_weight(layout, weight, data, random_operators(layout))
            errors.append(evaluation.error(weight, fitted))
        assert all(b <= a + SLACK for a, b in pairwise(errors)), errors


@every_case
@few
@given(seed=st.integers(0, 10**6), rows=st.integers(20, 60), noise=st.sampled_from([0.0, 0.5]))
def test_fit_on_moments_is_never_worse_than_without(
    case: Case, seed: int, rows: int, noise: float
) -> None:
    layout, weight = case.layout(), randn(case.outputs, case.inputs, seed=seed)
    moments = make_moments(case.inputs, rows, noise=noise, seed=seed + 1)
    operators = random_operators(layout, seed)
    aware = moments.error(weight, fitted_weight(layout, weight, moments, operators))
    free = moments.error(weight, fitted_weight(layout, weight, None, operators))
    assert aware <= free + SLACK


@pytest.mark.parametrize("case", marked_cases(lambda case: case.optimal), ids=str)
def test_a_fit_that_goes_on_is_no_worse(case: Case) -> None:
    layout, weight = case.layout(), randn(case.outputs, case.inputs)
    moments, operators = make_moments(case.inputs, 40), random_operators(layout)
    root = randn(case.outputs, case.outputs, seed=3)
    kind, bank = structure(layout.structure), random_bank(layout)
    curvature = root @ root.mT + torch.eye(len(root))
    target = replace(target_of(weight, moments, bank, operators), curvature=curvature)
    before = kind.fit(target, layout)
    after = kind.fit(replace(target, start=before), layout)
    one, two = (
        predicted_loss(dense_of(layout, {**tensors, **bank}, operators), target, 0.0)
        for tensors in (before, after)
    )
    assert two <= one + SLACK * abs(one)


@pytest.mark.parametrize("case", marked_cases(lambda case: case.optimal), ids=str)
@pytest.mark.parametrize("rows", [0, 40], ids=["data-free", "moments"])
def test_fit_is_an_optimum(case: Case, rows: int) -> None:
    layout, weight = case.layout(), randn(case.outputs, case.inputs)
    moments = make_moments(case.inputs, rows) if rows else None
    operators = random_operators(layout)
    kind, bank = structure(layout.structure), random_bank(layout)
    tensors = kind.fit(target_of(weight, moments, bank, operators), layout)
    evaluation = moments or identity_moments(case.inputs)
    best = evaluation.error(weight, dense_of(layout, {**tensors, **bank}, operators))
    for draw in range(20):
        step = 10.0 ** -(1 + draw % 4)
        changed = {n: t + step * randn(*t.shape, seed=100 + draw) for n, t in tensors.items()}
        dense = dense_of(layout, {**changed, **bank}, operators)
        assert best <= evaluation.error(weight, dense) + SLACK


@every_case
def test_without_data_the_moments_are_the_identity(case: Case) -> None:
    layout, weight = case.layout(), randn(case.outputs, case.inputs)
    operators = random_operators(layout)
    identity = identity_moments(case.inputs)
    free = fitted_weight(layout, weight, None, operators)
    assert_close(free, fitted_weight(layout, weight, identity, operators), rtol=1e-6, atol=1e-9)


@every_case
def test_start_keeps_the_scale(case: Case) -> None:
    layout, kind = case.layout(), case.kind
    operators = first_operators(layout, torch.zeros(()))
    powers = []  # of outputs, for inputs of unit variance
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        own, bank = kind.start(layout, generator), {}
        if isinstance(kind, SharesFactors) and shared_of(layout) is not None:
            bank = kind.start_shared(layout, generator)
        dense = dense_of(layout, {**own, **bank}, operators)
        powers.append(dense.square().sum() / case.outputs)
    assert {name: t.shape for name, t in own.items()} == kind.tensors(layout)
    wanted = {name: tensor.shape for name, tensor in random_bank(layout).items()}
    assert {name: t.shape for name, t in bank.items()} == wanted
    assert 0.7 < float(torch.stack(powers).mean()) < 1.4


# ---------------------------------------------------------------- copies and dtypes
@some_cases
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_of_layers_that_share_an_input(case: Case, copied: Callable[[Any], Any]) -> None:
    x, model = randn(5, case.inputs), nn.ModuleDict()
    model["q"] = make_layer(case.layout(), readers=2)
    model["k"] = make_layer(case.layout(), input_of=model["q"], seed=1)
    with torch.no_grad():
        wanted = [model["q"](x), model["k"](x)]
        model["q"](x)  # leaves an encoding that only one of two layers has read
        made = copied(model)
        assert made.state_dict().keys() == model.state_dict().keys()
        for parameter in model.parameters():
            parameter.zero_()
        assert_close([layer(x) for layer in made.values()], wanted, rtol=0, atol=0)
        for parameter in made["q"].parameters():
            parameter.zero_()
        if sum(map(prod, transform_shapes(case.layout(), "in").values())):
            assert not torch.equal(made["k"](x), wanted[1])  # still shares the copied side


@every_case
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 0.01), (torch.bfloat16, 0.06)])
def test_low_precision(case: Case, dtype: torch.dtype, limit: float) -> None:
    layer, x = make_layer(case.layout(), bias=True).to(dtype), randn(20, case.inputs).to(dtype)
    assert layer.weight.dtype == dtype  # hosts ask for it
    y = layer(x)
    assert (y.dtype, layer.dense_weight().dtype) == (dtype, torch.float64)
    wanted = x.double() @ reference_of(layer).T + layer.bias.double()
    assert float((y - wanted).detach().norm() / wanted.detach().norm()) < limit
    y.sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.dtype == dtype
        assert bool(parameter.grad.isfinite().all())


@some_cases
def test_autocast(case: Case) -> None:
    layer = make_layer(case.layout(), bias=True).float()
    x = randn(20, case.inputs).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        again = layer(y.detach()[..., :1] * x)  # an input in the dtype of autocast
        exact = make_layer(case.layout(), bias=True).double()(x.double())
    assert exact.dtype == torch.float64  # as `nn.Linear` has it
    assert (y.dtype, again.dtype) == (torch.bfloat16, torch.bfloat16)
    wanted = x.double() @ reference_of(layer).T + layer.bias.double()
    assert float((y - wanted).detach().norm() / wanted.detach().norm()) < 0.06
    y.sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32  # nothing cached in the dtype of autocast is left
    assert_close(layer(x).double(), wanted, rtol=1e-4, atol=1e-4)


# The registry of structures refuses what would be ambiguous, and helps with names
class _Other(Spec):
    """Options of nothing."""


def test_registry_refuses_names_and_specs_that_are_taken() -> None:
    class Fake(Structure[Any, Any]):
        name: ClassVar[str] = "lowrank"
        spec = _Other
        layout_type = Layout

    Fake.__abstractmethods__ = frozenset()
    with pytest.raises(ValueError, match="already registered"):
        register(Fake())  # type: ignore[abstract]
    Fake.name, Fake.spec = "other", structure("lowrank").spec
    with pytest.raises(ValueError, match="already registered"):
        register(Fake())  # type: ignore[abstract]
    Fake.name, Fake.spec = "Other-One", _Other
    with pytest.raises(ValueError, match="not lower snake case"):
        register(Fake())  # type: ignore[abstract]
    assert {kind.name for kind in structures()} == set(CASES)


def test_unknown_structures_are_refused_with_the_closest_name() -> None:
    with pytest.raises(RecipeError) as error:
        structure("lowrnk")
    assert error.value.message.startswith("unknown structure `lowrnk`; known are `lowr")
    assert error.value.hint == "did you mean `lowrank`?"
