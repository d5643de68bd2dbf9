"""What a model consists of, and which of its layers can be rewritten.

Where the plan of a converted model, or names and shapes of stored tensors, tell all of it, neither
torch nor the model is loaded, which would take seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from tcompress.artifact.checksums import looks_whole, read_sealed
from tcompress.errors import PlanError, read_settings
from tcompress.linalg.rounding import Rounding, widths_text
from tcompress.models.adapters import check_adapter
from tcompress.models.names import (
    FORMAT_VERSION,
    METHODS,
    encodes_sentences,
    is_only_rounded,
    name_of,
    read_config,
    resolve,
)
from tcompress.models.store import WeightStore
from tcompress.reporting.formatting import describe_attention, describe_entry
from tcompress.roles.stored import Shapes, parameters_among, stored_blocks, stored_parameters

if TYPE_CHECKING:
    from tcompress.artifact.reader import Artifact
    from tcompress.models import SourceModel


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)


class LayerFacts(_Facts):
    """One layer that can be, or has been, rewritten."""

    name: str  # in the checkpoint
    block: str
    role: str  # such as `q` or `down`
    kind: str  # how the dense weight is stored
    in_features: int
    out_features: int
    parts: tuple[str, ...]  # roles of output splits, where they are fused
    experts: int | None  # number of stacked weights, if any
    dense_parameters: int
    parameters: int  # stored ones, without the bias
    structure: str | None = None  # summands that replace the weight, None in a dense model


class RefusedFacts(_Facts):
    """One layer that stays dense, and why."""

    name: str
    reason: str


class Inspection(_Facts):
    """Layers and sizes of a model, and what can be rewritten in it."""

    model: str  # name as it was given
    model_class: str
    family: str
    converted: bool = False
    parameters: int  # stored ones
    blocks: tuple[str, ...]  # those with such layers, or another attention
    layers: tuple[LayerFacts, ...]  # those that can be, or have been, rewritten
    refused: tuple[RefusedFacts, ...] = ()
    warnings: tuple[str, ...] = ()
    attention: str = ""  # what replaces the family's own, in words
    storage: str = ""  # bits that tensors are stored in, in words
    vocabulary: str = ""  # how many tokens are left of how many, where some were left out
    stage_seconds: Mapping[str, Mapping[str, float]] = {}
    """Seconds of the conversion by stage, and in it by part."""


_FLOATS = {"float32", "float16", "bfloat16", "float64"}
_WIDTHS = ("hidden_size", "intermediate_size", "n_embd", "d_model", "d_ff", "dim", "hidden_dim")
_BARE = ("encoder", "decoder", "layers", "layer", "h", "blocks")
_NO_PREFIX = ("t5", "mt5", "umt5")


def inspect_model(
    name: str | Path,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    *,
    plan: bool = False,
) -> Inspection:
    """Looks into a dense or a converted model; no weight is read.

    Args:
        name: Folder, short name or hub id; of a model without weights, also its `config.json`.
        revision: Branch, tag or commit on the hub.
        token: Access token for the hub.
        trust_remote_code: Whether Python code that comes with the model may run.
        plan: Plan a conversion in any case, which builds the model and takes seconds.

    Raises:
        SourceError: There is no such model, or it cannot be read.
        ArtifactError: It was converted, and is damaged or too new.
    """
    name = name_of(name)
    bare = Path(name).expanduser().name == "config.json"
    folder = resolve(name, revision=revision, token=token, weights=not bare)
    if not bare:
        check_adapter(folder, None)
    found = None if plan or bare else _at_once(name, folder)
    if found is not None:
        return _with_records(found, folder)
    from tcompress.artifact.reader import Artifact, is_converted
    from tcompress.models import SourceModel

    section = read_config(folder).get("quantization_config") if not bare else None
    if is_converted(folder) and not is_only_rounded(section):
        return _with_records(_converted(name, Artifact.open(folder)), folder)
    # What has no weights yet can be built all the same: `convert --init random` takes it.
    seed = 0 if bare or not WeightStore.are_in(folder) else None
    source = SourceModel.open(name, revision, token, trust_remote_code, seed=seed)
    stored = _dense(name, source).model_copy(update={"storage": _storage_of(section)})
    return _with_records(stored, folder)


def _storage_of(section: Any) -> str:
    """Bits that tensors are stored in, in words; empty where that is nothing new."""
    facts = section.get("storage") if isinstance(section, Mapping) else None
    if not facts:
        return ""
    pairs = (facts.get(name) for name in ("weights", "embeddings"))
    return widths_text(*(own and Rounding(**own) for own in pairs))


def _with_records(found: Inspection, folder: Path) -> Inspection:
    """Add what a manifest says of the tokens that are left, and of the time of the conversion."""
    manifest = read_sealed(folder) or {}
    records = {"stage_seconds": manifest.get("stage_seconds", {})}
    if words := manifest.get("plan", {}).get("vocabulary"):
        records["vocabulary"] = f"{words['rows']:,} of {words['before']:,} tokens"
    return found.model_copy(update=records)


def _at_once(name: str, folder: Path) -> Inspection | None:
    """Inspect a model by its files, without building it; None where they do not suffice."""
    try:
        config = read_settings(folder / "config.json")
        manifest = read_sealed(folder)
        section = config.get("quantization_config")
        named = str(next(iter(config.get("architectures") or ()), ""))
        bare = named.endswith("Model") and not config.get("is_encoder_decoder")
        if section is None or is_only_rounded(section):
            if not bare and encodes_sentences(folder):
                return None  # run without the head, or the decoder, that the config names
            found = _from_headers(name, config, WeightStore.open(folder))
            return found and found.model_copy(update={"storage": _storage_of(section)})
        known = section["quant_method"] in METHODS and section["format_version"] <= FORMAT_VERSION
        if known and manifest and looks_whole(folder, manifest):
            # The plan as plain data: digests say that it is as it was written.
            plan, store = manifest["plan"], WeightStore.open(folder)
            count = plan["parameters"] - plan["dropped_parameters"]
            count -= (plan.get("vocabulary") or {"parameters": 0})["parameters"]
            return _from_plan(name, config, section["plan"], store, count, plan)
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        pass  # what is wrong is said by those who read it in full
    return None


def _from_headers(name: str, config: Mapping[str, Any], store: WeightStore) -> Inspection | None:
    kinds = {store.kind(key) for key in store.keys()}  # noqa: SIM118 - not a mapping
    if not _FLOATS & kinds or any("float" in kind for kind in kinds - _FLOATS):
        return None
    shapes = {key: store.shape(key) for key in store.keys() if "float" in store.kind(key)}  # noqa: SIM118
    floats = parameters_among(config, shapes)
    blocks, count = stored_blocks(config, floats), stored_parameters(config, floats)
    named = next(iter(config.get("architectures") or ()), "")
    if blocks is None or count is None or not _is_described(config, floats, named):
        return None
    # Names of a bare model under a class with a head: the head may not be there.
    bare = blocks[0].name.split(".")[0] in _BARE and config["model_type"] not in _NO_PREFIX
    if bare and not named.endswith("Model"):
        return None
    pairs = [(block.name, layer) for block in blocks for layer in block.layers]
    return Inspection(
        model=name,
        model_class=named,
        family=config["model_type"],
        parameters=count,
        blocks=tuple(block.name for block in blocks),
        layers=tuple(_dense_layer(layer, block, layer.name) for block, layer in pairs),
    )


def _is_described(config: Mapping[str, Any], floats: Shapes, named: str) -> bool:
    """Return whether sizes and class look as a config says; if not, the model has to be built."""
    found = {size for shape in floats.values() for size in shape}
    wanted = {config[name] for name in _WIDTHS if isinstance(config.get(name), int)}
    family = re.sub(r"_text$|[-_]", "", config["model_type"].lower())
    return wanted <= found and named.lower().startswith(family)


def _from_plan(
    name: str,
    config: Mapping[str, Any],
    entries: Mapping[str, Any],
    store: WeightStore,
    dense_parameters: int,
    plan: Mapping[str, Any],
) -> Inspection:
    """Reads what the config says of layers, and the manifest of the rest, as plain data."""
    sizes = {key: prod(store.shape(key)) for key in store.keys()}  # noqa: SIM118 - not a mapping
    layers = tuple(_rewritten(entry, sizes, plan["method"]) for entry in entries["layers"])
    attention = entries.get("attention", [])
    saved = sum(layer.dense_parameters - layer.parameters for layer in layers)
    for entry, layer in zip(entries["layers"], layers, strict=True):
        outputs = sum(part["terms"][0]["out_features"] for part in entry["parts"])
        saved += (layer.out_features - outputs) * entry["bias"]
    for entry in attention:
        saved -= _stored(sizes, f"{entry['name']}.tc_")
        for item in entry.get("unused", ()):
            saved += item["out_features"] * (item["in_features"] + item["bias"])
    return Inspection(
        model=name,
        model_class=next(iter(config.get("architectures") or ()), "unknown"),
        family=str(config.get("model_type", "unknown")),
        converted=True,
        parameters=dense_parameters - saved,
        blocks=tuple(dict.fromkeys(entry["block"] for entry in (*attention, *entries["layers"]))),
        layers=layers,
        refused=plan["left"],
        warnings=plan["warnings"],
        attention=describe_attention(attention),
        storage=_storage_of(config.get("quantization_config")),
    )


def _rewritten(entry: Mapping[str, Any], sizes: Mapping[str, int], method: str) -> LayerFacts:
    name, parts, experts = entry["name"], entry["parts"], entry.get("experts")
    parameter = entry.get("parameter", "weight")
    inside = f"{name}.tc_"
    if experts is not None:  # `tc_gate_up` holds what was `gate_up_proj`
        inside = f"{inside}{parameter.removesuffix('_proj')}."
    columns = _dense_width(parts[0]["terms"][0]["in_features"], entry.get("reads"))
    rows = sum(
        _dense_width(part["terms"][0]["out_features"], part.get("channels")) for part in parts
    )
    facts: dict[str, Any] = {key: entry[key] for key in ("block", "role", "kind")}
    return LayerFacts(
        **facts,
        name=name if parameter == "weight" else f"{name}.{parameter}",
        in_features=columns,
        out_features=rows,
        parts=tuple(part["name"] for part in parts) if len(parts) > 1 else (),
        experts=experts,
        dense_parameters=columns * rows * (experts or 1),
        parameters=_stored(sizes, inside),
        structure=describe_entry(entry, method),
    )


def _dense_width(stored: int, channels: Mapping[str, Any] | None) -> int:
    """Features of the dense layer, of which so many, in these channels, are stored."""
    return channels["groups"] * channels["size"] if channels else stored


def _stored(sizes: Mapping[str, int], inside: str) -> int:
    return sum(size for key, size in sizes.items() if key.startswith(inside))


def _dense_layer(layer: Any, block: str, name: str, experts: int | None = None) -> LayerFacts:
    count = layer.in_features * layer.out_features * (experts or 1)
    return LayerFacts(
        name=name,
        block=block,
        role=layer.role,
        kind=layer.kind,
        in_features=layer.in_features,
        out_features=layer.out_features,
        parts=tuple(part.name for part in layer.parts) if len(layer.parts) > 1 else (),
        experts=experts,
        dense_parameters=count,
        parameters=count,
    )


def _dense(name: str, source: SourceModel) -> Inspection:
    from tcompress.options import Calibration, Convert
    from tcompress.planning.planner import make_plan
    from tcompress.roles.find import find_roles
    from tcompress.structures.lowrank import LowRankSpec

    model = source.meta_model()
    roles = find_roles(model)
    layers: list[LayerFacts] = []
    left: Any = roles.refused
    warnings = (*source.notes, *roles.warnings)
    # What even the smallest structure is refused for, every method is refused for.
    smallest = Convert(method=LowRankSpec(rank=1), calibration=Calibration(source="none"))
    try:
        plan = make_plan(smallest, source)
        left = plan.left
        for entry in plan.layers:
            single = entry.parameter == "weight"
            whole = entry.name if single else f"{entry.name}.{entry.parameter}"
            layers.append(_dense_layer(entry, entry.block, whole, entry.experts))
    except PlanError as error:
        warnings = (*warnings, error.message)
    return Inspection(
        model=name,
        model_class=source.model_class.__name__,
        family=roles.family,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        blocks=tuple(dict.fromkeys(layer.block for layer in layers)),
        layers=tuple(layers),
        refused=left,
        warnings=warnings,
    )


def _converted(name: str, artifact: Artifact) -> Inspection:
    """Counts the dense model, where a manifest is missing or not wanted."""
    from tcompress.models import SourceModel

    dense = SourceModel.open(str(artifact.folder), converted=True).meta_model()
    count = sum(parameter.numel() for parameter in dense.parameters())
    plan: dict[str, Any] = {"method": "", "left": (), "warnings": ()}
    if artifact.manifest is not None:
        plan = artifact.manifest.plan.model_dump(mode="json")
    entries: dict[str, Any] = {"layers": artifact.layers, "attention": artifact.attention}
    for kind, found in entries.items():
        entries[kind] = [item.model_dump(mode="json", exclude_defaults=True) for item in found]
    return _from_plan(name, artifact.config, entries, artifact.store, count, plan)
