"""What a fit starts from: moments of inputs, and first values where nothing is fitted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tcompress.attention import mechanism
from tcompress.attention.module import MechanismModule
from tcompress.attention.replacement import QueryKeyMoments
from tcompress.conversion.fit import Banks, FittedLayer, LayerMoments, bank_of, owned
from tcompress.errors import FitError
from tcompress.linalg.moments import MomentSums
from tcompress.models import SourceModel, read_finite
from tcompress.planning.entries import AttentionPlan, BankKey, LayerPlan
from tcompress.roles import anatomy_of, attentions_of
from tcompress.structures import Layout, structure
from tcompress.structures.base import Side
from tcompress.structures.capabilities import (
    SIDES,
    SharesFactors,
    dense_of,
    first_operators,
    transform_of,
)
from tcompress.structures.modules.linear import bank_layouts, side_name, tensor_prefix

# Moments of layer inputs, of fitted and of held-out rows, and of queries and keys.


class SplitSums:
    """Accumulates the moments of one layer input."""

    def __init__(self) -> None:
        self._sums: dict[bool, MomentSums] = {}

    def add(self, dense: Tensor, new: Tensor, *, holdout: bool) -> None:
        """Adds paired rows of both streams, to fit on or to measure on.  # (rows, d)."""
        if holdout not in self._sums:
            self._sums[holdout] = MomentSums(dense.shape[-1], dense.device)
        self._sums[holdout].add(dense, new)

    def moments(self, *, centred: bool) -> LayerMoments:
        """Returns both moments; without rows to fit on there are none (a data-free fit)."""
        train, held = self._sums.get(False), self._sums.get(True)
        if train is None or not train.rows:
            return LayerMoments()
        return LayerMoments(
            train.moments(centred=centred),
            held.moments(centred=centred) if held is not None and held.rows else None,
        )


class QueryKeySums:
    """Accumulates the moments of one attention's queries and keys.

    Args:
        centred: Whether keys count less their mean over their text.
    """

    def __init__(self, *, centred: bool) -> None:
        self._centred = centred
        self._queries: Tensor | float = 0.0
        self._keys: Tensor | float = 0.0

    def add(self, q: Tensor, k: Tensor, tokens: Tensor | None) -> None:
        """Adds a batch.

        Args:
            q: Queries.  # (batch, heads, tokens, head_dim)
            k: Keys.  # (batch, key_heads, tokens, head_dim)
            tokens: True where a token is no padding, or None.  # (batch | 1, tokens)
        """
        q, k = q.double(), k.double()
        if tokens is None:
            tokens = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
        valid = tokens[:, None, :, None].to(q)
        if self._centred:
            k = k - (k * valid).sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)
        q, k = q * valid, k * valid
        self._queries = self._queries + (q.mT @ q).sum(0)
        self._keys = self._keys + (k.mT @ k).sum(0)

    def moments(self) -> QueryKeyMoments:
        """Returns the sums, whose scale does not count.

        Raises:
            FitError: They hold NaN or infinity, or nothing was added.
        """
        queries, keys = torch.as_tensor(self._queries), torch.as_tensor(self._keys)
        if not queries.dim() or not bool(torch.isfinite(queries.sum() + keys.sum())):
            raise FitError(
                "queries or keys on calibration data are missing, NaN or infinite",
                "repair the checkpoint, or convert this model without data: `--calib none`",
            )
        return QueryKeyMoments(queries, keys)


# First values of layers trained from scratch, and of attention that is exchanged.
#
# A structure draws its tensors; they are then scaled so that the weight which they stand for is as
# large as the host's own initialisation draws it, in the root mean square. Outputs so begin with
# the variance that they have in the dense model, whatever the family and its recipe (small normal
# values, values by width, or by depth). Biases are the host's.


def generator_of(seed: int, name: str) -> torch.Generator:
    """Returns a generator of its own for everything that has a name.

    Values do not depend on the order in which they are drawn, nor on what else is.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def scaled(tensors: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Multiplies the weight that tensors stand for: it is linear in each of them.

    A factor of zero leaves all but the first one as they are, so that gradients still flow.
    """
    if factor == 0:
        first = next(iter(tensors))
        return {name: torch.zeros_like(t) if name == first else t for name, t in tensors.items()}
    each = factor ** (1 / len(tensors))
    return {name: tensor * each for name, tensor in tensors.items()}


def start_banks(
    layers: Sequence[LayerPlan], dtype_of: Callable[[LayerPlan], torch.dtype], seed: int
) -> Banks:
    """Draws what layers share.

    Args:
        layers: The plan.
        dtype_of: Gives the dtype in which a layer is stored.
        seed: Seed of the weights.
    """
    found: dict[BankKey, dict[str, Tensor]] = {}
    for entry in layers:
        layouts = bank_layouts(entry.parts)
        for name in entry.own_banks:
            kind = structure(layouts[name].structure)
            assert isinstance(kind, SharesFactors)
            generator = generator_of(seed, f"{entry.name}/{name}")
            drawn = kind.start_shared(layouts[name], generator)
            found[entry.name, name] = {key: t.to(dtype_of(entry)) for key, t in drawn.items()}
    return found


def start_layers(
    entries: Sequence[LayerPlan],
    weights: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    banks: Banks,
    seed: int,
) -> list[FittedLayer]:
    """Draws layers that share their input sides.

    Args:
        entries: Their plans, the owner of the sides first.
        weights: What the host draws, of which only the size counts.  # ([experts,] out, in) each
        dtype: Dtype in which tensors are stored.
        banks: What layers share.
        seed: Seed of the weights.
    """
    with torch.no_grad():
        return [
            _start(entry, weight, dtype, banks, seed)
            for entry, weight in zip(entries, weights, strict=True)
        ]


def _start(
    entry: LayerPlan, weight: Tensor, dtype: torch.dtype, banks: Banks, seed: int
) -> FittedLayer:
    generator = generator_of(seed, entry.key)
    stack = weight if entry.experts else weight[None]
    tensors: dict[str, Tensor] = {}
    sizes = [part.out_features for part in entry.parts]
    for index, part in enumerate(entry.parts):
        terms = [_Term.of(entry, layout, banks) for layout in part.terms]
        shares = [_numbers_of(term.layout) for term in terms]
        for number, term in enumerate(terms):
            drawn = []
            for matrix in stack:
                rows = matrix.split(sizes)[index]
                # Terms are independent, so that their variances add up.
                share = shares[number] / sum(shares)
                drawn.append(term.draw(generator, float(rows.double().square().mean()) * share))
            prefix = tensor_prefix(entry.parts, index, number)
            for name in drawn[0]:
                values = [own[name].to(dtype) for own in drawn]
                tensors[prefix + name] = torch.stack(values) if entry.experts else values[0]
            tensors |= {
                f"{side_name(entry.parts, side, index, number)}.{leaf}": tensor.to(dtype)
                for side, own in term.sides.items()
                if side == "out" or (index == 0 and entry.input_of is None)
                for leaf, tensor in own.items()
            }
    tensors.update(owned(entry, banks))
    return FittedLayer(tensors, {})


def _numbers_of(layout: Layout) -> int:
    """Numbers that a term stores of its own."""
    return sum(prod(shape) for shape in structure(layout.structure).tensors(layout).values())


@dataclass(frozen=True)
class _Term:
    """One term of a sum, with what it needs to become a dense weight."""

    layout: Layout
    sides: dict[Side, dict[str, Tensor]]
    operators: dict[Side, Any]
    bank: dict[str, Tensor]

    @classmethod
    def of(cls, entry: LayerPlan, layout: Layout, banks: Banks) -> _Term:
        found = {side: transform_of(layout, side) for side in SIDES}
        sides = {side: item.first() for side, item in found.items() if item is not None}
        operators = first_operators(layout, torch.empty(0, dtype=torch.float64))
        return cls(layout, sides, operators, bank_of(entry, layout, banks, torch.device("cpu")))

    def draw(self, generator: torch.Generator, power: float) -> dict[str, Tensor]:
        """Draws tensors whose dense weight has a given mean square."""
        kind = structure(self.layout.structure)
        drawn = {k: t.double() for k, t in kind.start(self.layout, generator).items()}
        dense = dense_of(self.layout, {**drawn, **self.bank}, self.operators)
        own = float(dense.square().mean())
        return scaled(drawn, (power / own) ** 0.5)


def adapt(
    module: MechanismModule,
    name: str,
    known: dict[str, Tensor],
    calls: Iterable[tuple[Tensor, Tensor, Tensor | None]],
) -> None:
    """Gives a mechanism the first values that depend on the host's queries and keys.

    Args:
        module: The mechanism, with all its other first values.
        name: Name under which it is stored.
        known: Such values of the block, by stored name; those of this mechanism are added where
            no interrupted run has left them.
        calls: Queries, keys and valid tokens of every batch, see `QueryKeySums.add`.
    """
    kind, layout = mechanism(module.layout.mechanism), module.layout
    centred = kind.centres_keys(layout)
    if centred is None:
        return
    own = {f"{name}.{key}": value for key, value in module.named_parameters()}
    if not own.keys() & known.keys():
        sums = QueryKeySums(centred=centred)
        for call in calls:
            sums.add(*call)
        try:
            made = kind.adapted(layout, sums.moments())
        except FitError as error:
            raise FitError(f"attention `{name}`: {error.message}", error.hint) from error
        known |= {f"{name}.{key}": value for key, value in made.items()}
    for key in own.keys() & known.keys():
        own[key].copy_(known[key])


def projection_moments(source: SourceModel, entry: AttentionPlan) -> QueryKeyMoments | None:
    """Returns moments of queries and keys as weights alone tell them, if an attention wants any.

    Inputs are taken for white: E[q q^T] is W_q W_q^T + b_q b_q^T.

    Args:
        source: The dense model.
        entry: The attention.
    """
    centred = mechanism(entry.layout.mechanism).centres_keys(entry.layout)
    if centred is None:
        return None
    model = source.meta_model()
    path = source.keymap.runtime_name(entry.name)
    found = [item for item in attentions_of(model, anatomy_of(model)) if item.name == path]
    if not found:
        return None
    squares = []
    for role in ("q", "k"):
        layer = found[0].layers.get(role) or found[0].layers["qkv"]
        sizes = [part.size for part in layer.parts]
        names = [part.name for part in layer.parts]
        if role not in names:
            return None  # fused head by head
        weight = read_finite(source.store, source.keymap, layer.weight_name).double()
        rows = (weight.mT if layer.kind == "conv1d" else weight).split(sizes)[names.index(role)]
        if layer.bias and (role == "q" or not centred):
            bias = read_finite(source.store, source.keymap, f"{layer.name}.bias").double()
            rows = torch.cat([rows, bias.split(sizes)[names.index(role)][:, None]], 1)
        heads = rows.unflatten(0, (-1, entry.layout.head_dim))
        squares.append(heads @ heads.mT)
    return QueryKeyMoments(*squares)
