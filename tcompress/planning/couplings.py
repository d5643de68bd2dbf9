"""Channels between layers: which layers write them, which read them, and how many may stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tcompress.roles import Attention, Block, Layer, Part
from tcompress.structures.modules.linear import Channels

# Neurons lie between a feed-forward's first layers and its last one; the values of heads between
# the value and the output projection. What queries and keys compute meets in scores, which only
# know their product: no layer reads them. Whole heads are all of these, with what positions turn;
# heads that share keys and values go together, and without any the attention is gone.

Kind = Literal["neurons", "values", "scores", "heads"]

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
    size: int  # channels of one head, all neurons, or all heads that have keys of their own

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers that it changes, each once."""
        readers = [self.reader] if self.reader else []
        return tuple(dict.fromkeys([*(layer for layer, _ in self.writers), *readers]))

    @property
    def step(self) -> int:
        """Sizes are multiples of it, which kernels are fast with."""
        if self.kind == "neurons":
            return 16 if self.size >= 256 else max(1, self.size // 16)
        return 4 if self.size >= 16 and self.kind != "heads" else 1

    @property
    def sizes(self) -> list[int]:
        """Numbers that may stay; the last one is the whole, but for heads."""
        if self.kind == "heads":
            return [*range(self.size)]
        goes = self.kind == "neurons" and self.writers[0][0].kind != "experts"
        return [*range(0 if goes else self.step, self.size, self.step), self.size]

    def written(self, part: Part, size: int) -> Channels:
        """Channels of a writer's part where so many stay."""
        return self._channels(part.size, size)

    def read(self, size: int) -> Channels:
        """Channels of the reader where so many stay."""
        assert self.reader is not None
        return self._channels(self.reader.in_features, size)

    def _channels(self, width: int, size: int) -> Channels:
        padded = self.kind != "neurons"
        if self.kind == "heads":
            return Channels(groups=1, size=width, kept=size * width // self.size, padded=padded)
        return Channels(groups=width // self.size, size=self.size, kept=size, padded=padded)

    def near(self, target: float) -> int:
        """The size that is closest to one, or to a fraction, that was asked for."""
        size = target * self.size if target < 1 else target
        return min(self.size, max(self.step, round(size / self.step) * self.step))


def couplings(block: Block) -> Iterator[Coupling]:
    """List what layers of a block have in common, as far as it may be made smaller."""
    parts = [(layer, part) for layer in block.layers for part in layer.parts]
    for kind, names, reader_role in _KINDS:
        reader = next((layer for layer in block.layers if layer.role == reader_role), None)
        writers = tuple(
            (layer, part)
            for layer, part in parts
            if part.name in names
            and (reader is None or (layer.kind == "experts") == (reader.kind == "experts"))
        )
        if not writers or (reader_role and reader is None):
            continue
        bilinear = len(writers) == 2 and all(layer.bilinear for layer, _ in writers)
        if kind == "scores" and not bilinear:
            continue
        sizes = {part.size if kind == "neurons" else layer.head for layer, part in writers}
        size = sizes.pop() if len(sizes) == 1 else None
        widths = [part.size for _, part in writers] + ([reader.in_features] if reader else [])
        divides = size and size > 1 and all(width % size == 0 for width in widths)
        if size and divides and (kind != "neurons" or len({*widths}) == 1):
            yield Coupling(kind, writers, reader, size)


def whole_heads(attention: Attention) -> Coupling | None:
    """All that heads of an attention compute, if something may stand in for it.

    Heads that are no parts of a projection, or are not alike, go all together.
    """
    projections = attention.layers
    layers = [projections[role] for role in ("q", "k", "v", "qkv") if role in projections]
    writers = tuple((layer, part) for layer in layers for part in layer.parts)
    reader, width = attention.layers.get("o"), attention.head_dim
    if attention.reason is not None or reader is None:
        return None
    widths = [part.size for _, part in writers] + [reader.in_features]
    if any(features % width for features in widths):
        return None
    separate = attention.alike and {part.name for _, part in writers} == {"q", "k", "v"}
    count = attention.key_heads
    heads = count if separate and not any(features % count for features in widths) else 1
    return Coupling("heads", writers, reader, heads)
