"""Which weights share a bank: known before any of them has a size.

A bank is sized for all that use it, so a plan begins by asking every weight which bank it would
use. Experts use none: their moments differ, and one module applies them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tcompress.planning.entries import LayerPlan
from tcompress.structures import Site
from tcompress.structures.capabilities import shared_of
from tcompress.structures.linear import bank_layouts

Place = tuple[str, str]
"""Weight name in the checkpoint, and name of the part."""


@dataclass
class Pools:
    """Weights by the bank that they use.

    Attributes:
        left_out: Weights, by their names in the model, that turned out to stay dense.
    """

    left_out: set[str] = field(default_factory=set)
    _keys: dict[Place, Hashable] = field(default_factory=dict)
    _weights: set[str] = field(default_factory=set)
    _peers: dict[Hashable, list[Site]] = field(default_factory=lambda: defaultdict(list))

    def add(self, place: Place, site: Site, key: Hashable, weight: str) -> None:
        """Notes that a part of a weight, called `weight` in the model, would use a bank."""
        if weight not in self.left_out:
            self._keys[place] = key
            self._weights.add(weight)
            self._peers[key].append(site)

    def site(self, place: Place, site: Site) -> Site:
        """Returns a site with all that share its bank."""
        key = self._keys.get(place)
        return site if key is None else replace(site, peers=tuple(self._peers[key]))

    def without(self, refused: Iterable[str]) -> Pools | None:
        """Returns empty pools that leave out what was refused; None if all members were taken."""
        lost = self._weights & set(refused)
        return Pools(self.left_out | lost) if lost else None

    def lend(self, layers: Iterable[LayerPlan]) -> Iterator[LayerPlan]:
        """Lets the first layer that uses a bank own it, and the others refer to it."""
        owners: dict[Hashable, str] = {}
        for entry in layers:
            used: Mapping[str, Hashable] = {
                shared.name: self._keys[f"{entry.name}.{entry.parameter}", part.name]
                for part in entry.parts
                for layout in part.terms
                if (shared := shared_of(layout)) is not None
            }
            found = {name: owners.setdefault(key, entry.name) for name, key in used.items()}
            borrowed = {name: owner for name, owner in found.items() if owner != entry.name}
            yield entry.model_copy(update={"bank_of": borrowed}) if borrowed else entry


def note_of(layers: Sequence[LayerPlan]) -> tuple[str, ...]:
    """Says that a budget does not reach into banks, where there are any."""
    banks = sum(len(entry.own_banks) for entry in layers)
    if not banks:
        return ()
    users = sum(bool(bank_layouts(entry.parts)) for entry in layers)
    named = "one bank" if banks == 1 else f"{banks} banks"
    return (
        f"{users} layers share the tensors of {named}, each stored with the first layer that uses "
        "it; banks are sized alike, not by predicted loss",
    )
