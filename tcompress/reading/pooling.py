"""How a sentence encoder makes one embedding of its tokens, as the model's folder says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tcompress.errors import DataError
from tcompress.source import SourceModel

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_KNOWN = tuple(_FLAGS.values())
_HINT = (
    "measure it with sentence-transformers, after `import tcompress`; heal it with objectives "
    "other than `embedding`"
)
_WITHOUT_EFFECT = ("Transformer", "Normalize")  # on the cosine of what a model gives


@dataclass(frozen=True)
class Pooling:
    """How the vectors of tokens become one.

    Attributes:
        modes: Ways of pooling; the results of several are joined.
        stated: Whether the model's folder says so.
    """

    modes: tuple[str, ...] = ("mean",)
    stated: bool = False

    @classmethod
    def of(cls, source: SourceModel, *, last: bool = True) -> Pooling:
        """Reads `modules.json`; the mean over tokens is the default.

        Args:
            source: The model.
            last: Whether pooling has to be what makes the embedding, with nothing after it.

        Raises:
            DataError: The model has modules after pooling, or is pooled in an unknown way.
        """
        path = source.folder / "modules.json"
        if not path.is_file():
            return cls()
        try:
            modules = json.loads(path.read_text(encoding="utf-8"))
            kinds = {str(item["type"]).rpartition(".")[2]: str(item["path"]) for item in modules}
            place = source.folder / kinds.get("Pooling", "") / "config.json"
            options = json.loads(place.read_text(encoding="utf-8")) if "Pooling" in kinds else {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"`{path}` is no list of sentence-transformers modules with their files",
                "repair it, or delete it to take the mean over the tokens",
            ) from error
        if last:
            _check_modules(kinds, source)
        return cls(_modes(options, source), stated="Pooling" in kinds)

    @property
    def words(self) -> str:
        """The way of pooling, for a protocol."""
        return "+".join(self.modes) + ("" if self.stated else " (default)")

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Pools.

        Args:
            hidden: Vectors of tokens.  # (batch, tokens, d)
            mask: Which tokens count; a row of padding alone gives zeros.  # (batch, tokens)

        Returns:
            One vector each, of length 1.  # (batch, d)
        """
        pooled = torch.cat([_pooled(mode, hidden, mask) for mode in self.modes], dim=-1)
        return normalize(pooled, dim=-1)


MEAN = Pooling()
"""What models that say nothing are pooled by."""


def _check_modules(kinds: dict[str, str], source: SourceModel) -> None:
    more = [kind for kind in kinds if kind not in ("Pooling", *_WITHOUT_EFFECT)]
    if more:
        raise DataError(
            f"`{source.id}` has the sentence-transformers modules {', '.join(more)} after its "
            "transformer, which are not known here",
            _HINT,
        )


def _modes(options: dict[str, Any], source: SourceModel) -> tuple[str, ...]:
    stated = options.get("pooling_mode")
    if stated is None:
        modes = [mode for flag, mode in _FLAGS.items() if options.get(flag)]
    else:
        modes = [stated] if isinstance(stated, str) else list(stated)
    unknown = [mode for mode in modes if mode not in _KNOWN]
    if unknown:
        raise DataError(
            f"`{source.id}` is pooled by `{unknown[0]}`; known are {', '.join(_KNOWN)}",
            _HINT,
        )
    return tuple(modes) or ("mean",)


def _pooled(mode: str, hidden: Tensor, mask: Tensor) -> Tensor:
    inside = mask.bool().unsqueeze(-1)
    if mode == "cls":
        return hidden[:, 0]
    if mode == "max":
        highest = hidden.masked_fill(~inside, -torch.inf).amax(1)
        return highest.masked_fill(~inside.any(1), 0.0)
    if mode == "lasttoken":
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        return hidden[torch.arange(len(hidden), device=hidden.device), last]
    if mode == "weightedmean":
        weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)
        return (hidden * weights.unsqueeze(-1)).sum(1) / weights.sum(1, keepdim=True).clamp_min(1)
    total = (hidden * inside).sum(1)
    count = inside.sum(1).clamp_min(1)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)
