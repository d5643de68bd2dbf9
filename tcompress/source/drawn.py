"""Weights that no file holds: what the model class itself draws from a seed.

Names are those of a checkpoint on disk, so that whatever reads a checkpoint can read these. Shapes
are known without drawing anything; values are drawn when the first of them is read.
"""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import meta_device_safe_creation_ops

from tcompress.source.shards import TensorInfo
from tcompress.source.store import WeightStore

_FILE = "model.safetensors"


def draw_model(kind: Any, config: Any, seed: int) -> PreTrainedModel:
    """Builds a model with the values that its class begins training with, in float32.

    Args:
        kind: The model's class.
        config: Its configuration, which is left as it is.
        seed: Seed of the values. Other generators go on as if nothing had been drawn.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind._from_config(deepcopy(config), dtype=torch.float32)
    return model.eval()


class _DrawnShard:
    """The one file that these weights would be in; a `Shard`."""

    def __init__(self, path: Path, kind: Any, config: Any, seed: int) -> None:
        self.path = path
        self._kind, self._config, self._seed = kind, config, seed
        with torch.device("meta"), meta_device_safe_creation_ops():
            model = kind._from_config(deepcopy(config), dtype=torch.float32)
        self.infos = {name: TensorInfo.of(tensor) for name, tensor in _stored(model).items()}

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        return _stored(draw_model(self._kind, self._config, self._seed))

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Gives rows of a tensor, in memory of their own."""
        tensor = self._values[key]
        return (tensor[start:stop] if tensor.dim() else tensor).clone()

    def digest(self) -> bytes:
        """Identifies the values by what they are drawn from."""
        config = self._config.to_dict()
        config.pop("_name_or_path", None)  # where it was read
        facts = {
            "class": self._kind.__name__,
            "config": config,
            "seed": self._seed,
            "versions": [torch.__version__, transformers.__version__],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()

    def close(self) -> None:
        """Keeps the values: drawing them again takes longer than reading a file."""


class DrawnStore(WeightStore):
    """The weights of a model that was never trained.

    Args:
        folder: Folder of the model's configuration.
        kind: The model's class.
        config: Its configuration.
        seed: Seed of the values.
    """

    def __init__(self, folder: Path, kind: Any, config: Any, seed: int) -> None:
        self.seed = seed
        self._drawn = _DrawnShard(folder / _FILE, kind, config, seed)
        super().__init__(folder, {_FILE: self._drawn}, dict.fromkeys(self._drawn.infos, _FILE))

    def fingerprint(self) -> str:
        """Identifies these weights without drawing them."""
        return self._drawn.digest().hex()

    def times(self) -> list[tuple[str, int]]:
        """Names no file, since there is none."""
        return []


def _stored(model: Any) -> dict[str, Tensor]:
    """Gives the tensors that `save_pretrained` would write, by the names that it would use."""
    ignored = set(model._keys_to_ignore_on_save or ())
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    state = {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if name not in tied and name not in ignored
    }
    found: dict[str, Tensor] = revert_weight_conversion(model, state)
    return found
