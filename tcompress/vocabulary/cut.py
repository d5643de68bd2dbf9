"""A model with fewer tokens, described as a source like any other: config, tokenizer, weights.

Which tensors have a row for each token is found by trial, whatever the family: the config is given
the new number of tokens, and the model that this makes is compared with the whole one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from tcompress.data.encoding import load_tokenizer
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import (
    DataError,
    PlanError,
    SourceError,
    counted,
    first_line,
    listed,
    read_json,
)
from tcompress.models import SourceModel
from tcompress.models.fewer_layers import sections, write_keys
from tcompress.models.mended import copying
from tcompress.models.vocabulary import Vocabulary, row_axes, with_rows
from tcompress.roles.find import find_roles
from tcompress.vocabulary.pieces import PieceModel, Settings, read_pieces
from tcompress.vocabulary.tokenizer_files import (
    MAIN,
    processor_ids,
    renumbered,
    renumbered_pieces,
    required_ids,
    rewrite_folder,
    tokenizer_json,
)

WITHOUT = "leave `vocab` out"


@dataclass(frozen=True, eq=False)
class ModelTokens:
    """The tokens of a model: those of its tokenizer, and the rows of its word embedding."""

    reader: Any  # the tokenizer as the model is run with it
    settings: Settings  # content of `tokenizer.json`
    pieces: PieceModel
    added: frozenset[int]  # ids of special tokens, and of others that users have added
    rows: int  # of the word embedding

    @classmethod
    def open(cls, source: SourceModel) -> ModelTokens:
        """Read the tokenizer in a model's folder; refuse those that cannot be cut, by name."""
        rows = embedding_rows(source)
        try:
            trust, sentences = source.trust_remote_code, SentenceEncoder.imitated(source)
            tokenizer = load_tokenizer(source.folder, trust=trust)
        except DataError as error:
            raise PlanError(error.message, f"add its files to the folder, or {WITHOUT}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise PlanError(
                f"the tokenizer in `{source.folder}`, a `{type(tokenizer).__name__}`, is written "
                f"in Python and has no `{MAIN}` with a list of pieces",
                f"save it as a fast one (`tokenizers`), or {WITHOUT}",
            )
        path = source.folder / MAIN
        settings: Settings = _read(path)
        if "type" not in settings.get("model", ()):  # as older versions wrote it
            settings = json.loads(tokenizer.backend_tokenizer.to_str())
        pieces = read_pieces(settings, str(source.folder))
        vocabulary = tokenizer.get_vocab()
        differing = [piece for piece, index in pieces.ids.items() if vocabulary.get(piece) != index]
        if differing:
            raise PlanError(
                f"`{path}` gives other numbers to {counted(len(differing), 'piece')}, such as "
                f"`{differing[0]}`, than the `{type(tokenizer).__name__}` that Transformers makes "
                "of it",
                f"save the tokenizer again with `save_pretrained`, or {WITHOUT}",
            )
        added = {token["id"] for token in settings.get("added_tokens") or ()}
        added |= tokenizer.added_tokens_decoder.keys()
        if sentences.lower:
            tokenizer = load_tokenizer(source.folder, trust=trust, lower=True)
        return cls(tokenizer, settings, pieces, frozenset(added), rows)

    @property
    def ids(self) -> frozenset[int]:
        """All ids that the tokenizer may give."""
        return frozenset(self.pieces.ids.values()) | self.added

    def required(self, source: SourceModel) -> set[int]:
        """Ids of the tokens that have to stay, whatever the data."""
        tokens = {*self.added, *processor_ids(self.settings.get("post_processor"))}
        if padding := self.settings.get("padding"):
            tokens.add(padding["pad_id"])
        owners = (_values(owner) for _, owner in _owners(source, self.rows))
        for settings in (_read(source.folder / "generation_config.json"), *owners):
            tokens |= {index for index in required_ids(settings) if index < self.rows}
        sentences, names = SentenceEncoder.imitated(source), self.pieces.names
        for prompt in (sentences.default, sentences.query, sentences.document):
            tokens.update(self.reader(prompt.text, add_special_tokens=False)["input_ids"])
        pieces = {*self.pieces.required, *(names[index] for index in tokens if index in names)}
        needs, ids = self.pieces.needs, self.pieces.ids
        return tokens | {ids[part] for piece in pieces for part in needs(piece)}

    def rewrite(self, folder: Path, numbers: Mapping[int, int]) -> None:
        """Write the tokenizer's files in a folder anew, for tokens with new numbers."""
        model = self.pieces.cut(renumbered_pieces(self.pieces.ids, numbers))
        rewrite_folder(folder, tokenizer_json(self.settings, model, numbers), numbers)


def embedding_rows(source: SourceModel) -> int:
    """Count the tokens that a model's word embedding has rows for; refuse models without one."""
    config: Any = source.config.get_text_config()
    size = getattr(config, "vocab_size", None)
    model = source.keymap.model
    tables = [item for item in model.modules() if isinstance(item, nn.Embedding)]
    if type(size) is not int or not any(table.num_embeddings == size for table in tables):
        raise PlanError(
            f"`{source.model_class.__name__}` has no word embedding, so that it has no vocabulary",
            WITHOUT,
        )
    return size


def _owners(source: SourceModel, rows: int) -> Iterator[tuple[str | None, Any]]:
    """Parts of the config that speak of the vocabulary; None for the whole."""
    for part in (None, *getattr(source.config, "sub_configs", {})):
        owner = source.config if part is None else getattr(source.config, part, None)
        if owner is not None and getattr(owner, "vocab_size", rows) in (rows, None):
            yield part, owner


def _values(owner: Any) -> dict[str, Any]:
    """Settings of a part of a config, defaults included, without the parts inside it."""
    return {k: v for k, v in owner.to_dict().items() if k not in getattr(owner, "sub_configs", {})}


def _read(path: Path) -> dict[str, Any]:
    """Read the settings in a file; none where it is not there, or holds something else."""
    try:
        settings = read_json(path) if path.is_file() else {}
    except ValueError as error:
        raise SourceError(f"`{path}` {error}", "repair the file") from error
    return settings if isinstance(settings, dict) else {}


def _settings_with(source: SourceModel, vocabulary: Vocabulary) -> dict[str, Any]:
    """Rewrite `config.json` for the tokens that are left."""
    numbers = {old: new for new, old in enumerate(vocabulary.ids)}
    settings = deepcopy(source.settings)
    for part, owner in _owners(source, vocabulary.before):
        before = _values(owner)
        after = renumbered(before, numbers)
        sizes = {k: size for k, size in before.items() if "vocab_size" in k and type(size) is int}
        for key, value in sizes.items():
            if value == vocabulary.before:
                after[key] = vocabulary.rows
            elif value >= vocabulary.rows:
                raise _refusal(source, f"its config has {value:,} as `{key}` too")
        changed = {key: value for key, value in after.items() if value != before[key]}
        for section in sections(settings, part):
            write_keys(section, owner, changed)
    return settings


def cut_vocabulary(
    source: SourceModel, vocabulary: Vocabulary, tokens: ModelTokens | None = None
) -> SourceModel:
    """Describe a model with the tokens that are left: a view of its weights, files in a copy.

    Args:
        source: The model with all of its tokens.
        vocabulary: The tokens that are left.
        tokens: Those of the model, if they are read already.

    Raises:
        PlanError: Its vocabulary cannot be cut; the message says why.
    """
    tokens = tokens or ModelTokens.open(source)
    settings = _settings_with(source, vocabulary)
    with copying(source.folder) as copy:
        copy.take(source.folder)
        copy.configure(settings)
        tokens.rewrite(copy.folder, {old: new for new, old in enumerate(vocabulary.ids)})
    try:
        cut = replace(
            source.with_settings(settings),
            folder=copy.folder,
            origin=source.origin or source.folder,
            keeps=(source.keeps, copy),
            vocabulary=vocabulary,
            whole=source,
        )
        axes = _axes(source, cut.meta_model(), vocabulary)
    except (PlanError, SourceError):
        raise
    except Exception as error:  # a config class may raise anything
        raise _refusal(source, f"its config does not take it ({first_line(error)})") from error
    rows = [index for index in vocabulary.ids if index < vocabulary.before]
    keys = dict(_keys(source, axes))
    return replace(cut, store=with_rows(source.store, keys, rows))


def _axes(source: SourceModel, cut: nn.Module, vocabulary: Vocabulary) -> dict[str, int]:
    """Find the tensors with a row for each token; refuse models that count on numbers of tokens."""
    dense = source.keymap.model
    try:
        axes = row_axes(dense, cut, vocabulary.before, vocabulary.rows)
    except ValueError as error:
        raise _refusal(source, str(error)) from error
    tables = find_roles(dense).embeddings
    for path, module in dense.named_modules():
        if not isinstance(module, nn.Embedding) or f"{path}.weight" in axes:
            continue
        if path in tables and module.num_embeddings >= vocabulary.rows:
            raise _refusal(source, f"no key of its config sets the number of rows of `{path}`")
        if module.padding_idx != getattr(cut.get_submodule(path), "padding_idx", None):
            text = f"`{path}` counts positions from the padding token, whose number changes"
            raise _refusal(source, text)
    if not axes:
        raise _refusal(source, "nothing in its config sets the number of tokens")
    return axes


def _keys(source: SourceModel, axes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Tensors of the checkpoint that have a row for each token."""
    keymap = source.keymap
    for name, axis in axes.items():
        if not keymap.has(name):
            continue
        try:
            sources = keymap.sources(name)
        except SourceError:
            continue
        if sources.converter is not None or len(sources.keys) != 1:
            raise _refusal(source, f"{listed(sources.keys)} are stored in another form")
        yield sources.keys[0], axis


def _refusal(source: SourceModel, reason: str) -> PlanError:
    kind = source.config.model_type
    return PlanError(f"the vocabulary of this `{kind}` model cannot be cut: {reason}", WITHOUT)
