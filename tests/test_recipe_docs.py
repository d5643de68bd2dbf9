"""The generated reference and JSON schema of recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import tcompress.options
from tcompress.options import json_schema, method_names
from tcompress.options.words import describe
from tcompress.reporting.reference import reference_markdown

TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}


def fragments(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from fragments(item)
    elif isinstance(value, list):
        for item in value:
            yield from fragments(item)


def objects() -> list[dict[str, Any]]:
    schema = json_schema()
    return [schema, *schema["$defs"].values()]


def test_schema_is_json_and_names_its_draft() -> None:
    assert json.loads(json.dumps(json_schema())) == json_schema()
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_references_and_types_of_the_schema_are_valid() -> None:
    schema = json_schema()
    known = {f"#/$defs/{name}" for name in schema["$defs"]}
    assert {item["$ref"] for item in fragments(schema) if "$ref" in item} <= known
    kinds = {item["type"] for item in fragments(schema) if isinstance(item.get("type"), str)}
    assert kinds <= TYPES


def test_objects_of_the_schema_are_closed_and_every_key_is_described() -> None:
    for item in objects():
        # Configurations of models have whatever keys their family has.
        assert item["additionalProperties"] is (item["title"] == "Architecture")
        assert set(item.get("required", ())) <= set(item["properties"])
        assert item["description"]
        assert [name for name, key in item["properties"].items() if not key["description"]] == []


def test_name_of_a_method_is_required_in_the_schema() -> None:
    mapping = json_schema()["properties"]["convert"]
    assert mapping["$ref"] == "#/$defs/Convert"
    method, _ = json_schema()["$defs"]["Convert"]["properties"]["method"]["anyOf"]
    assert set(method["discriminator"]["mapping"]) == set(method_names())
    for item in method["oneOf"]:
        options = json_schema()["$defs"][item["$ref"].rpartition("/")[2]]
        assert options["required"][0] == "name"


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
