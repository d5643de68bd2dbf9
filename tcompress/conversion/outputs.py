"""What a conversion writes: every tensor, what stands beside them, and the proof of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf, isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tcompress.artifact.checksums import seal
from tcompress.artifact.format import Stored, quantization_section, stored_tensors
from tcompress.artifact.manifest import Manifest, model_card, write_manifest
from tcompress.artifact.reader import Artifact
from tcompress.errors import FitError, listed
from tcompress.files import write_text
from tcompress.fitting.block_rewrite import Group
from tcompress.fitting.embeddings import EMBEDDINGS
from tcompress.fitting.first_values import started_values
from tcompress.fitting.layer_fits import WIDER, BlockResult, SharedFactors
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
)
from tcompress.models.narrower import with_keys
from tcompress.planning.costs import (
    copied_keys,
    parameter_names,
    path_of,
    roundings,
    stored_key,
    weight_keys,
)
from tcompress.planning.entries import AttentionPlan, FormPlan, LayerPlan, Plan
from tcompress.planning.plain_widths import shapes_of
from tcompress.planning.sites import roles_of, tied_to
from tcompress.structures.modules.linear import StructuredLinear, factor_layouts, tensor_prefix
from tcompress.structures.modules.shared import FactorsModule, factors_module


def groups_of(layers: Sequence[LayerPlan]) -> list[Group]:
    """Group planned layers by the input transforms they share, each after its owner."""
    return _grouped(layers, lambda e: f"{e.input_of}.weight" if e.input_of else e.key)


def _grouped(layers: Sequence[LayerPlan], key: Callable[[LayerPlan], object]) -> list[Group]:
    members: dict[object, list[LayerPlan]] = {}
    for entry in layers:
        members.setdefault(key(entry), []).append(entry)
    return [*map(tuple, members.values())]


@dataclass
class Outputs:
    """All tensors of the output, in the order of the source's weight files. Use `Outputs.of`."""

    source: SourceModel
    plan: Plan  # with final sizes
    dtype: torch.dtype | None  # asked for, or None to keep that of the source
    tensors: list[Stored] = field(default_factory=list)  # everything that will be written
    groups: list[Group] = field(default_factory=list)  # layers that are fitted together
    group_of: dict[str, Group] = field(default_factory=dict)  # that yields a tensor, by its name
    plain: PlainTensors | None = None  # where layers are stored as those of the source
    adapted: dict[str, Tensor] = field(default_factory=dict)
    """First values of attention replacements that calibration data told, by name."""
    _values: dict[str, Callable[[Stored], Tensor]] = field(default_factory=dict)
    """Makes what is not fitted, by name."""
    _started: tuple[str, dict[str, Tensor]] = ("", {})  # the last attention, and its values

    @classmethod
    def of(cls, source: SourceModel, plan: Plan, dtype: torch.dtype | None) -> Outputs:
        """List the outputs of a plan."""
        self = cls(source, plan, dtype)
        entries, store, keymap = plan.entries, source.store, source.keymap
        if plan.plain is not None:
            self.plain = PlainTensors(source)
            groups = _grouped(entries, lambda entry: weight_keys(source, entry))
        else:
            groups = groups_of(entries)
        replaced: dict[str, list[Group]] = {}  # several where the checkpoint fuses layers
        for group in groups:
            for key in (key for entry in group for key in self._sources(entry)):
                replaced.setdefault(key, []).append(group)
        tables = {f"{form.name}.weight": form for form in self.positions}
        guards = {stored_key(source, e.guard.name): e.guard for e in plan.attention if e.guard}
        copied = {*copied_keys(source, plan)} - replaced.keys()
        for key in sorted(store.keys(), key=lambda key: (store.file_of(key), key)):
            value = partial(copied_value, source, key)
            if key in guards:
                name = f"{guards[key].name}.{FACTOR_PREFIX}weight"
                self._add(name, guards[key].shape, key, value)
            elif key in tables:
                self._add(key, store.shape(key), key, partial(self._table, tables[key]))
            elif key in copied:
                self._add(key, store.shape(key), key, value)
            for group in replaced.get(key, ()):
                if not any(group is earlier for earlier in self.groups):
                    self._add_group(group)
        # Dense parameters that the checkpoint has fused with what is rewritten.
        names = (name for entry in entries for name in parameter_names(source, entry))
        fused = {} if self.plain else keymap.apart(names)
        for name, path in fused.items():
            shape = keymap.model.get_parameter_or_buffer(path).shape
            self._add(name, shape, keymap.sources(path).keys[0], partial(self._read, path))
        for replacement in plan.attention:
            like = stored_key(source, replacement.like)
            for name, shape in stored_tensors(replacement).items():
                if name not in self._values:  # else it is the guarded weight
                    self._add(name, shape, like, partial(self._start, replacement))
        rounding_of = roundings(source, plan.storage, entries)
        self.tensors = [
            replace(item, rounding=rounding_of(item.key, item.shape, item.dtype))
            for item in self.tensors
        ]
        return self

    def _add(
        self, name: str, shape: Sequence[int], like: str, value: Callable[[Stored], Tensor]
    ) -> None:
        self._values[name] = value
        self.tensors.append(Stored(name, tuple(shape), self._cast(like)))

    def _add_group(self, group: Group) -> None:
        self.groups.append(group)
        if self.plain is not None:
            stored = [Stored(*item, self._cast(item[0])) for item in self.plain.add(group).items()]
        else:
            stored = [
                Stored(key, shape, self.dtype_of(entry))
                for entry in group
                for key, shape in (stored_tensors(entry) | _bias_shape(entry)).items()
            ]
        self.tensors += stored
        self.group_of |= {item.key: group for item in stored}

    def take(self, block: Callable[[str], BlockResult | None]) -> None:
        """Take over what calibration data told of the first values of attention replacements."""
        for name in dict.fromkeys(entry.block for entry in self.plan.attention):
            result = block(self.source.keymap.runtime_name(name) or name)
            self.adapted |= result.attention if result is not None else {}

    def value(self, item: Stored, fits: Callable[[str], BlockResult]) -> Tensor:
        """Make the value of a tensor; fits are read by the name under which they are kept."""
        unfitted = self.unfitted(item)
        if unfitted is not None:
            return unfitted
        group = self.group_of[item.key]
        result = fits(self.block_of(group))
        if self.plain is not None:
            value = self.plain.value(item.key, group, result).to(item.dtype)
            if not is_finite(value):
                raise FitError(f"`{item.key}` does not fit into {item.dtype}", WIDER)
            return value
        entry = next(e for e in group if item.key.startswith(f"{e.name}."))
        leaf = item.key.removeprefix(f"{entry.name}.")
        if leaf == entry.parameter:
            return torch.empty(0, dtype=item.dtype)  # the guard under the dense name
        if leaf == "bias" and entry.name in result.biases:
            bias = result.biases[entry.name].to(item.dtype)
            if not is_finite(bias):
                raise FitError(
                    f"the bias of layer `{entry.name}` does not fit into {item.dtype}", WIDER
                )
            return bias
        tensors = result.layers[entry.key].tensors
        return next(v for name, v in tensors.items() if entry.stored_name(name) == item.key)

    def unfitted(self, item: Stored) -> Tensor | None:
        """Make the value of a tensor that is not fitted; None for one that is."""
        make = self._values.get(item.key)
        return None if make is None else make(item).to(item.dtype)

    def _table(self, form: FormPlan, item: Stored) -> Tensor:
        return first_table(form, self.source.store.tensor(item.key))

    def _read(self, path: str, _: Stored) -> Tensor:
        return read_finite(self.source.store, self.source.keymap, path, CPU)

    def _start(self, entry: AttentionPlan, item: Stored) -> Tensor:
        if self._started[0] != entry.name:  # tensors of one attention follow each other
            self._started = entry.name, started_values(self.source, entry)
        return self.adapted.get(item.key, self._started[1][item.key])

    @property
    def positions(self) -> list[FormPlan]:
        """Tables of positions that are made anew."""
        return [form for form in self.plan.forms if form.kind == "positions"]

    @cached_property
    def roundings(self) -> dict[str, Rounding]:
        """Of tensors of structures that are stored in few bits, by name."""
        if self.plain is not None:  # what is stored is made of several fits
            return {}
        fitted = (item for item in self.tensors if item.key in self.group_of)
        return {item.key: item.rounding for item in fitted if item.rounding is not None}

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """All tensors by name."""
        return {item.key: item for item in self.tensors}

    @cached_property
    def blocks(self) -> Mapping[str, str]:
        """Names under which fits are kept, by the layer's path in the model."""
        blocks = roles_of(self.source).blocks
        by_layer = {layer.name: block.name for block in blocks for layer in block.layers}
        return by_layer | {self.path(entry): EMBEDDINGS for entry in self.plan.embeddings}

    def block_of(self, group: Group) -> str:
        """Name under which the fits of a group are kept; outside of all blocks its own."""
        path = self.path(group[0])
        return self.blocks.get(path, path)

    def path(self, entry: LayerPlan) -> str:
        """Path of a planned layer in the model."""
        return self.source.keymap.runtime_name(entry.name) or entry.name

    def dtype_of(self, entry: LayerPlan) -> torch.dtype:
        """Dtype in which a layer is stored."""
        return self._cast(weight_keys(self.source, entry)[0])

    def _cast(self, key: str) -> torch.dtype:
        dtype = self.source.store.dtype(key)
        return dtype if self.dtype is None or not dtype.is_floating_point else self.dtype

    def _sources(self, entry: LayerPlan) -> Iterator[str]:
        """Names in the checkpoint of what a layer takes the place of."""
        keymap, path = self.source.keymap, self.path(entry)
        yield from weight_keys(self.source, entry)
        if entry.kind == "embedding":  # a tied head may have been stored a second time
            for name in tied_to(self.source, path):
                yield from keymap.sources(f"{name}.weight").keys
        if _bias_shape(entry):
            yield from keymap.sources(f"{path}.bias").keys


def _bias_shape(entry: LayerPlan) -> dict[str, tuple[int, ...]]:
    """Name and shape of the bias that is stored beside a layer, if there is one."""
    stored = entry.bias and entry.kind != "experts"
    return {f"{entry.name}.bias": (entry.outputs_left,)} if stored else {}


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


# Plain models: rewritten layers as the family stores its own.


def fitted_parameters(
    source: SourceModel, entry: LayerPlan, result: BlockResult
) -> Iterator[tuple[str, Tensor]]:
    """Pair the weight of a layer, and its bias, as the model has them, by name."""
    path, tensors = path_of(source, entry), result.layers[entry.key].tensors
    names = (f"{tensor_prefix(entry.parts, index, 0)}w" for index in range(len(entry.parts)))
    yield path, entry.as_stored(torch.cat([tensors[name] for name in names], -2))
    if entry.name in result.biases:
        yield f"{path.rpartition('.')[0]}.bias", result.biases[entry.name]


@dataclass
class PlainTensors:
    """Tensors of rewritten layers by the keys that the source has for them."""

    source: SourceModel
    _names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters that are stored together, by every key that stores them."""
    _last: tuple[tuple[str, ...], dict[str, Tensor]] = ((), {})  # names, and what stores them

    def add(self, group: Group) -> dict[str, tuple[int, ...]]:
        """Note layers, and return the shapes of all tensors that store them."""
        shapes_here = {
            name: shape for entry in group for name, shape in shapes_of(entry, self.source).items()
        }
        keymap = self.source.keymap
        stored_shapes: dict[str, tuple[int, ...]] = {}
        for names in dict.fromkeys(map(keymap.stored_together, shapes_here)):
            dense = keymap.model.get_parameter_or_buffer
            shapes = {name: shapes_here.get(name) or tuple(dense(name).shape) for name in names}
            empty = {name: torch.empty(size, device="meta") for name, size in shapes.items()}
            stored = keymap.as_stored(empty)
            self._names |= dict.fromkeys(stored, names)
            stored_shapes |= {key: tuple(tensor.shape) for key, tensor in stored.items()}
        return stored_shapes

    def value(self, key: str, group: Group, result: BlockResult) -> Tensor:
        """Make one of these tensors as it was fitted."""
        names = self._names[key]
        if self._last[0] != names:  # experts are made of one stack
            fitted: Mapping[str, Tensor] = {
                name: tensor
                for entry in group
                for name, tensor in fitted_parameters(self.source, entry, result)
            }
            read = partial(read_finite, self.source.store, self.source.keymap, device=CPU)
            values = {n: fitted[n] if n in fitted else read(n) for n in names}
            self._last = names, self.source.keymap.as_stored(values)
        return self._last[1][key]


# What a conversion writes beside the weights.


def write_rest(
    folder: Path, source: SourceModel, manifest: Manifest, dtype: str | None
) -> Manifest:
    """Write everything but the weights; `config.json`, which makes it loadable, last.

    Returns:
        The manifest with checksums and sizes of all files.
    """
    carry_files(source.folder, source.auxiliary_files(), folder)
    if not source.trust_remote_code:
        forget_code(folder)
    if manifest.plan.longest is not None:
        shorten_texts(folder, manifest.plan.longest)
    write_text(folder / CARD, model_card(manifest, source.folder, source.model_class.__name__))
    config = config_text(source, manifest.plan, dtype)
    sealed = seal(folder, manifest.checksums, {"config.json": config.encode()})
    manifest = manifest.model_copy(update=sealed)
    write_manifest(folder, manifest)
    write_text(folder / "config.json", config)
    return manifest


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


# What was written is opened and compared with what was fitted, before it is published.


ROWS = 4  # inputs that a layer is tried on
EXACT = 1e-9  # largest difference where the very same numbers are compared, in float64


def check_written(
    folder: Path, outputs: Outputs, fits: Callable[[str], BlockResult], factors: SharedFactors
) -> None:
    """Compare the files with the fits of one block, and of one place of every other kind.

    Args:
        folder: What was written.
        outputs: What it should hold.
        fits: Reads fits by the name under which they are kept.
        factors: Those that layers share.
    """
    source, plan = outputs.source, outputs.plan
    if plan.changes_model:
        with unloadable():
            Artifact.open(folder)
    written = Reopened(folder, source.model_class, source.keymap.missing)
    store, expected = written.store, outputs.stored
    read = {
        key: Stored(key, tuple(store.shape(key)), store.dtype(key), store.rounding(key))
        for key in store.keys()  # noqa: SIM118
    }
    wrong = {key for key in expected.keys() | read if expected.get(key) != read.get(key)}
    if wrong:
        raise refusal(f"{listed(wrong)} differ in name, shape or type from the plan")
    blocks = _compared_blocks(plan, source)
    prefixes = tuple(f"{block}." for block in blocks)
    tables = {f"{form.name}.weight" for form in outputs.positions}
    for item in outputs.tensors:
        if item.key.startswith(prefixes) or item.key in tables:
            value = outputs.unfitted(item)
            if value is not None and not _same(store.tensor(item.key), item.read_back(value)):
                raise differs(item.key, "its values are others")
    entries = (*plan.embeddings[:1], *(entry for entry in plan.layers if entry.block in blocks))
    for group in outputs.groups:
        if group[0] not in entries:
            continue
        result = fits(outputs.block_of(group))
        if outputs.plain is None:
            _check_group(written, outputs, group, result, factors)
            continue
        for entry in group:
            for name, fitted in fitted_parameters(source, entry, result):
                if not _same(written.tensor(name), fitted.to(outputs.dtype_of(entry))):
                    raise differs(name, "its values are others")


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


def _check_group(
    written: Reopened,
    outputs: Outputs,
    group: Group,
    result: BlockResult,
    factors: SharedFactors,
) -> None:
    """Compare layers with those built from their fits in float64; owners of inputs come first."""
    generator = torch.Generator().manual_seed(0)
    built: dict[str, StructuredLinear] = {}
    for entry in group:
        built[entry.name] = expected = _built(outputs, entry, result, factors, built)
        layer = written.layer(entry)
        if not entry.outputs_left:  # nothing to compare
            continue
        rows = torch.randn(ROWS, entry.inputs_left, generator=generator, dtype=torch.float64)
        exact, tensor = applied(expected, rows), applied(layer, rows)
        change, size = (exact - tensor).abs().max(), exact.abs().max()
        if not change <= EXACT * size:
            raise differs(entry.name, f"its outputs are off by {change / size:.1%}")
        bias = result.biases.get(entry.name)
        if bias is not None and not _same(layer.bias, bias.to(outputs.dtype_of(entry))):
            raise differs(entry.name, "its bias is another")


def _built(
    outputs: Outputs,
    entry: LayerPlan,
    result: BlockResult,
    factors: SharedFactors,
    owners: Mapping[str, StructuredLinear],
) -> StructuredLinear:
    """Build a layer from its fits, rounded as they are stored, in float64."""

    def read_back(key: str, value: Tensor) -> Tensor:
        return outputs.stored[key].read_back(value).double()

    borrowed: dict[str, FactorsModule] = {}
    for name, owner in entry.bank_of.items():
        borrowed[name] = FactorsModule(factor_layouts(entry.parts)[name], torch.float64)
        prefix = f"{owner}.{factors_module(name)}"
        stored = {key: read_back(f"{prefix}.{key}", t) for key, t in factors[owner, name].items()}
        borrowed[name].load_state_dict(stored, assign=True)
    layer = StructuredLinear(
        entry.parts,
        input_of=None if entry.input_of is None else owners[entry.input_of],
        readers=entry.readers,
        factors=borrowed,
        experts=entry.experts,
        reads=entry.reads,
        dtype=torch.float64,
    )
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            tensor = result.layers[entry.key].tensors[name]
            parameter.copy_(read_back(entry.stored_name(name), tensor))
    return layer


def _same(read: Tensor | None, fitted: Tensor) -> bool:
    """Tell whether values are equal, NaN to NaN."""
    if read is None or read.shape != fitted.shape:
        return False
    return torch.equal(read.double().nan_to_num(), fitted.double().cpu().nan_to_num())
