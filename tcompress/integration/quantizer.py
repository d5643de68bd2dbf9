"""Makes `from_pretrained` build the structured layers that a checkpoint's plan names.

Transformers asks the registered quantizer before it loads weights. Ours replaces the planned
modules and steps aside after loading: what remains is an ordinary model that trains, casts, saves
and loads like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tcompress.artifact.format import (
    check_format_version,
    parse_attention,
    parse_forms,
    parse_layers,
)
from tcompress.artifact.verify import verify_headers
from tcompress.integration.attention import install_attention
from tcompress.integration.build import install_layers
from tcompress.integration.forms import install_forms
from tcompress.source.keymap import KeyMap
from tcompress.source.names import METHOD
from tcompress.structures.linear import StructuredLinear


class TCompressConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` section of a converted model's `config.json`."""

    def __init__(
        self, plan: Mapping[str, Any] | None = None, format_version: int = 1, **extra: Any
    ) -> None:
        self.quant_method = METHOD
        self.format_version = format_version
        self.plan = dict(plan or {})
        for name, value in extra.items():
            if name != "quant_method":
                setattr(self, name, value)


class TCompressQuantizer(HfQuantizer):  # type: ignore[misc]
    """Builds structured layers before the weights are loaded."""

    requires_calibration = True

    def is_serializable(self) -> bool:
        """Converted models save like others."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Converted models train like others."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Lets `Trainer` accept the model."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Structured layers trace without graph breaks."""
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuses formats that this version does not know."""
        check_format_version(self.quantization_config.format_version)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        keymap = KeyMap(model, ())
        # A part of the model, such as the encoder of an encoder-decoder, may be loaded alone.
        layers = parse_layers(self.quantization_config.plan)
        attention = parse_attention(self.quantization_config.plan)
        names = {entry.name for entry in layers} | {entry.name for entry in attention}
        needed = {name for name in names if keymap.runtime_name(name) is not None}
        files: Iterable[str] = kwargs.get("checkpoint_files") or ()
        verify_headers(layers, [str(file) for file in files], needed, attention)
        place: dict[str, Any] = {"dtype": kwargs.get("dtype"), "device": "meta"}
        install_layers(model, layers, keymap.runtime_name, **place)
        self._guards = {
            f"{keymap.runtime_name(entry.name)}.{entry.parameter}"
            for entry in layers
            if entry.name in needed
        }
        install_attention(model, attention, keymap.runtime_name, **place)
        forms = parse_forms(self.quantization_config.plan)
        install_forms(model, forms, keymap.runtime_name, **place)
        for part in model.modules():
            if hasattr(part, "_init_weights"):
                part._init_weights = partial(_initialise, part._init_weights)
        return model

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        """Keeps Transformers from converting the empty tensors under dense names."""
        updated = super().update_weight_conversions(weight_conversions, model)
        return _sparing(updated, getattr(self, "_guards", ()))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        # With the quantizer attached, saving, casting and training take special paths that an
        # ordinary model does not need.
        model.is_quantized = False
        for part in model.modules():
            vars(part).pop("_init_weights", None)
        for name in ("hf_quantizer", "quantization_method"):
            if hasattr(model, name):
                delattr(model, name)
        return model


def _initialise(original: Callable[[Any], None], module: Any) -> None:
    """Draws what a checkpoint lacks; parents see structured layers with weights of full shape.

    Some read the shape of a child's weight, or a part of it. The stand-in counts as loaded.
    """
    layers = [child for child in module.children() if isinstance(child, StructuredLinear)]
    guards = [layer._buffers.get("weight") for layer in layers]
    for layer, guard in zip(layers, guards, strict=True):
        if guard is not None:
            whole = torch.empty(layer.out_features, layer.in_features, device="meta")
            whole._is_hf_initialized = True  # type: ignore[attr-defined]
            layer._buffers["weight"] = whole
    try:
        original(module)
    finally:
        for layer, guard in zip(layers, guards, strict=True):
            if guard is not None:
                layer._buffers["weight"] = guard


def _sparing(conversions: Iterable[Any], names: Collection[str]) -> list[Any]:
    """Make a model's conversions let empty tensors under dense names through.

    Args:
        conversions: What Transformers does on loading, and in reverse on saving.
        names: Runtime names of the empty tensors.
    """
    return [
        _SparingConverter.of(item, names) if names and isinstance(item, WeightConverter) else item
        for item in conversions
    ]


class _SparingConverter(WeightConverter):  # type: ignore[misc]
    """A converter that lets empty tensors under dense names through, on loading and on saving."""

    __slots__ = ("spared",)

    @classmethod
    def of(cls, converter: WeightConverter, spared: Collection[str]) -> _SparingConverter:
        """Makes one of another.

        Args:
            converter: The other.
            spared: Runtime names of the empty tensors.
        """
        old = converter._original_source_patterns, converter._original_target_patterns
        made = cls(*(list(patterns) for patterns in old), operations=converter.operations)
        made.scope_prefix, made.base_model_prefix = (
            converter.scope_prefix,
            converter.base_model_prefix,
        )
        made.spared = spared
        return made

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Renames a name, unless it is spared; it may lack, or gain, the base model's prefix."""
        key = f".{source_key}"
        for name in self.spared:
            if key.endswith(f".{name}") or f".{name}".endswith(key):
                return source_key, None
        return super().rename_source_key(source_key)  # type: ignore[no-any-return]

    def copy(self, *args: Any, **kwargs: Any) -> _SparingConverter:
        """Makes one with other patterns, such as the reverse ones."""
        made: _SparingConverter = super().copy(*args, **kwargs)
        made.spared = self.spared
        return made


def register() -> None:
    """Registers the format with Transformers, once."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(TCompressConfig)
        register_quantizer(METHOD)(TCompressQuantizer)
