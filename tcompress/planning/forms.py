"""Which modules of a host take another form: tables of positions, and layer norms, by slices."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tcompress.anatomy import Anatomy
from tcompress.anatomy.positions import position_tables
from tcompress.errors import PlanError, SourceError
from tcompress.options import Convert
from tcompress.planning.entries import FormPlan
from tcompress.source import SourceModel


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
