"""Makes `from_pretrained` build the structured layers that a checkpoint's plan names.

Transformers asks the registered quantizer before it loads weights. Ours replaces the planned
modules and steps aside after loading: what remains is an ordinary model that trains, casts, saves
and loads like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tcompress.artifact.format import AGAIN, Rebuilt, parse_plan, section_digest, verify_shapes
from tcompress.artifact.manifest import read_manifest
from tcompress.errors import ArtifactError, SourceError
from tcompress.hf.build import install_attention, install_forms, install_layers
from tcompress.linalg.rounding import read_header, unpack
from tcompress.models.keymap import KeyMap
from tcompress.models.names import CALLED, METHOD, METHODS, WEIGHTS, is_only_rounded
from tcompress.models.store import SafetensorsShard
from tcompress.structures.modules.linear import StructuredLinear


class SparingConverter(WeightConverter):  # type: ignore[misc]
    """A converter that lets empty tensors under dense names through, on loading and on saving."""

    __slots__ = ("spared",)

    @classmethod
    def of(cls, converter: WeightConverter, spared: Collection[str]) -> SparingConverter:
        """Makes one of another, given the runtime names of the empty tensors."""
        old = converter._original_source_patterns, converter._original_target_patterns
        made = cls(*map(list, old), operations=converter.operations)
        made.scope_prefix = converter.scope_prefix
        made.base_model_prefix = converter.base_model_prefix
        made.spared = spared
        return made

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Renames a name, unless it is spared; it may lack, or gain, the base model's prefix."""
        key = f".{source_key}"
        for name in self.spared:
            if key.endswith(f".{name}") or f".{name}".endswith(key):
                return source_key, None
        return super().rename_source_key(source_key)  # type: ignore[no-any-return]

    def copy(self, *args: Any, **kwargs: Any) -> SparingConverter:
        made: SparingConverter = super().copy(*args, **kwargs)
        made.spared = self.spared
        return made


class _Unpack(ConversionOps):  # type: ignore[misc]
    """Unpacking of tensors that are stored in fewer bits, before anything else is done to them."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.shapes: dict[int, tuple[int, ...]] = {}  # by bytes, for devices without values

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {
            key: list(map(self._whole, items)) if isinstance(items, list) else self._whole(items)
            for key, items in input_dict.items()
        }

    def _whole(self, tensor: Any) -> Any:
        if tensor.dtype != torch.uint8 or tensor.ndim != 1:
            return tensor
        if tensor.is_meta:
            return torch.empty(self.shapes[len(tensor)], dtype=self.dtype, device="meta")
        return unpack(tensor).to(self.dtype)


class TCompressConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` section of a converted model's `config.json`."""

    def __init__(self, **section: Any) -> None:
        self.__dict__.update(section, quant_method=METHOD)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "quant_method": CALLED}


class TCompressQuantizer(HfQuantizer):  # type: ignore[misc]
    """Builds structured layers before the weights are loaded."""

    requires_calibration = True
    _check: Callable[[], None] | None = None

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuses to leave packed tensors on the disk: modules would read them as they are."""
        places = device_map.values() if isinstance(device_map, Mapping) else ()
        if "disk" in places and hasattr(self.quantization_config, "storage"):
            raise ArtifactError(
                "tensors in fewer bits are unpacked when they are loaded, and cannot stay on the "
                "disk, where `device_map` puts some",
                "give more memory or other devices, or load a dense copy: "
                "`tcompress export MODEL --to dense`",
            )

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Keep packed tensors as they are; register that they are unpacked when they are read."""
        shape = param.get_shape() if hasattr(param, "get_shape") else param.shape
        kind = param.get_dtype() if hasattr(param, "get_dtype") else param.dtype
        bytes_ = len(shape) == 1 and kind in ("U8", torch.uint8)
        header = read_header(param, shape[0]) if bytes_ else None
        if header is None:
            return super().get_new_dtype(converter, param, dtype)
        if not isinstance(converter, WeightConverter):
            converter.quantization_operation = operation = _Unpack(dtype)
        elif isinstance(converter.operations[0], _Unpack):
            operation = converter.operations[0]
        else:
            operation = _Unpack(dtype)
            converter.operations.insert(0, operation)
        operation.shapes[shape[0]] = header.shape
        return None

    # It trains, with `Trainer` too, and compiles like other models.
    is_trainable = is_qat_trainable = is_compileable = True

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove what stops those who have not imported us, before files are looked for."""
        vars(config).pop(WEIGHTS, None)
        return super().update_attn_implementation(config)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        files = [Path(file) for file in kwargs.get("checkpoint_files") or ()]
        folder = files[0].parent if files else None
        manifest = None if folder is None else read_manifest(folder)
        section = vars(self.quantization_config)
        plan = parse_plan(section, None if manifest is None else manifest.rebuilt)
        keymap = KeyMap(model, ())
        headers = [SafetensorsShard(file) for file in files if file.suffix == ".safetensors"]
        shapes = {name: info.shape for file in headers for name, info in file.infos.items()}
        if folder is not None and shapes:
            stored = plan.renamed(shapes)
            if not _found(plan, keymap):  # a class may hold the model under a name of its own
                plan = stored
            # A part of the model, such as the encoder of an encoder-decoder, may be loaded alone.
            loaded, pairs = _found(plan, keymap), zip(plan.entries, stored.entries, strict=True)
            needed = [entry for named, entry in pairs if named.name in loaded]
            verify_shapes(needed, shapes, stored.entries)
            check = partial(_require_all, folder, section, plan, shapes, own=manifest is not None)
            self._check = partial(check, trusted=model.is_remote_code())
        _install(model, plan, keymap, dtype=kwargs.get("dtype"))
        paths = ((keymap.runtime_name(entry.name), entry.parameter) for entry in plan.layers)
        self._guards = {f"{path}.{parameter}" for path, parameter in paths if path is not None}
        for part in model.modules():
            if hasattr(part, "_init_weights"):
                part._init_weights = partial(_initialise, part._init_weights)
        return model

    def get_weight_conversions(self) -> list[Any]:
        """Compares the weights with the model that they were saved from; converts nothing.

        Transformers asks once it has left the contexts in which it builds models without ties.
        """
        check, self._check = self._check, None
        if check is not None:
            check()
        return []

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """Keeps Transformers from converting the empty tensors under dense names."""
        updated = super().update_weight_conversions(weight_conversions, model)
        spared = getattr(self, "_guards", None)
        if not spared:
            return updated
        return [
            SparingConverter.of(item, spared) if isinstance(item, WeightConverter) else item
            for item in updated
        ]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        # With the quantizer attached, saving, casting and training take special paths that an
        # ordinary model does not need.
        model.is_quantized = False
        self._forget_storage(model.config)
        for part in model.modules():
            vars(part).pop("_init_weights", None)
        names = [
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, StructuredLinear) and not module.experts
        ]
        conversions = getattr(model, "_weight_conversions", None) or ()
        model._weight_conversions = [item for item in conversions if not _fuses(item, names)]
        for name in ("hf_quantizer", "quantization_method"):
            vars(model).pop(name, None)
        return model

    @staticmethod
    def _forget_storage(config: Any) -> None:
        """Remove fewer bits from the config: the model has all of them, and is saved with them."""
        section = getattr(config, "quantization_config", None)
        if not isinstance(section, TCompressConfig) or not hasattr(section, "storage"):
            return
        if is_only_rounded(section.to_dict()):
            del config.quantization_config
            return
        del section.storage
        section.digest = section_digest(vars(section))


def _fuses(item: Any, names: Collection[str]) -> bool:
    if not isinstance(item, WeightConverter):
        return False
    back = item.reverse_transform()
    return any(WeightConverter.rename_source_key(back, name)[1] for name in names)


def _initialise(original: Callable[[Any], None], module: Any) -> None:
    """Initialises what a checkpoint lacks; structured layers then have weights of full shape.

    Some parents read the shape of a child's weight, or a part of it. The stand-in counts as loaded.
    """
    children = (child for child in module.children() if isinstance(child, StructuredLinear))
    guards = {child: child._buffers.get("weight") for child in children}
    guards = {child: guard for child, guard in guards.items() if guard is not None}
    for layer in guards:
        whole = torch.empty(layer.out_features, layer.in_features, device="meta")
        whole._is_hf_initialized = True  # type: ignore[attr-defined]
        layer._buffers["weight"] = whole
    try:
        original(module)
    finally:
        for layer, guard in guards.items():
            layer._buffers["weight"] = guard


def _found(plan: Rebuilt, keymap: KeyMap) -> set[str]:
    return {item.name for item in plan.entries if keymap.runtime_name(item.name) is not None}


def _install(model: Any, plan: Rebuilt, keymap: KeyMap, dtype: Any = None) -> None:
    place: dict[str, Any] = {"dtype": dtype, "device": "meta"}
    install_attention(model, plan.attention, keymap.runtime_name, **place)
    install_layers(model, plan.layers, keymap.runtime_name, **place)
    install_forms(model, plan.forms, keymap.runtime_name, **place)


def _require_all(
    folder: Path,
    section: Mapping[str, Any],
    plan: Rebuilt,
    stored: Mapping[str, tuple[int, ...]],
    *,
    own: bool,
    trusted: bool,
) -> None:
    """Refuses weights that lack tensors which the class that they were saved from has.

    Transformers would draw them at random, as it has to for a new head, and only print a note.
    What a user's own class has is not known, and poolers are often left out on purpose.
    """
    from tcompress.models.model import SourceModel  # Transformers may be half loaded above

    try:
        source = SourceModel.described(folder, stored, trusted)
    except SourceError:
        return  # Transformers has no such class
    kind = source.model_class.__name__
    stored_as = section.get("stored_as")
    if kind not in (source.config.architectures or ()) and not (own and kind == stored_as):
        return
    # Of older artefacts nothing says which head is not there on purpose.
    known = "digest" in section
    if not known or stored_as:
        source = source.as_stored()
    model = source.meta_model()
    _install(model, plan, KeyMap(model, ()))
    keymap = KeyMap(model, stored)
    absent = set(keymap.missing) - set(section.get("absent") or ())
    whole = own and known  # then poolers that are not there are known too
    problems = [f"`{name}` is missing" for name in absent if whole or "pooler" not in name]
    for name, tensor in model.state_dict().items() if known else ():
        if keymap.has(name) and keymap.sources(name).converter is None:
            key = keymap.sources(name).keys[0]
            if stored[key] != tuple(tensor.shape):
                sizes = f"{list(stored[key])}, by `config.json` {list(tensor.shape)}"
                problems.append(f"`{key}` has shape {sizes}")
    if problems:
        more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ArtifactError(
            f"the weights in `{folder}` are not those of a `{type(model).__name__}`: "
            f"{', '.join(sorted(problems)[:8])}{more}",
            AGAIN
            if own
            else "copy the folder again; if modules were left out on purpose before it was saved, "
            "name a class of your own as `architectures` in `config.json`",
        )


if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    for _name in METHODS:
        register_quantization_config(_name)(TCompressConfig)
    register_quantizer(METHOD)(TCompressQuantizer)
