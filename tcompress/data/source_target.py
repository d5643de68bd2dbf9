"""Texts and what they are to become, as models with an encoder and a decoder learn from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tcompress.data.encoding import TextEncoder
from tcompress.data.inputs import decoder_start, inputs_of
from tcompress.errors import DataError
from tcompress.models import SourceModel


def check_seq2seq(source: SourceModel) -> None:
    """Refuse a model that does not make a text of another one.

    Raises:
        DataError: It has no encoder, no decoder, or its family has no head for that.
    """
    if _head_of(source) is None or not inputs_of(source).decoder:
        raise DataError(
            f"`{source.id}` is a `{source.model_class.__name__}`, and the task `seq2seq` needs an "
            "encoder with a decoder",
            "give a model such as T5 or BART, or choose another task (`causal-lm`: text alone)",
        )


@dataclass(frozen=True)
class SourceTargetEncoder:
    """Writes pairs of texts as inputs and labels. Use `SourceTargetEncoder.of`."""

    encoder: TextEncoder
    shifted: Callable[[Tensor], Tensor]  # inputs of the decoder, by labels: (tokens,)

    @classmethod
    def of(cls, source: SourceModel, encoder: TextEncoder) -> SourceTargetEncoder:
        """Take the shift of labels from the model's own class."""
        return cls(encoder, _shift_of(source))

    def rows(
        self, sources: Sequence[str], targets: Sequence[str], name: str
    ) -> list[dict[str, Tensor]]:
        """Write pairs of texts as the model's inputs, with `labels`; nothing is padded.

        Label t is what the decoder is to write once it has read its inputs 0 to t.

        Args:
            sources: Texts that the encoder reads.
            targets: Texts that the decoder writes.
            name: Of the data, for errors.

        Raises:
            DataError: A text has no token.
        """
        rows = self.encoder.encode(sources)
        for row, tokens in zip(rows, self.encoder.encode_targets(targets), strict=True):
            if not row or not tokens:
                raise DataError(
                    f"`{name}` has texts without any token", "remove rows with empty texts"
                )
            labels = torch.tensor(tokens)
            row |= {"labels": labels, "decoder_input_ids": self.shifted(labels)}
            if "decoder_attention_mask" in self.encoder.inputs.names:
                row["decoder_attention_mask"] = torch.ones_like(labels)
        return rows


def _head_of(source: SourceModel) -> Any:
    """Class of a model's family that makes texts of others, if there is one."""
    from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING as KINDS

    kind = KINDS.get(type(source.config), None)
    return kind[0] if isinstance(kind, tuple | list) else kind


def _shift_of(source: SourceModel) -> Callable[[Tensor], Tensor]:
    """Shift of a family: one token behind its start, unless it begins with that of a language."""
    start = decoder_start(source)
    model = replace(source, model_class=_head_of(source)).meta_model()
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    # A config may leave the start to `generation_config.json`, which classes do not read.
    if shift is not None:
        with suppress(TypeError, ValueError, RuntimeError):
            shift(torch.tensor([[start, start]]))
            return lambda labels: shift(labels[None])[0]  # type: ignore[no-any-return]
    return lambda labels: torch.cat([labels.new_tensor([start]), labels[:-1]])
