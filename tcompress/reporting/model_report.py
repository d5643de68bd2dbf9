"""What a model weighs, what a conversion lost, and what was measured since.

No weight is read: numbers follow from the config, the plan and the headers of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2, prod
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tcompress.artifact.format import stored_tensors
from tcompress.artifact.manifest import ExportedFile, Manifest, read_manifest
from tcompress.artifact.reader import Artifact, check_files
from tcompress.attention.replacement import replacement_named
from tcompress.errors import ArtifactError, InputError
from tcompress.models import KeyMap, SourceModel, name_of, resolve
from tcompress.planning.costs import weight_bytes
from tcompress.planning.entries import AttentionPlan, LayerPlan, SkippedLayer
from tcompress.planning.planner import is_table
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
from tcompress.roles import Block, Roles
from tcompress.roles.find import attentions_of, find_roles
from tcompress.structures.flops import macs_of

LENGTH = 128  # tokens in the sequence for the multiply-adds, unless it is chosen


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
    name = name_of(name)
    artifact = check_files(resolve(name))
    opened, trust = name if artifact is None else str(artifact.folder), trust_remote_code
    source = SourceModel.open(opened, trust_remote_code=trust, converted=artifact is not None)
    manifest = read_manifest(source.folder) if artifact is None else artifact.manifest
    now = _Counted.of(source, artifact)
    dense = _Counted(now.model, now.roles)
    if manifest is not None and manifest.source.config is not None:  # it had other numbers
        dense = _Counted.of(source.with_settings(manifest.source.config))
    length = now.usual_tokens(length)
    size = sum((source.store.folder / file).stat().st_size for file in source.store.files)
    macs = dense.macs_per_token(length), now.macs_per_token(length)
    facts: dict[str, Any] = {"method": "dense", "source": source.id, **_recorded(manifest)}
    before = size
    if artifact is not None:
        before = _dense_bytes(artifact)
        facts |= _converted(artifact, now, length)
    elif manifest is not None and manifest.plan.compresses:
        # A plain model that tcompress made smaller; others may have been trained by it.
        facts["method"], before = manifest.plan.method, manifest.source.bytes
        facts["calibration"] = manifest.calibration
        facts |= _plain(manifest, now, source, length) if manifest.plan.layers else {}
    return ModelReport(
        name=str(name),
        family=now.roles.family,
        parameters=_parameters(dense, now, facts.get("layers", ())),
        bytes_on_disk=Amount.of(before, size),
        macs_per_token=Macs.of(*macs, length=length),
        **facts,
    )


def _converted(artifact: Artifact, now: _Counted, length: int) -> dict[str, Any]:
    """Facts that a dense model does not have; without a manifest only some of them."""
    layers = _layers(artifact, now, length)
    facts: dict[str, Any] = {"layers": layers, "attention": artifact.attention}
    facts |= {"errors": mean_errors(layers), "storage": artifact.storage}
    if (manifest := artifact.manifest) is None:
        first = artifact.layers[0].parts[0].terms[0].structure if artifact.layers else "unknown"
        return {**facts, "method": first, "source": None, "left": _left(now)}
    known = {"method": manifest.plan.method, "left": manifest.plan.left}
    return {**facts, **known, "calibration": manifest.calibration}


def _plain(manifest: Manifest, now: _Counted, source: SourceModel, length: int) -> dict[str, Any]:
    plan, found = manifest.plan, []
    for entry in plan.layers:
        runs = experts_per_token(now.model.config, entry.experts)
        own, errors = weight_bytes(source, entry, None), manifest.fit.get(entry.key, {})
        dense = entry.dense_parameters * _source_itemsize(manifest, own)
        size = Amount.of(dense, entry.parameters * own)
        found.append(layer_report(entry, errors, runs, size, length, plan.method))
    facts = {"left": plan.left, "plain": plan.plain}
    return {**facts, "layers": tuple(found), "errors": mean_errors(found)}


def layer_report(
    entry: LayerPlan,
    errors: Mapping[str, float] | None = None,
    runs: int = 1,
    size: Amount | None = None,
    length: int = LENGTH,
    method: str = "",
) -> LayerReport:
    """Reports on a layer of a plan, with its bytes: a token passes `runs` experts."""
    dense = entry.in_features * entry.out_features * (runs if entry.experts else 1)
    macs = Amount.of(dense, -(-layer_macs(entry, runs, length) // length))
    if entry.kind == "embedding":  # an output head that is tied to it counts in the whole
        macs = Amount.of(0, entry.row_macs)
    same = ("name", "parameter", "block", "role", "in_features", "out_features", "experts")
    facts: dict[str, Any] = {key: getattr(entry, key) for key in (*same, "input_of")}
    # Whose row counts the tensors that others use too.
    shared = ", with shared factors" if entry.own_factors else ""
    return LayerReport(
        **facts,
        structure=describe_entry(entry, method) + shared,
        parameters=Amount.of(entry.dense_parameters, entry.parameters),
        macs=macs,
        bytes=size,
        errors=dict(errors or {}),
    )


def _recorded(manifest: Manifest | None) -> dict[str, Any]:
    """Records of the manifest, of converted and dense models: training, metrics, times, files."""
    if manifest is None:
        return {"created": None}
    lists = ("metrics", "training", "speed", "exports", "alternatives", "paper")
    planned = ("depth", "vocabulary", "budget", "coverage", "warnings")
    return {
        **{name: tuple(getattr(manifest, name)) for name in lists},
        **{name: getattr(manifest.plan, name) for name in planned},
        "source": manifest.source.id,
        "init": manifest.source.init,
        "seed": manifest.source.seed,
        "created": manifest.created,
        "dense_exports": _dense_exports(manifest),
        "attention_map": manifest.attention_map,
        "recipe": manifest.recipe or None,
        "environment": manifest.environment or None,
    }


def _dense_exports(manifest: Manifest) -> tuple[ExportedFile, ...]:
    """Files for other runtimes of the dense model, where its folder is still there."""
    try:
        own = read_manifest(Path(manifest.source.id).expanduser())
    except (ArtifactError, OSError):  # it is no part of the model
        return ()
    return () if own is None or own.plan.compresses else tuple(own.exports)


def _layers(artifact: Artifact, counted: _Counted, length: int) -> tuple[LayerReport, ...]:
    """Reports on all layers; the manifest knows errors by the names of the conversion."""
    manifest, config, found = artifact.manifest, counted.model.config, []
    errors: list[Mapping[str, float]] = [{} for _ in artifact.layers]
    method = ""
    if manifest is not None:
        keys = (f"{entry.name}.{entry.parameter}" for entry in manifest.plan.entries)
        errors, method = [manifest.fit.get(key, {}) for key in keys], manifest.plan.method
    for entry, error in zip(artifact.layers, errors, strict=True):
        runs = experts_per_token(config, entry.experts)
        own = artifact.store.dtype(f"{entry.name}.{entry.parameter}").itemsize
        dense = entry.dense_parameters * _source_itemsize(manifest, own)
        size = Amount.of(dense, sum(map(artifact.store.nbytes, stored_tensors(entry))))
        found.append(layer_report(entry, error, runs, size, length, method))
    return tuple(found)


def _source_itemsize(manifest: Manifest | None, now: int) -> int:
    """Bytes of a number of the source, which a conversion may have stored in another dtype.

    Manifests have its bytes and its parameters, not its dtype; buffers and tied weights that are
    stored twice make their ratio a little larger.
    """
    if manifest is None or not (manifest.source.bytes and manifest.plan.parameters):
        return now
    ratio = manifest.source.bytes / manifest.plan.parameters
    return min((1, 2, 4, 8), key=lambda size: abs(log2(ratio / size)))


def _dense_bytes(artifact: Artifact) -> int:
    """Bytes of the source, or those that follow from the shapes and the dtype stored now."""
    if artifact.manifest is not None:
        return artifact.manifest.source.bytes
    store = artifact.store
    bytes_ = sum(prod(store.shape(key)) * store.dtype(key).itemsize for key in store.keys())  # noqa: SIM118
    for other in artifact.attention:
        bytes_ += other.saved * store.dtype(next(iter(other.tensor_shapes))).itemsize
    for entry in artifact.layers:
        saved = entry.dense_parameters - entry.parameters
        bytes_ += saved * store.dtype(f"{entry.name}.{entry.parameter}").itemsize
    return bytes_


def _left(now: _Counted) -> tuple[SkippedLayer, ...]:
    """Says what stayed dense where no manifest does."""
    skipped = [
        SkippedLayer.of(layer, block.name, "not part of the plan")
        for block in now.roles.blocks
        for layer in block.layers
        if (layer.name, layer.parameter) not in now.layers
    ]
    for item in now.roles.refused:
        facts = {"name": item.name, "block": "", "role": "", "reason": item.reason}
        skipped.append(SkippedLayer(parameters=0, **facts))
    return tuple(skipped)


@dataclass(frozen=True)
class _Counted:
    """A dense model without weights, to count with what is rewritten in it."""

    model: PreTrainedModel  # on the meta device
    roles: Roles
    # By module path and parameter, and by the module path of the block.
    layers: Mapping[tuple[str, str], LayerPlan] = field(default_factory=dict)
    attention: Mapping[str, AttentionPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, source: SourceModel, artifact: Artifact | None = None) -> _Counted:
        model = source.meta_model()
        if artifact is None:
            return cls(model, find_roles(model))
        keymap = KeyMap(model, ())
        paths = {entry.name: keymap.runtime_name(entry.name) for entry in artifact.layers}
        lost = [name for name, path in paths.items() if path is None]
        if lost:
            raise ArtifactError(
                f"the plan names `{lost[0]}`, which a `{type(model).__name__}` does not have"
                + (f", and {len(lost) - 1} more such layers" if lost[1:] else ""),
                "`architectures` in `config.json` must name the class that the weights belong to",
            )
        layers = {(paths[entry.name] or "", entry.parameter): entry for entry in artifact.layers}
        named = ((keymap.runtime_name(entry.block), entry) for entry in artifact.attention)
        attention = {path: entry for path, entry in named if path is not None}
        return cls(model, find_roles(model), layers, attention)

    def usual_tokens(self, length: int) -> int:
        """Number of tokens: what is asked for, unless every attention has the same fixed one."""
        fixed = {_fixed_tokens(entry) for entry in self.attention.values()}
        found = attentions_of(self.model, self.roles)
        fixed |= {item.tokens for item in found if item.block not in self.attention}
        (first, *others) = fixed or {None}
        return length if others or not first else first

    def macs_per_token(self, length: int) -> int:
        """Counts the multiply-adds of one token in a sequence of T that passes every block once.

        In models with an encoder and a decoder, or with two towers, one token of each. The sum is

            linear layers of the blocks   in x out; of experts, only those a token is routed to
            + attention, per attention    2 T d   (query times keys, weights times values; d =
                                          heads x head size, the input width of the output
                                          projection); what replaces it does, where something does
            + output head                 d x vocabulary, if the class of the model has one

        What a rewritten layer does once per pass (rebuilding a weight) is shared out among the
        tokens. T is chosen, but for models whose inputs all have the same number of tokens, such as
        most image models. Embeddings are look-ups and count nothing, but for what a rewritten one
        builds a row with. Left out are norms, activations and biases, projections outside the
        blocks other than the output head, what runs once per sequence (poolers, classifiers, tables
        of relative positions), and patch projections. Windows and causal masks are not subtracted:
        the number is that of the last of T tokens under full attention. In families without a
        table of roles every block is taken to hold one attention of the width that the config
        calls `hidden_size`.
        """
        config = self.model.config
        total = self._head_macs(length)
        total += sum(_router_macs(self, item.name) for item in self.roles.refused) * length
        tables = (entry for entry in self.layers.values() if entry.kind == "embedding")
        total += sum(entry.row_macs for entry in tables) * length
        for block in self.roles.blocks:
            replaced = self.attention.get(block.name)
            if replaced is None:
                widths = _attention_widths(block, config, self.layers)
                total += 2 * length * length * sum(widths)
                unused = set()
            else:
                tokens = _fixed_tokens(replaced) or length
                macs = replacement_named(replaced.layout.mechanism).macs(replaced.layout, tokens)
                total += macs * length // tokens
                unused = {layer.role for layer in replaced.unused}
            for layer in (layer for layer in block.layers if layer.role not in unused):
                runs = experts_per_token(config, layer.experts)
                entry = self.layers.get((layer.name, layer.parameter))
                if entry is not None:
                    total += layer_macs(entry, runs, length)
                else:
                    total += layer.in_features * layer.out_features * runs * length
        return -(-total // length)

    def _head_macs(self, length: int) -> int:
        """Multiply-adds of the output head; a rewritten word embedding may be tied to it."""
        if self.roles.output_head is None:
            return 0
        head = self.model.get_submodule(self.roles.output_head)
        weight = getattr(head, "weight", None)
        if weight is None:
            return 0
        for (path, _), entry in self.layers.items():
            if entry.kind == "embedding" and self.model.get_submodule(path).weight is weight:
                return entry.macs(length)
        return int(weight.numel()) * length


def _parameters(dense: _Counted, now: _Counted, reported: Sequence[LayerReport]) -> Parameters:
    """Counts a model and the dense one that it was, which may have had more blocks."""
    tables = [entry for entry in now.layers.values() if entry.kind == "embedding"]
    layers = [entry for entry in now.layers.values() if entry.kind != "embedding"]
    shrunk = sum(entry.dense_parameters - entry.parameters for entry in tables)
    saved = sum(e.dense_parameters - e.parameters + e.biases_saved for e in layers)
    saved += sum(entry.saved for entry in now.attention.values())
    all_before, blocks_before, tables_before = _sizes(dense)
    whole, blocks, embeddings = _sizes(now)
    return Parameters(
        embeddings=Amount.of(tables_before, embeddings - shrunk),
        blocks=Amount.of(blocks_before, blocks - saved),
        rewritten=Amount.sum_of(item.parameters for item in reported if item.role != "embedding"),
        other=Amount.of(all_before - blocks_before - tables_before, whole - blocks - embeddings),
        total=Amount.of(all_before, whole - saved - shrunk),
    )


def _sizes(counted: _Counted) -> tuple[int, int, int]:
    """Parameters of a dense model, of its blocks, and of its embeddings outside of them."""
    model, names = counted.model, [block.name for block in counted.roles.blocks]
    inside = tuple(f"{name}." for name in names)
    blocks = (p for name in names for p in model.get_submodule(name).parameters())
    modules = model.named_modules()
    tables = [
        module.weight
        for name, module in modules
        if isinstance(module, nn.Embedding) and not name.startswith(inside)
    ]
    # As in the plan's coverage: of image models, positions and what stands for a whole picture.
    named = model.named_parameters()
    tables += [p for name, p in named if is_table(name) and not name.startswith(inside)]
    return _distinct(model.parameters()), _distinct(blocks), _distinct(tables)


def _distinct(parameters: Iterable[Tensor]) -> int:
    """Counts parameters; tied ones count once."""
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())


_ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def experts_per_token(config: Any, experts: int | None) -> int:
    """Experts that one token passes: all of them where the config does not say."""
    if experts is None:
        return 1
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = (getattr(text, name, None) for name in _ROUTED)
    return next((number for number in found if isinstance(number, int)), experts)


def layer_macs(entry: LayerPlan, runs: int, length: int) -> int:
    """Multiply-adds of a rewritten layer for a sequence.

    Of experts a token passes `runs`, all of them equally often. What they share runs once: the
    input transform of their first weight, the output transform of their second unless biases come
    after it. Of experts that route tokens in a way of their own nothing is shared.
    """
    if entry.kind != "experts":
        return entry.macs(length)
    once = {"experts_gate_up": "in", "experts_down": "" if entry.bias else "out"}.get(entry.role)
    total = 0
    for index, part in enumerate(entry.parts):
        for layout in part.terms:
            rows, more = divmod(length * runs, entry.copies)  # some experts get one more
            total += (entry.copies - more) * macs_of(layout, rows).apply
            total += more * macs_of(layout, rows + 1).apply
            macs = macs_of(layout, length)
            total += macs.decode * (1 if once == "out" else runs)
            if not index:
                total += macs.encode * (1 if once == "in" else runs)
    return total


def _router_macs(counted: _Counted, path: str) -> int:
    """Multiply-adds of a projection that is never rewritten, such as a router, for one token."""
    total = 0
    for parameter in counted.model.get_submodule(path).parameters(recurse=False):
        if parameter.ndim == 2:
            total += parameter.numel()
        elif parameter.ndim == 3:
            experts = parameter.shape[0]
            runs = experts_per_token(counted.model.config, experts)
            total += parameter.numel() // experts * runs
    return total


def _fixed_tokens(entry: AttentionPlan) -> int | None:
    """Number of tokens that a replaced attention is tied to."""
    layout: Any = entry.layout
    if getattr(layout, "grid", ()):
        return int(prod(layout.grid)) + int(layout.special)
    return getattr(layout, "length", None)


def _attention_widths(
    block: Block, config: Any, made: Mapping[tuple[str, str], LayerPlan]
) -> list[int]:
    """Heads x head size of each attention of a block; none where nothing is left of its heads."""
    readers = [layer for layer in block.layers if layer.role in ("o", "cross_o")]
    entries = [made.get((layer.name, layer.parameter)) for layer in readers]
    widths = [
        layer.in_features if entry is None or entry.inputs_left else 0
        for layer, entry in zip(readers, entries, strict=True)
    ]
    if not widths and all(layer.role == "linear" for layer in block.layers):
        size = getattr(config, "hidden_size", None)
        widths = [size if isinstance(size, int) else block.layers[0].in_features]
    return widths


def reports_of(
    names: Sequence[str | Path], length: int = LENGTH, *, trust_remote_code: bool = False
) -> list[ModelReport]:
    """Reports on models that are shown side by side; see `report_of`."""
    trust = trust_remote_code
    return with_baselines([report_of(name, length, trust_remote_code=trust) for name in names])


def with_baselines(reports: Sequence[ModelReport]) -> list[ModelReport]:
    """Add to dense models the numbers that other models were compared with, and to these its files.

    The folder of a dense model is not changed by measuring it, so that its numbers are known to
    the models beside it alone.
    """
    compared = [(metric, metric.difference) for report in reports for metric in report.metrics]
    files = {r.source: r.exports for r in reports if not r.is_smaller and r.exports}
    found = []
    for report in reports:
        if report.is_smaller:
            lent = report.dense_exports or files.get(report.source, ())
            found.append(report.model_copy(update={"dense_exports": lent}))
            continue
        metrics = {metric_key(metric): metric for metric in report.metrics}
        names = {report.name, str(Path(report.name).absolute())}
        for metric, other in compared:
            if other and names & {other.baseline, str(Path(other.baseline).absolute())}:
                facts = {"value": other.baseline_value, "interval": other.baseline_interval}
                own = {**facts, "difference": None}
                metrics.setdefault(metric_key(metric), metric.model_copy(update=own))
        found.append(report.model_copy(update={"metrics": tuple(metrics.values())}))
    return found
