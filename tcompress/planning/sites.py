"""Which layers a recipe means, and which structures a method's options select."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from re import _parser as sre_parse  # type: ignore[attr-defined]
from typing import Any
from weakref import WeakKeyDictionary

from tcompress.errors import PlanError, SourceError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.method_options import AutoSpec
from tcompress.roles import Layer, Roles, find_roles
from tcompress.structures import Spec, Structure, structures


def structure_of(spec: Spec) -> Structure[Any, Any]:
    """Returns the structure that a method's options belong to."""
    return next(item for item in structures() if isinstance(spec, item.spec))


def offered_by(spec: AutoSpec, target: float) -> dict[str, tuple[Spec, ...]]:
    """Lists what `auto` chooses among near a kept fraction: options by name, preferred first."""
    offer = spec.offer or tuple(item.spec.names()[0] for item in structures() if item.in_auto)
    return {name: own.offered(target) for name, own in _specs(offer).items()}


def alone_of(spec: AutoSpec, target: float) -> dict[str, tuple[Spec, ...]]:
    """Lists methods to try alone beside `auto`: those on offer, else one of each structure."""
    offer = spec.offer or tuple(item.spec.names()[0] for item in structures())
    return {name: own.alone(target) for name, own in _specs(offer).items()}


def _specs(names: Sequence[str]) -> dict[str, Spec]:
    return {
        name: next(item.spec(name=name) for item in structures() if name in item.spec.names())
        for name in names
    }


_ROLES: WeakKeyDictionary[SourceModel, Roles] = WeakKeyDictionary()


def roles_of(source: SourceModel) -> Roles:
    """Returns the roles of a model's layers, found once for each model."""
    found = _ROLES.get(source)
    if found is None:
        found = _ROLES[source] = find_roles(source.keymap.model)
    return found


_LONGEST = 60  # characters of a layer's name, about
_MOST_WAYS = 2e7  # four times `.*`, for example


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Tells whether a name, `*` wildcards, `re:...` or an end of a name selects a layer's names."""
    if pattern.startswith("re:"):
        expression = _compiled(pattern)
        return any(expression.search(name) for name in names)
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for name in names)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    hint = "such as `re:layer\\.[0-3]\\.`; `*` wildcards need no `re:`, as in `*.layer.0.*`"
    try:
        ways = _ways(sre_parse.parse(pattern[3:]))
        expression = re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as error:
        raise PlanError(f"`{pattern}` is not a regular expression: {error}", hint) from error
    if ways > _MOST_WAYS:
        raise PlanError(
            f"`{pattern}` could take for ever, since it repeats what repeats, or repeats too often",
            hint,
        )
    return expression


def _ways(parts: Iterable[Any]) -> float:
    """Bounds in how many ways an expression can match a name: backtracking tries all of them."""
    total, unbounded = 1.0, 0
    for kind, found in parts:
        name = str(kind)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            low, high, inner = found
            high = min(int(high), _LONGEST)
            span = high - min(int(low), high) + 1.0
            if high == _LONGEST:  # repeats one after another share the characters of a name
                unbounded += 1
                span = (_LONGEST + unbounded) / unbounded
            total *= span * min(_ways(inner), 10.0) ** high
        elif name == "BRANCH":
            total *= sum(map(_ways, found[1]))
        elif name == "SUBPATTERN":
            total *= _ways(found[3])
        elif name in ("ASSERT", "ASSERT_NOT"):
            total *= _ways(found[1])
        elif name == "ATOMIC_GROUP":
            total *= _ways(found)
        elif name == "GROUPREF_EXISTS":
            total *= _ways(found[1]) + _ways(found[2] or ())
        if total > _MOST_WAYS:
            return math.inf
    return total


def matched_names(source: SourceModel, layer: Layer) -> tuple[str, ...]:
    """Lists what patterns may call a layer; blocks are numbered as in the whole model."""
    names = [layer.name, layer.weight_name]
    with suppress(SourceError):  # a layer without a name in the checkpoint
        stored = source.keymap.checkpoint_prefix(layer.name)
        names += [stored, f"{stored}.{layer.parameter}"]
    return (*map(source.original_name, names), layer.role)


def left_out(names: Sequence[str], keep: Sequence[str], only: Sequence[str]) -> bool:
    """Tells whether a layer stays as it is: it is kept, or others alone are asked for."""
    if any(matches(pattern, names) for pattern in keep):
        return True
    return bool(only) and not any(matches(pattern, names) for pattern in only)


def check_patterns(recipe: Convert, source: SourceModel) -> None:
    """Makes sure that every pattern of a recipe selects a layer that can be rewritten."""
    roles = roles_of(source)
    layers = roles.layers
    known = {name for layer in layers for name in matched_names(source, layer)}
    known |= {name for layer in roles.outside for name in matched_names(source, layer)[:-1]}
    patterns = [*recipe.keep, *recipe.only, *(rule.match for rule in recipe.layers)]
    lost = [pattern for pattern in patterns if not matches(pattern, known)]
    if lost and layers:  # without any, the plan says why
        listed = ", ".join(f"`{pattern}`" for pattern in lost)
        known_roles = ", ".join(f"`{role}`" for role in dict.fromkeys(i.role for i in layers))
        close = f"{lost[0]}.*"  # what is inside a module, or the closest known name
        if not matches(close, known):
            # Patterns mostly name the end of a path, such as `output.dense`.
            ends = {".".join(name.split(".")[-size:]) for name in known for size in (1, 2, 3)}
            close = next(iter(difflib.get_close_matches(lost[0], sorted(ends), 1, 0.5)), "")
        hint = f"`tcompress inspect {shlex.quote(source.id)} --layers` lists the names"
        hint = f"did you mean `{close}`?" if close else hint
        raise PlanError(f"no layer matches {listed}; roles are {known_roles}", hint)


def named_outside(recipe: Convert, source: SourceModel, roles: Roles) -> list[Layer]:
    """Lists layers outside of blocks that a pattern names which selects nothing inside them."""
    inside = {name for layer in roles.layers for name in matched_names(source, layer)}
    given = (*recipe.only, *(rule.match for rule in recipe.layers))
    patterns = [pattern for pattern in given if not matches(pattern, inside)]
    return [
        layer
        for layer in roles.outside
        if any(matches(pattern, matched_names(source, layer)[:-1]) for pattern in patterns)
    ]


def tied_to(source: SourceModel, path: str) -> tuple[str, ...]:
    """Paths of the modules whose weight is the embedding's, such as an output head."""
    ties = getattr(source.keymap.model, "all_tied_weights_keys", {})
    names = (target for target, owner in ties.items() if owner == f"{path}.weight")
    return tuple(name.removesuffix(".weight") for name in names)
