"""From texts to a model's inputs, for measuring."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tcompress.errors import DataError
from tcompress.evaluation.runner import Row
from tcompress.reading.inputs import inputs_of
from tcompress.reading.tokens import TextEncoder
from tcompress.source import SourceModel

_READ = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class TextReader:
    """Reads texts for a model. Use `TextReader.open`.

    Attributes:
        encoder: Writes texts as tokens.
    """

    encoder: TextEncoder

    @classmethod
    def open(cls, source: SourceModel, max_length: int) -> TextReader:
        """Loads the tokenizer of a model.

        Args:
            source: The model.
            max_length: Most tokens of a text; fewer if the model has fewer positions.

        Raises:
            DataError: The model has no tokenizer, or reads no texts alone.
        """
        with _hint_for_measuring(source):
            inputs = inputs_of(source)
            if not inputs.text or inputs.image or inputs.audio:
                raise DataError(
                    f"`{source.id}` is a `{source.model_class.__name__}`, which does not read "
                    "texts alone"
                )
            return cls(TextEncoder.open(source, inputs, max_length))

    @property
    def limit(self) -> int:
        """Most tokens of a text."""
        return self.encoder.limit

    @property
    def pad(self) -> int:
        """Token to pad with."""
        return self.encoder.pad

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.encoder.tokenizer

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Row]:
        """Writes texts, or pairs of texts, as inputs of the model.

        Raises:
            DataError: The tokenizer and the model do not belong together.
        """
        try:
            rows = self.encoder.encode(texts, pairs)
        except DataError as error:
            hint = "put the model's own tokenizer into its folder"
            raise DataError(error.message, hint) from error
        typed = any("token_type_ids" in row for row in rows)
        return [self._read(row, typed) for row in rows]

    def truncated(
        self, rows: Sequence[Row], texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> int:
        """Counts the texts that were longer than what was read of them."""
        full = [index for index, row in enumerate(rows) if len(row["input_ids"]) >= self.limit]
        if not full:
            return 0
        second = None if pairs is None else [pairs[index] for index in full]
        whole = self.tokenizer([texts[index] for index in full], second, verbose=False)
        return sum(len(ids) > self.limit for ids in whole["input_ids"])

    def _read(self, row: Row, typed: bool) -> Row:
        # A decoder's inputs are left to the model, which knows how its head reads them.
        kept = {name: row[name] for name in _READ if name in row}
        if not kept:  # an empty text still needs a place to be read at
            kept = {
                "input_ids": torch.tensor([self.pad]),
                "attention_mask": torch.ones(1, dtype=torch.long),
            }
            if typed:
                kept["token_type_ids"] = torch.zeros(1, dtype=torch.long)
        return kept


def signature(rows: Sequence[Row]) -> str:
    """Gives a hash of all tokens, by which models with the same tokens know each other."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row["input_ids"].numpy().tobytes() + b"|")
    return digest.hexdigest()


@contextmanager
def _hint_for_measuring(source: SourceModel) -> Iterator[None]:
    """Replaces hints on how a conversion does without data."""
    try:
        yield
    except DataError as error:
        hint = f"add the files of its tokenizer to `{source.folder}`, or choose another task"
        raise DataError(error.message, hint) from error
