"""A recurrent network that reads keys in order, after the context of TAM (paper, section 5.1).

The paper makes keys and values of GRU(e), with e the word embeddings. Here every layer adds what a
network of its own makes of its keys: k + g GRU(k) and v + h GRU(k), so that closed gates g and h
leave a trained model as it is.

Two texts are read one by one, each from a fresh state, and their states stand side by side again.
The network is one of PyTorch's own, called with tensors that a mechanism owns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcompress.structures.base import Shapes, Tensors

_NAMES = ("context_in", "context_state", "context_in_bias", "context_state_bias")


def gru_tensors(heads: int, width: int) -> Shapes:
    """Shapes of the network and of two gates per head, for keys and for values."""
    size = heads * width
    shapes = ((3 * size, size), (3 * size, size), (3 * size,), (3 * size,))
    return {**dict(zip(_NAMES, shapes, strict=True)), "context_gate": (2, heads)}


def gru_macs(size: int, tokens: int) -> int:
    """Multiply-adds over so many tokens of one text; of a pair twice as many."""
    return 6 * size**2 * tokens


def start_gru(
    heads: int, width: int, generator: torch.Generator, *, pretrained: bool
) -> dict[str, Tensor]:
    """Draws the network as PyTorch does; in a trained host its gates are closed."""
    bound = (heads * width) ** -0.5
    values = {
        name: torch.empty(shape).uniform_(-bound, bound, generator=generator)
        for name, shape in gru_tensors(heads, width).items()
    }
    gate = torch.zeros if pretrained else torch.ones
    return {**values, "context_gate": gate(2, heads)}


def add_context(
    k: Tensor, v: Tensor, tensors: Tensors, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Adds what the network makes of the keys to keys and values, each through its gate.

    Args:
        k: Keys.  # (batch, heads, tokens, width)
        v: Values.  # (batch, heads, tokens, width)
        tensors: The network and its gates.
        first: True for tokens of the first of two texts.  # (batch, tokens), or None
    """
    read = read_texts(k.transpose(1, 2).flatten(2), tensors, first)
    states = read.unflatten(2, (k.shape[1], -1)).transpose(1, 2)
    gates = tensors["context_gate"][:, :, None, None]
    return k + gates[0] * states, v + gates[1] * states


def read_texts(x: Tensor, tensors: Tensors, first: Tensor | None) -> Tensor:
    """Reads one text, or two of which each begins with a fresh state.

    Args:
        x: States of tokens in order.  # (batch, tokens, size)
        tensors: The network.
        first: True for tokens of the first text, which come before the others.

    Returns:
        States of the network.  # (batch, tokens, size)
    """
    one = _gru(x, tensors)
    if first is None:
        return one
    # The second text is moved to the front, read, and moved back.
    tokens, places = x.shape[1], torch.arange(x.shape[1], device=x.device)
    start = first.long().cumprod(1).sum(1, keepdim=True)
    two = _gru(_moved(x, (places + start) % tokens), tensors)
    return torch.where((places < start)[..., None], one, _moved(two, (places - start) % tokens))


def _moved(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[..., None].expand_as(x))


def _gru(x: Tensor, tensors: Tensors) -> Tensor:
    weights = [tensors[name] for name in _NAMES]
    state = x.new_zeros(1, len(x), x.shape[2])
    options = {"num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False}
    states, _ = torch.gru(x, state, weights, has_biases=True, batch_first=True, **options)  # type: ignore[call-overload]
    return states
