"""Puts replacements into the attentions of a model, through Transformers' interface."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from tcompress.attention.module import CHILD, GuardedLinear, ReplacementModule, UnusedProjection
from tcompress.attention.replacement import QueryKeyMoments, replacement_named
from tcompress.errors import DataError
from tcompress.hf.build import set_module
from tcompress.models.names import METHOD
from tcompress.planning.entries import AttentionPlan

SEGMENTS = "token_type_ids"
_CHECKPOINT = "_gradient_checkpointing_func"  # Transformers sets it where blocks are run twice


def watch_segments(root: nn.Module) -> None:
    """Lets replacements know which of two texts a token belongs to.

    Models give their attentions no types of tokens, so they are noted where a model is called.
    """
    for module in root.modules():
        takes = SEGMENTS in inspect.signature(module.forward).parameters
        if takes and _owners(module):
            module.register_forward_pre_hook(_note, with_kwargs=True)


def _owners(module: nn.Module) -> list[ReplacementModule]:
    return [
        item
        for item in module.modules()
        if isinstance(item, ReplacementModule) and replacement_named(item.layout.mechanism).segments
    ]


def _note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if SEGMENTS in kwargs or len(args) < 2:
        found = kwargs.get(SEGMENTS)
    else:
        found = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get(SEGMENTS)
    for own in _owners(module):
        own.segments = found
    for block in module.modules() if module.training else ():
        usual = getattr(block, _CHECKPOINT, None)
        if usual is not None and not isinstance(usual, _Bound) and _owners(block):
            setattr(block, _CHECKPOINT, _Bound(usual, _owners(block)))


class _Bound:
    """Runs blocks again, for their gradients, with the types of tokens of their own pass.

    Another pass may lie between, such as that of the other half of a contrastive loss. `usual` is
    Transformers' function, which runs a block now and once more later.
    """

    def __init__(self, usual: Callable[..., Any], owners: Sequence[ReplacementModule]) -> None:
        self.usual, self.owners = usual, owners

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
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


SEED = 0


def mix_tokens(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Mixes tokens by the replacement that an attention owns; there are no weights to return."""
    own: ReplacementModule = getattr(module, CHILD)
    if kwargs.get("cache") is not None:
        hint = "generate without continuous batching"
        raise DataError(f"attention `{own.name}` cannot fill a paged cache", hint)
    causal, queries = own.layout.causal, query.shape[-2]
    # Masks of flash attention mean that the last keys belong to the queries.
    flash = "flash" in str(getattr(own.host_config, "_attn_implementation", ""))
    if attention_mask is None and causal and 1 < queries < key.shape[-2] and not flash:
        # A static cache that is still empty: Transformers leaves the mask out, and means that
        # the first keys belong to the queries.
        key, value = key[:, :, :queries], value[:, :, :queries]
    return own(query, key, value, attention_mask, causal=causal, scaling=scaling), None


def install_attention(
    root: nn.Module,
    entries: Iterable[AttentionPlan],
    runtime_name: Callable[[str], str | None],
    **place: Any,
) -> dict[str, ReplacementModule]:
    """Gives planned attentions their replacement, with empty tensors; see `install_layers`.

    Every attention looks up its function by the name in its config. One that is replaced gets a
    config of its own, which names ours; all others keep what they have, and so does the model,
    which goes on making masks as before. `Visible` reads whatever form these have.
    """
    made: dict[str, ReplacementModule] = {}
    for entry in entries:
        path = runtime_name(entry.name)
        if path is None:
            continue
        attention: Any = root.get_submodule(path)
        usual, attention.config = attention.config, copy.copy(attention.config)
        # The setter would hand the name on to configs of parts, which are shared.
        attention.config._attn_implementation_internal = METHOD
        made[entry.name] = own = ReplacementModule(entry.layout, path, **place)
        own.host_config = usual
        attention.add_module(CHILD, own.train(attention.training))
        new: dict[str, nn.Module] = {
            layer.name: UnusedProjection(layer.out_features, **place) for layer in entry.unused
        }
        if guard := entry.guard:
            bias, transposed = guard.out_features if guard.bias else None, guard.transposed
            new[guard.name] = GuardedLinear(guard.shape, bias, transposed=transposed, **place)
        for name, module in new.items():
            # It is there, as the attention that it belongs to is.
            set_module(root, runtime_name(name) or name, module)
    watch_segments(root)
    return made


def first_values(
    entry: AttentionPlan,
    seed: int = SEED,
    *,
    pretrained: bool = True,
    moments: QueryKeyMoments | None = None,
) -> dict[str, Tensor]:
    """Makes the tensors of a replacement as a conversion begins with, by checkpoint name."""
    module = ReplacementModule(entry.layout)
    module.fill(seed, pretrained=pretrained, moments=moments)
    named = module.named_parameters()
    return {f"{entry.name}.{CHILD}.{name}": tensor.detach() for name, tensor in named}
