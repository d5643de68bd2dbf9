"""Which attentions of a model get another mechanism; no weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from tcompress.attention import Host, mechanism_of
from tcompress.attention.replacement import spec_name
from tcompress.errors import PlanError, SourceError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.planning.entries import AttentionPlan, DenseLayer, Left
from tcompress.roles import Anatomy, Attention, Layer, attentions_of
from tcompress.structures import Refusal

ROLE = "attention"


@dataclass(frozen=True)
class Exchanged:
    """What becomes of the attentions of a model.

    Attributes:
        entries: Those that get another mechanism, in the order of the blocks.
        left: Those that stay, with the reason.
        unused: Runtime names of weights that are dropped.
        notes: What a user should know.
    """

    entries: tuple[AttentionPlan, ...] = ()
    left: tuple[Left, ...] = ()
    unused: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def plan_attention(recipe: Convert, source: SourceModel, anatomy: Anatomy) -> Exchanged:
    """Plans which attentions are exchanged.

    Args:
        recipe: What to do.
        source: The model; its weights are not read.
        anatomy: Its anatomy.

    Raises:
        PlanError: None can be, or a block is asked for that is not there; all reasons are in one
            message.
    """
    if recipe.attention is None:
        return Exchanged()
    found = attentions_of(source.meta_model(), anatomy)
    _check_blocks(recipe, source, found)
    entries: list[AttentionPlan] = []
    left: list[Left] = []
    unused: set[str] = set()
    for item in found:
        if recipe.attention_layers is not None and _number(source, item) not in (
            recipe.attention_layers
        ):
            continue
        try:
            entries.append(_entry(recipe, source, item))
        except Refusal as refusal:
            facts = {"name": item.name, "block": item.block, "reason": str(refusal)}
            left.append(Left(role=ROLE, parameters=0, **facts))
            continue
        roles = mechanism_of(recipe.attention).unused
        unused |= {item.layers[role].weight_name for role in roles if role in item.layers}
    if not entries:
        raise _nothing_to_do(recipe, anatomy, left)
    return Exchanged(
        entries=tuple(entries),
        left=tuple(left),
        unused=frozenset(unused),
        notes=_notes(recipe, source, entries, found),
    )


def with_guard(entries: Sequence[AttentionPlan], rewritten: bool) -> tuple[AttentionPlan, ...]:
    """Makes sure that plain Transformers stops on the result.

    Where no layer is rewritten and none dropped, one dense layer is stored under another name.

    Args:
        entries: The plan.
        rewritten: Whether some layer is rewritten.
    """
    if rewritten or any(entry.unused for entry in entries):
        return tuple(entry.model_copy(update={"guard": None}) for entry in entries)
    return tuple(
        entry if index == 0 else entry.model_copy(update={"guard": None})
        for index, entry in enumerate(entries)
    )


def _entry(recipe: Convert, source: SourceModel, item: Attention) -> AttentionPlan:
    if item.reason is not None:
        raise Refusal(item.reason)
    assert recipe.attention is not None
    kind = mechanism_of(recipe.attention)
    host = Host(**{field.name: getattr(item, field.name) for field in fields(Host)})
    layout = kind.layout(recipe.attention, host)
    try:
        prefix = source.keymap.checkpoint_prefix
        return AttentionPlan(
            name=prefix(item.name),
            block=prefix(item.block),
            layout=layout,
            unused=tuple(
                _dense(item.layers[role], prefix(item.layers[role].name))
                for role in kind.unused
                if role in item.layers
            ),
            guard=_dense(item.layers["o"], prefix(item.layers["o"].name)),
            like=prefix(item.layers["o"].name),
        )
    except SourceError as error:
        raise Refusal(error.message) from error


def _dense(layer: Layer, name: str) -> DenseLayer:
    return DenseLayer(
        name=name,
        role=layer.role,
        in_features=layer.in_features,
        out_features=layer.out_features,
        bias=layer.bias,
        transposed=layer.kind == "conv1d",
    )


def _number(source: SourceModel, item: Attention) -> int:
    """Number of a block in the whole model."""
    return int(source.original_name(item.block).rpartition(".")[2])


def _check_blocks(recipe: Convert, source: SourceModel, found: Sequence[Attention]) -> None:
    asked = recipe.attention_layers
    if asked is None:
        return
    numbers = {_number(source, item) for item in found}
    lost = [str(number) for number in asked if number not in numbers]
    # Some of those asked for may be among the blocks that were dropped, but not all.
    if lost and not (source.renumbered and len(lost) < len(asked)):
        raise PlanError(
            f"there is no attention in block {', '.join(lost)}",
            f"blocks are numbered from 0 to {max(numbers)}" if numbers else None,
        )


def _notes(
    recipe: Convert,
    source: SourceModel,
    entries: Sequence[AttentionPlan],
    found: Sequence[Attention],
) -> tuple[str, ...]:
    assert recipe.attention is not None
    kind = mechanism_of(recipe.attention)
    lengths = [item.tokens or item.longest for item in found]
    longest = None if None in lengths else max(length for length in lengths if length)
    trained = recipe.init != "random"
    notes = [kind.note(entry.layout, longest, pretrained=trained) for entry in entries[:1]]
    if kind.segments and getattr(source.config, "type_vocab_size", 0) < 2:
        notes.append(
            "this model has no types of tokens, which tell the texts of a pair apart: both are "
            "taken as one"
        )
    if kind.unused and not any(entry.unused for entry in entries):
        notes.append(
            "queries are part of a fused projection, which stays whole: their part is computed, "
            "and not used"
        )
    return tuple(note for note in notes if note)


def _nothing_to_do(recipe: Convert, anatomy: Anatomy, left: Sequence[Left]) -> PlanError:
    assert recipe.attention is not None
    name = spec_name(recipe.attention)
    if not left:
        return PlanError(
            f"no attention of this `{anatomy.family}` model is known, so that `{name}` cannot take "
            "its place"
        )
    return PlanError(
        f"`{name}` suits none of {len(left)} attentions:\n" + "\n".join(_lines(left)),
        "choose another mechanism, see `tcompress methods`, or other blocks with `--layers`",
    )


def _lines(left: Sequence[Left]) -> Iterator[str]:
    seen: dict[str, list[str]] = {}
    for item in left:
        seen.setdefault(item.reason, []).append(item.name)
    for reason, names in seen.items():
        yield f"  - {reason}: {', '.join(f'`{name}`' for name in names)}"
