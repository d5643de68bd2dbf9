"""From a recipe and a model's roles to a plan; no weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from torch import nn

from tcompress.errors import PlanError, SourceError
from tcompress.models import SourceModel
from tcompress.models.keymap import modules_above
from tcompress.options import Convert
from tcompress.options.method_options import AutoSpec
from tcompress.options.patterns import matches
from tcompress.planning.costs import (
    STAND_IN,
    Choice,
    kept_share,
    path_of,
    plan_terms,
    plan_within,
    planned_storage,
)
from tcompress.planning.depth import cut_to, plan_depth, with_depth, within
from tcompress.planning.entries import (
    Coverage,
    DenseWeights,
    LayerForm,
    LayerPlan,
    Plan,
    SkippedLayer,
    Storage,
)
from tcompress.planning.plain_widths import plan_plain
from tcompress.planning.sites import (
    Coupling,
    channels_left,
    check_patterns,
    couplings,
    matched_names,
    module_path,
    named_outside,
    offered_by,
    plan_attention,
    plan_embeddings,
    plan_forms,
    roles_of,
    structure_of,
    unused_modules,
    with_guard,
)
from tcompress.roles import Block, Layer, Part, Roles
from tcompress.structures import Refusal, Site, Spec
from tcompress.structures.base import SharesFactors, shared_of, transform_of
from tcompress.structures.modules.linear import Channels, PartLayout, factor_layouts

KEPT = "kept dense by the recipe"
STAYS = "the budget is better spent on keeping it dense"


@dataclass
class _Planner:
    recipe: Convert
    source: SourceModel
    roles: Roles
    layers: list[LayerPlan] = field(default_factory=list)
    skipped: list[SkippedLayer] = field(default_factory=list)
    hints: set[str] = field(default_factory=set)
    clipped: dict[str, str] = field(default_factory=dict)
    # By name of the weight in the model, and those of its output splits.
    choices: dict[str, Choice] = field(default_factory=dict)
    reads: dict[str, Channels] = field(default_factory=dict)
    writes: dict[tuple[str, str], Channels] = field(default_factory=dict)
    sharing: dict[tuple[str, str], Hashable] = field(default_factory=dict)
    members: dict[Hashable, list[Site]] = field(default_factory=dict)  # that share equal factors

    def run(self) -> None:
        """Plan all layers; again without those that then did not take what they would share."""
        for layer in self.roles.layers:
            with suppress(Refusal):  # it is said of the layer when its turn comes
                self.choices[layer.weight_name] = self._choice_of(layer)
        coupled = (coupling for block in self.roles.blocks for coupling in couplings(block))
        self.reads, self.writes = channels_left({item: self._size_of(item) for item in coupled})
        alone: set[str] = set()  # weights that turned out to stay dense
        while True:
            self.layers, self.skipped = [], []
            self._note_what_is_shared(alone)
            for block in self.roles.blocks:
                for group in block.groups:
                    self._plan_group(block, group)
            lost = {item.name for item in self.skipped} & {weight for weight, _ in self.sharing}
            if not lost:
                break
            alone |= lost
        self.layers = list(self._owned())

    def _note_what_is_shared(self, alone: Collection[str]) -> None:
        """Group weights by the factors that they share, which are sized for all that use them."""
        self.sharing, self.members = {}, {}
        names = self.choices.keys() - alone
        pairs = ((block, layer) for block in self.roles.blocks for layer in block.layers)
        for block, layer in pairs:
            # Experts use none: their moments differ, and one module applies them.
            if layer.kind == "experts" or layer.weight_name not in names:
                continue
            choice = self.choices[layer.weight_name]
            kind = structure_of(choice.method)
            if not isinstance(kind, SharesFactors):
                continue
            for part in layer.parts:
                site = site_of(block, layer, part)
                factors = kind.sharing_group(choice.method, site)
                if factors is not None:
                    key = (choice, factors)
                    self.sharing[layer.weight_name, part.name] = key
                    self.members.setdefault(key, []).append(site)

    def _owned(self) -> Iterator[LayerPlan]:
        """Make the first layer of a group own what it shares, and the others refer to it."""
        owners: dict[Hashable, str] = {}
        for entry in self.layers:
            borrowed: dict[str, str] = {}
            for part in entry.parts:
                for shared in filter(None, map(shared_of, part.terms)):
                    key = self.sharing[path_of(self.source, entry), part.name]
                    borrowed[shared.name] = owners.setdefault(key, entry.name)
            referred = {name: owner for name, owner in borrowed.items() if owner != entry.name}
            yield entry.model_copy(update={"bank_of": referred}) if referred else entry

    def _size_of(self, coupling: Coupling) -> int:
        """Channels that stay: fewer where the recipe asks for it and all layers may change."""
        names = [layer.weight_name for layer in coupling.layers]
        if not self.choices.keys() >= {*names}:
            return coupling.size
        recipe = self.recipe
        target = recipe.keep_neurons if coupling.kind == "neurons" else recipe.head_size
        choices = [self.choices[name] for name in names]
        fractions = [c.target for c in choices if c.method.narrows and c.target]
        if target is None and not recipe.fixes_width and fractions:
            target = min(fractions)
        return coupling.size if target is None else coupling.near(target)

    def _plan_group(self, block: Block, group: Sequence[Layer]) -> None:
        """Plan the layers that read one input."""
        # What an input transform costs each depends on how many share it, which is known only when
        # they are planned: so a second look is taken.
        plain = sum(layer.kind != "experts" for layer in group)
        sharing = {layer.weight_name: 1 if layer.kind == "experts" else plain for layer in group}
        for _ in group:
            planned: dict[str, LayerPlan] = {}
            skipped: list[SkippedLayer] = []
            for layer in group:
                name = layer.weight_name
                try:
                    planned[name] = self._entry(block, layer, sharing[name])
                except Refusal as refusal:
                    skipped.append(SkippedLayer.of(layer, block.name, str(refusal)))
                    self.hints.update([refusal.hint] if refusal.hint else ())
            shared, readers = _share_inputs([*planned.values()])
            actual = {name: readers[entry.key] for name, entry in planned.items()}
            if all(sharing[key] == count for key, count in actual.items()):
                break
            sharing |= actual
        self.layers.extend(shared)
        self.skipped.extend(skipped)

    def _choice_of(self, layer: Layer) -> Choice:
        """What a layer becomes; it has a name in the checkpoint."""
        recipe, source = self.recipe, self.source
        try:
            source.keymap.checkpoint_prefix(layer.name)
            source.keymap.sources(layer.weight_name)
            source.keymap.apart([layer.weight_name])
        except SourceError as error:
            raise Refusal(error.message) from error
        names = matched_names(source, layer)
        kept = any(matches(pattern, names) for pattern in recipe.keep)
        passed_over = recipe.only and not any(matches(pattern, names) for pattern in recipe.only)
        if kept or passed_over:
            raise Refusal(KEPT)
        method = recipe.method
        assert method is not None  # without one no layer is planned
        if isinstance(method, AutoSpec):  # the first one offered stands in
            method = next(iter(offered_by(method, recipe.target or STAND_IN).values()))[0]
        usual = Choice(method, recipe.residual_rank, recipe.target)
        choice: Choice | None = usual
        for rule in recipe.layers:
            if matches(rule.match, names):
                base = choice or usual
                rank = base.residual_rank if rule.residual_rank is None else rule.residual_rank
                ruled = Choice(rule.method or base.method, rank, rule.target or base.target)
                choice = None if rule.keep else ruled
        if choice is None:
            raise Refusal(KEPT)
        return choice

    def _entry(self, block: Block, layer: Layer, sharing: int) -> LayerPlan:
        choice = self.choices.get(layer.weight_name) or self._choice_of(layer)
        calibrated = not self.recipe.calibration.is_none
        copies = layer.experts or 1
        readers = sharing * len(layer.parts) * copies
        reads, parts = self.reads.get(layer.weight_name), []
        for part in layer.parts:
            split = (layer.weight_name, part.name)
            written = self.writes.get(split)
            site = site_of(block, layer, part)
            narrow = replace(
                site,
                in_features=reads.left if reads else site.in_features,
                out_features=written.left if written else site.out_features,
                sharing_sites=tuple(self.members.get(self.sharing.get(split), ())),
            )
            terms = plan_terms(
                _of_dense(choice, site, narrow), narrow, readers, copies, calibrated=calibrated
            )
            parts.append(PartLayout(name=site.role, terms=terms, channels=written))
        fields = ("parameter", "role", "kind", "bias", "experts", "transposed", "axes")
        facts = {field: getattr(layer, field) for field in fields}
        name, path = map(self.source.keymap.checkpoint_prefix, (layer.name, block.name))
        entry = LayerPlan(name=name, block=path, parts=tuple(parts), reads=reads, **facts)
        share = kept_share(entry, sharing)
        if choice.method.narrows and layer.role == "linear":
            reason = "it is not known with which layers it has channels in common"
            raise Refusal(reason, "choose a method of single layers, such as `svd`")
        if share > 1 or (share == 1 and not (entry.is_plain and calibrated)):
            reason = f"it would not shrink: {share:.0%} of {entry.dense_parameters:,}"
            larger = ", or a larger p" if hasattr(choice.method, "p") else ""
            raise Refusal(reason, f"choose a smaller rank{larger}")
        for planned in parts:
            note = choice.method.clipped(planned.terms[0])
            self.clipped |= {entry.key: note} if note else {}
        return entry


def _of_dense(choice: Choice, dense: Site, narrow: Site) -> Choice:
    """Fractions of the dense weight as fractions of what width has left of it."""
    share = narrow.in_features * narrow.out_features / (dense.in_features * dense.out_features)
    if choice.target is None or share == 1 or choice.method.narrows:
        return choice
    return replace(choice, target=min(choice.target / share, 1.0))


def follows_rules(recipe: Convert, source: SourceModel, layer: Layer) -> bool:
    """True where the recipe has rules of its own for a layer, so that no budget sizes it."""
    return any(matches(rule.match, matched_names(source, layer)) for rule in recipe.layers)


def site_of(block: Block, layer: Layer, part: Part) -> Site:
    """Describe where a part of a layer sits."""
    return Site(
        layer.in_features, part.size, layer.side, part.name, block.name, layer.head, layer.group
    )


def _share_inputs(planned: Sequence[LayerPlan]) -> tuple[list[LayerPlan], dict[str, int]]:
    """Share the first layer's transform among those that read one input through equal ones.

    With the layers comes how many share the transform of each, by weight name.
    """
    sharing: dict[object, list[LayerPlan]] = {}
    for index, entry in enumerate(planned):
        keys = [transform_of(term, "in") for term in entry.parts[0].terms]
        while keys and keys[-1] is None:  # a low-rank term at the end has no transform
            keys.pop()
        # Transforms are found by their summand, so all that is left has to agree.
        key = tuple(keys) if keys and entry.kind != "experts" else index
        sharing.setdefault(key, []).append(entry)
    shared: list[LayerPlan] = []
    for first, *rest in sharing.values():
        shared.append(first.model_copy(update={"readers": 1 + len(rest)}))
        shared += [entry.model_copy(update={"input_of": first.name}) for entry in rest]
    return shared, {e.key: len(group) for group in sharing.values() for e in group}


def make_plan(recipe: Convert, source: SourceModel, method_label: str | None = None) -> Plan:
    """Plan a conversion; fails where no layer can be rewritten, or a pattern selects nothing."""
    label = method_label or recipe.label
    depth = plan_depth(recipe, source) if recipe.changes_depth else None
    deeper = depth is not None and depth.deeper
    if not (source.renumbered or deeper):  # a pattern may be about blocks that are dropped
        check_patterns(recipe, source)
    if depth is not None:
        cut = cut_to(source, depth)
        if deeper:
            check_patterns(recipe, cut)
        return with_depth(make_plan(within(recipe, depth, source), cut, label), depth, source)
    storage = planned_storage(recipe, source)
    if recipe.plain and recipe.method is not None:
        plan = plan_plain(recipe, source, lambda narrow: _plan(narrow, source, label))
    else:
        plan = plan_within(
            recipe, source, lambda target: _plan(recipe.with_target(target), source, label, storage)
        )
    plan = covered(plan, source)
    return plan.warned(note_of_coverage(plan) if recipe.method else ())


def resized(plan: Plan, chosen: Mapping[str, LayerForm | None], source: SourceModel) -> Plan:
    """Change forms of layers, by weight name; None leaves one dense, others stay as planned."""
    planned = {path_of(source, entry): entry for entry in plan.layers}
    groups = []  # of layers that read one input
    for readers in (group for block in roles_of(source).blocks for group in block.groups):
        groups.append([planned.pop(it.weight_name) for it in readers if it.weight_name in planned])
    groups += [[entry] for entry in planned.values()]
    layers: list[LayerPlan] = []
    skipped = [*plan.left]
    for group in groups:
        rewritten, dense = regrouped(group, chosen)
        layers += rewritten
        for entry in dense:
            block = module_path(source, entry.block)
            facts = {"name": path_of(source, entry), "block": block, "role": entry.role}
            skipped.append(SkippedLayer(**facts, parameters=entry.dense_parameters, reason=STAYS))
    return plan.model_copy(update={"layers": tuple(layers), "left": tuple(skipped)})


def regrouped(
    group: Sequence[LayerPlan], chosen: Mapping[str, LayerForm | None]
) -> tuple[list[LayerPlan], list[LayerPlan]]:
    """Divide layers of one input, with chosen forms: the rewritten, and those that stay dense."""
    if all(entry.key not in chosen for entry in group):
        return [*group], []
    rewritten, dense = [], []
    for entry in group:
        form = chosen.get(entry.key, LayerForm(entry.parts, entry.reads))
        if form is None:
            dense.append(entry)
        else:
            changes = {**form._asdict(), "input_of": None, "readers": 1}
            rewritten.append(entry.model_copy(update=changes))
    while True:
        shared, readers = _share_inputs(rewritten)
        small: list[LayerPlan] = []
        for item in rewritten:
            share = kept_share(item, readers[item.key])
            (small if share < 1 or item.is_plain else dense).append(item)
        if len(small) == len(rewritten):
            return shared, dense
        rewritten = small


def _plan(recipe: Convert, source: SourceModel, label: str, storage: Storage | None = None) -> Plan:
    model, roles = source.keymap.model, roles_of(source)
    named = (Block(layer.name, (layer,)) for layer in named_outside(recipe, source, roles))
    roles = replace(roles, blocks=(*roles.blocks, *named))
    embeddings = plan_embeddings(recipe.embeddings, source)
    attention, skipped, attention_notes = plan_attention(recipe, source, roles)
    unused = unused_modules(source, attention)
    used = (
        replace(block, layers=tuple(item for item in block.layers if item.name not in unused))
        for block in roles.blocks
    )
    planner = _Planner(recipe, source, replace(roles, blocks=tuple(used)))
    if recipe.method is not None:  # else no layer is rewritten
        planner.run()
        if not planner.layers:
            raise _nothing_to_do(planner)
        skipped += planner.skipped
        for item in roles.refused:
            facts = {"name": item.name, "block": "", "role": "", "reason": item.reason}
            skipped.append(SkippedLayer(**facts, parameters=_matrices(model, item.name)))
    blocks = {block.name for block in roles.blocks}
    in_blocks = (item for name in blocks for item in model.get_submodule(name).parameters())
    return Plan(
        layers=tuple(planner.layers),
        attention=with_guard(attention, rewritten=bool(planner.layers or embeddings)),
        embeddings=embeddings,
        forms=plan_forms(recipe, source, roles),
        storage=storage,
        left=tuple(skipped),
        source=source.id,
        family=roles.family,
        method=label,
        vocabulary=source.vocabulary,
        parameters=sum(p.numel() for p in model.parameters()) + source.rows_gone,
        block_parameters=sum(parameter.numel() for parameter in in_blocks),
        warnings=(
            *source.notes,
            *roles.warnings,
            *attention_notes,
            *_notes(planner),
            *_unused_options(planner, embeddings),
        ),
    )


def _matrices(model: nn.Module, name: str) -> int:
    """Parameters of the weights, without biases, that a module or a parameter of it holds."""
    path, _, leaf = name.rpartition(".")
    item = getattr(model.get_submodule(path), leaf)
    held = item.named_parameters(recurse=False) if isinstance(item, nn.Module) else [(leaf, item)]
    return sum(p.numel() for key, p in held if p.ndim > 1 and not key.endswith("bias"))


def _notes(planner: _Planner) -> Iterator[str]:
    """Say what is shared, where ranks are too large, and which experts data does not reach."""
    layers = planner.layers
    groups = sum(len(entry.own_factors) for entry in layers)
    if groups:
        users = sum(bool(factor_layouts(entry.parts)) for entry in layers)
        named = "one set of factors" if groups == 1 else f"{groups} sets of factors"
        yield (
            f"{users} layers share the tensors of {named}, each stored with the first layer that "
            "uses it; they are sized alike, not by predicted loss"
        )
    if planner.clipped:
        name, note = next(iter(planner.clipped.items()))
        count = len(planner.clipped)
        which = "1 layer" if count == 1 else f"{count} layers, such as"
        yield f"ranks are more than shapes admit in {which} `{name}`: {note}"
    dark = [e.name for e in layers if e.kind == "experts" and e.role == "linear"]
    if dark and not planner.recipe.calibration.is_none:
        names = ", ".join(f"`{name}`" for name in dark[:2]) + (", ..." if len(dark) > 2 else "")
        yield (
            f"{len(dark)} stacks of experts ({names}) are fitted without data: their module routes"
            " tokens in a way of its own"
        )


def _unused_options(planner: _Planner, embeddings: Sequence[LayerPlan]) -> Iterator[str]:
    """Say once which options do nothing in all that they were given for."""
    recipe, path = planner.recipe, partial(path_of, planner.source)
    if recipe.calibration.probes > 1 and not recipe.measures_sensitivity:
        able = planner.layers and not recipe.calibration.is_none
        hint = "; `--output-moments` measures them" if able else ""
        yield f"`probes` does nothing: no gradients are measured{hint}"
    users = [(planner.choices[path(entry)].method, entry) for entry in planner.layers]
    users += [(recipe.embeddings.method, entry) for entry in embeddings if recipe.embeddings]
    methods: list[Spec] = []  # with `modes` one has no hash
    for method, _ in users:
        if method not in methods:
            methods.append(method)
            parts = chain(*(entry.parts for other, entry in users if other == method))
            yield from method.unused([part.terms[0] for part in parts])


def _nothing_to_do(planner: _Planner) -> PlanError:
    if not planner.roles.layers:
        reasons = "; ".join(sorted({item.reason for item in planner.roles.refused})[:5])
        why = reasons or "it has no linear layers inside repeated blocks"
        return PlanError(f"no layer of this `{planner.roles.family}` model is supported: {why}")
    if all(item.reason == KEPT for item in planner.skipped):
        hint = "remove patterns from `keep`, or rules with `keep: true`"
        return PlanError(f"the recipe keeps all {len(planner.skipped)} layers dense", hint)
    by_reason: dict[str, list[str]] = {}
    for item in planner.skipped:
        by_reason.setdefault(item.reason, []).append(item.name)
    lines = "\n".join(
        f"  - {reason}: {len(names)} layers, such as `{names[0]}`"
        for reason, names in by_reason.items()
    )
    hint = "; ".join(sorted(planner.hints)) or "choose another p or rank"
    return PlanError(f"none of {len(planner.skipped)} layers can be rewritten:\n{lines}", hint)


def covered(plan: Plan, source: SourceModel) -> Plan:
    """Count what becomes of all parameters, each once; tied ones are one."""
    model = source.keymap.model
    rewritten = {path_of(source, entry) for entry in plan.entries}
    unused = unused_modules(source, plan.attention)
    modules = model.named_modules(remove_duplicate=False)
    tables = {f"{name}.weight" for name, item in modules if isinstance(item, nn.Embedding)}
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tables.update(filter(is_table, every))
    reasons = {item.name: (item.role, item.reason) for item in plan.left}
    above = {
        module for name in (*tables, *filter(_numbered, every)) for module in modules_above(name)
    }
    counts: Counter[str] = Counter(vocabulary=source.rows_gone)
    dense: Counter[tuple[str, str]] = Counter()
    for first, tensor in model.named_parameters():
        aliases, size = (first, *source.keymap.tied(first)), tensor.numel()
        if rewritten.intersection(aliases):
            counts["rewritten"] += size
        elif any(name.rpartition(".")[0] in unused for name in aliases):
            counts["replaced"] += size
        elif tables.intersection(aliases):
            counts["embeddings"] += size
        elif tensor.ndim < 2 or first.endswith("bias"):
            counts["norms"] += size
        else:
            why = (reasons.get(name) or reasons.get(name.rpartition(".")[0]) for name in aliases)
            role, reason = next((item for item in why if item), ("", ""))
            dense[role or _label(first, above), reason] += size
    stays = tuple(
        DenseWeights(name=name, parameters=size, reason=why)
        for (name, why), size in dense.most_common()
    )
    total = counts.total() + dense.total()
    return plan.model_copy(update={"coverage": Coverage(total=total, left=stays, **counts)})


def note_of_coverage(plan: Plan) -> Iterator[str]:
    """Warn where most of a model cannot be rewritten, but for reasons that somebody has chosen."""
    coverage, chosen = plan.coverage, (KEPT, STAYS)
    assert coverage is not None
    layers = min(coverage.rewritten, plan.dense_rewritten)
    tables = coverage.embeddings + coverage.vocabulary + coverage.rewritten - layers
    rest = coverage.total - coverage.dropped - tables
    largest = next((item for item in coverage.left if item.reason not in chosen), None)
    left_by_choice = sum(item.parameters for item in coverage.left if item.reason in chosen)
    reached = layers + coverage.replaced + left_by_choice
    if 2 * reached < rest and largest is not None:
        yield (
            f"only {reached / rest:.0%} of the parameters outside embeddings can be rewritten; the "
            f"largest part that stays dense is `{largest.name}` ({largest.parameters:,} parameters)"
            + (f": {largest.reason}" if largest.reason else ", outside the blocks")
        )


def is_table(name: str) -> bool:
    """True where a parameter that is no module's weight is a table, such as one of positions."""
    leaf = name.rpartition(".")[2]
    return any(word in leaf for word in ("embed", "position", "token"))


def _numbered(name: str) -> bool:
    return any(step.isdecimal() for step in name.split("."))


_VAGUE = ("dense", "linear", "proj")  # names of modules that say nothing without the one above


def _label(name: str, above: Collection[str]) -> str:
    """Usual name of a parameter: its module in a block, else the largest module around it."""
    path = name.removesuffix(".weight")
    if not _numbered(name):
        path = next((module for module in modules_above(path) if module not in above), path)
    named = [step for step in path.split(".") if step and not step.isdecimal()] or [name]
    return ".".join(named[-2:]) if named[-1] in _VAGUE else named[-1]
