"""Patterns that select layers by name or role."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from tcompress.anatomy import Layer, anatomy_of
from tcompress.errors import PlanError, SourceError
from tcompress.recipe.schema import Convert
from tcompress.source import SourceModel


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Tells whether a pattern selects any of a layer's names.

    Args:
        pattern: A name, a name with `*` wildcards, `re:` and a regular expression (searched), or
            the last components of a name, such as `output.dense`.
        names: Names of one layer: in the checkpoint, in the model, its role.

    Raises:
        PlanError: The regular expression is invalid.
    """
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise PlanError(f"`{pattern}` is not a regular expression: {error}") from error
        return any(expression.search(name) for name in names)
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for name in names)


def nearest(pattern: str, names: Iterable[str]) -> str | None:
    """Returns a hint that names the closest known name, if one is close."""
    # Patterns mostly name the end of a path, such as `output.dense`.
    ends = {".".join(name.split(".")[-size:]) for name in names for size in (1, 2, 3)}
    close = difflib.get_close_matches(pattern, sorted(ends), 1, 0.5)
    return f"did you mean `{close[0]}`?" if close else None


def left_out(names: Sequence[str], keep: Sequence[str], only: Sequence[str]) -> bool:
    """Tells whether a layer stays as it is: it is kept, or others alone are asked for."""
    if any(matches(pattern, names) for pattern in keep):
        return True
    return bool(only) and not any(matches(pattern, names) for pattern in only)


def check_patterns(recipe: Convert, model: nn.Module, source: SourceModel) -> None:
    """Makes sure that every pattern of a recipe selects something.

    Raises:
        PlanError: Some do not; the message names all of them.
    """
    names = [name for name, _ in model.named_modules() if name]
    store_names = source.store.keys()
    stored = [key.removesuffix(".weight") for key in source.store.keys()]  # noqa: SIM118 - not a mapping
    layers = anatomy_of(model).layers
    roles = {layer.role for layer in layers}
    weights = [layer.weight_name for layer in layers]
    prefixes = [(layer, name) for layer in layers for name in _stored(layer, source)]
    weights += [name for _, name in prefixes]
    weights += [f"{name}.{layer.parameter}" for layer, name in prefixes]
    known = [*names, *stored, *store_names, *weights, *roles]
    patterns = [*recipe.keep, *recipe.only, *(rule.match for rule in recipe.layers)]
    lost = [pattern for pattern in patterns if not matches(pattern, known)]
    if lost:
        listed = ", ".join(f"`{pattern}`" for pattern in lost)
        raise PlanError(f"no layer matches {listed}", nearest(lost[0], known))


def _stored(layer: Layer, source: SourceModel) -> list[str]:
    try:
        return [source.keymap.checkpoint_prefix(layer.name)]
    except SourceError:
        return []
