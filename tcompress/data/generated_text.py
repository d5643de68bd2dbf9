"""Text that a language model writes itself: what it knows, without the data that taught it."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch

_BATCH = 512  # texts at once, or as many as the memory for keys and values is enough for
_MEMORY = 2**30


@torch.no_grad()
def written_texts(
    model: Any,
    tokenizer: Any,
    count: int,
    tokens: int,
    seed: int = 0,
    advance: Callable[[int], object] = lambda written: None,
) -> list[str]:
    """Sample texts of so many tokens at most, each token by the model's own probabilities.

    They begin as the model's texts do, or, where it has no first token, with any token. `advance`
    hears of texts that are written.
    """
    model = _without_settings(model)
    config = model.config.get_text_config()
    first, longest = config.bos_token_id, getattr(config, "max_position_embeddings", tokens)
    room: dict[str, Any] = {"max_new_tokens": max(1, min(tokens, longest) - 1), "max_length": None}
    each = tokens * config.num_hidden_layers * 2 * config.hidden_size * model.dtype.itemsize
    batch = max(1, min(_BATCH, _MEMORY // each))
    texts: list[str] = []
    # The state of the caller's random numbers stays as it is.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for begun in range(0, count, batch):
            size = min(batch, count - begun), 1
            start = torch.randint(config.vocab_size, size) if first is None else None
            start = torch.full(size, first) if start is None else start
            start = start.to(model.device)
            ids = model.generate(
                start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, **room
            )
            texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
            advance(len(ids))
    return [" ".join(text.split()) for text in texts]


def _without_settings(model: Any) -> Any:
    """Give the same model without what its `generation_config.json` makes of its probabilities."""
    from transformers import GenerationConfig

    names = ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache")
    settings = {name: getattr(model.generation_config, name) for name in names}
    model = copy(model)  # with the same weights
    model.generation_config = GenerationConfig(**settings)
    return model
