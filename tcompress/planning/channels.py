"""Channels between layers: which layers write them, which read them, and how many may stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tcompress.roles import Block, Layer, Part
from tcompress.structures.modules.linear import Channels

# Neurons lie between a feed-forward's first layers and its last one; the values of heads between
# the value and the output projection. What queries and keys compute meets in scores, which only
# know their product: no layer reads them.

Kind = Literal["neurons", "values", "scores"]

_KINDS: tuple[tuple[Kind, tuple[str, ...], str | None], ...] = (
    ("scores", ("q", "k"), None),
    ("scores", ("cross_q", "cross_k"), None),
    ("values", ("v",), "o"),
    ("values", ("cross_v",), "cross_o"),
    ("neurons", ("gate", "up"), "down"),
    ("neurons", ("gate", "up", "experts_gate_up"), "experts_down"),
)


@dataclass(frozen=True)
class Coupling:
    """Channels that layers of one block have in common."""

    kind: Kind
    writers: tuple[tuple[Layer, Part], ...]
    reader: Layer | None  # None for scores
    size: int  # channels of one head, or all neurons

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers that it changes, each once."""
        own = [layer for layer, _ in self.writers]
        return tuple(dict.fromkeys([*own, *([self.reader] if self.reader else [])]))

    @property
    def step(self) -> int:
        """Sizes are multiples of it, which kernels are fast with."""
        if self.kind == "neurons":
            return 16 if self.size >= 256 else max(1, self.size // 16)
        return 4 if self.size >= 16 else 1

    def written(self, part: Part, kept: int) -> Channels:
        """What a writer's part keeps."""
        return self._channels(part.size, kept)

    def read(self, kept: int) -> Channels:
        """What the reader keeps."""
        assert self.reader is not None
        return self._channels(self.reader.in_features, kept)

    def _channels(self, width: int, kept: int) -> Channels:
        padded = self.kind != "neurons"
        return Channels(groups=width // self.size, size=self.size, kept=kept, padded=padded)

    def near(self, asked: float) -> int:
        """The size that is closest to one, or to a fraction, that was asked for."""
        wanted = asked * self.size if asked < 1 else asked
        return min(self.size, max(self.step, round(wanted / self.step) * self.step))


def couplings(block: Block) -> Iterator[Coupling]:
    """Lists what layers of a block have in common, as far as it may be made smaller."""
    parts = [(layer, part) for layer in block.layers for part in layer.parts]
    for kind, names, reader_role in _KINDS:
        reader = next((own for own in block.layers if own.role == reader_role), None)
        writers = tuple(
            (layer, part)
            for layer, part in parts
            if part.name in names
            and (reader is None or (layer.kind == "experts") == (reader.kind == "experts"))
        )
        if not writers or (reader_role and reader is None):
            continue
        if kind == "scores" and (len(writers) != 2 or not all(own.bilinear for own, _ in writers)):
            continue
        sizes = {part.size if kind == "neurons" else layer.head for layer, part in writers}
        size = sizes.pop() if len(sizes) == 1 else None
        widths = [part.size for _, part in writers] + ([reader.in_features] if reader else [])
        whole = size and size > 1 and all(width % size == 0 for width in widths)
        if size and whole and (kind != "neurons" or len({*widths}) == 1):
            yield Coupling(kind, writers, reader, size)


Sizes = Mapping[Kind, float]
"""How many channels stay, by kind: a number, or a fraction below one."""
