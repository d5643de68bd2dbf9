"""What a model consists of, and which of its layers can be rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from pydantic import BaseModel, ConfigDict

from tcompress.anatomy import anatomy_of
from tcompress.artifact.reader import Artifact, is_converted
from tcompress.errors import PlanError
from tcompress.planning.entries import AttentionPlan, LayerPlan, Left
from tcompress.planning.planner import make_plan
from tcompress.recipe.schema import Calibration, Convert
from tcompress.reporting.describe import describe_attention, describe_parts
from tcompress.source import SourceModel, WeightStore, resolve
from tcompress.structures.lowrank import LowRankSpec


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True)


class LayerFacts(_Facts):
    """One layer that can be, or has been, rewritten.

    Attributes:
        name: Name in the checkpoint.
        block: Name of its block.
        role: What it does, such as `q` or `down`.
        kind: How the dense weight is stored.
        in_features: Width of the input.
        out_features: Width of the output.
        parts: Roles of the runs of output features, where they are fused.
        experts: Number of stacked weights, if any.
        dense_parameters: Parameters of the dense weight.
        parameters: Parameters that are stored, without the bias.
        structure: Terms that replace the weight, None in a dense model.
    """

    name: str
    block: str
    role: str
    kind: str
    in_features: int
    out_features: int
    parts: tuple[str, ...]
    experts: int | None
    dense_parameters: int
    parameters: int
    structure: str | None


class RefusedFacts(_Facts):
    """One layer that stays dense, and why."""

    name: str
    reason: str


class Inspection(_Facts):
    """What was found in a model.

    Attributes:
        model: Name as it was given.
        model_class: Class of the model.
        family: Its model type.
        converted: Whether tcompress has converted it.
        parameters: Parameters that are stored.
        blocks: Names of the blocks that have such layers, or another attention.
        layers: Layers that can be, or have been, rewritten.
        refused: Layers that stay dense.
        warnings: What a user should know.
        attention: Mechanisms that mix tokens in place of the family's own, in words.
    """

    model: str
    model_class: str
    family: str
    converted: bool
    parameters: int
    blocks: tuple[str, ...]
    layers: tuple[LayerFacts, ...]
    refused: tuple[RefusedFacts, ...]
    warnings: tuple[str, ...]
    attention: str = ""


def inspect_model(
    name: str,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
) -> Inspection:
    """Looks into a dense or a converted model; no weight is read.

    Args:
        name: Folder, short name or hub id.
        revision: Branch, tag or commit on the hub.
        token: Access token for the hub.
        trust_remote_code: Whether Python code that comes with the model may run.

    Raises:
        SourceError: There is no such model, or it cannot be read.
        ArtifactError: It was converted, and is damaged or too new.
    """
    folder = resolve(name, revision=revision, token=token)
    if is_converted(folder):
        return _converted(name, Artifact.open(folder))
    return _dense(name, SourceModel.open(name, revision, token, trust_remote_code))


def _dense(name: str, source: SourceModel) -> Inspection:
    anatomy = anatomy_of(source.meta_model())
    layers: tuple[LayerPlan, ...] = ()
    left = tuple(RefusedFacts(name=item.name, reason=item.reason) for item in anatomy.refused)
    warnings = (*source.notes, *anatomy.warnings)
    # What even the smallest structure is refused for, every method is refused for.
    smallest = Convert(method=LowRankSpec(rank=1), calibration=Calibration(source="none"))
    try:
        plan = make_plan(smallest, source)
        layers, left = plan.layers, _refused(plan.left)
    except PlanError as error:
        warnings = (*warnings, error.message)
    return Inspection(
        model=name,
        model_class=source.model_class.__name__,
        family=anatomy.family,
        converted=False,
        parameters=_stored(source.store),
        blocks=_blocks(layers),
        layers=tuple(_facts(entry, converted=False) for entry in layers),
        refused=left,
        warnings=warnings,
    )


def _converted(name: str, artifact: Artifact) -> Inspection:
    manifest = artifact.manifest
    return Inspection(
        model=name,
        model_class=next(iter(artifact.config.get("architectures") or ()), "unknown"),
        family=str(artifact.config.get("model_type", "unknown")),
        converted=True,
        parameters=_stored(artifact.store),
        blocks=_blocks((*artifact.attention, *artifact.layers)),
        layers=tuple(_facts(entry, converted=True) for entry in artifact.layers),
        refused=_refused(manifest.plan.left) if manifest else (),
        warnings=manifest.plan.warnings if manifest else (),
        attention=describe_attention(artifact.attention),
    )


def _stored(store: WeightStore) -> int:
    return sum(prod(store.shape(key)) for key in store.keys())  # noqa: SIM118 - not a mapping


def _blocks(layers: Sequence[AttentionPlan | LayerPlan]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.block for entry in layers))


def _refused(left: tuple[Left, ...]) -> tuple[RefusedFacts, ...]:
    return tuple(RefusedFacts(name=item.name, reason=item.reason) for item in left)


def _facts(entry: LayerPlan, *, converted: bool) -> LayerFacts:
    single = entry.parameter == "weight"
    return LayerFacts(
        name=entry.name if single else f"{entry.name}.{entry.parameter}",
        block=entry.block,
        role=entry.role,
        kind=entry.kind,
        in_features=entry.in_features,
        out_features=entry.out_features,
        parts=tuple(part.name for part in entry.parts) if len(entry.parts) > 1 else (),
        experts=entry.experts,
        dense_parameters=entry.dense_parameters,
        parameters=entry.parameters if converted else entry.dense_parameters,
        structure=describe_parts(entry.parts) if converted else None,
    )
