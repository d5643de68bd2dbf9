"""The generated reference and JSON schema of recipes."""

from __future__ import annotations

from typing import Any

import pytest

import tcompress.options
from tcompress.options import json_schema, method_names
from tcompress.options.words import describe
from tcompress.reporting.reference import reference_markdown


def objects() -> list[dict[str, Any]]:
    schema = json_schema()
    return [schema, *schema["$defs"].values()]


def test_objects_of_the_schema_are_closed_and_every_key_is_described() -> None:
    for item in objects():
        # Configurations of models have whatever keys their family has.
        assert item["additionalProperties"] is (item["title"] == "Architecture")
        assert set(item.get("required", ())) <= set(item["properties"])
        assert item["description"]
        assert [name for name, key in item["properties"].items() if not key["description"]] == []


def test_reference_has_every_key_once() -> None:
    page = reference_markdown()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(item["properties"]) for item in objects())
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}
    for name in method_names():
        assert f"`{name}`" in page


@pytest.mark.parametrize(
    ("fragment", "words"),
    [
        ({"type": "string", "pattern": "^[0-9]+GB$"}, "text"),
        ({"type": "array"}, "a list"),
        ({"type": "object"}, "a mapping"),
        ({}, "anything"),
        (
            {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            "a whole number or text",
        ),
        (
            {"type": "integer", "exclusiveMaximum": 5, "minimum": 2},
            "a whole number, at least 2 and at most 4",
        ),
        ({"type": "number", "maximum": 2.5}, "a number, at most 2.5"),
    ],
)
def test_words_for_types_that_future_keys_may_have(fragment: dict[str, Any], words: str) -> None:
    assert describe(fragment, {}) == words


def test_package_exports_what_it_names() -> None:
    for name in tcompress.options.__all__:
        assert getattr(tcompress.options, name) is not None
    with pytest.raises(AttributeError, match="has no attribute `nothing`"):
        _ = tcompress.options.nothing
