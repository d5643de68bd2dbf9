"""Words for what was found and what is allowed, and problems that validation found."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Fragment = dict[str, Any]
"""A part of a JSON schema."""

_LONGEST = 40


def quoted(names: Iterable[object]) -> str:
    """Lists names in backticks."""
    return ", ".join(f"`{name}`" for name in names)


def nearest(word: object, known: Iterable[object]) -> str | None:
    """Returns the known word that is closest, if one is close."""
    words = {str(item).lower(): str(item) for item in known}
    close = difflib.get_close_matches(str(word).lower(), words, 1)
    return words[close[0]] if close and words[close[0]] != word else None


def as_share(value: Any, fragment: Fragment, root: Fragment) -> str:
    """Returns the end of a message about a percentage where a fraction is allowed, or nothing."""
    fragment = resolve(fragment, root)
    if fragment.get("type") != "number" or fragment.get("exclusiveMaximum") != 1:
        return ""
    try:
        percent = float(str(value).strip().removesuffix("%"))
    except ValueError:
        return ""
    fits = 0 < percent < 100 and (percent >= 5 or str(value).strip().endswith("%"))
    return f"; {percent:g} % is `{percent / 100:g}`" if fits else ""


def meant(value: Any, fragment: Fragment, root: Fragment) -> str:
    """Returns the end of a message about a wrong value that says what was meant, or nothing."""
    fragment = resolve(fragment, root)
    known = [choice for item in (members_of(fragment) or [fragment]) for choice in choices_of(item)]
    return did_you_mean(value, known) or as_share(value, fragment, root)


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """Returns the end of a message that names the closest known word, or nothing."""
    close = nearest(word, known)
    return f"; did you mean `{close}`?" if close else ""


def found(node: Node) -> str:
    """Says what was written."""
    if isinstance(node, MappingNode):
        return "a mapping" if node.value else "an empty mapping"
    if isinstance(node, SequenceNode):
        return "a list" if node.value else "an empty list"
    if node.tag.endswith(":null"):
        return "nothing"
    text = " ".join(str(node.value).split())
    short = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    if not short:
        return "empty text"
    return f"the text `{short}`" if is_text(node) else f"`{short}`"


def is_text(node: Node) -> bool:
    """Tells whether a value is text, and not a number or a boolean."""
    return isinstance(node, ScalarNode) and bool(node.tag.endswith(":str"))


def resolve(fragment: Fragment, root: Fragment) -> Fragment:
    """Follows references, and leaves out that a value may be null."""
    while True:
        if "$ref" in fragment:
            fragment = root["$defs"][fragment["$ref"].rpartition("/")[2]]
            continue
        members = members_of(fragment)
        if len(members) != 1:
            return fragment
        fragment = members[0]


def members_of(union: Fragment) -> list[Fragment]:
    """Lists the parts of which a value may fit any, null left out."""
    return [item for item in union.get("anyOf", ()) if item.get("type") != "null"]


def options_of(fragment: Fragment) -> Fragment:
    """Picks the part with several option sets out of one that allows other values too."""
    return next((item for item in members_of(fragment) if methods_of(item)), fragment)


def choices_of(fragment: Fragment) -> list[Any]:
    """Lists the values that are allowed, where they are few."""
    if "const" in fragment:
        return [fragment["const"]]
    return list(fragment.get("enum", ()))


def methods_of(fragment: Fragment) -> dict[str, str]:
    """Maps the names that select one of several option sets to references, if it is such a key."""
    mapping: dict[str, str] = fragment.get("discriminator", {}).get("mapping", {})
    return mapping


def describe(fragment: Fragment, root: Fragment) -> str:
    """Says which values a part of the schema allows.

    Args:
        fragment: The part.
        root: The whole schema, for references.
    """
    fragment = resolve(fragment, root)
    if methods := methods_of(fragment):
        return f"a mapping with a `name`, one of {quoted(methods)}, and options of that method"
    if choices := choices_of(fragment):
        return f"one of {quoted(choices)}" if len(choices) > 1 else quoted(choices)
    if "anyOf" in fragment:
        return " or ".join(describe(item, root) for item in members_of(fragment))
    return _describe_type(fragment, root)


def _describe_type(fragment: Fragment, root: Fragment) -> str:
    match fragment.get("type"):
        case "integer":
            return "a whole number" + _bounds(fragment)
        case "number":
            return "a number" + _bounds(fragment)
        case "string":
            *others, last = [f"`{item}`" for item in fragment.get("examples", ())] or [""]
            like = f"{', '.join(others)} or {last}" if others else last
            return f"text like {like}" if like else "text"
        case "boolean":
            return "`true` or `false`"
        case "array" if "items" in fragment:
            return f"a list, each entry {describe(fragment['items'], root)}"
        case "array":
            return "a list"
        case "object" if "properties" in fragment:
            return f"a mapping with the keys {quoted(fragment['properties'])}"
        case "object" if isinstance(fragment.get("additionalProperties"), dict):
            return f"a mapping, each value {describe(fragment['additionalProperties'], root)}"
        case "object":
            return "a mapping"
    return "anything"


def _bounds(fragment: Fragment) -> str:
    whole = fragment["type"] == "integer"
    bounds = []
    if "exclusiveMinimum" in fragment:
        low = fragment["exclusiveMinimum"]
        bounds.append(f"at least {low + 1}" if whole else f"greater than {low}")
    if "minimum" in fragment:
        bounds.append(f"at least {fragment['minimum']}")
    if "exclusiveMaximum" in fragment:
        high = fragment["exclusiveMaximum"]
        bounds.append(f"at most {high - 1}" if whole else f"less than {high}")
    if "maximum" in fragment:
        bounds.append(f"at most {fragment['maximum']}")
    return ", " + " and ".join(bounds) if bounds else ""
