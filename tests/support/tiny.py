"""Tiny models of every supported family, with inputs that suit them.

    model = build("llama")
    logits = model(**TINY["llama"].inputs(batch=2, length=8, seed=0)).logits

Dimensions are multiples of 4; the models have two layers (per tower) and seeded random weights,
biases and norms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tcompress.own_models import configs, grid, tam, text

VOCAB, IMAGE, MELS, FRAMES = 100, 16, 8, 32
VOLUME, SERIES, HORIZON = (8, 8, 4), (3, 16), 4  # series: variables, time steps
FIRST_WORD = 4  # token ids below are special
_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 64}
_TEXT = {**_TOKENS, **_SIZES, "max_position_embeddings": 64}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_VISION = {**_SIZES, "image_size": IMAGE, "patch_size": 4}
_SEQ2SEQ = {
    **_TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "decoder_start_token_id": 1,
}  # fmt: skip
_T5 = {
    **_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
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

    def build(self, seed: int = 0) -> Any:
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
        for home in (transformers, configs, text, grid, tam)
        if (found := getattr(home, name, None))
    )


def build(family: str, seed: int = 0) -> Any:
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


def _of(stem: str, head: str, options: Mapping[str, Any], *needs: str) -> TinyModel:
    """A model whose classes have one stem; it reads text unless told otherwise."""
    return TinyModel(f"{stem}Config", f"{stem}{head}", options, needs or ("text",))


_DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
_DEBERTA = {
    "relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
}  # fmt: skip
_MODERN = {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64, "n_positions": 64}
_QWEN_MOE = {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4}
_QWEN_MOE |= {"num_experts_per_tok": 2, "mlp_only_layers": [0]}
_GATED = {"feed_forward_proj": "gated-gelu"}
_CLIP = {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 16}
_TALE = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64}
_BOTH = ("text", "decoder")
_GRID = {**_SIZES, "input_size": VOLUME, "patch_size": (2, 4, 2)}
_FORECAST = {**_SIZES, "input_size": SERIES, "patch_size": (1, 4), "horizon": HORIZON}
TINY: dict[str, TinyModel] = {
    "bert": _of("Bert", "ForMaskedLM", _TEXT),
    "roberta": _of("Roberta", "ForMaskedLM", _TEXT),
    "distilbert": _of("DistilBert", "ForMaskedLM", {**_TOKENS, **_DISTILBERT}),
    "electra": _of("Electra", "ForMaskedLM", {**_TEXT, "embedding_size": 16}),
    "mpnet": _of("MPNet", "ForMaskedLM", {**_TEXT, "pad_token_id": 1}),
    "deberta-v2": _of("DebertaV2", "ForMaskedLM", {**_TEXT, **_DEBERTA}),
    "modernbert": _of("ModernBert", "ForMaskedLM", {**_TEXT, **_MODERN}),
    "gpt2": TinyModel("GPT2Config", "GPT2LMHeadModel", {**_TOKENS, **_GPT2}),
    "gpt_neox": _of("GPTNeoX", "ForCausalLM", _TEXT),
    "opt": _of("OPT", "ForCausalLM", {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 16}),
    "llama": _of("Llama", "ForCausalLM", _GROUPED),
    "mistral": _of("Mistral", "ForCausalLM", _GROUPED),
    "qwen3": _of("Qwen3", "ForCausalLM", {**_GROUPED, "head_dim": 16}),
    "gemma3": TinyModel("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GROUPED, "head_dim": 16}),
    "phi3": _of("Phi3", "ForCausalLM", _GROUPED),
    "mixtral": _of("Mixtral", "ForCausalLM", {**_GROUPED, "num_local_experts": 4}),
    # The first block is dense, the second has experts.
    "qwen3_moe": _of("Qwen3Moe", "ForCausalLM", {**_GROUPED, **_QWEN_MOE}),
    "t5": _of("T5", "ForConditionalGeneration", _T5, *_BOTH),
    "t5-gated": _of("T5", "ForConditionalGeneration", {**_T5, **_GATED}, *_BOTH),
    "bart": _of("Bart", "ForConditionalGeneration", _SEQ2SEQ, *_BOTH),
    "vit": _of("ViT", "ForImageClassification", _VISION, "image"),
    "deit": _of("DeiT", "ForImageClassification", _VISION, "image"),
    "clip": _of("CLIP", "Model", _CLIP, "text", "image"),
    "clip_text_model": _of("CLIPText", "Model", _TEXT),
    "clip_vision_model": _of("CLIPVision", "Model", _VISION, "image"),
    "whisper": _of("Whisper", "ForConditionalGeneration", _WHISPER, "audio", "decoder"),
    "tcompress_text": _of("TCompressText", "ForSequenceClassification", {**_TOKENS, **_TALE}),
    "tcompress_grid": _of("TCompressGrid", "ForImageClassification", _GRID, "volume"),
    "tcompress_grid-series": _of("TCompressGrid", "ForForecasting", _FORECAST, "series"),
}
_ROUTED = {
    **_GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "moe_intermediate_size": 16,
}  # fmt: skip
_LATENT = {
    **_ROUTED, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "n_group": 2,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "topk_group": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
_INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
_SWITCH = {"num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
_NLLB = {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
_NLLB |= {"max_position_embeddings": 64}
_LLAMA4 = {"intermediate_size_mlp": 64, "head_dim": 8, "num_experts_per_tok": 1}

# One model of every layout of experts, by what is special about it.
EXPERTS: dict[str, TinyModel] = {
    "chunked": _of("Mixtral", "ForCausalLM", _ROUTED),
    "transposed, biased, interleaved": _of("GptOss", "ForCausalLM", {**_ROUTED, "head_dim": 16}),
    "renamed": _of("GraniteMoe", "ForCausalLM", _ROUTED),
    "a module for each weight": _of("JetMoe", "ForCausalLM", {**_ROUTED, "kv_channels": 8}),
    "one product for all": TinyModel(
        "Llama4TextConfig", "Llama4ForCausalLM", {**_ROUTED, **_LLAMA4}
    ),
    "shared expert": _of(
        "Qwen2Moe", "ForCausalLM", {**_ROUTED, "shared_expert_intermediate_size": 32}
    ),
    "latent attention": _of("DeepseekV3", "ForCausalLM", _LATENT),
    "indexer": _of("DeepseekV32", "ForCausalLM", {**_LATENT, **_INDEXER}),
    "list": _of("SwitchTransformers", "ForConditionalGeneration", {**_T5, **_SWITCH}, *_BOTH),
    "list, two experts for a token": _of(
        "NllbMoe", "ForConditionalGeneration", {**_SEQ2SEQ, **_NLLB}, *_BOTH
    ),
}
