"""Values from flags, recipes and keywords into models, and what is wrong with them in words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from tcompress.errors import RecipeError
from tcompress.fields import DIGITS, Place, Typed, plain
from tcompress.options.document import Key, Problem, Unreadable, read_document
from tcompress.options.words import explain, quoted

M = TypeVar("M", bound=BaseModel)

_NAMED = ("method", "attention")
_TEXT = "the text "


def read(
    kind: type[M],
    values: Mapping[str, Any],
    *,
    said: Callable[[Problem], str] | None = None,
    hint: str | None = None,
) -> M:
    """Reads values by name into a model, by the rules of recipes; an error names all problems.

    `said` puts a problem into words, by default with the names of keywords; `hint` is what to do.
    """
    text = json.dumps(as_plain(values))
    try:
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        try:
            problems = explain(errors, read_document(text), schema_of(kind))
        except Unreadable as strange:  # more than any recipe holds
            raise RecipeError(strange.problem.text, hint) from error
        words = [(said or _of_keywords)(problem) for problem in problems]
        raise RecipeError("; ".join(dict.fromkeys(words)), hint) from error


@cache
def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Returns the JSON schema of a model."""
    return kind.model_json_schema()


def as_plain(value: Any, *, named: bool = True) -> Any:
    """Writes a value as a recipe would; `named`: a bare `method: svd` is one without options."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", by_alias=True)
    if callable(getattr(value, "tolist", None)):
        value = value.tolist()  # of NumPy: a number, or several
    if isinstance(value, Mapping):
        found = {}
        for key, item in value.items():
            bare = named and key in _NAMED and isinstance(item, str)
            # The keys of an architecture are those of a model's configuration.
            inner = as_plain(item, named=named and key != "architecture")
            found[str(key)] = {"name": item} if bare else inner
        return found
    if isinstance(value, list | tuple | set | frozenset | range | Iterator):
        return [as_plain(item, named=named) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Iterable):
        text = f"a `{type(value).__name__}` was given, where text, numbers or lists are"
        raise RecipeError(text, "write data to a file, and give its path")
    if isinstance(value, int) and abs(value) < 10**DIGITS:
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def dotted(key: Key) -> str:
    """Writes a key as in `layers[0].keep`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in key)
    return "".join(steps).removeprefix(".")


def _value_words(name: str, problem: Problem, typed: str | None = None) -> str:
    """Says what is wrong with the value of a flag, key or keyword, which may have been typed."""
    if problem.found is None:
        return problem.text
    if problem.found == "missing":
        return f"`{name}` is missing; allowed is {problem.allowed}"
    if typed is None:
        return f"`{name}` is {problem.found.removeprefix(_TEXT)}, allowed is {problem.allowed}"
    allowed = str(problem.allowed).replace("a list, each entry", "several with commas, each")
    return f"`{name}` is `{typed}`, allowed is {allowed}"


def _of_keywords(problem: Problem) -> str:
    if problem.found is None and problem.text.startswith("unknown key"):
        return f"`{dotted(problem.key)}`: {problem.text.replace(' key', ' option')}"
    return _value_words(dotted(problem.key), problem)


@dataclass
class Given(Generic[M]):
    """Typed options of one model, by place; switches are booleans."""

    kind: type[M]
    command: str = ""
    texts: dict[Place, Any] = field(default_factory=dict)
    fields: dict[Place, Typed] = field(default_factory=dict)

    @property
    def hint(self) -> str | None:
        return f"see `tcompress {self.command} --help`" if self.command else None

    def name(self, *place: str) -> str:
        """Names the option that sets a field: as it is typed, or as a keyword without a command."""
        item = self.fields.get(place) or self.fields.get((*place, "name"))
        if item is not None:
            return item.name
        return f"--{place[-1].replace('_', '-')}" if self.command else place[-1]

    def names(self, places: Sequence[Place]) -> str:
        return quoted(self.name(*place) for place in places)

    def ask(self, value: str, *place: str) -> str:
        """Writes an option with its value."""
        name = self.name(*place)
        return f"`{name} {value}`" if self.command else f'`{name}="{value}"`'

    def values(self) -> dict[str, Any]:
        """Returns what was typed as nested plain data; an error names all that cannot be read."""
        found: dict[str, Any] = {}
        problems = []
        for place, texts in self.texts.items():
            item, inner = self.fields[place], found
            for step in place[:-1]:
                inner = inner.setdefault(step, {})
            if isinstance(texts, bool):
                inner[place[-1]] = texts
                continue
            if not all(text.strip() for text in texts):
                # A variable of the shell that is not set, most likely.
                problems.append(f"`{item.name}` has no value: give one, or leave it out")
                continue
            try:
                inner[place[-1]] = plain(item, texts)
            except ValueError as error:
                problems.append(f"`{item.name}` is `{','.join(texts)}`, {error}")
        if problems:
            raise RecipeError("; ".join(problems), self.hint)
        return found

    def read(self, values: Mapping[str, Any] | None = None) -> M:
        """Reads what was typed, or the nested plain data that it was made part of."""
        data = self.values() if values is None else values
        return read(self.kind, data, said=self._said, hint=self.hint)

    def over(self, base: BaseModel | None) -> M:
        """Reads what was typed over what a recipe says; lists and mappings of values replace."""
        before = {} if base is None else base.model_dump(mode="json", by_alias=True)
        return self.read(self._merged(before, self.values(), ()))

    def _merged(
        self, before: Mapping[str, Any], said: Mapping[str, Any], place: Place
    ) -> dict[str, Any]:
        """Puts what was said over what was there, option by option."""
        found = dict(before)
        for name, value in said.items():
            here = (*place, name)
            inside = isinstance(value, Mapping) and here not in self.fields
            found[name] = self._merged(found.get(name) or {}, value, here) if inside else value
        return found

    def _said(self, problem: Problem) -> str:
        steps = tuple(step for step in problem.key if isinstance(step, str))
        for length in range(len(steps), 0, -1):
            item = self.fields.get(steps[:length])
            if item is not None:
                texts = self.texts.get(item.place)
                whole = problem.key == item.place and isinstance(texts, list)
                typed = ",".join(texts) if whole and texts else None
                return _value_words(item.name, problem, typed)
        return _of_keywords(problem)
