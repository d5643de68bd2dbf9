"""Experts whose stacked weights are structured: one module for all experts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.errors import refuse_replica
from tcompress.structures.linear import PartLayout, StructuredLinear
from tcompress.structures.side import compute_dtype

CHILD_OF = {"gate_up_proj": "tc_gate_up", "down_proj": "tc_down"}


class ExpertStack(StructuredLinear):
    """A stack of weights whose call is the core alone.

    Encoding and decoding happen outside the routing, by modules of their own. The core is called
    as a module, so that hooks which bring offloaded tensors to the device run.
    """

    def forward(self, encoded: Sequence[Tensor]) -> list[list[Tensor]]:  # type: ignore[override]
        """Applies the stack to encoded rows: a result per part and term."""
        return self.core(encoded)


class StructuredExperts(nn.Module):
    """Replaces a module that holds `gate_up_proj` (E, 2 f, d) and `down_proj` (E, d, f).

    Inputs are encoded once, before the routing, and results are decoded once, after the weighted
    sum over experts: only the cores differ between experts. Both weights are dense until they are
    rewritten; then empty buffers under the dense names stop plain Transformers on loading.

    Args:
        host: The module to replace; its weights and activation are kept.
    """

    _replicate_for_data_parallel = refuse_replica

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.act_fn: Callable[[Tensor], Tensor] = host.act_fn  # type: ignore[assignment]
        self.experts = len(host.gate_up_proj)  # type: ignore[arg-type]
        for name in CHILD_OF:
            self.register_parameter(name, getattr(host, name))

    def rewrite(
        self,
        name: str,
        parts: Sequence[PartLayout],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> StructuredLinear:
        """Puts an empty structured stack in the place of one weight.

        Args:
            name: `gate_up_proj` or `down_proj`.
            parts: Layout of the stack.
            dtype: Dtype of the tensors.
            device: Device of the tensors.
        """
        stack = ExpertStack(parts, experts=self.experts, dtype=dtype, device=device)
        self.add_module(CHILD_OF[name], stack)
        delattr(self, name)
        guard = torch.empty(0, dtype=dtype, device=device)
        guard._is_hf_initialized = True  # type: ignore[attr-defined]
        self.register_buffer(name, guard)
        return stack

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts.

        Args:
            hidden_states: Tokens.  # (tokens, d)
            top_k_index: Experts of each token; `experts` itself means none.  # (tokens, k)
            top_k_weights: Their weights.  # (tokens, k)

        Returns:
            Weighted sums of the experts' results.  # (tokens, d)
        """
        stored = next(self.parameters()).dtype
        x = hidden_states.to(compute_dtype(hidden_states.device, stored))
        up, down = self._stack("gate_up_proj"), self._stack("down_proj")
        encoded = up.encode(x)
        totals: list[Tensor] = []
        for rows, slots, mask in _rounds(top_k_index, self.experts):
            # Empty places compute on other tokens' rows; what they yield must not count, even
            # where it overflows.
            empty = ~mask.unsqueeze(-1)
            gate_up = up.core([z[rows] for z in encoded]).masked_fill(empty, 0.0)
            gate, value = gate_up.chunk(2, -1)
            hidden = self.act_fn(gate) * value
            weights = top_k_weights[rows, slots].unsqueeze(-1)
            terms = down.terms(hidden)
            if not totals:
                totals = [term.new_zeros(x.shape[0], term.shape[-1]) for term in terms]
            flat = rows.flatten()
            for index, term in enumerate(terms):
                part = term.masked_fill(empty, 0.0) * weights.to(term.dtype)
                totals[index] = totals[index].index_add(0, flat, part.flatten(0, 1))
        if not totals:
            return torch.zeros_like(hidden_states)
        return down.decode(totals)

    def _stack(self, name: str) -> _Stack:
        child: Any = self._modules.get(CHILD_OF[name])
        kept = None if child is None else child.kept_weight()
        return _Stack(child, getattr(self, name)) if kept is None else _Stack(None, kept)


class _Stack:
    """The two weights of experts look alike, dense or structured."""

    def __init__(self, layer: Any, weight: Tensor) -> None:
        self._layer = layer
        self._weight = weight

    def encode(self, x: Tensor) -> list[Tensor]:
        return [x] if self._layer is None else self._layer.encode(x)  # type: ignore[no-any-return]

    def core(self, encoded: Sequence[Tensor]) -> Tensor:
        """Applies the weight to rows dealt out to experts.  # (E, rows, in) -> (E, rows, out)."""
        if self._layer is None:
            return encoded[0] @ self._weight.mT
        parts = self._layer(encoded)
        flat = self._layer.decode([[u.flatten(0, 1) for u in row] for row in parts])
        return flat.unflatten(0, encoded[0].shape[:2])  # type: ignore[no-any-return]

    def terms(self, hidden: Tensor) -> list[Tensor]:
        """Applies all but the output side, which comes after the sum over experts."""
        if self._layer is None:
            return [hidden @ self._weight.mT]
        encoded = [z.reshape(*hidden.shape[:2], -1) for z in self._layer.encode(hidden)]
        return self._layer(encoded)[0]  # type: ignore[no-any-return]

    def decode(self, totals: Sequence[Tensor]) -> Tensor:
        return totals[0] if self._layer is None else self._layer.decode([totals])


def _rounds(index: Tensor, experts: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Deals tokens out to experts in rounds of equal capacity, so that every product is batched.

    A round takes up to twice the mean load of every expert; with balanced routing one or two
    rounds serve all tokens, and memory stays bounded where the routing is not balanced.

    Args:
        index: Experts of each token.  # (tokens, k)
        experts: Number of experts E.

    Yields:
        Token rows, their slots among the k, and which places are filled: all (E, capacity).
    """
    tokens, k = index.shape
    flat = index.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    starts = counts.cumsum(0) - counts
    most = int(counts.max()) if flat.numel() else 0
    capacity = max(1, min(most, -(-2 * tokens * k // experts)))
    for begin in range(0, most, capacity):
        places = torch.arange(begin, begin + capacity, device=index.device)
        mask = places[None] < counts[:, None]
        picked = order[(starts[:, None] + places[None]).clamp_max(order.numel() - 1)]
        yield picked // k, picked % k, mask
