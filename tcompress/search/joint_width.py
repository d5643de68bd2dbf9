"""Candidates of several layers: fewer neurons, and fewer dimensions or heads of an attention.

The only file of a search that knows how layers around channels are chosen together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product

import torch

from tcompress.fitting.channel_orders import ChannelOrder
from tcompress.options.method_options import NARROWING
from tcompress.planning.entries import LayerForm, LayerPlan
from tcompress.planning.sites import Coupling
from tcompress.search.candidates import BYTES, Candidate, Costs, Site, WidthSite
from tcompress.search.knapsack import added, joint
from tcompress.structures.modules.linear import Channels, PartLayout
from tcompress.structures.width import WidthLayout


def width_site(
    orders: Sequence[ChannelOrder], entries: Mapping[str, LayerPlan], sites: Mapping[str, Site]
) -> WidthSite | None:
    """List what the layers of some couplings may become together.

    Args:
        orders: The couplings, with their channels in order.
        entries: Plans of layers by weight name in the model.
        sites: Those of the layers by themselves, by weight name in the checkpoint.

    Returns:
        The site, or nothing where a layer of it is not sized.
    """
    layers = {layer for order in orders for layer in order.coupling.layers}
    if not {entries[layer.weight_name].key for layer in layers} <= sites.keys():
        return None
    couplings = [order.coupling for order in orders]
    sizes = tuple(product(*(coupling.sizes for coupling in couplings)))
    candidates = []
    for chosen in sizes:
        forms = tuple(forms_of(dict(zip(couplings, chosen, strict=True)), entries))
        counted = [(_parameters(form), sites[key]) for key, form in forms]
        costs = {
            name: round(sum(count * (site.unit if name == BYTES else 1) for count, site in counted))
            for name in counted[0][1].dense
        }
        candidates.append(Candidate(NARROWING, forms, _loss(orders, chosen), costs))
    return WidthSite(
        keys=tuple(key for key, _ in candidates[-1].forms),
        role="",
        dense={},
        candidates=tuple(candidates),
        orders=tuple(orders),
        sizes=sizes,
    )


def _loss(orders: Sequence[ChannelOrder], sizes: Sequence[int]) -> float:
    return sum(float(order.losses[size]) for order, size in zip(orders, sizes, strict=True))


def _parameters(form: LayerForm) -> int:
    return sum(part.terms[0].in_features * part.out_features for part in form.parts)


def forms_of(
    chosen: Mapping[Coupling, int], entries: Mapping[str, LayerPlan]
) -> Iterator[tuple[str, LayerForm]]:
    """Give plain matrices of these sizes to all layers of some couplings, by weight name."""
    layers = dict.fromkeys(layer for coupling in chosen for layer in coupling.layers)
    for layer in layers:
        reads: Channels | None = None
        written: dict[str, Channels] = {}
        for coupling, count in chosen.items():
            if count == coupling.size:
                continue
            if coupling.reader == layer:
                reads = coupling.channels(layer.in_features, count)
            written |= {
                part.name: coupling.channels(part.size, count)
                for writer, part in coupling.writers
                if writer == layer
            }
        parts = []
        for part in layer.parts:
            channels = written.get(part.name)
            term = WidthLayout(
                in_features=reads.left if reads else layer.in_features,
                out_features=channels.left if channels else part.size,
            )
            parts.append(PartLayout(name=part.name, terms=(term,), channels=channels))
        yield entries[layer.weight_name].key, LayerForm(tuple(parts), reads)


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


def with_losses(site: WidthSite, factors: Mapping[Coupling, Mapping[int, float]]) -> WidthSite:
    """Scale what fewer channels lose, and none; nothing loses more than none of them.

    Args:
        site: The layers.
        factors: By coupling and by the size that was tried: none of the channels, or some.
    """
    orders = tuple(_scaled(order, factors.get(order.coupling, {})) for order in site.orders)
    candidates = tuple(
        replace(item, loss=_loss(orders, sizes))
        for item, sizes in zip(site.candidates, site.sizes, strict=True)
    )
    return replace(site, orders=orders, candidates=candidates)


def _scaled(order: ChannelOrder, factors: Mapping[int, float]) -> ChannelOrder:
    losses = order.losses
    for size in sorted(factors):
        scale = torch.ones_like(losses)
        scale[slice(1, None) if size else slice(1)] = factors[size]
        losses = losses * scale
        if size and 0 in order.coupling.sizes:
            losses = losses.clamp(max=float(losses[0]))
    return replace(order, losses=losses)


def kept_sizes(coupling: Coupling, fraction: float) -> list[int]:
    """List the sizes that are tried: none where that is offered, and that next to a fraction."""
    nothing, sizes = coupling.sizes[:1], coupling.sizes[1:-1]
    nearest = min(sizes, key=lambda size: abs(size - fraction * coupling.size), default=0)
    return sorted({*(nothing if nothing == [0] else []), *([nearest] if nearest else [])})
