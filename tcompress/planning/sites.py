"""Places where something can be decided: layers by pattern, sharing groups, embeddings, forms."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from re import _parser as sre_parse  # type: ignore[attr-defined]
from typing import Any

from torch import nn

from tcompress.errors import PlanError, SourceError
from tcompress.models import SourceModel
from tcompress.options import Convert, Embeddings
from tcompress.options.method_options import AutoSpec, lookup_methods
from tcompress.planning.entries import FormPlan, LayerPlan
from tcompress.roles import Anatomy, Layer, anatomy_of
from tcompress.roles.attentions import position_tables
from tcompress.structures import Layout, Refusal, Site, Spec, Structure, structures
from tcompress.structures.capabilities import LooksUp, shared_of
from tcompress.structures.modules.embedding import LookupScale
from tcompress.structures.modules.linear import PartLayout, bank_layouts

# The structures that methods' options select, and those that `auto` has on offer.


def names_of(item: Structure[Any, Any]) -> tuple[str, ...]:
    """Returns the names that select a structure, its usual one first."""
    return item.spec.names()


def structure_of(spec: Spec) -> Structure[Any, Any]:
    """Returns the structure that a method's options belong to."""
    return next(item for item in structures() if isinstance(spec, item.spec))


def offered_by(spec: AutoSpec, target: float) -> dict[str, tuple[Spec, ...]]:
    """Lists what `auto` chooses among.

    Args:
        spec: Its options.
        target: About which kept fraction the budget comes to.

    Returns:
        By the name of each its options in the order of preference: a layer takes the first that
        its dimensions allow.
    """
    names = spec.offer or tuple(names_of(item)[0] for item in structures() if item.in_auto)
    found: dict[str, tuple[Spec, ...]] = {}
    for name in dict.fromkeys(names):
        kind = next(item for item in structures() if name in names_of(item))
        found[name] = kind.spec(name=name).offered(target)
    return found


def alone_of(spec: AutoSpec, target: float) -> dict[str, tuple[Spec, ...]]:
    """Lists methods that are worth trying on their own beside `auto`, as each would be used.

    Those that it has on offer; where nothing was said of these, one of every structure.

    Args:
        spec: Its options.
        target: About which kept fraction the budget comes to.

    Returns:
        By the name of each its options in the order of preference: the first that the dimensions
        of all layers allow is meant.
    """
    names = spec.offer or tuple(names_of(item)[0] for item in structures())
    found: dict[str, tuple[Spec, ...]] = {}
    for name in dict.fromkeys(names):
        kind = next(item for item in structures() if name in names_of(item))
        found[name] = kind.spec(name=name).alone(target)
    return found


# Patterns that select layers by name or role.


_LONGEST = 60  # characters of a layer's name, about
_MOST_WAYS = 2e7  # four times `.*`, for example


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


def check_patterns(recipe: Convert, model: nn.Module, source: SourceModel) -> None:
    """Makes sure that every pattern of a recipe selects a layer that can be rewritten.

    Raises:
        PlanError: Some do not; the message names all of them.
    """
    anatomy = anatomy_of(model)
    layers = anatomy.layers
    known = {name for layer in layers for name in matched_names(source, layer)}
    known |= {name for layer in anatomy.outside for name in matched_names(source, layer)[:-1]}
    patterns = [*recipe.keep, *recipe.only, *(rule.match for rule in recipe.layers)]
    lost = [pattern for pattern in patterns if not matches(pattern, known)]
    if lost and layers:  # without any, the plan says why
        listed = ", ".join(f"`{pattern}`" for pattern in lost)
        roles = ", ".join(f"`{role}`" for role in dict.fromkeys(layer.role for layer in layers))
        close = _nearest(lost[0], known)
        raise PlanError(
            f"no layer matches {listed}; roles are {roles}",
            f"did you mean `{close}`?"
            if close
            else f"`tcompress inspect {shlex.quote(source.id)} --layers` lists the names",
        )


def named_outside(recipe: Convert, source: SourceModel, anatomy: Anatomy) -> list[Layer]:
    """Lists layers outside of blocks that a pattern names which selects nothing inside them."""
    inside = {name for layer in anatomy.layers for name in matched_names(source, layer)}
    given = (*recipe.only, *(rule.match for rule in recipe.layers))
    patterns = [pattern for pattern in given if not matches(pattern, inside)]
    return [
        layer
        for layer in anatomy.outside
        if any(matches(pattern, matched_names(source, layer)[:-1]) for pattern in patterns)
    ]


def _nearest(pattern: str, names: Iterable[str]) -> str | None:
    """Returns what was probably meant: what is inside a module, or the closest known name."""
    if matches(f"{pattern}.*", names):
        return f"{pattern}.*"
    # Patterns mostly name the end of a path, such as `output.dense`.
    ends = {".".join(name.split(".")[-size:]) for name in names for size in (1, 2, 3)}
    return next(iter(difflib.get_close_matches(pattern, sorted(ends), 1, 0.5)), None)


# Which weights share a bank: known before any of them has a size.
#
# A bank is sized for all that use it, so a plan begins by asking every weight which bank it would
# use. Experts use none: their moments differ, and one module applies them.


Place = tuple[str, str]
"""Weight name in the checkpoint, and name of the part."""


@dataclass
class Pools:
    """Weights by the bank that they use.

    Attributes:
        left_out: Weights, by their names in the model, that turned out to stay dense.
    """

    left_out: set[str] = field(default_factory=set)
    _keys: dict[Place, Hashable] = field(default_factory=dict)
    _weights: set[str] = field(default_factory=set)
    _peers: dict[Hashable, list[Site]] = field(default_factory=lambda: defaultdict(list))

    def add(self, place: Place, site: Site, key: Hashable, weight: str) -> None:
        """Notes that a part of a weight, called `weight` in the model, would use a bank."""
        if weight not in self.left_out:
            self._keys[place] = key
            self._weights.add(weight)
            self._peers[key].append(site)

    def site(self, place: Place, site: Site) -> Site:
        """Returns a site with all that share its bank."""
        key = self._keys.get(place)
        return site if key is None else replace(site, peers=tuple(self._peers[key]))

    def without(self, refused: Iterable[str]) -> Pools | None:
        """Returns empty pools that leave out what was refused; None if all members were taken."""
        lost = self._weights & set(refused)
        return Pools(self.left_out | lost) if lost else None

    def lend(self, layers: Iterable[LayerPlan]) -> Iterator[LayerPlan]:
        """Lets the first layer that uses a bank own it, and the others refer to it."""
        owners: dict[Hashable, str] = {}
        for entry in layers:
            used: Mapping[str, Hashable] = {
                shared.name: self._keys[f"{entry.name}.{entry.parameter}", part.name]
                for part in entry.parts
                for layout in part.terms
                if (shared := shared_of(layout)) is not None
            }
            found = {name: owners.setdefault(key, entry.name) for name, key in used.items()}
            borrowed = {name: owner for name, owner in found.items() if owner != entry.name}
            yield entry.model_copy(update={"bank_of": borrowed}) if borrowed else entry


def note_of(layers: Sequence[LayerPlan]) -> tuple[str, ...]:
    """Says that a budget does not reach into banks, where there are any."""
    banks = sum(len(entry.own_banks) for entry in layers)
    if not banks:
        return ()
    users = sum(bool(bank_layouts(entry.parts)) for entry in layers)
    named = "one bank" if banks == 1 else f"{banks} banks"
    return (
        f"{users} layers share the tensors of {named}, each stored with the first layer that uses "
        "it; banks are sized alike, not by predicted loss",
    )


# Which tables of word embeddings are rewritten, and how.


def plan_embeddings(
    options: Embeddings | None, source: SourceModel, anatomy: Anatomy
) -> tuple[LayerPlan, ...]:
    """Plans the tables; one that several modules share is planned once.

    Args:
        options: How to rewrite them; None for not at all.
        source: The model; its weights are not read.
        anatomy: Where they are.

    Raises:
        PlanError: No table can be rewritten. All reasons are in one message.
    """
    if options is None:
        return ()
    planned: list[LayerPlan] = []
    reasons: dict[str, str] = {}
    for path in _tables(source, anatomy):
        try:
            planned.append(_entry(options, source, path))
        except Refusal as refusal:
            reasons[path] = str(refusal)
    if not planned:
        lines = "".join(f"\n  - `{path}`: {reason}" for path, reason in reasons.items())
        raise PlanError(
            f"no word embedding can be rewritten:{lines or ' the model has none'}",
            "leave `embeddings` out of the recipe, or `--embeddings` out of the command",
        )
    return tuple(planned)


def _tables(source: SourceModel, anatomy: Anatomy) -> Iterator[str]:
    """Paths of the tables that others are tied to, not of those others."""
    ties = getattr(source.keymap.model, "all_tied_weights_keys", {})
    yield from (path for path in anatomy.embeddings if f"{path}.weight" not in ties)


def _entry(options: Embeddings, source: SourceModel, path: str) -> LayerPlan:
    model = source.keymap.model
    module = model.get_submodule(path)
    users = (module, *map(model.get_submodule, tied_to(source, path)))
    for user in users:
        if type(user) is not nn.Linear and LookupScale.of(user) is None:
            raise Refusal(f"`{type(user).__name__}` computes more than a table does")
    try:
        name = source.keymap.checkpoint_prefix(path)
        keys = source.keymap.sources(f"{path}.weight")
    except SourceError as error:
        raise Refusal(error.message) from error
    if keys.converter is not None or keys.keys != (f"{name}.weight",):
        raise Refusal("the checkpoint stores it under another name, or in parts")
    assert isinstance(module, nn.Embedding)
    site = Site(module.embedding_dim, module.num_embeddings, "both", role="embedding", block=path)
    entry = LayerPlan(
        name=name,
        block="embeddings",
        role="embedding",
        kind="embedding",
        bias=False,
        parts=(PartLayout(name="embedding", terms=(_layout(options, site),)),),
    )
    if entry.parameters >= entry.dense_parameters:
        share = entry.parameters / entry.dense_parameters
        raise Refusal(f"it would not shrink: {share:.0%} of {entry.dense_parameters:,}")
    return entry


def _layout(options: Embeddings, site: Site) -> Layout:
    kind = structure_of(options.method)
    dense = site.in_features * site.out_features
    budget = None if options.target is None else int(options.target * dense)
    layout: Layout = kind.layout(options.method, site, budget)
    if not (isinstance(kind, LooksUp) and kind.looks_up(layout)):
        known = ", ".join(f"`{name}`" for name in lookup_methods())
        raise Refusal(f"`{options.method.name}` cannot look words up; allowed are {known}")
    return layout


def tied_to(source: SourceModel, path: str) -> tuple[str, ...]:
    """Paths of the modules whose weight is the embedding's, such as an output head."""
    ties = getattr(source.keymap.model, "all_tied_weights_keys", {})
    names = (target for target, owner in ties.items() if owner == f"{path}.weight")
    return tuple(name.removesuffix(".weight") for name in names)


# Which modules of a host take another form: tables of positions, and layer norms, by slices.


def plan_forms(
    recipe: Convert, source: SourceModel, model: nn.Module, anatomy: Anatomy
) -> tuple[FormPlan, ...]:
    """Plans what `positions` and `norm` ask for.

    Args:
        recipe: What to do.
        source: The model.
        model: The model on the meta device.
        anatomy: Its blocks.

    Raises:
        PlanError: The host has nothing of the kind; all problems are in one message.
    """
    problems: list[str] = []
    found: list[FormPlan] = []
    if recipe.positions != "host":
        tables = list(_positions(recipe, source, model, anatomy))
        if not tables:
            problems.append(
                f"`positions: {recipe.positions}` is about a table of positions for tokens of "
                f"text, and this `{anatomy.family}` model has none"
            )
        found += tables
    if recipe.norm != "host":
        norms = list(_norms(recipe, source, model, anatomy))
        if not norms:
            problems.append(
                f"`norm: {recipe.norm}` is about layer norms of all features, and the blocks of "
                f"this `{anatomy.family}` model have none"
            )
        found += norms
    p = _slices(recipe)
    problems += [
        f"`{entry.name}` has {entry.shape[-1]} features, which p={p} does not divide"
        for entry in found
        if entry.shape[-1] % p
    ]
    if problems:
        raise PlanError("; ".join(problems), "leave `positions` or `norm` at `host`")
    return tuple(found)


def _slices(recipe: Convert) -> int:
    return int(getattr(recipe.method, "p", 1))


def _positions(
    recipe: Convert, source: SourceModel, model: nn.Module, anatomy: Anatomy
) -> Iterator[FormPlan]:
    inside = tuple(f"{block.name}." for block in anatomy.blocks)
    for path, table, offset in position_tables(model):
        if path.startswith(inside):
            continue
        try:
            name = source.keymap.checkpoint_prefix(path)
        except SourceError:
            continue  # it has no place of its own in a checkpoint
        yield FormPlan(
            name=name,
            kind="positions",
            form=recipe.positions,
            p=_slices(recipe),
            shape=(table.num_embeddings, table.embedding_dim),
            offset=offset,
        )


def _norms(
    recipe: Convert, source: SourceModel, model: nn.Module, anatomy: Anatomy
) -> Iterator[FormPlan]:
    for block in anatomy.blocks:
        width = block.layers[0].in_features
        for path, module in model.get_submodule(block.name).named_modules():
            if type(module) is nn.LayerNorm and tuple(module.normalized_shape) == (width,):
                name = source.keymap.checkpoint_prefix(f"{block.name}.{path}")
                shape, p = (width,), _slices(recipe)
                yield FormPlan(name=name, kind="norm", form=recipe.norm, p=p, shape=shape)
