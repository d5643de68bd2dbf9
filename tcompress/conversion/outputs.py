"""What a conversion writes: every tensor, what stands beside them, and the proof of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf, isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tcompress
from tcompress.artifact.checksums import seal
from tcompress.artifact.format import Stored, quantization_section
from tcompress.artifact.manifest import (
    CalibrationFacts,
    Manifest,
    SourceFacts,
    model_card,
    write_manifest,
)
from tcompress.artifact.reader import Artifact
from tcompress.artifact.workplace import identity_of
from tcompress.blockwise.comparison import OutputComparison
from tcompress.conversion.plain_tensors import PlainTensors, fitted_parameters, fused_layers
from tcompress.data.calibration import CalibrationData
from tcompress.errors import FitError, listed
from tcompress.files import write_text
from tcompress.fitting.block_rewrite import BlockResult
from tcompress.fitting.first_values import started_values
from tcompress.fitting.layer_fits import WIDER, SharedFactors
from tcompress.hf.build import first_table
from tcompress.hf.opening import Reopened, applied, differs, refusal, unloadable
from tcompress.linalg.moments import is_finite
from tcompress.linalg.rounding import Rounding
from tcompress.models import SourceModel, read_finite
from tcompress.models.keymap import CPU, FACTOR_PREFIX
from tcompress.models.names import (
    CARD,
    LOADED_WITH,
    WEIGHTS,
    carry_files,
    forget_code,
    shorten_texts,
    stray_links,
)
from tcompress.models.narrower import with_keys
from tcompress.options import Convert
from tcompress.planning.costs import rewritten_names
from tcompress.planning.entries import AttentionPlan, FormPlan, LayerPlan, Plan, Storage
from tcompress.planning.sites import roles_of, tied_to
from tcompress.planning.costs import Widths
from tcompress.structures.modules.linear import StructuredLinear, factor_layouts
from tcompress.structures.modules.shared import FactorsModule, factors_module

Cluster = tuple[LayerPlan, ...]
"""Layers that are fitted together: an owner of an input transform and those that share it."""


def clusters_of(layers: Sequence[LayerPlan]) -> list[Cluster]:
    """Groups planned layers by the input transforms they share."""
    members: dict[str, list[LayerPlan]] = {}
    for entry in layers:
        name = f"{entry.input_of}.weight" if entry.input_of else entry.key
        members.setdefault(name, []).append(entry)
    return [tuple(group) for group in members.values()]


@dataclass
class Outputs:
    """All tensors of the output, in the order of the source's weight files."""

    source: SourceModel
    dtype: torch.dtype | None  # asked for, or None to keep that of the source
    tensors: list[Stored] = field(default_factory=list)  # everything that will be written
    made: dict[str, Cluster] = field(default_factory=dict)  # layers that yield a tensor, by name
    positions: dict[str, FormPlan] = field(default_factory=dict)  # tables made anew, by name
    attention: Sequence[AttentionPlan] = ()
    plain: PlainTensors | None = None  # where layers are stored as those of the source
    adapted: dict[str, Tensor] = field(default_factory=dict)
    """First values of attention replacements that calibration data told, by name."""
    _values: dict[str, Callable[[Stored], Tensor]] = field(default_factory=dict)
    """Makes what is not fitted, by name."""
    _started: tuple[str, dict[str, Tensor]] = ("", {})  # the last attention, and its values

    @classmethod
    def of(
        cls,
        source: SourceModel,
        layers: Sequence[LayerPlan],
        dtype: torch.dtype | None,
        attention: Sequence[AttentionPlan] = (),
        forms: Sequence[FormPlan] = (),
        *,
        plain: bool = False,
        storage: Storage | None = None,
    ) -> Outputs:
        """Lists the outputs of a plan: tables of embeddings among the layers."""
        self = cls(source, dtype, attention=attention)
        self.plain = PlainTensors(source) if plain else None
        self.positions = {f"{e.name}.weight": e for e in forms if e.kind == "positions"}
        replaced: dict[str, list[Cluster]] = {}  # several where the checkpoint fuses layers
        for cluster in fused_layers(source, layers) if plain else clusters_of(layers):
            for entry in cluster:
                for key in self._sources(entry):
                    replaced.setdefault(key, []).append(cluster)
        guarded = {self._key(e.guard.name, "weight"): e.guard for e in attention if e.guard}
        unused = {
            self._key(layer.name, leaf)
            for entry in attention
            for layer in entry.unused
            for leaf in (("weight", "bias") if layer.bias else ("weight",))
        }
        store, keymap = source.store, source.keymap
        useless = {*source.unread, *unused}
        done: set[int] = set()
        for key in sorted(store.keys(), key=lambda key: (store.file_of(key), key)):
            copied = partial(copied_value, source, key)
            if key in useless:
                continue
            if key in guarded:
                name = f"{guarded[key].name}.{FACTOR_PREFIX}weight"
                self._add(name, guarded[key].shape, key, copied)
            elif key in self.positions:
                self._add(key, store.shape(key), key, self._position_table)
            elif key not in replaced:
                self._add(key, store.shape(key), key, copied)
            for cluster in replaced.get(key, ()):
                if id(cluster) not in done:
                    done.add(id(cluster))
                    self._add_cluster(cluster)
        # Dense parameters that the checkpoint has fused with what is rewritten.
        fused = {} if plain else keymap.apart(rewritten_names(source, layers))
        for name, path in fused.items():
            shape = keymap.model.get_parameter_or_buffer(path).shape
            self._add(name, shape, keymap.sources(path).keys[0], partial(self._read, path))
        for replacement in attention:
            shapes = dict(replacement.tensor_shapes) | dict.fromkeys(replacement.guards, (0,))
            for name, shape in shapes.items():
                self._add(
                    name,
                    shape,
                    self._key(replacement.like, "weight"),
                    partial(self._start, replacement),
                )
        widths = Widths.of(source, storage, layers)
        self.tensors = [
            replace(item, rounding=widths.rounding(item.key, item.shape, item.dtype))
            for item in self.tensors
        ]
        return self

    def _add(
        self, name: str, shape: Sequence[int], like: str, value: Callable[[Stored], Tensor]
    ) -> None:
        self._values[name] = value
        self.tensors.append(Stored(name, tuple(shape), self._cast(like)))

    def take(self, block: Callable[[str], BlockResult | None]) -> None:
        """Takes over what calibration data told of the first values of attention replacements."""
        for name in dict.fromkeys(entry.block for entry in self.attention):
            result = block(self.source.keymap.runtime_name(name) or name)
            self.adapted |= result.attention if result is not None else {}

    def given(self, item: Stored) -> Tensor | None:
        """Makes the value of a tensor that is not fitted; None for one that is."""
        make = self._values.get(item.key)
        return None if make is None else make(item).to(item.dtype)

    def _position_table(self, item: Stored) -> Tensor:
        return first_table(self.positions[item.key], self.source.store.tensor(item.key))

    def _read(self, path: str, _: Stored) -> Tensor:
        return read_finite(self.source.store, self.source.keymap, path, CPU)

    def _start(self, entry: AttentionPlan, item: Stored) -> Tensor:
        if self._started[0] != entry.name:  # tensors of one attention follow each other
            self._started = entry.name, started_values(self.source, entry)
        return self.adapted.get(item.key, self._started[1][item.key])

    def fitted_value(self, item: Stored, result: BlockResult) -> Tensor:
        """Gives a tensor of a rewritten layer as it is stored."""
        if self.plain is not None:
            value = self.plain.value(item.key, self.made[item.key], result).to(item.dtype)
            if not is_finite(value):
                raise FitError(f"`{item.key}` does not fit into {item.dtype}", WIDER)
            return value
        entry = next(e for e in self.made[item.key] if item.key.startswith(f"{e.name}."))
        leaf = item.key.removeprefix(f"{entry.name}.")
        if leaf == entry.parameter:
            return torch.empty(0, dtype=item.dtype)  # the guard under the dense name
        if leaf == "bias" and entry.name in result.biases:
            bias = result.biases[entry.name].to(item.dtype)
            if not bool(torch.isfinite(bias).all()):
                raise FitError(
                    f"the bias of layer `{entry.name}` does not fit into {item.dtype}", WIDER
                )
            return bias
        tensors = result.layers[entry.key].tensors
        return next(value for name, value in tensors.items() if entry.stored_name(name) == leaf)

    @property
    def roundings(self) -> dict[str, Rounding]:
        """Of tensors of structures that are stored in few bits, by name."""
        pairs = ((key, item.rounding) for key, item in self._in_few_bits.items())
        fitted = self.plain is None  # else what is stored is made of several fits
        return {
            key: rounding
            for key, rounding in pairs
            if rounding is not None and fitted and key in self.made
        }

    @cached_property
    def _in_few_bits(self) -> dict[str, Stored]:
        return {item.key: item for item in self.tensors if item.rounding is not None}

    def as_read(self, key: str, value: Tensor) -> Tensor:
        """Gives a tensor as it is read again: rounded, where that is how it is stored."""
        item = self._in_few_bits.get(key)
        return value if item is None else item.read_back(value)

    def _key(self, name: str, leaf: str) -> str:
        """Name in the checkpoint of a tensor of a planned module."""
        path = self.source.keymap.runtime_name(name) or name
        return self.source.keymap.sources(f"{path}.{leaf}").keys[0]

    def _sources(self, entry: LayerPlan) -> Iterator[str]:
        keymap, path = self.source.keymap, self.runtime_name(entry)
        yield from keymap.sources(f"{path}.{entry.parameter}").keys
        if entry.kind == "embedding":  # a tied head may have been stored a second time
            tied = (keymap.sources(f"{name}.weight").keys for name in tied_to(self.source, path))
            yield from (key for keys in tied for key in keys)
        if entry.bias and entry.kind != "experts":
            yield from keymap.sources(f"{self.runtime_name(entry)}.bias").keys

    def runtime_name(self, entry: LayerPlan) -> str:
        return self.source.keymap.runtime_name(entry.name) or entry.name

    def dtype_of(self, entry: LayerPlan) -> torch.dtype:
        return self._cast(next(iter(self._sources(entry))))

    def _cast(self, key: str) -> torch.dtype:
        dtype = self.source.store.dtype(key)
        return dtype if self.dtype is None or not dtype.is_floating_point else self.dtype

    def _add_cluster(self, cluster: Cluster) -> None:
        if self.plain is not None:
            for key, shape in self.plain.add(cluster).items():
                self.made[key] = cluster
                self.tensors.append(Stored(key, shape, self._cast(key)))
            return
        for entry in cluster:
            dtype = self.dtype_of(entry)
            shapes = {entry.stored_name(name): s for name, s in entry.tensor_shapes.items()}
            shapes[entry.parameter] = (0,)
            if entry.bias and entry.kind != "experts":
                shapes["bias"] = (entry.outputs_left,)
            for name, shape in shapes.items():
                key = f"{entry.name}.{name}"
                self.made[key] = cluster
                self.tensors.append(Stored(key, shape, dtype))


def copied_value(source: SourceModel, key: str, item: Stored) -> Tensor:
    """Reads a tensor that is carried over; the source may have it under another name.

    It has to be finite and fit into the dtype; but what is no weight may hold minus infinity, as
    masks do, and a single number infinity, as bounds do.
    """
    tensor = source.store.tensor(key)
    if tensor.is_floating_point() and tensor.numel():
        low, high = map(float, torch.aminmax(tensor))
        largest = max(high, -low) if key.endswith(".weight") else high
        name = source.store.name_inside(key)
        bound = tensor.numel() == 1 and abs(high) == inf
        if isnan(largest) or (largest == inf and not bound):
            raise FitError(
                f"tensor `{name}` of the source holds NaN or infinity",
                "repair the checkpoint first",
            )
        if largest > torch.finfo(item.dtype).max and not bound:
            raise FitError(f"tensor `{name}` of the source does not fit into {item.dtype}", WIDER)
    return tensor


# What a conversion writes beside the weights, and what it depends on.


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


def source_facts(source: SourceModel, dense: SourceModel, plan: Plan) -> SourceFacts:
    """Says what was converted: the dense model without dropped blocks, and with all of them."""
    same = source is dense and plan.plain is None
    return SourceFacts(
        id=source.id,
        revision=source.revision,
        fingerprint=source.store.fingerprint(),
        bytes=dense.store.total_bytes,
        config=None if same else dense.settings,
        init="pretrained" if source.seed is None else "random",
        seed=source.seed,
    )


def calibration_facts(
    data: CalibrationData | None, comparison: OutputComparison | None
) -> CalibrationFacts:
    """Says what a fit looked at, and what came of outputs by source."""
    if data is None:
        return CalibrationFacts(name="none")
    held = (len(next(iter(data.batches[index].values()))) for index in data.holdout)
    return CalibrationFacts(
        name=data.name,
        samples=data.samples,
        held_out_samples=sum(held),
        tokens=data.tokens,
        fingerprint=data.fingerprint,
        changes=comparison.changes if comparison else {},
        agreement=comparison.agreement if comparison else {},
    )


def write_rest(folder: Path, source: SourceModel, manifest: Manifest, dtype: str | None) -> None:
    """Writes everything but the weights; `config.json`, which makes it loadable, last."""
    carry_files(source.folder, source.auxiliary_files(), folder)
    if not source.trust_remote_code:
        forget_code(folder)
    if manifest.plan.longest is not None:
        shorten_texts(folder, manifest.plan.longest)
    write_text(folder / CARD, model_card(manifest, source.folder, source.model_class.__name__))
    config = config_text(source, manifest.plan, dtype)
    sealed = seal(folder, manifest.checksums, {"config.json": config.encode()})
    write_manifest(folder, manifest.model_copy(update=sealed))
    write_text(folder / "config.json", config)


def config_text(source: SourceModel, plan: Plan, dtype: str | None) -> str:
    """Renders `config.json`; arguments as for `write_rest`."""
    raw = dict(with_keys(source, plan.plain).settings if plan.plain else source.settings)
    if dtype is not None:
        raw.pop("torch_dtype", None)
        raw["dtype"] = dtype
    if plan.changes_model:
        facts: dict[str, Any] = {}
        if source.model_class.__name__ not in (raw.get("architectures") or []):
            facts["stored_as"] = source.model_class.__name__
        if source.keymap.missing:
            facts["absent"] = sorted(source.keymap.missing)
        if plan.storage is not None:
            facts["storage"] = plan.storage.model_dump(mode="json", exclude_none=True)
        section = quantization_section(plan.entries, plan.attention, plan.forms, **facts)
        raw |= {WEIGHTS: LOADED_WITH, "quantization_config": section}
    return json.dumps(raw, indent=2) + "\n"


def with_links(plan: Plan, source: SourceModel) -> Plan:
    """Warns of links out of the model's folder, which are not carried along."""
    names = stray_links(source.folder, source.trust_remote_code)
    if not names:
        return plan
    listed = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return plan.warned(
        f"links out of the model's folder are not carried along: {listed}; copy the files there"
    )


def with_unheld(plan: Plan, recipe: Convert, data: CalibrationData | None) -> Plan:
    """Warns where candidates were compared on nothing but what they were fitted to."""
    compares = recipe.tries_methods or recipe.chooses_depth
    if data is None or data.holdout or not compares:
        return plan
    return plan.warned(
        f"the calibration data has no sample to hold out ({data.samples} in all): candidates were "
        "compared on what they were fitted to, which favours those that adapt most; give more data"
    )


def with_unreached(plan: Plan, names: Sequence[str]) -> Plan:
    """Warns of layers that were fitted without data, as in towers that read pictures."""
    if not names:
        return plan
    return plan.warned(
        f"the calibration data does not reach {len(names)} of {len(plan.layers)} layers (such as "
        f"`{names[0]}`): they are fitted without data; `--keep` leaves them dense"
    )


# What was written is opened and compared with what was fitted, before it is published.


ROWS = 4  # inputs that a layer is tried on
EXACT = 1e-9  # largest difference where the very same numbers are compared, in float64


def check_written(
    folder: Path,
    outputs: Outputs,
    plan: Plan,
    fit: Callable[[Cluster], BlockResult],
    factors: SharedFactors,
) -> None:
    """Compares the files with the fits of one block, and of one place of every other kind."""
    source = outputs.source
    if plan.changes_model:
        with unloadable():
            Artifact.open(folder)
    written = Reopened(folder, source.model_class, source.keymap.missing)
    store = written.store
    expected = {
        item.key: (tuple(item.shape), item.dtype, item.rounding) for item in outputs.tensors
    }
    found = {
        key: (tuple(store.shape(key)), store.dtype(key), store.rounding(key))
        for key in store.keys()  # noqa: SIM118
    }
    wrong = {key for key in expected.keys() | found if expected.get(key) != found.get(key)}
    if wrong:
        raise refusal(f"{listed(wrong)} differ in name, shape or type from the plan")
    blocks = _compared_blocks(plan, source)
    prefixes = tuple(f"{block}." for block in blocks)
    for item in outputs.tensors:
        if item.key.startswith(prefixes) or item.key in outputs.positions:
            value = outputs.given(item)
            if value is not None and not _same(store.tensor(item.key), item.read_back(value)):
                raise differs(item.key, "its values are others")
    entries = (*plan.embeddings[:1], *(entry for entry in plan.layers if entry.block in blocks))
    for cluster in {id(c): c for c in outputs.made.values()}.values():
        if cluster[0] in entries and outputs.plain is not None:
            _check_plain(written, outputs, cluster, fit(cluster))
        elif cluster[0] in entries:
            _check_cluster(written, outputs, cluster, fit(cluster), factors)


def _compared_blocks(plan: Plan, source: SourceModel) -> set[str]:
    """Names of blocks that hold every kind of layer, or one if no layer is rewritten."""
    blocks: set[str] = set()
    for kind in dict.fromkeys(entry.kind for entry in plan.layers):
        having = [entry.block for entry in plan.layers if entry.kind == kind]
        if not blocks & {*having}:
            blocks.add(max(dict.fromkeys(having), key=having.count))
    if not blocks & {entry.block for entry in plan.attention}:
        blocks |= {entry.block for entry in plan.attention[:1]}
    if not blocks:  # a plain model that lost blocks
        first = roles_of(source).blocks[:1]
        blocks = {source.keymap.checkpoint_prefix(block.name) for block in first}
    return blocks


def _check_plain(
    written: Reopened, outputs: Outputs, cluster: Cluster, result: BlockResult
) -> None:
    for entry in cluster:
        for name, fitted in fitted_parameters(outputs.source, entry, result):
            if not _same(written.tensor(name), fitted.to(outputs.dtype_of(entry))):
                raise differs(name, "its values are others")


def _check_cluster(
    written: Reopened,
    outputs: Outputs,
    cluster: Cluster,
    result: BlockResult,
    factors: SharedFactors,
) -> None:
    generator = torch.Generator().manual_seed(0)
    for entry, expected in zip(cluster, _fitted(outputs, cluster, result, factors), strict=True):
        layer = written.layer(entry)
        if not entry.outputs_left:  # nothing to compare
            continue
        rows = torch.randn(ROWS, entry.inputs_left, generator=generator, dtype=torch.float64)
        own, tensor = applied(expected, rows), applied(layer, rows)
        change, size = (own - tensor).abs().max(), own.abs().max()
        if not change <= EXACT * size:
            raise differs(entry.name, f"its outputs are off by {change / size:.1%}")
        bias = result.biases.get(entry.name)
        if bias is not None and not _same(layer.bias, bias.to(outputs.dtype_of(entry))):
            raise differs(entry.name, "its bias is another")


def _fitted(
    outputs: Outputs, cluster: Cluster, result: BlockResult, factors: SharedFactors
) -> Iterator[StructuredLinear]:
    """Builds the layers of a cluster from their fits, in float64; owners of inputs come first."""
    module: dict[str, StructuredLinear] = {}
    for entry in cluster:
        tensors = result.layers[entry.key].tensors
        borrowed: dict[str, FactorsModule] = {}
        for name, owner in entry.bank_of.items():
            borrowed[name] = FactorsModule(factor_layouts(entry.parts)[name], torch.float64)
            prefix = f"{owner}.{factors_module(name)}"
            exact = {
                key: outputs.as_read(f"{prefix}.{key}", item).double()
                for key, item in factors[owner, name].items()
            }
            borrowed[name].load_state_dict(exact, assign=True)
        layer = StructuredLinear(
            entry.parts,
            input_of=None if entry.input_of is None else module[entry.input_of],
            readers=entry.readers,
            factors=borrowed,
            experts=entry.experts,
            reads=entry.reads,
            dtype=torch.float64,
        )
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                key = f"{entry.name}.{entry.stored_name(name)}"
                parameter.copy_(outputs.as_read(key, tensors[name]))
        module[entry.name] = layer
        yield layer


def _same(found: Tensor | None, wanted: Tensor) -> bool:
    """Whether values are equal, NaN to NaN."""
    if found is None or found.shape != wanted.shape:
        return False
    return torch.equal(found.double().nan_to_num(), wanted.double().cpu().nan_to_num())
