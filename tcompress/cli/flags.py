"""Commands made of models of options: the one place where flags are declared."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from tcompress.cli.terminal import silence_libraries
from tcompress.errors import RecipeError
from tcompress.fields import Typed, members, typed_fields, words_of
from tcompress.options import complete
from tcompress.options.commands import COMMON, Hub, Manner
from tcompress.options.method_options import replacement_names
from tcompress.options.read import Given
from tcompress.options.words import quoted

_NUMBERS = {int: "N", float: "NUMBER"}
_MOST_WORDS, _LONGEST_METAVAR = 4, 12  # one by one; the latter where the help is to be short


def examples(*lines: str) -> str:
    """Writes the end of a command's help."""
    return "\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])


def only(*names: str, panel: str | None = None) -> Callable[[Sequence[Typed]], list[Typed]]:
    """Picks, of a model's options, those of a command by flag, under another heading if given."""
    return lambda fields: [
        replace(item, flag=replace(item.flag, panel=panel or item.flag.panel))
        for item in fields
        if item.flag.names[0] in names
    ]


@dataclass(frozen=True)
class _Part:
    """A parameter of a command's function: a model, or (`raw`) what was typed of it."""

    name: str
    kind: Any
    raw: bool
    fields: tuple[Typed, ...]


class _Command(TyperCommand):
    """A command whose help lists `--help` among the common options, and no `folded` parameter."""

    folded: frozenset[str] = frozenset()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # Only here: completion offers what is hidden no more.
        folded = [item for item in self.params if item.name in self.folded]
        for item in folded:
            item.hidden = True  # type: ignore[attr-defined]
        for item in self.params:
            if item.param_type_name == "argument":  # its name says what it takes
                item.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)
        for item in folded:
            item.hidden = False  # type: ignore[attr-defined]

    def get_help_option(self, ctx: Any) -> Any:
        found: Any = super().get_help_option(ctx)
        if found is not None:
            found.rich_help_panel, found.metavar = COMMON, ""
        return found


def command(
    app: typer.Typer, name: str, *lines: str, panels: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a command whose flags are the options of the models that a function takes.

    A parameter `options: Evaluate` gets the model; `said: Given[Evaluate]` what was typed, to be
    put over what a recipe says. Problems of all models are one error. `lines` are examples; with
    `panels`, headings in their order, help shows what stands before a semicolon alone, and leaves
    the options of some methods to `tcompress methods`.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        run = flagged(function, name, panels)
        kind = type("_Command", (_Command,), {"folded": _folded(function) if panels else ()})
        app.command(name, cls=kind, epilog=examples(*lines), **settings)(run)
        return function

    return add


_FOLDED = ("tt", "qtt", "tucker")


def _folded(function: Callable[..., None]) -> frozenset[str]:
    """Names the parameters that attention replacements, tensor trains or Tucker alone have."""
    replacements = {*replacement_names(), *_FOLDED}
    return frozenset(
        _identifier(part, item)
        for part in _parts(function)
        for item in part.fields
        if item.owners and replacements.issuperset(item.owners)
    )


def flagged(function: Callable[..., None], name: str, panels: Sequence[str] = ()) -> Any:
    """Makes a function that takes flags out of one that takes models."""
    parts = list(_parts(function))

    def run(**given: Any) -> None:
        models = _bound(parts, given, name)
        if isinstance(manner := models.get("manner"), Manner):
            remote = any(isinstance(model, Hub) for model in models.values())
            downloads = remote and not manner.quiet and sys.stderr.isatty()
            silence_libraries(verbose=manner.verbose, downloads=downloads)
        function(**models)

    found = [(item, part) for part in parts for item in part.fields]
    if panels:
        ranks = {panel: rank for rank, panel in enumerate(panels)}
        found.sort(key=lambda pair: ranks.get(pair[0].flag.panel or "", len(ranks)))
    # Python wants those that must be given first.
    found.sort(key=lambda pair: not _required(*pair))
    parameters = [_parameter(item, part, brief=bool(panels)) for item, part in found]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parts(function: Callable[..., None]) -> Iterator[_Part]:
    taken: set[str] = set()
    for name, hint in get_type_hints(function, include_extras=True).items():
        if name == "return":
            continue
        hint, *picks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        raw = get_origin(hint) is Given
        kind = get_args(hint)[0] if raw else hint
        fields = typed_fields(kind)
        for pick in picks:
            fields = pick(fields)
        fields = [item for item in fields if item.flag.names[0] not in taken]
        taken |= {item.flag.names[0] for item in fields}
        yield _Part(name, kind, raw, tuple(fields))


def _bound(parts: Sequence[_Part], given: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Turns flags into the models that a function takes."""
    found: dict[str, Any] = {}
    wrong: list[RecipeError] = []
    for part in parts:
        typed: dict[Any, Any] = {}
        for item in part.fields:
            value = given[_identifier(part, item)]
            if value is True and _turns_off(item):
                value = False
            # A list that is not given is None or empty, by version of the parser.
            if value is not None and value != [] and value != ():
                typed[item.place] = [value] if isinstance(value, str) else value
        said = Given(part.kind, command, typed, {item.place: item for item in part.fields})
        try:
            found[part.name] = said if part.raw else said.read()
        except RecipeError as error:
            wrong.append(error)
    if wrong:
        raise RecipeError("; ".join(error.message for error in wrong), wrong[0].hint)
    return found


def _turns_off(item: Typed) -> bool:
    return item.flag.names[0].startswith("--no-")


def _identifier(part: _Part, item: Typed) -> str:
    return "_".join((part.name, *item.place)).replace("-", "_")


def _required(item: Typed, part: _Part) -> bool:
    return item.info.is_required() and not part.raw and len(item.place) == 1


def _parameter(item: Typed, part: _Part, *, brief: bool) -> inspect.Parameter:
    flag, switch = item.flag, members(item.annotation) == [bool]
    required = _required(item, part)
    shown: dict[str, Any] = {"help": help_of(item, brief=brief), "show_default": False}
    if switch:
        shown["metavar"] = ""  # newer parsers write `<bool>` otherwise
    else:
        metavar = flag.metavar or _metavar(item, brief=brief)
        shown |= {"metavar": metavar, "autocompletion": offers(item)}
    kind: Any = bool if switch else list[str] if _several(item) else str
    names = sorted(flag.names, key=len)  # short ones first
    # A switch that is on or of unknown state by default can be turned off too.
    if switch and item.info.default is not False and not _turns_off(item) and "/" not in names[0]:
        names = [f"{names[0]}/--no-{names[0].removeprefix('--')}"]
    declared = (
        typer.Argument(**shown)
        if flag.positional
        else typer.Option(*names, rich_help_panel=flag.panel, **shown)
    )
    return inspect.Parameter(
        _identifier(part, item),
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[kind if required else kind | None, declared],
    )


def _several(item: Typed) -> bool:
    return any(get_origin(part) in (tuple, dict) for part in members(item.annotation))


def _metavar(item: Typed, *, brief: bool) -> str:
    if words := words_of(item.annotation):
        listed = "|".join(words)
        fits = len(listed) <= _LONGEST_METAVAR if brief else len(words) <= _MOST_WORDS
        return listed if fits else "NAME"
    parts = members(item.annotation)
    return next((text for kind, text in _NUMBERS.items() if kind in parts), "TEXT")


def help_of(item: Typed, *, brief: bool = False) -> str:
    """Writes the help of a flag: whose it is, what it is, and its default."""
    text = item.info.description or ""
    text = text.partition(";")[0] if brief else text
    words = words_of(item.annotation)
    named = item.flag.metavar in (None, "NAME") and len(words) > _MOST_WORDS
    if named and not brief and words[0] not in text:
        text = f"{text}: {quoted(words)}"
    if item.owners:
        text = f"{', '.join(item.owners)}: {text}"
    elif not text.startswith("`"):
        text = text[:1].upper() + text[1:]
    value = item.info.default
    told = item.info.is_required() or value in (None, (), "") or isinstance(value, bool | dict)
    if not told and "default" not in text:
        text += f". Default `{','.join(map(str, value if isinstance(value, tuple) else (value,)))}`"
    repeated = _several(item) and not (item.flag.splits or item.flag.positional or brief)
    return f"{text}." + (" Repeatable." if repeated else "")


def offers(item: Typed) -> Callable[[str], list[str]] | None:
    """Returns what shell completion asks."""
    if item.flag.complete is not None:
        return getattr(complete, item.flag.complete)
    words = words_of(item.annotation)
    return (lambda incomplete: complete.listed(words, incomplete)) if words else None
