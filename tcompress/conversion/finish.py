"""What a conversion writes beside the weights, and what it depends on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tcompress
from tcompress.artifact.card import model_card
from tcompress.artifact.checksums import seal
from tcompress.artifact.format import CARD, quantization_section
from tcompress.artifact.manifest import CalibrationFacts, Manifest, SourceFacts, write_manifest
from tcompress.artifact.workplace import identity_of
from tcompress.calibrate.data import CalibrationData
from tcompress.files import write_text
from tcompress.options import Convert
from tcompress.planning.entries import Plan
from tcompress.source import SourceModel
from tcompress.source.companions import carry_files, shorten_texts, stray_links


def conversion_identity(
    source: SourceModel, recipe: Convert, plan: Plan, data: CalibrationData | None, device: str
) -> str:
    """Renders everything that decides what a conversion writes."""
    return identity_of(
        {
            "recipe": recipe.model_dump(mode="json"),
            "plan": plan.model_dump(mode="json"),
            "weights": source.store.fingerprint(),
            "tool": tcompress.__version__,
            "config": source.settings,
            "files": source.store.times(),
            "data": data.fingerprint if data else None,
            "device": device,
        }
    )


def source_facts(source: SourceModel, dense: SourceModel) -> SourceFacts:
    """Says what was converted.

    Args:
        source: The dense model, without the blocks that were dropped.
        dense: The same with all its blocks.
    """
    return SourceFacts(
        id=source.id,
        revision=source.revision,
        fingerprint=source.store.fingerprint(),
        bytes=dense.store.total_bytes,
        config=None if source is dense else dense.settings,
        init="pretrained" if source.seed is None else "random",
        seed=source.seed,
    )


def calibration_facts(data: CalibrationData | None) -> CalibrationFacts:
    """Says what a fit looked at."""
    if data is None:
        return CalibrationFacts(name="none")
    held = (len(next(iter(data.batches[index].values()))) for index in data.holdout)
    return CalibrationFacts(
        name=data.name,
        samples=data.samples,
        held_out_samples=sum(held),
        tokens=data.tokens,
        fingerprint=data.fingerprint,
    )


def write_rest(folder: Path, source: SourceModel, manifest: Manifest, dtype: str | None) -> None:
    """Writes everything but the weights; `config.json`, which makes it loadable, last.

    Args:
        folder: Where the weights are.
        source: The dense model, without the blocks that were dropped.
        manifest: What was done.
        dtype: Dtype of the weights; None for that of the source.
    """
    carry_files(source.folder, source.companion_files(), folder)
    if manifest.plan.longest is not None:
        shorten_texts(folder, manifest.plan.longest)
    write_text(folder / CARD, model_card(manifest))
    config = config_text(source, manifest.plan, dtype)
    sealed = seal(folder, manifest.checksums, {"config.json": config.encode()})
    write_manifest(folder, manifest.model_copy(update=sealed))
    write_text(folder / "config.json", config)


def config_text(source: SourceModel, plan: Plan, dtype: str | None) -> str:
    """Renders `config.json`; arguments as for `write_rest`."""
    raw = dict(source.settings)
    if dtype is not None:
        raw.pop("torch_dtype", None)
        raw["dtype"] = dtype
    if plan.changes_model:  # else it is a plain model
        facts: dict[str, Any] = {}
        if source.model_class.__name__ not in (raw.get("architectures") or []):
            facts["stored_as"] = source.model_class.__name__
        if source.keymap.missing:
            facts["absent"] = sorted(source.keymap.missing)
        section = quantization_section(plan.entries, plan.attention, plan.forms, **facts)
        raw["quantization_config"] = section
    return json.dumps(raw, indent=2) + "\n"


def with_links(plan: Plan, source: SourceModel) -> Plan:
    """Warns of links out of the model's folder, which are not carried along."""
    names = stray_links(source.folder, source.trust_remote_code)
    if not names:
        return plan
    listed = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    note = f"links out of the model's folder are not carried along: {listed}; copy the files there"
    return plan.model_copy(update={"warnings": (*plan.warnings, note)})


def with_unheld(plan: Plan, recipe: Convert, data: CalibrationData | None) -> Plan:
    """Warns where candidates were compared on nothing but what they were fitted to."""
    compares = recipe.weighs_methods or recipe.weighs_depth
    if data is None or data.holdout or not compares:
        return plan
    note = (
        f"the calibration data has no sample to hold out ({data.samples} in all): candidates were "
        "compared on what they were fitted to, which favours those that adapt most; give more data"
    )
    return plan.model_copy(update={"warnings": (*plan.warnings, note)})


def with_unreached(plan: Plan, names: Sequence[str]) -> Plan:
    """Warns of layers that were fitted without data, as in towers that read pictures.

    Args:
        plan: The plan.
        names: Those layers.
    """
    if not names:
        return plan
    note = (
        f"the calibration data does not reach {len(names)} of {len(plan.layers)} layers (such as "
        f"`{names[0]}`): they are fitted without data; `--keep` leaves them dense"
    )
    return plan.model_copy(update={"warnings": (*plan.warnings, note)})
