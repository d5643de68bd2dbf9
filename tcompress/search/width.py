"""Fewer channels as candidates, for all layers that have channels in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tcompress.fitting.channel_orders import Widths
from tcompress.planning.couplings import Coupling
from tcompress.planning.entries import Form, LayerPlan
from tcompress.search.knapsack import Option
from tcompress.structures.modules.linear import Channels, PartLayout
from tcompress.structures.width import WidthLayout

Forms = tuple[tuple[str, Form | None], ...]
"""What layers become, by name of the weight; None for those that stay dense."""


@dataclass
class WidthSite:
    """Layers that have channels in common, and what they may become together."""

    found: Sequence[Widths]
    sizes: list[tuple[int, ...]]  # of each option, by coupling
    options: list[Option]  # labelled with `Forms`

    @property
    def couplings(self) -> list[Coupling]:
        return [own.coupling for own in self.found]

    def lose_as_found(self) -> None:
        """Takes losses of options from those of the couplings, which have changed."""
        self.options = [
            replace(own, loss=sum(map(_loss, self.found, chosen)))
            for own, chosen in zip(self.options, self.sizes, strict=True)
        ]

    @property
    def is_attention(self) -> bool:
        """Whether it is about whole heads, of what other sites tell the parts of."""
        return self.couplings[0].kind == "heads"

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the layers' weights in the checkpoint."""
        label: Any = self.options[-1].label
        return tuple(key for key, _ in label)


def width_site(
    found: Sequence[Widths], entries: Mapping[str, LayerPlan], units: Mapping[str, float]
) -> WidthSite | None:
    """Lists what the layers of some couplings may become together.

    Entries are by weight name in the model. A parameter of a layer costs its unit, by weight name;
    layers without one are not sized, and nothing is offered.
    """
    layers = {layer for own in found for layer in own.coupling.layers}
    if not {entries[layer.weight_name].key for layer in layers} <= units.keys():
        return None
    couplings = [own.coupling for own in found]
    sizes = list(product(*(own.coupling.sizes for own in found)))
    options = []
    for chosen in sizes:
        forms = tuple(forms_of(dict(zip(couplings, chosen, strict=True)), entries))
        cost = round(sum(_parameters(form) * units[key] for key, form in forms))
        options.append(Option(cost, sum(map(_loss, found, chosen)), forms))
    return WidthSite(found, sizes, options)


def _loss(own: Widths, size: int) -> float:
    return float(own.losses[size])


def _parameters(form: Form) -> int:
    return sum(part.terms[0].in_features * part.out_features for part in form.parts)


def forms_of(
    chosen: Mapping[Coupling, int], entries: Mapping[str, LayerPlan]
) -> Iterator[tuple[str, Form]]:
    """Gives plain matrices of these sizes to all layers of some couplings, by weight name."""
    layers = dict.fromkeys(layer for coupling in chosen for layer in coupling.layers)
    for layer in layers:
        reads: Channels | None = None
        written: dict[str, Channels] = {}
        for coupling, kept in chosen.items():
            if kept == coupling.size:
                continue
            if coupling.reader == layer:
                reads = coupling.read(kept)
            written |= {
                p.name: coupling.written(p, kept) for w, p in coupling.writers if w == layer
            }
        parts = []
        for part in layer.parts:
            channels = written.get(part.name)
            term = WidthLayout(
                in_features=reads.left if reads else layer.in_features,
                out_features=channels.left if channels else part.size,
            )
            parts.append(PartLayout(name=part.name, terms=(term,), channels=channels))
        yield entries[layer.weight_name].key, Form(tuple(parts), reads)
