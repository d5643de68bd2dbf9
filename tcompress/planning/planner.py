"""From a recipe and a model's roles to a plan; no weight is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from tcompress.errors import PlanError, SourceError
from tcompress.models import SourceModel
from tcompress.options import Convert, LayerRule
from tcompress.options.method_options import AutoSpec
from tcompress.planning.attention_sites import plan_attention, with_guard
from tcompress.planning.costs import STAND_IN, Choice, kept_share, plan_terms, plan_within
from tcompress.planning.depth import cut_to, plan_depth, with_depth, within
from tcompress.planning.entries import Coverage, Dense, LayerPlan, Left, Plan
from tcompress.planning.sites import (
    Pools,
    check_patterns,
    left_out,
    matched_names,
    matches,
    named_outside,
    note_of,
    offered_by,
    plan_embeddings,
    plan_forms,
    structure_of,
)
from tcompress.roles import Anatomy, Block, Layer, Part, anatomy_of
from tcompress.structures import Layout, Refusal, Site
from tcompress.structures.capabilities import SharesFactors, transform_of
from tcompress.structures.modules.linear import PartLayout

# How much of a whole model a plan rewrites, and what the rest of it is.


def coverage_of(plan: Plan, source: SourceModel, model: nn.Module) -> Coverage:
    """Counts every parameter once; tied ones are one.

    Args:
        plan: The plan.
        source: The dense model.
        model: The same on the meta device.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter

    def runtime(name: str) -> str:
        return source.keymap.runtime_name(name) or name

    rewritten = {f"{runtime(entry.name)}.{entry.parameter}" for entry in plan.entries}
    unused = {runtime(layer.name) for entry in plan.attention for layer in entry.unused}
    tables = {
        f"{name}.weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding)
    }
    reasons = {item.name: (item.role, item.reason) for item in plan.left}
    every = [name for own in names.values() for name in own]
    above = _above((*tables, *(name for name in every if _numbered(name) or _is_table(name))))
    counts = dict.fromkeys(("rewritten", "replaced", "embeddings", "norms"), 0)
    dense: dict[tuple[str, str], int] = {}
    for key, own in names.items():
        size = tensors[key].numel()
        if rewritten.intersection(own):
            counts["rewritten"] += size
        elif any(_module(name) in unused for name in own):
            counts["replaced"] += size
        elif any(name in tables or _is_table(name) for name in own):
            counts["embeddings"] += size
        elif tensors[key].ndim < 2 or own[0].endswith("bias"):
            counts["norms"] += size
        else:
            known = (reasons.get(name) or reasons.get(_module(name)) for name in own)
            role, reason = next((item for item in known if item), ("", ""))
            label = role or _label(own[0], above)
            dense[label, reason] = dense.get((label, reason), 0) + size
    listed = sorted(dense.items(), key=lambda item: -item[1])
    left = tuple(Dense(name=n, parameters=size, reason=why) for (n, why), size in listed)
    return Coverage(total=sum(item.numel() for item in tensors.values()), left=left, **counts)


def note_of_coverage(plan: Plan, chosen: Collection[str]) -> Iterator[str]:
    """Warns where most of a model cannot be rewritten.

    Args:
        plan: The plan, with its coverage.
        chosen: Reasons to leave a layer dense that are somebody's choice.
    """
    own = plan.coverage
    assert own is not None
    layers = min(own.rewritten, plan.dense_rewritten)
    outside = own.total - own.dropped - own.embeddings - (own.rewritten - layers)
    forced = [item for item in own.left if item.reason not in chosen]
    reached = layers + own.replaced + sum(i.parameters for i in own.left if i.reason in chosen)
    if 2 * reached < outside and forced:
        most = forced[0]
        yield (
            f"only {reached / outside:.0%} of the parameters outside embeddings can be rewritten; "
            f"the largest part that stays dense is `{most.name}` ({most.parameters:,} parameters)"
            + (f": {most.reason}" if most.reason else ", outside the blocks")
        )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_table(name: str) -> bool:
    """Whether a parameter that is no module's weight is a table, such as one of positions."""
    leaf = name.rpartition(".")[2]
    return leaf not in ("weight", "bias") and any(
        word in leaf for word in ("embed", "position", "token")
    )


def _numbered(name: str) -> bool:
    return any(step.isdecimal() for step in name.split("."))


def _above(names: Collection[str]) -> set[str]:
    """All starts of names."""
    steps = (name.split(".") for name in names)
    return {".".join(own[:depth]) for own in steps for depth in range(1, len(own))}


def _label(name: str, above: Collection[str]) -> str:
    """What people call a parameter: its module in a block, else the largest module around it."""
    steps = _module(name).split(".") if name.endswith(".weight") else name.split(".")
    if not _numbered(name):
        for depth in range(1, len(steps)):
            if ".".join(steps[:depth]) not in above:
                steps = steps[:depth]
                break
    return next((step for step in reversed(steps) if step and not step.isdecimal()), name)


# From a recipe and a model's anatomy to a plan; no weight is read.


KEPT = "kept dense by the recipe"
STAYS = "the budget is better spent on keeping it dense"


@dataclass
class _Planner:
    recipe: Convert
    source: SourceModel
    anatomy: Anatomy
    unused: frozenset[str] = frozenset()
    layers: list[LayerPlan] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    hints: set[str] = field(default_factory=set)
    clipped: dict[str, str] = field(default_factory=dict)
    pools: Pools = field(default_factory=Pools)

    def run(self) -> None:
        """Plans all layers; again without those that then did not take their part of a bank."""
        pools: Pools | None = self.pools
        while pools is not None:
            self.pools, self.layers, self.left = pools, [], []
            self._pool()
            for block in self.anatomy.blocks:
                for group in block.groups:
                    self._plan_group(block, group)
            pools = self.pools.without(item.name for item in self.left)
        self.layers = list(self.pools.lend(self.layers))

    def _pool(self) -> None:
        """Asks every weight which bank it would use, if any may."""
        recipe = self.recipe
        rules = (rule.method for rule in recipe.layers)
        if not any(method.pools for method in (recipe.method, *rules) if method):
            return
        for block in self.anatomy.blocks:
            for layer in block.layers:
                if layer.weight_name in self.unused:
                    continue
                try:
                    name, choice = self._choice_of(layer)
                except Refusal:
                    continue
                kind = structure_of(choice.method)
                if layer.kind == "experts" or not isinstance(kind, SharesFactors):
                    continue
                for part in layer.parts:
                    site = site_of(block, layer, part)
                    key = kind.sharing_group(choice.method, site)
                    if key is not None:
                        place = (f"{name}.{layer.parameter}", part.name)
                        own = (choice.method, choice.residual_rank, choice.target, key)
                        self.pools.add(place, site, own, layer.weight_name)

    def _plan_group(self, block: Block, group: Sequence[Layer]) -> None:
        """Plans the layers that read one input.

        What an input side costs each of them depends on how many share it, which is known only
        when they are planned: a second look settles it.
        """
        group = [layer for layer in group if layer.weight_name not in self.unused]
        plain = sum(layer.kind != "experts" for layer in group)
        sharing = {layer.weight_name: 1 if layer.kind == "experts" else plain for layer in group}
        for _ in group:
            planned: dict[str, LayerPlan] = {}
            left: list[Left] = []
            for layer in group:
                try:
                    count = sharing[layer.weight_name]
                    planned[layer.weight_name] = self._entry(block, layer, count)
                except Refusal as refusal:
                    left.append(_left(block, layer, refusal))
                    self.hints.update([refusal.hint] if refusal.hint else ())
            shared = tuple(_share_inputs(list(planned.values())))
            readers = {entry.name: entry.readers for entry in shared if entry.input_of is None}
            owners = {entry.name: entry.input_of or entry.name for entry in shared}
            actual = {key: readers[owners[entry.name]] for key, entry in planned.items()}
            if all(sharing[key] == count for key, count in actual.items()):
                break
            sharing |= actual
        self.layers.extend(shared)
        self.left.extend(left)

    def _choice_of(self, layer: Layer) -> tuple[str, Choice]:
        """Name of a layer in the checkpoint, and what it becomes."""
        try:
            name = self.source.keymap.checkpoint_prefix(layer.name)
            self.source.keymap.sources(layer.weight_name)
            self.source.keymap.apart([layer.weight_name])
        except SourceError as error:
            raise Refusal(error.message) from error
        choice = self._choice(matched_names(self.source, layer))
        if choice is None:
            raise Refusal(KEPT)
        return name, choice

    def _entry(self, block: Block, layer: Layer, sharing: int) -> LayerPlan:
        name, choice = self._choice_of(layer)
        stored = f"{name}.{layer.parameter}"
        sites = [
            self.pools.site((stored, part.name), site_of(block, layer, part))
            for part in layer.parts
        ]
        parts = tuple(
            PartLayout(name=site.role, terms=self._terms(choice, layer, site, sharing))
            for site in sites
        )
        entry = LayerPlan(
            name=name,
            parameter=layer.parameter,
            block=self.source.keymap.checkpoint_prefix(block.name),
            role=layer.role,
            kind=layer.kind,
            bias=layer.bias,
            experts=layer.experts,
            transposed=layer.transposed,
            axes=layer.axes,
            parts=parts,
        )
        share = kept_share(entry, sharing)
        if share >= 1:
            reason = f"it would not shrink: {share:.0%} of {entry.dense_parameters:,}"
            larger = ", or a larger p" if hasattr(choice.method, "p") else ""
            raise Refusal(reason, f"choose a smaller rank{larger}")
        for part in parts:
            note = choice.method.clipped(part.terms[0])
            self.clipped |= {stored: note} if note else {}
        return entry

    def _choice(self, names: Sequence[str]) -> Choice | None:
        recipe = self.recipe
        if left_out(names, recipe.keep, recipe.only):
            return None
        choice: Choice | None = _usual(recipe)
        for rule in recipe.layers:
            if matches(rule.match, names):
                choice = None if rule.keep else _overridden(choice, recipe, rule)
        return choice

    def _terms(self, choice: Choice, layer: Layer, site: Site, sharing: int) -> tuple[Layout, ...]:
        calibrated = self.recipe.calibration.source != "none"
        copies = layer.experts or 1
        readers = sharing * len(layer.parts) * copies
        return plan_terms(choice, site, readers, copies, calibrated=calibrated)


def follows_rules(recipe: Convert, source: SourceModel, layer: Layer) -> bool:
    """Tells whether the recipe has words of its own for a layer, so that no budget sizes it."""
    return any(matches(rule.match, matched_names(source, layer)) for rule in recipe.layers)


def site_of(block: Block, layer: Layer, part: Part) -> Site:
    """Describes where a part of a layer sits."""
    return Site(
        layer.in_features, part.size, layer.side, role=part.name, block=block.name, head=layer.head
    )


def _left(block: Block, layer: Layer, refusal: Refusal) -> Left:
    return Left(
        name=layer.weight_name,
        block=block.name,
        role=layer.role,
        parameters=layer.in_features * layer.out_features * (layer.experts or 1),
        reason=str(refusal),
    )


def _usual(recipe: Convert) -> Choice:
    method = recipe.method
    assert method is not None  # without one no layer is planned
    if isinstance(method, AutoSpec):  # the first one offered stands in
        method = next(iter(offered_by(method, recipe.target or STAND_IN).values()))[0]
    return Choice(method, recipe.residual_rank, recipe.target)


def _overridden(choice: Choice | None, recipe: Convert, rule: LayerRule) -> Choice:
    base = choice or _usual(recipe)
    rank = base.residual_rank if rule.residual_rank is None else rule.residual_rank
    return Choice(rule.method or base.method, rank, rule.target or base.target)


def _share_inputs(planned: Sequence[LayerPlan]) -> Iterator[LayerPlan]:
    """Lets layers that read one input, through equal input sides, share the first one's."""
    owners: dict[object, list[int]] = {}
    for index, entry in enumerate(planned):
        keys = [transform_of(term, "in") for term in entry.parts[0].terms]
        while keys and keys[-1] is None:  # a low-rank term at the end has no side
            keys.pop()
        # Side modules are found by their term, so all that is left has to agree.
        own = tuple(keys) if keys and entry.kind != "experts" else index
        owners.setdefault(own, []).append(index)
    for members in owners.values():
        first = planned[members[0]]
        yield first.model_copy(update={"readers": len(members)})
        for index in members[1:]:
            yield planned[index].model_copy(update={"input_of": first.name})


def make_plan(recipe: Convert, source: SourceModel, method_label: str | None = None) -> Plan:
    """Plans a conversion.

    Args:
        recipe: What to do.
        source: The model; its weights are not read.
        method_label: Name of the method for people; default its own name.

    Raises:
        PlanError: No layer can be rewritten, or a pattern selects nothing. All problems are in
            one message.
    """
    model = source.meta_model()
    depth = plan_depth(recipe, source)
    deeper = depth is not None and depth.deeper
    if not (source.renumbered or deeper):  # a pattern may be about blocks that are dropped
        check_patterns(recipe, model, source)
    label = method_label or recipe.label
    if depth is not None:
        cut = cut_to(source, depth)
        if deeper:
            check_patterns(recipe, cut.meta_model(), cut)
        inner = within(recipe, depth, source)
        return with_depth(make_plan(inner, cut, label), depth, source)
    plan = plan_within(
        recipe, source, lambda target: _plan(recipe.at(target), source, model, label)
    )
    plan = covered(plan, source)
    notes = note_of_coverage(plan, (KEPT, STAYS)) if recipe.method else ()
    return plan.model_copy(update={"warnings": (*plan.warnings, *notes)})


def grouped(plan: Plan, source: SourceModel) -> list[list[LayerPlan]]:
    """Lists the layers of a plan, those together that read one input."""
    planned = {_runtime(source, entry): entry for entry in plan.layers}
    groups = [group for block in anatomy_of(source.keymap.model).blocks for group in block.groups]
    inside = [[planned.pop(layer.weight_name, None) for layer in group] for group in groups]
    found = [[entry for entry in group if entry is not None] for group in inside]
    return [*filter(None, found), *([entry] for entry in planned.values())]


def resized(
    plan: Plan,
    groups: Sequence[Sequence[LayerPlan]],
    chosen: Mapping[str, tuple[PartLayout, ...] | None],
    source: SourceModel,
) -> Plan:
    """Gives layers of a plan other sizes or structures; what reads one input shares it anew.

    Args:
        plan: The plan; no layer of it uses a bank.
        groups: Its layers, see `grouped`.
        chosen: Layouts by weight name in the checkpoint; None leaves a layer dense, as one stays
            that would not shrink. Layers that are not named stay as they are.
        source: The dense model, without blocks that are dropped.
    """
    layers: list[LayerPlan] = []
    dense: list[LayerPlan] = []
    for group in groups:
        own, left = regrouped(group, chosen)
        layers += own
        dense += left
    stays = (
        Left(
            name=_runtime(source, entry),
            block=source.keymap.runtime_name(entry.block) or entry.block,
            role=entry.role,
            parameters=entry.dense_parameters,
            reason=STAYS,
        )
        for entry in dense
    )
    return plan.model_copy(update={"layers": tuple(layers), "left": (*plan.left, *stays)})


def covered(plan: Plan, source: SourceModel) -> Plan:
    """Counts anew what becomes of all parameters; see `Coverage`."""
    return plan.model_copy(update={"coverage": coverage_of(plan, source, source.meta_model())})


def _runtime(source: SourceModel, entry: LayerPlan) -> str:
    return f"{source.keymap.runtime_name(entry.name) or entry.name}.{entry.parameter}"


def regrouped(
    group: Sequence[LayerPlan], chosen: Mapping[str, tuple[PartLayout, ...] | None]
) -> tuple[list[LayerPlan], list[LayerPlan]]:
    """Gives layers that read one input what was chosen for them.

    Returns:
        Those that are rewritten, the owner of a shared input side first, and those that stay dense.
    """
    if all(entry.key not in chosen for entry in group):
        return [*group], []
    own, left = [], []
    for entry in group:
        parts = chosen.get(entry.key, entry.parts)
        if parts is None:
            left.append(entry)
        else:
            own.append(entry.model_copy(update={"parts": parts, "input_of": None, "readers": 1}))
    while True:
        shared = list(_share_inputs(own))
        readers = {item.name: item.readers for item in shared}
        sharing = {item.key: readers[item.input_of or item.name] for item in shared}
        large = [item for item in own if kept_share(item, sharing[item.key]) >= 1]
        if not large:
            return shared, left
        left += large
        own = [item for item in own if item not in large]


def _plan(recipe: Convert, source: SourceModel, model: nn.Module, label: str) -> Plan:
    anatomy = anatomy_of(model)
    named = (Block(layer.name, (layer,)) for layer in named_outside(recipe, source, anatomy))
    anatomy = replace(anatomy, blocks=(*anatomy.blocks, *named))
    embeddings = plan_embeddings(recipe.embeddings, source, anatomy)
    exchanged = plan_attention(recipe, source, anatomy)
    planner = _Planner(recipe, source, anatomy, exchanged.unused)
    if recipe.method is not None:  # else no layer is rewritten
        planner.run()
        if not planner.layers:
            raise _nothing_to_do(planner)
    blocks = {block.name for block in anatomy.blocks}
    return Plan(
        layers=tuple(planner.layers),
        attention=with_guard(exchanged.entries, rewritten=bool(planner.layers or embeddings)),
        embeddings=embeddings,
        forms=plan_forms(recipe, source, model, anatomy),
        left=exchanged.left
        + tuple(planner.left)
        + tuple(
            Left(
                name=item.name,
                block="",
                role="",
                parameters=_matrices(model, item.name),
                reason=item.reason,
            )
            for item in (anatomy.refused if recipe.method else ())
        ),
        source=source.id,
        family=anatomy.family,
        method=label,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        block_parameters=sum(
            parameter.numel()
            for name in blocks
            for parameter in model.get_submodule(name).parameters()
        ),
        warnings=(
            *source.notes,
            *anatomy.warnings,
            *exchanged.notes,
            *note_of(planner.layers),
            *_note_of_ranks(planner.clipped),
            *_note_of_experts(planner),
        ),
    )


def _matrices(model: nn.Module, name: str) -> int:
    """Parameters of the weights, without biases, that a module or a parameter of it holds."""
    path, _, leaf = name.rpartition(".")
    own = getattr(model.get_submodule(path), leaf)
    held = own.named_parameters(recurse=False) if isinstance(own, nn.Module) else [(leaf, own)]
    return sum(item.numel() for key, item in held if item.ndim > 1 and not key.endswith("bias"))


def _note_of_ranks(clipped: Mapping[str, str]) -> Iterator[str]:
    """Says once for all layers that shapes admit smaller ranks only."""
    if clipped:
        name, note = next(iter(clipped.items()))
        layers = "1 layer" if len(clipped) == 1 else f"{len(clipped)} layers, such as"
        yield f"ranks are more than shapes admit in {layers} `{name}`: {note}"


def _note_of_experts(planner: _Planner) -> Iterator[str]:
    """Says which experts calibration does not reach."""
    dark = [e.name for e in planner.layers if e.kind == "experts" and e.role == "linear"]
    if dark and planner.recipe.calibration.source != "none":
        names = ", ".join(f"`{name}`" for name in dark[:2]) + (", ..." if len(dark) > 2 else "")
        yield (
            f"{len(dark)} stacks of experts ({names}) are fitted without data: their module routes"
            " tokens in a way of its own"
        )


def _nothing_to_do(planner: _Planner) -> PlanError:
    if not planner.anatomy.layers:
        reasons = "; ".join(sorted({item.reason for item in planner.anatomy.refused})[:5])
        why = reasons or "it has no linear layers inside repeated blocks"
        return PlanError(f"no layer of this `{planner.anatomy.family}` model is supported: {why}")
    if all(item.reason == KEPT for item in planner.left):
        return PlanError(
            f"the recipe keeps all {len(planner.left)} layers dense",
            "remove patterns from `keep`, or rules with `keep: true`",
        )
    seen: dict[str, list[str]] = {}
    for item in planner.left:
        seen.setdefault(item.reason, []).append(item.name)
    lines = "\n".join(
        f"  - {reason}: {len(names)} layers, such as `{names[0]}`" for reason, names in seen.items()
    )
    return PlanError(
        f"none of {len(planner.left)} layers can be rewritten:\n{lines}",
        "; ".join(sorted(planner.hints)) or "choose another p or rank",
    )
