"""How well a language model predicts text: the next token, or hidden words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tcompress.artifact.averages import AGREEMENT
from tcompress.data.chats import ChatWriter
from tcompress.data.examples import Needs
from tcompress.errors import DataError
from tcompress.evaluation.statistics import DIVERGENCE, Statistic, ratio
from tcompress.evaluation.task_base import Row, Runner, Task, checked
from tcompress.models.vocabulary import Vocabulary

_PACKING = {"eos": "joined with the end token", "newline": "joined with newlines"}


_LIKELIEST = 32  # tokens of the baseline that are kept at each place; the others count as one


class _Compared:
    """What a model says at every place beside what its baseline said there.

    Kept are the likeliest tokens. The divergence is that of distributions over these of the
    baseline, with all others as one: never more than over the whole vocabulary.
    """

    def __init__(self, units: int, reference: Any, vocabulary: Vocabulary | None = None) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * units
        self._reference = reference
        # Tokens count by their numbers in the dense model, where a conversion left some out.
        self._ids = self._numbers = None
        if vocabulary is not None:
            self._ids = torch.tensor(vocabulary.ids)
            self._numbers = torch.full((max(vocabulary.before, int(self._ids.max()) + 1),), -1)
            self._numbers[self._ids] = torch.arange(len(self._ids))
        self._same, self._apart = np.zeros(units), np.zeros(units)

    def add(self, index: int, scores: Tensor) -> None:
        """Adds the logits of one unit.  # (places, vocabulary)."""
        own = scores.float().log_softmax(-1)
        best = own.topk(min(_LIKELIEST, own.shape[-1]))
        chosen = best.indices.cpu() if self._ids is None else self._ids[best.indices.cpu()]
        self.kept[index] = chosen.int(), best.values.cpu()
        if self._reference is None or not len(own):
            return
        tokens, wanted = self._reference[index]
        self._same[index] = int((chosen[:, 0] == tokens[:, 0]).sum())
        places = tokens.long() if self._numbers is None else self._numbers[tokens.long()]
        left = (places >= 0).to(own.device)  # tokens that the model has: others are in the rest
        found = own.gather(-1, places.clamp_min(0).to(own.device))
        one, two = wanted.to(own.device).double(), found.double()
        sums = ((x.exp() * left).sum(-1).clamp_max(1 - _TINY) for x in (one, two))
        rest, other = (torch.log1p(-total) for total in sums)
        apart = (one.exp() * (one - two) * left).sum(-1) + rest.exp() * (rest - other)
        self._apart[index] = float(apart.sum())

    def statistics(self, counts: Any) -> list[Statistic]:
        """How often both choose the same token, and KL(baseline || model) in nats per token."""
        if self._reference is None:
            return []
        tokens: Any = {"per_token": True}
        return [
            ratio(AGREEMENT, self._same, counts, **tokens),
            ratio(DIVERGENCE, self._apart, counts, higher_is_better=False, **tokens),
        ]


_TINY = 1e-12


class Perplexity(Task):
    """Perplexity in windows that do not overlap; every token is predicted once."""

    name = "perplexity"
    needs = Needs(texts=(1, 1), chats=True)
    head = "causal-lm"
    max_length = 1024
    batch_size = 8
    unit = "windows"

    def prepare(self) -> None:
        reader, examples, pack = self.reader, self.examples, self.wanted.pack or "eos"
        self._start, end = _starting_tokens(reader.tokenizer), reader.encoder.end
        self._end = [] if end is None else [end]
        self._pack = "newline" if pack == "eos" and not self._end else pack
        # Tokens at the start of each window that are not predicted.
        self._context = len(self._start) or 1
        if reader.limit <= self._context:
            hint = f"give `--max-length` more than {self._context}"
            raise DataError(f"windows of {reader.limit} tokens leave nothing to predict", hint)
        texts = self._texts() if examples.chats else examples.texts[0]
        texts = [text for text in texts if text or pack == "newline"]
        self._rows = list(self._windows(texts))
        if not self._rows:
            hint = "give longer texts, or name another column"
            raise DataError(f"the texts of `{examples.name}` have no tokens to predict", hint)
        self._lengths = np.array([len(row["input_ids"]) - self._context for row in self._rows])
        self._bytes = sum(len(text.encode()) for text in texts)
        self.signature = self.reader.signature(self._rows)
        start = "its own start token" if self._start else "the last token of the one before"
        self.facts = {
            "packing": f"texts {_PACKING.get(self._pack, 'each on its own')}, cut into windows of "
            f"{reader.limit} tokens that begin with {start}; every other token is predicted once",
            "tokens": int(self._lengths.sum()),
            "bytes": self._bytes,
            "windows": len(self._rows),
            **({"chats": "written by the tokenizer's template"} if examples.chats else {}),
        }
        token, unknown = reader.tokenizer.unk_token_id, 0
        if token is not None and token not in (*self._end, *self._start):
            unknown = sum(int((row["input_ids"] == token).sum()) for row in self._rows)
        if unknown:
            self.facts["unknown_tokens"] = unknown
            self.notes = [f"{unknown:,} tokens stand for text that the tokenizer does not know"]

    def _texts(self) -> list[str]:
        """Chats as the model's own template writes them."""
        writer = ChatWriter(self.reader.tokenizer, self.examples.name)
        written = [writer(cell) or "" for cell in self.examples.chats]
        writer.close()
        return written

    @property
    def units(self) -> int:
        return len(self._rows)

    def run(self, runner: Runner) -> Sequence[Statistic]:
        losses = np.empty(self.units)
        compared = _Compared(self.units, self.reference, self.reader.vocabulary)
        config = runner.model.config
        options: Any = {"use_cache": False} if hasattr(config, "use_cache") else {}
        for chosen, batch in runner.batches(self._rows, self.reader.pad):
            logits = runner.model(**batch, **options).logits
            for index, scores, ids in zip(chosen, logits, batch["input_ids"], strict=True):
                first = self._context
                rows = slice(first - 1, first - 1 + self._lengths[index])
                losses[index] = self._loss(scores[rows], ids[first:][: self._lengths[index]])
                compared.add(index, scores[rows])
        # Windows have about as many bytes as their share of the tokens says.
        sizes = self._lengths * (self._bytes / self._lengths.sum())
        tokens: Any = {"higher_is_better": False, "per_token": True}
        self.predictions = compared.kept
        return [
            ratio("perplexity", losses, self._lengths, finish=np.exp, **tokens),
            ratio("bits_per_byte", losses, sizes * math.log(2), higher_is_better=False),
            ratio("nats_per_token", losses, self._lengths, **tokens),
            *compared.statistics(self._lengths),
        ]

    def _loss(self, scores: Tensor, truth: Tensor) -> float:
        """One window at a time, since the logits of a large vocabulary take much memory."""
        losses = cross_entropy(scores.float(), truth, reduction="none")
        return float(checked(losses).sum(dtype=torch.float64))

    def _windows(self, texts: Sequence[str]) -> Iterator[Row]:
        """Yields windows; the last one of a stream may be short."""
        size = self.reader.limit - self._context
        for stream in self._streams(texts):
            # Without start tokens a window begins with the last token of the one before.
            whole = stream if self._start else [*self._end, *stream]
            more = 0 if self._start else 1
            for first in range(0, len(whole) - more, size):
                row = torch.tensor([*self._start, *whole[first : first + size + more]])
                yield {"input_ids": row, "attention_mask": torch.ones_like(row)}

    def _streams(self, texts: Sequence[str]) -> Iterator[list[int]]:
        if self._pack == "newline":
            yield from self._tokens(["\n".join(texts)])
        elif self._pack == "none":
            yield from self._tokens(texts)
        else:
            joined: list[int] = []
            for ids in self._tokens(texts):
                joined += [*self._end, *ids] if joined else ids
            yield joined

    def _tokens(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yields the tokens of texts, without those that the tokenizer adds."""
        encoder = self.reader.encoder
        for text in texts:
            found = encoder.tokenizer(text, add_special_tokens=False, verbose=False)
            ids: list[int] = found["input_ids"]
            if encoder.vocabulary is not None and ids and max(ids) >= encoder.vocabulary:
                raise DataError(
                    f"the tokenizer in `{encoder.place}` gives token {max(ids)}, "
                    f"but the model knows only the tokens 0 to {encoder.vocabulary - 1}",
                    "put the model's own tokenizer into its folder",
                )
            yield ids


def _starting_tokens(tokenizer: Any) -> list[int]:
    """Tokens that a tokenizer writes before every text."""
    whole: list[int] = tokenizer("a")["input_ids"]
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    places = range(len(whole) - len(plain) + 1) if plain else ()
    return next((whole[:at] for at in places if whole[at : at + len(plain)] == plain), [])


_SHARE = 0.15


class MaskedLM(Task):
    """Tokens under masks, 15 % of each text."""

    name = "masked-lm"
    needs = Needs(texts=(1, 1))
    head = "masked-lm"
    max_length = 256

    def prepare(self) -> None:
        tokenizer = self.reader.tokenizer
        if tokenizer.mask_token_id is None:
            raise DataError(
                f"the tokenizer in `{self.reader.encoder.place}` has no mask token",
                "put the model's own tokenizer into its folder, or choose another task",
            )
        texts = self.examples.texts[0]
        rows = self.reader.encode(texts)
        self.signature = self.reader.signature(rows)
        self._hidden = _positions(rows, list(tokenizer.all_special_ids), self.wanted.seed)
        self._truth = [row["input_ids"][at] for row, at in zip(rows, self._hidden, strict=True)]
        self._counts = np.array([len(at) for at in self._hidden])
        if not self._counts.sum():
            what = f"the texts of `{self.examples.name}` have no words to hide"
            raise DataError(what, "give longer texts")
        self._rows = [
            {**row, "input_ids": row["input_ids"].index_fill(0, at, tokenizer.mask_token_id)}
            for row, at in zip(rows, self._hidden, strict=True)
        ]
        self.facts = {
            "masked": int(self._counts.sum()),
            "masking": f"{_SHARE:.0%} of the tokens of a text, at least one; all become the mask",
            "truncated": self.reader.truncated(rows, texts),
        }

    def run(self, runner: Runner) -> Sequence[Statistic]:
        hits, losses = np.zeros(self.units), np.zeros(self.units)
        compared = _Compared(self.units, self.reference, self.reader.vocabulary)
        for chosen, batch in runner.batches(self._rows, self.reader.pad):
            logits = runner.model(**batch).logits
            for index, scores in zip(chosen, logits, strict=True):
                at, truth = self._hidden[index], self._truth[index].to(runner.device)
                found = checked(scores[at].float())
                hits[index] = int((found.argmax(-1) == truth).sum())
                losses[index] = float(cross_entropy(found, truth, reduction="sum"))
                compared.add(index, found)
        self.predictions = compared.kept
        return [
            ratio("accuracy", hits, self._counts, per_token=True),
            ratio("cross_entropy", losses, self._counts, higher_is_better=False, per_token=True),
            *compared.statistics(self._counts),
        ]


def _positions(rows: Sequence[Row], special: list[int], seed: int) -> list[Tensor]:
    """Draws the positions to hide in each text, none of special tokens."""
    generator = np.random.default_rng(seed)
    found = []
    for row in rows:
        words = np.flatnonzero(~np.isin(row["input_ids"].numpy(), special))
        count = max(round(_SHARE * len(words)), 1) if len(words) else 0
        chosen = generator.choice(words, count, replace=False) if count else words
        found.append(torch.from_numpy(np.sort(chosen)))
    return found
