"""A model of which only the parts in use hold weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from accelerate import init_empty_weights
from torch import nn

from tcompress.errors import SourceError
from tcompress.source import SourceModel, read_finite


class Skeleton:
    """The source model with its blocks on the meta device until they are needed.

    Everything outside the blocks is loaded at once, except what only the output head uses: a
    calibration stops after the last block. Activations are computed in float32.

    Args:
        source: The model.
        blocks: Names of its blocks.
        device: Where to compute.
    """

    def __init__(self, source: SourceModel, blocks: Sequence[str], device: torch.device) -> None:
        self.source = source
        self.device = device
        config = copy.deepcopy(source.config)
        # Buffers that no checkpoint holds (rotary frequencies, position ids) are computed for
        # real; a key-value cache would grow with every run of a block.
        with init_empty_weights(include_buffers=False):
            self.model: nn.Module = source.model_class._from_config(config).eval()
        for module in self.model.modules():
            if getattr(module, "config", None) is not None:
                module.config.use_cache = False  # type: ignore[union-attr]
        for buffer_name, buffer in list(self.model.named_buffers()):
            _place(self.model, buffer_name, buffer.to(device))
        self._inside = tuple(f"{name}." for name in blocks)
        skipped = (*self._inside, *(f"{name}." for name in self._heads()))
        self.load(name for name in self._stored_names() if not name.startswith(skipped))

    def load_rest(self) -> None:
        """Loads the output head too, where it has weights of its own.

        What is not stored at all, such as a pooler that nobody trained, is zero.
        """
        self.load(self._empty())
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for name in self._empty():
            _place(self.model, name, torch.zeros(own[name].shape, device=self.device))

    def _empty(self) -> list[str]:
        named = self.model.named_parameters(remove_duplicate=False)
        empty = [name for name, item in named if item.is_meta]
        return [name for name in empty if not name.startswith(self._inside)]

    def _heads(self) -> list[str]:
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        return [name for name, module in self.model.named_modules() if head is module and name]

    def _stored_names(self) -> list[str]:
        return list(self.model.state_dict(keep_vars=True))

    def load(self, names: Iterable[str]) -> None:
        """Reads parameters and persistent buffers; what the checkpoint lacks stays empty."""
        shared: dict[tuple[str, ...], torch.Tensor] = {}
        for name in names:
            try:
                sources = self.source.keymap.sources(name)
            except SourceError:
                continue  # a head that this checkpoint does not have
            key = (*sources.keys, *sources.patterns, name if sources.converter else "")
            if key not in shared:
                value = read_finite(self.source.store, self.source.keymap, name)
                if value.is_floating_point():
                    value = value.float()
                shared[key] = value.to(self.device)
            _place(self.model, name, shared[key])

    def load_block(self, block: str) -> nn.Module:
        """Loads one block and returns it."""
        self.load(name for name in self._stored_names() if name.startswith(f"{block}."))
        return self.model.get_submodule(block)

    def drop_block(self, block: str) -> None:
        """Frees the weights of a block."""
        module = self.model.get_submodule(block)
        for name, parameter in list(module.named_parameters()):
            _place(module, name, parameter.to("meta"))


def _place(root: nn.Module, name: str, value: torch.Tensor) -> None:
    """Puts a tensor in the place of a parameter or buffer."""
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value
