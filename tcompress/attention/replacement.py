"""What a replacement of attention is: pure functions of a layout, masks, and the registry.

It stands where a model has softmax attention: the model projects tokens to queries, keys and values
per head, the replacement mixes them, and the model projects the result. Its own tensors are few,
and are stored with the attention. Dropout of attention weights has no counterpart here; other
dropout stays as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, model_serializer
from torch import Generator, Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from tcompress.errors import ArtifactError, DataError, message_of
from tcompress.options.method_options import ReplacementSpec
from tcompress.roles.families import BaseAttention as BaseAttention
from tcompress.structures.base import Frozen, Refusal, Registry, Shapes, Tensors
from tcompress.structures.modules.shared import has_autocast

HIDDEN = -1e3
"""What masks add to scores hides a key from here on: users write -1e4, -1e9 or the least number."""

# Masks whose queries were seen to be alike, with their version: all layers of a pass have the same.
_ALIKE = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Visible:
    """Which keys every query sees: one form of the many in which models hand over their masks."""

    pairs: Tensor | None = None  # True where it does, or None: (batch | 1, 1, queries | 1, keys)
    first: Tensor | None = None  # True for tokens of the first of two texts: (batch, keys)

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
        if not torch.compiler.is_compiling() and not (tokens[:, 1:] & ~tokens[:, :-1]).any():
            return None
        return (~tokens).to(torch.uint8).argsort(dim=1, stable=True)

    def in_order(self, order: Tensor) -> Visible:
        """The same for tokens in another order, where all queries see the same."""
        tokens, first = self.tokens, self.first
        pairs = None if tokens is None else tokens.gather(1, order)[:, None, None]
        texts = None if first is None else first.gather(1, order.expand(len(first), -1))
        return Visible(pairs, texts)

    @classmethod
    def of(cls, mask: Tensor | None, q: Tensor, k: Tensor, *, causal: bool) -> Visible:
        """Reads a model's mask: (batch | 1, 1, queries, keys), (batch, keys), or None.

        It is True, or zero, where a query sees a key, or one where a token is no padding. Masks of
        four dimensions say themselves what is `causal`. Other forms are refused.
        """
        queries, keys = q.shape[-2], k.shape[-2]
        if mask is None:
            alone = not causal or queries == 1
            return cls(None if alone else past(queries, keys, q.device)[None, None])
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            found = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            hint = 'load the model with `attn_implementation="sdpa"`'
            raise DataError(f"an attention mask of {found} cannot be read", hint)
        if mask.dim() == 2:
            pairs = mask[:, None, None, -keys:] > 0
            return cls(pairs & past(queries, keys, q.device) if causal else pairs)
        mask = mask[:, :1, :, :keys]
        return cls(mask > (HIDDEN if mask.is_floating_point() else 0))


def check_alike(mask: Tensor | None, seen: Visible) -> None:
    """Checks that all queries see the same keys, but for those of padding, which see none."""
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
            "tokens are told to see different others, as in packed texts, and this replacement "
            "mixes all of a text",
            "give a mask of padding alone, one text in a row, or convert with `tga`",
        )
    if version is not None:
        _ALIKE[mask] = version


def past(queries: int, keys: int, device: torch.device) -> Tensor:
    """Lets the last of the keys' tokens see themselves and what was before.  # (queries, keys)."""
    whole = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return whole.tril(keys - queries)


@dataclass(frozen=True)
class QueryKeyMoments:
    """Second moments of queries and keys, head by head, float64.

    Where softmax follows, keys count less their mean over a text, which shifts all scores alike.
    """

    queries: Tensor  # (heads, head_dim, head_dim)
    keys: Tensor  # (key_heads, head_dim, head_dim)


class ReplacementLayout(Frozen):
    """All that is needed to build one replacement: it is stored in the artefact."""

    mechanism: str
    heads: int = Field(gt=0)
    key_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    causal: bool = False

    @model_serializer(mode="wrap")
    def _with_replacement(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Keeps the name in dumps without defaults: it selects the class on reading."""
        return {"mechanism": self.mechanism, **handler(self)}


S = TypeVar("S", bound=ReplacementSpec)
L = TypeVar("L", bound=ReplacementLayout)


class AttentionReplacement(ABC, Generic[S, L]):
    """One way of mixing tokens. Stateless; tensors are passed in."""

    name: ClassVar[str]  # lower snake case
    summary: ClassVar[str]  # one line
    reference: ClassVar[str]  # paper
    spec: type[S]  # options
    layout_type: type[L]  # what is stored
    unused: ClassVar[tuple[str, ...]] = ()  # roles of projections that it has no use for
    causal: ClassVar[bool] = False  # whether a token never sees later ones in a causal model
    windows: ClassVar[bool] = False  # whether it keeps to the window of an attention
    pairwise: ClassVar[bool] = False  # whether queries may see different keys
    segments: ClassVar[bool] = False  # whether it tells the two texts of a pair apart

    def layout(self, spec: S, base: BaseAttention) -> L:
        """Decides sizes for an attention, or raises `Refusal`."""
        if base.causal and not self.causal:
            raise Refusal(f"`{spec.name}` would look ahead, and this attention is causal")
        if base.window is not None and not self.windows:
            near = f"each token sees only {base.window} others"
            raise Refusal(f"{near}, and `{spec.name}` mixes all")
        if base.biased:
            raise Refusal("its attention adds a bias of positions, which has no place here")
        if base.heads % base.key_heads:
            raise Refusal(f"{base.heads} heads do not share {base.key_heads} heads of keys evenly")
        heads = {"heads": base.heads, "key_heads": base.key_heads, "head_dim": base.head_dim}
        return self.layout_type(**heads, causal=base.causal, **self.arrange(spec, base))

    @abstractmethod
    def arrange(self, spec: S, base: BaseAttention) -> dict[str, Any]:
        """Decides what the layout says besides the heads, or raises `Refusal`."""

    @abstractmethod
    def tensors(self, layout: L) -> Shapes:
        """Shapes of its own tensors."""

    def macs(self, layout: L, tokens: int) -> int:
        """Multiply-adds of matrix products in a pass over so many tokens, none of them padding."""
        return _counted(layout, tokens)

    @abstractmethod
    def start(self, layout: L, generator: Generator, *, pretrained: bool) -> dict[str, Tensor]:
        """Makes first values: near a `pretrained` model's own attention, or as in the paper."""

    def centres_keys(self, layout: L) -> bool | None:
        """Whether `adapted` wants moments of centred keys; None where it wants no moments."""
        return None

    def adapted(self, layout: L, moments: QueryKeyMoments) -> dict[str, Tensor]:
        """Makes those first values that depend on queries and keys of a trained model."""
        return {}

    @abstractmethod
    def apply(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors, layout: L, seen: Visible
    ) -> Tensor:
        """Mixes tokens; `tensors` are its own and its constants. Padding comes last if `ordered`.

        (batch, heads, queries, head_dim), twice (batch, key_heads, keys, head_dim) -> as the first
        """

    def constants(self, layout: L) -> Tensors:
        """Fixed tensors: made once, neither stored nor trained; float32."""
        return {}

    def ordered(self, layout: L) -> bool:
        """Whether tokens are known by their place, so that padding has to come after them."""
        return False

    def longest(self, layout: L) -> int | None:
        """Most tokens of an input, where it limits them and the model does not."""
        return None

    def note(self, layout: L, longest: int | None, *, pretrained: bool) -> str | None:
        """What a user should know before converting, for inputs of at most so many tokens."""
        return None


@lru_cache(maxsize=1024)
@torch.no_grad()
def _counted(layout: ReplacementLayout, tokens: int) -> int:
    """Multiply-adds as torch counts them in a pass on the meta device."""
    kind, meta = replacement_named(layout.mechanism), torch.device("meta")
    shapes = kind.tensors(layout).items()
    tensors = {name: torch.empty(shape, device=meta) for name, shape in shapes}
    tensors |= {name: tensor.to(meta) for name, tensor in kind.constants(layout).items()}
    counts, width = (layout.heads, layout.key_heads), layout.head_dim
    q, k = (torch.empty(1, heads, tokens, width, device=meta) for heads in counts)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        try:
            kind.apply(q, k, k, tensors, layout, Visible())
        except RuntimeError as error:
            said = f"sizes of an attention `{layout.mechanism}` do not go together: "
            hint = "convert the model again, or take `config.json` from a good copy"
            raise ArtifactError(said + message_of(error), hint) from error
    return counter.get_total_flops() // 2


def as_they_are(device: torch.device) -> AbstractContextManager[object]:
    """Leaves every product in the dtype of its factors, which autocast would lower."""
    if has_autocast(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeats heads of keys or values (batch, key_heads, tokens, width) for every query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def take_tokens(x: Tensor, places: Tensor) -> Tensor:
    """Picks tokens.  # (batch, heads, tokens, width), (batch | 1, picked)."""
    return x.gather(2, places[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))


_REPLACEMENTS = Registry[AttentionReplacement[Any, Any]]("attention replacement", "mechanism")
register = _REPLACEMENTS.add


def replacement_named(name: str) -> AttentionReplacement[Any, Any]:
    """The attention replacement of a name; a `RecipeError` tells which there are."""
    return _REPLACEMENTS[name]  # a function, for Dynamo: it traces no method of a dictionary


AnyReplacementLayout = Annotated[
    SerializeAsAny[ReplacementLayout], BeforeValidator(_REPLACEMENTS.parsed)
]
"""A layout of any registered replacement."""


def replacement_of(spec: ReplacementSpec) -> AttentionReplacement[Any, Any]:
    """Returns the replacement that options belong to."""
    return next(item for item in replacements() if isinstance(spec, item.spec))


def replacements() -> tuple[AttentionReplacement[Any, Any], ...]:
    """Returns all replacements in the order of registration."""
    return tuple(_REPLACEMENTS.values())
