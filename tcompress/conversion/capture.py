"""What a layer reads while a block runs, and which of its rows are real tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.calibrate.streams import Call
from tcompress.errors import DataError
from tcompress.mechanisms import Visible


class _Captured(BaseException):
    """Ends the run of a block as soon as the wanted input is known."""


def run_to_input(
    forward: Callable[[], Any], module: nn.Module, arguments: Callable[..., Any]
) -> Any:
    """Runs a block up to the first call of one of its modules.

    Args:
        forward: Runs the block.
        module: The module whose input is wanted.
        arguments: Takes the module's arguments and returns what is wanted of them.

    Returns:
        What `arguments` returned, or None if the module was not called.
    """
    found: list[Any] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(arguments(*args, **kwargs))
        raise _Captured

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        forward()
    except _Captured:
        pass
    finally:
        handle.remove()
    return found[0] if found else None


def first_tensor(*args: Any, **kwargs: Any) -> Tensor:
    """Returns the first tensor argument: the input of a linear layer."""
    return next(item for item in (*args, *kwargs.values()) if isinstance(item, Tensor))


def queries_and_keys(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, **_: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns queries, keys and valid tokens of a call of a mechanism."""
    return q, k, Visible.of(mask, q, k, causal=causal).tokens


def handed_on(call: Call, answer: Any) -> Any:
    """Returns what a block that is left out would return: the state that it was given.

    Args:
        call: Its call.
        answer: What it returns itself; all but its state is kept, such as position biases.

    Raises:
        DataError: It changes the shape of the state.
    """
    state = first_tensor(*call.args, **call.kwargs)
    own = answer[0] if isinstance(answer, tuple | list) else answer
    if state.shape != own.shape:
        raise DataError(
            f"block `{call.block}` turns {list(state.shape)} into {list(own.shape)}, so that it "
            "cannot be left out",
            "name the blocks to keep: `--keep-layers`",
        )
    return (state, *answer[1:]) if isinstance(answer, tuple | list) else state


def token_rows(
    x: Tensor, batch: Mapping[str, Tensor], block: str, role: str
) -> tuple[Tensor, Tensor | None]:
    """Flattens a layer input to rows and says which rows are not padding.

    The mask is the one whose shape fits; where an encoder's and a decoder's both fit, the
    block's name and the layer's role tell which stream it reads.

    Returns:
        Rows (rows, d) and a mask (rows,), or None where all rows count.
    """
    rows = x.reshape(-1, x.shape[-1])
    if "vision" in block:
        return rows, None
    reads_encoder = role in ("cross_k", "cross_v") or "decoder" not in block
    names = ["attention_mask"]
    if not reads_encoder and any(name.startswith("decoder_") for name in batch):
        names = ["decoder_attention_mask"]
    for name in names:
        mask = batch.get(name)
        if mask is not None and mask.dim() == 2 and mask.numel() == rows.shape[0]:
            if x.dim() > 2 and mask.shape != x.shape[:2]:
                continue
            return rows, mask.reshape(-1).to(torch.bool)
    return rows, None
