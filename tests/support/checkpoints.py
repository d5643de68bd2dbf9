"""Tiny checkpoints on disk, for tests of reading them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.tiny import TINY, TinyModel


def _of(family: str, model: str | None = None, **options: Any) -> TinyModel:
    tiny = TINY[family]
    return replace(tiny, model=model or tiny.model, options={**tiny.options, **options})


# More than ten experts, so that the order of their names is not the order of their numbers.
MODELS: dict[str, TinyModel] = {
    **{name: TINY[name] for name in ("bert", "vit", "gpt2", "t5")},
    "bert_base": _of("bert", "BertModel"),
    "mixtral": _of("mixtral", num_local_experts=11),
    "qwen3_moe": _of("qwen3_moe", num_experts=12, mlp_only_layers=[]),
    "llama_tied": _of("llama", tie_word_embeddings=True),
    # Stores query, key and value as one tensor, which Transformers takes apart.
    "nomic_bert": TinyModel("NomicBertConfig", "NomicBertModel", TINY["bert"].options),
}


def save(name: str, folder: Path, **options: Any) -> Any:
    """Write a model with seeded random weights; gives the model."""
    model = MODELS[name].build()
    model.save_pretrained(folder, **options)
    return model
