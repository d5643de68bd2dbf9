"""Which tokens stay: those that data needs, or the most frequent ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tcompress.data.whole_texts import whole_texts
from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.models.vocabulary import Vocabulary, as_runs
from tcompress.options import Convert
from tcompress.vocabulary.cut import ModelTokens, cut_vocabulary

_WHOLE = {
    "add_special_tokens": False,
    "truncation": False,
    "padding": False,
    "return_attention_mask": False,
    "return_token_type_ids": False,
    "verbose": False,
}


@dataclass(frozen=True)
class Counts:
    """How often tokens occur in data."""

    name: str
    texts: int
    tokens: Counter[int]


def with_vocabulary(source: SourceModel, recipe: Convert) -> SourceModel:
    """Describe a model with the tokens that a recipe leaves it; the same where it leaves all.

    Raises:
        InputError: The tokenizer, the model or the data cannot be used, or too few are to stay.
    """
    if recipe.vocab is None or source.vocabulary is not None:
        return source
    tokens = ModelTokens.open(source)
    counts = None if not recipe.calibration.files else _count(source, recipe, tokens)
    vocabulary = _choose(source, tokens, recipe.vocab, counts)
    cut = cut_vocabulary(source, vocabulary)
    gone = _parameters(source) - _parameters(cut)
    return replace(cut, vocabulary=vocabulary.model_copy(update={"parameters": gone}))


def _parameters(source: SourceModel) -> int:
    return sum(item.numel() for item in source.keymap.model.parameters())


def _count(source: SourceModel, recipe: Convert, tokens: ModelTokens) -> Counts:
    """Count the tokens of all texts in the data, none of them cut off."""
    counted: Counter[int] = Counter()
    texts, names = 0, list[str]()
    tokenizer = tokens.reader(source)
    for name, chunk in whole_texts(source, recipe.calibration, tokenizer):
        texts += len(chunk)
        names += [] if name in names else [name]
        for row in tokenizer(chunk, **_WHOLE)["input_ids"]:
            counted.update(row)
    return Counts(" + ".join(names), texts, counted)


def _choose(
    source: SourceModel, tokens: ModelTokens, asked: int | str, counts: Counts | None
) -> Vocabulary:
    ids = tokens.pieces.ids
    names = {index: piece for piece, index in ids.items()}
    kept = tokens.required(source)
    required = sum(index < tokens.rows for index in kept)
    if isinstance(asked, int) and asked < required:
        raise PlanError(
            f"`vocab` is {asked:,}, and at least {required:,} of {tokens.rows:,} tokens have to "
            "stay: special tokens, those that the config names, and the letters or bytes that any "
            "text can be written in",
            f"give {required} or more, or `data`",
        )
    for piece in _wanted(source, tokens, counts, names, fill=isinstance(asked, int)):
        made = {ids[part] for part in tokens.pieces.needs(piece)} - kept
        if asked == "data" or sum(i < tokens.rows for i in kept | made) <= int(asked):
            kept |= made
    rows = sum(index < tokens.rows for index in kept)
    if rows >= tokens.rows:
        raise PlanError(
            f"all {tokens.rows:,} tokens would stay",
            "give a smaller number as `vocab`, or leave it out",
        )
    order = sorted(kept, key=lambda i: (i >= tokens.rows, i not in tokens.ids, i))
    facts = {}
    if counts is not None:
        total = counts.tokens.total()
        inside = sum(number for index, number in counts.tokens.items() if index in kept)
        facts = {
            "data": counts.name,
            "texts": counts.texts,
            "tokens": total,
            "pieces": len(counts.tokens),
            "covered": inside / total if total else None,
        }
    return Vocabulary(
        before=tokens.rows,
        kept=as_runs(order),
        rows=rows,
        required=required,
        chosen="ranks" if counts is None else "data",
        **facts,
    )


def _wanted(
    source: SourceModel,
    tokens: ModelTokens,
    counts: Counts | None,
    names: dict[int, str],
    *,
    fill: bool,
) -> Iterator[str]:
    """Lists pieces in the order in which they are to stay."""
    if counts is not None:
        yield from (names[i] for i, _ in counts.tokens.most_common() if i in names)
    ranked = tokens.pieces.ranked
    if ranked is None and counts is None:
        raise PlanError(
            f"a `{tokens.pieces.kind}` tokenizer does not tell how frequent its pieces are, so "
            "that a number as `vocab` needs data",
            "give it with `--calib FILE`",
        )
    if fill:
        yield from ranked or tokens.pieces.ids
