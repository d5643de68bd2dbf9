"""What a model weighs and what a conversion lost: one tree of records, which is also the JSON.

Nothing here reads a weight: numbers follow from the config, the plan and the headers of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedModel

from tcompress.anatomy import Anatomy, anatomy_of
from tcompress.artifact.manifest import CalibrationFacts, Metric
from tcompress.artifact.reader import Artifact, is_converted
from tcompress.errors import ArtifactError, InputError
from tcompress.planning.entries import LayerPlan, Left
from tcompress.reporting.count import (
    Planned,
    all_parameters,
    block_parameters,
    embedding_parameters,
    experts_per_token,
    layer_macs,
    macs_per_token,
)
from tcompress.reporting.describe import describe_parts
from tcompress.source import KeyMap, SourceModel, resolve
from tcompress.source.store import WeightStore

ERRORS = ("held_out", "calibration", "weight")
"""Kinds of error, the most telling one first."""


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Amount(_Node):
    """A quantity of the dense model and of the converted one.

    Attributes:
        dense: Before.
        now: After; the same for a dense model.
        kept: Their ratio.
    """

    dense: int
    now: int
    kept: float

    @classmethod
    def of(cls, dense: int, now: int, **more: Any) -> Any:
        """Builds an amount with its ratio; nothing of nothing is all of it."""
        return cls(dense=dense, now=now, kept=now / dense if dense else 1.0, **more)


class Macs(Amount):
    """Multiply-adds for one token; `tcompress.reporting.count` has the formula.

    Attributes:
        length: Tokens in the sequence.
    """

    length: int


class Parameters(_Node):
    """Parameters by part: embeddings, blocks and the rest add up to the total.

    Attributes:
        embeddings: Embedding tables outside the blocks.
        blocks: Everything in transformer blocks, biases and norms counted.
        rewritten: Weights of the rewritten layers, a part of the blocks; what transforms store is
            counted, biases are not.
        other: Patch projections, norms outside the blocks, poolers, heads that are not tied.
        total: All parameters; tied ones count once.
    """

    embeddings: Amount
    blocks: Amount
    rewritten: Amount
    other: Amount
    total: Amount


class LayerReport(_Node):
    """One rewritten weight.

    Attributes:
        name: Name in the checkpoint.
        parameter: Attribute of that module which holds the weight.
        block: Name of the block in the checkpoint.
        role: What the layer does, such as `q` or `down`.
        structure: How it is stored, such as `lprod p=16 dct + lowrank r=77`.
        in_features: Width of the input.
        out_features: Width of the output.
        experts: Number of stacked experts, if any.
        input_of: Layer that stores the input side of this one too, if any.
        parameters: Parameters of the weight, without the bias.
        macs: Multiply-adds for one token.
        errors: Relative squared errors by kind: of the output on data that the fit did not see
            (`held_out`) and on data that it saw (`calibration`), or of the weight (`weight`).
    """

    name: str
    parameter: str
    block: str
    role: str
    structure: str
    in_features: int
    out_features: int
    experts: int | None
    input_of: str | None
    parameters: Amount
    macs: Amount
    errors: dict[str, float]


class ModelReport(_Node):
    """All that is known of one model without running it.

    Attributes:
        schema_version: Version of this tree; `schema` in JSON.
        name: Folder or id, as it was given.
        family: Model type.
        method: Name of the method; `dense` for a model that was not converted.
        source: The dense model, if known.
        created: Time of the conversion, if known.
        parameters: Parameters by part.
        bytes_on_disk: Tensors of the source, and weight files as they are.
        macs_per_token: Multiply-adds for one token.
        layers: The rewritten weights.
        left: Layers of the blocks that stayed dense, and why.
        errors: Means of the layers' errors by kind.
        calibration: Data that the fit looked at, if known.
        metrics: What was measured on the model, with protocols.
    """

    schema_version: Literal[1] = Field(1, validation_alias="schema", serialization_alias="schema")
    name: str
    family: str
    method: str
    source: str | None
    created: str | None
    parameters: Parameters
    bytes_on_disk: Amount
    macs_per_token: Macs
    layers: tuple[LayerReport, ...] = ()
    left: tuple[Left, ...] = ()
    errors: dict[str, float] = Field(default_factory=dict)
    calibration: CalibrationFacts | None = None
    metrics: tuple[Metric, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the tree as plain data for JSON."""
        return self.model_dump(mode="json", by_alias=True)


def report_of(
    name: str | Path, length: int = 128, *, trust_remote_code: bool = False
) -> ModelReport:
    """Reports on a converted or a dense model without reading its weights.

    Args:
        name: Local folder, short name or hub id.
        length: Tokens in the sequence for the multiply-adds.
        trust_remote_code: Whether Python code that comes with the model may run.

    Raises:
        SourceError: There is no such model, or it cannot be read.
        ArtifactError: It is a converted model that is damaged.
    """
    if length < 1:
        raise InputError(f"length is {length}, expected 1 or more")
    folder = resolve(str(name))
    if is_converted(folder):
        return _converted(str(name), Artifact.open(folder), length, trust_remote_code)
    source = SourceModel.open(str(name), trust_remote_code=trust_remote_code)
    model = source.meta_model()
    anatomy = anatomy_of(model)
    size = bytes_of_files(source.store)
    return ModelReport(
        name=str(name),
        family=anatomy.family,
        method="dense",
        source=source.id,
        created=None,
        parameters=_parameters(model, anatomy, ()),
        bytes_on_disk=Amount.of(size, size),
        macs_per_token=_macs(model, anatomy, {}, length),
    )


def layer_report(
    entry: LayerPlan, errors: Mapping[str, float] | None = None, runs: int = 1
) -> LayerReport:
    """Reports on one layer of a plan.

    Args:
        entry: The layer.
        errors: Its errors, if it was fitted.
        runs: Experts that one token passes.
    """
    dense = entry.in_features * entry.out_features * (runs if entry.experts else 1)
    return LayerReport(
        name=entry.name,
        parameter=entry.parameter,
        block=entry.block,
        role=entry.role,
        structure=describe_parts(entry.parts),
        in_features=entry.in_features,
        out_features=entry.out_features,
        experts=entry.experts,
        input_of=entry.input_of,
        parameters=Amount.of(entry.dense_parameters, entry.parameters),
        macs=Amount.of(dense, layer_macs(entry, runs)),
        errors=dict(errors or {}),
    )


def mean_errors(layers: Iterable[LayerReport]) -> dict[str, float]:
    """Means of the errors of each kind, over the layers that have it."""
    found: dict[str, list[float]] = {}
    for layer in layers:
        for kind, error in layer.errors.items():
            found.setdefault(kind, []).append(error)
    known = [kind for kind in ERRORS if kind in found]
    kinds = [*known, *(kind for kind in found if kind not in known)]
    return {kind: sum(found[kind]) / len(found[kind]) for kind in kinds}


def bytes_of_files(store: WeightStore) -> int:
    """Sizes of the weight files."""
    return sum((store.folder / file).stat().st_size for file in store.files)


def _converted(name: str, artifact: Artifact, length: int, trust: bool) -> ModelReport:
    model = _dense_model(artifact, trust)
    anatomy = anatomy_of(model)
    planned = _planned(artifact, model)
    manifest = artifact.manifest
    layers = tuple(
        layer_report(entry, errors, experts_per_token(model.config, entry.experts))
        for entry, errors in zip(artifact.layers, _errors(artifact), strict=True)
    )
    first = artifact.layers[0].parts[0].terms[0].structure if artifact.layers else "unknown"
    return ModelReport(
        name=name,
        family=anatomy.family,
        method=first if manifest is None else manifest.plan.method,
        source=None if manifest is None else manifest.source.id,
        created=None if manifest is None else manifest.created,
        parameters=_parameters(model, anatomy, artifact.layers),
        bytes_on_disk=_bytes(artifact),
        macs_per_token=_macs(model, anatomy, planned, length),
        layers=layers,
        left=_left(anatomy, planned) if manifest is None else manifest.plan.left,
        errors=mean_errors(layers),
        calibration=None if manifest is None else manifest.calibration,
        metrics=() if manifest is None else tuple(manifest.metrics),
    )


def _dense_model(artifact: Artifact, trust: bool) -> PreTrainedModel:
    """Builds the dense model of a converted one, on the meta device."""
    return SourceModel.open(
        str(artifact.folder), trust_remote_code=trust, converted=True
    ).meta_model()


def _planned(artifact: Artifact, model: PreTrainedModel) -> Planned:
    """Finds the rewritten layers in the model."""
    keymap = KeyMap(model, ())
    names = {entry.name: keymap.runtime_name(entry.name) for entry in artifact.layers}
    lost = [name for name, path in names.items() if path is None]
    if lost:
        raise ArtifactError(
            f"the plan names `{lost[0]}`, which a `{type(model).__name__}` does not have"
            + (f", and {len(lost) - 1} more such layers" if lost[1:] else ""),
            "`architectures` in `config.json` must name the class that the weights belong to",
        )
    return {(names[entry.name] or "", entry.parameter): entry for entry in artifact.layers}


def _errors(artifact: Artifact) -> list[dict[str, float]]:
    """Gives the errors of each layer; the manifest has the names of the conversion."""
    manifest = artifact.manifest
    if manifest is None:
        return [{} for _ in artifact.layers]
    keys = [f"{entry.name}.{entry.parameter}" for entry in manifest.plan.layers]
    return [manifest.fit.get(key, {}) for key in keys]


def _parameters(
    model: PreTrainedModel, anatomy: Anatomy, layers: Iterable[LayerPlan]
) -> Parameters:
    layers = tuple(layers)
    rewritten = Amount.of(
        sum(entry.dense_parameters for entry in layers),
        sum(entry.parameters for entry in layers),
    )
    saved = rewritten.dense - rewritten.now
    total, blocks = all_parameters(model), block_parameters(model, anatomy)
    embeddings = embedding_parameters(model, anatomy)
    other = total - blocks - embeddings
    return Parameters(
        embeddings=Amount.of(embeddings, embeddings),
        blocks=Amount.of(blocks, blocks - saved),
        rewritten=rewritten,
        other=Amount.of(other, other),
        total=Amount.of(total, total - saved),
    )


def _macs(model: PreTrainedModel, anatomy: Anatomy, planned: Planned, length: int) -> Macs:
    dense, now = macs_per_token(model, anatomy, planned, length)
    macs: Macs = Macs.of(dense, now, length=length)
    return macs


def _bytes(artifact: Artifact) -> Amount:
    """Bytes before are those of the source, or follow from the shapes and the dtype stored now."""
    store = artifact.store
    if artifact.manifest is not None:
        dense = artifact.manifest.source.bytes
    else:
        dense = store.total_bytes
        for entry in artifact.layers:
            guard = f"{entry.name}.{entry.parameter}"
            saved = entry.dense_parameters - entry.parameters
            dense += saved * store.dtype(guard).itemsize
    amount: Amount = Amount.of(dense, bytes_of_files(store))
    return amount


def _left(anatomy: Anatomy, planned: Planned) -> tuple[Left, ...]:
    """Says what stayed dense where no manifest does."""
    layers = [
        Left(
            name=layer.weight_name,
            block=block.name,
            role=layer.role,
            parameters=layer.in_features * layer.out_features * (layer.experts or 1),
            reason="not part of the plan",
        )
        for block in anatomy.blocks
        for layer in block.layers
        if (layer.name, layer.parameter) not in planned
    ]
    refused = [
        Left(name=item.name, block="", role="", parameters=0, reason=item.reason)
        for item in anatomy.refused
    ]
    return (*layers, *refused)
