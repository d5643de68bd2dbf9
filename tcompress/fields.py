"""What an option is: one field of a model, and how what was typed becomes its value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

# A model of options is a mapping of a recipe, the keywords of a function and the flags of a
# command. A field has its type, bounds, default and description as pydantic has them; `option` adds
# how it is typed on a command line, where that differs from its name.

DIGITS = 15
"""Most digits of a whole number: more than any size has."""
FIT, METHOD_OPTIONS = "Fit", "Options of methods"
"""Headings in the help; that of flags that belong to some methods is short of room."""

DType = Literal["float32", "float16", "bfloat16"]
ExportFormat = Literal["onnx", "openvino"]
"""Files for another runtime; libraries look for them in a folder of that name."""
RuntimeName = Literal["torch", "onnx", "onnx-int8", "onnx-q4"]
"""What runs a forward pass: PyTorch, or ONNX Runtime with weights of 32, 8 or 4 bits."""
Place = tuple[str, ...]
"""Where a field sits: names of fields from the top."""


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
    """Form of a field on a command line.

    Attributes:
        names: Spellings; default the field's name with dashes. One that begins with `--no-` turns
            off what is on by default.
        panel: Heading in the help; default that of its model.
        metavar: What stands for the value in the help; default by type.
        complete: Function of `tcompress.options.complete`; default the words of a `Literal`.
        read: From what was typed to what a recipe would say; default by type. Raises `ValueError`.
        splits: Whether commas separate what may be given several times.
        positional: Whether it is an argument.
        whole: Whether, of several sets of options, the name alone is typed.
        off: Whether recipes and keywords alone set it.
        limits: What it limits, of a budget.
    """

    names: tuple[str, ...] = ()
    panel: str | None = None
    metavar: str | None = None
    complete: str | None = None
    read: Callable[[list[str]], Any] | None = None
    splits: bool = True
    positional: bool = False
    whole: bool = False
    off: bool = False
    limits: Any = None

    def __call__(self, schema: dict[str, Any]) -> None:
        """Adds nothing to a JSON schema; pydantic calls what it keeps beside a field."""


def option(default: Any, description: str, *names: str, **given: Any) -> Any:
    """Declares an option: a pydantic field that says how it is typed too.

    `given` are attributes of `Flag` and keywords of `pydantic.Field`.
    """
    kept = {name: given.pop(name) for name in Flag.__dataclass_fields__ if name in given}
    return Field(default, description=description, json_schema_extra=Flag(names, **kept), **given)


# What several options take.
MODEL = {"metavar": "MODEL", "complete": "models"}
FOLDER = {"metavar": "FOLDER", "complete": "folders"}
DATASET = {"metavar": "FILE|FOLDER|DATASET", "complete": "data"}
FRACTION = {"metavar": "FRACTION", "gt": 0, "lt": 1}


def _several(given: Any) -> Any:
    if isinstance(given, list):
        return tuple(given)
    return (given,) if isinstance(given, str) else given


Sources = Annotated[
    tuple[str, ...], BeforeValidator(_several, json_schema_input_type=str | tuple[str, ...])
]
"""Names of data; of one alone no list is needed."""

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


@dataclass(frozen=True)
class Typed:
    """A field as it is typed, where it sits in its model, and the methods that alone have it."""

    place: Place
    info: FieldInfo
    flag: Flag
    annotation: Any
    owners: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in messages."""
        return str(self.flag.metavar) if self.flag.positional else self.flag.names[0]


def typed_fields(kind: type[BaseModel]) -> list[Typed]:
    """Lists the fields of a model as they are typed, those of models inside it too."""
    found: dict[str, Typed] = {}
    for item in _walk(kind, (), getattr(kind, "panel", None)):
        first = found.setdefault(item.flag.names[0], item)
        if first is not item and item.owners:  # another method has it too
            both = (*first.owners, *item.owners), first.annotation | item.annotation
            found[item.flag.names[0]] = replace(first, owners=both[0], annotation=both[1])
    return list(found.values())


def method_options(kind: type[Options], place: Place = ()) -> list[Typed]:
    """Lists the options of a method that are typed."""
    fields = _walk(kind, place, METHOD_OPTIONS)
    return [replace(item, owners=kind.names()) for item in fields if item.place[-1] != "name"]


def _walk(kind: type[BaseModel], place: Place, panel: str | None) -> Iterator[Typed]:
    for name, info in kind.model_fields.items():
        flag = _flag(name, info, panel)
        here, parts = (*place, info.alias or name), members(info.annotation)
        chosen = [part for part in parts if _is_model(part, Options)]
        if flag.off or any(_is_model(item, Section) for part in parts for item in get_args(part)):
            continue
        if chosen:
            yield Typed((*here, "name"), info, flag, info.annotation)
            for each in () if flag.whole else chosen:
                yield from method_options(each, here)
        elif any(_is_model(part, Section) for part in parts):
            yield from _walk(parts[0], here, parts[0].panel or panel)
        else:
            yield Typed(here, info, flag, info.annotation)


def _flag(name: str, info: FieldInfo, panel: str | None) -> Flag:
    said = info.json_schema_extra
    flag = said if isinstance(said, Flag) else Flag()
    names = flag.names or (f"--{name.replace('_', '-')}",)
    return replace(flag, names=names, panel=flag.panel or panel)


def _is_model(part: Any, base: type[BaseModel]) -> bool:
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
            found += [str(word) for word in get_args(part)]
        elif _is_model(part, Options):
            found += part.names()
        else:
            found += [word for item in get_args(part) for word in words_of(item)]
    return list(dict.fromkeys(found))


# From what was typed to plain data, as a recipe would hold it. What cannot be read stays text, for
# validation to refuse; `ValueError` says what is allowed where nothing can be meant.

_WHOLE = re.compile(rf"[-+]?[0-9]{{1,{DIGITS}}}")
_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MODES = re.compile(r"([0-9]{1,9})=([0-9]{1,9}(?:x[0-9]{1,9}){1,63})")
_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_MOST_BLOCKS = 1000  # no model has as many; a run to a million would be written out


def plain(item: Typed, texts: Sequence[str]) -> Any:
    """Reads what was typed for an option, one or several times."""
    if item.flag.read is not None:
        return item.flag.read(list(texts))
    parts = members(item.annotation)
    words = [word.strip() for text in texts for word in text.split(",")]
    words = words if item.flag.splits else list(texts)
    for part in parts:
        if get_origin(part) is dict:
            pairs = [[side.strip() for side in word.partition("=")] for word in words]
            if not all(map(all, pairs)):
                raise ValueError(f"expected pairs `{item.flag.metavar or 'NAME=VALUE'}`")
            inner = members(get_args(part)[1])
            return {name: _number(text, inner) for name, _, text in pairs}
    lists = [part for part in parts if get_origin(part) is tuple]
    if lists and (len(lists) == len(parts) or len(words) > 1):
        inner = members(get_args(lists[0])[0])
        return [_number(word, inner) for word in words if word or inner != [str]]
    return _number(texts[-1].strip(), parts) if texts else None


def _number(text: str, parts: Sequence[Any]) -> Any:
    """Reads a number where one is allowed, by the rules of recipes; a percentage is a fraction."""
    numbers = [get_args(part)[0] for part in parts if get_origin(part) is Literal]
    if int in parts or float in parts or any(isinstance(number, int) for number in numbers):
        if _WHOLE.fullmatch(text):
            return int(text)
        if _DECIMAL.fullmatch(text) and math.isfinite(float(text)) and not text.isdecimal():
            return float(text)
        if float in parts and text.endswith("%") and _DECIMAL.fullmatch(text[:-1].strip()):
            return float(text[:-1]) / 100
    return text


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
    found: list[int] = []
    for word in ",".join(texts).split(","):
        match = _RUN.fullmatch(word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < _MOST_BLOCKS:
            raise ValueError("allowed are block numbers such as `1,3,5` or `0-5,11`")
        found += range(first, last + 1)
    return found


def read_factors(texts: Sequence[str]) -> Any:
    """Reads `3`, or several such as `2,4,8`; `3x` is 3 too."""
    words = [word.strip().removesuffix("x") for word in ",".join(texts).split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", word) for word in words):
        raise ValueError("allowed are numbers such as `3` or `2,4,8`")
    found = [float(word) for word in words]
    return found if len(found) > 1 else found[0]


def read_kept(texts: Sequence[str]) -> Any:
    """Reads `1,3,5`, `0-5,11`, or several such as `decoder:0,2`."""
    return _by_stack(texts, lambda text: read_blocks([text]), "`STACK:1,3,5`")


def read_dropped(texts: Sequence[str]) -> Any:
    """Reads `3`, `auto`, or several such as `decoder:2`."""
    return "auto" if list(texts) == ["auto"] else _by_stack(texts, _count, "`STACK:N`")


def _by_stack(texts: Sequence[str], read: Callable[[str], Any], form: str) -> Any:
    found: dict[str, Any] = {}
    for text in texts:
        name, colon, numbers = text.rpartition(":")
        try:
            value = read(numbers)
        except ValueError as error:
            raise ValueError(f"{error}, {form} where a model has several stacks") from error
        if name in found or (colon and not name):
            raise ValueError(f"allowed is one {form} for each stack")
        found[name] = value
    if "" in found and len(found) > 1:
        raise ValueError(f"given with a stack and without: name the stack in each, {form}")
    return found.get("", found)


def _count(text: str) -> int:
    if not re.fullmatch(rf"0*[1-9][0-9]{{0,{DIGITS - 1}}}", text.strip()):
        raise ValueError("allowed is a number of blocks of 1 or more, `auto`")
    return int(text)
