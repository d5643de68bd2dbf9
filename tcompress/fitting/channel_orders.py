"""Which channels between layers stay: chosen from moments, and applied to weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tcompress.fitting.layer_fits import CURVATURE_DAMPING, EvaluationMoments, LayerStatistics
from tcompress.linalg.channels import HeadBases, head_bases, order_groups, order_neurons
from tcompress.linalg.fits import curved_constant, damped_curvature
from tcompress.linalg.moments import safe_cholesky
from tcompress.planning.couplings import Coupling, couplings
from tcompress.planning.entries import LayerPlan
from tcompress.roles import Block, Layer
from tcompress.structures.modules.linear import Channels, PartLayout

# An order of channels holds for all sizes: with n of them the first n stay. For neurons, and whole
# heads, it is an order of rows; within heads a basis of each, the most useful directions first.

READ = ""  # stands for a part where a layer reads channels
DAMPING = 1e-4  # of moments that were guessed, in units of their mean diagonal


@dataclass(frozen=True)
class Reduction:
    """How channels of one layer become fewer."""

    reduce: Tensor  # order of channels ([experts,] f), or bases of heads (heads, size, size)
    lift: Tensor | None = None  # takes the coordinates of heads back; None for an order

    def narrow(self, tensor: Tensor, left: Channels) -> Tensor:
        """Gives the rows of a weight, or of a bias, that stay.  # (..., channels, in)."""
        if self.lift is None:
            order = self.reduce[..., : left.kept].long()
            if order.ndim == 1:
                return tensor[order]
            return tensor.gather(1, order[..., None].expand(-1, -1, tensor.shape[-1]))
        flat = tensor.unflatten(0, (left.groups, left.size))
        bases = self.reduce[:, : left.kept].to(tensor.dtype)
        return torch.einsum("hrs,hs...->hr...", bases, flat).flatten(0, 1)

    def lifted(self, tensor: Tensor, left: Channels) -> Tensor:
        """Gives columns for the channels that stay, if others are left out.  # (..., channels)."""
        if self.lift is None:
            order = self.reduce[..., : left.kept].long()
            if order.ndim == 1:
                return tensor[..., order]
            return tensor.gather(2, order[:, None].expand(-1, tensor.shape[1], -1))
        flat = tensor.unflatten(-1, (left.groups, left.size))
        bases = self.lift[..., : left.kept].to(tensor.dtype)
        return torch.einsum("...hs,hsr->...hr", flat, bases).flatten(-2)


ReductionKey = tuple[str, str, int]
"""Name of the weight in the checkpoint, that of its part, or `READ`, and the size of a group."""

Reductions = Mapping[ReductionKey, Reduction]


def _reduction(
    known: Reductions, entry: LayerPlan, part: str, left: Channels, device: torch.device
) -> Reduction:
    if not left.kept:
        return Reduction(torch.empty(0, device=device))
    return known[entry.key, part, left.size]


def narrowed_rows(entry: LayerPlan, tensor: Tensor, known: Reductions) -> Tensor:
    """Gives a dense weight ([experts,] out, in), or a bias, without outputs that are gone."""
    if not any(part.channels for part in entry.parts):
        return tensor
    dim = 1 if entry.experts else 0
    rows = tensor.split([part.dense_features for part in entry.parts], dim)
    pairs = zip(entry.parts, rows, strict=True)
    return torch.cat([_of_part(entry, part, own, known) for part, own in pairs], dim)


def _of_part(entry: LayerPlan, part: PartLayout, rows: Tensor, known: Reductions) -> Tensor:
    left = part.channels
    if not left:
        return rows
    return _reduction(known, entry, part.name, left, rows.device).narrow(rows, left)


def lift_of(entry: LayerPlan, known: Reductions, device: torch.device) -> Tensor:
    """Gives the matrix from inputs that are left to all of them.  # ([experts,] in, left)."""
    assert entry.reads is not None
    eye = torch.eye(entry.in_features, dtype=torch.float64, device=device)
    eye = eye.expand(entry.experts, -1, -1) if entry.experts else eye
    return _reduction(known, entry, READ, entry.reads, device).lifted(eye, entry.reads)


def narrowed_curvature(entry: LayerPlan, curvature: Tensor, known: Reductions) -> Tensor:
    """Gives moments of gradients at the outputs that are left.  # (out, out)."""
    if not any(part.channels for part in entry.parts):
        return curvature

    def lifted(matrix: Tensor) -> Tensor:  # (any, out)
        columns = matrix.split([part.dense_features for part in entry.parts], 1)
        pairs = zip(entry.parts, columns, strict=True)
        return torch.cat(
            [
                _reduction(known, entry, part.name, left, own.device).lifted(own, left)
                if (left := part.channels)
                else own
                for part, own in pairs
            ],
            1,
        )

    return lifted(lifted(curvature).mT).mT


def stored_reductions(found: Reductions) -> dict[str, Tensor]:
    """Names the tensors of reductions for the working folder."""
    named: dict[str, Tensor] = {}
    for (key, part, size), own in found.items():
        named[f"{key}/{part}/{size}/reduce"] = own.reduce
        if own.lift is not None:
            named[f"{key}/{part}/{size}/lift"] = own.lift
    return named


def read_reductions(named: Mapping[str, Tensor]) -> dict[ReductionKey, Reduction]:
    """Reads them back."""
    found = {}
    for name, tensor in named.items():
        key, part, size, what = name.rsplit("/", 3)
        if what == "reduce":
            lift = named.get(f"{key}/{part}/{size}/lift")
            found[key, part, int(size)] = Reduction(tensor, lift)
    return found


def completed(
    known: Reductions,
    block: Block,
    entries: Mapping[str, LayerPlan],
    weight_of: Callable[[Layer], Tensor],
) -> Reductions:
    """Adds reductions of narrow layers that no data has told; arguments as below."""
    found = dict(known)
    for coupling in couplings(block):
        members = [entries.get(layer.weight_name) for layer in coupling.layers]
        if any(entry is None for entry in members):
            continue
        written = [
            (entries[own.weight_name].key, part.name, coupling.written(part, 0).size)
            for own, part in coupling.writers
        ]
        if any(entry.is_narrow for entry in members if entry) and not found.keys() >= {*written}:
            found |= order_by_weights(coupling, entries, weight_of).reductions
    return found


# Choosing channels, and what is lost with fewer of them.


@dataclass(frozen=True, eq=False)
class ChannelOrder:
    """The channels of one coupling in order, and what is lost with some of them."""

    coupling: Coupling
    losses: Tensor  # with 0, 1, ... channels of every group, or heads, in the unit of losses
    reductions: dict[ReductionKey, Reduction] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerFacts:
    """What is known of one layer."""

    entry: LayerPlan
    statistics: LayerStatistics
    bias: Tensor | None  # (out,)


def order_channels(
    coupling: Coupling, seen: Mapping[str, LayerFacts], damping: float
) -> ChannelOrder:
    """Orders the channels of a coupling by what is known of its layers, by weight name."""
    if coupling.kind == "neurons":
        return _neurons(coupling, seen, damping)
    if coupling.kind == "heads":
        return _heads(coupling, seen, damping)
    return (_values if coupling.kind == "values" else _scores)(coupling, seen, damping)


def order_by_weights(
    coupling: Coupling, entries: Mapping[str, LayerPlan], weight_of: Callable[[Layer], Tensor]
) -> ChannelOrder:
    """Orders channels without data: inputs count as independent and alike.

    Entries are by weight name in the model; weights are matrices ([experts,] out, in).
    """
    stacks = {layer: weight_of(layer).double() for layer in coupling.layers}
    experts = entries[coupling.layers[0].weight_name].experts
    found = []
    for expert in range(experts or 1):
        weights = {layer: own[expert] if experts else own for layer, own in stacks.items()}
        gram = _guessed_gram(coupling, weights)
        seen = {}
        for layer, weight in weights.items():
            own = gram if layer == coupling.reader else torch.eye(weight.shape[1]).to(weight)
            moments = EvaluationMoments(own, None)
            zero = weight.new_zeros(len(own))
            facts = LayerStatistics(weight, moments, zero)
            seen[layer.weight_name] = LayerFacts(entries[layer.weight_name], facts, None)
        found.append(order_channels(coupling, seen, DAMPING / len(gram)))
    if not experts:
        return found[0]
    orders = torch.stack([next(iter(own.reductions.values())).reduce for own in found])
    losses = torch.stack([own.losses for own in found]).sum(0)
    return ChannelOrder(coupling, losses, dict.fromkeys(found[0].reductions, Reduction(orders)))


def _guessed_gram(coupling: Coupling, weights: Mapping[Layer, Tensor]) -> Tensor:
    """Moments of channels whose inputs are independent; gates multiply what they let through."""
    gram: Tensor | None = None
    for layer, part in coupling.writers:
        start = _offset(layer.parts, part)
        rows = weights[layer][start : start + part.size]
        own = rows @ rows.mT
        gram = own if gram is None or coupling.kind == "scores" else gram * own
    assert gram is not None
    if coupling.reader is not None and len(gram) < coupling.reader.in_features:  # shared by heads
        many = coupling.reader.in_features // len(gram)
        size, owned = coupling.size, len(gram) // coupling.size
        cut = gram.unflatten(0, (owned, size)).unflatten(2, (owned, size))
        wide = cut.repeat_interleave(many, 0).repeat_interleave(many, 2)
        gram = wide.flatten(2).flatten(0, 1)
    return gram / gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny)


def _metrics(own: LayerFacts, damping: float) -> tuple[Tensor, Tensor]:
    """Damped moments of a layer's inputs, and of the gradients at its outputs."""
    whole = own.statistics.whole
    features = len(whole.gram)
    gram = damped_curvature(whole.gram, damping * features / whole.rows)
    if whole.curvature is None:  # every layer counts alike
        energy = float(own.statistics.weight.double().square().sum()) or 1.0
        return gram, torch.eye(own.entry.out_features).to(gram) / energy
    return gram, damped_curvature(whole.curvature, CURVATURE_DAMPING)


def _neurons(coupling: Coupling, seen: Mapping[str, LayerFacts], damping: float) -> ChannelOrder:
    own, gram, target, constant = _pursued(coupling, seen, damping)
    found = order_neurons(gram, target, constant)
    reduction, size = Reduction(found.order), coupling.size
    names = [(seen[it.weight_name].entry.key, part.name, size) for it, part in coupling.writers]
    losses = found.losses * own.statistics.whole.rows
    return ChannelOrder(
        coupling, losses, dict.fromkeys([*names, (own.entry.key, READ, size)], reduction)
    )


def _heads(coupling: Coupling, seen: Mapping[str, LayerFacts], damping: float) -> ChannelOrder:
    own, gram, target, constant = _pursued(coupling, seen, damping)
    found = order_groups(gram, target, constant, len(gram) // coupling.size)
    widths = {
        (seen[layer.weight_name].entry.key, part.name): part.size
        for layer, part in coupling.writers
    }
    widths[own.entry.key, READ] = len(gram)
    reductions = {}
    for (key, part), width in widths.items():
        rows = torch.arange(width, device=found.order.device).unflatten(0, (coupling.size, -1))
        reductions[key, part, width] = Reduction(rows[found.order].flatten())
    return ChannelOrder(coupling, found.losses * own.statistics.whole.rows, reductions)


def _pursued(
    coupling: Coupling, seen: Mapping[str, LayerFacts], damping: float
) -> tuple[LayerFacts, Tensor, Tensor, float]:
    """The reader, and what `order_neurons` asks for."""
    assert coupling.reader is not None
    own = seen[coupling.reader.weight_name]
    weight = own.statistics.weight.double()
    gram, curvature = _metrics(own, damping)
    constant = float(curved_constant(weight, gram, curvature))
    return own, gram, safe_cholesky(curvature).mT @ weight @ gram, constant


def _values(coupling: Coupling, seen: Mapping[str, LayerFacts], damping: float) -> ChannelOrder:
    assert coupling.reader is not None
    [(writer, part)] = coupling.writers
    own, size = seen[coupling.reader.weight_name], coupling.size
    gram, curvature = _metrics(own, damping)
    heads, owned = len(gram) // size, part.size // size
    weight = own.statistics.weight.double().unflatten(1, (heads, size))  # (out, heads, size)
    moments = gram.unflatten(0, (heads, size)).unflatten(2, (heads, size))
    moments = moments.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (heads, size, size)
    worth = torch.einsum("ohs,op,pht->hst", weight, curvature, weight)
    bases = _shared_bases(moments, worth, owned)
    losses = bases.losses * own.statistics.whole.rows
    many = heads // owned  # query heads that see the same values
    lift = bases.lift.repeat_interleave(many, 0)
    reduce = bases.reduce.repeat_interleave(many, 0)
    found = {
        (seen[writer.weight_name].entry.key, part.name, size): Reduction(bases.reduce, bases.lift),
        (own.entry.key, READ, size): Reduction(reduce, lift),
    }
    return ChannelOrder(coupling, losses, found)


def _scores(coupling: Coupling, seen: Mapping[str, LayerFacts], damping: float) -> ChannelOrder:
    (first, queries), (second, keys) = sorted(
        coupling.writers, key=lambda pair: pair[1].name.endswith("k")
    )
    own, size = seen[first.weight_name], coupling.size
    heads, owned = queries.size // size, keys.size // size
    start = _offset(first.parts, queries)
    rows = slice(start, start + queries.size)
    gram, curvature = _metrics(own, damping)
    weight = own.statistics.weight[rows].double()
    computed = weight @ gram @ weight.mT
    mean = weight @ own.statistics.mean
    mean = mean if own.bias is None else mean + own.bias[rows].double()
    if own.entry.bias:  # else the moments hold the mean already
        computed = computed + torch.outer(mean, mean)

    def by_head(matrix: Tensor) -> Tensor:
        cut = matrix.unflatten(0, (heads, size)).unflatten(2, (heads, size))
        return cut.diagonal(dim1=0, dim2=2).permute(2, 0, 1)

    many = heads // owned
    worth = by_head(curvature[rows, rows])
    if own.statistics.whole.curvature is None:  # scores of independent inputs
        start = _offset(second.parts, keys)
        other = seen[second.weight_name].statistics.weight[start : start + keys.size].double()
        cut = other.unflatten(0, (owned, size))
        worth = (cut @ cut.mT).repeat_interleave(many, 0) / other.square().sum()
    bases = _shared_bases(by_head(computed), worth, owned)
    asked = Reduction(
        bases.reduce.repeat_interleave(many, 0), bases.lift.repeat_interleave(many, 0)
    )
    # q' k with q' = P q of rank r is q (P' k): keys are taken to the same coordinates.
    met = Reduction(bases.lift.mT, bases.reduce.mT)
    other_key = seen[second.weight_name].entry.key
    found = {(own.entry.key, queries.name, size): asked, (other_key, keys.name, size): met}
    return ChannelOrder(coupling, bases.losses * own.statistics.whole.rows, found)


def _offset(parts: Sequence[object], part: object) -> int:
    sizes = [own.size for own in parts[: parts.index(part)]]  # type: ignore[attr-defined]
    return sum(sizes)


def _shared_bases(moments: Tensor, worth: Tensor, owned: int) -> HeadBases:
    """Bases of heads, of which several may share one; then means over them count."""
    many = len(moments) // owned
    found = head_bases(
        moments.unflatten(0, (owned, many)).mean(1), worth.unflatten(0, (owned, many)).mean(1)
    )
    return HeadBases(found.reduce, found.lift, found.losses * many)
