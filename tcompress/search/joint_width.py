"""Candidates of several layers: fewer neurons, and fewer dimensions or heads of an attention.

The only file of a search that knows how layers around channels are chosen together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product

from tcompress.fitting.channel_orders import ChannelOrder
from tcompress.options.method_options import NARROWING
from tcompress.planning.entries import LayerForm, LayerPlan
from tcompress.planning.sites import Coupling, channels_left, couplings, whole_heads
from tcompress.roles import Attention, Block
from tcompress.search.candidates import BYTES, Candidate, Costs, Site, WidthSite
from tcompress.search.knapsack import added, joint
from tcompress.structures.modules.linear import PartLayout
from tcompress.structures.width import WidthLayout

LossKey = tuple[str | Coupling, str | bool]
"""A method and the weight name of a layer, or a coupling and whether some of its channels stay."""


def all_couplings(block: Block, attentions: Iterable[Attention]) -> list[Coupling]:
    """List what layers of a block have in common, whole heads after what they are made of."""
    heads = (whole_heads(item) for item in attentions if item.block == block.name)
    return [*couplings(block), *filter(None, heads)]


def width_sites(
    groups: Iterable[Sequence[ChannelOrder]],
    entries: Mapping[str, LayerPlan],
    sites: Mapping[str, Site],
) -> Iterator[WidthSite]:
    """List what layers of couplings that are chosen together may become, if all are sized.

    Plans (`entries`) are by name in the model, sites of single layers by weight name in the
    checkpoint.
    """
    for orders in groups:
        coupled = [order.coupling for order in orders]
        layers = {layer for coupling in coupled for layer in coupling.layers}
        if not {entries[layer.name].key for layer in layers} <= sites.keys():
            continue
        sizes = tuple(product(*(coupling.sizes for coupling in coupled)))
        candidates = []
        for chosen in sizes:
            narrow = forms_of(dict(zip(coupled, chosen, strict=True)), entries)
            forms = tuple((entry.key, form) for entry, form in narrow)
            counted = [(sites[key], _parameters(form)) for key, form in forms]
            costs = {
                name: round(sum(n * (site.unit if name == BYTES else 1) for site, n in counted))
                for name in counted[0][0].dense
            }
            candidates.append(Candidate(NARROWING, forms, _loss(orders, chosen), costs))
        keys = tuple(key for key, _ in candidates[-1].forms)
        yield WidthSite(keys, "", {}, tuple(candidates), orders=tuple(orders), sizes=sizes)


def _loss(orders: Sequence[ChannelOrder], sizes: Sequence[int]) -> float:
    return sum(float(order.losses[size]) for order, size in zip(orders, sizes, strict=True))


def _parameters(form: LayerForm) -> int:
    return sum(part.terms[0].in_features * part.out_features for part in form.parts)


def forms_of(
    chosen: Mapping[Coupling, int], entries: Mapping[str, LayerPlan]
) -> Iterator[tuple[LayerPlan, LayerForm]]:
    """Give plain matrices of these sizes to all layers of some couplings; plans are by name."""
    all_reads, writes = channels_left(chosen)
    for layer in dict.fromkeys(layer for coupling in chosen for layer in coupling.layers):
        reads, parts = all_reads.get(layer.weight_name), []
        inputs = reads.left if reads else layer.in_features
        for part in layer.parts:
            channels = writes.get((layer.weight_name, part.name))
            outputs = channels.left if channels else part.size
            terms = (WidthLayout(in_features=inputs, out_features=outputs),)
            parts.append(PartLayout(name=part.name, terms=terms, channels=channels))
        yield entries[layer.name], LayerForm(tuple(parts), reads)


def joined(
    sites: Sequence[Site], widths: Sequence[WidthSite], resource: str, *, may_stay: bool
) -> list[Site]:
    """Put the sites of layers that have channels in common together, attentions after their parts.

    What layers may become by themselves stands beside fewer channels, the best of all of them
    together.
    """
    by_keys = {site.keys: site for site in sites}
    for site in widths:
        contained = [keys for keys in by_keys if {*keys} <= {*site.keys}]
        members = [by_keys.pop(keys) for keys in contained]
        candidates = [*site.candidates]
        if len(members) == 1:
            candidates += members[0].candidates
        elif any(member.candidates for member in members):
            candidates += joint(members, resource)
        keys = tuple(chain.from_iterable(contained))
        dense: Costs = added(member.dense for member in members)
        by_keys[keys] = Site(keys, "", dense, tuple(candidates), may_stay=may_stay)
    return [*by_keys.values()]


def with_losses(site: WidthSite, factors: Mapping[LossKey, float]) -> WidthSite:
    """Scale what fewer channels lose, and none; nothing loses more than none of them."""
    orders = tuple(_scaled(order, factors) for order in site.orders)
    candidates = tuple(
        replace(item, loss=_loss(orders, sizes))
        for item, sizes in zip(site.candidates, site.sizes, strict=True)
    )
    return replace(site, orders=orders, candidates=candidates)


def _scaled(order: ChannelOrder, factors: Mapping[LossKey, float]) -> ChannelOrder:
    coupling, losses = order.coupling, order.losses.clone()
    losses[:1] *= factors.get((coupling, False), 1.0)
    losses[1:] *= factors.get((coupling, True), 1.0)
    if (coupling, True) in factors and 0 in coupling.sizes:
        losses = losses.clamp(max=float(losses[0]))
    return replace(order, losses=losses)


def kept_sizes(coupling: Coupling, fraction: float) -> list[int]:
    """List the sizes that are tried: none where that is offered, and that next to a fraction."""
    nothing, sizes = coupling.sizes[:1], coupling.sizes[1:-1]
    nearest = min(sizes, key=lambda size: abs(size - fraction * coupling.size), default=0)
    return sorted({*(nothing if nothing == [0] else []), *([nearest] if nearest else [])})
