"""What flows through a search: what it is about, sites, their candidates, and what these cost.

What several layers may become together is said here alone: fewer neurons, and fewer dimensions or
heads of an attention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from math import log
from typing import Self

import torch
from torch import nn

from tcompress.blockwise.streams import listed_item
from tcompress.data.calibration import CalibrationData
from tcompress.fitting.channel_orders import ChannelOrder
from tcompress.fitting.workdir import FitWorkplace
from tcompress.linalg.moments import LARGE
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.method_options import NARROWING, AutoSpec
from tcompress.planning.costs import STAND_IN, path_of
from tcompress.planning.entries import LayerForm, LayerPlan, Plan
from tcompress.planning.sites import (
    Coupling,
    channels_left,
    couplings,
    offered_by,
    roles_of,
    whole_heads,
)
from tcompress.progress import Progress
from tcompress.roles import Attention, Block, Layer
from tcompress.roles.find import attentions_of
from tcompress.structures import Spec, structure, structures
from tcompress.structures.modules.linear import PartLayout
from tcompress.structures.width import plain_layout

PARAMETERS, BYTES, NANOSECONDS = "parameters", "bytes", "nanoseconds"  # units of resources

Costs = Mapping[str, int]  # a whole number for each resource that is counted

SCARCE = 4  # tokens for each input of the widest layer, below which a part tells sizes better
SHARE = 4  # of so many samples one then does, about: batches are taken whole


def sizes_by_part(recipe: Convert, plan: Plan, source: SourceModel, tokens: int) -> bool:
    """Tell whether candidates are fitted to a part of the samples, as where there are few tokens.

    Low rank of a language model came out better by them: what fits gain by chance shows on samples
    held out. So it did where the part told all that layers are worth, but for fits, which read
    moments of gradients of all samples unless they do without. Of `auto` and `width` sizes became
    worse. Limits of an error are held to what was measured, so that all of it counts; and experts
    of a list need all tokens that choose them.
    """
    budget, model = recipe.budget, source.keymap.model
    terms = (term for entry in plan.layers for part in entry.parts for term in part.terms)
    widest = max((entry.in_features for entry in plan.layers), default=0)
    return (
        recipe.by_loss
        and budget is not None
        and budget.is_size
        and not (recipe.narrows or isinstance(recipe.method, AutoSpec))
        and all(structure(term.structure).sized_by_part for term in terms)
        and tokens < SCARCE * widest
        and _reads_text_alone(source)
        and model.get_output_embeddings() is not None  # type: ignore[operator]
        and not any(listed_item(model, layer.name) for layer in roles_of(source).layers)
    )


WIDEST = 4096  # inputs of a layer up to which `auto` offers structures whose fits take long


def offered_in(
    recipe: Convert, source: SourceModel, fraction: float, *, alone: bool = False
) -> dict[str, tuple[Spec, ...]]:
    """List what `auto` chooses among in a model, as `offered_by` does.

    Fitted to data, sums of slices and low rank take twenty times as long as low rank in wide
    layers, and are no faster: there they are on offer where they are asked for.
    """
    assert isinstance(recipe.method, AutoSpec)
    widest = max((layer.in_features for layer in roles_of(source).layers), default=0)
    fast = recipe.counts_time or (widest > WIDEST and not recipe.calibration.is_none)
    return offered_by(recipe.method, fraction, timed=fast, alone=alone)


def left_out(recipe: Convert, source: SourceModel) -> str:
    """Say which methods `auto` leaves out of a model for its width, and how they are taken in."""
    if not isinstance(recipe.method, AutoSpec):
        return ""
    usual = [*offered_by(recipe.method, STAND_IN, timed=recipe.counts_time)]
    wide = [name for name in usual if name not in offered_in(recipe, source, STAND_IN)]
    if not wide:
        return ""
    return (
        f"note: `auto` leaves out {', '.join(f'`{name}`' for name in wide)}: a layer has more than "
        f"{WIDEST:,} inputs, to which such fits take long, and passes are no faster; `--offer "
        f"{','.join(usual)}` takes all in"
    )


def names_offered(recipe: Convert, source: SourceModel) -> tuple[str, ...]:
    """Name the methods that layers without rules may take."""
    if isinstance(recipe.method, AutoSpec):
        return tuple(offered_in(recipe, source, STAND_IN))
    return () if recipe.method is None else (recipe.method.name,)


CONDENSED = 2  # times as many outputs as inputs from which on W^T S W is measured in place of S


def condensed_layers(recipe: Convert, plan: Plan, source: SourceModel) -> frozenset[str]:
    """Name the layers of which W^T S W is measured in place of S, as in the running model.

    It is the smaller one where a layer puts out far more than it reads, and passes compute what it
    is summed up of anyway. Low rank and width need no more, but for the order of channels of
    scores, and of those that are read.
    """
    roles, names = roles_of(source), names_offered(recipe, source)
    offered = (item for item in structures() if {*names} & {*item.spec.names()})
    if recipe.residual_rank or any(item.reads_curvature for item in offered):
        return frozenset()
    attentions, ordered = attentions_of(source.keymap.model, roles), set[Layer]()
    for coupling in chain.from_iterable(all_couplings(block, attentions) for block in roles.blocks):
        ordered |= {coupling.reader} if coupling.reader else {*coupling.layers}
    entries = {path_of(source, entry): entry for entry in plan.layers}

    def is_condensed(layer: Layer) -> bool:
        entry = entries.get(layer.weight_name)
        if entry is None or layer in ordered or layer.calls > 1:
            return False
        if entry.is_narrow and not entry.is_plain:  # fits read moments of the outputs that stay
            return False
        terms = [term for part in entry.parts for term in part.terms]
        return (
            len(terms) == 1
            and type(source.keymap.model.get_submodule(layer.name)) is nn.Linear
            and layer.in_features > LARGE
            and layer.out_features >= CONDENSED * layer.in_features
            and not any(structure(term.structure).reads_curvature for term in terms)
        )

    return frozenset(layer.name for layer in roles.layers if is_condensed(layer))


def _reads_text_alone(source: SourceModel) -> bool:
    """Tell whether tokens of text are all that layers read: pictures and sounds have others."""
    others = ("vision_config", "audio_config")
    reads = getattr(source.model_class, "main_input_name", "")
    return reads == "input_ids" and not any(hasattr(source.config, name) for name in others)


@dataclass(frozen=True, eq=False)
class SearchInputs:
    """A model, and what is asked of it."""

    source: SourceModel
    recipe: Convert  # what is to be done to these blocks
    plan: Plan  # a plan of equal sizes
    data: CalibrationData | None  # to measure on; what is held out is for comparisons alone
    workdir: FitWorkplace  # where moments are kept
    device: torch.device
    progress: Progress
    several: bool = False  # whether each method that takes all layers may be an answer by itself

    @property
    def whole(self) -> SourceModel:
        """The dense model with all its blocks and tokens, which a speed is relative to."""
        return self.source.whole or self.source

    @cached_property
    def tried_data(self) -> CalibrationData:
        """Data that candidates are fitted to, at most."""
        data = self.data
        assert data is not None
        by_part = sizes_by_part(self.recipe, self.plan, self.source, data.tokens)
        return data.part(max(1, data.samples // SHARE)) if by_part else data

    @property
    def measured_data(self) -> CalibrationData:
        """Data that tells what layers are worth: all of it where fits read what it tells."""
        assert self.data is not None
        return self.tried_data if self.recipe.calibration.output_moments is False else self.data


@dataclass(frozen=True)
class Candidate:
    """What could stand at a site."""

    method: str  # name of the structure; empty where there are several, or none
    forms: tuple[tuple[str, LayerForm | None], ...]
    """What layers become, by weight name in the checkpoint; None for those that stay dense."""
    loss: float  # predicted loss of the model, in one unit for all sites
    costs: Costs

    @property
    def form(self) -> LayerForm:
        """The form of the one layer that it is for."""
        [(_, form)] = self.forms
        assert form is not None
        return form


@dataclass(frozen=True)
class Site:
    """A layer, or layers that are chosen together, and what may stand there."""

    keys: tuple[str, ...]  # names of the weights in the checkpoint
    role: str  # of the layer in its block
    dense: Costs  # what the site takes as it is
    candidates: tuple[Candidate, ...]  # in any order; useless ones do no harm
    left_out: float = 0.0  # predicted loss of leaving it out
    unit: float = 1.0  # bytes of one parameter where bytes are limited, else one
    may_stay: bool = True  # whether it may stay as it is, at no loss

    @property
    def key(self) -> str:
        """Name of its first weight, for messages too."""
        return self.keys[0]

    def taken_by(self, parameters: float, resource: str) -> float:
        """Return what so many parameters take of a resource that shapes alone tell."""
        return parameters * (self.unit if resource == BYTES else 1)

    @property
    def stays(self) -> Candidate:
        """The site as it is."""
        return Candidate("", tuple((key, None) for key in self.keys), 0.0, self.dense)

    @property
    def every(self) -> tuple[Candidate, ...]:
        """All candidates, to stay among them."""
        return (*self.candidates, self.stays) if self.may_stay else self.candidates

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of its candidates, in their order."""
        return tuple(dict.fromkeys(item.method for item in self.candidates))

    def of(self, method: str) -> tuple[Candidate, ...]:
        return tuple(item for item in self.candidates if item.method == method)

    def losing(self, losses: Iterable[float]) -> Self:
        """Return the same whose candidates lose this much, in their order."""
        pairs = zip(self.candidates, losses, strict=True)
        return replace(self, candidates=tuple(replace(item, loss=loss) for item, loss in pairs))

    def scaled(self, factors: Mapping[LossKey, float]) -> Self:
        """Return the same with its losses in proportion."""
        losses = (item.loss * factors.get((item.method, self.key), 1.0) for item in self.candidates)
        return self.losing(losses)

    def costing(self, unit: str, costs: Iterable[int], dense: int) -> Self:
        """Return the same whose candidates, and layers as they are, take this of a resource too."""
        pairs = zip(self.candidates, costs, strict=True)
        candidates = (replace(item, costs={**item.costs, unit: cost}) for item, cost in pairs)
        return replace(self, candidates=tuple(candidates), dense={**self.dense, unit: dense})

    def offering(self, methods: Collection[str], *, may_stay: bool) -> Site:
        """Return the same with the candidates of these methods, in their order.

        Where no method has one, the layer stays dense.
        """
        offered = tuple(item for method in methods for item in self.of(method))
        return replace(self, candidates=offered, may_stay=may_stay or not offered)

    def closest(self, method: str, fraction: float) -> Candidate | None:
        """Pick the candidate of a method that is closest to a kept fraction, in proportion."""
        size = log(fraction * self.dense[PARAMETERS])

        def distance(item: Candidate) -> float:
            return abs(log(max(1, item.costs[PARAMETERS])) - size)

        return min(self.of(method), key=distance, default=None)


@dataclass(frozen=True)
class WidthSite(Site):
    """Layers that have channels in common, and the sizes that they may have together."""

    orders: tuple[ChannelOrder, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()  # of each candidate, by order

    @property
    def is_attention(self) -> bool:
        """Whether it is about whole heads, of what other sites tell the parts of."""
        return self.orders[0].coupling.kind == "heads"

    def scaled(self, factors: Mapping[LossKey, float]) -> Self:
        """Scale what fewer channels lose, and none; nothing loses more than none of them."""
        orders = []
        for order in self.orders:
            coupling, losses = order.coupling, order.losses.clone()
            losses[:1] *= factors.get((coupling, False), 1.0)
            losses[1:] *= factors.get((coupling, True), 1.0)
            if (coupling, True) in factors and 0 in coupling.sizes:
                losses = losses.clamp(max=float(losses[0]))
            orders.append(replace(order, losses=losses))
        site = self.losing(_loss(orders, sizes) for sizes in self.sizes)
        return replace(site, orders=tuple(orders))


def of_one_layer(methods: Collection[str]) -> list[str]:
    """List the methods whose candidates are of one layer."""
    return [name for name in methods if name != NARROWING]


# Candidates of several layers: fewer neurons, and fewer dimensions or heads of an attention.


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
            narrow = [*narrow_layers(dict(zip(coupled, chosen, strict=True)), entries)]
            forms = tuple((entry.key, LayerForm(entry.parts, entry.reads)) for entry in narrow)
            counted = [(sites[e.key], e.inputs_left * e.outputs_left) for e in narrow]
            costs = {
                name: round(sum(site.taken_by(size, name) for site, size in counted))
                for name in counted[0][0].dense
            }
            candidates.append(Candidate(NARROWING, forms, _loss(orders, chosen), costs))
        keys = tuple(key for key, _ in candidates[-1].forms)
        yield WidthSite(keys, "", {}, tuple(candidates), orders=tuple(orders), sizes=sizes)


def _loss(orders: Sequence[ChannelOrder], sizes: Sequence[int]) -> float:
    return sum(float(order.losses[size]) for order, size in zip(orders, sizes, strict=True))


def narrow_layers(
    chosen: Mapping[Coupling, int], entries: Mapping[str, LayerPlan]
) -> Iterator[LayerPlan]:
    """Plan plain matrices of these sizes for all layers of some couplings; plans are by name."""
    all_reads, writes = channels_left(chosen)
    for layer in dict.fromkeys(layer for coupling in chosen for layer in coupling.layers):
        reads, parts = all_reads.get(layer.weight_name), []
        inputs = reads.left if reads else layer.in_features
        for part in layer.parts:
            channels = writes.get((layer.weight_name, part.name))
            outputs = channels.left if channels else part.size
            terms = (plain_layout(inputs, outputs),)
            parts.append(PartLayout(name=part.name, terms=terms, channels=channels))
        yield entries[layer.name].model_copy(update={"parts": tuple(parts), "reads": reads})


def kept_sizes(coupling: Coupling, fraction: float) -> list[int]:
    """List the sizes that are tried: none where that is offered, and that next to a fraction."""
    inner = coupling.sizes[1:-1]
    nearest = min(inner, key=lambda size: abs(size - fraction * coupling.size), default=0)
    return [size for size in coupling.sizes if size in (0, nearest)]
