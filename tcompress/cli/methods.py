"""`tcompress methods`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tcompress.cli import options as opt

if TYPE_CHECKING:
    from rich.table import Table

    from tcompress.mechanisms import Mechanism
    from tcompress.structures import Spec, Structure

EPILOG = opt.examples("tcompress methods", "tcompress methods --json")


def methods(json: opt.Json = False) -> None:
    """List the methods and their options."""
    from tcompress.cli.output import print_json, results, silence_libraries

    silence_libraries(verbose=False)
    from tcompress.mechanisms import mechanisms
    from tcompress.structures import structures

    facts = [*(method_facts(item) for item in structures()), auto_facts()]
    facts += [method_facts(item) for item in mechanisms()]
    if json:
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
    from tcompress.cli.further import method_options
    from tcompress.cli.names import MECHANISM_OPTIONS
    from tcompress.structures import Structure

    # An option of the command line that a structure and a mechanism have is the structure's.
    options = method_options() if isinstance(item, Structure) else MECHANISM_OPTIONS
    names = item.spec.model_fields["name"].annotation.__args__
    return {
        "name": names[0],
        "aliases": list(names[1:]),
        "structure" if isinstance(item, Structure) else "mechanism": item.name,
        "summary": item.summary,
        "reference": item.reference,
        "options": _options(item.spec, options),
    }


def auto_facts() -> dict[str, Any]:
    """Describes the method that chooses among others, in the same form."""
    from tcompress.cli.names import METHOD_OPTIONS
    from tcompress.recipe.methods import AUTO, AUTO_ABOUT, AutoSpec

    summary, _, reference = AUTO_ABOUT.partition(". ")
    return {
        "name": AUTO,
        "aliases": [],
        "structure": None,
        "summary": summary[:1].lower() + summary[1:],
        "reference": reference,
        "options": _options(AutoSpec, METHOD_OPTIONS),
    }


def _options(spec: type[Spec], options: Sequence[str]) -> list[dict[str, Any]]:
    from tcompress.cli.names import flag
    from tcompress.recipe.words import describe

    schema = spec.model_json_schema()
    return [
        {
            "name": name,
            "option": flag(name) if name in options else None,
            "type": describe(fragment, schema),
            "default": fragment.get("default"),
            "description": fragment["description"],
        }
        for name, fragment in schema["properties"].items()
        if name != "name"
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    from tcompress.cli.output import table

    result = table("option", "takes", "default", "")
    for row in rows:
        default = "" if row["default"] in (None, {}, [], ()) else str(row["default"]).lower()
        option = row["option"] or f"{row['name']} (in recipes)"
        result.add_row(option, row["type"], default, row["description"])
    return result
