"""What all mechanisms keep to: gradients, padding, masks, causality, storage."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from tcompress.attention import Host, MechanismSpec, mechanism, mechanism_of, mechanisms
from tcompress.attention.graph import GraphLayout
from tcompress.attention.kronecker import KroneckerLayout
from tcompress.attention.module import GuardedLinear, MechanismModule, UnusedProjection
from tcompress.attention.replacement import Visible, register
from tcompress.errors import DataError, RecipeError
from tcompress.options.method_options import KroneckerSpec, MultilinearSpec, TamSpec
from tcompress.structures import Refusal
from tests.support.mechanisms import (
    CASES,
    HEADS,
    TEXT_CASES,
    WIDTH,
    inputs_of,
    layout_of,
    randn,
    run,
    tensors_of,
)


# ---------------------------------------------------------------- all mechanisms
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(name: str) -> None:
    tensors = tensors_of(name)
    fixed = set(tensors) - set(mechanism_of(CASES[name][0]).tensors(layout_of(name)))
    names = [key for key in tensors if key not in fixed]
    q, k, v = inputs_of(name, batch=1)
    k = k + 0.3  # away from the kinks of relu

    def apply(*values: Tensor) -> Tensor:
        own = dict(zip(names, values[3:], strict=True))
        return run(name, values[:3], {**tensors, **own})  # type: ignore[arg-type]

    values = [x.requires_grad_() for x in (q, k, v, *(tensors[key] for key in names))]
    assert torch.autograd.gradcheck(apply, values, fast_mode=True)


@pytest.mark.parametrize("name", TEXT_CASES)
def test_a_padded_batch_equals_single_examples(name: str) -> None:
    q, k, v = inputs_of(name, batch=3)
    tensors, tokens = tensors_of(name), q.shape[2]
    lengths = (tokens, tokens - 1, tokens - 3)
    mask = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    together = run(name, (q, k, v), tensors, mask.long())
    for index, length in enumerate(lengths):
        alone = tuple(x[index : index + 1, :, :length] for x in (q, k, v))
        single = run(name, alone, tensors)  # type: ignore[arg-type]
        torch.testing.assert_close(together[index : index + 1, :, :length], single)


def _module(name: str) -> MechanismModule:
    own = MechanismModule(layout_of(name), "here", dtype=torch.float64)
    own.load_state_dict({key: tensors_of(name)[key] for key in own.state_dict()})
    return own


@pytest.mark.parametrize("name", TEXT_CASES)
def test_padding_may_come_first(name: str) -> None:
    """Beside a row of padding alone, and with the texts of a pair told apart."""
    q, k, v = inputs_of(name, batch=3)
    own, tokens = _module(name), q.shape[2]
    keep = torch.ones(3, tokens, dtype=torch.bool)
    keep[1, :2] = False
    keep[2] = False
    own.segments = (torch.arange(tokens) >= 4).long().expand(3, -1)
    causal = own.layout.causal
    mixed = own(q, k, v, keep, causal=causal)
    assert torch.isfinite(mixed).all()
    own.segments = own.segments[:1, 2:]
    alone = own(q[1:2, :, 2:], k[1:2, :, 2:], v[1:2, :, 2:], causal=causal)
    torch.testing.assert_close(mixed[1:2, 2:], alone)


@pytest.mark.parametrize("name", TEXT_CASES)
def test_texts_packed_into_one_row(name: str) -> None:
    """A mask of blocks is honoured, or refused."""
    q, k, v = inputs_of(name, batch=1)
    own, tokens = _module(name), q.shape[2]
    text = torch.arange(tokens) // (tokens - 2)
    pairs = (text[:, None] == text)[None, None]
    if own.layout.causal:
        pairs = pairs.tril()
    if not mechanism_of(CASES[name][0]).pairwise:
        for _ in range(2):  # what was refused is not taken for checked
            with pytest.raises(DataError, match="attention `here`: tokens are told to see differ"):
                own(q, k, v, pairs)
        return
    packed = own(q, k, v, pairs)
    for own_part in (slice(0, tokens - 2), slice(tokens - 2, tokens)):
        parts = (x[:, :, own_part] for x in (q, k, v))
        alone = own(*parts, causal=own.layout.causal)
        torch.testing.assert_close(packed[:, own_part], alone)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_mask_that_was_changed_is_checked_again(mode: type) -> None:
    q, k, v = inputs_of("hot-folded", batch=1)
    own, tokens = _module("hot-folded"), q.shape[2]
    with mode():
        pairs = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
        own(q, k, v, pairs)
        pairs[..., 0, 1] = False
        with pytest.raises(DataError, match="see different others"):
            own(q, k, v, pairs)


@pytest.mark.parametrize("name", TEXT_CASES)
@pytest.mark.parametrize("form", ["bool", "additive"])
def test_masks_of_every_form_mean_the_same(name: str, form: str) -> None:
    inputs, tensors = inputs_of(name), tensors_of(name)
    tokens = inputs[0].shape[2]
    keep = torch.ones(2, tokens, dtype=torch.bool)
    keep[1, -2:] = False
    pairs = keep[:, None, None].expand(2, 1, tokens, tokens)
    if layout_of(name).causal:
        pairs = pairs.tril()
    other = pairs if form == "bool" else torch.where(pairs, 0.0, torch.finfo(torch.float32).min)
    first = run(name, inputs, tensors, keep.long())
    torch.testing.assert_close(run(name, inputs, tensors, other), first)


@pytest.mark.parametrize("name", [name for name in CASES if layout_of(name).causal])
def test_causal_mechanisms_never_look_ahead(name: str) -> None:
    inputs, tensors = inputs_of(name), tensors_of(name)
    before = run(name, inputs, tensors)
    changed = tuple(x.clone() for x in inputs)
    for x in changed:
        x[:, :, -1] += 1
    after = run(name, changed, tensors)  # type: ignore[arg-type]
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])
    assert not torch.equal(before[:, :, -1], after[:, :, -1])


@pytest.mark.parametrize(
    "spec", [KroneckerSpec(fold=4), TamSpec(), MultilinearSpec(length=8)], ids=lambda s: s.name
)
def test_mechanisms_that_look_ahead_refuse_causal_hosts(spec: MechanismSpec) -> None:
    host = Host(HEADS, HEADS, WIDTH, causal=True)
    with pytest.raises(Refusal, match="would look ahead"):
        mechanism_of(spec).layout(spec, host)


@pytest.mark.parametrize("name", [name for name in CASES if layout_of(name).causal])
def test_a_cache_of_keys_changes_nothing(name: str) -> None:
    q, k, v = inputs_of(name)
    tensors = tensors_of(name)
    whole = run(name, (q, k, v), tensors)
    for count in (1, 2):
        last = run(name, (q[:, :, -count:], k, v), tensors)
        torch.testing.assert_close(last, whole[:, :, -count:])


def test_a_cache_with_room_to_spare_is_read_by_its_mask() -> None:
    q, k, v = inputs_of("tga-causal")
    tensors = tensors_of("tga-causal")
    whole = run("tga-causal", (q, k, v), tensors)
    spare = tuple(torch.cat([x, torch.zeros_like(x)], 2) for x in (k, v))
    mask = (torch.arange(12) < 6).expand(2, 1, 1, 12)
    last = run("tga-causal", (q[:, :, -1:], *spare), tensors, mask)  # type: ignore[arg-type]
    torch.testing.assert_close(last, whole[:, :, -1:])


@pytest.mark.parametrize("name", CASES)
def test_first_values_have_the_shapes_that_are_planned(name: str) -> None:
    kind, layout = mechanism_of(CASES[name][0]), layout_of(name)
    for pretrained in (True, False):
        seeds = (torch.Generator().manual_seed(s) for s in (0, 0))
        first, again = (kind.start(layout, seed, pretrained=pretrained) for seed in seeds)
        assert {key: tuple(t.shape) for key, t in first.items()} == kind.tensors(layout)
        assert all(torch.equal(first[key], again[key]) for key in first)
        inputs = tuple(x.float() for x in inputs_of(name))
        own = {**first, **kind.constants(layout)}
        assert torch.isfinite(run(name, inputs, own)).all()  # type: ignore[arg-type]
    assert kind.macs(layout, CASES[name][2]) > 0


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_read_back_from_plans(name: str) -> None:
    layout = layout_of(name)
    kind = mechanism(layout.mechanism)
    stored = layout.model_dump(mode="json", exclude_defaults=True)
    assert kind.layout_type.model_validate(stored) == layout


def test_modules_are_pickled_cast_and_name_their_layer() -> None:
    layout = layout_of("hot-favor")
    module = MechanismModule(layout, "layers.3.attention").requires_grad_(False)
    module.fill(0, pretrained=True)
    q, k, v = (x.float() for x in inputs_of("hot-favor"))
    copy = pickle.loads(pickle.dumps(module))
    torch.testing.assert_close(copy(q, k, v), module(q, k, v))
    assert module.bfloat16()(q.bfloat16(), k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16
    long = MechanismModule(layout_of("multilinear"), "layers.3.attention")
    with pytest.raises(DataError, match=r"attention `layers.3.attention`: .* over 6 tokens met 9"):
        long(*(randn(1, HEADS, 9, WIDTH) for _ in range(3)))
    with pytest.raises(DataError, match=r"`layers.3.attention`: an attention mask of"):
        module(q, k, v, torch.ones(3))


def test_another_scaling_of_the_host_counts() -> None:
    module = MechanismModule(layout_of("tam-cp"))
    module.fill(0, pretrained=True)
    q, k, v = (x.float() for x in inputs_of("tam-cp"))
    torch.testing.assert_close(module(q, k, v, scaling=1.0), module(q * WIDTH**0.5, k, v))


def test_the_registry_knows_its_own() -> None:
    assert [item.name for item in mechanisms()] == ["graph", "kronecker", "multilinear", "tam"]
    with pytest.raises(RecipeError, match=r"unknown mechanism `graf`.*known") as error:
        mechanism("graf")
    assert error.value.hint == "did you mean `graph`?"
    with pytest.raises(ValueError, match="already registered"):
        register(mechanism("graph"))


def test_stand_ins_answer_as_hosts_expect() -> None:
    unused = UnusedProjection(8)
    x = randn(2, 3, 6)
    assert torch.equal(unused(x).view(2, 3, 2, 4), torch.zeros(2, 3, 2, 4).double())
    assert unused.weight.numel() == 0
    weight, bias = randn(5, 6), randn(5, seed=1)
    for transposed in (False, True):
        stored = weight.mT if transposed else weight
        layer = GuardedLinear(tuple(stored.shape), 5, transposed=transposed, dtype=torch.float64)
        with torch.no_grad():
            layer.tc_weight.copy_(stored)
            layer.bias.copy_(bias)
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, bias))


# Mechanisms on numbers that are hard for floating point
SMALL = {"heads": 2, "key_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"fold": 4, "pool": "sum"},
        {"fold": 4},
        {"fold": 4, "kernel": "favor", "features": 16},
        {"grid": (4, 4), "pool": "sum"},
        {"grid": (4, 4), "pool": "sum", "kernel": "smreg", "features": 16},
        {"grid": (4, 4), "kernel": "favor", "features": 16},
    ],
    ids=["fold-sum", "fold", "fold-favor", "grid-sum", "grid-smreg", "favor"],
)
def test_large_scores_and_rows_of_padding(
    options: dict[str, object], autocast: bool, dtype: torch.dtype
) -> None:
    """Nothing overflows, and nothing vanishes: products of small shares leave half precision."""
    layout = KroneckerLayout.model_validate({"mechanism": "kronecker", **SMALL, **options})
    own = MechanismModule(layout, dtype=torch.float32 if autocast else dtype)
    own.fill(0, pretrained=True)
    generator = torch.Generator().manual_seed(0)
    shared = 8 * torch.randn(1, 2, 1, 16, generator=generator)
    q, k, v = (
        (8 * torch.randn(3, 2, 16, 16, generator=generator) + shared).to(dtype) for _ in range(3)
    )
    mask = torch.ones(3, 16, dtype=torch.bool)
    mask[1, 9:] = False
    mask[2] = False  # nothing but padding
    with torch.no_grad():
        with torch.autocast("cpu", dtype, enabled=autocast and dtype != torch.float32):
            mixed = own(q, k, v, mask if "fold" in options else None)
        exact = own.double()(
            q.double(), k.double(), v.double(), mask if "fold" in options else None
        )
    assert torch.isfinite(mixed).all()
    error = (mixed.double() - exact)[mask].norm(dim=-1) / exact[mask].norm(dim=-1)
    assert float(error.max()) < {torch.float32: 1e-4, torch.float16: 0.01}.get(dtype, 0.1)


def test_large_keys_of_a_graph() -> None:
    """Edges of keys that are alike and long stay within half precision."""
    layout = GraphLayout(heads=2, key_heads=2, head_dim=64, causal=False, filter_order=2)
    own = MechanismModule(layout, dtype=torch.float16)
    own.fill(0, pretrained=True)
    generator = torch.Generator().manual_seed(0)
    shared = 30 * torch.randn(1, 2, 1, 64, generator=generator)
    k = (shared + 5 * torch.randn(1, 2, 80, 64, generator=generator)).half()
    v = (1e-3 * torch.randn(1, 2, 80, 64, generator=generator)).half()
    with torch.no_grad():
        mixed = own(k, k, v)
        exact = own.double()(k.double(), k.double(), v.double())
    assert torch.isfinite(mixed).all()
    assert torch.allclose(mixed.double(), exact, rtol=0.05, atol=0.01 * float(exact.abs().max()))


@pytest.mark.parametrize("lowest", [-1e4, -1e9, float("-inf"), torch.finfo(torch.float32).min])
def test_masks_hide_whatever_low_number_they_add(lowest: float) -> None:
    mask = torch.tensor([[[[0.0, 0.0, lowest]]]])
    q = torch.zeros(1, 1, 1, 4)
    seen = Visible.of(mask, q, torch.zeros(1, 1, 3, 4), causal=False)
    assert seen.tokens.tolist() == [[True, True, False]]
