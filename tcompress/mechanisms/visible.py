"""Which tokens see which: one form of the many in which hosts hand over their masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tcompress.errors import DataError

HIDDEN = -1e3
"""What masks add to scores hides a key from here on: users write -1e4, -1e9 or the least number."""

# Masks whose queries were seen to be alike, with their version: all layers of a pass have the same.
_ALIKE = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Visible:
    """Which keys every query sees.

    Attributes:
        pairs: True where it does; None where all see all.  # (batch | 1, 1, queries | 1, keys)
        first: True for tokens of the first of two texts; None where texts are not told apart.
            # (batch, keys)
    """

    pairs: Tensor | None = None
    first: Tensor | None = None

    @property
    def tokens(self) -> Tensor | None:
        """Keys that some query sees: all but padding.  # (batch | 1, keys), or None."""
        return None if self.pairs is None else self.pairs.any(-2)[:, 0]

    @property
    def topic(self) -> Tensor | None:
        """Tokens of the first text, or of the only one; None for all.  # (batch | 1, keys)."""
        if self.first is None:
            return self.tokens
        return self.first if self.tokens is None else self.first & self.tokens

    def padding_last(self) -> Tensor | None:
        """Order of tokens in which padding comes last; None where it does.  # (batch | 1, keys)."""
        tokens = self.tokens
        if tokens is None:
            return None
        known = not torch.compiler.is_compiling()
        if known and not bool((tokens[:, 1:] & ~tokens[:, :-1]).any()):
            return None
        return (~tokens).to(torch.uint8).argsort(dim=1, stable=True)

    def in_order(self, order: Tensor) -> Visible:
        """The same for tokens in another order, where all queries see the same.

        Args:
            order: Where each token comes from.  # (batch | 1, keys)
        """
        tokens, first = self.tokens, self.first
        if tokens is not None:
            tokens = tokens.gather(1, order)[:, None, None]
        if first is not None:
            first = first.gather(1, order.expand(len(first), -1))
        return Visible(tokens, first)

    @classmethod
    def of(cls, mask: Tensor | None, q: Tensor, k: Tensor, *, causal: bool) -> Visible:
        """Reads a host's mask.

        Args:
            mask: None, where only `causal` counts; True, or zero, where a query sees a key; or
                one where a token is no padding.  # (batch | 1, 1, queries, keys), (batch, keys)
            q: Queries.  # (batch, heads, queries, head_dim)
            k: Keys.  # (batch, key_heads, keys, head_dim)
            causal: Whether the host looks only back; four-dimensional masks say so themselves.

        Raises:
            DataError: The mask has another form, such as that of a compiled kernel.
        """
        queries, keys = q.shape[-2], k.shape[-2]
        if mask is None:
            alone = not causal or queries == 1
            return cls(None if alone else past(queries, keys, q.device)[None, None])
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            found = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise DataError(
                f"an attention mask of {found} cannot be read",
                'load the model with `attn_implementation="sdpa"`',
            )
        if mask.dim() == 2:
            pairs = mask[:, None, None, -keys:] > 0
            return cls(pairs & past(queries, keys, q.device) if causal else pairs)
        mask = mask[:, :1, :, :keys]
        if mask.dtype == torch.bool:
            return cls(mask)
        return cls(mask > HIDDEN if mask.is_floating_point() else mask > 0)


def check_alike(mask: Tensor | None, seen: Visible) -> None:
    """Checks that all queries see the same keys, but for those of padding, which see none.

    Args:
        mask: What a host gave.
        seen: What was read from it.

    Raises:
        DataError: They do not.
    """
    pairs = seen.pairs
    if mask is None or pairs is None or pairs.shape[-2] == 1 or torch.compiler.is_compiling():
        return
    # Tensors made in inference mode have no version, which would tell of changes.
    version = None if mask.is_inference() else mask._version
    if version is not None and _ALIKE.get(mask) == version:
        return
    unlike = (pairs != pairs.any(-2, keepdim=True)) & pairs.any(-1, keepdim=True)
    if bool(unlike.any()):
        raise DataError(
            "tokens are told to see different others, as in packed texts, and this mechanism mixes "
            "all of a text",
            "give a mask of padding alone, one text in a row, or convert with `tga`",
        )
    if version is not None:
        _ALIKE[mask] = version


def past(queries: int, keys: int, device: torch.device) -> Tensor:
    """Lets the last of the keys' tokens see themselves and what was before.  # (queries, keys)."""
    whole = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return whole.tril(keys - queries)
