"""Softmax self-attention that asks Transformers' attention interface, as BERT's does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class SelfAttention(nn.Module):
    """Self-attention without direction.

    Args:
        config: A host's configuration.
        head_dim: Width of one head.
    """

    def __init__(self, config: Any, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim, self.scaling = head_dim, head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False
        width, inner = config.hidden_size, config.num_attention_heads * head_dim
        self.q_proj = nn.Linear(width, inner, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, inner, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, inner, bias=config.attention_bias)
        self.o_proj = nn.Linear(inner, width, bias=config.attention_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        turns: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mixes tokens.

        Args:
            hidden_states: Tokens.  # (batch, tokens, width)
            attention_mask: Mask in the form of the chosen implementation.
            turns: Angles by which queries and keys are rotated.  # (tokens, head_dim // 2)
            **kwargs: What only some implementations need.

        Returns:
            Tokens, and weights where the implementation gives them.
        """
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if turns is not None:
            query, key = turned(query, turns), turned(key, turns)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        mixed, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(mixed.reshape(*shape, -1).contiguous()), weights


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates pairs of features, of which the second lies half a head behind the first.

    Args:
        x: Queries or keys.  # (batch, heads, tokens, head_dim)
        angles: Angles of the pairs.  # (tokens, head_dim // 2)
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    pairs = angles.shape[1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    rest = x[..., 2 * pairs :]  # of an odd width
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax attention step by step, which returns its weights.

    Args:
        module: The attention.
        query: Queries.  # (batch, heads, tokens, head_dim)
        key: Keys.  # (batch, heads, tokens, head_dim)
        value: Values.  # (batch, heads, tokens, head_dim)
        attention_mask: What is added to scores.
        scaling: What scores are multiplied by.
        dropout: Share of the weights that is dropped.
        **kwargs: What only other implementations need.

    Returns:
        Mixed values (batch, tokens, heads, head_dim) and weights.
    """
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights
