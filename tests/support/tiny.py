"""Tiny models of every supported family, with inputs that suit them.

    model = build("llama")
    logits = model(**TINY["llama"].inputs(batch=2, length=8, seed=0)).logits

Dimensions are multiples of 4; the models have two layers (per tower) and seeded random weights,
biases and norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tcompress.own_models import configs, grid, text

VOCAB, IMAGE, MELS, FRAMES = 100, 16, 8, 32
VOLUME, SERIES, HORIZON = (8, 8, 4), (3, 16), 4  # series: variables, time steps
FIRST_WORD = 4  # token ids below are special

_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_TEXT = {**_TOKENS, **_SIZES, "max_position_embeddings": 64}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_VISION = {**_SIZES, "image_size": IMAGE, "patch_size": 4}
_SEQ2SEQ = {
    **_TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}
_T5 = {
    **_TOKENS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_WHISPER = {**_SEQ2SEQ, "num_mel_bins": MELS, "max_source_positions": FRAMES // 2}


@dataclass(frozen=True)
class TinyModel:
    """One tiny model.

    Attributes:
        config: Name of the config class, see `named`.
        model: Name of the model class.
        options: Arguments of the config.
        needs: Inputs of the forward pass, by kind: `text`, `decoder`, `image`, `audio`, `volume`,
            `series`.
    """

    config: str
    model: str
    options: Mapping[str, Any]
    needs: tuple[str, ...] = ("text",)

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model in evaluation mode with weights that depend on the seed only."""
        config = named(self.config)(**self.options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # some single vectors keep part of their random start
            model: nn.Module = named(self.model)(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim > 1:
                    parameter.copy_(noise * parameter.shape[-1] ** -0.5)
                else:  # biases start at zero, norms where the family has its identity
                    parameter.add_(noise, alpha=0.1)
        return model.eval()

    def inputs(self, batch: int, length: int, seed: int) -> dict[str, Tensor]:
        """Draw inputs; every second text is padded on the right."""
        generator = torch.Generator().manual_seed(seed)
        inputs: dict[str, Tensor] = {}
        for need in self.needs:
            inputs.update(_draw(need, batch, length, generator))
        return inputs


def named(name: str) -> Any:
    """Find a class of Transformers, or of the hosts that come with tcompress."""
    return next(
        found
        for home in (transformers, configs, text, grid)
        if (found := getattr(home, name, None))
    )


def build(family: str, seed: int = 0) -> nn.Module:
    """Build the tiny model of a family, see `TinyModel.build`."""
    return TINY[family].build(seed)


def _draw(need: str, batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    if need == "image":
        return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE, generator=generator)}
    if need == "audio":
        return {"input_features": torch.randn(batch, MELS, FRAMES, generator=generator)}
    if need == "volume":
        return {"grid_values": torch.rand(batch, 1, *VOLUME, generator=generator)}
    if need == "series":
        return {"past_values": torch.randn(batch, *SERIES[::-1], generator=generator)}
    ids = torch.randint(FIRST_WORD, VOCAB, (batch, length), generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1::2, length - length // 4 :] = 0
    prefix = "decoder_" if need == "decoder" else ""
    return {f"{prefix}input_ids": ids * mask, f"{prefix}attention_mask": mask}


TINY: dict[str, TinyModel] = {
    "bert": TinyModel("BertConfig", "BertForMaskedLM", _TEXT),
    "roberta": TinyModel("RobertaConfig", "RobertaForMaskedLM", _TEXT),
    "distilbert": TinyModel(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {**_TOKENS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "electra": TinyModel("ElectraConfig", "ElectraForMaskedLM", {**_TEXT, "embedding_size": 16}),
    "mpnet": TinyModel("MPNetConfig", "MPNetForMaskedLM", {**_TEXT, "pad_token_id": 1}),
    "deberta-v2": TinyModel(
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {
            **_TEXT,
            "relative_attention": True,
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
        },
    ),
    "modernbert": TinyModel(
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**_TEXT, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
    ),
    "gpt2": TinyModel(
        "GPT2Config",
        "GPT2LMHeadModel",
        {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64, "n_positions": 64},
    ),
    "gpt_neox": TinyModel("GPTNeoXConfig", "GPTNeoXForCausalLM", _TEXT),
    "opt": TinyModel(
        "OPTConfig", "OPTForCausalLM", {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 16}
    ),
    "llama": TinyModel("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "mistral": TinyModel("MistralConfig", "MistralForCausalLM", _GROUPED),
    "qwen3": TinyModel("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 16}),
    "gemma3": TinyModel("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GROUPED, "head_dim": 16}),
    "phi3": TinyModel("Phi3Config", "Phi3ForCausalLM", _GROUPED),
    "mixtral": TinyModel(
        "MixtralConfig", "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}
    ),
    # The first block is dense, the second has experts.
    "qwen3_moe": TinyModel(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **_GROUPED,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
    ),
    "t5": TinyModel("T5Config", "T5ForConditionalGeneration", _T5, ("text", "decoder")),
    "t5-gated": TinyModel(
        "T5Config",
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu"},
        ("text", "decoder"),
    ),
    "bart": TinyModel("BartConfig", "BartForConditionalGeneration", _SEQ2SEQ, ("text", "decoder")),
    "vit": TinyModel("ViTConfig", "ViTForImageClassification", _VISION, ("image",)),
    "deit": TinyModel("DeiTConfig", "DeiTForImageClassification", _VISION, ("image",)),
    "clip": TinyModel(
        "CLIPConfig",
        "CLIPModel",
        {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 16},
        ("text", "image"),
    ),
    "clip_text_model": TinyModel("CLIPTextConfig", "CLIPTextModel", _TEXT),
    "clip_vision_model": TinyModel("CLIPVisionConfig", "CLIPVisionModel", _VISION, ("image",)),
    "whisper": TinyModel(
        "WhisperConfig", "WhisperForConditionalGeneration", _WHISPER, ("audio", "decoder")
    ),
    "tcompress_text": TinyModel(
        "TCompressTextConfig",
        "TCompressTextForSequenceClassification",
        {**_TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64},
    ),
    "tcompress_grid": TinyModel(
        "TCompressGridConfig",
        "TCompressGridForImageClassification",
        {**_SIZES, "input_size": VOLUME, "patch_size": (2, 4, 2)},
        ("volume",),
    ),
    "tcompress_grid-series": TinyModel(
        "TCompressGridConfig",
        "TCompressGridForForecasting",
        {**_SIZES, "input_size": SERIES, "patch_size": (1, 4), "horizon": HORIZON},
        ("series",),
    ),
}

_ROUTED = {
    **_GROUPED,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
}
_LATENT = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}

# One model of every layout of experts, by what is special about it.
EXPERTS: dict[str, TinyModel] = {
    "chunked": TinyModel("MixtralConfig", "MixtralForCausalLM", _ROUTED),
    "transposed, biased, interleaved": TinyModel(
        "GptOssConfig", "GptOssForCausalLM", {**_ROUTED, "head_dim": 16}
    ),
    "renamed": TinyModel("GraniteMoeConfig", "GraniteMoeForCausalLM", _ROUTED),
    "a module for each weight": TinyModel(
        "JetMoeConfig", "JetMoeForCausalLM", {**_ROUTED, "kv_channels": 8}
    ),
    "one product for all": TinyModel(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**_ROUTED, "intermediate_size_mlp": 64, "head_dim": 8, "num_experts_per_tok": 1},
    ),
    "shared expert": TinyModel(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_ROUTED, "shared_expert_intermediate_size": 32}
    ),
    "latent attention": TinyModel("DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT),
    "indexer": TinyModel(
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {**_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
    ),
    "list": TinyModel(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        {**_T5, "num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        ("text", "decoder"),
    ),
    "list, two experts for a token": TinyModel(
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        {
            **_SEQ2SEQ,
            "num_experts": 4,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "max_position_embeddings": 64,
        },
        ("text", "decoder"),
    ),
}
