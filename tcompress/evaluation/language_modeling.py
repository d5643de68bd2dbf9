"""How well a language model predicts text: the next token, or hidden words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tcompress.data.examples import Examples, Needs
from tcompress.errors import DataError, InputError
from tcompress.evaluation.statistics import Statistic, ratio
from tcompress.evaluation.task_base import (
    Prepared,
    Row,
    Runner,
    Task,
    TextReader,
    checked,
    signature,
)
from tcompress.hf.opening import Head
from tcompress.models import SourceModel

# How well a causal language model predicts text.


Pack = Literal["eos", "newline", "none"]
PACKS: tuple[str, ...] = get_args(Pack)


@dataclass(frozen=True)
class Perplexity(Task):
    """Perplexity in windows that do not overlap; every token is predicted once.

    Attributes:
        pack: How texts become one stream: `eos` joins them with the end token (a newline if there
            is none), `newline` with newlines, `none` leaves each on its own.
    """

    pack: str = "eos"

    name: ClassVar[str] = "perplexity"
    summary: ClassVar[str] = "how well a causal language model predicts text"
    needs: ClassVar[Needs] = Needs(texts=(1, 1))
    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "bits_per_byte", "nats_per_token")
    head: ClassVar[Head | None] = "causal-lm"
    max_length: ClassVar[int | None] = 1024

    def __post_init__(self) -> None:
        if self.pack not in PACKS:
            known = ", ".join(f"`{name}`" for name in PACKS)
            raise InputError(f"`--pack {self.pack}` is not known; it can be {known}")

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        reader = TextReader.open(source, max_length or self.max_length or 0)
        return _Prepared(reader, examples, self.pack)


class _Prepared(Prepared):
    batch_size = 8
    unit = "windows"

    def __init__(self, reader: TextReader, examples: Examples, pack: str) -> None:
        super().__init__()
        self._pad = reader.pad
        stream = _Streams(reader, pack)
        texts = [text for text in examples.texts[0] if text or pack == "newline"]
        self._rows = list(stream.windows(texts))
        if not self._rows:
            raise DataError(
                f"the texts of `{examples.name}` have no tokens to predict",
                "give longer texts, or name another column",
            )
        self._context = stream.context
        self._lengths = np.array([len(row["input_ids"]) - self._context for row in self._rows])
        self._bytes = sum(len(text.encode()) for text in texts)
        self.signature = signature(self._rows)
        self.facts |= {
            "packing": stream.words,
            "tokens": int(self._lengths.sum()),
            "bytes": self._bytes,
            "windows": len(self._rows),
        }
        if unknown := stream.unknown(self._rows):
            self.facts["unknown_tokens"] = unknown
            self.notes = [f"{unknown:,} tokens stand for text that the tokenizer does not know"]

    @property
    def units(self) -> int:
        return len(self._rows)

    def run(self, runner: Runner) -> Sequence[Statistic]:
        losses = np.empty(self.units)
        for chosen, batch in runner.batches(self._rows, self._pad):
            logits = _logits(runner, batch)
            for index, scores, ids in zip(chosen, logits, batch["input_ids"], strict=True):
                losses[index] = self._loss(scores, ids, self._lengths[index])
        # Windows have about as many bytes as their share of the tokens says.
        sizes = self._lengths * (self._bytes / self._lengths.sum())
        tokens: Any = {"higher_is_better": False, "per_token": True}
        return [
            ratio("perplexity", losses, self._lengths, finish=np.exp, **tokens),
            ratio("bits_per_byte", losses, sizes * math.log(2), higher_is_better=False),
            ratio("nats_per_token", losses, self._lengths, **tokens),
        ]

    def _loss(self, logits: Tensor, ids: Tensor, length: int) -> float:
        first = self._context
        # One window at a time, since the logits of a large vocabulary take much memory.
        losses = cross_entropy(
            logits[first - 1 : first - 1 + length].float(),
            ids[first : first + length],
            reduction="none",
        )
        return float(checked(losses).sum(dtype=torch.float64))


def _logits(runner: Runner, batch: Row) -> Tensor:
    """Runs a language model without cache.  # (batch, tokens, vocabulary)."""
    logits: Tensor = runner.model(**batch, **_without_cache(runner.model)).logits
    return logits


def _without_cache(model: Any) -> dict[str, bool]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


class _Streams:
    """Joins texts and cuts them into windows.

    Attributes:
        context: Tokens at the start of each window that are not predicted.
        words: What is done, for a protocol.
    """

    def __init__(self, reader: TextReader, pack: str) -> None:
        self._reader, self._tokenizer = reader, reader.tokenizer
        self._start = _starting_tokens(self._tokenizer)
        self._end = reader.encoder.end
        self._pack = "newline" if pack == "eos" and self._end is None else pack
        self.context = len(self._start) or 1
        if reader.limit <= self.context:
            raise DataError(
                f"windows of {reader.limit} tokens leave nothing to predict",
                f"give `--max-length` more than {self.context}",
            )
        joined = {"eos": "joined with the end token", "newline": "joined with newlines"}
        start = "its own start token" if self._start else "the last token of the one before"
        self.words = (
            f"texts {joined.get(self._pack, 'each on its own')}, cut into windows of "
            f"{reader.limit} tokens that begin with {start}; every other token is predicted once"
        )

    def windows(self, texts: Sequence[str]) -> Iterator[Row]:
        """Yields windows; the last one of a stream may be short."""
        for stream in self._streams(texts):
            if self._start:
                size = self._reader.limit - len(self._start)
                cut = [
                    [*self._start, *stream[first : first + size]]
                    for first in range(0, len(stream), size)
                ]
            else:
                size = self._reader.limit - 1
                before = [] if self._end is None else [self._end]
                whole = [*before, *stream]
                cut = [whole[first : first + size + 1] for first in range(0, len(whole) - 1, size)]
            for ids in cut:
                row = torch.tensor(ids, dtype=torch.long)
                yield {"input_ids": row, "attention_mask": torch.ones_like(row)}

    def unknown(self, rows: Sequence[Row]) -> int:
        """Counts tokens that stand for unknown text."""
        token = self._tokenizer.unk_token_id
        if token is None or token in (self._end, *self._start):
            return 0
        return sum(int((row["input_ids"] == token).sum()) for row in rows)

    def _streams(self, texts: Sequence[str]) -> Iterator[list[int]]:
        if self._pack == "newline":
            yield from self._plain(["\n".join(texts)])
        elif self._pack == "none":
            yield from self._plain(texts)
        else:
            joined: list[int] = []
            end = [] if self._end is None else [self._end]
            for ids in self._plain(texts):
                joined += [*end, *ids] if joined else ids
            yield joined

    def _plain(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yields the tokens of texts, without those that the tokenizer adds."""
        known = self._reader.encoder.vocabulary
        for text in texts:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
            if known is not None and ids and max(ids) >= known:
                raise DataError(
                    f"the tokenizer in `{self._reader.encoder.place}` gives token {max(ids)}, "
                    f"but the model knows only the tokens 0 to {known - 1}",
                    "put the model's own tokenizer into its folder",
                )
            yield ids


def _starting_tokens(tokenizer: Any) -> list[int]:
    """Tokens that a tokenizer writes before every text."""
    whole: list[int] = tokenizer("a")["input_ids"]
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    for first in range(len(whole) - len(plain) + 1):
        if plain and whole[first : first + len(plain)] == plain:
            return whole[:first]
    return []


# Guessing words that are hidden in a text.


_SHARE = 0.15


@dataclass(frozen=True)
class MaskedLM(Task):
    """Tokens under masks, 15 % of each text."""

    name: ClassVar[str] = "masked-lm"
    summary: ClassVar[str] = "words that are hidden in a text"
    needs: ClassVar[Needs] = Needs(texts=(1, 1))
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "cross_entropy")
    head: ClassVar[Head | None] = "masked-lm"
    max_length: ClassVar[int | None] = 256

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        reader = TextReader.open(source, max_length or self.max_length or 0)
        return _PreparedMasked(reader, examples, seed)


class _PreparedMasked(Prepared):
    def __init__(self, reader: TextReader, examples: Examples, seed: int) -> None:
        super().__init__()
        mask = reader.tokenizer.mask_token_id
        if mask is None:
            raise DataError(
                f"the tokenizer in `{reader.encoder.place}` has no mask token",
                "put the model's own tokenizer into its folder, or choose another task",
            )
        texts = examples.texts[0]
        rows = reader.encode(texts)
        self.signature = signature(rows)
        self._pad = reader.pad
        self._hidden = _positions(rows, list(reader.tokenizer.all_special_ids), seed)
        self._truth = [row["input_ids"][at] for row, at in zip(rows, self._hidden, strict=True)]
        self._counts = np.array([len(at) for at in self._hidden])
        if not self._counts.sum():
            raise DataError(
                f"the texts of `{examples.name}` have no words to hide", "give longer texts"
            )
        self._rows = [_masked(row, at, mask) for row, at in zip(rows, self._hidden, strict=True)]
        self.facts |= {
            "masked": int(self._counts.sum()),
            "masking": f"{_SHARE:.0%} of the tokens of a text, at least one; all become the mask",
            "truncated": reader.truncated(rows, texts),
        }

    @property
    def units(self) -> int:
        return len(self._rows)

    def run(self, runner: Runner) -> Sequence[Statistic]:
        hits, losses = np.zeros(self.units), np.zeros(self.units)
        for chosen, batch in runner.batches(self._rows, self._pad):
            logits = runner.model(**batch).logits
            for index, scores in zip(chosen, logits, strict=True):
                at, truth = self._hidden[index], self._truth[index].to(runner.device)
                found = checked(scores[at].float())
                hits[index] = int((found.argmax(-1) == truth).sum())
                losses[index] = float(cross_entropy(found, truth, reduction="sum"))
        return [
            ratio("accuracy", hits, self._counts, per_token=True),
            ratio("cross_entropy", losses, self._counts, higher_is_better=False, per_token=True),
        ]


def _positions(rows: Sequence[Row], special: list[int], seed: int) -> list[torch.Tensor]:
    """Draws the positions to hide in each text, none of special tokens."""
    generator = np.random.default_rng(seed)
    found = []
    for row in rows:
        words = np.flatnonzero(~np.isin(row["input_ids"].numpy(), special))
        count = max(round(_SHARE * len(words)), 1) if len(words) else 0
        chosen = generator.choice(words, count, replace=False) if count else words
        found.append(torch.from_numpy(np.sort(chosen)))
    return found


def _masked(row: Row, positions: torch.Tensor, mask: int) -> Row:
    ids = row["input_ids"].clone()
    ids[positions] = mask
    return {**row, "input_ids": ids}
