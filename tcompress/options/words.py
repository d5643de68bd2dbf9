"""Words for what was found and what is allowed, and from what validation rejects to problems."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from pydantic_core import ErrorDetails
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tcompress.options.document import Document, Key, Problem

Fragment = dict[str, Any]
"""A part of a JSON schema."""

_LONGEST = 40
# What other programs, or other commands, call an option: those that are meant, the likeliest first.
_MEANT = {
    "--samples": ("--limit", "--calib-samples"),
    "--max-samples": ("--limit", "--samples", "--calib-samples"),
    "--limit": ("--samples", "--calib-samples"),
    "--calib-samples": ("--samples", "--limit"),
    "--data": ("--calib",),
    "--dataset": ("--data", "--calib"),
    "--calib": ("--data",),
    "--train-data": ("--data", "--calib"),
    "--out": ("--output",),
    "--output-dir": ("--output",),
    "--ratio": ("--target",),
    "--quantize": ("--dtype",),
}


def quoted(names: Iterable[object]) -> str:
    """Lists names in backticks."""
    return ", ".join(f"`{name}`" for name in names)


def nearest(word: object, known: Iterable[object]) -> str | None:
    """Returns the closest known word, if one is close; `--calibration` is to `--calib` too."""
    words, typed = {str(item).lower(): str(item) for item in known}, str(word).lower()
    begun = sorted((name for name in words if len(name) > 4 and typed.startswith(name)), key=len)
    close = begun[-1:] or difflib.get_close_matches(typed, words, 1)
    return words[close[0]] if close and words[close[0]] != word else None


def meant(option: str, known: Collection[str]) -> str | None:
    """Returns the option of a command that another program calls otherwise, if one is known."""
    return next((name for name in _MEANT.get(option, ()) if name in known), None)


def suggestion(word: object, known: Iterable[object], otherwise: str) -> str:
    """Returns a hint that names the closest known word, or another hint."""
    close = nearest(word, known)
    return f"did you mean `{close}`?" if close else otherwise


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """Returns the end of a message that names the closest known word, or nothing."""
    return (close := suggestion(word, known, "")) and f"; {close}"


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
    return f"the text `{short}`" if node.tag.endswith(":str") else f"`{short}`"


def resolve(fragment: Fragment, root: Fragment) -> Fragment:
    """Follows references, and leaves out that a value may be null."""
    while True:
        if "$ref" in fragment:
            fragment = root["$defs"][fragment["$ref"].rpartition("/")[2]]
            continue
        members = _members_of(fragment)
        if len(members) != 1:
            return fragment
        fragment = members[0]


def _members_of(union: Fragment) -> list[Fragment]:
    """Lists the parts of which a value may fit any, null left out."""
    return [item for item in union.get("anyOf", ()) if item.get("type") != "null"]


def _options_of(fragment: Fragment) -> Fragment:
    """Picks the part with several option sets out of one that allows other values too."""
    return next((item for item in _members_of(fragment) if _methods_of(item)), fragment)


def _choices_of(fragment: Fragment) -> list[Any]:
    """Lists the values that are allowed, where they are few."""
    return [fragment["const"]] if "const" in fragment else list(fragment.get("enum", ()))


def _methods_of(fragment: Fragment) -> dict[str, str]:
    """Maps the names that select one of several option sets to references, if it is such a key."""
    return fragment.get("discriminator", {}).get("mapping", {})


def describe(fragment: Fragment, root: Fragment) -> str:
    """Says which values a part of a schema allows; `root` is the whole of it."""
    fragment = resolve(fragment, root)
    if methods := _methods_of(fragment):
        return f"a mapping with a `name`, one of {quoted(methods)}, and options of that method"
    if choices := _choices_of(fragment):
        return f"one of {quoted(choices)}" if len(choices) > 1 else quoted(choices)
    if "anyOf" in fragment:
        return " or ".join(describe(item, root) for item in _members_of(fragment))
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
    words: dict[str, Callable[[Any], str]] = {
        "exclusiveMinimum": lambda low: f"at least {low + 1}" if whole else f"greater than {low}",
        "minimum": lambda low: f"at least {low}",
        "exclusiveMaximum": lambda high: f"at most {high - 1}" if whole else f"less than {high}",
        "maximum": lambda high: f"at most {high}",
    }
    bounds = [say(fragment[key]) for key, say in words.items() if key in fragment]
    return ", " + " and ".join(bounds) if bounds else ""


def explain(errors: Iterable[ErrorDetails], document: Document, schema: Fragment) -> list[Problem]:
    """Turns validation errors, as pydantic lists them, into one problem for each key."""
    work = _Explanation(document, schema)
    # Unknown keys first: they may explain the missing ones.
    for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
        work.add(error)
    return list(work.problems.values())


class _Explanation:
    def __init__(self, document: Document, schema: Fragment) -> None:
        self.document, self.schema = document, schema
        self.problems: dict[Key, Problem] = {}
        self.misspelt: set[Key] = set()

    def add(self, error: ErrorDetails) -> None:
        kind, loc = error["type"], error["loc"]
        key, fragment = _locate(loc, self.schema)
        if kind == "default_factory_not_called" or self._of_other_member(kind, loc, key, fragment):
            return  # a default that depends on what is wrong is no problem of its own
        if kind == "extra_forbidden":
            self._unknown_key(*_locate(loc[:-1], self.schema), loc[-1])
        elif kind == "too_short" and any(place[: len(loc)] == loc for place in self.problems):
            return  # what is wrong in a list is no part of it
        elif kind == "missing":
            key, fragment = _locate(loc[:-1], self.schema)
            self._wrong((*key, loc[-1]), fragment.get("properties", {}).get(loc[-1], {}))
        elif loc[-1:] == ("[key]",):
            allowed = describe(fragment, self.schema) + self._meant(key[-1], fragment)
            text = f"`{key[-1]}`"
            self._report(key, f"found the key {text}; allowed is {allowed}", text, allowed)
        elif kind.startswith("union_tag"):
            self._method_name(key, _options_of(fragment))
        elif kind in ("value_error", "assertion_error"):
            self._report(key, str(error["ctx"]["error"]))
        else:
            self._wrong(key, fragment)

    def _of_other_member(
        self, kind: str, loc: Sequence[str | int], key: Key, fragment: Fragment
    ) -> bool:
        """Of a mapping where a name may stand too, its options are judged, not that it is none."""
        if not isinstance(self.document.nodes.get(key), MappingNode):
            return False
        named = kind == "literal_error" and _options_of(fragment) is not fragment
        return named or (kind == "string_type" and loc[-1] == "str")

    def _report(
        self, key: Key, text: str, found: str | None = None, allowed: str | None = None
    ) -> None:
        if key not in self.misspelt and key not in self.problems:
            line = self.document.line(key)
            self.problems[key] = Problem(line, text, key, found=found, allowed=allowed)

    def _wrong(self, key: Key, fragment: Fragment) -> None:
        allowed = describe(fragment, self.schema)
        node = self.document.nodes.get(key)
        if node is None:
            self._report(key, f"missing; allowed is {allowed}", "missing", allowed)
            return
        if allowed == "text" and node.tag.endswith((":int", ":float", ":bool")):
            allowed += f': write `"{node.value}"`'
        elif isinstance(node, ScalarNode):
            allowed += self._meant(node.value, fragment)
        self._report(key, f"found {found(node)}; allowed is {allowed}", found(node), allowed)

    def _meant(self, value: Any, fragment: Fragment) -> str:
        """Ends a message about a wrong value with what was meant, if that can be told."""
        fragment = resolve(fragment, self.schema)
        members = _members_of(fragment) or [fragment]
        known = [choice for item in members for choice in _choices_of(item)]
        if close := did_you_mean(value, known):
            return close
        if fragment.get("type") != "number" or fragment.get("exclusiveMaximum") != 1:
            return ""
        text = str(value).strip()
        try:
            percent = float(text.removesuffix("%"))
        except ValueError:
            return ""
        fits = 0 < percent < 100 and (percent >= 5 or text.endswith("%"))
        return f"; {percent:g} % is `{percent / 100:g}`" if fits else ""

    def _unknown_key(self, key: Key, fragment: Fragment, name: str | int) -> None:
        known = list(fragment.get("properties", {}))
        text = f"unknown key; known keys are {quoted(known)}{did_you_mean(name, known)}"
        self._report((*key, name), text)
        if meant := nearest(name, known):
            self.misspelt.add((*key, meant))

    def _method_name(self, parent: Key, fragment: Fragment) -> None:
        name = fragment["discriminator"]["propertyName"]
        key = (*parent, name)
        beside = [place[-1] for place in self.document.nodes if place and place[:-1] == parent]
        close = nearest(name, beside)
        if key not in self.document.nodes and close is not None:
            self._report((*parent, close), f"unknown key; did you mean `{name}`?")
            return
        bare = isinstance(self.document.nodes.get(parent), ScalarNode)  # the name alone
        self._wrong(parent if bare else key, {"enum": list(_methods_of(fragment))})


def _locate(loc: Sequence[str | int], schema: Fragment) -> tuple[Key, Fragment]:
    """Finds the key of an error, without names of union members, and its part of the schema."""
    key: list[str | int] = []
    here = resolve(schema, schema)
    for step in loc:
        members = [resolve(item, schema) for item in here.get("anyOf", ())]
        sections = {item["title"]: item for item in members if "properties" in item}
        if str(step).startswith("tagged-union") and loc[-1] != step:
            here = _options_of(here)
        elif step in (methods := _methods_of(here)):
            here = {"$ref": methods[str(step)]}
        elif step in sections:
            here = sections[str(step)]
        elif isinstance(step, int) and "items" in here:
            here = here["items"]
            key.append(step)
        elif step in here.get("properties", {}):
            here = here["properties"][step]
            key.append(step)
        elif isinstance(under := here.get("additionalProperties"), dict):
            names = here.get("propertyNames", {"type": "integer"})  # text fits always
            here = names if loc[-1] == "[key]" else under
            key.append(step)
        here = resolve(here, schema)
    return tuple(key), here
