"""Routed experts during calibration: both streams follow the dense stream's routing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tcompress.anatomy import Block
from tcompress.anatomy.projections import chooses
from tcompress.conversion.capture import token_rows
from tcompress.conversion.sums import SplitSums
from tcompress.structures.experts import StructuredExperts, activated, bias_of, up_name

Arguments = tuple[Any, ...]
Routed = tuple[Tensor, Tensor, Tensor]  # hidden states, experts of each token, their weights


def routed_arguments(*args: Tensor, **kwargs: Tensor) -> Routed:
    """Returns the arguments of routed experts, whatever the family calls them."""
    hidden, index, weights = (*args, *kwargs.values())
    return hidden, index, weights


def listed_item(block: nn.Module, inside: str) -> str | None:
    """Finds the item of a list of experts, which a router chooses, that a layer belongs to.

    Args:
        block: The block.
        inside: Path of the layer below the block.

    Returns:
        Path of the item below the block; None if the layer is in no such list.
    """
    modules = {name: module for name, module in block.named_modules() if name}
    steps = inside.split(".")
    for depth in range(1, len(steps)):
        if isinstance(modules[".".join(steps[:depth])], (nn.ModuleList, nn.ModuleDict)):
            parent = ".".join(steps[: depth - 1])
            names = [name for name, _ in block.get_submodule(parent).named_children()]
            if any(chooses(f"{parent}.{name}".lstrip("."), modules) for name in names):
                return ".".join(steps[: depth + 1])
    return None


class TokenRows:
    """Tells which rows that the layers of a block read are no padding.

    The items of a list of experts read some tokens each. A list that is handed the routing is run
    with the mask in the place of hidden states and with items that only listen, before it runs
    as it is: so every item's rows are known, whatever form the routing has. Where the list has no
    pass of its own, the rows of its items cannot be told apart and all count.

    Args:
        module: The block.
        block: Its layers.

    Attributes:
        batch: What the model reads.
    """

    def __init__(self, module: nn.Module, block: Block) -> None:
        self.batch: Mapping[str, Tensor] = {}
        self._block = block.name
        self._masks: dict[str, Tensor] = {}  # by path of an item
        self._items: dict[str, str] = {}  # by name of a layer
        for layer in block.layers:
            item = listed_item(module, layer.name.removeprefix(f"{block.name}."))
            if item is not None:
                self._items[layer.name] = item
        self._handles = [
            module.get_submodule(path).register_forward_pre_hook(
                partial(self._ask, path), with_kwargs=True
            )
            for path in {item.rpartition(".")[0] for item in self._items.values()}
        ]

    def is_listed(self, layer: str) -> bool:
        """Tells whether a layer belongs to an item of a list of experts."""
        return layer in self._items

    def of(self, x: Tensor, layer: str, role: str) -> tuple[Tensor, Tensor | None]:
        """Flattens what a layer reads, as `token_rows` does.

        Args:
            x: What it reads.  # (..., d)
            layer: Its name.
            role: Its role.
        """
        rows, mask = token_rows(x, self.batch, self._block, role)
        own = self._masks.get(self._items.get(layer, ""))
        return rows, own if own is not None and len(own) == len(rows) else mask

    def close(self) -> None:
        """Asks no more."""
        for handle in self._handles:
            handle.remove()

    def _ask(self, path: str, experts: nn.Module, args: Arguments, kwargs: dict[str, Any]) -> None:
        own = dict(experts._modules)
        for name in own:
            self._masks.pop(f"{path}.{name}", None)
        if not args or len(args) + len(kwargs) < 2:  # it is not handed the routing
            return
        hidden, *routing = args
        _, mask = token_rows(hidden, self.batch, self._block, "")
        if mask is None:
            return
        marked = mask.to(hidden)[:, None].expand(-1, hidden.shape[-1]).reshape(hidden.shape)
        listeners = {name: _Listener() for name in own}
        experts._modules.update(listeners)
        try:
            with torch.no_grad():
                experts.forward(marked, *routing, **kwargs)
        finally:
            experts._modules.update(own)
        for name, listener in listeners.items():
            if listener.heard is not None:
                self._masks[f"{path}.{name}"] = listener.heard


class _Listener(nn.Module):
    """Stands in for an expert, and keeps which of its rows are marked."""

    heard: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        self.heard = rows[..., 0].flatten() > 0
        return rows


class Routing:
    """Records the dense stream's routing in a block and replays it in the compressed one.

    Without it the two streams would send a token to different experts, and rows would not pair.

    Args:
        dense: The dense block.
        inside: Paths of routed experts below the block.
    """

    def __init__(self, dense: nn.Module, inside: Collection[str]) -> None:
        self._inside = tuple(inside)
        self._routes: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.current = 0
        for path in self._inside:
            hook = partial(self._record, path)
            dense.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def replay_in(self, new: nn.Module) -> None:
        """Makes the experts of the compressed block follow the recorded routing."""
        for path in self._inside:
            hook = partial(self._replay, path)
            new.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def _record(self, path: str, host: nn.Module, args: Arguments, kwargs: dict[str, Any]) -> None:
        _, index, weights = routed_arguments(*args, **kwargs)
        self._routes[path, self.current] = (index, weights)

    def _replay(
        self, path: str, host: nn.Module, args: Arguments, kwargs: dict[str, Any]
    ) -> tuple[Arguments, dict[str, Any]]:
        hidden, _, _ = routed_arguments(*args, **kwargs)
        return (hidden, *self._routes[path, self.current]), {}


class ExpertSums:
    """Moments of the inputs of all experts' up or down projections.

    Args:
        dense: The dense experts module.
        new: The one being rewritten; None while nothing of it is.
        down: True for the input of the down projections.
    """

    def __init__(self, dense: Any, new: Any, *, down: bool) -> None:
        self._dense = dense
        self._down = down
        name = up_name(dense)
        self._bias = bias_of(dense, name)
        weight: Tensor = getattr(dense, name)
        self._weight = weight.mT if dense.is_transposed else weight
        stack = new.stacks.get(name) if down and isinstance(new, StructuredExperts) else None
        self._new_weight = self._weight if stack is None else stack.dense_weight(torch.float32)
        self.sums: Sequence[SplitSums] = [SplitSums() for _ in range(len(weight))]

    def add(self, routed: Routed, hidden: Tensor, mask: Tensor | None, *, holdout: bool) -> None:
        """Adds one batch.

        Args:
            routed: Arguments of the dense experts.
            hidden: Tokens of the compressed stream.  # (tokens, d)
            mask: Tokens that are not padding.  # (tokens,)
            holdout: Whether the batch is only measured on.
        """
        dense_hidden, index, weights = routed
        # A weight of zero means that a token skips its expert, as in some families.
        counts = weights != 0 if weights.shape == index.shape else torch.ones_like(index).bool()
        for expert, sums in enumerate(self.sums):
            chosen = ((index == expert) & counts).any(-1)
            rows = chosen if mask is None else chosen & mask
            if not bool(rows.any()):
                continue
            one = self._inputs(dense_hidden[rows], self._weight, expert)
            two = self._inputs(hidden[rows], self._new_weight, expert)
            sums.add(one, two, holdout=holdout)

    def _inputs(self, tokens: Tensor, weight: Tensor, expert: int) -> Tensor:
        if not self._down:
            return tokens
        bias = None if self._bias is None else self._bias[expert]
        return activated(self._dense, linear(tokens, weight[expert], bias))
