"""`tcompress methods`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tcompress.cli.terminal import suggestion
from tcompress.errors import InputError
from tcompress.options.commands import Described, Json
from tcompress.options.fields import Options, typed_fields

if TYPE_CHECKING:
    from rich.table import Table

    from tcompress.attention import Mechanism
    from tcompress.structures import Structure

EXAMPLES = ("tcompress methods", "tcompress methods lprod", "tcompress methods --json")


def methods(call: Described, manner: Json) -> None:
    """Does what `tcompress methods` says."""
    from tcompress.cli.terminal import print_json, results, silence_libraries

    silence_libraries(verbose=False)
    from tcompress.attention import mechanisms
    from tcompress.options.words import quoted
    from tcompress.structures import structures

    facts = [*(method_facts(item) for item in structures()), auto_facts()]
    facts += [method_facts(item) for item in mechanisms()]
    known = [name for fact in facts for name in (fact["name"], *fact["aliases"])]
    for name in call.names:
        if name not in known:
            hint = suggestion(name, known) or "see `tcompress methods`"
            raise InputError(f"unknown method `{name}`; methods are {quoted(known)}", hint)
    if call.names:
        facts = [fact for fact in facts if {fact["name"], *fact["aliases"]} & {*call.names}]
    if manner.as_json:
        print_json({"methods": facts})
        return
    screen = results()
    for method in facts:
        also = f" (also `{'`, `'.join(method['aliases'])}`)" if method["aliases"] else ""
        screen.print(f"{method['name']}{also}: {method['summary']}", style="bold")
        kind = "attention" if "mechanism" in method else "structure"
        screen.print("; ".join(filter(None, (kind, method["reference"]))), style="dim")
        screen.print(_table(method["options"]))


def method_facts(item: Structure[Any, Any] | Mechanism[Any, Any]) -> dict[str, Any]:
    """Describes a method from the registry.

    Returns:
        Its name, aliases, summary, reference and options with types and defaults.
    """
    from tcompress.structures import Structure

    name, *others = item.spec.names()
    return {
        "name": name,
        "aliases": others,
        "structure" if isinstance(item, Structure) else "mechanism": item.name,
        "summary": item.summary,
        "reference": item.reference,
        "options": _options(item.spec),
    }


def auto_facts() -> dict[str, Any]:
    """Describes the method that chooses among others, in the same form."""
    from tcompress.options.method_options import AUTO, AUTO_ABOUT, AutoSpec

    summary, _, reference = AUTO_ABOUT.partition(". ")
    return {
        "name": AUTO,
        "aliases": [],
        "structure": None,
        "summary": summary[:1].lower() + summary[1:],
        "reference": reference,
        "options": _options(AutoSpec),
    }


def _options(spec: type[Options]) -> list[dict[str, Any]]:
    from tcompress.options.words import describe

    schema = spec.model_json_schema()
    flags = {item.place[-1]: item.name for item in typed_fields(spec)}
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


def _table(rows: list[dict[str, Any]]) -> Table:
    from tcompress.cli.terminal import table

    result = table("option", "takes", "default", "")
    for row in rows:
        default = "" if row["default"] in (None, {}, [], ()) else str(row["default"]).lower()
        option = row["option"] or f"{row['name']} (in recipes)"
        result.add_row(option, row["type"], default, row["description"])
    return result
