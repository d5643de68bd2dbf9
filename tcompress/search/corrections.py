"""Predicted losses corrected by trying candidates: put alone into the dense model, or fitted.

Predictions of loss take tokens, and layers, for independent. Errors at the tokens of a text often
go one way, most of all close to a mean that is taken over them: a last attention costs ten times
what is predicted, and widths cost up to twice as much beside ranks. So some candidates of every
site are fitted, and the model is run with each of them alone in its place. The predicted losses of
all sizes are then scaled to what the output changes by, on samples held out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import exp, fsum, inf, log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tcompress.blockwise.output_sampler import OutputSampler, sampler_of
from tcompress.blockwise.streams import PartialModel, Stream
from tcompress.data.calibration import CalibrationData, samples_in
from tcompress.fitting.block_rewrite import BlockRewriter, FitInputs, RewrittenBlock
from tcompress.fitting.channel_orders import LayerStatistics
from tcompress.fitting.layer_fits import LayerMoments, LayerToFit, fit_layers
from tcompress.linalg.moments import Moments
from tcompress.memory import give_back_memory
from tcompress.models import SourceModel
from tcompress.options.method_options import NARROWING
from tcompress.planning.entries import LayerPlan
from tcompress.planning.planner import regrouped
from tcompress.planning.sites import couplings
from tcompress.roles import Attention, Block, Layer
from tcompress.search.candidates import (
    PARAMETERS,
    Candidate,
    LossKey,
    SearchInputs,
    Site,
    WidthSite,
    all_couplings,
    kept_sizes,
    narrow_layers,
    of_one_layer,
)
from tcompress.structures import structure
from tcompress.structures.base import SharesFactors

FITTED = 256  # samples that candidates are fitted to, about
JUDGED = 120  # samples held out that judge candidates, at most; variants of texts are some too
JUDGED_TOKENS = 2**12  # their tokens, at most
BLOCKS = 8  # whose candidates are tried, at most; between them, what is found is interpolated
MOST_BYTES = 2**29  # of the states of all passes
LEAST, MOST = 1 / 30, 30.0  # bounds of a factor that is believed, in units of the usual one


@dataclass(frozen=True, eq=False)
class Substitute:
    """Layers of one block in another form."""

    method: str
    kind: tuple[str, ...]  # alike in all blocks for candidates of one method at the same place
    block: str
    entries: tuple[LayerPlan, ...]  # plans of the layers that change
    predicted: float  # predicted loss, above zero
    keys: tuple[LossKey, ...]  # of the losses that it tells of


def changes_with(
    inputs: SearchInputs, passes: int, substitutes: Sequence[Substitute]
) -> list[float]:
    """Return the change of the output per sample with each substitute.

    A pass follows the dense one up to the block of its substitute, which is fitted there, and
    computes from there on. All processes make so many `passes` at most, and judge by the same
    samples.
    """
    source, device = inputs.source, inputs.device
    assert inputs.data is not None
    model, sampler = PartialModel(source, device, head=True), sampler_of(source)
    fits = FitInputs(
        source,
        inputs.recipe.calibration.damping,
        inputs.workdir.moments,
        dtype_of=lambda _: torch.float32,
        device=device,
        skips_plain=True,
    )
    batches = judged_batches(inputs.data, sampler, source, passes)
    part = inputs.tried_data.part(FITTED)
    places = tuple(part.place(index) for index in part.fitted)
    data = replace(part, batches=part.fitted_batches, holdout=[], origins={}, places=places)
    fitted = [model.stream(batch) for batch in data.batches]
    # Up to its own block nothing changes.
    pairs = {index: (waiting, waiting) for index, waiting in enumerate(fitted)}
    unchanged = [model.stream(batch, keep=True) for batch in batches]
    changed = {it: [model.stream(batch, keep=True) for batch in batches] for it in substitutes}
    reached: set[Substitute] = set()  # those whose passes differ by now
    changes = dict.fromkeys(substitutes, 0.0)
    for block, readings in model.walk([*fitted, *unchanged, *chain(*changed.values())]):
        answers: dict[Substitute, list[Any]] = {}
        for item in (it for it in substitutes if it.block == block.name):
            rewriter = BlockRewriter(fits, data, pairs, item.entries, inputs.plan.attention)
            # Nothing holds the copy, which holds all readings, when the next one is made.
            answers[item] = [*_answers(model, rewriter.rewrite(block, readings), changed[item])]
        for waiting in fitted:
            waiting.answer(readings.answer(waiting))
        readings.drop()  # outputs are large
        give_back_memory()
        for index, exact in enumerate(unchanged):
            answer = model.answer_of(exact)
            exact.answer(answer)
            for item, followers in changed.items():
                follower = followers[index]
                if item in reached:
                    follower.answer(model.answer_of(follower))
                else:
                    follower.answer(answers[item][index] if item in answers else answer)
                if exact.output is not None:
                    change = sampler.change(exact.output, follower.output, exact.batch)
                    changes[item] += change
                    follower.output = None  # at once: logits are large
            exact.output = None
        reached |= answers.keys()
        inputs.progress.advance(1, block.name)
    samples = sum(map(sampler.samples_in, batches))
    return [change / samples for change in changes.values()]


def _answers(
    model: PartialModel, rewritten: RewrittenBlock, passes: Sequence[Stream]
) -> Iterator[Any]:
    """Run the block of a substitute."""
    routing = rewritten.routing
    for index, waiting in enumerate(passes):
        routing.current = index
        if routing.paths:  # experts follow the dense routing
            model.answer_of(waiting)
        yield waiting.waiting.run(rewritten.forward)
    routing.close()


def judged_batches(
    data: CalibrationData, sampler: OutputSampler, source: SourceModel, passes: int
) -> list[Mapping[str, Tensor]]:
    """Batches held out, cut to what is enough and to what so many passes have memory for."""
    batches = [data.batches[index] for index in data.holdout] or data.batches
    uncut = [*map(sampler.with_variants, batches)]
    samples = sum(map(samples_in, uncut))
    tokens = sum(tokens_of(next(iter(batch.values()))) for batch in uncut)
    step = judged_step(source, samples, tokens, passes)
    cut = list[Mapping[str, Tensor]]()
    first = min(step // 2, sum(map(samples_in, batches)) - 1)  # to be judged by, of a batch
    for batch in batches:
        size = samples_in(batch)
        if first < size:
            chosen = {key: value[first::step] for key, value in batch.items()}
            cut.append(sampler.with_variants(chosen))
        first = (first - size) % step if first < size else first - size
    return cut


def judged_step(source: SourceModel, samples: int, tokens: int, passes: int) -> int:
    """Of how many samples one judges candidates: of so many, with so many tokens, in all passes."""
    width = getattr(source.config.get_text_config(), "hidden_size", 0) or 1
    limit = min(JUDGED_TOKENS, MOST_BYTES / (4 * width * passes))
    return max(1, round(max(samples / JUDGED, tokens / limit)))


def tokens_of(value: Tensor) -> int:
    """Count the tokens of an input; of a picture or a sound this is a guess."""
    return value.numel() if value.dim() == 2 else 256 * len(value)


def close_to(
    fraction: float,
    method: str,
    block: Block,
    sites: Mapping[str, Site],
    entries: Mapping[str, LayerPlan],
) -> Iterator[list[tuple[LayerPlan, Candidate]]]:
    """Plan layers with one method, of sizes close to a kept fraction, those together of one input.

    Sites are by weight name in the checkpoint, plans (`entries`) by name in the model.
    """
    chosen = {key: item for key, site in sites.items() if (item := site.closest(method, fraction))}
    forms = {key: item.form for key, item in chosen.items()}
    for group in block.groups:
        planned = [entries[layer.name] for layer in group if layer.name in entries]
        members, _ = regrouped([entry for entry in planned if entry.key in chosen], forms)
        if members:
            yield [(entry, chosen[entry.key]) for entry in members]


def layer_substitutes(
    block: Block, sites: Mapping[str, Site], entries: Mapping[str, LayerPlan], fraction: float
) -> Iterator[Substitute]:
    """Take the layers of each half of a block by each structure they are offered, as `close_to`."""
    for half in _halves(block):
        planned = [entries[layer.name] for layer in half if layer.name in entries]
        sized = {entry.key: sites[entry.key] for entry in planned if entry.key in sites}
        for method in dict.fromkeys(chain.from_iterable(site.methods for site in sized.values())):
            pairs = [*chain.from_iterable(close_to(fraction, method, block, sized, entries))]
            members = tuple(entry for entry, _ in pairs)
            predicted = sum(candidate.loss for _, candidate in pairs)
            terms = (term for entry in members for part in entry.parts for term in part.terms)
            shares = any(isinstance(structure(term.structure), SharesFactors) for term in terms)
            if predicted > 0 and not shares:
                kind = (method, *(entry.role for entry in members))
                keys = tuple((method, entry.key) for entry in members)
                yield Substitute(method, kind, block.name, members, predicted, keys)


def channel_substitutes(
    block: Block, sites: Iterable[WidthSite], entries: Mapping[str, LayerPlan], fraction: float
) -> Iterator[Substitute]:
    """Take some of the channels of a block and, where that is offered, none."""
    for order in chain.from_iterable(site.orders for site in sites):
        for size in kept_sizes(order.coupling, fraction):
            narrow = tuple(narrow_layers({order.coupling: size}, entries))
            predicted = float(order.losses[size])
            if predicted > 0:
                kind = (NARROWING, *(e.role for e in narrow), "some" if size else "none")
                keys = ((order.coupling, size > 0),)
                yield Substitute(NARROWING, kind, block.name, narrow, predicted, keys)


def to_try(substitutes: Sequence[Substitute]) -> list[Substitute]:
    """Pick those in the blocks that are tried."""
    blocks = some_of([*dict.fromkeys(item.block for item in substitutes)])
    return [item for item in substitutes if item.block in blocks]


class Factors(NamedTuple):
    """Factors for predicted losses."""

    by_key: Mapping[LossKey, float]
    usual: float | None
    """What the output changes by for a predicted loss of one; None where nothing was tried."""


def factors_of(substitutes: Sequence[Substitute], changes: Mapping[Substitute, float]) -> Factors:
    """Compare what the output changes by with what was predicted.

    Substitutes are all by the methods in question; changes are known of those that were tried.
    """
    order = [*dict.fromkeys(item.block for item in substitutes)]
    ratios = {item: max(0.0, changes[item]) / item.predicted for item in to_try(substitutes)}
    usual = float(np.median([*ratios.values()])) if ratios else None
    if usual is None or not usual > 0:
        return Factors({}, usual)
    curves: dict[tuple[str, ...], dict[int, float]] = {}
    for item, ratio in ratios.items():
        factor = min(MOST, max(LEAST, ratio / usual))
        curves.setdefault(item.kind, {})[order.index(item.block)] = factor
    factors: dict[LossKey, float] = {}
    for item in substitutes:
        if item.kind in curves:  # blocks between those tried get what lies between
            tried, values = zip(*sorted(curves[item.kind].items()), strict=True)
            factor = float(np.exp(np.interp(order.index(item.block), tried, np.log(values))))
            factors |= dict.fromkeys(item.keys, factor)
    return Factors(factors, usual)


def some_of(blocks: Sequence[str]) -> list[str]:
    """Take as many blocks as are tried, at equal distances, the first and the last one too."""
    count = min(len(blocks), BLOCKS)
    return [blocks[round(index)] for index in np.linspace(0, len(blocks) - 1, count)]


def count_of(
    block: Block, methods: Collection[str], fraction: float, attentions: Sequence[Attention]
) -> int:
    """Count the substitutes of a block, by what it is made of alone."""
    count = len(_halves(block)) * len(of_one_layer(methods))
    if NARROWING in methods:
        coupled = all_couplings(block, attentions)
        count += sum(len(kept_sizes(coupling, fraction)) for coupling in coupled)
    return count


def united(sets: Iterable[set[Layer]]) -> list[set[Layer]]:
    """Unite sets of layers that overlap."""
    unions: list[set[Layer]] = []
    for layers in sets:
        overlapping = [union for union in unions if union & layers]
        unions = [union for union in unions if union not in overlapping]
        unions.append(layers.union(*overlapping))
    return unions


def _halves(block: Block) -> list[list[Layer]]:
    """Layers of a block that have channels in common: scores, values, neurons; else of one input.

    Those are apart since they may lose most different amounts: of a last attention that a mean is
    taken over the values cost a hundred times what the scores do.
    """
    linked = [{*coupling.layers} for coupling in couplings(block)]
    coupled = set[Layer]().union(*linked)
    halves = united([*linked, *({*group} - coupled for group in block.groups)])
    return [[layer for layer in block.layers if layer in half] for half in halves if half]


# Real fits of layers of one or two blocks, which correct what sizes are predicted to lose.
#
# Without data no model can be run with a candidate in it. Quick predictions leave out what takes
# long: fitted transforms, terms of a sum that make room for each other. This depends on the method
# and on the role of a layer far more than on its depth; so the layers of one or two blocks are
# fitted as the conversion will. The ratio of both losses corrects the predictions for all layers of
# a role.

MARGIN = 1.15  # a method that loses at most so much more than the best stays in question for a role
AROUND = 4.0  # fractions that count for that: up to so many times less or more than the budget's
LEAST_RATIO, MOST_RATIO = 0.02, 5.0  # bounds of a ratio that is believed


def blocks_to_fit(blocks: Sequence[Block]) -> set[str]:
    """Names the blocks to fit: of those alike the last and, of four or more, one in the middle."""
    kinds: dict[frozenset[str], list[str]] = defaultdict(list)
    for block in blocks:
        kinds[frozenset(layer.role for layer in block.layers)].append(block.name)
    middles = {names[len(names) // 2] for names in kinds.values() if len(names) > 3}
    return middles | {names[-1] for names in kinds.values()}


@dataclass
class WeightFits:
    """What real fits gain over predictions, by method and role."""

    fraction: float  # kept fraction that the budget comes to
    dropped: set[tuple[str, str]] = field(default_factory=set)
    """Methods, each with a role whose layers are not offered it any more."""
    _ratios: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def fit(
        self,
        group: Sequence[tuple[LayerPlan, Candidate]],
        sites: Mapping[str, Site],
        statistics: Mapping[str, LayerStatistics],
    ) -> None:
        """Fit layers that read one input in the form of a candidate each, and compare losses."""
        layers = []
        for entry, _ in group:
            measured = statistics[entry.name]
            gram, mean = measured.gram, measured.mean
            moments = [LayerMoments(Moments(gram, gram, gram, mean, mean, 1))]
            layers.append(LayerToFit(entry, measured.weight, moments, is_judged=True))
        fitted = fit_layers(layers, dtype=torch.float32, damping=0.0)
        for (entry, candidate), layer in zip(group, fitted, strict=True):
            site = sites[entry.key]
            if candidate.loss > 0 and layer.loss is not None:
                ratio = layer.loss * site.left_out / candidate.loss
                ratios = self._ratios[candidate.method, site.role]
                ratios.append(min(MOST_RATIO, max(LEAST_RATIO, ratio)))

    def drop(self, sites: Iterable[Site], spared: Collection[str] = ()) -> None:
        """Drop methods that lose clearly more than others for a role, at all sizes that count."""
        for site in map(self.corrected, sites):
            usual = self.fraction * site.dense[PARAMETERS]
            for name in {*site.methods} - {*spared}:
                rivals = [item for item in site.candidates if item.method != name]
                if rivals and not any(_competes(item, rivals, usual) for item in site.of(name)):
                    self.dropped.add((name, site.role))

    def corrected(self, site: Site) -> Site:
        """Return a layer with losses as real fits would have them."""
        ratios = {name: self.ratio(name, site.role) for name in site.methods}
        losses = (
            min(item.loss * ratios[item.method], max(item.loss, site.left_out))
            for item in site.candidates
        )
        return site.losing(losses)

    def ratio(self, method: str, role: str) -> float:
        """Return the factor for predicted losses: of the role, of all roles, or one."""
        everywhere = (ratios for (name, _), ratios in self._ratios.items() if name == method)
        ratios = self._ratios.get((method, role)) or [*chain.from_iterable(everywhere)]
        return exp(fsum(map(log, ratios)) / len(ratios)) if ratios else 1.0


def _competes(item: Candidate, rivals: Iterable[Candidate], usual: float) -> bool:
    size = item.costs[PARAMETERS]
    losses = (rival.loss for rival in rivals if rival.costs[PARAMETERS] <= size)
    counts = 1 / AROUND * usual <= size <= AROUND * usual
    return counts and item.loss <= MARGIN * min(losses, default=inf)
