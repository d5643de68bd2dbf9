"""Layers, channels between them, attentions and tables that a recipe is about.

Of attentions, tables, positions and norms plans are made here.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn

from tcompress.attention import replacement_of
from tcompress.errors import PlanError, SourceError
from tcompress.models import SourceModel
from tcompress.options import Convert, Embeddings
from tcompress.options.method_options import AutoSpec, lookup_methods
from tcompress.options.patterns import matches
from tcompress.planning.entries import AttentionPlan, DenseLayer, FormPlan, LayerPlan, SkippedLayer
from tcompress.roles import Attention, Block, Layer, Part, Roles
from tcompress.roles.find import attentions_of, find_roles, position_tables
from tcompress.structures import Layout, Refusal, Site, Spec, Structure, structures
from tcompress.structures.base import LooksUp
from tcompress.structures.lowrank import LowRankSpec
from tcompress.structures.modules.embedding import LookupScale
from tcompress.structures.modules.linear import Channels, PartLayout


def structure_of(spec: Spec) -> Structure[Any, Any]:
    """Find the structure that a method's options belong to."""
    return next(item for item in structures() if isinstance(spec, item.spec))


def offered_by(
    spec: AutoSpec, target: float, *, timed: bool = False, alone: bool = False
) -> dict[str, tuple[Spec, ...]]:
    """List what `auto` chooses among near a kept fraction: options by name, preferred first.

    Where time counts, structures that no pass is faster with are not on offer by themselves. Where
    methods are to be tried `alone`, beside `auto`, options are those that each then has.
    """
    usual = (item for item in structures() if item.in_auto and (item.saves_time or not timed))
    offered: dict[str, tuple[Spec, ...]] = {}
    for name in spec.offer or [item.spec.names()[0] for item in usual]:
        options = next(i.spec(name=name) for i in structures() if name in i.spec.names())
        by_itself = alone and not options.shares_factors  # budgets of `auto` are of single layers
        offered[name] = options.alone(target) if by_itself else options.offered(target)
    return offered


_ROLES: WeakKeyDictionary[SourceModel, Roles] = WeakKeyDictionary()


def roles_of(source: SourceModel) -> Roles:
    """Find the roles of a model's layers, once for each model."""
    if source not in _ROLES:
        _ROLES[source] = find_roles(source.keymap.model)
    return _ROLES[source]


def module_path(source: SourceModel, name: str) -> str:
    """Path in the model of a module with this name in the checkpoint."""
    return source.keymap.runtime_name(name) or name


def matched_names(source: SourceModel, layer: Layer) -> tuple[str, ...]:
    """List what patterns may call a layer; blocks are numbered as in the whole model."""
    names = [layer.name, layer.weight_name]
    with suppress(SourceError):  # a layer without a name in the checkpoint
        stored = source.keymap.checkpoint_prefix(layer.name)
        names += [stored, f"{stored}.{layer.parameter}"]
    return (*map(source.original_name, names), layer.role)


def check_patterns(recipe: Convert, source: SourceModel) -> None:
    """Make sure that every pattern of a recipe selects a layer that can be rewritten."""
    roles = roles_of(source)
    layers = roles.layers
    names = {name for layer in layers for name in matched_names(source, layer)}
    names |= {name for layer in roles.outside for name in matched_names(source, layer)[:-1]}
    patterns = [*recipe.keep, *recipe.only, *(rule.match for rule in recipe.layers)]
    lost = [pattern for pattern in patterns if not matches(pattern, names)]
    if lost and layers:  # without any, the plan says why
        listed = ", ".join(f"`{pattern}`" for pattern in lost)
        all_roles = ", ".join(f"`{role}`" for role in dict.fromkeys(i.role for i in layers))
        close = f"{lost[0]}.*"  # what is inside a module, or the closest name
        if not matches(close, names):
            # Patterns mostly name the end of a path, such as `output.dense`.
            ends = {".".join(name.split(".")[-size:]) for name in names for size in (1, 2, 3)}
            close = next(iter(difflib.get_close_matches(lost[0], sorted(ends), 1, 0.5)), "")
        hint = f"`tcompress inspect {shlex.quote(source.id)} --layers` lists the names"
        hint = f"did you mean `{close}`?" if close else hint
        raise PlanError(f"no layer matches {listed}; roles are {all_roles}", hint)


def named_outside(recipe: Convert, source: SourceModel, roles: Roles) -> list[Layer]:
    """List layers outside of blocks that a pattern names which selects nothing inside them."""
    in_blocks = {name for layer in roles.layers for name in matched_names(source, layer)}
    all_patterns = (*recipe.only, *(rule.match for rule in recipe.layers))
    patterns = [pattern for pattern in all_patterns if not matches(pattern, in_blocks)]
    return [
        layer
        for layer in roles.outside
        if any(matches(pattern, matched_names(source, layer)[:-1]) for pattern in patterns)
    ]


def untied_tables(source: SourceModel) -> list[str]:
    """List the paths of word embeddings that have a weight of their own."""
    ties = getattr(source.keymap.model, "all_tied_weights_keys", {})
    return [path for path in roles_of(source).embeddings if f"{path}.weight" not in ties]


def tied_to(source: SourceModel, path: str) -> tuple[str, ...]:
    """Paths of the modules whose weight is the embedding's, such as an output head."""
    ties = getattr(source.keymap.model, "all_tied_weights_keys", {})
    names = (target for target, owner in ties.items() if owner == f"{path}.weight")
    return tuple(name.removesuffix(".weight") for name in names)


_NO_TYPES = (
    "this model has no types of tokens, which tell the texts of a pair apart: both are taken as one"
)
_FUSED = (
    "queries are part of a fused projection, which stays whole: their part is computed, and not "
    "used"
)


def plan_attention(
    recipe: Convert, source: SourceModel, roles: Roles
) -> tuple[list[AttentionPlan], list[SkippedLayer], list[str]]:
    """Plan which attentions are replaced; the others with the reason, and notes for the user."""
    if recipe.attention is None:
        return [], [], []
    kind, attentions = replacement_of(recipe.attention), attentions_of(source.keymap.model, roles)
    # Blocks are numbered as in the whole model.
    numbers = [int(source.original_name(item.block).rpartition(".")[2]) for item in attentions]
    chosen = numbers if recipe.attention_layers is None else recipe.attention_layers
    lost = [str(number) for number in chosen if number not in numbers]
    # Some of those asked for may be among the blocks that were dropped, but not all.
    if lost and not (source.renumbered and len(lost) < len(chosen)):
        hint = f"blocks are numbered from 0 to {max(numbers)}" if numbers else None
        raise PlanError(f"there is no attention in block {', '.join(lost)}", hint)
    entries: list[AttentionPlan] = []
    skipped: list[SkippedLayer] = []
    hints: set[str] = set()
    for item, number in zip(attentions, numbers, strict=True):
        if number not in chosen:
            continue
        try:
            entries.append(_attention(recipe.attention, source, item))
        except Refusal as refusal:
            facts = {"name": item.name, "block": item.block, "reason": str(refusal)}
            skipped.append(SkippedLayer(role="attention", parameters=0, **facts))
            hints.update([refusal.hint] if refusal.hint else ())
    if not entries:
        name = recipe.attention.name
        if not skipped:
            raise PlanError(
                f"no attention of this `{roles.family}` model is known, so that `{name}` cannot "
                "take its place"
            )
        paths: dict[str, list[str]] = {}
        for layer in skipped:
            paths.setdefault(layer.reason, []).append(f"`{layer.name}`")
        lines = [f"  - {reason}: {', '.join(listed)}" for reason, listed in paths.items()]
        raise PlanError(
            f"`{name}` suits none of {len(skipped)} attentions:\n" + "\n".join(lines),
            "; ".join(sorted(hints))
            or "choose another replacement, see `tcompress methods`, or "
            "other blocks with `--layers`",
        )
    lengths = [item.tokens or item.longest for item in attentions]
    longest = None if None in lengths else max(length for length in lengths if length)
    notes = [kind.note(entries[0].layout, longest, pretrained=recipe.init != "random")]
    if kind.segments and getattr(source.config, "type_vocab_size", 0) < 2:
        notes.append(_NO_TYPES)
    if kind.unused and not any(entry.unused for entry in entries):
        notes.append(_FUSED)
    return entries, skipped, [note for note in notes if note]


def unused_modules(source: SourceModel, entries: Iterable[AttentionPlan]) -> set[str]:
    """Paths in the model of projections that replaced attentions have no use for."""
    return {module_path(source, layer.name) for entry in entries for layer in entry.unused}


def with_guard(entries: Sequence[AttentionPlan], rewritten: bool) -> tuple[AttentionPlan, ...]:
    """Store a dense layer under another name where nothing else would stop plain Transformers."""
    needed = not (rewritten or any(entry.unused for entry in entries))
    return tuple(
        entry if needed and index == 0 else entry.model_copy(update={"guard": None})
        for index, entry in enumerate(entries)
    )


def _attention(options: Any, source: SourceModel, item: Attention) -> AttentionPlan:
    if item.reason is not None:
        raise Refusal(item.reason)
    kind = replacement_of(options)
    layout, prefix = kind.layout(options, item), source.keymap.checkpoint_prefix

    def dense(layer: Layer) -> DenseLayer:
        facts = {
            key: getattr(layer, key) for key in ("role", "in_features", "out_features", "bias")
        }
        return DenseLayer(name=prefix(layer.name), transposed=layer.kind == "conv1d", **facts)

    try:
        output = dense(item.layers["o"])
        return AttentionPlan(
            name=prefix(item.name),
            block=prefix(item.block),
            layout=layout,
            unused=tuple(dense(item.layers[r]) for r in kind.unused if r in item.layers),
            guard=output,
            like=output.name,
        )
    except SourceError as error:
        raise Refusal(error.message) from error


def plan_embeddings(options: Embeddings | None, source: SourceModel) -> tuple[LayerPlan, ...]:
    """Plan the tables; one that several modules share is planned once."""
    if options is None:
        return ()
    planned: list[LayerPlan] = []
    lines = ""
    for path in untied_tables(source):
        try:
            planned.append(_embedding(options, source, path))
        except Refusal as refusal:
            lines += f"\n  - `{path}`: {refusal}"
    if not planned:
        raise PlanError(
            f"no word embedding can be rewritten:{lines or ' the model has none'}",
            "leave `embeddings` out of the recipe, or `--embeddings` out of the command",
        )
    return tuple(planned)


def low_rank_tables(source: SourceModel, target: float) -> tuple[LayerPlan, ...]:
    """Plan tables of low rank that keep a fraction; none where all compute more than a table."""
    with suppress(PlanError):
        return plan_embeddings(Embeddings(method=LowRankSpec(), target=target), source)
    return ()


def _embedding(options: Embeddings, source: SourceModel, path: str) -> LayerPlan:
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
    kind = structure_of(options.method)
    dense = site.in_features * site.out_features
    budget = None if options.target is None else int(options.target * dense)
    layout: Layout = kind.layout(options.method, site, budget)
    if not (isinstance(kind, LooksUp) and kind.looks_up(layout)):
        allowed = ", ".join(f"`{name}`" for name in lookup_methods())
        raise Refusal(f"`{options.method.name}` cannot look words up; allowed are {allowed}")
    parts = (PartLayout(name="embedding", terms=(layout,)),)
    entry = LayerPlan(
        name=name, block="embeddings", role="embedding", kind="embedding", bias=False, parts=parts
    )
    if entry.parameters >= dense:
        raise Refusal(f"it would not shrink: {entry.parameters / dense:.0%} of {dense:,}")
    return entry


def plan_forms(recipe: Convert, source: SourceModel, roles: Roles) -> tuple[FormPlan, ...]:
    """Plan what `positions` and `norm` ask for."""
    p, this = int(getattr(recipe.method, "p", 1)), f"this `{roles.family}` model"
    entries: list[FormPlan] = []
    problems: list[str] = []
    no_table = f"a table of positions for tokens of text, and {this} has none"
    no_norm = f"layer norms of all features, and the blocks of {this} have none"
    for option, form, plans, problem in (
        ("positions", recipe.positions, _positions, no_table),
        ("norm", recipe.norm, _norms, no_norm),
    ):
        if form != "host":
            planned = list(plans(source, roles, form, p))
            problems += [] if planned else [f"`{option}: {form}` is about {problem}"]
            entries += planned
    problems += [
        f"`{entry.name}` has {entry.shape[-1]} features, which p={p} does not divide"
        for entry in entries
        if entry.shape[-1] % p
    ]
    if problems:
        raise PlanError("; ".join(problems), "leave `positions` or `norm` at `host`")
    return tuple(entries)


def _positions(source: SourceModel, roles: Roles, form: str, p: int) -> Iterator[FormPlan]:
    block_paths = tuple(f"{block.name}." for block in roles.blocks)
    for path, table, offset in position_tables(source.keymap.model):
        if path.startswith(block_paths):
            continue
        try:
            name = source.keymap.checkpoint_prefix(path)
        except SourceError:
            continue  # it has no place of its own in a checkpoint
        shape = (table.num_embeddings, table.embedding_dim)
        yield FormPlan(name=name, kind="positions", form=form, p=p, shape=shape, offset=offset)


def _norms(source: SourceModel, roles: Roles, form: str, p: int) -> Iterator[FormPlan]:
    for block in roles.blocks:
        shape = (block.layers[0].in_features,)
        for path, module in source.keymap.model.get_submodule(block.name).named_modules():
            if type(module) is nn.LayerNorm and tuple(module.normalized_shape) == shape:
                name = source.keymap.checkpoint_prefix(f"{block.name}.{path}")
                yield FormPlan(name=name, kind="norm", form=form, p=p, shape=shape)


# Channels between layers: which layers write them, which read them, and how many may stay.
#
# Neurons lie between a feed-forward's first layers and its last one; the values of heads between
# the value and the output projection. What queries and keys compute meets in scores, which only
# know their product: no layer reads them. Whole heads are all of these, with what positions turn;
# heads that share keys and values go together, and without any the attention is gone.

Kind = Literal["neurons", "values", "scores", "heads"]

_KINDS: tuple[tuple[Kind, tuple[str, ...], str | None], ...] = (
    ("scores", ("q", "k"), None),
    ("scores", ("cross_q", "cross_k"), None),
    ("values", ("v",), "o"),
    ("values", ("cross_v",), "cross_o"),
    ("neurons", ("gate", "up"), "down"),
    ("neurons", ("gate", "up", "experts_gate_up"), "experts_down"),
)


@dataclass(frozen=True)
class Coupling:
    """Channels that layers of one block have in common."""

    kind: Kind
    writers: tuple[tuple[Layer, Part], ...]
    reader: Layer | None  # None for scores
    size: int  # channels of one head, all neurons, or all heads that have keys of their own

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers that it changes, each once."""
        readers = [self.reader] if self.reader else []
        return tuple(dict.fromkeys([*(layer for layer, _ in self.writers), *readers]))

    @property
    def step(self) -> int:
        """Sizes are multiples of it, which kernels are fast with."""
        if self.kind == "neurons":
            return 16 if self.size >= 256 else max(1, self.size // 16)
        return 4 if self.size >= 16 and self.kind != "heads" else 1

    @property
    def sizes(self) -> list[int]:
        """Numbers that may stay; the last one is the whole, but for heads."""
        if self.kind == "heads":
            return [*range(self.size)]
        goes = self.kind == "neurons" and self.writers[0][0].kind != "experts"
        return [*range(0 if goes else self.step, self.size, self.step), self.size]

    def channels(self, width: int, size: int) -> Channels:
        """Channels of a part, or of the reader's input, of this width where so many stay."""
        padded = self.kind != "neurons"
        if self.kind == "heads":
            return Channels(groups=1, size=width, kept=size * width // self.size, padded=padded)
        return Channels(groups=width // self.size, size=self.size, kept=size, padded=padded)

    def near(self, target: float) -> int:
        """The size that is closest to one, or to a fraction, that was asked for."""
        size = target * self.size if target < 1 else target
        return min(self.size, max(self.step, round(size / self.step) * self.step))


def couplings(block: Block) -> Iterator[Coupling]:
    """List what layers of a block have in common, as far as it may be made smaller."""
    parts = [(layer, part) for layer in block.layers for part in layer.parts]
    for kind, names, reader_role in _KINDS:
        reader = next((layer for layer in block.layers if layer.role == reader_role), None)
        writers = tuple(
            (layer, part)
            for layer, part in parts
            if part.name in names
            and (reader is None or (layer.kind == "experts") == (reader.kind == "experts"))
        )
        if not writers or (reader_role and reader is None):
            continue
        if any(layer.kind == "experts" and layer.bias for layer, _ in writers):
            continue  # biases of experts stay as they are
        bilinear = len(writers) == 2 and all(layer.bilinear for layer, _ in writers)
        if kind == "scores" and not bilinear:
            continue
        sizes = {part.size if kind == "neurons" else layer.head for layer, part in writers}
        size = sizes.pop() if len(sizes) == 1 else None
        widths = [part.size for _, part in writers] + ([reader.in_features] if reader else [])
        divides = size and size > 1 and all(width % size == 0 for width in widths)
        if size and divides and (kind != "neurons" or len({*widths}) == 1):
            yield Coupling(kind, writers, reader, size)


def channels_left(
    sizes: Mapping[Coupling, int],
) -> tuple[dict[str, Channels], dict[tuple[str, str], Channels]]:
    """Channels that layers read, by weight, and that their parts write, where some are gone."""
    reads, writes = {}, {}
    for coupling, size in sizes.items():
        if size == coupling.size:
            continue
        for layer, part in coupling.writers:
            writes[layer.weight_name, part.name] = coupling.channels(part.size, size)
        if (reader := coupling.reader) is not None:
            reads[reader.weight_name] = coupling.channels(reader.in_features, size)
    return reads, writes


def whole_heads(attention: Attention) -> Coupling | None:
    """All that heads of an attention compute, if something may stand in for it.

    Heads that are no parts of a projection, or are not alike, go all together.
    """
    projections = attention.layers
    layers = [projections[role] for role in ("q", "k", "v", "qkv") if role in projections]
    writers = tuple((layer, part) for layer in layers for part in layer.parts)
    reader, width = attention.layers.get("o"), attention.head_dim
    if attention.reason is not None or reader is None:
        return None
    widths = [part.size for _, part in writers] + [reader.in_features]
    if any(features % width for features in widths):
        return None
    separate = attention.alike and {part.name for _, part in writers} == {"q", "k", "v"}
    count = attention.key_heads
    heads = count if separate and not any(features % count for features in widths) else 1
    return Coupling("heads", writers, reader, heads)
