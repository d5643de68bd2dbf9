"""Reference of the recipe format, generated from its models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from tcompress.attention import replacements
from tcompress.options.method_options import AUTO_ABOUT, AutoSpec
from tcompress.options.schema import json_schema
from tcompress.options.words import Fragment, describe, quoted, resolve
from tcompress.structures import structures

_INTRO = """\
# Recipe reference

A recipe is a YAML or JSON file. Keys that are not listed here are errors. Plain values are read by
the rules of YAML 1.2: `1e-3` is a number, and `yes` is text.
"""

_HEAD = "| key | type | default | description |\n|---|---|---|---|\n"


def reference_markdown() -> str:
    """Returns a page with every key, its type, default and description."""
    schema = json_schema()
    return "\n".join([_INTRO, *_sections(schema, "", schema), *_method_sections(schema)])


def _sections(fragment: Fragment, path: str, root: Fragment) -> Iterator[str]:
    """Writes a section for a mapping, then one for each mapping inside it."""
    title = f"`{path}`" if path else "Top level"
    yield f"## {title}\n\n{_sentence(fragment['description'])}\n\n{_table(fragment, path, root)}"
    for name, raw in fragment["properties"].items():
        inner, inner_path = _inner(raw, _join(path, name), root)
        inner = _mapping(inner, root) or inner
        if "properties" in inner:
            yield from _sections(inner, inner_path, root)


def _method_sections(root: Fragment) -> Iterator[str]:
    """Writes the options of structures, of `auto` and of attention replacements."""
    described: list[tuple[str, type[BaseModel], str]] = [
        *(("method", item.spec, _about(item)) for item in structures()),
        ("method", AutoSpec, AUTO_ABOUT),
        *(("attention", item.spec, _about(item)) for item in replacements()),
    ]
    for section, spec, about in described:
        fragment = root["$defs"][spec.__name__]
        raw = fragment["properties"]["name"]
        names = quoted(raw.get("enum", [raw.get("const")]))
        table = _table(fragment, f"convert.{section}", root)
        yield f"## {section.capitalize()} {names}\n\n{about}\n\n{table}"


def _about(item: Any) -> str:
    return f"{_sentence(item.summary)} {_sentence(item.reference)}"


def _table(fragment: Fragment, path: str, root: Fragment) -> str:
    required = fragment.get("required", ())
    rows = ""
    for name, raw in fragment["properties"].items():
        default = "required" if name in required else _default(raw.get("default"))
        cells = (f"`{_join(path, name)}`", _type(raw, path, name, root), default)
        text = " | ".join(cell.replace("|", "\\|") for cell in (*cells, raw["description"]))
        rows += f"| {text} |\n"
    return _HEAD + rows


def _type(raw: Fragment, path: str, name: str, root: Fragment) -> str:
    inner, inner_path = _inner(raw, _join(path, name), root)
    if "properties" in inner:
        kind = "a list of mappings" if inner_path.endswith("[]") else "a mapping"
        return f"{kind}, see `{inner_path}`"
    return describe(raw, root) + (f", see `{inner_path}`" if _mapping(inner, root) else "")


def _mapping(fragment: Fragment, root: Fragment) -> Fragment | None:
    """The mapping that may stand where something else may stand too."""
    members = [resolve(item, root) for item in fragment.get("anyOf", ())]
    return next((item for item in members if "properties" in item), None)


def _inner(raw: Fragment, path: str, root: Fragment) -> tuple[Fragment, str]:
    """Looks through lists to what they hold."""
    fragment = resolve(raw, root)
    if fragment.get("type") == "array" and "items" in fragment:
        return resolve(fragment["items"], root), f"{path}[]"
    return fragment, path


def _default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "its defaults" if value else "empty"
    if isinstance(value, list):
        return quoted(value) or "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
