"""What the card of a model says of it in its head, and heads of cards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tcompress.models.names import CARD, encodes_sentences

_MARK = "---"
# In the order in which heads are written; tags come last.
_CARRIED = ("library_name", "base_model", "license", "license_name", "license_link")


def head_of(folder: Path) -> dict[str, Any]:
    """Read licence, library, base model and tags from a card; what cannot be read is left out."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8-sig")
        lines = [line.rstrip() for line in text.splitlines()]
        end = lines.index(_MARK, 1) if lines[:1] == [_MARK] else 0
        said = yaml.safe_load("\n".join(lines[1:end]))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    said = said if isinstance(said, dict) else {}
    head = {key: said[key] for key in (*_CARRIED, "tags") if _is_words(said.get(key))}
    if isinstance(head.get("tags"), str):
        head["tags"] = [head["tags"]]
    return head


# Some classes are found under several names: the first one counts.
_LOADERS = (
    "AutoModel",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
    "AutoModelForImageClassification",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCTC",
    "AutoModelForAudioClassification",
    "AutoModelForTimeSeriesPrediction",
    "AutoModelForPreTraining",
    "AutoModelForTextEncoding",
)


def loading_code(folder: Path, architecture: str | None, *, plain: bool) -> str:
    """Write the lines of Python that load a model of an architecture, as that in a folder."""
    library, loader = "transformers", loader_of(architecture)
    call = f'{loader}.from_pretrained("PATH")'
    if encodes_sentences(folder):
        library, loader = "sentence_transformers", "SentenceTransformer"
        call = f'{loader}("PATH")'
    first = "" if plain else "import tcompress\n"
    return f"{first}from {library} import {loader}\n\nmodel = {call}"


def loader_of(architecture: str | None) -> str:
    """Name the class of Transformers that loads a model with its head, by its architecture."""
    import transformers

    for name in _LOADERS:
        mapping = getattr(getattr(transformers, name, None), "_model_mapping", None)
        if mapping is None:
            continue
        names: set[str] = set()
        for kinds in mapping._model_mapping.values():
            names.update((kinds,) if isinstance(kinds, str) else kinds)
        names.update(kind.__name__ for kind in mapping._extra_content.values())
        if architecture in names:
            return name
    return "AutoModel"


def render_head(head: Mapping[str, Any], tags: Iterable[str], **facts: str | None) -> str:
    """Write the head of a card: what that of its source says, with more tags and other facts."""
    said = {**head, **{key: value for key, value in facts.items() if value is not None}}
    said.setdefault("library_name", "transformers")
    ordered = {key: said[key] for key in _CARRIED if key in said}
    ordered["tags"] = list(dict.fromkeys((*head.get("tags", ()), *tags)))
    return f"{_MARK}\n{yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)}{_MARK}"


def _is_words(value: Any) -> bool:
    words = value if isinstance(value, list) else [value]
    return bool(words) and all(isinstance(word, str) and word for word in words)
