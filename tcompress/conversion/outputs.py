"""What a conversion writes: every tensor, what stands beside them, and the proof of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from math import inf, isnan
from pathlib import Path
from statistics import mode
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
from tcompress.fitting.layer_fits import WIDER, FittedLayer
from tcompress.fitting.workdir import FitWorkplace
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
    renumber_alignment,
    shorten_texts,
)
from tcompress.models.narrower import with_keys
from tcompress.planning.costs import (
    copied_keys,
    parameter_names,
    roundings,
    stored_dtype,
    stored_key,
    weight_keys,
)
from tcompress.planning.entries import AttentionPlan, LayerPlan, Plan
from tcompress.planning.plain_widths import shapes_of
from tcompress.planning.sites import module_path, roles_of
from tcompress.structures.modules.linear import StructuredLinear, tensor_prefix
from tcompress.structures.modules.shared import factors_module


def groups_of(
    layers: Sequence[LayerPlan], key: Callable[[LayerPlan], object] | None = None
) -> list[Group]:
    """Group planned layers by a key, or by the input transforms they share, owners first."""
    members: dict[object, list[LayerPlan]] = {}
    for entry in layers:
        first = f"{entry.input_of}.weight" if entry.input_of else entry.key
        members.setdefault(key(entry) if key else first, []).append(entry)
    return [*map(tuple, members.values())]


RULES_OUT = torch.finfo(torch.float32).min / 2
"""From here down a number of a mask rules something out, as minus infinity does."""


class Outputs:
    """All tensors of the output, in the order of the source's weight files.

    The source has the blocks that stay, the plan final sizes, and the working folder the fits;
    without a dtype tensors keep that of the source.
    """

    def __init__(
        self, source: SourceModel, plan: Plan, dtype: str | None, workdir: FitWorkplace
    ) -> None:
        self.source, self.plan = source, plan
        self._cast = partial(stored_dtype, source, dtype=dtype)
        self.tensors: dict[str, Stored] = {}  # everything that will be written, by name
        self.groups: list[Group] = []  # layers that are fitted together
        self.group_of: dict[str, Group] = {}  # that yields a tensor, by its name
        # Tables of positions that are made anew, by name of the tensor.
        self.tables = {f"{it.name}.weight": it for it in plan.forms if it.kind == "positions"}
        # Make what is not fitted, by name; no bound methods, which would keep all of this alive.
        self._values: dict[str, Callable[[Outputs], Tensor]] = {}
        # Tensors of one block, of one group, and of one attention, follow each other.
        self._plain: tuple[Group, dict[str, Tensor]] = ((), {})
        self._fits = lru_cache(maxsize=1)(workdir.block)
        self._first_values = lru_cache(maxsize=1)(partial(started_values, source))
        self._rounding_of = roundings(source, plan.storage, plan.entries)
        self._list()

    def _list(self) -> None:
        source, plan, store, keymap = self.source, self.plan, self.source.store, self.source.keymap
        by_weights = None if plan.plain is None else partial(weight_keys, source)
        groups = groups_of(plan.entries, by_weights)
        replaced: dict[str, list[Group]] = {}  # several where the checkpoint fuses layers
        for group in groups:
            for name in chain.from_iterable(parameter_names(source, entry) for entry in group):
                for key in keymap.sources(name).keys:
                    replaced.setdefault(key, []).append(group)
        guards = {stored_key(source, e.guard.name): e.guard.name for e in plan.attention if e.guard}
        copied = {*copied_keys(source, plan)} - replaced.keys()
        for key in sorted(store.keys(), key=lambda key: (store.file_of(key), key)):
            if key in copied:
                name = f"{guards[key]}.{FACTOR_PREFIX}weight" if key in guards else key
                self._add(name, store.shape(key), key)
                self._values[name] = partial(Outputs._copy, key=key)
            for group in replaced.get(key, ()):
                if not any(group is earlier for earlier in self.groups):
                    self._add_group(group)
        # Dense parameters that the checkpoint has fused with what is rewritten.
        rewritten = (name for entry in plan.entries for name in parameter_names(source, entry))
        apart = keymap.apart(rewritten) if plan.plain is None else {}
        for name, path in apart.items():
            shape = keymap.model.get_parameter_or_buffer(path).shape
            self._add(name, shape, keymap.sources(path).keys[0])
            self._values[name] = partial(Outputs._parameter, path=path)
        for replacement in plan.attention:
            for name, shape in stored_tensors(replacement).items():
                if name not in self.tensors:  # else it is the guarded weight
                    self._add(name, shape, stored_key(source, replacement.like))
                    self._values[name] = partial(Outputs._start, entry=replacement, key=name)

    def _add(self, key: str, shape: Sequence[int], like: str) -> None:
        """List a tensor; unless a dtype is asked for it has that of one in the source."""
        dtype = self._cast(like)
        self.tensors[key] = Stored(key, tuple(shape), dtype, self._rounding_of(key, shape, dtype))

    def _add_group(self, group: Group) -> None:
        self.groups.append(group)
        if self.plan.plain is not None:
            shapes = chain(*(shapes_of(entry, self.source).items() for entry in group))
            empty = {name: torch.empty(shape, device="meta") for name, shape in shapes}
            dense = self.source.keymap.model.get_parameter_or_buffer
            stored = plain_tensors(self.source, empty, lambda name: dense(name).detach())
            listed = [(key, tuple(tensor.shape), key) for key, tensor in stored.items()]
        else:
            listed = []
            for entry in group:
                tensors, like = stored_tensors(entry), weight_keys(self.source, entry)[0]
                if entry.bias and entry.kind != "experts":
                    tensors[f"{entry.name}.bias"] = (entry.outputs_left,)
                listed += [(key, shape, like) for key, shape in tensors.items()]
        for key, shape, like in listed:
            self._add(key, shape, like)
            self.group_of[key] = group

    def value(self, item: Stored) -> Tensor:
        """Make the value of a tensor, once everything is fitted."""
        unfitted = self.unfitted(item)
        if unfitted is not None:
            return unfitted
        group = self.group_of[item.key]
        if self.plan.plain is not None:
            if self._plain[0] is not group:  # experts are made of one stack
                fitted = dict(chain(*map(self.fitted_parameters, group)))
                self._plain = group, plain_tensors(self.source, fitted, self._parameter)
            what, value = f"`{item.key}`", self._plain[1][item.key]
        else:
            entry = next(e for e in group if item.key.startswith(f"{e.name}."))
            if item.key == entry.key:
                return torch.empty(0, dtype=item.dtype)  # the guard under the dense name
            tensors = self.fit_of(entry).tensors
            leaf = next(leaf for leaf in tensors if entry.stored_name(leaf) == item.key)
            is_bias = leaf == "bias"
            what = f"the bias of layer `{entry.name}`" if is_bias else f"`{item.key}`"
            value = tensors[leaf]
        value = value.to(item.dtype)  # layers of one input are fitted in the dtype of the first
        if not is_finite(value):
            raise FitError(f"{what} does not fit into {item.dtype}", WIDER)
        return value

    def unfitted(self, item: Stored) -> Tensor | None:
        """Make the value of a tensor that is not fitted; None for one that is."""
        make = self._values.get(item.key)
        return None if make is None else make(self).to(item.dtype)

    def _parameter(self, path: str) -> Tensor:
        return read_finite(self.source.store, self.source.keymap, path, CPU)

    def _copy(self, key: str) -> Tensor:
        """Read a tensor that is carried over, but for tables of positions that are made anew.

        It has to be finite and fit into the dtype; but what is no weight may hold minus infinity,
        or a number as low, as masks do, and a single number infinity, as bounds do.
        """
        tensor, dtype = self.source.store.tensor(key), self._cast(key)
        if key in self.tables:
            return first_table(self.tables[key], tensor)
        if tensor.is_floating_point() and tensor.numel():
            low, high = map(float, torch.aminmax(tensor))
            if low <= RULES_OUT and not key.endswith(".weight"):
                low = float(tensor.where(tensor > RULES_OUT, 0).min())
            largest = max(high, -low)
            what = f"tensor `{self.source.store.name_inside(key)}` of the source"
            bound = tensor.numel() == 1 and abs(high) == inf
            if isnan(largest) or (largest == inf and not bound):
                raise FitError(f"{what} holds NaN or infinity", "repair the checkpoint first")
            if largest > torch.finfo(dtype).max and not bound:
                raise FitError(f"{what} does not fit into {dtype}", WIDER)
        return tensor

    def _start(self, entry: AttentionPlan, key: str) -> Tensor:
        result = self._fits(module_path(self.source, entry.block))
        adapted = result.attention if result else {}  # what calibration data told of them
        return adapted.get(key, self._first_values(entry)[key])

    @property
    def roundings(self) -> dict[str, Rounding]:
        """Of tensors of structures that are stored in few bits, by name."""
        if self.plan.plain is not None:  # what is stored is made of several fits
            return {}
        fitted = (item for key, item in self.tensors.items() if key in self.group_of)
        return {item.key: item.rounding for item in fitted if item.rounding is not None}

    def block_of(self, entry: LayerPlan) -> str:
        """Name under which the fits of a layer are kept: its block's, or its own outside of all."""
        in_block = entry.kind != "embedding"
        return module_path(self.source, entry.block) if in_block else EMBEDDINGS

    def fit_of(self, entry: LayerPlan) -> FittedLayer:
        """Read the fit of a layer, with those that are kept with it."""
        result = self._fits(self.block_of(entry))
        assert result is not None  # all are by now
        return result.layers[entry.key]

    def fitted_parameters(self, entry: LayerPlan) -> Iterator[tuple[str, Tensor]]:
        """Pair the weight of a layer of a plain model, and its bias, as it has them, by name."""
        tensors = self.fit_of(entry).tensors
        names = (f"{tensor_prefix(entry.parts, index, 0)}w" for index in range(len(entry.parts)))
        fitted = [entry.as_stored(torch.cat([tensors[name] for name in names], -2))]
        if "bias" in tensors:
            fitted.append(tensors["bias"])
        return zip(parameter_names(self.source, entry), fitted, strict=True)

    def dtype_of(self, entry: LayerPlan) -> torch.dtype:
        """Dtype in which a layer is stored."""
        return self._cast(weight_keys(self.source, entry)[0])


def plain_tensors(
    source: SourceModel, parameters: Mapping[str, Tensor], dense: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Turn parameters of a model into what stores them, by the keys that the source has for it.

    Of those that are stored together with them `dense` gives the values.
    """
    stored: dict[str, Tensor] = {}
    for names in dict.fromkeys(map(source.keymap.stored_together, parameters)):
        values = {n: parameters[n] if n in parameters else dense(n) for n in names}
        stored |= source.keymap.as_stored(values)
    return stored


# What a conversion writes beside the weights.


def write_rest(
    folder: Path, source: SourceModel, manifest: Manifest, dtype: str | None
) -> Manifest:
    """Write everything but the weights; `config.json`, which makes it loadable, last.

    The manifest comes back with checksums and sizes of all files.
    """
    carry_files(source.folder, source.auxiliary_files(), folder)
    if not source.trust_remote_code:
        forget_code(folder)
    if manifest.plan.longest is not None:
        shorten_texts(folder, manifest.plan.longest)
    for stack in manifest.plan.depth.stacks if manifest.plan.depth else ():
        if "decoder" in stack.path.split("."):
            renumber_alignment(folder, stack.kept)
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


def check_written(folder: Path, outputs: Outputs) -> None:
    """Compare files with the fits of one block, and of one place of every other kind."""
    source, plan = outputs.source, outputs.plan
    if plan.changes_model:
        with unloadable():
            Artifact.open(folder)
    written = Reopened(folder, source.model_class, source.keymap.missing)
    store, expected = written.store, outputs.tensors
    read = {
        key: Stored(key, tuple(store.shape(key)), store.dtype(key), store.rounding(key))
        for key in store.keys()  # noqa: SIM118
    }
    wrong = {key for key in expected.keys() | read if expected.get(key) != read.get(key)}
    if wrong:
        raise refusal(f"{listed(wrong)} differ in name, shape or type from the plan")
    blocks = _compared_blocks(plan, source)
    prefixes = tuple(f"{block}." for block in blocks)
    for item in outputs.tensors.values():
        if item.key.startswith(prefixes) or item.key in outputs.tables:
            value = outputs.unfitted(item)
            if value is not None and not _same(store.tensor(item.key), item.read_back(value)):
                raise differs(item.key, "its values are others")
    entries = (*plan.embeddings[:1], *(entry for entry in plan.layers if entry.block in blocks))
    for group in outputs.groups:
        if group[0] not in entries:
            continue
        if plan.plain is None:
            _check_group(written, outputs, group)
            continue
        for entry in group:
            for name, fitted in outputs.fitted_parameters(entry):
                if not _same(written.tensor(name), fitted.to(outputs.dtype_of(entry))):
                    raise differs(name, "its values are others")


def _compared_blocks(plan: Plan, source: SourceModel) -> set[str]:
    """Names of blocks that hold every kind of layer, or one if no layer is rewritten."""
    blocks: set[str] = set()
    for kind in dict.fromkeys(entry.kind for entry in plan.layers):
        having = [entry.block for entry in plan.layers if entry.kind == kind]
        if not blocks & {*having}:
            blocks.add(mode(having))
    if not blocks & {entry.block for entry in plan.attention}:
        blocks |= {entry.block for entry in plan.attention[:1]}
    if not blocks:  # a plain model that lost blocks
        first = roles_of(source).blocks[:1]
        blocks = {source.keymap.checkpoint_prefix(block.name) for block in first}
    return blocks


def _check_group(written: Reopened, outputs: Outputs, group: Group) -> None:
    """Compare layers with those built from their fits in float64; owners of inputs come first."""
    generator, built = torch.Generator().manual_seed(0), dict[str, StructuredLinear]()
    for entry in group:
        built[entry.name] = expected = _built(outputs, entry, built.get(entry.input_of or ""))
        layer = written.layer(entry)
        if not entry.outputs_left:  # nothing to compare
            continue
        rows = torch.randn(ROWS, entry.inputs_left, generator=generator, dtype=torch.float64)
        exact, tensor = applied(expected, rows), applied(layer, rows)
        change, size = (exact - tensor).abs().max(), exact.abs().max()
        if not change <= EXACT * size:
            raise differs(entry.name, f"its outputs are off by {change / size:.1%}")
        bias = outputs.fit_of(entry).tensors.get("bias")
        if bias is not None and not _same(layer.bias, bias.to(outputs.dtype_of(entry))):
            raise differs(entry.name, "its bias is another")


def _built(
    outputs: Outputs, entry: LayerPlan, input_of: StructuredLinear | None
) -> StructuredLinear:
    """Build a layer from its fits, rounded as they are stored, in float64."""
    layer = StructuredLinear(
        entry.parts,
        input_of=input_of,
        readers=entry.readers,
        experts=entry.experts,
        reads=entry.reads,
        dtype=torch.float64,
    )
    lenders = {
        factors_module(bank): next(item for item in outputs.plan.layers if item.name == owner)
        for bank, owner in entry.bank_of.items()
    }
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            lender = lenders.get(name.partition(".")[0], entry)
            value = outputs.fit_of(lender).tensors[name]
            parameter.copy_(outputs.tensors[lender.stored_name(name)].read_back(value))
    return layer


def _same(read: Tensor | None, fitted: Tensor) -> bool:
    """Tell whether values are equal, NaN to NaN."""
    if read is None or read.shape != fitted.shape:
        return False
    return torch.equal(read.double().nan_to_num(), fitted.double().cpu().nan_to_num())
