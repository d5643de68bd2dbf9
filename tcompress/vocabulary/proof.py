"""The proof that a smaller tokenizer writes texts as the whole one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tcompress.data.calibration import builtin_texts
from tcompress.errors import PlanError
from tcompress.models import SourceModel
from tcompress.vocabulary.cut import WITHOUT, ModelTokens

_BUILTIN = 200  # texts that ship, beside those of the data


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
