"""The table of supported families, and the records that say what plays which role."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Literal, cast

from tcompress.errors import InputError

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
    """One contiguous run of a layer's output features."""

    name: str  # role of the run: `q`, `k`, `v`, `gate`, `up`, or the layer's own role
    size: int


@dataclass(frozen=True)
class Layer:
    """One weight (one per expert, for experts) and its place in the block."""

    name: str  # module path in the running model; for experts, of the module that holds the weights
    role: Role  # what the layer computes; `linear` where only its shape is known
    # How the weight is stored: `linear` (out, in), `conv1d` (in, out), `experts` (experts, out,
    # in), unless they are `transposed`, or `pointwise` (out, in, 1, ...), the kernels of a
    # convolution.
    kind: Kind
    in_features: int  # width of one input row
    out_features: int  # width of one output row, the sum of the sizes of `parts`
    bias: bool  # whether the layer has a bias
    parts: tuple[Part, ...]  # runs of output features, in the order of storage
    # Names the input that the layer reads; layers of a block with the same group read the same
    # tensor.
    group: str
    experts: int | None = None  # number of experts, or None for a single weight
    parameter: str = "weight"  # attribute of the module that holds the weight
    transposed: bool = False  # whether stacked weights are stored as (experts, in, out)
    # How often one forward pass of the block runs the layer. Only the first call reads the
    # group's input.
    calls: int = 1
    # Width of one head of the attention that the layer belongs to, if it is known.
    head: int | None = None
    axes: int = 0  # number of axes that a convolution moves along
    # Whether scores are plain products of queries and keys, in any basis of a head: there is no
    # rotation by positions and no norm between.
    bilinear: bool = False

    @property
    def parameters(self) -> int:
        """Numbers in its weight, or in those of all experts."""
        return self.in_features * self.out_features * (self.experts or 1)

    @property
    def side(self) -> Side:
        """Which side of the layer faces the residual stream; `both` where that is unknown."""
        if self.role == "linear":
            return "both"
        return "out" if self.role in _OUT_ROLES else "in"

    @property
    def routed(self) -> bool:
        """True for experts of whose routing is known what calibration needs."""
        return self.role in ("experts_gate_up", "experts_down")

    @property
    def weight_name(self) -> str:
        return f"{self.name}.{self.parameter}"

    def rows_of(self, part: Part) -> slice:
        """Outputs that are those of a part."""
        start = sum(before.size for before in self.parts[: self.parts.index(part)])
        return slice(start, start + part.size)


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
class BaseAttention:
    """Heads, mask and positions of a self-attention, whichever model it is part of."""

    heads: int  # of queries
    key_heads: int  # of keys and values; a divisor of `heads`
    head_dim: int  # width of one head
    causal: bool = False  # whether a token sees only itself and those before it
    window: int | None = None  # how far a token sees, if it does not see all
    biased: bool = False  # whether a bias of positions is added to its scores
    tokens: int | None = None  # of every input, if their number is fixed
    grid: tuple[int, ...] = ()  # on which the last tokens sit
    special: int = 0  # tokens before the grid, such as a class token
    longest: int | None = None  # most tokens of an input, if there is a limit


@dataclass(frozen=True, kw_only=True)
class Attention(BaseAttention):
    """The self-attention of one block."""

    name: str  # module path in the running model
    block: str  # module path of its block
    layers: Mapping[str, Layer]  # its projections by role; a fused one stands under `qkv`
    alike: bool = False  # whether all heads compute the same, each by itself
    reason: str | None = None  # why nothing can replace it, if nothing can


@dataclass(frozen=True)
class Roles:
    """Layers of a model that can be compressed, by role."""

    family: str  # the model type in the model's config, or its class name where there is none
    blocks: tuple[Block, ...]  # transformer blocks in the order in which the model lists them
    embeddings: tuple[str, ...]  # module paths of the word embeddings
    # Module path of the layer that yields logits over the vocabulary, if any.
    output_head: str | None
    refused: tuple[Refusal, ...]  # modules inside blocks that must be left alone
    warnings: tuple[str, ...]  # what a user should know before relying on them
    # Ordinary linear layers outside of blocks, rewritten only where they are named.
    outside: tuple[Layer, ...] = ()

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for block in self.blocks for layer in block.layers)


# A style maps roles to module paths below the block, in order of execution; `*` stands for any
# text. Every row must be found in the block, except that the rows of cross-attention may be missing
# together, as they are in encoders. A family with several kinds of block has several styles.


RoleTable = dict[Role, str]


@dataclass(frozen=True)
class Style:
    """One way of naming the modules of a block."""

    roles: RoleTable  # module path, relative to the block, of each role in order of execution
    # The fused projection stores q, k, v head by head, so that it has no contiguous parts.
    interleaved_qkv: bool = False
    # The same paths in checkpoints, where all of them have other names there.
    stored: RoleTable = field(default_factory=dict)
    transposed: bool = False  # whether weights are stored as (in, out)
    bilinear: bool = False  # see `Layer`


def _below(module: str, **names: str) -> RoleTable:
    return cast(RoleTable, {role: f"{module}.{name}" for role, name in names.items()})


_SELF_ATTN = _below("self_attn", q="q_proj", k="k_proj", v="v_proj", o="o_proj")
_SELF_ATTN_OUT = _SELF_ATTN | _below("self_attn", o="out_proj")
_CROSS_ATTN = _below(
    "encoder_attn", cross_q="q_proj", cross_k="k_proj", cross_v="v_proj", cross_o="out_proj"
)
_T5_CROSS_ATTN = _below("*.EncDecAttention", cross_q="q", cross_k="k", cross_v="v", cross_o="o")
_T5_ATTN = _below("*.SelfAttention", q="q", k="k", v="v", o="o") | _T5_CROSS_ATTN
_BERT_ATTN = _below("attention.self", q="query", k="key", v="value")
_BERT_CROSS_ATTN = _below("crossattention.self", cross_q="query", cross_k="key", cross_v="value")
_BERT_OUT: RoleTable = {"o": "attention.output.dense"}
_BERT_CROSS_OUT: RoleTable = {"cross_o": "crossattention.output.dense"}
_BERT_FFN: RoleTable = {"up": "intermediate.dense", "down": "output.dense"}
_FC: RoleTable = {"up": "fc1", "down": "fc2"}
_MLP_FC = _below("mlp", up="fc1", down="fc2")
_GATED = _below("mlp", gate="gate_proj", up="up_proj", down="down_proj")
_EXPERTS = _below("mlp", experts_gate_up="experts", experts_down="experts")

_BERT = Style(
    _BERT_ATTN | _BERT_OUT | _BERT_CROSS_ATTN | _BERT_CROSS_OUT | _BERT_FFN, bilinear=True
)
_DISTILBERT = Style(
    _below("attention", q="q_lin", k="k_lin", v="v_lin", o="out_lin")
    | _below("ffn", up="lin1", down="lin2"),
    bilinear=True,
)
_MPNET = Style(_below("attention.attn", q="q", k="k", v="v", o="o") | _BERT_FFN, bilinear=True)
_DEBERTA_V2 = Style(
    _below("attention.self", q="query_proj", k="key_proj", v="value_proj") | _BERT_OUT | _BERT_FFN
)
_MODERNBERT = Style({"qkv": "attn.Wqkv", "o": "attn.Wo", "gate_up": "mlp.Wi", "down": "mlp.Wo"})
_GPT2 = Style(
    {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
    transposed=True,
    bilinear=True,
)
_GPT_NEO = Style(
    _below("attn.attention", q="q_proj", k="k_proj", v="v_proj", o="out_proj")
    | _below("mlp", up="c_fc", down="c_proj"),
    bilinear=True,
)
_GPT_NEOX = Style(
    _below("attention", qkv="query_key_value", o="dense")
    | _below("mlp", up="dense_h_to_4h", down="dense_4h_to_h"),
    interleaved_qkv=True,
)
_PHI3 = Style(
    _below("self_attn", qkv="qkv_proj", o="o_proj")
    | _below("mlp", gate_up="gate_up_proj", down="down_proj")
)
_VIT = Style(
    _below("attention", q="q_proj", k="k_proj", v="v_proj", o="o_proj") | _MLP_FC,
    stored=_below("attention.attention", q="query", k="key", v="value") | _BERT_OUT | _BERT_FFN,
    bilinear=True,
)
_VIDEOMAE = Style(
    _below("attention.attention", k="key", v="value", q="query") | _BERT_OUT | _BERT_FFN,
    bilinear=True,
)
_BART = Style(_SELF_ATTN_OUT | _CROSS_ATTN | _FC, bilinear=True)
_CLIP = Style(_SELF_ATTN_OUT | _MLP_FC, bilinear=True)
_LLAMA = Style(_SELF_ATTN | _GATED)
_MOE = Style(_SELF_ATTN | _EXPERTS)
_T5 = Style(_T5_ATTN | _below("*.DenseReluDense", up="wi", down="wo"), bilinear=True)
_T5_GATED = Style(
    _T5_ATTN | _below("*.DenseReluDense", gate="wi_0", up="wi_1", down="wo"), bilinear=True
)
# As a decoder with an encoder, BigBird gives its self-attention what that puts out.
_BERT_ENCODER = Style(_BERT_ATTN | _BERT_OUT | _BERT_FFN, bilinear=True)
_SELF_FC = Style(_SELF_ATTN | _MLP_FC)
_UP_DOWN = Style(_SELF_ATTN | _below("mlp", up="up_proj", down="down_proj"))
_STARCODER2 = Style(_SELF_ATTN | _below("mlp", up="c_fc", down="c_proj"))
_PHI = Style(_SELF_ATTN | _below("self_attn", o="dense") | _MLP_FC)
_GLM = Style(_SELF_ATTN | _below("mlp", gate_up="gate_up_proj", down="down_proj"))
_FALCON = Style(
    _below("self_attention", qkv="query_key_value", o="dense")
    | _below("mlp", up="dense_h_to_4h", down="dense_4h_to_h"),
    interleaved_qkv=True,
)
_GPTJ = Style(
    _below("attn", q="q_proj", k="k_proj", v="v_proj", o="out_proj")
    | _below("mlp", up="fc_in", down="fc_out")
)
_CODEGEN = Style(
    _below("attn", qkv="qkv_proj", o="out_proj") | _below("mlp", up="fc_in", down="fc_out"),
    interleaved_qkv=True,
)
_MPT = Style(
    _below("attn", qkv="Wqkv", o="out_proj") | _below("ffn", up="up_proj", down="down_proj"),
    interleaved_qkv=True,
)
_PERSIMMON = Style(
    _below("self_attn", qkv="query_key_value", o="dense")
    | _below("mlp", up="dense_h_to_4h", down="dense_4h_to_h"),
    interleaved_qkv=True,
)
_GPT_BIGCODE = Style(_GPT2.roles, interleaved_qkv=True)
_ATTENTION = _below("attention", q="q_proj", k="k_proj", v="v_proj", o="o_proj")
_DINOV3 = Style(_ATTENTION | _below("mlp", up="up_proj", down="down_proj"))
_PIXTRAL = Style(
    _ATTENTION | _below("feed_forward", gate="gate_proj", up="up_proj", down="down_proj")
)
# An expert for all tokens, before or after those that they choose.
_SHARED_EXPERT = _below("mlp.shared_expert*", gate="gate_proj", up="up_proj", down="down_proj")
_SHARED_FIRST = Style(_SELF_ATTN | _SHARED_EXPERT | _EXPERTS)
_SHARED_LAST = Style(_SELF_ATTN | _EXPERTS | _SHARED_EXPERT)
_WAV2VEC2 = Style(
    _below("attention", q="q_proj", k="k_proj", v="v_proj", o="out_proj")
    | _below("feed_forward", up="intermediate_dense", down="output_dense"),
    bilinear=True,
)
# Queries and memory are of different texts, as in cross-attention.
_TAM = Style(
    _below("attention", cross_q="q_proj", cross_k="k_proj", cross_v="v_proj", cross_o="o_proj")
    | _MLP_FC
)
_TAM_WITHOUT_FUSING = Style(_below("attention", cross_q="q_proj", cross_k="k_proj") | _MLP_FC)

_ROWS: tuple[tuple[str, tuple[Style, ...]], ...] = (
    ("bert roberta electra camembert ernie xlm-roberta", (_BERT,)),
    ("distilbert", (_DISTILBERT,)),
    ("mpnet", (_MPNET,)),
    ("deberta-v2", (_DEBERTA_V2,)),
    ("modernbert", (_MODERNBERT,)),
    ("gpt2", (_GPT2,)),
    ("gpt_neo", (_GPT_NEO,)),
    ("gpt_neox", (_GPT_NEOX,)),
    ("opt bart whisper blenderbot m2m_100 marian mbart pegasus", (_BART,)),
    ("llama mistral qwen2 qwen3 gemma gemma2 gemma3 gemma3_text olmo2 smollm3", (_LLAMA,)),
    ("phi3", (_PHI3,)),
    ("mixtral qwen3_moe olmoe", (_MOE, _LLAMA)),
    ("t5 mt5 umt5", (_T5, _T5_GATED)),
    ("vit deit", (_VIT,)),
    ("videomae", (_VIDEOMAE,)),
    ("clip clip_text_model clip_vision_model", (_CLIP,)),
    ("siglip siglip_text_model siglip_vision_model", (_CLIP,)),
    ("tcompress_text", (Style(_SELF_ATTN, bilinear=True),)),
    ("tcompress_grid", (_SELF_FC,)),
    ("tcompress_tam", (_TAM, _TAM_WITHOUT_FUSING)),
)
FAMILIES: Mapping[str, tuple[Style, ...]] = {
    family: styles for names, styles in _ROWS for family in names.split()
}

# Families with blocks like those of others, or nearly so. `tests/roles/test_relatives.py` runs all:
# what is said to read one input does, in this order, and neurons and bases of heads are free. A
# block that has other layers, as some configs ask for, is scanned; nothing is known of their
# attention.
_RELATIVES: tuple[tuple[str, tuple[Style, ...]], ...] = (
    (
        """
        align_text_model altclip_text_model bert-generation bridgetower
        bridgetower_text_model canine chinese_clip_text_model clap_text_model data2vec-text dpr
        git layoutlm layoutlmv3 megatron-bert mra nystromformer rembert roberta-prelayernorm
        roc_bert tapas visual_bert xlm-roberta-xl
        """,
        (_BERT,),
    ),
    (
        """
        blt_patcher cohere cohere2 csm_depth_decoder_model cwm emu3_text_model ernie4_5
        esmc eurobert exaone4 flint granite granite4_vision_text
        granite_docling_text granite_swa gte helium hyperclovax ministral3 mllama_text_model
        molmo2_text nomic_bert olmo3 qwen3_omni_moe_talker_code_predictor qwen3_vl_text
        seed_oss stablelm t5gemma2_text ultrabert vaultgemma voxtral_realtime_encoder
        """,
        (_LLAMA,),
    ),
    (
        """
        cohere2_moe flex_olmo gpt_oss mellum minimax_m2 phimoe qwen3_omni_moe_text
        qwen3_vl_moe_text
        """,
        (_MOE,),
    ),
    ("ernie4_5_moe qwen2_moe", (_SHARED_FIRST, _LLAMA)),
    ("exaone_moe glm4_moe solar_open", (_SHARED_LAST, _LLAMA)),
    ("big_bird", (_BERT_ENCODER,)),
    ("bros", (replace(_BERT, bilinear=False),)),  # queries meet positions of boxes too
    ("bloom falcon", (_FALCON,)),
    ("codegen", (_CODEGEN,)),
    ("dinov3_vit", (_DINOV3, Style(_ATTENTION | _GATED))),
    ("gpt_bigcode", (_GPT_BIGCODE,)),
    ("gptj", (_GPTJ,)),
    ("mpt", (_MPT,)),
    ("persimmon", (_PERSIMMON,)),
    ("pixtral", (_PIXTRAL,)),
    ("glm glm4", (_GLM,)),
    ("phi", (_PHI,)),
    ("phi4_multimodal", (_PHI3,)),
    ("starcoder2", (_STARCODER2,)),
    ("apertus arcee jais2", (_UP_DOWN,)),
    ("gpt_neox_japanese", (_GPT_NEOX,)),
    ("imagegpt openai-gpt", (_GPT2,)),
    (
        """
        biogpt blenderbot-small moss_transcribe_diarize_audio musicgen_melody_decoder plbart
        qwen2_audio_encoder speech_to_text voxtral_encoder
        """,
        (_BART,),
    ),
    ("udop", (_T5,)),
    ("pop2piano", (_T5_GATED,)),
    (
        """
        altclip_vision_model chinese_clip_vision_model clipseg_text_model clipseg_vision_model
        git_vision_model groupvit_text_model idefics3_vision metaclip_2_text_model
        metaclip_2_vision_model owlv2_text_model owlv2_vision_model owlvit_text_model
        owlvit_vision_model phi4_multimodal_vision siglip2_text_model smolvlm_vision
        tipsv2_text_model xclip_text_model
        """,
        (_CLIP,),
    ),
    ("mlcd_vision_model", (replace(_CLIP, bilinear=False),)),
    (
        """
        audio-spectrogram-transformer beit dinov2 dinov2_with_registers ijepa pixio radio
        tipsv2_vision_model videoprism_text_model videoprism_vision_model vit_mae vit_msn vivit
        """,
        (_VIT,),
    ),
    (
        """
        data2vec-vision dpt flava_image_model flava_multimodal_model flava_text_model vilt yolos
        """,
        (_VIDEOMAE,),
    ),
    (
        """
        glmasr_encoder gradium_phonon_tts jina_embeddings_v3 nanochat
        nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp
        nemotron3_diarization_audio pocket_tts
        """,
        (_SELF_FC,),
    ),
    ("data2vec-audio hubert sew unispeech unispeech-sat wav2vec2", (_WAV2VEC2,)),
)
RELATIVES: Mapping[str, tuple[Style, ...]] = {
    family: styles for names, styles in _RELATIVES for family in names.split()
}

# Modules that have no role although their family is known.
REFUSED_MODULES: Mapping[str, str] = {
    "pos_key_proj": "it reads the table of relative positions, not the tokens",
    "pos_query_proj": "it reads the table of relative positions, not the tokens",
}


def match(roles: RoleTable, names: Collection[str]) -> tuple[dict[Role, str], list[str]]:
    """Find the module of each role of a style, and the paths that are absent, or are several."""
    hits = {
        role: [name for name in names if fnmatchcase(name, pattern)]
        for role, pattern in roles.items()
    }
    if not any(hit for role, hit in hits.items() if role.startswith("cross_")):
        hits = {role: hit for role, hit in hits.items() if not role.startswith("cross_")}
    absent = [roles[role] for role, hit in hits.items() if len(hit) != 1]
    return {role: hit[0] for role, hit in hits.items() if hit}, absent


def parts_of(
    name: str, role: Role, out_features: int, style: Style, config: Any
) -> tuple[Part, ...]:
    """Cut a layer's output features into runs in order of storage: one, unless it is fused."""
    if role == "gate_up":
        return Part("gate", out_features // 2), Part("up", out_features // 2)
    if role != "qkv" or style.interleaved_qkv:
        return (Part(role, out_features),)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    q, kv = heads * width, (getattr(config, "num_key_value_heads", None) or heads) * width
    if q + 2 * kv != out_features:
        raise InputError(
            f"the fused projection `{name}` has {out_features} outputs, but the config's heads"
            f" ask for {q} + {kv} + {kv}",
            "check the model's config.json",
        )
    return Part("q", q), Part("k", kv), Part("v", kv)


def calls_of(family: str, role: Role, config: Any) -> int:
    """Return how often a block runs the layer of this role in one forward pass."""
    # DeBERTa with shared keys sends the table of relative positions through q and k as well.
    shared = family == "deberta-v2" and config.relative_attention
    return 2 if shared and role in ("q", "k") and getattr(config, "share_att_key", False) else 1
