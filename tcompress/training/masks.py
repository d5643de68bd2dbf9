"""Attention masks that Transformers makes without asking the device whether tokens are padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MAKERS

from tcompress.training.objectives import Batch

_MAKERS = ("sdpa", "eager")
_LOOKS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")


@contextmanager
def unread_masks(batch: Batch) -> Iterator[None]:
    """Tell models of the padding in a batch that is still on the CPU.

    Where no token is padding no mask is needed, and kernels are faster. To see that, Transformers
    reads the mask in every forward pass, and the host waits until the device has come so far.
    """
    masks = [value for name, value in batch.items() if name.endswith("attention_mask")]
    if not masks:
        yield
        return
    full = {mask.shape for mask in masks} if all(map(Tensor.all, masks)) else set[torch.Size]()
    before = {name: MAKERS[name] for name in _MAKERS}
    for name, maker in before.items():
        MAKERS.register(name, partial(_mask, maker, full))
    try:
        yield
    finally:
        for name, maker in before.items():
            MAKERS.register(name, maker)


def _mask(
    maker: Callable[..., Tensor | None],
    full: set[torch.Size],
    *args: Any,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    if attention_mask is not None and attention_mask.shape in full:
        attention_mask = None
    if attention_mask is not None:
        options |= {name: False for name in _LOOKS if name in options}
    return maker(*args, attention_mask=attention_mask, **options)
