"""Structured layers, attention replacements and other forms of modules, put into a model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers.pytorch_utils import Conv1D

from tcompress.attention.module import CHILD, GuardedLinear, ReplacementModule, UnusedProjection
from tcompress.attention.replacement import QueryKeyMoments, replacement_named
from tcompress.errors import ArtifactError, DataError
from tcompress.models.names import METHOD
from tcompress.planning.entries import AttentionPlan, FactorsKey, FormPlan, LayerPlan
from tcompress.roles.heads import head_split
from tcompress.structures.modules.embedding import LookupScale, StructuredEmbedding, TiedTable
from tcompress.structures.modules.experts import StructuredExperts
from tcompress.structures.modules.linear import PointwiseConvolution, StructuredLinear
from tcompress.structures.modules.shared import FactorsModule

E = TypeVar("E", LayerPlan, AttentionPlan, FormPlan)


def install_layers(
    root: nn.Module,
    entries: Iterable[LayerPlan],
    runtime_name: Callable[[str], str | None],
    factors: MutableMapping[FactorsKey, FactorsModule] | None = None,
    **place: Any,
) -> dict[str, StructuredLinear | StructuredExperts]:
    """Replace every planned layer by a structured one with empty tensors; return them by name.

    Owners of shared inputs come before the layers that share them. `runtime_name` gives the module
    path below `root` of a planned name, or None where a model without some heads has no such
    layer. To `factors` that were made before, what these layers own is added. `place` is dtype and
    device.
    """
    installed: dict[str, StructuredLinear | StructuredExperts] = {}
    factors = {} if factors is None else factors
    placed = [*_placed(entries, runtime_name)]
    for entry, path in placed:
        dense = root.get_submodule(path)
        new: StructuredLinear | StructuredExperts
        if entry.kind == "experts":
            new = dense if isinstance(dense, StructuredExperts) else StructuredExperts(dense)
            turned, reads = entry.transposed, entry.reads
            new.rewrite(entry.parameter, entry.parts, transposed=turned, reads=reads, **place)
        elif entry.kind == "embedding":
            padding, scale = getattr(dense, "padding_idx", None), LookupScale.of(dense)
            new = StructuredEmbedding(entry.parts, padding_idx=padding, scale=scale, **place)
        else:
            owner = installed.get(entry.input_of) if entry.input_of else None
            new = _linear(entry, dense, owner, factors, place)
            factors.update({(entry.name, name): new.factors[name] for name in entry.own_factors})
        installed[entry.name] = new
        set_module(root, path, new)
        if isinstance(new, StructuredEmbedding):
            tie_tables(root, path, new)
    narrow_heads(root, [path for _, path in placed])
    return installed


def _placed(
    entries: Iterable[E], runtime_name: Callable[[str], str | None]
) -> Iterator[tuple[E, str]]:
    """Yield what a model has of a plan, each entry with the path of its module."""
    for entry in entries:
        if (path := runtime_name(entry.name)) is not None:
            yield entry, path


def narrow_heads(root: nn.Module, paths: Sequence[str]) -> None:
    """Let attentions whose projections all have fewer or narrower heads compute with these.

    That needs an attention that tells their number from what it reads, and keeps the scale of its
    scores apart from their width. Any other sees zeros in the place of what is gone. Where nothing
    is left of heads, none is computed.
    """
    for name in dict.fromkeys(path.rpartition(".")[0] for path in paths):
        attention = root.get_submodule(name)
        if CHILD in attention._modules:  # what mixes tokens there is as wide as the dense heads
            continue
        layers = [m for m in attention.children() if isinstance(m, StructuredLinear)]
        dense = any(isinstance(m, nn.Linear | Conv1D) for m in attention.children())
        channels = [part.channels for m in layers if m.reads is None for part in m.parts]
        padded = [item for item in channels if item is not None and item.padded]
        fused = any(len(layer.parts) > 1 for layer in layers)
        if not padded or len(padded) < len(channels):
            continue
        width = max(item.kept for item in padded)
        if not width:
            _take_over(attention)
            continue
        split = None if dense or fused else head_split(type(attention))  # type: ignore[arg-type]
        if split is None or not isinstance(getattr(attention, "scaling", None), float):
            continue
        whole_heads = all(item.size != getattr(attention, split.width) for item in padded)
        if whole_heads and split.counts:
            continue
        if not whole_heads:
            setattr(attention, split.width, width)
        for layer in layers:
            [part] = layer.parts
            layer.head_width = part.channels.kept if whole_heads and part.channels else width


def _linear(
    entry: LayerPlan,
    dense: nn.Module,
    owner: nn.Module | None,
    factors: Mapping[FactorsKey, FactorsModule],
    place: Mapping[str, Any],
) -> StructuredLinear:
    shared = {name: (owner_name, name) for name, owner_name in entry.bank_of.items()}
    if not factors.keys() >= set(shared.values()):
        raise ArtifactError(
            f"layer `{entry.name}` shares tensors with layers that this model lacks",
            "load the whole model, or export it first: `tcompress export MODEL --to dense`",
        )
    kind: Callable[..., StructuredLinear] = StructuredLinear
    if entry.kind == "pointwise":
        kind = partial(PointwiseConvolution, host=dense)
    return kind(
        entry.parts,
        bias=entry.bias,
        input_of=owner if isinstance(owner, StructuredLinear) else None,
        readers=entry.readers,
        reads=entry.reads,
        factors={name: factors[key] for name, key in shared.items()},
        **place,
    )


def set_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Replace a submodule, keeping its training mode."""
    parent, _, leaf = path.rpartition(".")
    module.train(root.get_submodule(path).training)
    setattr(root.get_submodule(parent), leaf, module)


def tie_tables(model: nn.Module, path: str, owner: StructuredEmbedding) -> None:
    """Put a tied table in the place of all modules whose weight is that of an embedding.

    Afterwards nothing ties them any more: there is no weight of their own.
    """
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    names = [target for target, source in ties.items() if source == f"{path}.weight"]
    for name in names:
        target_path = name.removesuffix(".weight")
        set_module(model, target_path, TiedTable(owner, model.get_submodule(target_path)))
        ties.pop(name)
    for inner, module in model.named_modules():
        keys: Any = getattr(module, "_tied_weights_keys", None)
        if isinstance(keys, dict):
            prefix = f"{inner}." if inner else ""
            module._tied_weights_keys = {  # type: ignore[assignment]
                target: source for target, source in keys.items() if prefix + target not in names
            }


def fill(module: nn.Module, entry: LayerPlan, tensors: Mapping[str, Tensor]) -> None:
    """Copy fitted tensors into an installed layer."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[entry.stored_name(name).removeprefix(f"{entry.name}.")].copy_(tensor)


def slice_scales(p: int, scaling: str) -> Tensor:
    """Compute the factor of the frequencies in each slice, float64.  # (p,)."""
    k = torch.arange(1, p + 1, dtype=torch.float64)
    if scaling == "linear":
        return k / p
    if scaling == "exponential":
        return torch.exp2((k - 1) / max(p - 1, 1))
    return k if scaling == "harmonic" else torch.ones_like(k)


def slice_positions(tokens: int, width: int, p: int, scaling: str) -> Tensor:
    """Build sinusoidal positions with frequencies scaled slice by slice, float64, (tokens, width).

    Feature j of slice k, both from 1, of token t from 1 is sin or cos (j odd or even) of
    t alpha_k / 10000^(2 floor((j - 1) / 2) / d_s), with d_s = width / p. Slices are runs of
    features.

    Reference: "Structured Multidimensional Representation Learning for Large Language Models"
    (arXiv:2603.05727), Definition 13 and Remark 4.
    """
    features = width // p
    index = torch.arange(features)
    rates = 10000.0 ** (-2.0 * (index // 2).double() / features)  # (d_s,)
    time = torch.arange(1, tokens + 1, dtype=torch.float64)
    angles = time[:, None, None] * slice_scales(p, scaling)[:, None] * rates  # (T, p, d_s)
    return torch.where(index % 2 == 0, angles.sin(), angles.cos()).reshape(tokens, width)


class SliceNorm(nn.LayerNorm):
    """A layer norm with mean and variance of each of p slices, which are runs of the features.

    Scales and shifts are those of all features. Reference: arXiv:2603.05727, Definition 17.
    """

    def __init__(self, width: int, p: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(width, eps, **options)
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        slices = input.unflatten(-1, (self.p, -1))
        scaled = layer_norm(slices, slices.shape[-1:], eps=self.eps).flatten(-2) * self.weight
        return scaled if self.bias is None else scaled + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


def install_forms(
    root: nn.Module,
    entries: Iterable[FormPlan],
    runtime_name: Callable[[str], str | None],
    **place: Any,
) -> None:
    """Change planned modules to their form; tensors keep their names. See `install_layers`."""
    for entry, path in _placed(entries, runtime_name):
        module = root.get_submodule(path)
        if entry.kind == "norm":
            assert isinstance(module, nn.LayerNorm)
            options = {"bias": module.bias is not None, **place}
            set_module(root, path, SliceNorm(entry.shape[-1], entry.p, module.eps, **options))
            continue
        table = torch.empty(entry.shape, **place)
        # What is no parameter is trained by nobody, whichever trainer it is.
        module._parameters.pop("weight", None)
        module._buffers.pop("weight", None)
        if entry.form == "learned":
            module.register_parameter("weight", nn.Parameter(table))
        else:
            module.register_buffer("weight", table)


def first_table(entry: FormPlan, random: Tensor) -> Tensor:
    """Make the table of positions that a model begins with, float64.  # (rows, width).

    Sinusoids are scaled to the size of the random first values of the family's own model: words are
    as large as these, and would drown in sinusoids between -1 and 1. Rows that stand for no
    position are zero.
    """
    if entry.form == "learned":
        return random.double()
    rows, width = entry.shape
    table = torch.zeros(rows, width, dtype=torch.float64)
    table[entry.offset :] = slice_positions(rows - entry.offset, width, entry.p, entry.form)
    size = random.double().square().mean().sqrt()
    return table * size / table[entry.offset :].square().mean().sqrt() if size > 0 else table


SEGMENTS = "token_type_ids"
_CHECKPOINT = "_gradient_checkpointing_func"  # Transformers sets it where blocks are run twice


def watch_segments(root: nn.Module) -> None:
    """Tell replacements which of two texts a token belongs to.

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
        segments = kwargs.get(SEGMENTS)
    else:
        segments = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get(SEGMENTS)
    for replacement in _owners(module):
        replacement.segments = segments
    for block in module.modules() if module.training else ():
        usual = getattr(block, _CHECKPOINT, None)
        if usual is not None and not isinstance(usual, _Bound) and _owners(block):
            setattr(block, _CHECKPOINT, _Bound(usual, _owners(block)))


class _Bound:
    """Another run of blocks, for their gradients, with the types of tokens of their own pass.

    Another pass may lie between, such as that of the other half of a contrastive loss. `usual` is
    Transformers' function, which runs a block now and once more later.
    """

    def __init__(self, usual: Callable[..., Any], owners: Sequence[ReplacementModule]) -> None:
        self.usual, self.owners = usual, owners

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        segments = [owner.segments for owner in self.owners]

        def bound(*again: Any) -> Any:
            latest = [owner.segments for owner in self.owners]
            self._set(segments)
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
) -> tuple[Tensor, Tensor | None]:
    """Mix tokens by the replacement that an attention owns.

    On `output_attentions` it returns what values were weighed with, where one matrix says it.
    Without one nothing is left of its heads: what they would put out is zero.
    """
    replacement: ReplacementModule | None = getattr(module, CHILD, None)
    if replacement is None:
        batch, heads, tokens, _ = query.shape
        zero = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()
        return zero.expand(batch, tokens, heads, value.shape[-1]), None
    if kwargs.get("cache") is not None:
        hint = "generate without continuous batching"
        raise DataError(f"attention `{replacement.name}` cannot fill a paged cache", hint)
    causal, queries = replacement.layout.causal, query.shape[-2]
    # Masks of flash attention mean that the last keys belong to the queries.
    flash = "flash" in str(getattr(replacement.host_config, "_attn_implementation", ""))
    if flash:
        _check_flash(replacement.name, queries, key.shape[-2], attention_mask, kwargs)
    if attention_mask is None and causal and 1 < queries < key.shape[-2] and not flash:
        # A static cache that is still empty: Transformers leaves the mask out, and means that
        # the first keys belong to the queries.
        key, value = key[:, :, :queries], value[:, :, :queries]
    asked = kwargs.get("output_attentions")
    if asked is None:
        asked = getattr(replacement.host_config, "output_attentions", False)
    said: dict[str, Any] = {"causal": causal, "scaling": scaling}
    if asked:
        return replacement(query, key, value, attention_mask, **said, weights=True)  # type: ignore[no-any-return]
    return replacement(query, key, value, attention_mask, **said), None


def _check_flash(
    name: str, queries: int, keys: int, mask: Tensor | None, said: Mapping[str, Any]
) -> None:
    """Refuse what flash attention is told beside a mask: windows, packed texts, static caches."""
    window, positions = said.get("sliding_window"), said.get("position_ids")
    problem = None
    if window and keys > window:
        problem = f"a window of {window} tokens"
    elif mask is not None and mask.dim() == 2 and mask.shape[1] < keys:
        problem = "a mask of fewer keys than there are"
    elif said.get("cu_seq_lens_q") is not None:
        problem = "packed texts"
    elif mask is None and positions is not None and queries > 1:
        alone = torch.compiler.is_compiling() or not bool((positions.diff(dim=-1) != 1).any())
        problem = None if alone else "packed texts"
    if problem is not None:
        text = f"attention `{name}` cannot read {problem} as flash attention is told of them"
        raise DataError(text, 'load the model with `attn_implementation="sdpa"`')


def _take_over(attention: Any) -> Any:
    """Make an attention call `mix_tokens`; return the config that it had.

    Every attention looks up its function by the name in its config. One that is replaced gets a
    config of its own, which names ours; all others keep what they have, and so does the model,
    which goes on making masks as before. `Visible` reads whatever form these have.
    """
    usual, attention.config = attention.config, copy.copy(attention.config)
    # The setter would hand the name on to configs of parts, which are shared.
    attention.config._attn_implementation_internal = METHOD
    return usual


def install_attention(
    root: nn.Module,
    entries: Iterable[AttentionPlan],
    runtime_name: Callable[[str], str | None],
    **place: Any,
) -> dict[str, ReplacementModule]:
    """Add replacements to planned attentions, with empty tensors; see `install_layers`."""
    installed: dict[str, ReplacementModule] = {}
    for entry, path in _placed(entries, runtime_name):
        attention: Any = root.get_submodule(path)
        installed[entry.name] = replacement = ReplacementModule(entry.layout, path, **place)
        replacement.host_config = _take_over(attention)
        attention.add_module(CHILD, replacement.train(attention.training))
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
    return installed


def first_values(
    entry: AttentionPlan,
    seed: int = SEED,
    *,
    pretrained: bool = True,
    moments: QueryKeyMoments | None = None,
) -> dict[str, Tensor]:
    """Make the tensors of a replacement as a conversion begins with, by checkpoint name."""
    module = ReplacementModule(entry.layout)
    module.fill(seed, pretrained=pretrained, moments=moments)
    named = module.named_parameters()
    return {f"{entry.name}.{CHILD}.{name}": tensor.detach() for name, tensor in named}
