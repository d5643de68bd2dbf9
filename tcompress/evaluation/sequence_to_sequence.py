"""Texts made of others, as in translation and summaries: token by token, and as a whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from tcompress.data.examples import Examples, Needs
from tcompress.data.inputs import IGNORED, longest_text
from tcompress.data.source_target import SourceTargetEncoder, check_seq2seq
from tcompress.evaluation.language_modeling import Compared, PredictedTokens
from tcompress.evaluation.statistics import ratio
from tcompress.evaluation.task_base import EvaluationTask, Measured, Row, Runner, checked
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

    def texts(self, batch: Row) -> Iterator[list[int]]:
        """Yield the tokens of each text, without those that begin, end or fill up."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        generated: Any = self.model.generate(**inputs, generation_config=self.config)
        for row in generated.tolist():
            yield self.plain(row)

    def plain(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token not in self.ignored]


class Seq2Seq(EvaluationTask):
    """Tokens of a target that are guessed right from those before, and whole targets."""

    name = "seq2seq"
    needs = Needs((2, 2), generates=True)
    head = "seq2seq"
    prepared: PredictedTokens

    @classmethod
    def check(cls, source: SourceModel, examples: Examples) -> None:
        check_seq2seq(source)
        super().check(source, examples)

    def prepare(self) -> PredictedTokens:
        (sources, targets), reader = self.examples.texts, self.reader
        writer = SourceTargetEncoder.of(self.source, reader.encoder)
        rows = writer.rows(sources, targets, self.examples.name)
        counts = np.array([len(row["labels"]) for row in rows])
        facts: dict[str, Any] = {"targets": int(counts.sum())}
        facts["truncated"] = reader.truncated(rows, sources)
        if self._generates:
            facts["decoding"] = "greedy, else as the model's generation config says"
        both = [{"input_ids": torch.cat([row["input_ids"], row["labels"]])} for row in rows]
        return PredictedTokens(len(rows), reader.signature(both), facts, (), rows, counts)

    @property
    def _generates(self) -> bool:
        return self.options.exact_match is not False

    def run(self, runner: Runner, reference: Any) -> Measured:
        prepared, counts = self.prepared, self.prepared.counts
        hits, losses, same = (np.zeros(prepared.units) for _ in range(3))
        compared = Compared(prepared.units, reference, self.reader.vocabulary)
        generating = None
        if self._generates:
            longest = int(counts.max()) + _SPARE
            limit = longest_text(self.source, self.reader.encoder.inputs)
            longest = longest if limit is None else min(longest, limit)
            generating = Generating.of(runner.model, longest, self.reader.tokenizer)
        for chosen, batch in runner.batches(prepared.rows, self.reader.pad):
            labels = batch.pop("labels")
            logits = runner.model(**batch, use_cache=False).logits
            for index, scores, truth in zip(chosen, logits, labels, strict=True):
                is_token = truth != IGNORED
                guessed, true = checked(scores[is_token].float()), truth[is_token]
                hits[index] = int((guessed.argmax(-1) == true).sum())
                losses[index] = float(cross_entropy(guessed, true, reduction="sum"))
                compared.add(index, guessed)
            if generating is not None:
                for index, tokens in zip(chosen, generating.texts(batch), strict=True):
                    target: list[int] = prepared.rows[index]["labels"].tolist()
                    same[index] = tokens == generating.plain(target)
        statistics = [
            ratio("token_accuracy", hits, counts, per_token=True),
            ratio("cross_entropy", losses, counts, higher_is_better=False, per_token=True),
        ]
        statistics += [] if generating is None else [ratio("exact_match", same)]
        return Measured([*statistics, *compared.statistics(counts)], compared.likeliest)
