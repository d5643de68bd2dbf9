"""A tokenizer of whole words, for models that are trained from scratch.

Papers of small models count the words of their training texts and keep the most frequent ones,
such as 20,000; all others are one unknown word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tcompress.errors import DataError
from tcompress.options.scratch import Words
from tcompress.reading import builtin
from tcompress.reading.columns import columns_of, content, undecoded
from tcompress.reading.tables import opened

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
"""Words that stand for something else, in the order of their numbers from 0."""


def word_tokenizer(words: Words, segments: bool = False) -> Any:
    """Makes a tokenizer of the most frequent words of some texts.

    Text is lower-cased and loses its accents; words end at spaces and punctuation. A text becomes
    `[CLS] text [SEP]`, a pair `[CLS] text [SEP] pair [SEP]`.

    Args:
        words: Where texts are, and how many words are kept.
        segments: Whether the model is told which text of a pair a word is of, 0 or 1.

    Returns:
        A `PreTrainedTokenizerFast`.

    Raises:
        DataError: There are no such texts.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(unk_token=SPECIAL["unk_token"]))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(
        vocab_size=words.size, special_tokens=list(SPECIAL.values()), show_progress=False
    )
    made.train_from_iterator(_texts(words), trainer)
    if made.get_vocab_size() <= len(SPECIAL):
        raise DataError(f"`{words.words}` holds no words", hint="give other data, or `builtin`")
    first, end = SPECIAL["cls_token"], SPECIAL["sep_token"]
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {end}",
        pair=f"{first} $A {end} $B:1 {end}:1",
        special_tokens=[(name, made.token_to_id(name)) for name in (first, end)],
    )
    names = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    # Only what is given here is saved with the tokenizer.
    return PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=names, **SPECIAL)


def _texts(words: Words) -> Iterator[str]:
    if words.words == "builtin":
        yield from builtin.texts()
        return
    with opened(words.words, words.split) as found:
        table = undecoded(found)
        chosen = columns_of(table, words.columns, {"text"}, {"text"}, "a tokenizer of words")
        rows = table.rows.select_columns(list(chosen["text"]))
        for batch in rows.iter(batch_size=1000):
            for column in chosen["text"]:
                yield from (str(content(cell)) for cell in batch[column] if content(cell))
