"""From YAML text to plain data, with the place of every value.

Plain values are read by the YAML 1.2 rules: `1e-3` is a number, `yes` is text, and so is a date.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Key = tuple[str | int, ...]
"""Where a value sits: names of keys and indices of lists, from the top."""

_TAG = "tag:yaml.org,2002:"
_STRING = _TAG + "str"
_JSON_ONLY = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_MOST_VALUES, _MOST_CHARACTERS = 20_000, 100_000
_DIGITS = 16  # of whole numbers, the sign included; no size has as many
_SYNTAX = "indent with spaces, and put text that contains `: ` or ` #` in quotes"
_PLAIN = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what was found, and what is allowed."""

    line: int
    text: str
    key: Key = ()
    column: int | None = None
    found: str | None = None
    allowed: str | None = None


class Unreadable(Exception):
    """The text cannot be read as a document at all."""

    def __init__(
        self, text: str, mark: Any = None, hint: str | None = None, *, line: int = 1
    ) -> None:
        super().__init__(text)
        line, column = (mark.line + 1, mark.column + 1) if mark else (line, None)
        self.problem, self.hint = Problem(line, text, column=column), hint


@dataclass
class Document:
    """A document as plain data, with nodes and lines (from 1) by key, and keys given twice."""

    data: Any = None
    nodes: dict[Key, Node] = field(default_factory=dict)
    lines: dict[Key, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, key: Key) -> int:
        """Line of a value, or of what it should be part of."""
        while key not in self.lines:
            key = key[:-1]
        return self.lines[key]


class _Loader(yaml.BaseLoader):
    """Composes nodes; the tags of plain values follow YAML 1.2."""


class RecipeDumper(yaml.SafeDumper):
    """Writes text in quotes wherever YAML 1.1 or 1.2 would read something else."""


def _write_text(dumper: RecipeDumper, text: str) -> ScalarNode:
    # PyYAML turns the rarer line breaks into plain ones, unless they are escaped.
    rare = any(character in text for character in "\x85\u2028\u2029")
    return dumper.represent_scalar(_STRING, text, style='"' if rare else None)


RecipeDumper.add_representer(str, _write_text)

for _name, _pattern in _PLAIN.items():
    for _class in (_Loader, RecipeDumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), None)


def read_document(text: str) -> Document:
    """Reads YAML or JSON, or raises `Unreadable`, which says where."""
    document = Document()
    if len(text) > _MOST_CHARACTERS:
        most = f"{_MOST_CHARACTERS:,} are the most"
        raise Unreadable(f"{len(text):,} characters are too many for a recipe, {most}")
    try:
        root = yaml.compose(_as_yaml(text), _Loader)
        if root is None:
            raise Unreadable("the recipe is empty")
        document.lines[()] = root.start_mark.line + 1
        document.data = _value(root, (), document)
    except yaml.reader.ReaderError as error:
        before = text[: error.position].splitlines(keepends=True)
        reason = f"not valid YAML: the character U+{int(error.character):04X} is not allowed"
        raise Unreadable(reason, hint=_SYNTAX, line=max(1, len(before))) from error
    except yaml.YAMLError as error:
        parts = [getattr(error, "context", None), getattr(error, "problem", None)]
        reason = f"not valid YAML: {', '.join(filter(None, parts)) or error}"
        raise Unreadable(reason, getattr(error, "problem_mark", None), _SYNTAX) from error
    except RecursionError as error:
        raise Unreadable("the recipe is nested too deeply, or an alias contains itself") from error
    return document


def _as_yaml(text: str) -> str:
    """Escapes, on their lines, tabs and rare characters that JSON allows and YAML does not."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _JSON_ONLY.sub(lambda match: f"\\u{ord(match[0]):04x}", text.replace("\t", " "))


def _value(node: Node, key: Key, document: Document) -> Any:
    if len(document.nodes) >= _MOST_VALUES:
        most = f"more than {_MOST_VALUES:,} values, those that aliases repeat included"
        raise Unreadable(f"the recipe has {most}", node.start_mark)
    document.nodes[key] = node
    if isinstance(node, MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, key, document)
    if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
        for index, item in enumerate(node.value):
            document.lines[(*key, index)] = item.start_mark.line + 1
        return [_value(item, (*key, index), document) for index, item in enumerate(node.value)]
    if isinstance(node, ScalarNode):
        return _scalar(node)
    raise _unknown_tag(node)


def _mapping(node: MappingNode, key: Key, document: Document) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name_node, value_node in node.value:
        mark = name_node.start_mark
        if not isinstance(name_node, ScalarNode):
            raise Unreadable("a key must be plain text, not a list or a mapping", mark)
        name = _text(name_node)
        if name in result:
            text = f"given again, first on line {document.lines[(*key, name)]}; keep one"
            document.problems.append(Problem(mark.line + 1, text, (*key, name)))
            continue
        document.lines[(*key, name)] = mark.line + 1
        result[name] = _value(value_node, (*key, name), document)
    return result


def _scalar(node: ScalarNode) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    try:
        if kind == "null":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int" and len(text) <= _DIGITS:
            return int(text)
        if kind == "float" and math.isfinite(number := float(text)):
            return number
    except (ValueError, KeyError) as error:
        raise Unreadable(f"`{text[:40]}` is not a valid `{kind}`", node.start_mark) from error
    if kind not in ("str", "int", "float"):
        raise _unknown_tag(node)
    node.tag = _STRING  # a number that is too large to count with included
    return _text(node)


def _text(node: ScalarNode) -> str:
    """JSON writes characters beyond 16 bits as two escapes; half of such a pair is an error."""
    text: str = node.value
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        reason = f"`{text}` holds half of a character, or bytes that are not UTF-8"
        raise Unreadable(reason, node.start_mark) from error


def _unknown_tag(node: Node) -> Unreadable:
    tag = node.tag.replace(_TAG, "!!")
    return Unreadable(f"the tag `{tag}` is not supported", node.start_mark)
