"""Weights that will be stored in few bits: passes see them rounded, steps change them whole.

The gradient at the rounded weights is taken for that at the whole ones (the straight-through
estimator: Bengio et al., arXiv:1308.3432), so that training makes up for the rounding too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from tcompress.linalg.rounding import Rounding, nearest, quantize, usual_scales
from tcompress.models import KeyMap
from tcompress.training.setup import Setup


@dataclass
class RoundedWeights:
    """The trained weights of a model that is stored in few bits. Use `RoundedWeights.of`."""

    roundings: Mapping[str, Rounding]  # by name in the model; empty where nothing is rounded
    _scales: dict[object, dict[str, Tensor]] = field(default_factory=dict)
    """Scales that were looked for, by the state of the weights."""

    @classmethod
    def of(cls, setup: Setup) -> RoundedWeights:
        """Take over how the source's tensors are stored, but for those that are stored in parts."""
        store = setup.source.store
        keys = [key for key in store.keys() if store.rounding(key) is not None]  # noqa: SIM118
        if not keys:
            return cls({})
        keymap = KeyMap(setup.model, store.keys())
        roundings: dict[str, Rounding] = {}
        for name in setup.trained:
            sources = keymap.sources(name) if keymap.has(name) else None
            if sources is not None and sources.converter is None:
                rounding = store.rounding(sources.keys[0])
                roundings |= {} if rounding is None else {name: rounding}
        return cls(roundings)

    @contextmanager
    def applied(
        self, trained: Mapping[str, nn.Parameter], *, state: object = None, quick: bool = False
    ) -> Iterator[None]:
        """Round the weights while passes run, forward and backward.

        They are rounded as they will be stored. Where they were in the same `state` before, scales
        are known. A `quick` pass takes the usual ones: to look for better takes ten times as long.
        """
        chosen = {name: trained[name] for name in self.roundings}
        scales = self._scales.get(state)
        if scales is None:
            scales = {name: self._look(name, value, quick) for name, value in chosen.items()}
        if state is not None:
            self._scales[state] = scales
        whole = {name: value.data for name, value in chosen.items()}
        try:
            for name, value in chosen.items():
                value.data = nearest(whole[name], scales[name], self.roundings[name])
            yield
        finally:
            for name, value in chosen.items():
                value.data = whole[name]

    def _look(self, name: str, value: Tensor, quick: bool) -> Tensor:
        rounding = self.roundings[name]
        if quick:
            return usual_scales(value.data, rounding.bits, rounding.group)
        return quantize(value.data, rounding.bits, rounding.group)[1]
