"""Which channels between layers stay: chosen from moments, and applied to weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tcompress.fitting.layer_fits import CURVATURE_DAMPING, LayerStatistics
from tcompress.linalg.channels import HeadBases, head_bases, order_groups, order_neurons
from tcompress.linalg.fits import curved_constant, damped_curvature
from tcompress.linalg.moments import safe_cholesky
from tcompress.planning.entries import LayerPlan
from tcompress.planning.sites import Coupling, couplings
from tcompress.roles import Block, Layer, Part
from tcompress.structures.modules.linear import Channels

# An order of channels holds for all sizes: with n of them the first n stay. For neurons, and whole
# heads, it is an order of rows; within heads a basis of each, the most useful directions first.

READ = ""  # stands for a part where a layer reads channels
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


def lift_of(entry: LayerPlan, reductions: Reductions, device: torch.device) -> Tensor:
    """Return the matrix from inputs that are left to all of them.  # ([experts,] in, left)."""
    assert entry.reads is not None
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
    named: dict[str, Tensor] = {}
    for (key, part, size), reduction in reductions.items():
        named[f"{key}/{part}/{size}/reduce"] = reduction.reduce
        if reduction.lift is not None:
            named[f"{key}/{part}/{size}/lift"] = reduction.lift
    return named


def read_reductions(named: Mapping[str, Tensor]) -> dict[ReductionKey, Reduction]:
    """Read them back."""
    reductions = {}
    for name, tensor in named.items():
        key, part, size, what = name.rsplit("/", 3)
        if what == "reduce":
            lift = named.get(f"{key}/{part}/{size}/lift")
            reductions[key, part, int(size)] = Reduction(tensor, lift)
    return reductions


def completed(
    measured: Reductions,
    block: Block,
    entries: Mapping[str, LayerPlan],
    weight_of: Callable[[Layer], Tensor],
) -> Reductions:
    """Add reductions of narrow layers that no data has told; arguments as below."""
    reductions = dict(measured)
    for coupling in couplings(block):
        members = [entries.get(layer.weight_name) for layer in coupling.layers]
        if any(entry is None for entry in members):
            continue
        written = [
            (entries[layer.weight_name].key, part.name, coupling.channels(part.size, 0).size)
            for layer, part in coupling.writers
        ]
        narrow = any(entry.is_narrow for entry in members if entry)
        if narrow and not reductions.keys() >= {*written}:
            reductions |= order_by_weights(coupling, entries, weight_of).reductions
    return reductions


# Choosing channels, and what is lost with fewer of them.


@dataclass(frozen=True, eq=False)
class ChannelOrder:
    """The channels of one coupling in order, and what is lost with some of them."""

    coupling: Coupling
    losses: Tensor  # with 0, 1, ... channels of every group, or heads, in the unit of losses
    reductions: dict[ReductionKey, Reduction] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerFacts:
    """Plan, statistics and bias of one layer."""

    entry: LayerPlan
    statistics: LayerStatistics
    bias: Tensor | None  # (out,)


def order_channels(
    coupling: Coupling, facts: Mapping[str, LayerFacts], damping: float
) -> ChannelOrder:
    """Order the channels of a coupling by facts of its layers, by weight name."""
    order = {"values": _values, "scores": _scores}.get(coupling.kind, _whole)
    return order(coupling, facts, damping)


def order_by_weights(
    coupling: Coupling, entries: Mapping[str, LayerPlan], weight_of: Callable[[Layer], Tensor]
) -> ChannelOrder:
    """Order channels without data: inputs count as independent and alike.

    Entries are by weight name in the model; weights are matrices ([experts,] out, in).
    """
    stacks = {layer: weight_of(layer).double() for layer in coupling.layers}
    experts = entries[coupling.layers[0].weight_name].experts
    orders = []
    for expert in range(experts or 1):
        weights = {layer: stack[expert] if experts else stack for layer, stack in stacks.items()}
        gram = _guessed_gram(coupling, weights)
        facts = {}
        for layer, weight in weights.items():
            read = gram if layer == coupling.reader else torch.eye(weight.shape[1]).to(weight)
            statistics = LayerStatistics(weight, read, weight.new_zeros(len(read)))
            facts[layer.weight_name] = LayerFacts(entries[layer.weight_name], statistics, None)
        orders.append(order_channels(coupling, facts, DAMPING / len(gram)))
    if not experts:
        return orders[0]
    rows = torch.stack([next(iter(order.reductions.values())).reduce for order in orders])
    losses = torch.stack([order.losses for order in orders]).sum(0)
    return ChannelOrder(coupling, losses, dict.fromkeys(orders[0].reductions, Reduction(rows)))


def _guessed_gram(coupling: Coupling, weights: Mapping[Layer, Tensor]) -> Tensor:
    """Moments of channels whose inputs are independent; gates multiply what they let through."""
    gram: Tensor | None = None
    for layer, part in coupling.writers:
        start = _offset(layer.parts, part)
        rows = weights[layer][start : start + part.size]
        product = rows @ rows.mT  # as large as the moments of the largest layer
        gram = product if gram is None or coupling.kind == "scores" else gram.mul_(product)
    assert gram is not None
    if coupling.reader is not None and len(gram) < coupling.reader.in_features:  # shared by heads
        many = coupling.reader.in_features // len(gram)
        size, owned = coupling.size, len(gram) // coupling.size
        cut = gram.unflatten(0, (owned, size)).unflatten(2, (owned, size))
        wide = cut.repeat_interleave(many, 0).repeat_interleave(many, 2)
        gram = wide.flatten(2).flatten(0, 1)
    return gram.div_(gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny))


def _metrics(layer: LayerFacts, damping: float) -> tuple[Tensor, Tensor]:
    """Damped moments of a layer's inputs, and of the gradients at its outputs."""
    moments = layer.statistics
    features = len(moments.gram)
    gram = damped_curvature(moments.gram, damping * features / moments.rows)
    if moments.curvature is None:  # every layer counts alike
        energy = float(moments.weight.double().square().sum()) or 1.0
        return gram, torch.eye(layer.entry.out_features).to(gram) / energy
    return gram, damped_curvature(moments.curvature, CURVATURE_DAMPING)


def _whole(coupling: Coupling, facts: Mapping[str, LayerFacts], damping: float) -> ChannelOrder:
    """Order neurons, or whole heads, by what their reader computes without them."""
    assert coupling.reader is not None
    reader = facts[coupling.reader.weight_name]
    weight = reader.statistics.weight.double()
    gram, curvature = _metrics(reader, damping)
    constant = float(curved_constant(weight, gram, curvature))
    target = safe_cholesky(curvature).mT @ weight @ gram
    if coupling.kind == "neurons":
        ordered = order_neurons(gram, target, constant)
    else:
        ordered = order_groups(gram, target, constant, len(gram) // coupling.size)
    losses = ordered.losses * reader.statistics.rows
    if coupling.kind == "heads" and coupling.size == 1:  # all or none: there is nothing to order
        return ChannelOrder(coupling, losses)
    widths = {
        (facts[it.weight_name].entry.key, part.name): part.size for it, part in coupling.writers
    }
    widths[reader.entry.key, READ] = len(gram)
    reductions = {}
    for (key, part), width in widths.items():
        rows = torch.arange(width, device=ordered.order.device).unflatten(0, (coupling.size, -1))
        reductions[key, part, width] = Reduction(rows[ordered.order].flatten())
    return ChannelOrder(coupling, losses, reductions)


def _by_head(matrix: Tensor, size: int) -> Tensor:
    """Blocks of heads on the diagonal.  # (heads size, heads size) -> (heads, size, size)."""
    cut = matrix.unflatten(0, (-1, size)).unflatten(2, (-1, size))
    return cut.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _values(coupling: Coupling, facts: Mapping[str, LayerFacts], damping: float) -> ChannelOrder:
    assert coupling.reader is not None
    [(writer, part)] = coupling.writers
    reader, size = facts[coupling.reader.weight_name], coupling.size
    gram, curvature = _metrics(reader, damping)
    heads, owned = len(gram) // size, part.size // size
    weight = reader.statistics.weight.double().unflatten(1, (heads, size))  # (out, heads, size)
    curvatures = torch.einsum("ohs,op,pht->hst", weight, curvature, weight)
    bases = _shared_bases(_by_head(gram, size), curvatures, owned)
    losses = bases.losses * reader.statistics.rows
    reductions = {
        (facts[writer.weight_name].entry.key, part.name, size): Reduction(bases.reduce, bases.lift),
        (reader.entry.key, READ, size): _repeated(bases, heads // owned),
    }
    return ChannelOrder(coupling, losses, reductions)


def _scores(coupling: Coupling, facts: Mapping[str, LayerFacts], damping: float) -> ChannelOrder:
    (first, queries), (second, keys) = sorted(
        coupling.writers, key=lambda pair: pair[1].name.endswith("k")
    )
    querying, size = facts[first.weight_name], coupling.size
    heads, owned = queries.size // size, keys.size // size
    start = _offset(first.parts, queries)
    rows = slice(start, start + queries.size)
    gram, curvature = _metrics(querying, damping)
    weight = querying.statistics.weight[rows].double()
    computed = weight @ gram @ weight.mT
    mean = weight @ querying.statistics.mean
    mean = mean if querying.bias is None else mean + querying.bias[rows].double()
    if querying.entry.bias:  # else the moments hold the mean already
        computed = computed + torch.outer(mean, mean)

    many = heads // owned
    curvatures = _by_head(curvature[rows, rows], size)
    if querying.statistics.curvature is None:  # scores of independent inputs
        start = _offset(second.parts, keys)
        key_rows = facts[second.weight_name].statistics.weight[start : start + keys.size].double()
        cut = key_rows.unflatten(0, (owned, size))
        curvatures = (cut @ cut.mT).repeat_interleave(many, 0) / key_rows.square().sum()
    bases = _shared_bases(_by_head(computed, size), curvatures, owned)
    # q' k with q' = P q of rank r is q (P' k): keys are taken to the same coordinates.
    of_keys = Reduction(bases.lift.mT, bases.reduce.mT)
    reductions = {
        (querying.entry.key, queries.name, size): _repeated(bases, many),
        (facts[second.weight_name].entry.key, keys.name, size): of_keys,
    }
    return ChannelOrder(coupling, bases.losses * querying.statistics.rows, reductions)


def _repeated(bases: HeadBases, many: int) -> Reduction:
    """Reduction of query heads, so many of which see the same keys and values."""
    reduce, lift = (tensor.repeat_interleave(many, 0) for tensor in (bases.reduce, bases.lift))
    return Reduction(reduce, lift)


def _offset(parts: Sequence[Part], part: Part) -> int:
    return sum(before.size for before in parts[: parts.index(part)])


def _shared_bases(moments: Tensor, curvatures: Tensor, owned: int) -> HeadBases:
    """Bases of heads, of which several may share one; then means over them count."""
    many = len(moments) // owned
    bases = head_bases(
        moments.unflatten(0, (owned, many)).mean(1), curvatures.unflatten(0, (owned, many)).mean(1)
    )
    return HeadBases(bases.reduce, bases.lift, bases.losses * many)
