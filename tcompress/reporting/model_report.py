"""What a model weighs, what a conversion lost, and what was measured since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tcompress.artifact.manifest import Manifest, Metric, read_manifest
from tcompress.artifact.reader import Artifact, check_files
from tcompress.errors import ArtifactError, InputError
from tcompress.models import KeyMap, SourceModel, resolve
from tcompress.models.store import WeightStore
from tcompress.planning.entries import LayerPlan, Left
from tcompress.reporting.count import (
    Exchanged,
    Planned,
    all_parameters,
    block_parameters,
    embedding_parameters,
    experts_per_token,
    layer_macs,
    macs_per_token,
    usual_tokens,
)
from tcompress.reporting.formatting import describe_entry
from tcompress.reporting.tree import (
    Amount,
    LayerReport,
    Macs,
    ModelReport,
    Parameters,
    mean_errors,
    metric_key,
)
from tcompress.roles import Anatomy, anatomy_of

# Nothing here reads a weight: numbers follow from the config, the plan and the headers of files.


LENGTH = 128
"""Tokens in the sequence for the multiply-adds, unless it is chosen."""

NOTHING: Exchanged = {}


def report_of(
    name: str | Path, length: int = LENGTH, *, trust_remote_code: bool = False
) -> ModelReport:
    """Reports on a converted or a dense model without reading its weights.

    Args:
        name: Local folder, short name or hub id.
        length: Tokens in the sequence for the multiply-adds, where inputs differ in it.
        trust_remote_code: Whether Python code that comes with the model may run.

    Raises:
        SourceError: There is no such model, or it cannot be read.
        ArtifactError: It is a converted model that is damaged.
    """
    if length < 1:
        raise InputError(f"length is {length}, expected 1 or more")
    folder = resolve(str(name))
    artifact = check_files(folder)
    if artifact is not None:
        return _converted(str(name), artifact, length, trust_remote_code)
    return _dense(str(name), length, trust_remote_code)


def layer_report(
    entry: LayerPlan,
    errors: Mapping[str, float] | None = None,
    runs: int = 1,
    itemsize: int | None = None,
    length: int = LENGTH,
    method: str = "",
) -> LayerReport:
    """Reports on one layer of a plan.

    Args:
        entry: The layer.
        errors: Its errors, if it was fitted.
        runs: Experts that one token passes.
        itemsize: Bytes of a stored number, if there is a file.
        length: Tokens in the sequence for the multiply-adds.
        method: What the conversion was asked for.
    """
    counts = (entry.dense_parameters, entry.parameters)
    size = None if itemsize is None else Amount.of(*(count * itemsize for count in counts))
    dense = entry.in_features * entry.out_features * (runs if entry.experts else 1)
    macs = Amount.of(dense, -(-layer_macs(entry, runs, length) // length))
    if entry.kind == "embedding":  # an output head that is tied to it counts in the whole
        macs = Amount.of(0, entry.row_macs)
    return LayerReport(
        name=entry.name,
        parameter=entry.parameter,
        block=entry.block,
        role=entry.role,
        # Whose row counts the tensors that others use too.
        structure=describe_entry(entry, method) + (", with the bank" if entry.own_banks else ""),
        in_features=entry.in_features,
        out_features=entry.out_features,
        experts=entry.experts,
        input_of=entry.input_of,
        parameters=Amount.of(*counts),
        macs=macs,
        bytes=size,
        errors=dict(errors or {}),
    )


def bytes_of_files(store: WeightStore) -> int:
    """Sizes of the weight files."""
    return sum((store.folder / file).stat().st_size for file in store.files)


def _dense(name: str, length: int, trust: bool) -> ModelReport:
    source = SourceModel.open(name, trust_remote_code=trust)
    # Of a dense model that tcompress trained, or from which it dropped blocks.
    manifest = read_manifest(source.folder)
    now = _Counted.of(source)
    dense = _before(source, manifest) or now
    length = usual_tokens(*now, length)
    size = bytes_of_files(source.store)
    cut = manifest is not None and manifest.plan.depth is not None
    return ModelReport(
        name=name,
        family=now.anatomy.family,
        method=manifest.plan.method if manifest is not None and cut else "dense",
        source=source.id if manifest is None else manifest.source.id,
        created=None if manifest is None else manifest.created,
        parameters=_parameters(dense, now),
        bytes_on_disk=Amount.of(manifest.source.bytes if manifest and cut else size, size),
        macs_per_token=_macs(dense, now, {}, length),
        **_recorded(manifest),
    )


class _Counted(NamedTuple):
    """A model without weights, to count."""

    model: PreTrainedModel
    anatomy: Anatomy

    @classmethod
    def of(cls, source: SourceModel) -> _Counted:
        model = source.meta_model()
        return cls(model, anatomy_of(model))


def _before(source: SourceModel, manifest: Manifest | None) -> _Counted | None:
    """The dense model, where one that has all its layers dense has fewer blocks."""
    if manifest is None or manifest.source.config is None:
        return None
    return _Counted.of(source.with_settings(manifest.source.config))


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
        "depth": manifest.plan.depth,
        "budget": manifest.plan.budget,
        "init": manifest.source.init,
        "seed": manifest.source.seed,
        "paper": tuple(manifest.paper),
        "coverage": manifest.plan.coverage,
        "warnings": manifest.plan.warnings,
    }


def _converted(name: str, artifact: Artifact, length: int, trust: bool) -> ModelReport:
    source = SourceModel.open(str(artifact.folder), trust_remote_code=trust, converted=True)
    manifest = artifact.manifest
    now = _Counted.of(source)
    dense = _before(source, manifest) or now
    planned, exchanged = _planned(artifact, now.model), _exchanged(artifact, now.model)
    length = usual_tokens(*now, length, exchanged)
    layers = tuple(
        layer_report(
            entry,
            errors,
            experts_per_token(now.model.config, entry.experts),
            _dtype(artifact, entry).itemsize,
            length,
            "" if manifest is None else manifest.plan.method,
        )
        for entry, errors in zip(artifact.layers, _errors(artifact), strict=True)
    )
    first = artifact.layers[0].parts[0].terms[0].structure if artifact.layers else "unknown"
    return ModelReport(
        name=name,
        family=now.anatomy.family,
        method=first if manifest is None else manifest.plan.method,
        source=None if manifest is None else manifest.source.id,
        created=None if manifest is None else manifest.created,
        parameters=_parameters(dense, now, artifact),
        bytes_on_disk=_bytes(artifact),
        macs_per_token=_macs(dense, now, planned, length, exchanged),
        layers=layers,
        attention=artifact.attention,
        left=_left(now.anatomy, planned) if manifest is None else manifest.plan.left,
        errors=mean_errors(layers),
        calibration=None if manifest is None else manifest.calibration,
        **_recorded(manifest),
    )


def _dtype(artifact: Artifact, entry: LayerPlan) -> torch.dtype:
    return artifact.store.dtype(f"{entry.name}.{entry.parameter}")


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
    keys = [f"{entry.name}.{entry.parameter}" for entry in manifest.plan.entries]
    return [manifest.fit.get(key, {}) for key in keys]


def _parameters(dense: _Counted, now: _Counted, artifact: Artifact | None = None) -> Parameters:
    """Counts a model and the dense one that it was, which may have had more blocks."""
    entries = () if artifact is None else artifact.layers
    exchanged = () if artifact is None else artifact.attention
    layers = [entry for entry in entries if entry.kind != "embedding"]
    shrunk = sum(
        entry.dense_parameters - entry.parameters for entry in entries if entry.kind == "embedding"
    )
    rewritten = Amount.of(
        sum(entry.dense_parameters for entry in layers),
        sum(entry.parameters for entry in layers),
    )
    saved = rewritten.dense - rewritten.now + sum(entry.saved for entry in exchanged)
    total = Amount.of(all_parameters(dense.model), all_parameters(now.model) - saved - shrunk)
    blocks = Amount.of(block_parameters(*dense), block_parameters(*now) - saved)
    embeddings = Amount.of(embedding_parameters(*dense), embedding_parameters(*now) - shrunk)
    return Parameters(
        embeddings=embeddings,
        blocks=blocks,
        rewritten=rewritten,
        other=Amount.of(
            total.dense - blocks.dense - embeddings.dense, total.now - blocks.now - embeddings.now
        ),
        total=total,
    )


def _exchanged(artifact: Artifact, model: PreTrainedModel) -> Exchanged:
    """Finds the blocks whose attention has another mechanism."""
    keymap = KeyMap(model, ())
    named = ((keymap.runtime_name(entry.block), entry) for entry in artifact.attention)
    return {path: entry for path, entry in named if path is not None}


def _macs(
    dense: _Counted, now: _Counted, planned: Planned, length: int, exchanged: Exchanged = NOTHING
) -> Macs:
    before, _ = macs_per_token(*dense, {}, length)
    _, after = macs_per_token(*now, planned, length, exchanged)
    macs: Macs = Macs.of(before, after, length=length)
    return macs


def _bytes(artifact: Artifact) -> Amount:
    """Bytes before are those of the source, or follow from the shapes and the dtype stored now."""
    store = artifact.store
    if artifact.manifest is not None:
        dense = artifact.manifest.source.bytes
    else:
        dense = store.total_bytes
        for other in artifact.attention:
            dense += other.saved * artifact.store.dtype(next(iter(other.tensor_shapes))).itemsize
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


# Reports on several models, in which a dense model shows what others were compared with.


def reports_of(
    names: Sequence[str | Path], length: int = 128, *, trust_remote_code: bool = False
) -> list[ModelReport]:
    """Reports on models that are shown side by side.

    Args:
        names: Local folders, short names or hub ids.
        length: Tokens in the sequence for the multiply-adds.
        trust_remote_code: Whether Python code that comes with a model may run.

    Raises:
        SourceError: There is no such model, or it cannot be read.
        ArtifactError: It is a converted model that is damaged.
    """
    trust = trust_remote_code
    return with_baselines([report_of(name, length, trust_remote_code=trust) for name in names])


def with_baselines(reports: Sequence[ModelReport]) -> list[ModelReport]:
    """Gives dense models the numbers that other models were compared with.

    The folder of a dense model is not changed by measuring it, so that its numbers are known to
    the models beside it alone.
    """
    return [report if report.is_smaller else _filled(report, reports) for report in reports]


def _filled(dense: ModelReport, reports: Sequence[ModelReport]) -> ModelReport:
    found = {metric_key(metric): metric for metric in dense.metrics}
    for metric in _baselines(dense, reports):
        found.setdefault(metric_key(metric), metric)
    return dense.model_copy(update={"metrics": tuple(found.values())})


def _baselines(dense: ModelReport, reports: Sequence[ModelReport]) -> Iterator[Metric]:
    """Numbers of a dense model in the comparisons of others; their intervals were not kept."""
    for report in reports:
        for metric in report.metrics:
            found = metric.difference
            if found is not None and _same(found.baseline, dense):
                lent = {"value": found.baseline_value, "interval": None, "difference": None}
                yield metric.model_copy(update=lent)


def _same(name: str, dense: ModelReport) -> bool:
    return name == dense.name or Path(name).absolute() == Path(dense.name).absolute()
