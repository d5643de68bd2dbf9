"""What an anatomy consists of: plain, frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Role = Literal[
    "q", "k", "v", "qkv", "o",
    "cross_q", "cross_k", "cross_v", "cross_o",
    "gate", "up", "gate_up", "down",
    "experts_gate_up", "experts_down",
    "linear",
]  # fmt: skip
Kind = Literal["linear", "conv1d", "experts", "pointwise"]
Side = Literal["in", "out", "both"]

# Layers whose roles share a group read the very same tensor. `linear` has no row: nothing is
# known about what a scanned layer reads, so each is a group of its own.
GROUP_OF_ROLE: Mapping[Role, str] = {
    **dict.fromkeys(("q", "k", "v", "qkv"), "attn_in"),
    "o": "o_in",
    "cross_q": "cross_q_in",
    **dict.fromkeys(("cross_k", "cross_v"), "cross_kv_in"),
    "cross_o": "cross_o_in",
    **dict.fromkeys(("gate", "up", "gate_up", "experts_gate_up"), "ffn_in"),
    **dict.fromkeys(("down", "experts_down"), "down_in"),
}

_OUT_ROLES = frozenset({"o", "cross_o", "down", "experts_down"})


@dataclass(frozen=True)
class Part:
    """One contiguous run of a layer's output features.

    Attributes:
        name: Role of the run: `q`, `k`, `v`, `gate`, `up`, or the layer's own role.
        size: Number of output features.
    """

    name: str
    size: int


@dataclass(frozen=True)
class Layer:
    """One weight (one per expert, for experts) and its place in the block.

    Attributes:
        name: Module path in the running model; for experts, of the module that holds the weights.
        role: What the layer computes; `linear` where only its shape is known.
        kind: How the weight is stored: `linear` (out, in), `conv1d` (in, out), `experts`
            (experts, out, in), unless they are `transposed`, or `pointwise` (out, in, 1, ...), the
            kernels of a convolution.
        in_features: Width of one input row.
        out_features: Width of one output row, the sum of the sizes of `parts`.
        bias: Whether the layer has a bias.
        parts: Runs of output features, in the order of storage.
        group: Names the input that the layer reads; layers of a block with the same group read
            the same tensor.
        experts: Number of experts, or None for a single weight.
        parameter: Attribute of the module that holds the weight.
        transposed: Whether stacked weights are stored as (experts, in, out).
        calls: How often one forward pass of the block runs the layer. Only the first call reads
            the group's input.
        head: Width of one head of the attention that the layer belongs to, if it is known.
        axes: Number of axes that a convolution moves along.
    """

    name: str
    role: Role
    kind: Kind
    in_features: int
    out_features: int
    bias: bool
    parts: tuple[Part, ...]
    group: str
    experts: int | None = None
    parameter: str = "weight"
    transposed: bool = False
    calls: int = 1
    head: int | None = None
    axes: int = 0

    @property
    def side(self) -> Side:
        """Which side of the layer faces the residual stream; `both` where that is unknown."""
        if self.role == "linear":
            return "both"
        return "out" if self.role in _OUT_ROLES else "in"

    @property
    def routed(self) -> bool:
        """Whether these are experts of whose routing is known what calibration needs."""
        return self.role in ("experts_gate_up", "experts_down")

    @property
    def weight_name(self) -> str:
        """Path of the weight itself, unique in the model."""
        return f"{self.name}.{self.parameter}"


@dataclass(frozen=True)
class Block:
    """One transformer block and its layers, in order of execution."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def groups(self) -> tuple[tuple[Layer, ...], ...]:
        """The layers by shared input, in order of execution: the order of fitting."""
        return tuple(tuple(run) for _, run in groupby(self.layers, key=lambda layer: layer.group))


@dataclass(frozen=True)
class Refusal:
    """A module inside a block that must be left alone, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Anatomy:
    """What can be compressed in a model.

    Attributes:
        family: The model type in the model's config, or its class name where there is none.
        blocks: Transformer blocks in the order in which the model lists them.
        embeddings: Module paths of the word embeddings.
        output_head: Module path of the layer that yields logits over the vocabulary, if any.
        refused: Modules inside blocks that must be left alone.
        warnings: What a user should know before relying on this anatomy.
        supported: Whether every block belongs to a supported family.
        outside: Ordinary linear layers outside of blocks, rewritten only where they are named.
    """

    family: str
    blocks: tuple[Block, ...]
    embeddings: tuple[str, ...]
    output_head: str | None
    refused: tuple[Refusal, ...]
    warnings: tuple[str, ...]
    supported: bool
    outside: tuple[Layer, ...] = ()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of all blocks."""
        return tuple(layer for block in self.blocks for layer in block.layers)
