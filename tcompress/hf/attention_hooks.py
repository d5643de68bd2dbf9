"""Puts replacements into the attentions of a model, through Transformers' interface."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.attention.module import CHILD, GuardedLinear, MechanismModule, UnusedProjection
from tcompress.attention.replacement import QueryKeyMoments, mechanism
from tcompress.errors import ArtifactError, DataError
from tcompress.hf.build import set_module
from tcompress.models.names import METHOD
from tcompress.planning.entries import AttentionPlan

# Lets mechanisms know which of two texts a token belongs to.
#
# Hosts give their attentions no types of tokens, so they are noted where a model is called.


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


# Puts mechanisms into the attentions of a model, through Transformers' attention interface.
#
# Every host looks up its attention function by the name in its config. A host with a mechanism gets
# a config of its own, which names ours; all others keep what they have, and so does the model,
# which goes on making masks as before. `Visible` reads whatever form these have.


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
    """Mixes tokens by the mechanism that a host's attention owns.

    Args:
        module: The host's attention.
        query: Queries.  # (batch, heads, queries, head_dim)
        key: Keys.  # (batch, key_heads, keys, head_dim)
        value: Values.  # (batch, key_heads, keys, head_dim)
        attention_mask: The host's mask, in any form.
        scaling: What the host multiplies scores by.
        **kwargs: What only other functions need.

    Returns:
        The mixed values, and no weights.  # (batch, queries, heads, head_dim)

    Raises:
        DataError: The cache is one that attention functions have to fill themselves.
    """
    own: MechanismModule = getattr(module, CHILD)
    if kwargs.get("cache") is not None:
        raise DataError(
            f"attention `{own.name}` cannot fill a paged cache",
            "generate without continuous batching",
        )
    causal, queries = own.layout.causal, query.shape[-2]
    if attention_mask is None and causal and 1 < queries < key.shape[-2] and not _flash(module):
        # A static cache that is still empty: Transformers leaves the mask out, and means that
        # the first keys belong to the queries.
        key, value = key[:, :, :queries], value[:, :, :queries]
    return own(query, key, value, attention_mask, causal=causal, scaling=scaling), None


def _flash(module: nn.Module) -> bool:
    """Whether masks are those of flash attention, where the last keys belong to the queries."""
    usual = getattr(getattr(module, CHILD), "host_config", None)
    return "flash" in str(getattr(usual, "_attn_implementation", ""))


def install_attention(
    root: nn.Module,
    entries: Iterable[AttentionPlan],
    runtime_name: Callable[[str], str | None],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> dict[str, MechanismModule]:
    """Gives planned attentions their mechanism, with empty tensors.

    Args:
        root: Model or block.
        entries: Plans.
        runtime_name: Gives the module path below `root` of a planned name, or None where the
            model has no such module.
        dtype: Dtype of the tensors.
        device: Device of the tensors.

    Returns:
        The new modules by planned name.

    Raises:
        ArtifactError: A host does not use Transformers' attention interface.
    """
    register_attention()
    made: dict[str, MechanismModule] = {}
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    for entry in entries:
        path = runtime_name(entry.name)
        if path is None:
            continue
        host: Any = root.get_submodule(path)
        if getattr(host, "config", None) is None:
            raise ArtifactError(
                f"attention `{path}` has no config to choose a function by",
                "use the version of Transformers that the model was converted with",
            )
        usual, host.config = host.config, copy.copy(host.config)
        # The setter would hand the name on to configs of parts, which are shared.
        host.config._attn_implementation_internal = METHOD
        made[entry.name] = own = MechanismModule(entry.layout, path, **options)
        own.host_config = usual
        own.train(host.training)
        host.add_module(CHILD, own)
        for layer in entry.unused:
            stub = UnusedProjection(layer.out_features, **options)
            set_module(root, _known(runtime_name(layer.name)), stub)
        if entry.guard is not None:
            bias = entry.guard.out_features if entry.guard.bias else None
            guarded = GuardedLinear(
                entry.guard.shape, bias, transposed=entry.guard.transposed, **options
            )
            set_module(root, _known(runtime_name(entry.guard.name)), guarded)
    watch_segments(root)
    return made


def _known(path: str | None) -> str:
    assert path is not None  # the attention that it belongs to is there
    return path


def first_values(
    entry: AttentionPlan,
    seed: int = SEED,
    *,
    pretrained: bool = True,
    moments: QueryKeyMoments | None = None,
) -> dict[str, Tensor]:
    """Makes the tensors of a mechanism as a conversion begins with, by checkpoint name.

    Args:
        entry: The attention.
        seed: Seed of what is drawn.
        pretrained: Whether it begins near the host's own attention, or as its paper says.
        moments: Of the host's queries and keys, where they are known.
    """
    module = MechanismModule(entry.layout)
    module.fill(seed, pretrained=pretrained, moments=moments)
    named = module.named_parameters()
    return {f"{entry.name}.{CHILD}.{name}": tensor.detach() for name, tensor in named}


def register_attention() -> None:
    """Registers the function with Transformers."""
    from transformers import AttentionInterface  # this module is read while Transformers is not yet

    AttentionInterface.register(METHOD, mix_tokens)
