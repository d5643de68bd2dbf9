"""Weights that will be stored in few bits: passes see them rounded, steps change them whole.

The gradient at the rounded weights is taken for that at the whole ones (the straight-through
estimator: Bengio et al., arXiv:1308.3432), so that training makes up for the rounding too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tcompress.artifact.manifest import Manifest
from tcompress.linalg.rounding import Rounding, nearest, quantize, rounded, usual_scales
from tcompress.models import KeyMap, SourceModel
from tcompress.options import Convert, Finetune
from tcompress.planning.costs import planned_storage, roundings
from tcompress.planning.entries import Storage
from tcompress.training.final_rounding import rounded_terms


@dataclass
class RoundedWeights:
    """The trained weights of a model that is stored in few bits. Use `RoundedWeights.of`."""

    roundings: Mapping[str, Rounding]  # by name in the model; empty where nothing is rounded
    later: frozenset[str] = frozenset()  # of these, what passes see whole; see `final_rounding`
    _scales: dict[object, dict[str, Tensor]] = field(default_factory=dict)
    """Scales that were looked for, by the state of the weights."""

    @classmethod
    def of(
        cls, model: nn.Module, source: SourceModel, roundings: Mapping[str, Rounding | None]
    ) -> RoundedWeights:
        """Take those that are trained, but for those that are stored in parts.

        Roundings are by key of the source.
        """
        by_name = _by_name(model, source, roundings)
        trained = (name for name, value in model.named_parameters() if value.requires_grad)
        chosen = {name: by_name[name] for name in trained if name in by_name}
        terms = rounded_terms(model, chosen)
        later = {id(value) for term in terms for value in term.parameters.values()}
        names = (name for name, value in model.named_parameters() if id(value) in later)
        return cls(chosen, frozenset(names))

    @contextmanager
    def applied(
        self, trained: Mapping[str, nn.Parameter], *, state: object = None, quick: bool = False
    ) -> Iterator[None]:
        """Round the weights while passes run, forward and backward.

        They are rounded as they will be stored. Where they were in the same `state` before, scales
        are those. A `quick` pass takes the usual ones: to look for better takes ten times as long.
        """
        chosen = {name: trained[name] for name in self.roundings if name not in self.later}
        scales = self._scales.get(state)
        if scales is None:
            scales = {}
            for name, value in chosen.items():
                how = value.data, self.roundings[name].bits, self.roundings[name].group
                scales[name] = usual_scales(*how) if quick else quantize(*how)[1]
        if state is not None:
            self._scales[state] = scales
        unrounded = {name: value.data for name, value in chosen.items()}
        try:
            for name, value in chosen.items():
                value.data = nearest(unrounded[name], scales[name], self.roundings[name])
            yield
        finally:
            for name, value in chosen.items():
                value.data = unrounded[name]


def round_frozen(
    model: nn.Module, source: SourceModel, roundings: Mapping[str, Rounding | None]
) -> None:
    """Give a model the weights that no step changes as they will be stored."""
    by_name = _by_name(model, source, roundings)
    for name, value in model.named_parameters():
        if name in by_name and not value.requires_grad:
            value.data = rounded(value.data, by_name[name])


def _by_name(
    model: Any, source: SourceModel, roundings: Mapping[str, Rounding | None]
) -> dict[str, Rounding]:
    """Find the roundings of a model's parameters, but for those that are stored in parts."""
    if not any(roundings.values()):
        return {}
    keymap = KeyMap(model, source.store.keys())
    by_name: dict[str, Rounding] = {}
    for name, _ in model.named_parameters():
        sources = keymap.sources(name) if keymap.has(name) else None
        if sources is not None and sources.converter is None:
            rounding = roundings.get(sources.keys[0])
            by_name |= {} if rounding is None else {name: rounding}
    return by_name


def storage_of(source: SourceModel, options: Finetune, manifest: Manifest | None) -> Storage | None:
    """Storage of the result: in the bits of the options, or as the model is stored.

    Raises:
        PlanError: Bits are asked for a word embedding, and the model has none.
    """
    if options.bits is None:
        return None if manifest is None else manifest.plan.storage
    recipe = Convert(bits=options.bits, embedding_bits=options.embedding_bits)
    return planned_storage(recipe, source)


def roundings_of(
    source: SourceModel, options: Finetune, manifest: Manifest | None
) -> dict[str, Rounding | None]:
    """Rounding of every stored tensor, by key; None for one that stays as it is."""
    store = source.store
    keys = [*store.keys()]
    if options.bits is None:
        return {key: store.rounding(key) for key in keys}
    entries = () if manifest is None else manifest.plan.entries
    rounding_of = roundings(source, storage_of(source, options, manifest), entries)
    return {key: rounding_of(key, store.shape(key), store.dtype(key)) for key in keys}
