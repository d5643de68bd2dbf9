"""What an option is: one field of a model, and how what was typed becomes its value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

# A model of options is a mapping of a recipe, the keywords of a function and the flags of a
# command. A field has its type, bounds, default and description as pydantic has them; `option` adds
# how it is typed on a command line, where that differs from its name.


DIGITS = 15
"""Most digits of a whole number: more than any size has."""

DType = Literal["float32", "float16", "bfloat16"]


class Section(BaseModel):
    """Options that belong together, such as a mapping of a recipe: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    panel: ClassVar[str | None] = None
    """Heading of its flags in the help."""


class Options(BaseModel):
    """Options that a name selects, of a method or of an attention replacement."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names that select these options, the usual one first."""
        return get_args(cls.model_fields["name"].annotation)


@dataclass(frozen=True)
class Flag:
    """How a field is typed on a command line.

    Attributes:
        names: Spellings; default the field's name with dashes. One that begins with `--no-` turns
            off what is on by default.
        panel: Heading in the help; default that of its model.
        metavar: What stands for the value in the help; default by type.
        complete: Function of `tcompress.options.complete` that offers values; default the words
            of a `Literal`.
        read: From what was typed to what a recipe would say; default by type. Raises `ValueError`
            with what is allowed.
        splits: Whether commas separate what may be given several times.
        positional: Whether it is an argument.
        whole: Whether, of several sets of options, the name alone is typed.
        environment: Variable that gives a default.
        off: Whether recipes and keywords alone set it.
    """

    names: tuple[str, ...] = ()
    panel: str | None = None
    metavar: str | None = None
    complete: str | None = None
    read: Callable[[list[str]], Any] | None = None
    splits: bool = True
    positional: bool = False
    whole: bool = False
    environment: str | None = None
    off: bool = False

    def __call__(self, schema: dict[str, Any]) -> None:
        """Adds nothing to a JSON schema; pydantic calls what it keeps beside a field."""


NO_FLAG = Flag(off=True)

DEVICES = "`auto`, `cpu`, `cuda`, `cuda:1` or `mps`"
Device = Annotated[
    str,
    Field(
        pattern=r"^(auto|cpu|mps|xpu|cuda(:[0-9]{1,3})?)$",
        examples=["auto", "cpu", "cuda", "cuda:1", "mps"],
        description=DEVICES,
        json_schema_extra=Flag(metavar="NAME", complete="devices"),
    ),
]


def option(default: Any, description: str, *names: str, **given: Any) -> Any:
    """Declares an option: a pydantic field that says how it is typed too.

    Args:
        default: Its default; `...` where it must be given.
        description: What it is, for help and reference: no capital, no full stop.
        *names: Its flags, where they are not made of its name.
        **given: Attributes of `Flag`, and keywords of `pydantic.Field` such as bounds.
    """
    kept = {name: given.pop(name) for name in Flag.__dataclass_fields__ if name in given}
    return Field(default, description=description, json_schema_extra=Flag(names, **kept), **given)


Place = tuple[str, ...]
"""Where a field sits: names of fields from the top."""


@dataclass(frozen=True)
class Typed:
    """A field as it is typed.

    Attributes:
        place: Where its value sits in the model.
        info: The field.
        flag: How it is typed.
        annotation: Its type.
        owners: Names of the methods that it belongs to, if it does not belong to all.
    """

    place: Place
    info: FieldInfo
    flag: Flag
    annotation: Any
    owners: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.flag.metavar) if self.flag.positional else self.flag.names[0]


def typed_fields(kind: type[BaseModel], place: Place = ()) -> list[Typed]:
    """Lists the fields of a model as they are typed, those of models inside it too."""
    found: dict[str, Typed] = {}
    for item in _walk(kind, place, getattr(kind, "panel", None)):
        name = item.flag.names[0]
        if name not in found:
            found[name] = item
        elif item.owners:  # of another method
            owners = (*found[name].owners, *item.owners)
            flag = replace(found[name].flag, panel=f"Options of {', '.join(owners)}")
            both = found[name].annotation | item.annotation
            found[name] = replace(found[name], owners=owners, flag=flag, annotation=both)
    return list(found.values())


def _walk(kind: type[BaseModel], place: Place, panel: str | None) -> Iterator[Typed]:
    for name, info in kind.model_fields.items():
        flag = flag_of(name, info)
        here, parts = (*place, info.alias or name), members(info.annotation)
        chosen = [part for part in parts if is_model(part, Options)]
        if flag.off or any(is_model(item, Section) for part in parts for item in get_args(part)):
            continue
        flag = replace(flag, panel=flag.panel or panel)
        if chosen:
            yield Typed((*here, "name"), info, flag, info.annotation)
            for each in () if flag.whole else chosen:
                yield from _own(each, here)
        elif any(is_model(part, Section) for part in parts):
            yield from _walk(parts[0], here, getattr(parts[0], "panel", None) or panel)
        else:
            yield Typed(here, info, flag, info.annotation)


def _own(kind: type[Options], place: Place) -> Iterator[Typed]:
    """The options of a method."""
    for name, info in kind.model_fields.items():
        flag = flag_of(name, info)
        if name != "name" and not flag.off:
            flag = replace(flag, panel=f"Options of {', '.join(kind.names())}")
            yield Typed((*place, name), info, flag, info.annotation, kind.names())


def flag_of(name: str, info: FieldInfo) -> Flag:
    """Returns how a field is typed."""
    said = info.json_schema_extra
    flag = said if isinstance(said, Flag) else Flag()
    return flag if flag.names else replace(flag, names=(f"--{name.replace('_', '-')}",))


def is_model(part: Any, base: type[BaseModel]) -> bool:
    """Tells whether a part of a type is a model of some kind."""
    return isinstance(part, type) and issubclass(part, base)


def members(annotation: Any) -> list[Any]:
    """Lists what a type allows one by one, `None` left out."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [part for item in get_args(annotation) for part in members(item)]
    return [] if annotation is type(None) else [annotation]


def words_of(annotation: Any) -> list[str]:
    """Lists the words that a type allows, in lists and mappings too."""
    found: list[str] = []
    for part in members(annotation):
        if get_origin(part) is Literal:
            found += [word for word in get_args(part) if isinstance(word, str)]
        elif is_model(part, Options):
            found += part.names()
        else:
            found += [word for item in get_args(part) for word in words_of(item)]
    return list(dict.fromkeys(found))


# From what was typed to plain data, as a recipe would hold it.


_WHOLE = re.compile(rf"[-+]?[0-9]{{1,{DIGITS}}}")
_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MODES = re.compile(r"([0-9]{1,9})=([0-9]{1,9}(?:x[0-9]{1,9}){1,63})")
_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_MOST_BLOCKS = 1000  # no model has as many; a run to a million would be written out


def plain(item: Typed, texts: Sequence[str]) -> Any:
    """Reads what was typed for an option; what it cannot read stays text, for validation to refuse.

    Args:
        item: The option.
        texts: What was typed, one by one.

    Raises:
        ValueError: It cannot be meant; says what is allowed.
    """
    if item.flag.read is not None:
        return item.flag.read(list(texts))
    parts = members(item.annotation)
    words = [word.strip() for text in texts for word in text.split(",")]
    words = words if item.flag.splits else list(texts)
    for part in parts:
        if get_origin(part) is dict:
            inner = members(get_args(part)[1])
            pairs = [_pair(word, item.flag.metavar or "NAME=VALUE") for word in words]
            return {name: number(text, inner) for name, text in pairs}
    lists = [part for part in parts if get_origin(part) is tuple]
    if lists and (len(lists) == len(parts) or len(words) > 1):
        inner = members(get_args(lists[0])[0])
        return [number(word, inner) for word in words if word or inner != [str]]
    return number(texts[-1].strip(), parts) if texts else None


def number(text: str, parts: Sequence[Any]) -> Any:
    """Reads a number where one is allowed, by the rules of recipes; a percentage is a fraction."""
    if int in parts or float in parts:
        if _WHOLE.fullmatch(text):
            return int(text)
        if _DECIMAL.fullmatch(text) and math.isfinite(float(text)) and not text.isdecimal():
            return float(text)
        if float in parts and text.endswith("%") and _DECIMAL.fullmatch(text[:-1].strip()):
            return float(text[:-1]) / 100
    return text


def _pair(word: str, form: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise ValueError(f"expected pairs `{form}`")
    return name.strip(), value.strip()


def read_modes(texts: Sequence[str]) -> dict[str, list[int]]:
    """Reads the factors of widths, such as `64=8x8,172=4x43`."""
    found = [_MODES.fullmatch(word.strip()) for word in ",".join(texts).split(",")]
    if not all(found):
        raise ValueError("allowed are widths with factors, such as `64=8x8,172=4x43`")
    return {item[1]: [*map(int, item[2].split("x"))] for item in found if item}


def read_sizes(texts: Sequence[str]) -> list[int]:
    """Reads sizes such as `14,14` or `14x14`."""
    words = [word.strip() for word in ",".join(texts).replace("x", ",").split(",")]
    if not all(re.fullmatch(rf"[0-9]{{1,{DIGITS}}}", word) for word in words):
        raise ValueError("allowed are whole numbers with commas between, such as `14,14`")
    return [int(word) for word in words]


def read_blocks(texts: Sequence[str]) -> list[int]:
    """Reads `1,3,5` or `0-5,11`."""
    found = _indices(",".join(texts))
    if found is None:
        raise ValueError("allowed are block numbers such as `1,3,5` or `0-5,11`")
    return found


def read_kept(texts: Sequence[str]) -> Any:
    """Reads `1,3,5`, `0-5,11`, or several such as `decoder:0,2`."""
    return _by_stack(
        texts,
        _indices,
        "allowed are block numbers such as `1,3,5` or `0-5,11`, for one stack of several "
        "`STACK:1,3,5`",
    )


def read_dropped(texts: Sequence[str]) -> Any:
    """Reads `3`, `auto`, or several such as `decoder:2`."""
    if list(texts) == ["auto"]:
        return "auto"
    return _by_stack(
        texts,
        _count,
        "allowed is a number of blocks of 1 or more, `auto`, or `STACK:N` where a model has "
        "several stacks",
    )


def _by_stack(texts: Sequence[str], read: Callable[[str], Any], allowed: str) -> Any:
    found: dict[str, Any] = {}
    for text in texts:
        name, colon, numbers = text.rpartition(":")
        value = read(numbers)
        if value is None or (colon and not name):
            raise ValueError(allowed)
        if name in found:
            raise ValueError("given twice for one stack: join them with commas")
        found[name] = value
    if "" not in found:
        return found
    if len(found) > 1:
        raise ValueError("given with a stack and without: name the stack in each, `STACK:...`")
    return found[""]


def _indices(text: str) -> list[int] | None:
    found: list[int] = []
    for word in text.split(","):
        match = _RUN.fullmatch(word.strip())
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < _MOST_BLOCKS:
            return None
        found += range(first, last + 1)
    return found


def _count(text: str) -> int | None:
    word = text.strip()
    found = int(word) if re.fullmatch(rf"[0-9]{{1,{DIGITS}}}", word) else 0
    return found or None
