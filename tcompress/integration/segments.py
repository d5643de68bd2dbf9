"""Lets mechanisms know which of two texts a token belongs to.

Hosts give their attentions no types of tokens, so they are noted where a model is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from tcompress.mechanisms.base import mechanism
from tcompress.mechanisms.module import MechanismModule

SEGMENTS = "token_type_ids"
_CHECKPOINT = "_gradient_checkpointing_func"  # Transformers sets it where blocks are run twice


def watch_segments(root: nn.Module) -> None:
    """Notes the types of tokens wherever a model is called that has mechanisms which need them."""
    for module in root.modules():
        takes = SEGMENTS in inspect.signature(module.forward).parameters
        if takes and _owners(module):
            module.register_forward_pre_hook(_note, with_kwargs=True)


def _owners(module: nn.Module) -> list[MechanismModule]:
    return [
        item
        for item in module.modules()
        if isinstance(item, MechanismModule) and mechanism(item.layout.mechanism).segments
    ]


def _note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if SEGMENTS in kwargs or len(args) < 2:
        found = kwargs.get(SEGMENTS)
    else:
        found = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get(SEGMENTS)
    for own in _owners(module):
        own.segments = found
    if module.training:
        _bind_checkpoints(module)


def _bind_checkpoints(root: nn.Module) -> None:
    for block in root.modules():
        usual = getattr(block, _CHECKPOINT, None)
        if usual is not None and not isinstance(usual, _Bound) and _owners(block):
            setattr(block, _CHECKPOINT, _Bound(usual, _owners(block)))


class _Bound:
    """Runs blocks again, for their gradients, with the types of tokens of their own pass.

    Another pass may lie between a pass and its gradients, such as that of the other half of a
    contrastive loss.

    Args:
        usual: Transformers' function, which runs a block now and once more later.
        owners: Mechanisms in the block.
    """

    def __init__(self, usual: Callable[..., Any], owners: Sequence[MechanismModule]) -> None:
        self.usual, self.owners = usual, owners

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        """Runs a block."""
        own = [owner.segments for owner in self.owners]

        def bound(*again: Any) -> Any:
            latest = [owner.segments for owner in self.owners]
            self._set(own)
            try:
                return run(*again)
            finally:
                self._set(latest)

        return self.usual(bound, *args)

    def _set(self, values: Sequence[Tensor | None]) -> None:
        for owner, value in zip(self.owners, values, strict=True):
            owner.segments = value
