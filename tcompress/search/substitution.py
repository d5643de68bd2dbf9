"""Candidates put alone into the dense model: what the output changes by, on samples held out.

Predictions of loss take tokens, and layers, for independent. Errors at the tokens of a text often
go one way, most of all close to a mean that is taken over them: a last attention costs ten times
what is predicted, and widths cost up to twice as much beside ranks. So some candidates of every
site are fitted, and the model is run with each of them alone in its place. The predicted losses of
all sizes are then scaled to what was found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcompress.blockwise.streams import Readings, Stream, common_block
from tcompress.data.calibration import CalibrationData
from tcompress.fitting.block_fitter import BlockFitter, BlockPair, BlockResult, Group
from tcompress.fitting.channel_orders import Widths
from tcompress.fitting.layer_fits import LayerMoments
from tcompress.planning.couplings import Coupling, couplings, whole_heads
from tcompress.planning.entries import Form, LayerPlan
from tcompress.planning.planner import regrouped
from tcompress.planning.sites import roles_of
from tcompress.progress import Progress
from tcompress.roles import Attention, Block, Layer
from tcompress.search.predict import LayerCandidates
from tcompress.search.width import forms_of
from tcompress.structures import structure
from tcompress.structures.base import SharesFactors
from tcompress.structures.width import WidthSpec

FITTED = 256
"""Samples that candidates are fitted to, about."""

JUDGED = 120
"""Samples held out that candidates are judged by, at most; variants of texts are some too."""

JUDGED_TOKENS = 2**12
"""Their tokens, at most."""

BLOCKS = 8
"""Blocks whose candidates are tried, at most; between them, what is found is interpolated."""

MOST_BYTES = 2**29
"""Of the states of all passes."""

WIDTH = WidthSpec().name

LEAST, MOST = 1 / 30, 30.0
"""Bounds of a factor that is believed, in units of the usual one."""


@dataclass(frozen=True)
class Substitute:
    """Layers of one block in another form."""

    method: str
    kind: tuple[str, ...]
    """Alike in all blocks for candidates of one method at the same place."""
    block: str
    entries: tuple[LayerPlan, ...]  # of the layers that change
    predicted: float  # loss


@dataclass
class SubstitutionWalk(BlockFitter):
    """Runs the dense model beside passes that differ from it in one substitute each.

    A pass follows the dense one up to the block of its substitute, which is fitted there, and
    computes from there on.
    """

    substitutes: Sequence[Substitute] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._blocks = {block.name: block for block in roles_of(self.source).blocks}
        width = getattr(self.source.config.get_text_config(), "hidden_size", 0) or 1
        assert self.sampler is not None
        passes = len(self.substitutes) + 1
        self._batches = judged_batches(self.data, self.sampler.with_variants, 4 * width * passes)
        self.data = _to_fit(self.data)
        self._dense = [self._model.stream(batch) for batch in self.data.batches]
        self._new = self._dense  # up to its own block a substitute changes nothing

    def changes(self, advance: Callable[[str], None]) -> list[float]:
        """Gives the change of the output per sample, for every substitute."""
        stream, run = self._model.stream, self._model.answer_of
        whole = [stream(batch, keep=True) for batch in self._batches]
        apart = [[stream(batch, keep=True) for batch in self._batches] for _ in self.substitutes]
        left: set[int] = set()  # passes that differ by now
        found = [0.0] * len(apart)
        with self._model.paused([*self._dense, *whole, *(own for one in apart for own in one)]):
            while name := common_block([*self._dense, *whole]):
                with self._model.loaded(name) as dense:
                    readings = self._readings(name, dense)
                    answers = {
                        place: self._answers(own, dense, readings, apart[place])
                        for place, own in enumerate(self.substitutes)
                        if own.block == name
                    }
                    for fitted in self._dense:
                        fitted.answer(readings.answer(fitted))
                    for index, one in enumerate(whole):
                        same = run(one)
                        one.answer(same)
                        for place, passes in enumerate(apart):
                            two = passes[index]
                            mine = answers[place][index] if place in answers else same
                            two.answer(run(two) if place in left else mine)
                            if one.output is not None:
                                assert self.sampler is not None
                                found[place] += self.sampler.change(
                                    one.output, two.output, one.batch
                                )
                                two.output = None  # at once: logits are large
                        one.output = None
                    left |= answers.keys()
                advance(name)
        samples = sum(len(next(iter(batch.values()))) for batch in self._batches)
        return [change / samples for change in found]

    def _answers(
        self, own: Substitute, dense: Any, readings: Readings, passes: Sequence[Stream]
    ) -> list[Any]:
        """Fits a substitute, and runs its block."""
        self._entries = {(self._path(e), e.parameter): e for e in own.entries}
        new = copy.deepcopy(dense)
        del new.forward  # the copy runs by itself; the original pauses its stream
        result = BlockResult(own.block, {}, {})
        pair = BlockPair(self._blocks[own.block], dense, new, result, readings)
        routing = self._fit(pair, lambda *_: None, fresh=True)
        found = []
        for index, one in enumerate(passes):
            routing.current = index
            if routing.inside:  # experts follow the dense routing
                self._model.answer_of(one)
            found.append(self._model.answer_of(one, new.forward))
        return found

    def _moments(self, pair: BlockPair, group: Group, inside: str) -> dict[bool, LayerMoments]:
        if not pair.result.layers and all(map(_stays, group)):  # there is nothing to fit
            return {entry.bias: LayerMoments() for entry in group}
        return super()._moments(pair, group, inside)

    def _path(self, entry: LayerPlan) -> str:
        self._paths[entry.name] = self.source.keymap.runtime_name(entry.name) or ""
        return self._paths[entry.name]


def _stays(entry: LayerPlan) -> bool:
    """Whether what is left of a layer is as it was."""
    terms = [term for part in entry.parts for term in part.terms]
    return entry.reads is None and all(term.structure == WIDTH for term in terms)


def _to_fit(data: CalibrationData) -> CalibrationData:
    """Some of the samples that are not held out."""
    part = data.part(FITTED)
    batches = [part.batches[index] for index in part.fitted]
    places = tuple(part.place(index) for index in part.fitted)
    return replace(part, batches=batches, holdout=[], origins={}, places=places)


def judged_batches(
    data: CalibrationData,
    extended: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    bytes_per_token: int,
) -> list[Mapping[str, Tensor]]:
    """Batches held out, cut to what is enough and to what all passes have memory for."""
    places = [*data.holdout] or [*range(len(data.batches))]
    batches = [data.batches[place] for place in places]
    whole = [*map(extended, batches)]
    samples = sum(len(next(iter(batch.values()))) for batch in whole)
    tokens = sum(_tokens(batch) for batch in whole)
    most = min(JUDGED_TOKENS, MOST_BYTES / bytes_per_token)
    step = max(1, round(max(samples / JUDGED, tokens / most)))
    cut = list[Mapping[str, Tensor]]()
    for batch in batches:
        size = len(next(iter(batch.values())))
        chosen = slice(min(size - 1, step // 2), None, step)
        cut.append(extended({key: value[chosen] for key, value in batch.items()}))
    return cut


def _tokens(batch: Mapping[str, Tensor]) -> int:
    first = next(iter(batch.values()))
    return len(first) * (first.shape[1] if first.ndim == 2 else 256)


@dataclass
class Substitutions:
    """Substitutes of all blocks, and the predicted losses that are scaled by what they change."""

    fraction: float  # kept fraction that sizes are taken close to
    _items: list[tuple[Substitute, Callable[[float], None]]] = field(default_factory=list)
    """Those to try, each with what scales the losses that it tells of."""
    usual: float | None = None  # what the output changes by for a predicted loss of one
    _changes: dict[int, float] = field(default_factory=dict)
    """What the output changes by with substitutes, by their place: the same for every budget."""
    _corrected: set[str] = field(default_factory=set)
    """Methods whose losses are scaled already."""

    def begin_again(self) -> None:
        """Forget what was scaled, for another budget; losses are as predicted once more."""
        self.usual = None
        self._corrected.clear()

    def of_layers(
        self,
        block: Block,
        found: Mapping[str, LayerCandidates],
        entries: Mapping[str, LayerPlan],
    ) -> None:
        """Takes the layers of each half of a block, by each of the structures they are offered.

        Candidates are by weight name, entries by path.
        """
        for half in _halves(block):
            own = [entries[layer.name] for layer in half if layer.name in entries]
            own = [entry for entry in own if entry.key in found]
            for name in dict.fromkeys(n for e in own for n in found[e.key].offers):
                sized = {e.key: found[e.key].closest(name, self.fraction) for e in own}
                options = {key: option for key, option in sized.items() if option is not None}
                chosen = {key: Form(option.label) for key, option in options.items()}  # type: ignore[arg-type]
                inputs = [[entries.get(layer.name) for layer in group] for group in block.groups]
                groups = [[e for e in group if e in own and e.key in chosen] for group in inputs]
                members = [e for g in groups if g for e in regrouped(g, chosen)[0]]
                if members and not any(map(_shares_factors, members)):
                    items = [found[entry.key] for entry in members]
                    lost = sum(options[item.key].loss for item in items)
                    self._add(name, block, members, lost, partial(_scale_layers, items, name))

    def of_channels(
        self, block: Block, found: Sequence[Widths], entries: Mapping[str, LayerPlan]
    ) -> None:
        """Takes some channels and, where that is offered, none; entries are by path."""
        by_weight = {f"{path}.{entry.parameter}": entry for path, entry in entries.items()}
        by_key = {entry.key: entry for entry in entries.values()}
        for own in found:
            for size in _sizes(own.coupling, self.fraction):
                forms = forms_of({own.coupling: size}, by_weight)
                narrow = [by_key[k].model_copy(update=form._asdict()) for k, form in forms]
                scale = partial(_scale_widths, own, size)
                more = "some" if size else "none"
                self._add(WIDTH, block, narrow, float(own.losses[size]), scale, more)

    def correct(
        self,
        methods: Collection[str],
        walk: Callable[[Sequence[Substitute]], SubstitutionWalk],
        progress: Progress,
    ) -> None:
        """Runs the model with substitutes by these methods, and scales predicted losses in place.

        What was tried before is not tried again.
        """
        fresh = {*methods} - self._corrected
        items = {n: item for n, item in enumerate(self._items) if item[0].method in fresh}
        if not items:
            return
        self._corrected |= fresh
        order = [*dict.fromkeys(own.block for own, _ in items.values())]
        chosen = some_of(order)
        substitutes = {n: own for n, (own, _) in items.items() if own.block in chosen}
        if untried := [n for n in substitutes if n not in self._changes]:
            progress.stage(f"trying {len(untried)} candidates", len(chosen), "blocks")
            walked = walk([substitutes[n] for n in untried])
            changes = walked.changes(lambda block: progress.advance(1, block))
            self._changes |= dict(zip(untried, changes, strict=True))
        ratios = [max(0.0, self._changes[n]) / own.predicted for n, own in substitutes.items()]
        if self.usual is None:
            self.usual = float(np.median(ratios))
        if self.usual > 0:
            found = dict[tuple[str, ...], dict[int, float]]()
            for own, ratio in zip(substitutes.values(), ratios, strict=True):
                factor = min(MOST, max(LEAST, ratio / self.usual))
                found.setdefault(own.kind, {})[order.index(own.block)] = factor
            for own, scale in items.values():
                if own.kind in found:
                    scale(_between(found[own.kind], order.index(own.block)))

    def _add(
        self,
        method: str,
        block: Block,
        entries: Iterable[LayerPlan],
        predicted: float,
        scale: Callable[[float], None],
        *more: str,
    ) -> None:
        if predicted > 0:
            entries = tuple(entries)
            kind = (method, *(entry.role for entry in entries), *more)
            self._items.append((Substitute(method, kind, block.name, entries, predicted), scale))


def some_of(blocks: Sequence[str]) -> list[str]:
    """Takes as many blocks as are tried, at equal distances, the first and the last one too."""
    count = min(len(blocks), BLOCKS)
    return [blocks[round(place)] for place in np.linspace(0, len(blocks) - 1, count)]


def _between(known: Mapping[int, float], place: int) -> float:
    """A factor, or what lies between those of the nearest blocks."""
    places = sorted(known)
    logs = np.log([known[one] for one in places])
    return float(np.exp(np.interp(place, places, logs)))


def count_of(
    block: Block, methods: Collection[str], fraction: float, attentions: Sequence[Attention]
) -> int:
    """Counts the substitutes of a block, by what it is made of alone."""
    structured = [name for name in methods if name != WIDTH]
    found = len(_halves(block)) * len(structured)
    if WIDTH in methods:
        whole = [whole_heads(item) for item in attentions if item.block == block.name]
        joined = [*couplings(block), *filter(None, whole)]
        found += sum(len(_sizes(own, fraction)) for own in joined)
    return found


def _sizes(coupling: Coupling, fraction: float) -> list[int]:
    """None where that is offered, and the size closest to the fraction."""
    nothing, some = coupling.sizes[:1], coupling.sizes[1:-1]
    near = min(some, key=lambda size: abs(size - fraction * coupling.size), default=0)
    return sorted({*(nothing if nothing == [0] else []), *([near] if near else [])})


def _scale_layers(items: Sequence[LayerCandidates], name: str, factor: float) -> None:
    """Scales what one structure loses in some layers."""
    for offers in (own for item in items for own in (item.offers, item.quick, item.alone)):
        if name in offers:
            offers[name] = [replace(own, loss=own.loss * factor) for own in offers[name]]


def _scale_widths(own: Widths, size: int, factor: float) -> None:
    """Scales what fewer channels lose, or none; nothing loses more than none of them."""
    factors = torch.ones_like(own.losses)
    if size == 0:
        factors[0] = factor
        own.losses = own.losses * factors
        return
    factors[1:] = factor
    own.losses = own.losses * factors
    if 0 in own.coupling.sizes:
        own.losses = own.losses.clamp(max=float(own.losses[0]))


def _halves(block: Block) -> list[list[Layer]]:
    """Layers of a block that have channels in common: scores, values, neurons; else of one input.

    Those are apart since they may lose most different amounts: of a last attention that a mean is
    taken over the values cost a hundred times what the scores do.
    """
    joined = [{*own.layers} for own in couplings(block)]
    known = set[Layer]().union(*joined)
    joined += [{*group} - known for group in block.groups]
    found: list[set[Layer]] = []
    for half in filter(None, joined):
        for other in [other for other in found if other & half]:
            found.remove(other)
            half |= other
        found.append(half)
    return [[layer for layer in block.layers if layer in half] for half in found]


def _shares_factors(entry: LayerPlan) -> bool:
    layouts = (layout for part in entry.parts for layout in part.terms)
    return any(isinstance(structure(own.structure), SharesFactors) for own in layouts)
