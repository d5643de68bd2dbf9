"""A transformer over a grid of patches, for volumes and for multivariate series.

These are the models that Higher-Order Transformers are measured with. Positions are learnt, a table
for each axis, whose rows are added, or queries and keys are rotated, as in the paper (`positions:
rotary`).
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, pad
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForTimeSeriesPrediction,
)
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.patchtst.modeling_patchtst import PatchTSTForPredictionOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from tcompress.errors import DataError, InputError
from tcompress.own_models.configs import TCompressGridConfig
from tcompress.own_models.text import SelfAttention


class Convolutions(nn.Module):
    """Convolutions of stride 2 until a patch is one place (HOT, appendix on volumes)."""

    def __init__(self, config: TCompressGridConfig) -> None:
        super().__init__()
        kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(config.patch_size) - 1]
        steps = max(config.patch_size).bit_length() - 1
        widths = [max(1, config.hidden_size >> (steps - step)) for step in range(1, steps + 1)]
        self.activation = ACT2FN[config.hidden_act]
        self.layers = nn.ModuleList()
        self.norms = nn.ModuleList([nn.GroupNorm(1, width) for width in widths[:-1]])
        for step, (before, after) in enumerate(pairwise([config.num_channels, *widths])):
            strides = tuple(2 if patch >> step > 1 else 1 for patch in config.patch_size)
            self.layers.append(kind(before, after, 3, strides, padding=1))

    def forward(self, grid_values: Tensor) -> Tensor:
        """Embeds inputs.  # (batch, channels, *input_size) -> (batch, *grid, width)."""
        states = self.layers[0](grid_values)
        for norm, layer in zip(self.norms, self.layers[1:], strict=True):
            states = layer(self.activation(norm(states)))
        return states.movedim(1, -1)


class GridEmbeddings(nn.Module):
    """Embedding of patches, and positions along each axis."""

    def __init__(self, config: TCompressGridConfig) -> None:
        super().__init__()
        self.config = config
        inputs = config.num_channels * prod(config.patch_size)
        if config.stem == "convolution":
            self.projection: nn.Module = Convolutions(config)
        else:
            self.projection = nn.Linear(inputs, config.hidden_size)
        sizes = config.grid if config.positions == "learnt" else ()
        self.positions = nn.ModuleList([nn.Embedding(size, config.hidden_size) for size in sizes])
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, grid_values: Tensor) -> Tensor:
        """Embeds inputs.  # (batch, channels, *input_size) -> (batch, patches, width)."""
        config = self.config
        expected, found = (config.num_channels, *config.input_size), tuple(grid_values.shape[1:])
        if found != expected:
            hint = "give inputs of the size that the config of the model names"
            raise DataError(f"inputs have the shape {found}, the model takes {expected}", hint)
        convolved = config.stem == "convolution"
        states = self.projection(grid_values if convolved else patches(grid_values, config))
        for axis, table in enumerate(self.positions):
            after = len(self.positions) - 1 - axis
            places = table(torch.arange(config.grid[axis], device=states.device))
            states = states + places.view(-1, *[1] * after, config.hidden_size)
        return self.dropout(states.flatten(1, -2))


def rotations(
    config: TCompressGridConfig, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Angles by which pairs of features of a head are turned.  # (patches, head_dim // 2)."""
    # Every rotated axis has an equal run of the pairs; pairs that are left over are not turned.
    pairs = config.hidden_size // config.num_attention_heads // 2
    each = pairs // len(config.rotated)
    rates = 10000.0 ** (-torch.arange(each, device=device, dtype=dtype) / each)
    runs = [torch.arange(size, device=device) for size in config.grid]
    places = torch.cartesian_prod(*runs).reshape(-1, len(runs))  # (patches, axes)
    angles = places[:, list(config.rotated), None] * rates  # (patches, rotated axes, pairs of each)
    return pad(angles.flatten(1), (0, pairs - each * len(config.rotated)))


def patches(grid_values: Tensor, config: TCompressGridConfig) -> Tensor:
    """Cuts inputs into patches, channels first.  # -> (batch, *grid, channels * patch)."""
    for axis, size in enumerate(config.patch_size):
        grid_values = grid_values.unfold(2 + axis, size, size)
    axes = len(config.grid)
    return grid_values.movedim(1, 1 + axes).flatten(1 + axes)


class GridBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """Attention and MLP, each behind a norm and beside a residual path."""

    def __init__(self, config: TCompressGridConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.self_attn = SelfAttention(config, width // config.num_attention_heads)
        self.mlp_norm = nn.LayerNorm(width, eps=eps)
        self.mlp = CLIPMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Mixes patches.  # (batch, patches, width) -> the same."""
        mixed, _ = self.self_attn(self.attention_norm(hidden_states), attention_mask, **kwargs)
        hidden_states = hidden_states + self.dropout(mixed)
        return hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states)))


class TCompressGridPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base class of the models on grids."""

    config_class = TCompressGridConfig
    config: TCompressGridConfig
    base_model_prefix = "model"
    main_input_name = "grid_values"
    supports_gradient_checkpointing = True
    _no_split_modules = ("GridEmbeddings", "GridBlock")
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": GridBlock, "attentions": SelfAttention}  # noqa: RUF012


class TCompressGridModel(TCompressGridPreTrainedModel):
    """Patches, blocks and a last norm."""

    def __init__(self, config: TCompressGridConfig) -> None:
        super().__init__(config)
        self.embeddings = GridEmbeddings(config)
        self.layers = nn.ModuleList([GridBlock(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.projection

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs(tie_last_hidden_states=False)  # type: ignore[untyped-decorator]
    def forward(self, grid_values: Tensor, **kwargs: Any) -> BaseModelOutput:
        """Reads inputs.  # (batch, channels, *input_size)."""
        states = self.embeddings(grid_values.to(self.norm.weight.dtype))
        if self.config.rotated:
            dtype = torch.promote_types(states.dtype, torch.float32)
            kwargs["turns"] = rotations(self.config, states.device, dtype)
        for layer in self.layers:
            states = layer(states, None, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(states))


class TCompressGridForImageClassification(TCompressGridPreTrainedModel):
    """Class of a volume, from the mean of its patches."""

    def __init__(self, config: TCompressGridConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TCompressGridModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, grid_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Classifies volumes of values from 0 to 1.  # (batch, channels, *input_size)."""
        read = self.model(grid_values, return_dict=True, **kwargs)
        logits = self.classifier(read.last_hidden_state.mean(1))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss, logits, read.hidden_states, read.attentions)


class TCompressGridForForecasting(TCompressGridPreTrainedModel):
    """Forecast of each variable, from its patches by one linear map for all variables."""

    main_input_name = "past_values"

    def __init__(self, config: TCompressGridConfig) -> None:
        super().__init__(config)
        if len(config.grid) != 2 or config.horizon is None or config.num_channels != 1:
            raise InputError(
                f"forecasting needs a grid of variables x time, one channel and a horizon; the "
                f"config has `input_size` {config.input_size}, `num_channels` "
                f"{config.num_channels} and `horizon` {config.horizon}",
                "set `input_size` to [variables, time steps], `num_channels` to 1 and `horizon`",
            )
        self.model = TCompressGridModel(config)
        outputs = config.patch_size[0] * config.horizon
        self.head = nn.Linear(config.grid[1] * config.hidden_size, outputs)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, past_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> PatchTSTForPredictionOutput:
        """Forecasts series; `labels` are what came after them.

        # (batch, time steps, variables) -> (batch, horizon, variables)
        """
        past = past_values.to(self.head.weight.dtype)
        mean = spread = None
        if self.config.instance_norm:
            mean = past.mean(1, keepdim=True)
            spread = (past.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
            past = (past - mean) / spread
        read = self.model(past.mT[:, None], return_dict=True, **kwargs)
        rows = read.last_hidden_state.unflatten(1, self.config.grid).flatten(2)
        # A row of patches may hold several variables.
        forecast = self.head(rows).unflatten(-1, (self.config.patch_size[0], -1)).flatten(1, 2).mT
        if mean is not None and spread is not None:
            forecast = forecast * spread + mean
        loss = None if labels is None else mse_loss(forecast.float(), labels.float())
        return PatchTSTForPredictionOutput(loss, forecast, read.hidden_states, read.attentions)


AutoModel.register(TCompressGridConfig, TCompressGridModel, exist_ok=True)
AutoModelForImageClassification.register(
    TCompressGridConfig, TCompressGridForImageClassification, exist_ok=True
)
AutoModelForTimeSeriesPrediction.register(
    TCompressGridConfig, TCompressGridForForecasting, exist_ok=True
)
