"""Which tables of word embeddings are rewritten, and how."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tcompress.anatomy import Anatomy
from tcompress.errors import PlanError, SourceError
from tcompress.options import Embeddings
from tcompress.options.methods import lookup_methods
from tcompress.planning.entries import LayerPlan
from tcompress.planning.offers import structure_of
from tcompress.source import SourceModel
from tcompress.structures import Layout, Refusal, Site
from tcompress.structures.capabilities import LooksUp
from tcompress.structures.embedding import LookupScale
from tcompress.structures.linear import PartLayout


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
