"""Sentence embeddings, pooled as the model's folder says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from tcompress.errors import DataError
from tcompress.evaluation.runner import Row, Runner, checked
from tcompress.source import SourceModel

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_KNOWN = ("cls", "max", "mean", "mean_sqrt_len_tokens", "lasttoken")
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
    def of(cls, source: SourceModel) -> Pooling:
        """Reads `modules.json`; the mean over tokens is the default.

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
            mask: 1 for tokens, 0 for padding on the right.  # (batch, tokens)

        Returns:
            One vector each, of length 1.  # (batch, d)
        """
        pooled = torch.cat([_pooled(mode, hidden, mask) for mode in self.modes], dim=-1)
        return normalize(pooled, dim=-1)


def embed(runner: Runner, rows: Sequence[Row], pad: int, pooling: Pooling) -> Tensor:
    """Computes embeddings of length 1 in the order of the rows.  # (rows, d).

    Raises:
        InputError: Some are not finite.
    """
    body = backbone(runner.model)
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    for chosen, batch in runner.batches(rows, pad):
        hidden = body(**batch).last_hidden_state.float()
        vectors = pooling(hidden, batch["attention_mask"]).cpu()
        for index, vector in zip(chosen, vectors, strict=True):
            found[index] = vector
    return checked(torch.stack(found))


def backbone(model: PreTrainedModel) -> Any:
    """Gives the part of a model that turns texts into vectors of tokens."""
    if getattr(model.config, "is_encoder_decoder", False):
        return model.get_encoder()  # type: ignore[operator]
    return model.base_model


def classifies(model: PreTrainedModel) -> bool:
    """Tells whether a model classifies sequences, and so can judge pairs of texts."""
    return type(model).__name__.endswith("ForSequenceClassification")


def _check_modules(kinds: dict[str, str], source: SourceModel) -> None:
    more = [kind for kind in kinds if kind not in ("Pooling", *_WITHOUT_EFFECT)]
    if more:
        raise DataError(
            f"`{source.id}` has the sentence-transformers modules {', '.join(more)} after its "
            "transformer, which are not known here",
            "measure it with sentence-transformers, after `import tcompress`",
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
            "measure it with sentence-transformers, after `import tcompress`",
        )
    return tuple(modes) or ("mean",)


def _pooled(mode: str, hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    if mode == "cls":
        return hidden[:, 0]
    if mode == "max":
        return hidden.masked_fill(weights == 0, -torch.inf).amax(1)
    if mode == "lasttoken":
        return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    total = (hidden * weights).sum(1)
    count = weights.sum(1)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)
