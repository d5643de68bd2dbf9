"""Which channels between layers stay: chosen from moments, and applied to weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tcompress.fitting.layer_fits import CURVATURE_DAMPING, MORE_DATA, dense_matrix
from tcompress.linalg.channels import HeadBases, head_bases, order_groups, order_neurons
from tcompress.linalg.fits import damped_curvature, diagonal_blocks
from tcompress.linalg.moments import (
    LARGE,
    naming,
    ridge_level,
    safe_cholesky,
    transposed_product,
)
from tcompress.models import SourceModel
from tcompress.planning.costs import path_of
from tcompress.planning.entries import LayerPlan
from tcompress.planning.sites import Coupling, couplings, roles_of
from tcompress.roles import Layer
from tcompress.structures.modules.linear import Channels

# An order of channels holds for all sizes: with n of them the first n stay. For neurons, and whole
# heads, it is an order of rows; within heads a basis of each, the most useful directions first.

READ = ""  # stands for a part where a layer reads channels
_ROWS = 256  # of a product that is taken by parts, where it is large
DAMPING = 1e-4  # of moments that were guessed, in units of their mean diagonal


@dataclass(frozen=True)
class Reduction:
    """Fewer channels of one layer: an order of them, or bases of heads."""

    reduce: Tensor  # order of channels ([experts,] f), or bases of heads (heads, size, size)
    lift: Tensor | None = None  # takes the coordinates of heads back; None for an order

    def narrow(self, tensor: Tensor, channels: Channels) -> Tensor:
        """Return the rows of a weight, or of a bias, that stay.  # (..., channels, in)."""
        if self.lift is None:
            order = self.reduce[..., : channels.kept].long()
            return tensor[order] if order.ndim == 1 else tensor.take_along_dim(order[..., None], 1)
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))  # it is fitted to later
        flat = wide.unflatten(0, (channels.groups, channels.size))
        bases = self.reduce[:, : channels.kept].to(wide)
        return torch.einsum("hrs,hs...->hr...", bases, flat).flatten(0, 1)

    def lifted(self, tensor: Tensor, channels: Channels) -> Tensor:
        """Return columns for the channels that stay, if others are left out.  # (..., channels)."""
        if self.lift is None:
            order = self.reduce[..., : channels.kept].long()
            one = order.ndim == 1
            return tensor[..., order] if one else tensor.take_along_dim(order[:, None], 2)
        flat = tensor.unflatten(-1, (channels.groups, channels.size))
        bases = self.lift[..., : channels.kept].to(tensor.dtype)
        return torch.einsum("...hs,hsr->...hr", flat, bases).flatten(-2)


ReductionKey = tuple[str, str, int]
"""Name of the weight in the checkpoint, that of its part, or `READ`, and the size of a group."""

Reductions = Mapping[ReductionKey, Reduction]


def _reduction(
    reductions: Reductions, entry: LayerPlan, part: str, channels: Channels, device: torch.device
) -> Reduction:
    if not channels.kept:
        return Reduction(torch.empty(0, device=device))
    return reductions[entry.key, part, channels.size]


def _by_part(
    entry: LayerPlan,
    tensor: Tensor,
    dim: int,
    reductions: Reductions,
    take: Callable[[Reduction, Tensor, Channels], Tensor],
) -> Tensor:
    """Take what is left of the outputs of a layer, which run along a dimension, part by part."""
    if not any(part.channels for part in entry.parts):
        return tensor
    sizes, runs = [part.dense_features for part in entry.parts], []
    for part, run in zip(entry.parts, tensor.split(sizes, dim), strict=True):
        if part.channels is not None:
            reduction = _reduction(reductions, entry, part.name, part.channels, run.device)
            run = take(reduction, run, part.channels)
        runs.append(run)
    return torch.cat(runs, dim)


def narrowed_rows(entry: LayerPlan, tensor: Tensor, reductions: Reductions) -> Tensor:
    """Return a dense weight ([experts,] out, in), or a bias, without outputs that are gone."""
    return _by_part(entry, tensor, 1 if entry.experts else 0, reductions, Reduction.narrow)


def lift_of(entry: LayerPlan, reductions: Reductions, device: torch.device) -> Tensor | None:
    """Return the matrix from inputs that are left, if not all, to all.  # ([experts,] in, left)."""
    if entry.reads is None:
        return None
    eye = torch.eye(entry.in_features, dtype=torch.float64, device=device)
    eye = eye.expand(entry.experts, -1, -1) if entry.experts else eye
    return _reduction(reductions, entry, READ, entry.reads, device).lifted(eye, entry.reads)


def narrowed_curvature(entry: LayerPlan, curvature: Tensor, reductions: Reductions) -> Tensor:
    """Return moments of gradients at the outputs that are left.  # (out, out)."""
    for _ in range(2):
        curvature = _by_part(entry, curvature, 1, reductions, Reduction.lifted).mT
    return curvature


def stored_reductions(reductions: Reductions) -> dict[str, Tensor]:
    """Name the tensors of reductions for the working folder."""
    return {
        f"{key}/{part}/{size}/{name}": tensor
        for (key, part, size), reduction in reductions.items()
        for name, tensor in vars(reduction).items()
        if tensor is not None
    }


def reductions_of(
    named: Mapping[str, Tensor],
    source: SourceModel,
    block: str,
    layers: Sequence[LayerPlan],
    device: torch.device,
) -> Reductions:
    """Read them back, and add those of narrow layers that no data has told, by the weights."""
    tensors = defaultdict[ReductionKey, dict[str, Tensor]](dict)
    for path, tensor in named.items():
        key, part, size, name = path.rsplit("/", 3)
        tensors[key, part, int(size)][name] = tensor
    reductions = {key: Reduction(**fields) for key, fields in tensors.items()}
    entries = {path_of(source, entry): entry for entry in layers}
    for coupling in (c for b in roles_of(source).blocks if b.name == block for c in couplings(b)):
        names = {layer.weight_name for layer in coupling.layers}
        if not names <= entries.keys() or not any(entries[name].is_narrow for name in names):
            continue
        written = {
            (entries[layer.weight_name].key, part.name, coupling.size)
            for layer, part in coupling.writers
        }
        if not written <= reductions.keys():
            reductions |= order_by_weights(coupling, entries, source, device).reductions
    return reductions


# Choosing channels, and what is lost with fewer of them.


@dataclass(frozen=True, eq=False)
class ChannelOrder:
    """The channels of one coupling in order, and what is lost with some of them."""

    coupling: Coupling
    losses: Tensor  # with 0, 1, ... channels of every group, or heads, in the unit of losses
    reductions: dict[ReductionKey, Reduction] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerStatistics:
    """Plan and weight of one layer, and moments of all rows, per row and not damped."""

    entry: LayerPlan
    weight: Tensor  # dense  # (out, in)
    gram: Tensor  # G  # (in, in)
    mean: Tensor  # of the inputs  # (in,)
    curvature: Tensor | None = None  # S of the whole layer; None for the identity  # (out, out)
    condensed: Tensor | None = None  # or its weight, condensed by S as damped  # (in, in)
    rows: int = 1
    bias: Tensor | None = None  # where channels are put in order  # (out,)


BlockStatistics = Mapping[Layer, LayerStatistics]
"""What is measured of the planned layers of a block."""


def order_channels(
    coupling: Coupling, statistics: BlockStatistics, damping: float | None
) -> ChannelOrder:
    """Order the channels of a coupling by what is measured of its layers.

    `damping` is a ridge on their moments at one row per input, in units of the mean diagonal; None
    where they have it, and are overwritten. A `FitError` names the layers.
    """
    order = {"values": _values, "scores": _scores}.get(coupling.kind, _whole)
    names = ", ".join(f"`{statistics[layer].entry.name}`" for layer in coupling.layers)
    with naming(f"the channels that {names} share cannot be ordered", MORE_DATA):
        return order(coupling, statistics, damping)


def order_by_weights(
    coupling: Coupling, entries: Mapping[str, LayerPlan], source: SourceModel, device: torch.device
) -> ChannelOrder:
    """Order channels without data: inputs count as independent and alike.

    Entries are by weight name in the model. Every layer counts alike, so that without any of the
    channels as much is lost as without all that writes and reads them.
    """
    planned = {layer: entries[layer.weight_name] for layer in coupling.layers}
    stacks = {layer: dense_matrix(source, e, device) for layer, e in planned.items()}
    experts = planned[coupling.layers[0]].experts
    orders = []
    for expert in range(experts or 1):
        weights = {layer: stack[expert] if experts else stack for layer, stack in stacks.items()}
        orders.append(_order_of_weights(coupling, planned, weights))
    losses = torch.stack([order.losses for order in orders]).sum(0)
    shares = (part.size / planned[layer].out_features for layer, part in coupling.writers)
    least = torch.finfo(losses.dtype).tiny
    losses *= (sum(shares) + (coupling.reader is not None)) / losses[0].clamp_min(least)
    if not experts:
        return ChannelOrder(coupling, losses, orders[0].reductions)
    rows = torch.stack([next(iter(order.reductions.values())).reduce for order in orders])
    return ChannelOrder(coupling, losses, dict.fromkeys(orders[0].reductions, Reduction(rows)))


def _order_of_weights(
    coupling: Coupling, planned: Mapping[Layer, LayerPlan], weights: Mapping[Layer, Tensor]
) -> ChannelOrder:
    """Order the channels of one coupling, or of one expert's, by these weights."""
    gram = _guessed_gram(coupling, weights)
    damping, statistics = DAMPING / len(gram), dict[Layer, LayerStatistics]()
    for layer, weight in weights.items():
        read = gram if layer == coupling.reader else torch.eye(weight.shape[1]).to(gram)
        # In place: what is guessed is large, and nobody else reads it.
        read.diagonal().add_(ridge_level(read, damping * len(read)))
        facts = (planned[layer], weight, read, gram.new_zeros(len(read)))
        statistics[layer] = LayerStatistics(*facts)
    return order_channels(coupling, statistics, None)


def _guessed_gram(coupling: Coupling, weights: Mapping[Layer, Tensor]) -> Tensor:
    """Moments of channels whose inputs are independent; gates multiply what they let through."""
    gram, size, writers = None, coupling.size, coupling.writers
    if coupling.kind == "heads":  # of values, which are read
        writers, size = writers[-1:], writers[-1][1].size // size
    for layer, part in writers:
        rows = weights[layer][layer.rows_of(part)].double()
        if gram is None or coupling.kind == "scores":
            gram = rows @ rows.mT
        else:  # of many rows without a product as large beside it
            step = _ROWS if len(rows) > LARGE else LARGE
            for some, part_of_gram in zip(rows.split(step), gram.split(step), strict=True):
                part_of_gram.mul_(some @ rows.mT)
    assert gram is not None
    if coupling.reader is not None and len(gram) < coupling.reader.in_features:  # shared by heads
        many = coupling.reader.in_features // len(gram)
        heads = torch.arange(len(gram), device=gram.device).unflatten(0, (-1, size))
        wide = heads.repeat_interleave(many, 0).flatten()
        gram = gram[wide][:, wide]
    return gram.div_(gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny))


def _metrics(layer: LayerStatistics, damping: float | None) -> tuple[Tensor, Tensor]:
    """Damped moments of a layer's inputs, and of the gradients at its outputs."""
    gram = layer.gram
    if damping is not None:
        gram = damped_curvature(gram, damping * len(gram) / layer.rows)
    if layer.curvature is None:  # every layer counts alike
        energy = float(layer.weight.double().square().sum()) or 1.0
        return gram, torch.eye(layer.entry.out_features).to(gram) / energy
    return gram, damped_curvature(layer.curvature, CURVATURE_DAMPING)


def _whole(coupling: Coupling, statistics: BlockStatistics, damping: float | None) -> ChannelOrder:
    """Order neurons, or whole heads, by what their reader computes without them."""
    assert coupling.reader is not None
    reader = statistics[coupling.reader]
    gram, curvature = _metrics(reader, damping)
    weighed = transposed_product(safe_cholesky(curvature), reader.weight.double())
    del curvature  # orders of many channels take much themselves
    target = weighed @ gram
    constant, channels = float(weighed.mul(target).sum()), len(gram)
    del weighed
    if coupling.kind == "neurons":
        ordered = order_neurons(gram, target, constant)
    else:
        ordered = order_groups(gram, target, constant, channels // coupling.size)
    losses = ordered.losses * reader.rows
    if coupling.kind == "heads" and coupling.size == 1:  # all or none: there is nothing to order
        return ChannelOrder(coupling, losses)
    ends = [(statistics[it], part.name, part.size) for it, part in coupling.writers]
    reductions = {}
    for layer, part, width in (*ends, (reader, READ, channels)):
        rows = torch.arange(width, device=ordered.order.device).unflatten(0, (coupling.size, -1))
        reductions[layer.entry.key, part, width] = Reduction(rows[ordered.order].flatten())
    return ChannelOrder(coupling, losses, reductions)


def _values(coupling: Coupling, statistics: BlockStatistics, damping: float | None) -> ChannelOrder:
    assert coupling.reader is not None
    [(layer, part)] = coupling.writers
    reader, writer = statistics[coupling.reader], statistics[layer]
    gram, curvature = _metrics(reader, damping)
    weight = reader.weight.double().unflatten(1, (-1, coupling.size))  # (out, heads, size)
    curvatures = torch.einsum("ohs,op,pht->hst", weight, curvature, weight)
    moments = diagonal_blocks(gram, len(curvatures))
    bases, repeated = _shared_bases(moments, curvatures, part.size)
    reductions = {
        (writer.entry.key, part.name, coupling.size): Reduction(bases.reduce, bases.lift),
        (reader.entry.key, READ, coupling.size): repeated,
    }
    return ChannelOrder(coupling, bases.losses * reader.rows, reductions)


def _scores(coupling: Coupling, statistics: BlockStatistics, damping: float | None) -> ChannelOrder:
    (first, queries), (second, keys) = sorted(
        coupling.writers, key=lambda pair: pair[1].name.endswith("k")
    )
    querying, keying = statistics[first], statistics[second]
    rows, size = first.rows_of(queries), coupling.size
    gram, curvature = _metrics(querying, damping)
    weight = querying.weight[rows].double()
    computed = weight @ gram @ weight.mT
    if querying.bias is not None:  # else the moments hold the mean already
        mean = weight @ querying.mean + querying.bias[rows].double()
        computed = computed + torch.outer(mean, mean)
    heads = queries.size // size
    curvatures = diagonal_blocks(curvature[rows, rows], heads)
    if querying.curvature is None:  # scores of independent inputs
        key_rows = keying.weight[second.rows_of(keys)].double()
        cut = key_rows.unflatten(0, (-1, size))
        curvatures = (cut @ cut.mT).repeat_interleave(heads // len(cut), 0)
        # Without any scores as much is lost as without the outputs of another layer.
        energy = (diagonal_blocks(weight @ weight.mT, heads) * curvatures).sum()
        curvatures = curvatures / energy.clamp_min(torch.finfo(energy.dtype).tiny)
    bases, repeated = _shared_bases(diagonal_blocks(computed, heads), curvatures, keys.size)
    reductions = {
        (querying.entry.key, queries.name, size): repeated,
        # q' k with q' = P q of rank r is q (P' k): keys are taken to the same coordinates.
        (keying.entry.key, keys.name, size): Reduction(bases.lift.mT, bases.reduce.mT),
    }
    return ChannelOrder(coupling, bases.losses * querying.rows, reductions)


def _shared_bases(moments: Tensor, curvatures: Tensor, width: int) -> tuple[HeadBases, Reduction]:
    """Bases of heads, of which several may share one; then means over them count.

    Those that they share have a width together. The reduction is that of every head.
    """
    owned = width // moments.shape[-1]
    shared = (item.unflatten(0, (owned, -1)) for item in (moments, curvatures))
    bases, many = head_bases(*(item.mean(1) for item in shared)), len(moments) // owned
    reduce, lift = (item.repeat_interleave(many, 0) for item in (bases.reduce, bases.lift))
    return replace(bases, losses=bases.losses * many), Reduction(reduce, lift)
