"""The proof that a smaller tokenizer writes texts as the whole one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tcompress.data.calibration import builtin_texts
from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.vocabulary.cut import WITHOUT, ModelTokens

_BUILTIN = 200  # texts that ship, beside those of the data


def prove(whole: SourceModel, cut: SourceModel, texts: Sequence[str]) -> None:
    """Compare both tokenizers, as Transformers loads them, by their tokens and on texts.

    Raises:
        PlanError: Tokens have other numbers than planned; or a text whose tokens are left is
            written with other ones, or any text reads differently.
    """
    assert cut.vocabulary is not None
    old, new = ModelTokens.open(whole).reader, ModelTokens.open(cut).reader
    ids = cut.vocabulary.ids
    numbers = {was: now for now, was in enumerate(ids)}
    names: list[str] = old.convert_ids_to_tokens(list(ids))
    mine, added = new.get_vocab(), {*old.get_added_vocab().values()}
    for was, name in zip(ids, names, strict=True):
        if was in added or name in mine:
            found = mine.get(name)
            if found != numbers[was]:
                raise _differs(whole, new, f"gives `{name}` the number {found}", numbers[was])
    texts = [*texts, *builtin_texts()[:_BUILTIN]]
    for text, one, two in zip(texts, *(_rows(it, texts) for it in (old, new)), strict=True):
        if numbers.keys() >= {*one}:
            expected = [numbers[index] for index in one]
            if two != expected:
                raise _differs(whole, new, f"writes `{text[:60]}` as {two[:20]}", expected[:20])
        elif old.decode(one) != new.decode(two):
            raise _differs(
                whole, new, f"reads `{text[:60]}` as `{new.decode(two)[:60]}`", old.decode(one)[:60]
            )


def _rows(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
    return found


def _differs(source: SourceModel, tokenizer: Any, what: str, expected: object) -> PlanError:
    return PlanError(
        f"the tokenizer in `{source.folder}` cannot be cut: with fewer pieces a "
        f"`{type(tokenizer).__name__}` {what}, expected is `{expected}`",
        WITHOUT,
    )
