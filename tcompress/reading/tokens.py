"""From texts to token ids, as the model's own tokenizer writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tcompress.errors import DataError
from tcompress.reading.inputs import Inputs, decoder_start, longest_text, vocabulary_size
from tcompress.source import SourceModel
from tcompress.source.text import first_line

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_CHUNK = 256  # texts handed to the tokenizer at a time


@dataclass(frozen=True)
class TextEncoder:
    """Writes texts as inputs of a model. Use `TextEncoder.open`.

    Attributes:
        tokenizer: The model's tokenizer.
        inputs: Inputs of the model.
        limit: Most tokens of a text.
        pad: Token to fill up with; its attention mask is 0.
        start: First token of the decoder, None without decoder.
        place: Folder of the tokenizer, for errors.
        vocabulary: Number of tokens that the model knows, None if unknown.
    """

    tokenizer: Any
    inputs: Inputs
    limit: int
    pad: int
    start: int | None
    place: str
    vocabulary: int | None

    @classmethod
    def open(cls, source: SourceModel, inputs: Inputs, max_length: int) -> TextEncoder:
        """Load the tokenizer of a model.

        Raises:
            DataError: If the model comes without one.
        """
        tokenizer = load_tokenizer(source.folder, trust_remote_code=source.trust_remote_code)
        limits = (max_length, longest_text(source, inputs), tokenizer.model_max_length)
        vocabulary = vocabulary_size(source, inputs)
        # A padding token may have been added to a tokenizer whose model never learnt of it.
        fillers = [
            token
            for token in (tokenizer.pad_token_id, tokenizer.eos_token_id)
            if token is not None and (vocabulary is None or token < vocabulary)
        ]
        return cls(
            tokenizer=tokenizer,
            inputs=inputs,
            limit=int(min(limit for limit in limits if limit is not None)),
            pad=fillers[0] if fillers else 0,
            start=decoder_start(source) if inputs.decoder else None,
            place=str(source.folder),
            vocabulary=vocabulary,
        )

    @property
    def end(self) -> int | None:
        """The token that ends a text, if the model knows it."""
        token = self.tokenizer.eos_token_id
        known = token is not None and (self.vocabulary is None or token < self.vocabulary)
        return token if known else None

    def encode(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, Tensor]]:
        """Write each text as the model's inputs: 1-D tensors of one length, not padded.

        Texts without tokens give an empty dictionary.

        Args:
            texts: The texts.
            pairs: Second texts that are read together with the first ones.

        Raises:
            DataError: If the tokenizer and the model do not belong together.
        """
        rows: list[dict[str, Tensor]] = []
        for first in range(0, len(texts), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            second = None if pairs is None else list(pairs[chunk])
            rows.extend(self._encode(list(texts[chunk]), second))
        return rows

    def encode_whole(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Write each text as tokens, however long it is."""
        for first in range(0, len(texts), _CHUNK):
            chunk = list(texts[first : first + _CHUNK])
            for text, tokens in zip(chunk, self.tokenizer(chunk)["input_ids"], strict=True):
                if tokens:
                    self._check(max(tokens), text)
                yield tokens

    def _encode(self, texts: list[str], pairs: list[str] | None) -> list[dict[str, Tensor]]:
        columns = self.tokenizer(texts, pairs, truncation=True, max_length=self.limit)
        types = columns.get("token_type_ids")
        rows: list[dict[str, Tensor]] = []
        for index, tokens in enumerate(columns["input_ids"]):
            if not tokens:
                rows.append({})
                continue
            self._check(max(tokens), texts[index])
            ids = torch.tensor(tokens, dtype=torch.long)
            row: dict[str, Tensor] = {}
            if self.inputs.text:
                row["input_ids"] = ids
                row["attention_mask"] = torch.ones_like(ids)
                if types is not None:
                    row["token_type_ids"] = torch.tensor(types[index], dtype=torch.long)
            if self.start is not None:
                row["decoder_input_ids"] = self._shifted(ids)
                row["decoder_attention_mask"] = torch.ones_like(ids)
            rows.append({name: row[name] for name in row if name in self.inputs.names})
        return rows

    def _shifted(self, ids: Tensor) -> Tensor:
        """What a decoder reads while it is taught to write this text."""
        if ids[0] == self.start:  # the tokenizer writes for the decoder
            return ids.clone()
        return torch.cat([ids.new_tensor([self.start]), ids[:-1]])

    def _check(self, largest: int, text: str) -> None:
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise DataError(
                f"the tokenizer in `{self.place}` gives token {largest} for `{text[:40]}`, "
                f"but the model knows only the tokens 0 to {self.vocabulary - 1}",
                hint="put the model's own tokenizer into its folder, "
                "or convert without data: `--calib none`",
            )


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer in a folder.

    Raises:
        DataError: If there is none.
    """
    from transformers import AutoTokenizer

    reason = "no vocabulary file"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        # Without its files a tokenizer fails in whatever line first misses them.
        reason = first_line(error).rstrip(":")
    else:
        # Most tokenizers can also be built from nothing, and then know no words.
        own = set(getattr(tokenizer, "vocab_files_names", {}).values())
        if not own or any((folder / name).is_file() for name in {*_TOKENIZER_FILES, *own}):
            return tokenizer
    raise DataError(
        f"`{folder}` has no usable tokenizer ({reason}), which reading text needs",
        hint="add the tokenizer's files to the folder (`tokenizer.save_pretrained`), "
        "or convert without data: `--calib none`",
    )
