"""What happens inside a model during a forward pass, read off by hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tcompress.anatomy import Anatomy, anatomy_of
from tcompress.mechanisms.module import UnusedProjection
from tcompress.source import SourceModel

Batch = dict[str, Tensor]

_PROJECTIONS = ("q", "k", "v")


@dataclass
class Observed:
    """What one forward pass computed.

    Attributes:
        output: What the model returned.
        states: Outputs of the observed blocks.  # each (examples, tokens, width)
        projections: Queries, keys and values of the last observed block by role, one tensor a
            projection.  # each (examples, tokens, features)
    """

    output: Any = None
    states: list[Tensor] = field(default_factory=list)
    projections: dict[str, Tensor] = field(default_factory=dict)

    @property
    def logits(self) -> Tensor | None:
        """Logits, if the model has a head."""
        found = getattr(self.output, "logits", None)
        return found if isinstance(found, Tensor) else None

    @property
    def final(self) -> Tensor | None:
        """Hidden states as the model returns them, if it does."""
        found = getattr(self.output, "last_hidden_state", None)
        return found if isinstance(found, Tensor) else None


class Observer:
    """Runs a model and reads off what its blocks compute.

    Args:
        model: The model.
        anatomy: Its blocks.
        blocks: Indices of the blocks to observe; default all.
        projections: Whether to read queries, keys and values of the last of them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        anatomy: Anatomy,
        blocks: Sequence[int] | None = None,
        *,
        projections: bool = False,
    ) -> None:
        self.model = model
        chosen = range(len(anatomy.blocks)) if blocks is None else blocks
        self.modules = [model.get_submodule(anatomy.blocks[index].name) for index in chosen]
        self._seen: Observed | None = None
        for module in self.modules:
            module.register_forward_hook(self._keep_state)
        if projections:
            for layer in anatomy.blocks[chosen[-1]].layers:
                names = {part.name for part in layer.parts} & set(_PROJECTIONS)
                if isinstance(model.get_submodule(layer.name), UnusedProjection):
                    continue
                if layer.role in _PROJECTIONS or names:
                    sizes = {part.name: part.size for part in layer.parts}
                    hook = _ProjectionHook(self, sizes)
                    model.get_submodule(layer.name).register_forward_hook(hook)

    def run(self, batch: Mapping[str, Tensor], runner: nn.Module | None = None) -> Observed:
        """Runs the model.

        Args:
            batch: Keyword arguments of its forward pass.
            runner: What to call instead of the model, such as a wrapper of it.
        """
        # Blocks that are computed again in the backward pass must not be observed again.
        seen = self._seen = Observed()
        try:
            seen.output = (runner or self.model)(**batch)
        finally:
            self._seen = None
        return seen

    def _keep_state(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._seen is not None:
            self._seen.states.append(state_of(output))

    def keep_projection(self, sizes: Mapping[str, int], output: Tensor) -> None:
        """Keeps the queries, keys and values in one layer's output."""
        if self._seen is not None:
            pieces = output.split(list(sizes.values()), -1)
            found = dict(zip(sizes, pieces, strict=True))
            self._seen.projections |= {role: found[role] for role in _PROJECTIONS if role in found}


class _ProjectionHook:
    def __init__(self, observer: Observer, sizes: Mapping[str, int]) -> None:
        self.observer, self.sizes = observer, sizes

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.observer.keep_projection(self.sizes, output)


def state_of(output: Any) -> Tensor:
    """The hidden state in what a block returns, which may be a tuple that starts with it."""
    state: Tensor = output[0] if isinstance(output, tuple | list) else output
    return state


@contextmanager
def fed_with(modules: Sequence[nn.Module], states: Sequence[Tensor]) -> Iterator[None]:
    """Makes every block but the first read the teacher's state instead of its predecessor's.

    So each block is trained alone: no gradient passes from one to another.

    Args:
        modules: The blocks.
        states: The teacher's states behind each of them.
    """

    def feed(state: Tensor) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (state.to(args[0].dtype), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": state.to(kwargs["hidden_states"].dtype)}

        return hook

    handles = [
        module.register_forward_pre_hook(feed(state), with_kwargs=True)
        for module, state in zip(modules[1:], states, strict=False)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def skeleton_anatomy(source: SourceModel, model: PreTrainedModel) -> Anatomy:
    """Blocks and layers of a loaded model, converted or not, by their names when running."""
    kind: Any = type(model)
    return anatomy_of(replace(source, model_class=kind).meta_model())


def token_mask(batch: Mapping[str, Tensor], state: Tensor) -> Tensor:
    """Which rows of a state count: padding does not.  # (examples, tokens)."""
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name)
        if mask is not None and mask.shape == state.shape[:2]:
            return mask.bool()
    return torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)


def token_weights(batch: Mapping[str, Tensor], state: Tensor) -> Tensor:
    """Weights of a state's rows in a sum over tokens.  # (examples, tokens).

    Without a mask, as for pictures, an example counts as one token.
    """
    mask = token_mask(batch, state).to(state.dtype)
    has_mask = "attention_mask" in batch or "decoder_attention_mask" in batch
    return mask if has_mask else mask / mask.shape[1]
