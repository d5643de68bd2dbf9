"""What a model weighs, what a conversion lost, and what was measured since.

Nothing here reads a weight: numbers follow from the config, the plan and the headers of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tcompress.anatomy import Anatomy, anatomy_of
from tcompress.artifact.manifest import Manifest, read_manifest
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
from tcompress.reporting.tree import (
    Amount,
    LayerReport,
    Macs,
    ModelReport,
    Parameters,
    mean_errors,
)
from tcompress.source import KeyMap, SourceModel, resolve
from tcompress.source.store import WeightStore

LENGTH = 128
"""Tokens in the sequence for the multiply-adds, unless it is chosen."""

__all__ = ["ModelReport", "layer_report", "mean_errors", "report_of"]


def report_of(
    name: str | Path, length: int = LENGTH, *, trust_remote_code: bool = False
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
    return _dense(str(name), length, trust_remote_code)


def layer_report(
    entry: LayerPlan,
    errors: Mapping[str, float] | None = None,
    runs: int = 1,
    itemsize: int | None = None,
    length: int = LENGTH,
) -> LayerReport:
    """Reports on one layer of a plan.

    Args:
        entry: The layer.
        errors: Its errors, if it was fitted.
        runs: Experts that one token passes.
        itemsize: Bytes of a stored number, if there is a file.
        length: Tokens in the sequence for the multiply-adds.
    """
    counts = (entry.dense_parameters, entry.parameters)
    size = None if itemsize is None else Amount.of(*(count * itemsize for count in counts))
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
        parameters=Amount.of(*counts),
        macs=Amount.of(dense, -(-layer_macs(entry, runs, length) // length)),
        bytes=size,
        errors=dict(errors or {}),
    )


def bytes_of_files(store: WeightStore) -> int:
    """Sizes of the weight files."""
    return sum((store.folder / file).stat().st_size for file in store.files)


def _dense(name: str, length: int, trust: bool) -> ModelReport:
    source = SourceModel.open(name, trust_remote_code=trust)
    model = source.meta_model()
    anatomy = anatomy_of(model)
    size = bytes_of_files(source.store)
    manifest = read_manifest(source.folder)  # of a dense model that tcompress trained
    return ModelReport(
        name=name,
        family=anatomy.family,
        method="dense",
        source=source.id if manifest is None else manifest.source.id,
        created=None if manifest is None else manifest.created,
        parameters=_parameters(model, anatomy, ()),
        bytes_on_disk=Amount.of(size, size),
        macs_per_token=_macs(model, anatomy, {}, length),
        **_recorded(manifest),
    )


def _recorded(manifest: Manifest | None) -> dict[str, Any]:
    """What the manifest says of the model's life; converted and dense ones alike."""
    if manifest is None:
        return {}
    return {
        "metrics": tuple(manifest.metrics),
        "training": tuple(manifest.training),
        "speed": tuple(manifest.speed),
        "recipe": manifest.recipe or None,
        "environment": manifest.environment or None,
    }


def _converted(name: str, artifact: Artifact, length: int, trust: bool) -> ModelReport:
    model = _dense_model(artifact, trust)
    anatomy = anatomy_of(model)
    planned = _planned(artifact, model)
    manifest = artifact.manifest
    layers = tuple(
        layer_report(
            entry,
            errors,
            experts_per_token(model.config, entry.experts),
            _dtype(artifact, entry).itemsize,
            length,
        )
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
        **_recorded(manifest),
    )


def _dtype(artifact: Artifact, entry: LayerPlan) -> torch.dtype:
    return artifact.store.dtype(f"{entry.name}.{entry.parameter}")


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
            saved = entry.dense_parameters - entry.parameters
            dense += saved * _dtype(artifact, entry).itemsize
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
