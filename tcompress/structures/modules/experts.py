"""Experts whose stacked weights are structured: one module for all experts of a layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_map_only

from tcompress.errors import refuse_replica
from tcompress.linalg.fits import compute_dtype
from tcompress.structures.modules.linear import (
    Channels,
    PartLayout,
    StructuredLinear,
    empty_guard,
)


def child_of(parameter: str) -> str:
    """Names the module that holds the structured form of a stacked weight."""
    return f"tc_{parameter.removesuffix('_proj')}"


def is_routed(module: nn.Module) -> bool:
    """Return whether Transformers says by attributes how experts apply their weights.

    Such a module (`use_experts_implementation`) is called with tokens, the experts of each token
    and their weights; it computes `up`, a gate or an activation, and `down`.
    """
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))


def up_name(module: nn.Module) -> str:
    """Names the weight of routed experts that reads the tokens."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def activated(module: nn.Module, rows: Tensor) -> Tensor:
    """Applies the gate or the activation of routed experts.  # (..., up) -> (..., f)."""
    apply: Any = module._apply_gate if module.has_gate else module.act_fn
    return apply(rows)  # type: ignore[no-any-return]


def bias_of(module: nn.Module, parameter: str) -> Tensor | None:
    """Returns the biases of a stacked weight, if it has any.  # (E, out)."""
    return getattr(module, f"{parameter}_bias", None)


class ExpertStack(StructuredLinear):
    """A stack of weights whose call is the core alone.

    Encoding and decoding happen outside the routing, by modules of their own. The core is called
    as a module, so that hooks which bring offloaded tensors to the device run. `transposed` says
    whether the base model stores the weight called `parameter` as (E, in, out).
    """

    def __init__(
        self, parts: Sequence[PartLayout], parameter: str, *, transposed: bool, **options: Any
    ) -> None:
        super().__init__(parts, **options)
        self.parameter, self.transposed = parameter, transposed
        self.copies = self.experts or 1

    def forward(  # type: ignore[override]
        self, encoded: Sequence[Tensor], expert: int | None = None
    ) -> list[list[Tensor]]:
        """Applies the stack, or one expert of it, to encoded rows: a result per part and term."""
        return self.core(encoded, expert)

    def applied(self, x: Tensor, expert: int | None = None) -> Tensor:
        """Multiplies by all weights, (E, rows, in), or by that of one expert, (..., in)."""
        kept, shape = self.cached_weight(), x.shape[:-1]
        x = x.to(compute_dtype(x.device, self.stored_dtype))
        if kept is not None:
            return x @ (kept if expert is None else kept[expert]).mT
        encoded = self.encode(x)
        if expert is not None:
            return self.decode(self(encoded, expert)).reshape(*shape, self.out_features)
        return self.decoded_rows(self([z.reshape(*shape, -1) for z in encoded]), shape)

    def decoded_rows(self, results: Sequence[Sequence[Tensor]], shape: Sequence[int]) -> Tensor:
        """Decodes what the core gave rows of this shape.  # -> (E, rows, out)."""
        return self.decode([[u.flatten(0, 1) for u in row] for row in results]).unflatten(0, shape)


class StructuredExperts(nn.Module):
    """Replaces a module that holds stacked weights; those not rewritten stay dense.

    Routed experts (see `is_routed`) encode inputs once, before the routing, and decode results
    once, after the weighted sum over experts: only the cores differ between experts. Others run
    their own forward pass, in which a product stands for each structured weight. Empty buffers
    under the dense names stop plain Transformers on loading. Parameters, activation and settings
    stay those of the module that is replaced.
    """

    _replicate_for_data_parallel = refuse_replica

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self._host = (host,)  # in a tuple it is no child: what it holds is held here as well
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = host.__dict__[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_host" not in self.__dict__:
                raise
            return getattr(self._host[0], name)

    @property
    def stacks(self) -> Mapping[str, ExpertStack]:
        """The structured weights by the names of the dense ones."""
        children = self._modules.values()
        return {item.parameter: item for item in children if isinstance(item, ExpertStack)}

    def rewrite(
        self,
        name: str,
        parts: Sequence[PartLayout],
        *,
        transposed: bool = False,
        reads: Channels | None = None,
        **place: Any,
    ) -> StructuredLinear:
        """Puts an empty structured stack in the place of one weight; takes a dtype and a device."""
        form: dict[str, Any] = {"transposed": transposed, "reads": reads}
        stack = ExpertStack(parts, name, experts=len(getattr(self, name)), **form, **place)
        self.add_module(child_of(name), stack)
        delattr(self, name)
        self.register_buffer(name, empty_guard(**place))
        return stack

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the experts, with the arguments of the module that was replaced."""
        if is_routed(self):
            return self._routed(*args, *kwargs.values())
        forward = inspect.unwrap(type(self._host[0]).forward)
        return forward(_Disguised(self), *args, **kwargs)

    def _routed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs routed experts.  # (tokens, d), (tokens, k), (tokens, k) -> (tokens, d)."""
        stored = next(self.parameters()).dtype
        x = hidden_states.to(compute_dtype(hidden_states.device, stored))
        names = (up_name(self), "down_proj")
        (up, down), (up_bias, bias) = map(self._stack, names), (bias_of(self, n) for n in names)
        norm = self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None
        whole = norm is not None or bias is not None  # no sum may come before these
        encoded = up.encode(x)
        totals: list[Tensor] = []
        for rows, slots, mask in _rounds(top_k_index, up.copies):
            # Empty places compute on other tokens' rows; what they yield must not count, even
            # where it overflows.
            empty = ~mask.unsqueeze(-1)
            read = _biased(up.decoded_rows(up([z[rows] for z in encoded]), rows.shape), up_bias)
            hidden = activated(self, read.masked_fill(empty, 0.0))
            weights = top_k_weights[rows, slots].unsqueeze(-1)
            results = down([z.reshape(*rows.shape, -1) for z in down.encode(hidden)])
            terms = results[0]
            if whole:
                terms = [_biased(down.decoded_rows(results, rows.shape), bias)]
            terms = terms if norm is None else [norm(term) for term in terms]
            totals = totals or [term.new_zeros(x.shape[0], term.shape[-1]) for term in terms]
            for index, term in enumerate(terms):
                part = term.masked_fill(empty, 0.0) * weights.to(term.dtype)
                totals[index] = totals[index].index_add(0, rows.flatten(), part.flatten(0, 1))
        if not totals:
            return torch.zeros_like(hidden_states)
        return totals[0] if whole else down.decode([totals])

    def _stack(self, name: str) -> ExpertStack | _DenseStack:
        """The weights of routed experts look alike, dense or structured."""
        stack = self.stacks.get(name)
        if stack is not None:
            weight = stack.cached_weight()
            return stack if weight is None else _DenseStack(weight)
        dense = getattr(self, name)
        return _DenseStack(dense.mT if self.is_transposed else dense)


class _DenseStack:
    """Dense weights of routed experts, which are applied like those of an `ExpertStack`."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self.copies = weight, len(weight)

    def encode(self, x: Tensor) -> list[Tensor]:
        return [x]

    def __call__(self, encoded: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[encoded[0] @ self._weight.mT]]

    def decode(self, results: Sequence[Sequence[Tensor]], shape: Sequence[int] = ()) -> Tensor:
        return results[0][0]

    decoded_rows = decode


def _biased(rows: Tensor, bias: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias[:, None].to(rows.dtype)


class _Disguised:
    """Experts as their own forward pass sees them: products stand for structured weights."""

    def __init__(self, experts: StructuredExperts) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        stack = self._experts.stacks.get(name)
        return getattr(self._experts, name) if stack is None else _Product(stack, stack.transposed)


class _Product:
    """Stands for a stack of weights, or for one expert's, where a forward pass multiplies by it.

    Whatever else is done with it is done with the dense weight, which is made for that. A flipped
    one is seen as (in, out).
    """

    def __init__(self, stack: ExpertStack, flipped: bool, expert: int | None = None) -> None:
        self._stack, self._flipped, self._expert = stack, flipped, expert

    def dense(self) -> Tensor:
        """Returns the weights as they are seen, by way of products with ones."""
        like = next(self._stack.parameters())
        rows = torch.eye(self._stack.in_features, dtype=like.dtype, device=like.device)
        if self._expert is None:
            rows = rows.expand(self._stack.copies, -1, -1)
        made = self._stack.applied(rows, self._expert).to(like.dtype)
        return made if self._flipped else made.mT

    @property
    def shape(self) -> torch.Size:
        own = (self._stack.out_features, self._stack.in_features)
        lead = (self._stack.copies,) if self._expert is None else ()
        return torch.Size((*lead, *(own[::-1] if self._flipped else own)))

    @property
    def mT(self) -> _Product:
        return _Product(self._stack, not self._flipped, self._expert)

    def transpose(self, one: int, two: int) -> Any:
        count = len(self.shape)
        if {one % count, two % count} == {count - 2, count - 1}:
            return self.mT
        return self.dense().transpose(one, two)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        single = isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)
        if self._expert is None and single and getattr(index, "dtype", None) != torch.bool:
            return _Product(self._stack, self._flipped, range(len(self))[int(index)])
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cheap = name in ("dtype", "device")
        return getattr(next(self._stack.parameters()) if cheap else self.dense(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiplies by the structured weights where this is a product with rows."""
        kwargs = kwargs or {}
        x, weight = (*args, None, None)[:2]
        if isinstance(x, Tensor) and isinstance(weight, _Product) and len(args) + len(kwargs) < 4:
            stack, expert = weight._stack, weight._expert
            fits = expert is not None or (x.dim() == 3 and len(x) == stack.copies)
            name = getattr(func, "__name__", "")
            if func is linear and fits and not weight._flipped:
                made, bias = stack.applied(x, expert), (*args, kwargs.get("bias"))[2]
                return made if bias is None else made + bias
            if name in ("matmul", "__matmul__", "bmm", "mm") and fits and weight._flipped:
                return stack.applied(x, expert)
        args, kwargs = tree_map_only(_Product, _Product.dense, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)


def _rounds(index: Tensor, experts: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Deals tokens out to experts in rounds of equal capacity, so that every product is batched.

    A round takes up to twice the mean load of every expert; with balanced routing one or two
    rounds serve all tokens, and memory stays bounded where the routing is not balanced. An exported
    graph, which knows no loads, has one round, and in it a place for every token at every expert.

    # (tokens, k)
    """
    tokens, k = index.shape
    if torch.compiler.is_exporting():
        chosen = index == torch.arange(experts, device=index.device)[:, None, None]
        rows = torch.arange(tokens, device=index.device).expand(experts, -1)
        yield rows, chosen.int().argmax(-1), chosen.any(-1)
        return
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
