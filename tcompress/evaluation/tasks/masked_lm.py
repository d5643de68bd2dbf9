"""Guessing words that are hidden in a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from tcompress.errors import DataError
from tcompress.evaluation.runner import Row, Runner, checked
from tcompress.evaluation.statistics import Statistic, ratio
from tcompress.evaluation.tasks.base import Prepared, Task
from tcompress.evaluation.texts import TextReader, signature
from tcompress.integration.models import Head
from tcompress.reading.examples import Examples, Needs
from tcompress.source import SourceModel

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
        return _Prepared(reader, examples, seed)


class _Prepared(Prepared):
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
