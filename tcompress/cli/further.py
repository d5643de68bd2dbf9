"""Flags of structures that were added to the registry and have none declared in `options.py`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from tcompress.cli.names import METHOD_OPTIONS, RECIPE_ONLY

_KEY = "tcompress.further"


def method_options() -> tuple[str, ...]:
    """Names all options of methods that the command line takes."""
    return (*METHOD_OPTIONS, *_fields())


def further(context: Any) -> dict[str, Any]:
    """Returns the values of such flags that were typed; the recipe's schema reads them."""
    found: dict[str, Any] = context.meta.get(_KEY, {})
    return found


class FurtherCommand(TyperCommand):
    """Takes every option of a registered structure as a flag.

    The registry, which takes seconds to import, is looked at only if a flag is not known.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes such flags and their values out, and leaves the rest to the parser."""
        known = {
            name for item in self.get_params(ctx) for name in (*item.opts, *item.secondary_opts)
        }
        if any(word.startswith("--") and word.partition("=")[0] not in known for word in args):
            args = _taken(args, ctx.meta.setdefault(_KEY, {}))
        return super().parse_args(ctx, args)


def _taken(args: list[str], found: dict[str, Any]) -> list[str]:
    fields, left, words = _fields(), [], iter(args)
    for word in words:
        flag, given, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if word == "--" or not flag.startswith("--") or name not in fields:
            left.append(word)
        elif given or fields[name] is not bool:
            found[name] = value if given else next(words, "")
        else:
            found[name] = True
        if word == "--":
            left.extend(words)
    return left


def _fields() -> dict[str, Any]:
    """Types of the options by name."""
    from tcompress.structures import structures

    specs = [item.spec.model_fields for item in structures()]
    own = {name: field.annotation for spec in specs for name, field in spec.items()}
    return {n: kind for n, kind in own.items() if n not in (*METHOD_OPTIONS, *RECIPE_ONLY)}
