"""From what validation rejects to problems in plain words, each with its line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from yaml.nodes import MappingNode, ScalarNode

from tcompress.options.document import Document, Key, Problem
from tcompress.options.words import (
    Fragment,
    describe,
    did_you_mean,
    found,
    meant,
    methods_of,
    nearest,
    options_of,
    quoted,
    resolve,
)


def explain(
    errors: Iterable[Mapping[str, Any]], document: Document, schema: Fragment
) -> list[Problem]:
    """Turns validation errors into problems.

    Args:
        errors: Errors as pydantic lists them; of the known kinds only the place is used.
        document: What was validated.
        schema: JSON schema of what is allowed.

    Returns:
        One problem for each key; a required key that is missing because its name is misspelt
        makes one problem, not two.
    """
    work = _Work(document, schema)
    # Unknown keys first: they may explain the missing ones.
    for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
        work.add(error)
    return list(work.problems.values())


@dataclass
class _Work:
    document: Document
    schema: Fragment
    problems: dict[Key, Problem] = field(default_factory=dict)
    misspelt: set[Key] = field(default_factory=set)

    def add(self, error: Mapping[str, Any]) -> None:
        kind, loc = error["type"], error["loc"]
        # A default that depends on what is wrong is no problem of its own.
        if kind == "default_factory_not_called" or self._about_other_member(kind, loc):
            return
        if kind == "extra_forbidden":
            self._unknown_key(loc[:-1], loc[-1])
        elif kind == "too_short" and any(key[: len(loc)] == loc for key in self.problems):
            return  # what is wrong in a list is no part of it
        elif kind == "missing":
            key, fragment = _locate(loc[:-1], self.schema)
            allowed = fragment.get("properties", {}).get(loc[-1], {})
            said = describe(allowed, self.schema)
            self._report((*key, loc[-1]), f"missing; allowed is {said}", "missing", said)
        elif loc[-1:] == ("[key]",):
            key, fragment = _locate(loc, self.schema)
            allowed = describe(fragment, self.schema) + meant(key[-1], fragment, self.schema)
            text = f"`{key[-1]}`"
            self._report(key, f"found the key {text}; allowed is {allowed}", text, allowed)
        elif kind.startswith("union_tag"):
            self._method_name(loc)
        elif kind in ("value_error", "assertion_error"):
            self._report(_locate(loc, self.schema)[0], str(error["ctx"]["error"]))
        else:
            key, fragment = _locate(loc, self.schema)
            self._wrong(key, fragment)

    def _about_other_member(self, kind: str, loc: tuple[str | int, ...]) -> bool:
        """Of a mapping where a name may stand too, its options are judged, not that it is none."""
        key, fragment = _locate(loc, self.schema)
        mapping = isinstance(self.document.nodes.get(key), MappingNode)
        if kind == "string_type" and mapping and loc[-1] == "str":
            return True
        return kind == "literal_error" and mapping and options_of(fragment) is not fragment

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
        ending = ""
        if isinstance(node, ScalarNode):
            ending = meant(node.value, fragment, self.schema)
        if allowed == "text" and node.tag.endswith((":int", ":float", ":bool")):
            ending = f': write `"{node.value}"`'
        text, said = found(node), allowed + ending
        self._report(key, f"found {text}; allowed is {said}", text, said)

    def _unknown_key(self, loc: Sequence[str | int], name: str) -> None:
        key, fragment = _locate(loc, self.schema)
        known = list(fragment.get("properties", {}))
        text = f"unknown key; known keys are {quoted(known)}{did_you_mean(name, known)}"
        self._report((*key, name), text)
        meant = nearest(name, known)
        if meant is not None:
            self.misspelt.add((*key, meant))

    def _method_name(self, loc: Sequence[str | int]) -> None:
        parent, fragment = _locate(loc, self.schema)
        fragment = options_of(fragment)
        name = fragment["discriminator"]["propertyName"]
        key = (*parent, name)
        close = nearest(name, self.document.keys(parent))
        if key not in self.document.nodes and close is not None:
            self._report((*parent, close), f"unknown key; did you mean `{name}`?")
            return
        names = {"enum": list(methods_of(fragment))}
        if isinstance(self.document.nodes.get(parent), ScalarNode):  # the name alone
            key = parent
        self._wrong(key, names)


def _locate(loc: Sequence[str | int], schema: Fragment) -> tuple[Key, Fragment]:
    """Finds the key and the part of the schema that an error is about.

    Steps that are no part of the document (pydantic inserts the name of the member of a union)
    are left out of the key.
    """
    key: list[str | int] = []
    here = resolve(schema, schema)
    for step in loc:
        if str(step).startswith("tagged-union") and loc[-1] != step:
            here = options_of(here)
        elif step in (methods := methods_of(here)):
            here = {"$ref": methods[str(step)]}
        elif step in (sections := _sections_of(here, schema)):
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


def _sections_of(fragment: Fragment, schema: Fragment) -> dict[str, Fragment]:
    """Mappings that a value may be, by the names that validation calls them."""
    members = [resolve(item, schema) for item in fragment.get("anyOf", ())]
    return {item["title"]: item for item in members if "properties" in item}
