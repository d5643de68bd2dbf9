"""Predictions of text by a language model: the next token, or hidden words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tcompress.artifact.averages import AGREEMENT
from tcompress.data.chats import ChatWriter
from tcompress.data.encoding import TextEncoder
from tcompress.data.examples import Needs
from tcompress.data.inputs import IGNORED
from tcompress.errors import DataError, counted
from tcompress.evaluation.statistics import DIVERGENCE, Array, Statistic, ratio
from tcompress.evaluation.task_base import (
    EvaluationTask,
    Measured,
    Prepared,
    Row,
    Runner,
    TextReader,
    checked,
)
from tcompress.models.vocabulary import Vocabulary

_LIKELIEST = 32  # tokens of the baseline that are kept at each position; the others count as one
_TINY = 1e-12


class Compared:
    """Predictions of a model at every position beside those of its baseline there.

    Kept are the likeliest tokens. The divergence is that of distributions over these of the
    baseline, with all others as one: never more than over the whole vocabulary.
    """

    def __init__(self, units: int, reference: Any, vocabulary: Vocabulary | None = None) -> None:
        self.likeliest: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * units
        self._reference = reference
        # Tokens count by their numbers in the dense model, where a conversion left some out.
        self._ids = self._numbers = None
        if vocabulary is not None:
            self._ids = torch.tensor(vocabulary.ids)
            self._numbers = torch.full((max(vocabulary.before, int(self._ids.max()) + 1),), -1)
            self._numbers[self._ids] = torch.arange(len(self._ids))
        self._agreements, self._divergences = np.zeros(units), np.zeros(units)

    def add(self, index: int, scores: Tensor) -> None:
        """Add the logits of one unit.  # (positions, vocabulary)."""
        logs = scores.float().log_softmax(-1)
        best = logs.topk(min(_LIKELIEST, logs.shape[-1]))
        chosen = best.indices.cpu() if self._ids is None else self._ids[best.indices.cpu()]
        self.likeliest[index] = chosen.int(), best.values.cpu()
        if self._reference is None or not len(logs):
            return
        tokens, reference = self._reference[index]
        self._agreements[index] = int((chosen[:, 0] == tokens[:, 0]).sum())
        columns = tokens.long() if self._numbers is None else self._numbers[tokens.long()]
        # Tokens that the model lacks are in the rest.
        present = columns >= 0
        gathered = logs.gather(-1, columns.clamp_min(0).to(logs.device)).cpu()
        p, q = reference.double(), gathered.double()
        sums = ((x.exp() * present).sum(-1).clamp_max(1 - _TINY) for x in (p, q))
        p_rest, q_rest = (torch.log1p(-total) for total in sums)
        divergence = (p.exp() * (p - q) * present).sum(-1) + p_rest.exp() * (p_rest - q_rest)
        self._divergences[index] = float(divergence.sum())

    def statistics(self, counts: Any) -> list[Statistic]:
        """Frequency of the same token being chosen, and KL(baseline || model) in nats per token."""
        if self._reference is None:
            return []
        return [
            ratio(AGREEMENT, self._agreements, counts, per_token=True),
            ratio(DIVERGENCE, self._divergences, counts, higher_is_better=False, per_token=True),
        ]


_JOINED = {"eos": "joined with the end token", "newline": "joined with newlines"}


@dataclass(frozen=True)
class Packing:
    """Cutting texts into windows as long as is read, in which every token is predicted once."""

    encoder: TextEncoder
    joined: Literal["eos", "newline", "none"]
    start: tuple[int, ...]  # tokens that the tokenizer writes before every text
    end: tuple[int, ...]  # the token that ends a text, if there is one

    @classmethod
    def of(cls, reader: TextReader, pack: Literal["eos", "newline", "none"]) -> Packing:
        """Read the tokens at both ends of a text; without an end token newlines join texts."""
        end = () if reader.encoder.end is None else (reader.encoder.end,)
        joined: Literal["eos", "newline", "none"] = "newline" if pack == "eos" and not end else pack
        return cls(reader.encoder, joined, tuple(_starting_tokens(reader.tokenizer)), end)

    @property
    def context(self) -> int:
        """Number of tokens at the start of each window that are not predicted."""
        return len(self.start) or 1

    @property
    def words(self) -> str:
        """Description of the windows, for a protocol."""
        start = "its own start token" if self.start else "the last token of the one before"
        return (
            f"texts {_JOINED.get(self.joined, 'each on its own')}, cut into windows of "
            f"{self.encoder.limit} tokens that begin with {start}; every other token is predicted "
            "once"
        )

    def windows(self, texts: Sequence[str]) -> Iterator[Row]:
        """Yield windows; the last one of a stream may be short."""
        size = self.encoder.limit - self.context
        for stream in self._streams(texts):
            # Without start tokens a window begins with the last token of the one before.
            ids = stream if self.start else [*self.end, *stream]
            overlap = 0 if self.start else 1
            for first in range(0, len(ids) - overlap, size):
                row = torch.tensor([*self.start, *ids[first : first + size + overlap]])
                yield {"input_ids": row, "attention_mask": torch.ones_like(row)}

    def _streams(self, texts: Sequence[str]) -> Iterator[list[int]]:
        if self.joined != "eos":
            yield from self._tokens(["\n".join(texts)] if self.joined == "newline" else texts)
            return
        stream: list[int] = []
        for ids in self._tokens(texts):
            stream += [*self.end, *ids] if stream else ids
        yield stream

    def _tokens(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the tokens of texts, without those that the tokenizer adds."""
        encoder = self.encoder
        for text in texts:
            encoded = encoder.tokenizer(text, add_special_tokens=False, verbose=False)
            ids: list[int] = encoded["input_ids"]
            if encoder.vocabulary is not None and ids and max(ids) >= encoder.vocabulary:
                raise DataError(
                    f"the tokenizer in `{encoder.place}` gives token {max(ids)}, "
                    f"but the model knows only the tokens 0 to {encoder.vocabulary - 1}",
                    "put the model's own tokenizer into its folder",
                )
            yield ids


def _starting_tokens(tokenizer: Any) -> list[int]:
    """Tokens that a tokenizer writes before every text."""
    ids: list[int] = tokenizer("a")["input_ids"]
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    starts = range(len(ids) - len(plain) + 1) if plain else ()
    return next((ids[:at] for at in starts if ids[at : at + len(plain)] == plain), [])


@dataclass(frozen=True, eq=False)
class PredictedTokens(Prepared):
    """Texts of which tokens are predicted."""

    counts: Array = field(default_factory=lambda: np.empty(0))  # of these tokens: (units,)


@dataclass(frozen=True, eq=False)
class TokenWindows(PredictedTokens):
    """Texts in windows."""

    context: int = 1  # tokens at the start of each window that are not predicted
    bytes: int = 0  # of all texts


class Perplexity(EvaluationTask):
    """Perplexity in windows that do not overlap; every token is predicted once."""

    name = "perplexity"
    needs = Needs(texts=(1, 1), chats=True)
    head = "causal-lm"
    max_length = 1024
    batch_size = 8
    unit = "windows"
    prepared: TokenWindows

    def prepare(self) -> TokenWindows:
        reader, examples = self.reader, self.examples
        pack = self.options.pack or "eos"
        packing = Packing.of(reader, pack)
        if reader.limit <= packing.context:
            hint = f"give `--max-length` more than {packing.context}"
            raise DataError(f"windows of {reader.limit} tokens leave nothing to predict", hint)
        texts = examples.texts[0]
        if examples.chats:  # as the model's own template writes them
            writer = ChatWriter(reader.tokenizer, examples.name)
            texts = [writer(cell) or "" for cell in examples.chats]
            writer.close()
        texts = [text for text in texts if text or pack == "newline"]
        rows = list(packing.windows(texts))
        if not rows:
            hint = "give longer texts, or name another column"
            raise DataError(f"the texts of `{examples.name}` have no tokens to predict", hint)
        counts = np.array([len(row["input_ids"]) - packing.context for row in rows])
        size = sum(len(text.encode()) for text in texts)
        if packing.joined == "newline":  # which are predicted too
            size += max(len(texts) - 1, 0)
        facts = {
            "packing": packing.words,
            "tokens": int(counts.sum()),
            "bytes": size,
            "windows": len(rows),
            **({"chats": "written by the tokenizer's template"} if examples.chats else {}),
        }
        notes: tuple[str, ...] = ()
        if unknown := _unknown_tokens(reader, packing, rows):
            facts["unknown_tokens"] = unknown
            tokens = counted(unknown, "token stands", "tokens stand")
            notes = (f"{tokens} for text that the tokenizer does not know",)
        signature, context = reader.signature(rows), packing.context
        return TokenWindows(len(rows), signature, facts, notes, rows, counts, context, size)

    def run(self, runner: Runner, reference: Any) -> Measured:
        prepared = self.prepared
        losses, counts, first = np.empty(prepared.units), prepared.counts, prepared.context
        compared = Compared(prepared.units, reference, self.reader.vocabulary)
        config = runner.model.config
        options: Any = {"use_cache": False} if hasattr(config, "use_cache") else {}
        for chosen, batch in runner.batches(prepared.rows, self.reader.pad):
            logits = runner.model(**batch, **options).logits
            for index, scores, ids in zip(chosen, logits, batch["input_ids"], strict=True):
                guessed = scores[first - 1 :][: counts[index]]
                truth = ids[first:][: counts[index]]
                # One window at a time: the logits of a large vocabulary take much memory.
                parts = checked(cross_entropy(guessed.float(), truth, reduction="none"))
                # On the CPU, since not all devices have float64.
                losses[index] = float(parts.cpu().sum(dtype=torch.float64))
                compared.add(index, guessed)
        # Windows have about as many bytes as their share of the tokens says.
        sizes = counts * (prepared.bytes / counts.sum())
        tokens: Any = {"higher_is_better": False, "per_token": True}
        statistics = [
            ratio("perplexity", losses, counts, finish=np.exp, **tokens),
            ratio("bits_per_byte", losses, sizes * math.log(2), higher_is_better=False),
            ratio("nats_per_token", losses, counts, **tokens),
            *compared.statistics(counts),
        ]
        return Measured(statistics, compared.likeliest)


def _unknown_tokens(reader: TextReader, packing: Packing, rows: Sequence[Row]) -> int:
    """Count the tokens that stand for text without any of its own."""
    token = reader.tokenizer.unk_token_id
    if token is None or token in (*packing.end, *packing.start):
        return 0
    return sum(int((row["input_ids"] == token).sum()) for row in rows)


class LabelledTokens(EvaluationTask):
    """Tokens that each row has as its `labels`."""

    prepared: PredictedTokens

    def guessed(
        self,
        runner: Runner,
        reference: Any,
        accuracy: str,
        heard: Callable[[list[int], Row], None] | None = None,
        **options: Any,
    ) -> Measured:
        """Measure the `accuracy` of a model's guesses, their cross-entropy and their agreement.

        Each batch, and the indices of its rows, may be `heard`; the model gets `options`.
        """
        prepared, counts = self.prepared, self.prepared.counts
        hits, losses = np.zeros(prepared.units), np.zeros(prepared.units)
        compared = Compared(prepared.units, reference, self.reader.vocabulary)
        for chosen, batch in runner.batches(prepared.rows, self.reader.pad):
            labels = batch.pop("labels")
            logits = runner.model(**batch, **options).logits
            for index, scores, truth in zip(chosen, logits, labels, strict=True):
                is_token = truth != IGNORED
                guessed, true = checked(scores[is_token].float()), truth[is_token]
                hits[index] = int((guessed.argmax(-1) == true).sum())
                losses[index] = float(cross_entropy(guessed, true, reduction="sum"))
                compared.add(index, guessed)
            if heard is not None:
                heard(chosen, batch)
        statistics = [
            ratio(accuracy, hits, counts, per_token=True),
            ratio("cross_entropy", losses, counts, higher_is_better=False, per_token=True),
            *compared.statistics(counts),
        ]
        return Measured(statistics, compared.likeliest)


_SHARE = 0.15


class MaskedLM(LabelledTokens):
    """Tokens under masks, 15 % of each text."""

    name = "masked-lm"
    needs = Needs(texts=(1, 1))
    head = "masked-lm"
    max_length = 256

    def prepare(self) -> PredictedTokens:
        tokenizer = self.reader.tokenizer
        if tokenizer.mask_token_id is None:
            raise DataError(
                f"the tokenizer in `{self.reader.encoder.place}` has no mask token",
                "put the model's own tokenizer into its folder, or choose another task",
            )
        texts = self.examples.texts[0]
        rows = self.reader.encode(texts)
        positions = _positions(rows, list(tokenizer.all_special_ids), self.options.seed)
        counts = np.array([*map(len, positions)])
        if not counts.any():
            what = f"the texts of `{self.examples.name}` have no words to hide"
            raise DataError(what, "give longer texts")
        facts = {
            "masked": int(counts.sum()),
            "masking": f"{_SHARE:.0%} of the tokens of a text, at least one; all become the mask",
            "truncated": self.reader.truncated(rows, texts),
        }
        signature, hidden = self.reader.signature(rows), []
        for row, at in zip(rows, positions, strict=True):
            ids = row["input_ids"]
            labels = torch.full_like(ids, IGNORED).index_copy(0, at, ids[at])
            masked = ids.index_fill(0, at, tokenizer.mask_token_id)
            hidden.append({**row, "input_ids": masked, "labels": labels})
        return PredictedTokens(len(rows), signature, facts, (), hidden, counts)

    def run(self, runner: Runner, reference: Any) -> Measured:
        return self.guessed(runner, reference, "accuracy")


def _positions(rows: Sequence[Row], special: list[int], seed: int) -> list[Tensor]:
    """Draw the positions to hide in each text, none of special tokens."""
    generator = np.random.default_rng(seed)
    positions = []
    for row in rows:
        words = np.flatnonzero(~np.isin(row["input_ids"].numpy(), special))
        count = max(round(_SHARE * len(words)), 1) if len(words) else 0
        chosen = generator.choice(words, count, replace=False) if count else words
        positions.append(torch.from_numpy(np.sort(chosen)))
    return positions
