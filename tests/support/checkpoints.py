"""Tiny checkpoints on disk, for tests of reading them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tcompress.errors import SourceError
from tcompress.models import WeightStore

_TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 99, "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99}

# More than ten experts, so that the order of their names is not the order of their numbers.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", _TEXT),
    "bert_base": ("BertModel", "BertConfig", _TEXT),
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGE),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 11}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_GROUPED, "num_experts": 12, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    # Stores query, key and value as one tensor, which Transformers takes apart.
    "nomic_bert": ("NomicBertModel", "NomicBertConfig", _TEXT),
}


def save(name: str, folder: Path, **options: Any) -> Any:
    """Write a model with seeded random weights of spread 1; gives the model."""
    model_class, config_class, arguments = MODELS[name]
    config = getattr(transformers, config_class)(**arguments)
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    model.save_pretrained(folder, **options)
    return model


def refusal_of(folder: Path) -> str:
    """Why the weights of a folder are refused; every refusal says what to do."""
    with pytest.raises(SourceError) as caught:
        WeightStore.open(folder)
    assert caught.value.hint
    return caught.value.message
