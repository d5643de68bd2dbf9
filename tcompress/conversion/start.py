"""First values of layers that are trained from scratch.

A structure draws its tensors; they are then scaled so that the weight which they stand for is as
large as the host's own initialisation draws it, in the root mean square. Outputs so begin with the
variance that they have in the dense model, whatever the family and its recipe (small normal values,
values by width, or by depth). Biases are the host's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tcompress.conversion.fit import FittedLayer
from tcompress.conversion.shared import Banks, bank_of, owned
from tcompress.planning.entries import BankKey, LayerPlan
from tcompress.structures import Layout, structure
from tcompress.structures.base import Side
from tcompress.structures.linear import bank_layouts, side_name, tensor_prefix

SIDES: tuple[Side, Side] = ("in", "out")


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
            drawn = structure(layouts[name].structure).start_bank(
                layouts[name], generator_of(seed, f"{entry.name}/{name}")
            )
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
    generator = generator_of(seed, f"{entry.name}.{entry.parameter}")
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
        kind = structure(layout.structure)
        like = torch.empty(0, dtype=torch.float64)
        present = [side for side in SIDES if kind.has_side(layout, side)]
        sides = {side: kind.start_side(layout, side) for side in present}
        operators = {
            side: kind.operator(
                {k: t.double() for k, t in own.items()} | dict(kind.constants(layout, side)),
                layout,
                side,
                like,
            )
            for side, own in sides.items()
        }
        return cls(layout, sides, operators, bank_of(entry, layout, banks, torch.device("cpu")))

    def draw(self, generator: torch.Generator, power: float) -> dict[str, Tensor]:
        """Draws tensors whose dense weight has a given mean square."""
        kind = structure(self.layout.structure)
        drawn = {k: t.double() for k, t in kind.start(self.layout, generator).items()}
        dense = kind.dense({**drawn, **self.bank}, self.layout, self.operators)
        own = float(dense.square().mean())
        return scaled(drawn, (power / own) ** 0.5)
