"""The seven-layer classifier of texts that TSA and TGA are measured with.

Word embedding, attention with full-width keys and values per head, mean over the words, dropout, a
dense layer with ReLU, dropout, class scores. Nothing else: no positions, norms or residual paths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForSequenceClassification
from transformers.models.clip.modeling_clip import eager_attention_forward
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from tcompress.own_models.configs import TCompressTextConfig


class SelfAttention(nn.Module):
    """Softmax self-attention that asks Transformers' attention interface, as BERT's does."""

    def __init__(self, config: Any, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim, self.scaling = head_dim, head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False
        width, inner = config.hidden_size, config.num_attention_heads * head_dim
        bias = config.attention_bias
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, inner, bias) for _ in range(3))
        self.o_proj = nn.Linear(inner, width, bias=bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        turns: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mixes tokens; `turns` rotate queries and keys.  # (tokens, head_dim // 2)."""
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if turns is not None:
            query, key = turned(query, turns), turned(key, turns)
        kind = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager_attention_forward)
        kwargs["dropout"] = self.attention_dropout if self.training else 0.0
        kwargs["scaling"] = self.scaling
        mixed, weights = attend(self, query, key, value, attention_mask, **kwargs)
        return self.o_proj(mixed.reshape(*shape, -1).contiguous()), weights


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates pairs of features, half a head apart, by angles (tokens, head_dim // 2)."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    pairs = angles.shape[1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    rest = x[..., 2 * pairs :]  # of an odd width
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class TextBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """One attention."""

    def __init__(self, config: TCompressTextConfig) -> None:
        super().__init__()
        assert config.head_dim is not None  # the config fills it in
        self.self_attn = SelfAttention(config, config.head_dim)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Mixes words.  # (batch, tokens, width) -> the same."""
        mixed, _ = self.self_attn(hidden_states, attention_mask, **kwargs)
        return mixed


class TCompressTextPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base class of the models of texts."""

    config_class = TCompressTextConfig
    config: TCompressTextConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("TextBlock",)
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": TextBlock, "attentions": SelfAttention}  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """Begins as Keras does, which the papers used: Glorot's matrices, small word vectors."""
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.uniform_(module.weight, -self.config.embedding_range, self.config.embedding_range)


class TCompressTextModel(TCompressTextPreTrainedModel):
    """Word embedding and attention."""

    def __init__(self, config: TCompressTextConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TextBlock(config) for _ in range(config.num_hidden_layers)])
        self.post_init()

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs(tie_last_hidden_states=False)  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Reads texts; arguments are those of Transformers.  # (batch, tokens) of words."""
        states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = create_bidirectional_mask(self.config, states, attention_mask)
        for layer in self.layers:
            states = layer(states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=states)


class TextHead(nn.Module):
    """Two dense layers behind dropout."""

    def __init__(self, config: TCompressTextConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.dense = nn.Linear(config.hidden_size, config.classifier_size)
        self.out_proj = nn.Linear(config.classifier_size, config.num_labels)

    def forward(self, pooled: Tensor) -> Tensor:
        """Scores classes.  # (batch, width) -> (batch, labels)."""
        inner = self.dense(self.dropout(pooled)).relu()
        return self.out_proj(self.dropout(inner))


class TCompressTextForSequenceClassification(TCompressTextPreTrainedModel):
    """Class of a text, from the mean of its words."""

    def __init__(self, config: TCompressTextConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TCompressTextModel(config)
        self.classifier = TextHead(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classifies texts; `labels` are classes, or scores.  # (batch,)."""
        read = self.model(input_ids, attention_mask, inputs_embeds, return_dict=True, **kwargs)
        logits = self.classifier(_mean(read.last_hidden_state, attention_mask))
        facts = {"labels": labels, "pooled_logits": logits, "config": self.config}
        loss = None if labels is None else self.loss_function(**facts)
        return SequenceClassifierOutput(loss, logits, read.hidden_states, read.attentions)


def _mean(states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Mean over tokens that are no padding.  # (batch, tokens, width) -> (batch, width)."""
    if attention_mask is None:
        return states.mean(1)
    weights = attention_mask.to(states.dtype)[..., None]
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1)


AutoModel.register(TCompressTextConfig, TCompressTextModel, exist_ok=True)
AutoModelForSequenceClassification.register(
    TCompressTextConfig, TCompressTextForSequenceClassification, exist_ok=True
)
