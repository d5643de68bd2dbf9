"""Candidates put alone into the dense model: what the output changes by, on samples held out.

Predictions of loss take tokens, and layers, for independent. Errors at the tokens of a text often
go one way, most of all close to a mean that is taken over them: a last attention costs ten times
what is predicted, and widths cost up to twice as much beside ranks. So some candidates of every
site are fitted, and the model is run with each of them alone in its place. The predicted losses of
all sizes are then scaled to what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcompress.blockwise.output_sampler import OutputSampler, sampler_of
from tcompress.blockwise.streams import PartialModel, Stream, common_block
from tcompress.data.calibration import CalibrationData, samples_in
from tcompress.fitting.block_rewrite import (
    BlockRewriter,
    FitInputs,
    RewrittenBlock,
    StreamPairs,
    dense_readings,
)
from tcompress.fitting.channel_orders import ChannelOrder, read_reductions
from tcompress.models import SourceModel
from tcompress.options.method_options import NARROWING
from tcompress.planning.entries import LayerPlan
from tcompress.planning.planner import regrouped
from tcompress.planning.sites import Coupling, couplings, roles_of, whole_heads
from tcompress.roles import Attention, Block, Layer
from tcompress.search.candidates import SearchInputs, Site, of_one_layer
from tcompress.search.joint_width import forms_of, kept_sizes
from tcompress.structures import structure
from tcompress.structures.base import SharesFactors

FITTED = 256  # samples that candidates are fitted to, about

JUDGED = 120
"""Samples held out that candidates are judged by, at most; variants of texts are some too."""

JUDGED_TOKENS = 2**12  # their tokens, at most

BLOCKS = 8
"""Blocks whose candidates are tried, at most; between them, what is found is interpolated."""

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
    keys: tuple[str, ...] = ()  # weights whose losses it tells of; none where channels are fewer
    coupling: tuple[Coupling, int] | None = None  # the channels that are fewer, and how many stay


@dataclass
class SubstitutionWalk:
    """Passes that differ from the dense model's in one substitute each.

    A pass follows the dense one up to the block of its substitute, which is fitted there, and
    computes from there on.
    """

    inputs: SearchInputs  # what substitutes are fitted to and judged by
    substitutes: Mapping[int, Substitute]  # what is put into the dense model, by number
    advance: Callable[[str], None] = lambda _: None  # hears of the blocks that all passes have run

    def __post_init__(self) -> None:
        source, device = self.inputs.source, self.inputs.device
        moments = self.inputs.workdir.moments
        self._blocks = {block.name: block for block in roles_of(source).blocks}
        self._model = PartialModel(source, [*self._blocks], device, head=True)
        self._sampler = sampler_of(source)
        self._fits = FitInputs(
            source,
            self.inputs.recipe.calibration.damping,
            moments,
            reductions=lambda block: read_reductions(moments("channels", block)),
            dtype_of=lambda _: torch.float32,
            device=device,
            is_unfitted=lambda entry: entry.reads is None and entry.is_plain,
        )

    def changes(self, numbers: Sequence[int]) -> dict[int, float]:
        """Return the change of the output per sample, for substitutes by number."""
        stream, run, passes = self._model.stream, self._model.answer_of, len(self.substitutes) + 1
        data, attention = self.inputs.data, self.inputs.plan.attention
        assert data is not None
        batches = judged_batches(data, self._sampler, self.inputs.source, passes)
        data = _to_fit(data)
        fitted = [stream(batch) for batch in data.batches]
        by_index = dict(enumerate(fitted))
        pairs = StreamPairs(data, by_index, by_index)  # up to its own block nothing changes
        unchanged = [stream(batch, keep=True) for batch in batches]
        changed = {n: [stream(batch, keep=True) for batch in batches] for n in numbers}
        reached: set[int] = set()  # substitutes whose passes differ by now
        changes = dict.fromkeys(numbers, 0.0)
        with self._model.paused([*fitted, *unchanged, *chain(*changed.values())]):
            while name := common_block([*fitted, *unchanged]):
                with self._model.loaded(name) as dense:
                    forward = self._model.forwards[name]
                    readings = dense_readings(self._blocks.get(name), dense, forward)
                    answers: dict[int, list[Any]] = {}
                    for number in numbers:
                        item = self.substitutes[number]
                        if item.block == name:
                            rewriter = BlockRewriter(self._fits, pairs, item.entries, attention)
                            rewritten = rewriter.rewrite(self._blocks[name], dense, readings)
                            answers[number] = self._answers(rewritten, changed[number])
                    for waiting in fitted:
                        waiting.answer(readings.answer(waiting))
                    for index, exact in enumerate(unchanged):
                        answer = run(exact)
                        exact.answer(answer)
                        for number, followers in changed.items():
                            follower = followers[index]
                            if number in reached:
                                follower.answer(run(follower))
                            else:
                                ahead = answers.get(number)
                                follower.answer(answer if ahead is None else ahead[index])
                            if exact.output is not None:
                                changes[number] += self._sampler.change(
                                    exact.output, follower.output, exact.batch
                                )
                                follower.output = None  # at once: logits are large
                        exact.output = None
                    reached |= answers.keys()
                self.advance(name)
        samples = sum(map(samples_in, batches))
        return {number: change / samples for number, change in changes.items()}

    def _answers(self, rewritten: RewrittenBlock, passes: Sequence[Stream]) -> list[Any]:
        """Run the block of a substitute."""
        routing, answers = rewritten.routing, []
        for index, waiting in enumerate(passes):
            routing.current = index
            if routing.paths:  # experts follow the dense routing
                self._model.answer_of(waiting)
            answers.append(waiting.waiting.run(rewritten.forward))
        return answers


def _to_fit(data: CalibrationData) -> CalibrationData:
    """Some of the samples that are not held out."""
    part = data.part(FITTED)
    places = tuple(part.place(index) for index in part.fitted)
    return replace(part, batches=part.fitted_batches, holdout=[], origins={}, places=places)


def judged_batches(
    data: CalibrationData, sampler: OutputSampler, source: SourceModel, passes: int
) -> list[Mapping[str, Tensor]]:
    """Batches held out, cut to what is enough and to what so many passes have memory for."""
    indices = [*data.holdout] or [*range(len(data.batches))]
    batches = [data.batches[index] for index in indices]
    uncut = [*map(sampler.with_variants, batches)]
    samples = sum(map(samples_in, uncut))
    tokens = sum(tokens_of(next(iter(batch.values()))) for batch in uncut)
    width = getattr(source.config.get_text_config(), "hidden_size", 0) or 1
    limit = min(JUDGED_TOKENS, MOST_BYTES / (4 * width * passes))
    step = max(1, round(max(samples / JUDGED, tokens / limit)))
    cut = list[Mapping[str, Tensor]]()
    for batch in batches:
        size = samples_in(batch)
        chosen = slice(min(size - 1, step // 2), None, step)
        cut.append(sampler.with_variants({key: value[chosen] for key, value in batch.items()}))
    return cut


def tokens_of(value: Tensor) -> int:
    """Count the tokens of an input; of a picture or a sound this is a guess."""
    return value.numel() if value.dim() == 2 else 256 * len(value)


def layer_substitutes(
    block: Block, sites: Mapping[str, Site], entries: Mapping[str, LayerPlan], fraction: float
) -> Iterator[Substitute]:
    """Take the layers of each half of a block, by each of the structures they are offered.

    Args:
        block: The block.
        sites: Its layers by weight name in the checkpoint.
        entries: Their plans by name in the model.
        fraction: Kept fraction that sizes are taken close to.
    """
    for half in _halves(block):
        sized = [entries[layer.name] for layer in half if layer.name in entries]
        sized = [entry for entry in sized if entry.key in sites]
        for name in dict.fromkeys(n for e in sized for n in sites[e.key].methods):
            closest = {entry.key: sites[entry.key].closest(name, fraction) for entry in sized}
            chosen = {key: item for key, item in closest.items() if item is not None}
            forms = {key: item.form for key, item in chosen.items()}
            inputs = [[entries.get(layer.name) for layer in group] for group in block.groups]
            groups = [[e for e in group if e in sized and e.key in chosen] for group in inputs]
            members = [e for g in groups if g for e in regrouped(g, forms)[0]]
            if members and not any(map(_shares_factors, members)):
                keys = tuple(entry.key for entry in members)
                predicted = sum(chosen[key].loss for key in keys)
                if predicted > 0:
                    kind = (name, *(entry.role for entry in members))
                    yield Substitute(name, kind, block.name, tuple(members), predicted, keys)


def channel_substitutes(
    block: Block,
    orders: Iterable[ChannelOrder],
    entries: Mapping[str, LayerPlan],
    fraction: float,
) -> Iterator[Substitute]:
    """Take some channels and, where that is offered, none; entries are by weight in the model."""
    by_key = {entry.key: entry for entry in entries.values()}
    for order in orders:
        for size in kept_sizes(order.coupling, fraction):
            forms = forms_of({order.coupling: size}, entries)
            narrow = tuple(by_key[k].model_copy(update=form._asdict()) for k, form in forms)
            predicted = float(order.losses[size])
            if predicted > 0:
                roles = (entry.role for entry in narrow)
                method, channels = NARROWING, (order.coupling, size)
                kind = (method, *roles, "some" if size else "none")
                yield Substitute(method, kind, block.name, narrow, predicted, coupling=channels)


def in_question(
    substitutes: Sequence[Substitute], methods: Collection[str]
) -> dict[int, Substitute]:
    """Pick those by these methods, by number."""
    return {n: item for n, item in enumerate(substitutes) if item.method in methods}


def to_try(substitutes: Mapping[int, Substitute]) -> dict[int, Substitute]:
    """Pick those in the blocks that are tried."""
    blocks = some_of([*dict.fromkeys(item.block for item in substitutes.values())])
    return {n: item for n, item in substitutes.items() if item.block in blocks}


@dataclass(frozen=True)
class Factors:
    """Factors for predicted losses: of layers by method and weight name, and of channels."""

    layers: Mapping[tuple[str, str], float] = field(default_factory=dict)
    channels: Mapping[Coupling, Mapping[int, float]] = field(default_factory=dict)
    usual: float | None = None
    """What the output changes by for a predicted loss of one; None where nothing was tried."""

    def scaled(self, site: Site) -> Site:
        """Return a layer with its losses in proportion."""
        candidates = (
            item.scaled(self.layers[item.method, site.key])
            if (item.method, site.key) in self.layers
            else item
            for item in site.candidates
        )
        return replace(site, candidates=tuple(candidates))


def factors_of(substitutes: Mapping[int, Substitute], changes: Mapping[int, float]) -> Factors:
    """Compare what the output changes by with what was predicted.

    Args:
        substitutes: All by the methods in question, by number.
        changes: Changes of the output with those that were tried, by number.
    """
    order = [*dict.fromkeys(item.block for item in substitutes.values())]
    tried = to_try(substitutes)
    ratios = [max(0.0, changes[n]) / item.predicted for n, item in tried.items()]
    if not ratios:
        return Factors()
    usual = float(np.median(ratios))
    if not usual > 0:
        return Factors(usual=usual)
    curves: dict[tuple[str, ...], dict[int, float]] = {}
    for item, ratio in zip(tried.values(), ratios, strict=True):
        factor = min(MOST, max(LEAST, ratio / usual))
        curves.setdefault(item.kind, {})[order.index(item.block)] = factor
    layers: dict[tuple[str, str], float] = {}
    channels: dict[Coupling, dict[int, float]] = {}
    for item in substitutes.values():
        if item.kind not in curves:
            continue
        factor = _between(curves[item.kind], order.index(item.block))
        layers |= {(item.method, key): factor for key in item.keys}
        if item.coupling is not None:
            coupling, size = item.coupling
            channels.setdefault(coupling, {})[size] = factor
    return Factors(layers, channels, usual)


def some_of(blocks: Sequence[str]) -> list[str]:
    """Take as many blocks as are tried, at equal distances, the first and the last one too."""
    count = min(len(blocks), BLOCKS)
    return [blocks[round(index)] for index in np.linspace(0, len(blocks) - 1, count)]


def _between(factors: Mapping[int, float], index: int) -> float:
    """Return the factor of a block, or what lies between those of the nearest ones."""
    tried = sorted(factors)
    logs = np.log([factors[block] for block in tried])
    return float(np.exp(np.interp(index, tried, logs)))


def count_of(
    block: Block, methods: Collection[str], fraction: float, attentions: Sequence[Attention]
) -> int:
    """Count the substitutes of a block, by what it is made of alone."""
    count = len(_halves(block)) * len(of_one_layer(methods))
    if NARROWING in methods:
        heads = [whole_heads(item) for item in attentions if item.block == block.name]
        coupled = [*couplings(block), *filter(None, heads)]
        count += sum(len(kept_sizes(coupling, fraction)) for coupling in coupled)
    return count


def _halves(block: Block) -> list[list[Layer]]:
    """Layers of a block that have channels in common: scores, values, neurons; else of one input.

    Those are apart since they may lose most different amounts: of a last attention that a mean is
    taken over the values cost a hundred times what the scores do.
    """
    linked = [{*coupling.layers} for coupling in couplings(block)]
    coupled = set[Layer]().union(*linked)
    linked += [{*group} - coupled for group in block.groups]
    halves: list[set[Layer]] = []
    for half in filter(None, linked):
        for overlapping in [earlier for earlier in halves if earlier & half]:
            halves.remove(overlapping)
            half |= overlapping
        halves.append(half)
    return [[layer for layer in block.layers if layer in half] for half in halves]


def _shares_factors(entry: LayerPlan) -> bool:
    layouts = (layout for part in entry.parts for layout in part.terms)
    return any(isinstance(structure(layout.structure), SharesFactors) for layout in layouts)
