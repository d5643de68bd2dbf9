"""What the card of a model says of it in its head, and heads of cards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tcompress.models.names import CARD

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
