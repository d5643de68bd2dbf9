"""What a replacement of attention is: its options, pure functions of a layout, and the registry.

It stands where a model has softmax attention: the model projects tokens to queries, keys and values
per head, the replacement mixes them, and the model projects the result. Its own tensors are few,
and are stored with the attention. Dropout of attention weights has no counterpart here; other
dropout stays as it is.

Reading the options of a replacement costs no import of torch: files of replacements import it, and
`visibility`, where they compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BeforeValidator, Field, SerializeAsAny, model_serializer

from tcompress.errors import ArtifactError, message_of
from tcompress.fields import Options
from tcompress.roles.families import BaseAttention as BaseAttention
from tcompress.structures.base import Frozen, Refusal, Registry, Shapes, Tensors

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from tcompress.attention.visibility import Visible


class ReplacementSpec(Options):
    """Options of a replacement as a recipe gives them."""

    structure: ClassVar[str] = "lprod"
    """Structure that goes with it where only a size is given, as in its paper."""
    only: ClassVar[tuple[str, ...]] = ()
    """Patterns of the layers that the paper stores in it; empty for all."""

    if TYPE_CHECKING:
        name: str


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
        """Keep the name in dumps without defaults: it selects the class on reading."""
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
    healing: ClassVar[str | None] = None  # why a converted model has to be trained, where it has to

    def layout(self, spec: S, base: BaseAttention) -> L:
        """Decide sizes for an attention, or raise `Refusal`."""
        if base.causal and not self.causal:
            raise Refusal(f"`{spec.name}` would look ahead, and this attention is causal")
        if base.window is not None and not self.windows:
            narrow = f"each token sees only {base.window} others"
            raise Refusal(f"{narrow}, and `{spec.name}` mixes all")
        if base.biased:
            raise Refusal("its attention adds a bias of positions, which has no place here")
        if base.heads % base.key_heads:
            raise Refusal(f"{base.heads} heads do not share {base.key_heads} heads of keys evenly")
        heads = {"heads": base.heads, "key_heads": base.key_heads, "head_dim": base.head_dim}
        return self.layout_type(**heads, causal=base.causal, **self.arrange(spec, base))

    def arrange(self, spec: S, base: BaseAttention) -> dict[str, Any]:
        """Decide what the layout says besides the heads, or raise `Refusal`."""
        return {}

    @abstractmethod
    def tensors(self, layout: L) -> Shapes:
        """Shapes of its own tensors."""

    def macs(self, layout: L, tokens: int) -> int:
        """Multiply-adds of matrix products in a pass over so many tokens, none of them padding."""
        return _counted(layout, tokens)

    @abstractmethod
    def start(self, layout: L, generator: Generator, *, pretrained: bool) -> Tensors:
        """Make first values: near a `pretrained` model's own attention, or as in the paper."""

    def centres_keys(self, layout: L) -> bool | None:
        """True where `adapted` wants moments of centred keys; None where it wants no moments."""
        return None

    def adapted(self, layout: L, moments: QueryKeyMoments, first: Tensors) -> Tensors:
        """Make those first values that depend on a trained model's queries and keys.

        They take the place of those in `first`, which `start` made.
        """
        return {}

    @abstractmethod
    def apply(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors, layout: L, visible: Visible
    ) -> tuple[Tensor, Tensor | None]:
        """Mix tokens, and return what values were weighed with, where one matrix says it.

        `tensors` are its own and its constants. Padding comes last if `ordered`.

        (batch, heads, queries, head_dim), twice (batch, key_heads, keys, head_dim) -> as the first,
        and (batch, heads, queries, keys) or None
        """

    def constants(self, layout: L) -> Tensors:
        """Fixed tensors: made once, neither stored nor trained; float32."""
        return {}

    def ordered(self, layout: L) -> bool:
        """True where tokens are known by their place, so that padding has to come after them."""
        return False

    def longest(self, layout: L) -> int | None:
        """Most tokens of an input, where it limits them and the model does not."""
        return None

    def note(self, layout: L, longest: int | None, *, pretrained: bool) -> str | None:
        """Note for users who convert it, for inputs of at most so many tokens."""
        return self.healing if pretrained else None


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat heads of keys or values (batch, key_heads, tokens, width) for every query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def take_tokens(x: Tensor, places: Tensor) -> Tensor:
    """Pick tokens.  # (batch, heads, tokens, width), (batch | 1, picked)."""
    return x.gather(2, places[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))


@lru_cache(maxsize=1024)
def _counted(layout: ReplacementLayout, tokens: int) -> int:
    """Multiply-adds as torch counts them in a pass on the meta device."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from tcompress.attention.visibility import Visible

    kind, meta = replacement_named(layout.mechanism), torch.device("meta")
    shapes = kind.tensors(layout).items()
    tensors = {name: torch.empty(shape, device=meta) for name, shape in shapes}
    tensors |= {name: tensor.to(meta) for name, tensor in kind.constants(layout).items()}
    counts, width = (layout.heads, layout.key_heads), layout.head_dim
    q, k = (torch.empty(1, heads, tokens, width, device=meta) for heads in counts)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        try:
            kind.apply(q, k, k, tensors, layout, Visible())
        except RuntimeError as error:
            text = f"sizes of an attention `{layout.mechanism}` do not go together: "
            hint = "convert the model again, or take `config.json` from a good copy"
            raise ArtifactError(text + message_of(error), hint) from error
    return counter.get_total_flops() // 2


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
    """Find the replacement that options belong to."""
    return next(item for item in replacements() if isinstance(spec, item.spec))


def replacements() -> tuple[AttentionReplacement[Any, Any], ...]:
    """List all replacements in the order of registration."""
    return tuple(_REPLACEMENTS.values())
