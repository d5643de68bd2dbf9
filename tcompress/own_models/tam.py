"""An encoder of three texts whose attention is TAM as published.

BERT's layers with TAM in the place of self-attention. A query (the first text) meets a memory
(both texts of a pair, read by a GRU) through semantics (a third text); every layer has projections
and cores of its own, and reads the same memory and semantics. Scores weigh values as they are:
there is no softmax and no scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    AutoModel,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
)
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from tcompress.attention.tam import TamLayout, tam_scores
from tcompress.errors import DataError
from tcompress.own_models.configs import TCompressTamConfig


class Texts(NamedTuple):
    """What a layer reads beside the query: states, and the tokens that they are of."""

    memory: Tensor  # (batch, tokens, width)
    in_memory: Tensor  # True for tokens of the pair: (batch, tokens)
    semantics: Tensor  # (batch, tokens, width)
    in_semantics: Tensor  # True for tokens of the third text: (batch, tokens)


class Gru(nn.Module):
    """The gated recurrent unit of Cho et al. 2014: the reset gate acts before the product.

    r = s(W_r x + U_r h), z = s(W_z x + U_z h), n = tanh(W x + U (r * h)), h' = z h + (1 - z) n.
    PyTorch's own has r * (U h) instead.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 3 * width)  # of r, z and n
        self.gates = nn.Linear(width, 2 * width, bias=False)  # U of r and z
        self.candidate = nn.Linear(width, width, bias=False)  # U of n

    def forward(self, x: Tensor, begins: Tensor) -> Tensor:
        """States; where a text `begins` the one before is forgotten.

        # (batch, tokens, width), (batch, tokens) -> (batch, tokens, width)
        """
        inputs, kept = self.inputs(x), (~begins).to(x.dtype)[..., None]
        state, states = torch.zeros_like(x[:, 0]), []
        for token in range(x.shape[1]):
            reset, update, new = inputs[:, token].chunk(3, -1)
            state = state * kept[:, token]
            own_reset, own_update = self.gates(state).chunk(2, -1)
            reset, update = (reset + own_reset).sigmoid(), (update + own_update).sigmoid()
            new = (new + self.candidate(reset * state)).tanh()
            state = update * state + (1 - update) * new
            states.append(state)
        return torch.stack(states, 1)


class TamAttention(nn.Module):
    """Equations 4 to 7: scores of a core tensor, averaged over cores, summed over semantics."""

    def __init__(self, config: TCompressTamConfig) -> None:
        super().__init__()
        self.config = config
        width, size = config.hidden_size, config.attention_size
        self.q_proj, self.k_proj, self.s_proj = (nn.Linear(width, size) for _ in range(3))
        if config.without == "semantic-fusing":
            self.split_proj = nn.Linear(config.memory_length * config.semantics_length, width)
        else:
            self.v_proj, self.o_proj = nn.Linear(width, size), nn.Linear(size, width)
        self.core = nn.Parameter(torch.empty(config.cores, 1, size))
        # What the formulas of the attention replacement read.
        core: Any = "cp" if config.without == "query-alignment" else "aligned"
        sizes: dict[str, Any] = {"heads": 1, "key_heads": 1, "head_dim": size, "core": core}
        self.layout = TamLayout(**sizes, cores=config.cores, normalize="none")

    def forward(self, hidden_states: Tensor, texts: Texts, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Mix memory into queries, and return the weights.

        # (batch, tokens, width) -> the same, (batch, 1, queries, keys)
        """
        q, k = self.q_proj(hidden_states)[:, None], self.k_proj(texts.memory)[:, None]
        s = self.s_proj(texts.semantics) * texts.in_semantics[..., None].to(q.dtype)
        core = {"core": self.core.to(q.dtype)}
        scores = tam_scores(q, k, s.sum(1)[:, None], core, self.layout)
        scores = scores.masked_fill(~texts.in_memory[:, None, None], 0)
        if self.config.without == "semantic-fusing":
            return self.split_proj(self._split(q[:, 0], k[:, 0], s, texts)), scores
        mixed = scores @ self.v_proj(texts.memory)[:, None]
        return self.o_proj(mixed[:, 0]), scores

    def _split(self, q: Tensor, k: Tensor, s: Tensor, texts: Texts) -> Tensor:
        """The attention tensor, slices of semantic tokens side by side.  # (batch, Q, S K)."""
        keys, places = self.config.memory_length, self.config.semantics_length
        k = _cut(k * texts.in_memory[..., None].to(k.dtype), keys)
        first = texts.in_semantics.long().argmax(1, keepdim=True)  # the third text comes last
        index = first + torch.arange(places, device=s.device)
        inside = (index < s.shape[1])[..., None].to(s.dtype)
        index = index.clamp(max=s.shape[1] - 1)[..., None].expand(-1, -1, s.shape[2])
        s = s.gather(1, index) * inside
        core = self.core.mean(0)[0].to(q.dtype)
        if self.layout.core == "cp":
            tensor = torch.einsum("bqd,bkd,bsd->bqsk", q * core, k, s)
        else:  # the feature of a query's place: zero for those that come after the last one
            count = min(q.shape[1], len(core))
            gate = q.sum(-1)[:, :count] * core[:count]
            features = (gate, k[..., :count], s[..., :count])
            tensor = _cut(torch.einsum("bq,bkq,bsq->bqsk", *features).flatten(2), q.shape[1])
        return tensor.flatten(2)


def _cut(x: Tensor, length: int) -> Tensor:
    """Bring rows to a length, with zeros.  # (batch, tokens, width) -> (batch, length, width)."""
    return pad(x[:, :length], (0, 0, 0, max(0, length - x.shape[1])))


class TamBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """TAM and a feed-forward network, each added to what it read and normalised."""

    def __init__(self, config: TCompressTamConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention = TamAttention(config)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.mlp = CLIPMLP(config)
        self.mlp_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, texts: Texts, **kwargs: Any) -> Tensor:
        """Update queries.  # (batch, tokens, width) -> the same."""
        mixed, _ = self.attention(hidden_states, texts, **kwargs)
        hidden_states = self.attention_norm(hidden_states + self.dropout(mixed))
        inner = self.dropout(self.mlp(hidden_states))
        return self.mlp_norm(hidden_states + inner)  # type: ignore[no-any-return]


class TCompressTamPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What the models share."""

    config_class = TCompressTamConfig
    config: TCompressTamConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("TamBlock",)
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": TamBlock, "attentions": TamAttention}  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """Begin as BERT does, with cores whose weights are of sum 1 (equation 5)."""
        if isinstance(module, nn.Embedding):  # the row of padding too
            init.normal_(module.weight, std=self.config.initializer_range)
            return
        super()._init_weights(module)
        if isinstance(module, TamAttention):
            init.copy_(module.core, torch.rand(module.core.shape).softmax(-1))


class TCompressTamModel(TCompressTamPreTrainedModel):
    """Embeddings, the GRU that reads them, and blocks."""

    def __init__(self, config: TCompressTamConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width, config.pad_token_id)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, width)
        self.embed_types = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.gru = Gru(width)
        self.layers = nn.ModuleList([TamBlock(config) for _ in range(config.num_hidden_layers)])
        self.post_init()

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs(tie_last_hidden_states=False)  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Read three texts, of token types 0, 1 and 2 in this order; padding comes last.

        States are those of queries: of the first text.  # (batch, tokens) of words
        """
        states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        types = _checked(token_type_ids, states.shape[:2])
        valid = torch.ones_like(types) if attention_mask is None else attention_mask
        places = torch.arange(states.shape[1], device=states.device)
        states = states + self.embed_positions(places) + self.embed_types(types)
        states = self.dropout(self.norm(states))
        begins = types != types.roll(1, 1)  # the very first state is zero in any case
        real = valid.bool()
        texts = Texts(self.gru(states, begins), real & (types < 2), states, real & (types == 2))
        for layer in self.layers:
            states = layer(states, texts, **kwargs)
        return BaseModelOutput(last_hidden_state=states)


def _checked(types: Tensor | None, shape: torch.Size) -> Tensor:
    """Types of tokens, of which some in each example have to be of the third text."""
    hint = "give `token_type_ids` of 0 for the query, 1 for what answers it and 2 for the semantics"
    if types is None:
        raise DataError("this model reads three texts and was not told them apart", hint)
    types = types.expand(shape)
    if not torch.compiler.is_compiling() and not types.is_meta:
        lacking = int((~(types == 2).any(1)).sum())
        if lacking:
            text = f"the third input is missing: {lacking} of {len(types)} examples have no "
            raise DataError(f"{text}semantics (tokens of type 2)", hint)
    return types


class TCompressTamForSequenceClassification(TCompressTamPreTrainedModel):
    """Class of three texts, from the first token: whether the second text answers the first."""

    def __init__(self, config: TCompressTamConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TCompressTamModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classify; inputs are those of the model without a head.  # (batch, labels)."""
        inputs = input_ids, attention_mask, token_type_ids, inputs_embeds
        read = self.model(*inputs, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(read.last_hidden_state[:, 0]))
        facts = {"labels": labels, "pooled_logits": logits, "config": self.config}
        loss = None if labels is None else self.loss_function(**facts)
        return SequenceClassifierOutput(loss, logits, read.hidden_states, read.attentions)


class TCompressTamForPreTraining(TCompressTamPreTrainedModel):
    """Masked words of the first text, and whether the second one follows it (section 4.5)."""

    _tied_weights_keys = {"decoder.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: TCompressTamConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.model = TCompressTamModel(config)
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(width, config.vocab_size)
        self.seq_relationship = nn.Linear(width, 2)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        **kwargs: Any,
    ) -> BertForPreTrainingOutput:
        """Predict words and segments.

        Logits are (batch, tokens, words) and (batch, 2): 0 for a text that follows. `labels` of
        words are -100 where none is predicted, as BERT's, and a loss is returned where both kinds
        of labels are given.
        """
        inputs = input_ids, attention_mask, token_type_ids, inputs_embeds
        read = self.model(*inputs, return_dict=True, **kwargs)
        states = read.last_hidden_state
        segments = self.seq_relationship(states[:, 0])
        inner = ACT2FN[self.config.hidden_act](self.transform(states))
        words = self.decoder(self.transform_norm(inner))
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = cross_entropy(words.flatten(0, -2), labels.flatten())
            loss = loss + cross_entropy(segments, next_sentence_label.flatten())
        outputs = loss, words, segments, read.hidden_states, read.attentions
        return BertForPreTrainingOutput(*outputs)


AutoModel.register(TCompressTamConfig, TCompressTamModel, exist_ok=True)
AutoModelForSequenceClassification.register(
    TCompressTamConfig, TCompressTamForSequenceClassification, exist_ok=True
)
AutoModelForPreTraining.register(TCompressTamConfig, TCompressTamForPreTraining, exist_ok=True)
