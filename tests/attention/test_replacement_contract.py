"""What all mechanisms keep to: gradients, padding, masks, storage; TAM over pairs of texts."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel

from tcompress.attention import (
    replacement_named,
    replacement_of,
    replacements,
)
from tcompress.attention.graph import GraphLayout
from tcompress.attention.kronecker import KroneckerLayout
from tcompress.attention.module import GuardedLinear, ReplacementModule, UnusedProjection
from tcompress.attention.replacement import register
from tcompress.attention.tam import TamSpec, add_context, gru_tensors, read_texts
from tcompress.attention.visibility import Visible
from tcompress.conversion.converter import convert
from tcompress.errors import DataError, RecipeError
from tcompress.options import Convert
from tests.support.replacements import (
    CASES,
    HEADS,
    TEXT,
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
    names = [*replacement_of(CASES[name][0]).tensors(layout_of(name))]  # constants stay
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


def _module(name: str) -> ReplacementModule:
    own = ReplacementModule(layout_of(name), "here", dtype=torch.float64)
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
    if not replacement_of(CASES[name][0]).pairwise:
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
def test_a_cache_of_keys_changes_nothing(name: str) -> None:
    q, k, v = inputs_of(name)
    tensors = tensors_of(name)
    whole = run(name, (q, k, v), tensors)
    for count in (1, 2):
        last = run(name, (q[:, :, -count:], k, v), tensors)
        torch.testing.assert_close(last, whole[:, :, -count:])


@pytest.mark.parametrize("name", CASES)
def test_first_values_have_the_shapes_that_are_planned(name: str) -> None:
    kind, layout = replacement_of(CASES[name][0]), layout_of(name)
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
    kind = replacement_named(layout.mechanism)
    stored = layout.model_dump(mode="json", exclude_defaults=True)
    assert kind.layout_type.model_validate(stored) == layout


def test_modules_are_pickled_cast_and_name_their_layer() -> None:
    layout = layout_of("hot-favor")
    module = ReplacementModule(layout, "layers.3.attention").requires_grad_(False)
    module.fill(0, pretrained=True)
    q, k, v = (x.float() for x in inputs_of("hot-favor"))
    copy = pickle.loads(pickle.dumps(module))
    torch.testing.assert_close(copy(q, k, v), module(q, k, v))
    assert module.bfloat16()(q.bfloat16(), k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16
    long = ReplacementModule(layout_of("multilinear"), "layers.3.attention")
    with pytest.raises(DataError, match=r"attention `layers.3.attention`: .* over 6 tokens met 9"):
        long(*(randn(1, HEADS, 9, WIDTH) for _ in range(3)))
    with pytest.raises(DataError, match=r"`layers.3.attention`: an attention mask of"):
        module(q, k, v, torch.ones(3))


def test_another_scaling_of_the_host_counts() -> None:
    module = ReplacementModule(layout_of("tam-cp"))
    module.fill(0, pretrained=True)
    q, k, v = (x.float() for x in inputs_of("tam-cp"))
    torch.testing.assert_close(module(q, k, v, scaling=1.0), module(q * WIDTH**0.5, k, v))


def test_the_registry_knows_its_own() -> None:
    names = ["additive", "graph", "kronecker", "multilinear", "tam"]
    assert [item.name for item in replacements()] == names
    with pytest.raises(RecipeError, match=r"unknown attention replacement `graf`.*known") as error:
        replacement_named("graf")
    assert error.value.hint == "did you mean `graph`?"
    with pytest.raises(ValueError, match="already registered"):
        register(replacement_named("graph"))


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
    own = ReplacementModule(layout, dtype=torch.float32 if autocast else dtype)
    own.fill(0, pretrained=True)
    generator = torch.Generator().manual_seed(0)
    shared = 8 * torch.randn(1, 2, 1, 16, generator=generator)
    q, k, v = (
        (8 * torch.randn(3, 2, 16, 16, generator=generator) + shared).to(dtype) for _ in range(3)
    )
    mask = torch.ones(3, 16, dtype=torch.bool)
    mask[1, 9:] = False
    mask[2] = False  # nothing but padding
    seen = mask if "fold" in options else None
    with torch.no_grad():
        with torch.autocast("cpu", dtype, enabled=autocast and dtype != torch.float32):
            mixed = own(q, k, v, seen)
        exact = own.double()(q.double(), k.double(), v.double(), seen)
    assert torch.isfinite(mixed).all()
    error = (mixed.double() - exact)[mask].norm(dim=-1) / exact[mask].norm(dim=-1)
    assert float(error.max()) < {torch.float32: 1e-4, torch.float16: 0.01}.get(dtype, 0.1)


def test_large_keys_of_a_graph() -> None:
    """Edges of keys that are alike and long stay within half precision."""
    layout = GraphLayout(heads=2, key_heads=2, head_dim=64, causal=False, filter_order=2)
    own = ReplacementModule(layout, dtype=torch.float16)
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


# TAM over pairs of texts: semantics from the first one, and a context read text by text


def _network(size: int) -> dict[str, Tensor]:
    shapes = gru_tensors(1, size)
    return {name: randn(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def test_context_is_a_gru_over_each_text() -> None:
    """Equal to PyTorch's module on each text alone, for pairs cut in different places."""
    size, tokens, starts = 4, 7, (3, 5, 7)
    x, tensors = randn(len(starts), tokens, size), _network(size)
    module = nn.GRU(size, size, batch_first=True).double()
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    module.load_state_dict(dict(zip(names, list(tensors.values())[:4], strict=True)))
    first = torch.arange(tokens)[None] < torch.tensor(starts)[:, None]
    found = read_texts(x, tensors, first)
    for row, start in enumerate(starts):
        alone = [module(part[None])[0][0] for part in (x[row, :start], x[row, start:]) if len(part)]
        torch.testing.assert_close(found[row], torch.cat(alone))
    torch.testing.assert_close(read_texts(x, tensors, None), module(x)[0])


def test_keys_and_values_have_gates_of_their_own() -> None:
    k, v = randn(2, 1, 5, 3), randn(2, 1, 5, 3, seed=1)
    for gate, open_ones in (((0.0, 1.0), "v"), ((1.0, 0.0), "k")):
        tensors = {**_network(3), "context_gate": torch.tensor(gate).double()[:, None]}
        read = read_texts(k[:, 0], tensors, None)[:, None]
        keys, values = add_context(k, v, tensors, None)
        torch.testing.assert_close(keys, k + read if open_ones == "k" else k)
        torch.testing.assert_close(values, v + read if open_ones == "v" else v)


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """A tiny encoder with trained-like TAM in its last block."""
    folder = tmp_path_factory.mktemp("tam")
    recipe: Any = {
        "attention": {"name": "tam", "memory": "gru"},
        "attention_layers": [1],
        "calibration": {"source": "none"},
    }
    convert(str(tiny("bert")), Convert.model_validate(recipe), folder / "out")
    model: nn.Module = AutoModel.from_pretrained(folder / "out").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, item in model.named_parameters():
            if "tc_attn" in name:
                item.add_(torch.randn(item.shape, generator=generator) * 0.5)
    return model


IDS = torch.arange(5, 17).reshape(1, 12)
TYPES = torch.tensor([[0] * 5 + [1] * 7])


def _states(model: nn.Module, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=inputs.pop("ids", IDS), **inputs).last_hidden_state
    return found


def test_semantics_are_those_of_the_first_text(model: nn.Module) -> None:
    own = next(item for item in model.modules() if isinstance(item, ReplacementModule))
    seen: list[Tensor] = []
    handle = own.register_forward_hook(lambda module, args, out: seen.append(module.segments))
    _states(model, token_type_ids=TYPES)
    handle.remove()
    assert torch.equal(seen[0], TYPES)
    q, k, v = (
        randn(1, own.layout.heads, 12, own.layout.head_dim, seed=i).float() for i in (1, 2, 3)
    )
    with torch.no_grad():
        own.segments = TYPES
        told = own(q, k, v)
        own.segments = torch.zeros_like(TYPES)
        alone = own(q, k, v)
        own.segments = None
    assert not torch.allclose(told, alone)


def test_a_pass_without_types_forgets_those_before(model: nn.Module) -> None:
    before = _states(model)
    _states(model, token_type_ids=TYPES)
    assert torch.equal(_states(model), before)
    assert torch.equal(_states(copy.deepcopy(model), token_type_ids=TYPES * 0), before)


def test_types_by_position(model: nn.Module) -> None:
    """As `BertModel.forward(ids, mask, types)` takes them."""
    with torch.no_grad():
        found = model(IDS, torch.ones_like(IDS), TYPES).last_hidden_state
    assert torch.equal(found, _states(model, token_type_ids=TYPES))


def test_padded_pairs_equal_single_ones(model: nn.Module) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    types = torch.stack([TYPES[0], TYPES[0] * mask[1]])
    ids = IDS.repeat(2, 1) * mask
    together = _states(model, ids=ids, attention_mask=mask, token_type_ids=types)
    for row, length in enumerate((12, 9)):
        alone = _states(
            model, ids=ids[row : row + 1, :length], token_type_ids=types[row : row + 1, :length]
        )
        torch.testing.assert_close(together[row, :length], alone[0], atol=1e-5, rtol=0)


def test_gradients_of_two_passes_with_checkpoints(model: nn.Module) -> None:
    """Blocks are run again with the types of their own pass, in whatever order that is."""
    student: Any = copy.deepcopy(model)
    for item in student.modules():  # dropping out would differ
        if isinstance(item, nn.Dropout):
            item.p = 0.0
    batches = [{"input_ids": IDS + n, "token_type_ids": TYPES.roll(n, 1)} for n in (0, 2)]

    def gradients() -> list[Tensor]:
        student.zero_grad()
        passes = [student(**batch).last_hidden_state for batch in batches]
        (passes[0] * passes[1]).sum().backward()
        return [item.grad.clone() for item in student.parameters() if item.grad is not None]

    student.train()
    exact = gradients()
    student.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(), exact)
    for block in student.encoder.layer:
        assert block.gradient_checkpointing


def test_layouts_of_before_have_no_network() -> None:
    """What was saved without the option is read as `states`."""
    spec = TamSpec()
    layout = replacement_named("tam").layout(spec, TEXT)
    assert "context_gate" not in replacement_named("tam").tensors(layout)
    stored = layout.model_dump(exclude_defaults=True)
    assert "memory" not in stored
