"""Pieces of a tokenizer's vocabulary: which must stay so that every text can still be written.

A text whose tokens all stay is written with these tokens again. WordPiece takes the longest piece
that fits, and Unigram the likeliest sequence of pieces: with fewer pieces to choose from, the
choice stays the same as long as it is there. BPE joins pairs in the order of its merges: a token is
made by the same merges wherever it stands, so that it stays possible if all that it is made of
stays, and merges that make something else than what stays are left out (Sennrich et al., "Neural
Machine Translation of Rare Words with Subword Units", 2016; Kudo, "Subword Regularization", 2018).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

from tcompress.errors import PlanError

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_ASCII = frozenset(map(chr, range(128)))

Settings = Mapping[str, Any]
"""Content of a `tokenizer.json`."""


class PieceModel:
    """The model in a `tokenizer.json`: the pieces that texts are cut into, by their ids."""

    kind: ClassVar[str]
    ids: dict[str, int]

    def __init__(self, settings: Settings) -> None:
        self.settings: Settings = settings
        self.model: dict[str, Any] = settings["model"]
        self.ids = dict(self.model["vocab"])
        # Marks of pieces within a word, and at its end.
        self._inside = str(self.model.get("continuing_subword_prefix") or "")
        self._end = str(self.model.get("end_of_word_suffix") or "")

    @cached_property
    def names(self) -> dict[int, str]:
        return {index: piece for piece, index in self.ids.items()}

    @property
    def required(self) -> frozenset[str]:
        """Pieces without which some text could not be written any more."""
        return self._named | self._bytes | self._alphabet

    def needs(self, piece: str) -> frozenset[str]:
        """Pieces that a piece is made of, itself included."""
        return frozenset((piece,))

    @property
    def ranked(self) -> list[str] | None:
        """Pieces, frequent ones first, where the tokenizer's own order tells; None if not."""
        return None

    def cut(self, ids: Mapping[str, int]) -> dict[str, Any]:
        """Rewrite the model for pieces with new ids, which are 0, 1, 2 and so on."""
        return {**self.model, "vocab": dict(ids)}

    def bare(self, piece: str) -> str:
        """A piece without what only says where in a word it stands."""
        return (piece.removeprefix(self._inside) or piece).removesuffix(self._end) or piece

    @property
    def _named(self) -> frozenset[str]:
        """The piece for what is unknown."""
        unknown = self.model.get("unk_token")
        return frozenset((unknown,) if unknown in self.ids else ())

    @cached_property
    def _bytes(self) -> frozenset[str]:
        """Pieces of single bytes, which any character can be written in."""
        falls_back = bool(self.model.get("byte_fallback"))
        return frozenset(filter(_BYTE.fullmatch, self.ids)) if falls_back else frozenset()

    @cached_property
    def _alphabet(self) -> frozenset[str]:
        """Pieces of one character, and those with characters that no other piece has alone.

        Where bytes can take their place, those that other parts of the tokenizer know by name.
        """
        single = {piece for piece in self.ids if len(self.bare(piece)) == 1}
        if len(self._bytes) == 256 and "ByteFallback" in json.dumps(self.settings.get("decoder")):
            parts = map(self.settings.get, ("normalizer", "pre_tokenizer", "decoder"))
            spoken = _ASCII | {*json.dumps([*parts], ensure_ascii=False)}
            return frozenset(piece for piece in single if self.bare(piece) in spoken)
        return frozenset(single) | frozenset(self._irreplaceable(single))

    def _irreplaceable(self, single: set[str]) -> Iterator[str]:
        return (piece for piece in self.ids if not single.issuperset(self._symbols(piece)))

    def _symbols(self, piece: str) -> list[str]:
        """The characters of a piece, each as a piece is written that stands where it does."""
        bare = self.bare(piece)
        starts = not (self._inside and piece.startswith(self._inside) and piece != bare)
        parts = [self._inside + letter for letter in bare]
        if starts:
            parts[:1] = bare[:1]
        if self._end and piece.endswith(self._end) and piece != bare:
            parts[-1] += self._end
        return parts


class WordPiece(PieceModel):
    """The longest piece that fits, again and again."""

    kind = "WordPiece"


class Bpe(PieceModel):
    """Pairs joined in the order of merges."""

    kind = "BPE"

    @cached_property
    def _merges(self) -> list[tuple[str, str]]:
        pairs = self.model["merges"]
        return [(a, b) for a, b in (p.split(" ") if isinstance(p, str) else p for p in pairs)]

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        return {pair: rank for rank, pair in enumerate(self._merges)}

    def _joined(self, pair: tuple[str, str]) -> str:
        return pair[0] + pair[1].removeprefix(self._inside)

    def needs(self, piece: str) -> frozenset[str]:
        parts, needed = self._symbols(piece), {piece}
        while len(parts) > 1:
            ranks = ((self._ranks.get(pair), at) for at, pair in enumerate(pairwise(parts)))
            ranked = [(rank, at) for rank, at in ranks if rank is not None]
            if not ranked:
                return frozenset((piece,))  # no merges make it: it is found as a whole, or never
            _, at = min(ranked)
            needed.update(parts[at : at + 2])
            parts[at : at + 2] = [self._joined((parts[at], parts[at + 1]))]
        return frozenset(needed & self.ids.keys())

    def _irreplaceable(self, single: set[str]) -> Iterator[str]:
        return iter(())  # merges begin with characters, whatever these are

    @cached_property
    def ranked(self) -> list[str]:
        made = {self._joined(pair): None for pair in self._merges}
        rest = [piece for piece in self.ids if piece not in made]
        return [*(piece for piece in made if piece in self.ids), *rest]

    def cut(self, ids: Mapping[str, int]) -> dict[str, Any]:
        both = zip(self.model["merges"], self._merges, strict=True)
        merges = [as_is for as_is, pair in both if ids.keys() >= {*pair, self._joined(pair)}]
        return {**super().cut(ids), "merges": merges}


class Unigram(PieceModel):
    """The likeliest sequence of pieces."""

    kind = "Unigram"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.ids = {piece: index for index, (piece, _) in enumerate(self.model["vocab"])}

    @property
    def _named(self) -> frozenset[str]:
        """Unknown piece, and the piece of the lowest score, which says what unknown text costs.

        Pieces before the unknown one stay too: classes of Transformers have its number in them.
        """
        unknown, pairs = self.model.get("unk_id"), self.model["vocab"]
        lowest = min(pairs, key=lambda pair: pair[1])[0]
        first = pairs[: 0 if unknown is None else unknown + 1]
        return frozenset((lowest, *(name for name, _ in first)))

    @cached_property
    def ranked(self) -> list[str]:
        scores: list[tuple[str, float]] = sorted(self.model["vocab"], key=lambda pair: -pair[1])
        return [piece for piece, _ in scores]

    def cut(self, ids: Mapping[str, int]) -> dict[str, Any]:
        scores = dict(self.model["vocab"])
        made = {**self.model, "vocab": [[piece, scores[piece]] for piece in ids]}
        if (unknown := self.model.get("unk_id")) is not None:
            made["unk_id"] = ids[self.model["vocab"][unknown][0]]
        return made


MODELS: dict[str, type[PieceModel]] = {kind.kind: kind for kind in (WordPiece, Bpe, Unigram)}


def read_pieces(settings: Settings, place: str) -> PieceModel:
    """Read the pieces of a `tokenizer.json`; refuse kinds of models that have none, by name."""
    model = settings.get("model") or {}
    kind = str(model.get("type"))
    if kind not in MODELS:
        known = ", ".join(f"`{name}`" for name in MODELS)
        raise PlanError(
            f"the tokenizer in `{place}` is of the type `{kind}`, and a vocabulary can be cut for "
            f"{known}",
            "leave `vocab` out",
        )
    return MODELS[kind](settings)
