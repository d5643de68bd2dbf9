"""TAM over pairs of texts: semantics from the first one, and a context read text by text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel

from tcompress.attention.module import MechanismModule
from tcompress.attention.replacement import mechanism
from tcompress.attention.tam import add_context, gru_tensors, read_texts
from tcompress.conversion.converter import convert
from tcompress.options import Convert
from tcompress.options.method_options import TamSpec
from tests.support.mechanisms import TEXT, randn
from tests.support.tiny import build


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


def test_gradients_of_the_context() -> None:
    x = randn(2, 5, 3).requires_grad_()
    tensors = {name: item.requires_grad_() for name, item in _network(3).items()}
    first = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    inputs = (x, *list(tensors.values())[:4])

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return read_texts(x, dict(zip(tensors, weights, strict=False)), first)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """A tiny encoder with trained-like TAM in its last block."""
    folder = tmp_path_factory.mktemp("tam")
    build("bert").save_pretrained(folder / "dense")  # type: ignore[attr-defined]
    recipe: Any = {
        "attention": {"name": "tam", "memory": "gru"},
        "attention_layers": [1],
        "calibration": {"source": "none"},
    }
    convert(str(folder / "dense"), Convert.model_validate(recipe), folder / "out")
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
    own = next(item for item in model.modules() if isinstance(item, MechanismModule))
    seen: list[Tensor] = []
    handle = own.register_forward_hook(lambda module, args, out: seen.append(module.segments))
    pair = _states(model, token_type_ids=TYPES)
    handle.remove()
    assert torch.equal(seen[0], TYPES)
    own.segments = None
    q, k, v = (
        randn(1, own.layout.heads, 12, own.layout.head_dim, seed=i).float() for i in (1, 2, 3)
    )
    with torch.no_grad():
        own.segments = TYPES
        told = own(q, k, v)
        own.segments = torch.zeros_like(TYPES)
        alone = own(q, k, v)
        own.segments = None
        torch.testing.assert_close(own(q, k, v), alone)
    assert not torch.allclose(told, alone)
    assert pair.shape == (1, 12, model.config.hidden_size)  # type: ignore[union-attr]


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
    for found, right in zip(gradients(), exact, strict=True):
        torch.testing.assert_close(found, right)
    for block in student.encoder.layer:
        assert block.gradient_checkpointing


def test_layouts_of_before_have_no_network() -> None:
    """What was saved without the option is read as `states`."""
    spec = TamSpec()
    layout = mechanism("tam").layout(spec, TEXT)
    assert "context_gate" not in mechanism("tam").tensors(layout)
    stored = layout.model_dump(exclude_defaults=True)
    assert "memory" not in stored
