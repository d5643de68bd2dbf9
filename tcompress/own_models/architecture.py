"""From the configuration in a recipe to a model without weights, and to a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from tcompress.data import calibration
from tcompress.data.chats import as_plain_text
from tcompress.data.encoding import load_tokenizer
from tcompress.data.tables import columns_of, content, opened
from tcompress.errors import (
    DataError,
    RecipeError,
    SourceError,
    TCompressError,
    check_counts,
    listed,
)
from tcompress.models import SourceModel, resolve
from tcompress.models.mended import Copy
from tcompress.models.model import registered_classes
from tcompress.options.steps import Architecture, Words

SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
"""Words that stand for something else, in the order of their numbers from 0."""


def word_tokenizer(words: Words, segments: bool = False) -> Any:
    """Makes a tokenizer of the most frequent words of some texts, as papers of small models do.

    Text is lower-cased and loses its accents; words end at spaces and punctuation, all others are
    one unknown word. With `segments` the model is told which text of a pair a word is of.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(unk_token=SPECIAL["unk_token"]))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    options: Any = {"vocab_size": words.size, "special_tokens": list(SPECIAL.values())}
    trainer = trainers.WordLevelTrainer(**options, show_progress=False)
    core.train_from_iterator(_texts(words), trainer)
    if core.get_vocab_size() <= len(SPECIAL):
        raise DataError(f"`{words.words}` holds no words", hint="give other data, or `builtin`")
    first, end = SPECIAL["cls_token"], SPECIAL["sep_token"]
    core.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {end}",
        pair=f"{first} $A {end} $B:1 {end}:1",
        special_tokens=[(name, core.token_to_id(name)) for name in (first, end)],
    )
    names = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    # Only what is given here is saved with the tokenizer.
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=names, **SPECIAL)


def _texts(words: Words) -> Iterator[str]:
    if words.words == "builtin":
        yield from calibration.builtin_texts()
        return
    with opened(words.words, words.split) as table:
        chosen = columns_of(table, words.columns, {"text"}, {"text"}, "a tokenizer of words")
        rows = table.rows.select_columns(list(chosen["text"]))
        for batch in rows.iter(batch_size=1000):
            for column in chosen["text"]:
                cells = (content(as_plain_text(cell)) for cell in batch[column])
                yield from (str(cell) for cell in cells if cell)


_OF_ALL = ("num_labels", "tie_word_embeddings")  # keys of every configuration beside its fields


def open_architecture(
    architecture: Architecture, seed: int, token: str | None = None
) -> SourceModel:
    """Opens a model without weights from its configuration; tells all problems at once."""
    kind = _config_class(architecture.model_type)
    keys = {*_OF_ALL, *kind.attribute_map, *(field.name for field in fields(kind))}
    keys -= {"architectures"}
    sizes = {  # without keys of another family that a variant has set to null
        name: value
        for name, value in architecture.sizes.items()
        if value is not None or name in {*keys, "architectures"}
    }
    named = sizes.pop("architectures", None) or []
    names = architecture.kind or named
    names = [names] if isinstance(names, str) else [str(name) for name in names]
    problems = [_unknown_key(name, kind, keys) for name in sizes if name not in keys]
    try:
        check_counts(sizes)
    except ValueError as error:
        raise RecipeError(f"`architecture` {error}", "check the sizes in `architecture`") from error
    problems += [
        f"`architecture.{name}` is `{value}`, expected a whole number"
        for name in ("vocab_size", "type_vocab_size")
        if (value := sizes.get(name)) is not None and type(value) is not int
    ]
    bare = _built(kind, {}, problems=[])
    model_class = _model_class(bare, names, problems)
    if problems:
        hint = "the documentation of Transformers lists the keys of each family, and what they are"
        raise RecipeError("; ".join(problems), hint)
    segments = (sizes.get("type_vocab_size", getattr(bare, "type_vocab_size", 0)) or 0) > 1
    tokenizer = _tokenizer(architecture.tokenizer, token, segments)
    config = _built(kind, {**_from_tokenizer(bare, tokenizer, sizes), **sizes}, problems)
    if config is None or problems:
        raise RecipeError(problems[0], "check the sizes in `architecture`")
    assert model_class is not None
    config.architectures = [model_class.__name__]
    copy = Copy(architecture.model_type)
    if tokenizer is not None:
        tokenizer.save_pretrained(copy.folder)
    config.save_pretrained(copy.folder)
    source = SourceModel.open(str(copy.folder), seed=seed)
    return replace(source, id=architecture.model_type, keeps=copy)


def _config_class(model_type: str) -> type[PreTrainedConfig]:
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    near = get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=3)
    raise RecipeError(
        f"`architecture.model_type` is `{model_type}`, which Transformers "
        f"{transformers.__version__} does not know",
        f"did you mean {listed(near)}" if near else "such as `bert`, `gpt2` or `vit`",
    )


def _unknown_key(name: str, kind: type[PreTrainedConfig], keys: set[str]) -> str:
    near = get_close_matches(name, keys, n=1)
    meant = f", did you mean `{near[0]}`" if near else ""
    return f"`architecture.{name}` is no key of `{kind.__name__}`{meant}"


def _built(kind: Any, sizes: dict[str, Any], problems: list[str]) -> Any:
    """Builds a configuration, whose class may raise anything."""
    try:
        return AutoConfig.for_model(kind.model_type, **sizes)
    except TCompressError as error:  # of an own model: it says what to do
        reason = f": {error.message}" + (f"; {error.hint}" if error.hint else "")
    except Exception as error:
        reason = f" ({' '.join(str(error).split())[:200]})"
    problems.append(f"`{kind.__name__}` refuses the sizes{reason}")
    return None


def _model_class(
    config: Any, names: list[str], problems: list[str]
) -> type[PreTrainedModel] | None:
    """Finds the class by name, or the one without a head."""
    known = {kind.__name__: kind for kind in registered_classes(config)}
    if not names:
        bare: Any = transformers.MODEL_MAPPING.get(type(config), None)
        bare = bare[0] if isinstance(bare, tuple | list) else bare
        bare = bare or next(iter(known.values()), None)
        if bare is None:
            problems.append(f"no class of models is known for `{config.model_type}`: give `class`")
        return bare  # type: ignore[no-any-return]
    found = known.get(names[0], getattr(transformers, names[0], None))
    fits = isinstance(found, type) and issubclass(found, PreTrainedModel)
    if fits and isinstance(config, getattr(found, "config_class", None) or PreTrainedConfig):
        return found  # type: ignore[return-value]
    problems.append(
        f"`architecture.class` is `{names[0]}`, which is no class for `{config.model_type}`; "
        f"those are {listed(sorted(known))}"
    )
    return None


def _tokenizer(setting: str | Words | None, token: str | None, segments: bool) -> Any:
    if setting is None:
        return None
    if isinstance(setting, Words):
        return word_tokenizer(setting, segments)
    try:
        return load_tokenizer(resolve(setting, token=token, weights=False))
    except DataError as error:
        raise SourceError(
            f"`architecture.tokenizer` is `{setting}`, which has no usable tokenizer",
            hint="give a folder or hub id with one, or `{words: builtin}`",
        ) from error


def _from_tokenizer(config: Any, tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Values of a configuration that follow from a tokenizer: number of words, and special ones."""
    if tokenizer is None or not hasattr(config, "vocab_size"):
        return {}
    words = settings.get("vocab_size", len(tokenizer))
    values: dict[str, Any] = {"vocab_size": words}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        usual, number = getattr(config, name, None), getattr(tokenizer, name, None)
        outside = isinstance(usual, int) and usual >= words
        # A default beyond the vocabulary means no word.
        if hasattr(config, name) and (number is not None or outside):
            values[name] = number
    if getattr(config, "is_encoder_decoder", False):
        values |= _ends_of_texts(config, tokenizer, {**values, **settings})
    return values


def _ends_of_texts(config: Any, tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens that a decoder's texts begin and end with, as its tokenizer writes them.

    One of words writes `cls` before a text and `sep` behind. What the family has a decoder start
    with, by default, is the same token again: of an end, or padding, which T5 does not say.
    """
    kinds = {"bos_token_id": "cls_token_id", "eos_token_id": "sep_token_id"}
    ends: dict[str, Any] = {}
    for name, other in kinds.items():
        number = getattr(tokenizer, name, None)
        number = getattr(tokenizer, other, None) if number is None else number
        ends |= {} if number is None else {name: number}
    start = getattr(config, "decoder_start_token_id", None)
    names = ("pad_token_id", "eos_token_id", "bos_token_id")
    usual = (name for name in names if start is not None and getattr(config, name, None) == start)
    numbers = {**ends, **settings}
    ends["decoder_start_token_id"] = numbers.get(next(usual, "pad_token_id"))
    if getattr(config, "forced_eos_token_id", None) is not None:
        ends["forced_eos_token_id"] = numbers.get("eos_token_id")
    return ends
