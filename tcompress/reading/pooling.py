"""How a sentence encoder makes one embedding of its tokens."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from tcompress.source import SourceModel

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}


def pooling_of(source: SourceModel) -> str:
    """Reads the pooling of a sentence-transformers folder: `mean`, `cls`, `max` or `last`.

    Models without such files are pooled by the mean.
    """
    for path in sorted(source.folder.glob("*Pooling*/config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        for name, mode in _MODES.items():
            if config.get(name):
                return mode
        if config.get("pooling_mode") in _MODES.values():
            return str(config["pooling_mode"])
    return "mean"


def pooled(states: Tensor, mask: Tensor, how: str) -> Tensor:
    """One row for each sentence.

    Args:
        states: Hidden states.  # (sentences, tokens, width)
        mask: Which tokens count.  # (sentences, tokens)
        how: `mean`, `cls` (the first token), `max` or `last`.
    """
    inside = mask.unsqueeze(-1)
    if how == "cls":
        return states[:, 0]
    if how == "max":
        highest = states.masked_fill(~inside, -torch.inf).amax(1)
        return highest.masked_fill(~inside.any(1), 0.0)
    if how == "last":
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        return states[torch.arange(len(states), device=states.device), last]
    return (states * inside).sum(1) / inside.sum(1).clamp_min(1)
