"""A tiny model of any family that the installed Transformers knows.

    model, inputs = tiny("bamba")

Sizes are read off the fields of the config class by their names; where those do not go together,
all widths are divided by one number instead. Weights of linear layers and experts are products of
factors of rank 2, from a seed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from tcompress.roles.projections import is_pointwise

RANK, VOCAB, WIDTH, HEADS, HEAD = 2, 128, 64, 4, 16
LARGEST = 12_000_000

# Which of a family's classes is built: the first that it has.
_KINDS = [
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "OBJECT_DETECTION",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "RNNT",
    "TDT",
    "SEQUENCE_CLASSIFICATION",
    "RETRIEVAL",
    "TIME_SERIES_PREDICTION",
]

# Options where the rules of names do not lead to a model.
_RESNET = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 64, 64],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
    },
}
_SERIES = {"prediction_length": 8, "context_length": 16}
_WAVE = {
    "conv_dim": [32, 32],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_feat_extract_layers": 2,
    "vocab_size": 32,
    "num_conv_pos_embedding_groups": 4,
}
_ZAMBA = {"layer_types": ["mamba", "hybrid"]}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("detr", "conditional_detr", "dab-detr", "table-transformer"), _RESNET),
    "deformable_detr": {
        **_RESNET,
        "backbone_config": {
            **_RESNET["backbone_config"],
            "out_features": ["stage2", "stage3", "stage4"],
        },
        "num_feature_levels": 3,
    },
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _SERIES),
    **dict.fromkeys(
        (
            "wav2vec2",
            "wavlm",
            "hubert",
            "unispeech",
            "unispeech-sat",
            "sew",
            "sew-d",
            "data2vec-audio",
            "wav2vec2-conformer",
            "speecht5",
            "wav2vec2-bert",
        ),
        _WAVE,
    ),
    **dict.fromkeys(("zamba", "zamba2"), _ZAMBA),
}

_SPECIAL = re.compile(r"(token_id|token_index|_idx|_id|_offset)$")
_LAYERS = re.compile(
    r"(^|_)(n_layers?|num_layers|layers|depth|depths|num_blocks|num_encoder_blocks|n_blocks)$"
    r"|num_.*layers|.*_layers$|^num_hidden_.*|blocks_per_stage|num_block_repeats"
)
_NO_LAYERS = re.compile(r"feat_extract|_source_|upsampl|shared_layers|lstm|conv_layers")
_HEADS = re.compile(r"heads?$|heads_per_stage$|^n_heads?_|num_heads|attention_heads")
_GROUPS = re.compile(r"^(n_group|topk_group|num_expert_group|n_groups|num_groups|mamba_n_groups)$")
_EXPERTS = re.compile(
    r"(n_routed|num_local|num|n|moe_num|ffn_num|num_routed)_experts$|moe_layer_num"
)
_TOP = re.compile(r"experts_per_tok|top_?k$|num_selected|moe_k$|experts_per_token")
_NO_WIDTH = re.compile(
    r"patch|kernel|stride|window|image_size|crop|chunk|context|ratio|frames|pool|num_queries"
    r"|sampling|spatial|temporal|input_size|position|buckets|type_vocab|in_channels|num_channels"
    r"|audio_channels|feat_sizes|grid|levels|scale|factor|expan|conv_dim|query_dim|group"
    r"|length|interval|downsample|codebook|memory_size|cache"
)
_WIDTH = re.compile(
    r"size|dim|d_model|d_ff|d_kv|d_inner|n_embd|n_inner|units|channels|rank|features|filters|width"
    r"|hidden|embed"
)
_HEAD_WIDTH = re.compile(r"head_dim|head_size|d_kv|dim_head|rotary_dim|headdim|d_head|kv_channels")
_INNER = re.compile(r"intermediate|ffn|d_ff|inner|mlp_dim|linear_units|hidden_dim$|feedforward")


def families() -> list[str]:
    """Lists the model types that have a config class of their own and a model."""
    seen: set[str] = set()
    found = []
    for name in sorted(CONFIG_MAPPING_NAMES):
        if CONFIG_MAPPING_NAMES[name] not in seen:
            seen.add(CONFIG_MAPPING_NAMES[name])
            found.append(name)
    return found


def class_of(family: str) -> type[Any] | None:
    """Finds the model class of a family, with a head where there is one."""
    kind = CONFIG_MAPPING[family]
    mappings = [f"MODEL_FOR_{name}_MAPPING_NAMES" for name in _KINDS] + ["MODEL_MAPPING_NAMES"]
    mappings += [key for key in vars(modeling_auto) if key.endswith("MAPPING_NAMES")]
    for key in mappings:
        name = getattr(modeling_auto, key).get(family)
        name = name[0] if isinstance(name, tuple | list) else name
        model = getattr(transformers, name, None) if name else None
        if model is not None and getattr(model, "config_class", None) is kind:
            return model
    module = kind.__module__.replace("configuration_", "modeling_")
    with contextlib.suppress(ImportError):
        members = vars(importlib.import_module(module)).values()
        for model in members:
            if (
                isinstance(model, type)
                and getattr(transformers, model.__name__, None) is model
                and issubclass(model, transformers.PreTrainedModel)
                and model.__dict__.get("config_class") is kind
                and not model.__name__.endswith("PreTrainedModel")
            ):
                return model
    return None


def configs(family: str) -> Iterator[Any]:
    """Yields configs of a family, the smallest first; later ones are for where it fails."""
    kind = CONFIG_MAPPING[family]
    default = None
    with contextlib.suppress(Exception):
        default = kind()
    own = OVERRIDES.get(family, {})
    for divisor in (0, 32, 16, 8, 4):
        try:
            changed = {} if default is None else _changed(default, divisor, {})
            yield kind(**_merged(changed, own))
        except Exception as error:
            _last_error[family] = error


_last_error: dict[str, Exception] = {}


def build(family: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any] | None]:
    """Builds a family's tiny model in evaluation mode, and inputs that it takes.

    Raises:
        LookupError: The family has no model class.
        ValueError: No tiny config of it builds, or all are too large.
    """
    kind = class_of(family)
    if kind is None:
        raise LookupError("no model class")
    first = None
    for config in configs(family):
        try:
            model = _model(kind, config, seed)
        except Exception as error:
            _last_error[family] = error
            continue
        if model is None:
            _last_error[family] = ValueError(f"more than {LARGEST:,} parameters")
            continue
        inputs = fitting_inputs(model)
        if inputs is not None:
            return model, inputs
        first = first or model
    if first is None:
        raise ValueError(f"no tiny config builds: {_last_error.get(family)}")
    return first, None


def _model(kind: Any, config: Any, seed: int) -> nn.Module | None:
    from copy import deepcopy

    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(deepcopy(config)).parameters())
    if size > LARGEST:
        return None
    torch.manual_seed(seed)
    model: nn.Module = kind._from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                _draw(module, name, parameter, generator)
    model.tie_weights()
    return model


def _draw(module: nn.Module, name: str, weight: nn.Parameter, generator: torch.Generator) -> None:
    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    linear = (isinstance(module, nn.Linear | Conv1D) or is_pointwise(module)) and name == "weight"
    stacked = weight.ndim == 3 and min(weight.shape) > 1 and not hasattr(module, "kernel_size")
    if (linear or stacked) and weight.numel():
        shape = weight.shape if not is_pointwise(module) else weight.shape[:2]
        *lead, rows, columns = shape
        drawn = noise(*lead, rows, RANK) @ noise(*lead, RANK, columns)
        weight.copy_(drawn.view(weight.shape))
        weight.mul_((RANK * max(rows, columns)) ** -0.5)
    elif weight.ndim <= 1:
        weight.add_(0.05 * torch.randn(weight.shape, generator=generator))


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {**base, **over}
    for key in base.keys() & over.keys():
        if isinstance(base[key], dict) and isinstance(over[key], dict):
            both[key] = _merged(base[key], over[key])
    return both


def _changed(config: Any, divisor: int, ids: dict[str, int]) -> dict[str, Any]:
    """Gives the options that make a config tiny; sub-configs too."""
    accepted = set(inspect.signature(type(config).__init__).parameters)
    out: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            out[name] = _changed(value, divisor, ids)
            out[name].setdefault("model_type", value.model_type)
        elif name in accepted or "kwargs" not in accepted or _WIDTH.search(name):
            small = _small(name, value, divisor, ids, config)
            if small is not None and small != value:
                out[name] = small
    return out


def _small(name: str, value: Any, divisor: int, ids: dict[str, int], config: Any) -> Any:
    """Gives the tiny value of one field, or None to leave it."""
    if isinstance(value, bool) or name.startswith("_") or name in ("id2label", "label2id"):
        return None
    if isinstance(value, list | tuple):
        if len(value) > 2 and len(value) == _depth(config):
            return type(value)(_two(list(value)))
        if not value or not all(isinstance(item, int) for item in value):
            return None
        return type(value)(_small_list(name, list(value), divisor))
    if not isinstance(value, int):
        return None
    if _SPECIAL.search(name):
        if value < VOCAB - 40:
            return None
        return ids.setdefault(name, VOCAB - 1 - len(ids) % 38)
    if name.startswith("vocab_size") or name.endswith("vocab_size"):
        return min(value, VOCAB) if "type" not in name else None
    if _LAYERS.search(name) and not _NO_LAYERS.search(name):
        return min(value, 2)
    if _EXPERTS.search(name):
        return min(value, 4)
    if _TOP.search(name):
        return min(value, 2)
    if _GROUPS.search(name):
        return min(value, 2) if divisor == 0 else None
    if name == "first_k_dense_replace":
        return min(value, 1)
    if _HEADS.search(name) and not _HEAD_WIDTH.search(name):
        return _few_heads(name, value, config) if divisor == 0 else None
    if name in ("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions"):
        return min(value, 256)
    if _NO_WIDTH.search(name) or not _WIDTH.search(name) or value < 16:
        return min(value, 64) if name in ("image_size", "num_queries") else None
    if divisor:
        return max(value // divisor, 4)
    if _HEAD_WIDTH.search(name):
        return HEAD
    if _INNER.search(name):
        return 2 * WIDTH
    return 32 if "rank" in name else WIDTH


def _depth(config: Any) -> int | None:
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    return None


def _two(items: list[Any]) -> list[Any]:
    """Gives two items of a list with one per layer, two kinds if there are."""
    other = next((item for item in items if item != items[0]), items[1])
    return [items[0], other]


def _few_heads(name: str, value: int, config: Any) -> int:
    if "key_value" in name or "kv" in name:
        whole = getattr(config, "num_attention_heads", None)
        return min(value, HEADS if whole == value else 2)
    return min(value, HEADS)


def _small_list(name: str, value: list[int], divisor: int) -> list[int]:
    if _LAYERS.search(name) and not _NO_LAYERS.search(name):
        return [min(item, 2) for item in value]
    if not _WIDTH.search(name) or _NO_WIDTH.search(name) or min(value) < 16:
        return value
    by = divisor or max(min(value) // 16, 1)
    return [max(item // by, 4) for item in value]


def _find(config: Any, *names: str) -> Any:
    """Gives the first field of such a name, in the config or in one below it."""
    for name in names:
        if isinstance(getattr(config, name, None), int | list | tuple):
            return getattr(config, name)
    for part in vars(config).values():
        if isinstance(part, transformers.PreTrainedConfig):
            found = _find(part, *names)
            if found is not None:
                return found
    return None


def _candidates(model: Any) -> Iterator[dict[str, Any]]:
    config = model.config
    wanted = set(inspect.signature(model.forward).parameters)
    ids = torch.arange(4, 20).view(2, 8)
    size = _find(config, "image_size") or 64
    size = size if isinstance(size, int) else int(size[0])
    channels = _find(config, "num_channels", "in_channels") or 3
    channels = channels if isinstance(channels, int) else 3
    mels = _find(config, "num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel")
    mels = mels if isinstance(mels, int) else 80
    frames = 2 * (_find(config, "max_source_positions") or 50)
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    text = {"input_ids": ids} if "input_ids" in wanted else {}
    if "decoder_input_ids" in wanted:
        text["decoder_input_ids"] = ids
    if "bbox" in wanted:
        corners = torch.randint(0, 500, (2, 8, 2), generator=generator)
        sizes = torch.randint(1, 500, (2, 8, 2), generator=generator)
        text["bbox"] = torch.cat([corners, corners + sizes], -1)
    steps = _find(config, "context_length", "prediction_length") or 32
    images = [noise(2, channels, size, size)]
    images += [noise(2, channels, other, other) for other in (64, 128, 224) if other != size]
    videos = [noise(2, _find(config, "num_frames") or 4, channels, size, size)]
    kinds: dict[str, list[Tensor]] = {
        "pixel_values": images + videos,
        "pixel_values_videos": videos,
        "input_features": [noise(2, mels, frames), noise(2, frames, mels), noise(2, 64, 160)],
        "input_values": [
            noise(2, 4000),
            noise(2, 1, 4000),
            noise(2, frames, mels),
            noise(2, 1024, mels),
        ],
        "audio_values": [noise(2, 1, 4000)],
        "past_values": [noise(2, steps), noise(2, steps, _find(config, "num_input_channels") or 1)],
        "inputs_embeds": [noise(2, 8, _find(config, "hidden_size", "d_model") or WIDTH)],
        "inputs": [noise(2, 8, WIDTH)],
        "hidden_states": [noise(2, 8, _find(config, "hidden_size") or WIDTH)],
    }
    if text:
        yield text
    for name, values in kinds.items():
        if name in wanted and name != "inputs_embeds":
            for value in values:
                yield {name: value, **text}
                if text:
                    yield {name: value}
    if "pixel_values" in wanted and "input_features" in wanted:
        yield {**text, "pixel_values": images[0], "input_features": kinds["input_features"][0]}
    if "inputs_embeds" in wanted:
        yield {"inputs_embeds": kinds["inputs_embeds"][0]}


def fitting_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Gives inputs with which the model's forward pass gives finite numbers, if any do."""
    for inputs in _candidates(model):
        with contextlib.suppress(Exception):
            found = outputs(model, inputs)
            if found and all(bool(torch.isfinite(value).all()) for value in found[:1]):
                return inputs
    return None


def outputs(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Runs the model; gives the tensors of its output that are numbers, in order."""
    torch.manual_seed(0)
    with torch.no_grad():
        found = model(**inputs)
    return list(_floats(found))


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)
