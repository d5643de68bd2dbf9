"""Configurations of our own models. Importing them does not import torch."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from tcompress.errors import InputError


def check_choice(config: Any, key: str, *choices: str) -> None:
    """Refuse a value of a config that is none of its choices, the first of which is the default."""
    value, allowed = getattr(config, key), " and ".join(f"`{name}`" for name in choices)
    if value not in choices:
        text = f"`{key}: {value}` is not known; allowed are {allowed}"
        raise InputError(text, f"leave it out for `{choices[0]}`")


@strict
class TCompressTextConfig(PreTrainedConfig):  # type: ignore[misc]
    """Classifier of texts with seven layers (TSA section 6, TGA section 5)."""

    model_type = "tcompress_text"

    vocab_size: int = 20_000
    hidden_size: int = 64
    num_hidden_layers: int = 1  # attentions, one after another; the papers have one
    num_attention_heads: int = 2
    head_dim: int | None = None  # default the whole `hidden_size`, as in the papers
    attention_bias: bool = False  # whether projections have biases; the papers' have none
    attention_dropout: float | int = 0.0
    hidden_dropout_prob: float | int = 0.1  # before each of the two dense layers of the head
    classifier_size: int = 20  # units of the first of them
    max_position_embeddings: int = 200  # most tokens of a text; there are no positions to learn
    pad_token_id: int | None = 0
    embedding_range: float | int = 0.05  # word vectors begin uniform within this distance of zero

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.head_dim is None:
            self.head_dim = self.hidden_size


@strict
class TCompressGridConfig(PreTrainedConfig):  # type: ignore[misc]
    """Transformer over a grid of patches: volumes, or variables x time."""

    model_type = "tcompress_grid"

    input_size: list[int] | tuple[int, ...] = (28, 28, 28)  # along each axis; or variables, time
    patch_size: list[int] | tuple[int, ...] = (4, 4, 4)  # it divides `input_size`
    stem: str = "linear"  # or `convolution`: of stride 2, as HOT has before volumes
    positions: str = "learnt"  # a table for each axis; or `rotary`: queries and keys turn (HOT)
    rotary_axes: list[int] | tuple[int, ...] | None = None  # that turn, from 0; default all
    num_channels: int = 1
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 128
    hidden_act: str = "gelu"
    attention_bias: bool = True
    attention_dropout: float | int = 0.0
    hidden_dropout_prob: float | int = 0.1
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    horizon: int | None = None  # time steps to forecast
    instance_norm: bool = True  # forecast each series in units of its context (RevIN, not affine)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.input_size, self.patch_size = list(self.input_size), list(self.patch_size)
        sizes = f"`input_size` {self.input_size}, `patch_size` {self.patch_size}"
        if len(self.input_size) != len(self.patch_size) or not self.input_size:
            hint = "give both one number for each axis"
            raise InputError(f"{sizes} of a grid differ in their number of axes", hint)
        if any(p < 1 or n % p for n, p in zip(self.input_size, self.patch_size, strict=True)):
            hint = "along each axis give a patch size that divides the input's"
            raise InputError(f"{sizes}: patches do not fill the input", hint)
        if self.hidden_size % self.num_attention_heads:
            said = f"{self.num_attention_heads} heads do not divide the width {self.hidden_size}"
            raise InputError(said, "choose `num_attention_heads` that divides `hidden_size`")
        check_choice(self, "stem", "linear", "convolution")
        check_choice(self, "positions", "learnt", "rotary")
        halves = all(size & (size - 1) == 0 for size in self.patch_size)
        one = max(self.patch_size) == 1 or len(self.patch_size) > 3
        if self.stem == "convolution" and (one or not halves):
            raise InputError(
                f"`stem: convolution` halves up to 3 axes step by step, and `patch_size` is "
                f"{self.patch_size}",
                "give powers of two such as [4, 4, 4], or `stem: linear`",
            )
        axes, width = self.rotated, self.hidden_size // self.num_attention_heads
        fine = set(axes) <= set(range(len(self.input_size))) and len({*axes}) == len(axes)
        if not fine or width < 2 * len(axes) or (self.positions == "rotary" and not axes):
            raise InputError(
                f"`rotary_axes` {list(axes)} cannot rotate heads of width {width} over "
                f"{len(self.input_size)} axes",
                "name each axis once, from 0, and give every one two features of a head",
            )

    @property
    def rotated(self) -> tuple[int, ...]:
        """Axes along which queries and keys are rotated."""
        if self.positions != "rotary":
            return ()
        named = self.rotary_axes
        return tuple(range(len(self.input_size))) if named is None else tuple(named)

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of patches along each axis."""
        axes = zip(self.input_size, self.patch_size, strict=True)
        return tuple(size // patch for size, patch in axes)


@strict
class TCompressTamConfig(PreTrainedConfig):  # type: ignore[misc]
    """Encoder of three texts, whose attention is TAM as published (section 4).

    The query is the first text, the memory of keys and values both of a pair, each read by a GRU
    from a fresh state, and the semantics are a third text: tokens of types 0, 1 and 2.
    """

    model_type = "tcompress_tam"

    vocab_size: int = 20_000
    hidden_size: int = 160  # of embeddings and states; the paper has 768
    attention_size: int = 160  # of queries, keys, values and semantics, D in the paper
    num_hidden_layers: int = 4
    num_attention_heads: int = 1  # cores take the place of heads
    cores: int = 3  # they are averaged; the paper has 3 and 20
    without: str = "nothing"  # an ablation: `semantic-fusing` or `query-alignment`
    intermediate_size: int = 640
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 64  # most tokens of all three texts
    memory_length: int = 48  # most tokens of the pair, without semantic fusing; the paper's
    semantics_length: int = 16  # most tokens of the semantics, likewise, their end included
    type_vocab_size: int = 3
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True

    reads_semantics = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_choice(self, "without", "nothing", "semantic-fusing", "query-alignment")
        if self.type_vocab_size < 3 or self.num_attention_heads != 1:
            raise InputError(
                f"`type_vocab_size` is {self.type_vocab_size} and `num_attention_heads` "
                f"{self.num_attention_heads}: this model tells three texts apart and has one head",
                "leave both out, and set `cores`",
            )


for _kind in (TCompressTextConfig, TCompressGridConfig, TCompressTamConfig):
    AutoConfig.register(_kind.model_type, _kind, exist_ok=True)
