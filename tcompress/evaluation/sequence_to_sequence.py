"""Texts made of others, as in translation and summaries: token by token, and as a whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tcompress.data.encoding import check_seq2seq, encode_seq2seq
from tcompress.data.examples import Examples, Needs
from tcompress.data.inputs import longest_text
from tcompress.evaluation.language_modeling import LabelledTokens, PredictedTokens
from tcompress.evaluation.statistics import ratio
from tcompress.evaluation.task_base import Measured, Row, Runner
from tcompress.models import SourceModel

_SPARE = 8  # tokens that may be generated beyond the longest target: texts that go on are wrong


@dataclass(frozen=True)
class Generating:
    """How a model writes a text by itself: its likeliest token at each step.

    Whatever else its generation config says, such as a first token of a language, is kept.
    """

    model: PreTrainedModel
    config: Any = field(repr=False)
    ignored: Collection[int]  # tokens that begin, end or fill up texts

    @classmethod
    def of(cls, model: PreTrainedModel, tokens: int, tokenizer: Any) -> Generating:
        """Set so many tokens as the limit; special ones of the tokenizer count as no text."""
        config: Any = deepcopy(model.generation_config)
        for name, value in {
            "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": tokens,
            "max_length": None, "min_length": 0, "early_stopping": False, "length_penalty": 1.0,
        }.items():  # fmt: skip
            setattr(config, name, value)
        names = ("decoder_start_token_id", "pad_token_id", "eos_token_id", "forced_bos_token_id")
        special = [getattr(config, name, None) for name in names]
        kinds = ("pad", "bos", "eos", "cls", "sep")
        special += [getattr(tokenizer, f"{kind}_token_id", None) for kind in kinds]
        tokens_of = [item if isinstance(item, list) else [item] for item in special]
        return cls(model, config, {*chain.from_iterable(tokens_of)} - {None})

    def texts(self, batch: Row) -> list[list[int]]:
        """Return the tokens of each text, without those that begin, end or fill up."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        generated: Any = self.model.generate(**inputs, generation_config=self.config)
        return [self.plain(row) for row in generated.tolist()]

    def plain(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self.ignored]


class Seq2Seq(LabelledTokens):
    """Tokens of a target that are guessed right from those before, and whole targets."""

    name = "seq2seq"
    needs = Needs((2, 2), generates=True)
    head = "seq2seq"

    @classmethod
    def check(cls, source: SourceModel, examples: Examples) -> None:
        check_seq2seq(source)
        super().check(source, examples)

    def prepare(self) -> PredictedTokens:
        (sources, targets), reader = self.examples.texts, self.reader
        rows = encode_seq2seq(self.source, reader.encoder, sources, targets, self.examples.name)
        counts = np.array([len(row["labels"]) for row in rows])
        facts: dict[str, Any] = {"targets": int(counts.sum())}
        facts["truncated"] = reader.truncated(rows, sources)
        if self.options.exact_match is not False:
            facts["decoding"] = "greedy, else as the model's generation config says"
        both = [{"input_ids": torch.cat([row["input_ids"], row["labels"]])} for row in rows]
        return PredictedTokens(len(rows), reader.signature(both), facts, (), rows, counts)

    def run(self, runner: Runner, reference: Any) -> Measured:
        guessed = partial(self.guessed, runner, reference, "token_accuracy", use_cache=False)
        if self.options.exact_match is False:
            return guessed()
        prepared, same = self.prepared, np.zeros(self.prepared.units)
        longest = int(prepared.counts.max()) + _SPARE
        limit = longest_text(self.source, self.reader.encoder.inputs)
        longest = longest if limit is None else min(longest, limit)
        generating = Generating.of(runner.model, longest, self.reader.tokenizer)

        def generate(chosen: list[int], batch: Row) -> None:
            for index, tokens in zip(chosen, generating.texts(batch), strict=True):
                target: list[int] = prepared.rows[index]["labels"].tolist()
                same[index] = tokens == generating.plain(target)

        (accuracy, loss, *agreement), likeliest = guessed(generate)
        return Measured([accuracy, loss, ratio("exact_match", same), *agreement], likeliest)
