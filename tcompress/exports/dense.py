"""A plain model from a converted one: every structured weight multiplied out again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from tcompress.artifact.format import Stored, plan_shards, write_index, write_shard
from tcompress.artifact.manifest import card, head_of, loading_code, render_head
from tcompress.artifact.reader import Artifact, check_files
from tcompress.artifact.workplace import Workplace, check_apart, check_output, identity_of
from tcompress.errors import FitError, InputError
from tcompress.files import write_text
from tcompress.hf.opening import Reopened, applied, differs, unloadable
from tcompress.models import SourceModel
from tcompress.models.names import (
    CARD,
    WEIGHTS,
    auxiliary_files,
    carry_files,
    forget_code,
    local_folder,
    stands_alone,
)
from tcompress.planning.entries import LayerPlan
from tcompress.progress import Progress, Silent
from tcompress.project import REPOSITORY
from tcompress.structures.modules.linear import StructuredLinear, widened
from tcompress.structures.modules.shared import FactorsModule, factors_module

LARGEST_SHARD = "2GB"


def export_dense(
    folder: Path | str, output: Path | str, force: bool = False, progress: Progress | None = None
) -> Path:
    """Write a plain model that computes the same within rounding, as `tcompress.export_dense` says.

    Memory holds one weight in float64 and what multiplying it out takes.
    """
    output = Path(output).expanduser().absolute()
    check_output(output, force=force)
    artifact = check_files(Path(folder).expanduser()) or Artifact.open(folder)
    if artifact.attention:
        kinds = ", ".join(sorted({f"`{entry.layout.mechanism}`" for entry in artifact.attention}))
        raise InputError(
            f"`{folder}` mixes tokens by {kinds} attention, which no plain model does",
            "load it with `import tcompress`; layers alone can be multiplied out",
        )
    if any(entry.kind == "norm" for entry in artifact.forms):
        raise InputError(
            f"`{folder}` normalises its features slice by slice, which no plain model does",
            "load it with `import tcompress`; `norm: host` can be multiplied out",
        )
    check_apart(output, artifact.folder, "the converted model itself")
    identity = identity_of({"export": "dense", "weights": artifact.store.fingerprint()})
    place = Workplace(output, identity, force=force)
    with place.working(lambda error: False):
        if place.published:
            place.discard()
        else:
            _write_weights(artifact, place, progress or Silent())
            _write_rest(artifact, place.model)
            _prove(artifact, place.model)
            place.publish(force=force)
    return output


def dense_weight(artifact: Artifact, entry: LayerPlan) -> Tensor:
    """Multiplies out the weight of one rewritten layer, in float64, as the dense model stores it.

    It has the dtype of the structured tensors: (out, in), transposed for GPT-2's kind of layer,
    stacked for experts, with axes of 1 for convolutions.
    """
    names = {entry.name: entry for entry in artifact.layers if entry.kind != "experts"}
    owner = None if entry.input_of is None else _shared_input(artifact, names[entry.input_of])
    shared = entry.bank_of.items()
    factors = {bank: _factors_of(artifact, names[name], bank) for bank, name in shared}
    own = _tensors(artifact, entry)
    dtype = next(iter(own.values())).dtype
    weights = []
    for index in range(entry.copies):
        layer = _layer(entry, input_of=owner, factors=factors)
        # What all experts share has a dot in its name.
        stacked = {n: t if entry.experts is None or "." in n else t[index] for n, t in own.items()}
        _assign(layer, stacked)
        with torch.no_grad():
            weights.append(layer.dense_weight(torch.float64).to(dtype))
    weight = torch.stack(weights) if entry.experts else weights[0]
    if not bool(torch.isfinite(weight).all()):
        hint = "convert the model again, with `--dtype float32`"
        raise FitError(f"the weight of layer `{entry.name}` is not finite in {dtype}", hint)
    return entry.as_stored(widened(weight, entry.parts, entry.reads)).contiguous()


def _layer(entry: LayerPlan, **shared: Any) -> StructuredLinear:
    return StructuredLinear(entry.parts, dtype=torch.float64, device="meta", **shared)


def _shared_input(artifact: Artifact, entry: LayerPlan) -> StructuredLinear:
    """Builds a layer of which only the shared input transforms hold numbers."""
    layer = _layer(entry)
    shared = {name for name, _ in layer.named_parameters() if name.partition(".")[2]}
    _assign(layer, _tensors(artifact, entry, shared))
    return layer


def _factors_of(artifact: Artifact, entry: LayerPlan, name: str) -> FactorsModule:
    """Builds the shared factors that a layer stores."""
    module = FactorsModule(entry.own_factors[name], dtype=torch.float64, device="meta")
    prefix = f"{factors_module(name)}."
    found = _tensors(artifact, entry, {prefix + key for key in module()})
    _assign(module, {key.removeprefix(prefix): tensor for key, tensor in found.items()})
    return module


def _tensors(
    artifact: Artifact, entry: LayerPlan, wanted: set[str] | None = None
) -> dict[str, Tensor]:
    return {
        name: artifact.store.tensor(entry.stored_name(name))
        for name in entry.tensor_shapes
        if wanted is None or name in wanted
    }


def _assign(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    layer.load_state_dict(exact, strict=False, assign=True)


def _write_weights(artifact: Artifact, place: Workplace, progress: Progress) -> None:
    made = {f"{entry.name}.{entry.parameter}": entry for entry in artifact.layers}
    biases = {f"{entry.name}.bias": entry for entry in artifact.layers if entry.biases_saved}
    shards = plan_shards(list(_outputs(artifact, made, biases)), LARGEST_SHARD)
    total = sum(item.nbytes for shard in shards for item in shard.tensors)
    place.need(total)
    progress.stage("writing", total, "bytes")

    def value(item: Stored) -> Tensor:
        if item.key in made:
            return dense_weight(artifact, made[item.key])
        tensor = artifact.store.tensor(item.key)
        entry = biases.get(item.key)
        return tensor if entry is None else widened(tensor, entry.parts, entry.reads)

    for shard in shards:
        write_shard(place.model, shard, value, lambda size: progress.advance(size, ""))
    write_index(place.model, shards)


def _outputs(
    artifact: Artifact, made: Mapping[str, LayerPlan], biases: Mapping[str, LayerPlan]
) -> Iterator[Stored]:
    """Lists what is written: the guards under dense names become weights, factors are dropped."""
    store = artifact.store
    dropped = {name for entry in artifact.layers for name in entry.stored_shapes}
    for key in sorted(store.keys(), key=lambda key: (store.file_of(key), key)):
        if key in made:
            entry = made[key]
            lead = () if entry.experts is None else (entry.experts,)
            empty = torch.empty(*lead, entry.out_features, entry.in_features, device="meta")
            first = next(iter(entry.stored_shapes))
            yield Stored(key, tuple(entry.as_stored(empty).shape), store.dtype(first))
        elif key not in dropped:
            narrow = biases.get(key)
            shape = tuple(store.shape(key)) if narrow is None else (narrow.out_features,)
            yield Stored(key, shape, store.dtype(key))


def _write_rest(artifact: Artifact, folder: Path) -> None:
    """Writes everything but the weights; `config.json`, which makes it loadable, last."""
    own = _has_own_code(artifact.config)
    carry_files(artifact.folder, auxiliary_files(artifact.folder, with_code=own), folder)
    write_text(folder / CARD, _card(artifact))
    ours = ("quantization_config", WEIGHTS)
    config = {key: value for key, value in artifact.config.items() if key not in ours}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if not own:
        forget_code(folder)


def _prove(artifact: Artifact, folder: Path) -> None:
    """Opens what was written, and compares a layer of each kind with the converted model."""
    if _has_own_code(artifact.config):
        return  # that would run code which came with the model
    with unloadable():
        plain = SourceModel.open(str(folder))
        dense = Reopened(folder, plain.model_class, plain.keymap.missing)
        structured = Reopened(artifact.folder, plain.model_class, plain.keymap.missing)
    generator = torch.Generator().manual_seed(0)
    for entry in {entry.kind: entry for entry in artifact.layers}.values():
        rows = torch.randn(4, entry.in_features, generator=generator, dtype=torch.float64)
        own = entry.reads.gather(rows) if entry.reads else rows
        wanted = widened(applied(structured.layer(entry), own).mT, entry.parts, None).mT
        stored = dense.tensor(f"{dense.keymap.runtime_name(entry.name)}.{entry.parameter}")
        weight = entry.matrix(stored.double())
        change = (rows @ weight.mT).reshape(wanted.shape) - wanted
        if not change.abs().max() <= 64 * torch.finfo(stored.dtype).eps * wanted.abs().max():
            raise differs(entry.name, "its dense weight computes something else")


def _has_own_code(config: Mapping[str, Any]) -> bool:
    """Return whether the model's class is in code that came with it, or may be."""
    own = {str(value).rpartition(".")[2] for value in (config.get("auto_map") or {}).values()}
    kind, names = config.get("model_type"), config.get("architectures") or ()
    found = [getattr(transformers, name, None) for name in names]
    types = {getattr(getattr(item, "config_class", None), "model_type", None) for item in found}
    native = kind in CONFIG_MAPPING and kind in types
    return bool(own) and (not native or not own.isdisjoint(names))


def _card(artifact: Artifact) -> str:
    layers = artifact.layers
    before = sum(entry.dense_parameters for entry in layers)
    kept = sum(entry.parameters for entry in layers) / max(1, before)
    base, origin, method = None, "a model", ""
    if artifact.manifest is not None:
        source, method = artifact.manifest.source.id, f" with `{artifact.manifest.plan.method}`"
        origin = f"`{Path(source).name}`"
        if local_folder(source) is None:  # a path on the author's machine means nothing to others
            base, origin = source, f"`{source}`"
    plain = stands_alone(artifact.config)
    done = f"compressed {len(layers)} layers of {origin}{method} to {kept:.1%} of their parameters"
    back = "these layers are multiplied out again and are as large as before"
    if not layers and artifact.storage is not None:
        done, back = f"rounded {origin} to {artifact.storage}", "all numbers have their dtype back"
    body = f"""[tcompress]({REPOSITORY}) {done}. Here {back}: the model computes what the \
compressed one computes within rounding, and needs nothing but \
{"Transformers" if plain else "tcompress' own model"}."""
    title = f"Dense form of {origin}, compressed{method}"
    head = head_of(artifact.folder)
    head["tags"] = [tag for tag in head.get("tags", ()) if tag != "compressed"]  # no more
    written = render_head(head, ["tcompress"], base_model=base)
    architecture = next(iter(artifact.config.get("architectures") or ()), None)
    return card(title, body, written, loading_code(artifact.folder, architecture, plain=plain))
