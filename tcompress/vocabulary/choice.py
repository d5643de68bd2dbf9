"""Which tokens stay: those that data needs, or the most frequent ones; and the proof of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from tcompress.data.calibration import WholeTexts, builtin_texts
from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.models.vocabulary import Vocabulary, as_runs
from tcompress.options import Convert
from tcompress.progress import Progress, Silent
from tcompress.vocabulary.cut import WITHOUT, ModelTokens, cut_vocabulary

_WHOLE = {
    "add_special_tokens": False,
    "truncation": False,
    "padding": False,
    "return_attention_mask": False,
    "return_token_type_ids": False,
    "verbose": False,
}
_SAMPLE = 200  # texts of the data that the smaller tokenizer is tried on
_BUILTIN = 200  # texts that ship, beside those of the data


@dataclass
class _Counts:
    """Counts of tokens in data."""

    names: list[str] = field(default_factory=list)  # of the data
    texts: int = 0
    tokens: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)  # that a token occurs in
    sample: list[str] = field(default_factory=list)  # of the texts, at growing distances


_CHOSEN: WeakKeyDictionary[SourceModel, dict[str, Vocabulary]] = WeakKeyDictionary()
"""Choices that were made for a model: conversions of a sweep ask for the same."""


def with_vocabulary(
    source: SourceModel, recipe: Convert, progress: Progress | None = None
) -> SourceModel:
    """Describe a model with the tokens that a recipe leaves it; the same if it says nothing.

    Raises:
        InputError: The tokenizer, the model or the data cannot be used, or too few are to stay.
    """
    if recipe.vocab is None or source.vocabulary is not None:
        return source
    key = f"{recipe.vocab} {recipe.calibration.model_dump_json()}"
    chosen = _CHOSEN.setdefault(source, {})
    if key in chosen:
        return cut_vocabulary(source, chosen[key])
    tokens = ModelTokens.open(source)
    counts = _count(source, recipe, tokens, progress or Silent())
    vocabulary = _choose(source, tokens, recipe.vocab, counts)
    cut = cut_vocabulary(source, vocabulary, tokens)
    prove(tokens, cut, counts.sample if counts else [])
    gone = _parameters(source) - _parameters(cut)
    chosen[key] = vocabulary.model_copy(update={"parameters": gone})
    return replace(cut, vocabulary=chosen[key])


def _parameters(source: SourceModel) -> int:
    return sum(item.numel() for item in source.keymap.model.parameters())


def _count(
    source: SourceModel, recipe: Convert, tokens: ModelTokens, progress: Progress
) -> _Counts | None:
    """Count the tokens of all texts in the data, none of them cut off; None without data."""
    if not recipe.calibration.files:
        return None
    counts = _Counts()
    for part in WholeTexts.of(source, recipe.calibration, tokens.reader):
        counts.names.append(part.name)
        progress.stage(f"counting tokens of {part.name}", part.rows, "rows")
        step, seen = max(1, part.rows // _SAMPLE), 0
        for rows in part.chunks:
            texts = [text for row in rows for text in row]
            encoded = iter(tokens.reader(texts, **_WHOLE)["input_ids"] if texts else ())
            for row in rows:
                ids = [token for tokens_of in islice(encoded, len(row)) for token in tokens_of]
                counts.tokens.update(ids)
                counts.rows.update({*ids})
            counts.sample += [row[0] for row in rows[-seen % step :: step] if row]
            seen += len(rows)
            counts.texts += len(texts)
            progress.advance(len(rows), "")
    return counts


def _choose(
    source: SourceModel, tokens: ModelTokens, vocab: int | str, counts: _Counts | None
) -> Vocabulary:
    """Choose the tokens that stay: those that must, and then others in their order."""
    ids, most = tokens.pieces.ids, tokens.rows
    chosen = tokens.required(source)
    rows = required = sum(index < most for index in chosen)
    limit = vocab if isinstance(vocab, int) else most
    if isinstance(vocab, int):
        _check_number(vocab, required, most)
    for piece in _in_order(tokens, counts, fill=isinstance(vocab, int)):
        new = {ids[part] for part in tokens.pieces.needs(piece)} - chosen if rows < limit else set()
        count = sum(index < most for index in new)
        if rows + count <= limit:
            chosen |= new
            rows += count
    if rows == most:
        raise PlanError(
            f"`vocab: {vocab}` leaves no token out: all {most:,} occur in the data, or are needed",
            f"give a number below {most}, or {WITHOUT}",
        )
    facts: dict[str, str | int | float] = {}
    if counts is not None:
        total = counts.tokens.total()
        covered = sum(number for index, number in counts.tokens.items() if index in chosen)
        facts = {"data": " + ".join(counts.names), "texts": counts.texts, "tokens": total}
        facts |= {"pieces": len(counts.tokens), "covered": covered / max(1, total)}
        once = (index for index, rows_of in counts.rows.items() if rows_of == 1)
        facts["alone"] = sum(counts.tokens[index] for index in once if index in chosen)
    return Vocabulary(
        before=most,
        kept=as_runs(sorted(chosen, key=lambda i: (i >= most, i not in tokens.ids, i))),
        rows=rows,
        required=required,
        chosen="ranks" if counts is None else "data",
        **facts,  # type: ignore[arg-type]
    )


def _check_number(vocab: int, required: int, most: int) -> None:
    """Refuse a number of tokens that is too small, or that leaves all of them."""
    if vocab < required:
        raise PlanError(
            f"`vocab` is {vocab:,}, and at least {required:,} of {most:,} tokens have to stay: "
            "special tokens, those that the config names, and letters or bytes that any text can "
            "be written in",
            f"give {required} or more",
        )
    if vocab >= most:
        text = f"`vocab: {vocab}` leaves no token out: there are {most:,}"
        raise PlanError(text, f"give a smaller number, or {WITHOUT}")


def _in_order(tokens: ModelTokens, counts: _Counts | None, *, fill: bool) -> Iterator[str]:
    """List pieces in the order in which they are to stay."""
    ranked = tokens.pieces.ranked
    if counts is not None:
        names = tokens.pieces.names
        yield from (names[index] for index, _ in counts.tokens.most_common() if index in names)
    elif ranked is None:
        raise PlanError(
            f"a `{tokens.pieces.kind}` tokenizer does not say how frequent its pieces are, so that "
            "a number as `vocab` needs data to count them in",
            "name data, such as `--calib FILE`",
        )
    if fill:
        yield from ranked or sorted(tokens.pieces.ids, key=tokens.pieces.ids.__getitem__)


def prove(tokens: ModelTokens, cut: SourceModel, texts: Sequence[str]) -> None:
    """Compare both tokenizers, as Transformers loads them, by their tokens and on texts.

    Args:
        tokens: Those of the dense model.
        cut: The model with fewer tokens.
        texts: Some of the data; texts that ship stand beside them.

    Raises:
        PlanError: Tokens have other numbers than planned; or a text whose tokens are left is
            written with other ones, or any text reads differently.
    """
    assert cut.vocabulary is not None
    old, new = tokens.reader, ModelTokens.open(cut).reader
    ids = cut.vocabulary.ids
    numbers = {was: now for now, was in enumerate(ids)}
    names: list[str | None] = old.convert_ids_to_tokens(list(ids))  # None: a row and no token
    vocabulary = new.get_vocab()
    for name, number in zip(names, numbers.values(), strict=True):
        if name is not None and vocabulary.get(name) != number:
            raise _differs(new, f"gives `{name}` the number {vocabulary.get(name)}", number)
    texts = [*texts, *builtin_texts()[:_BUILTIN]]
    rows = (it(texts, truncation=False, verbose=False)["input_ids"] for it in (old, new))
    for text, one, two in zip(texts, *rows, strict=True):
        if numbers.keys() >= {*one}:
            expected = [numbers[index] for index in one]
            if two != expected:
                raise _differs(new, f"writes `{text[:60]}` as {two[:20]}", expected[:20])
        elif old.decode(one) != new.decode(two):
            read = new.decode(two)[:60]
            raise _differs(new, f"reads `{text[:60]}` as `{read}`", old.decode(one)[:60])


def _differs(tokenizer: Any, what: str, expected: object) -> PlanError:
    return PlanError(
        f"the tokenizer cannot be cut: with fewer pieces a `{type(tokenizer).__name__}` {what}, "
        f"expected is `{expected}`",
        WITHOUT,
    )
