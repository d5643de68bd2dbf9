"""Text that a language model writes itself: what it knows, without the data that taught it."""

from __future__ import annotations

from typing import Any

import torch

_BATCH = 64


@torch.no_grad()
def written_texts(model: Any, tokenizer: Any, count: int, tokens: int, seed: int = 0) -> list[str]:
    """Samples texts of so many tokens at most, each token by the model's own probabilities.

    They begin as the model's texts do, or, where it has no first token, with any token.
    """
    config = model.config.get_text_config()
    first, most = config.bos_token_id, getattr(config, "max_position_embeddings", tokens)
    room: dict[str, Any] = {"max_new_tokens": max(1, min(tokens, most) - 1), "max_length": None}
    texts: list[str] = []
    # The state of the caller's random numbers stays as it is.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for begun in range(0, count, _BATCH):
            size = min(_BATCH, count - begun), 1
            start = torch.randint(config.vocab_size, size) if first is None else None
            start = torch.full(size, first) if start is None else start
            start = start.to(model.device)
            ids = model.generate(
                start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, **room
            )
            texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [" ".join(text.split()) for text in texts]
