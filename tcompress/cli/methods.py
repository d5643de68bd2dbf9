"""`tcompress methods`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tcompress.cli.terminal import print_json, results, table
from tcompress.errors import InputError
from tcompress.fields import Options, method_options
from tcompress.options.commands import Described, Json
from tcompress.options.method_options import AUTO, AUTO_ABOUT, AutoSpec
from tcompress.options.words import describe, quoted, suggestion

if TYPE_CHECKING:
    from tcompress.attention import AttentionReplacement
    from tcompress.structures import Structure

EXAMPLES = ("tcompress methods", "tcompress methods lprod", "tcompress methods --json")


def methods(call: Described, manner: Json) -> None:
    """Does what `tcompress methods` says."""
    from tcompress.attention import replacements
    from tcompress.structures import structures

    facts = [_facts(item, "structure") for item in structures()]
    summary, _, reference = AUTO_ABOUT.partition(". ")
    auto = {"structure": None, "summary": summary[:1].lower() + summary[1:]}
    facts.append(
        {"name": AUTO, "aliases": [], **auto, "reference": reference, "options": _options(AutoSpec)}
    )
    facts += [_facts(item, "mechanism") for item in replacements()]
    known = [name for fact in facts for name in (fact["name"], *fact["aliases"])]
    for name in call.names:
        if name not in known:
            hint = suggestion(name, known, "see `tcompress methods`")
            raise InputError(f"unknown method `{name}`; methods are {quoted(known)}", hint)
    if call.names:
        facts = [fact for fact in facts if {fact["name"], *fact["aliases"]} & {*call.names}]
    if manner.as_json:
        print_json({"methods": facts})
        return
    screen = results()
    for method in facts:
        also = f" (also {quoted(method['aliases'])})" if method["aliases"] else ""
        screen.print(f"{method['name']}{also}: {method['summary']}", style="bold")
        kind = "attention" if "mechanism" in method else "structure"
        screen.print("; ".join(filter(None, (kind, method["reference"]))), style="dim")
        rows = table("option", "takes", "default", "")
        for row in method["options"]:
            default = "" if row["default"] in (None, {}, [], ()) else str(row["default"]).lower()
            option = row["option"] or f"{row['name']} (in recipes)"
            rows.add_row(option, row["type"], default, row["description"])
        screen.print(rows)


def _facts(item: Structure[Any, Any] | AttentionReplacement[Any, Any], kind: str) -> dict[str, Any]:
    name, *others = item.spec.names()
    about = {"summary": item.summary, "reference": item.reference}
    options = {"options": _options(item.spec)}
    return {"name": name, "aliases": others, kind: item.name, **about, **options}


def _options(spec: type[Options]) -> list[dict[str, Any]]:
    schema = spec.model_json_schema()
    flags = {item.place[-1]: item.name for item in method_options(spec)}
    return [
        {
            "name": name,
            "option": flags.get(name),
            "type": describe(fragment, schema),
            "default": fragment.get("default"),
            "description": fragment["description"],
        }
        for name, fragment in schema["properties"].items()
        if name != "name"
    ]
