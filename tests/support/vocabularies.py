"""Tokenizers of every kind that a vocabulary can be cut for, trained on texts, with tiny models."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tcompress.data.calibration import builtin_texts
from tests.support.model_folders import edited

Texts = Iterable[str]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_GPT = "<|endoftext|>"
_WORDS = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_END = "</w>"


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer, and the model that it is given to."""

    train: Callable[[Texts, int], Tokenizer]
    model: str  # class in Transformers
    special: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)  # of its config
    tokenizer: str | None = None  # class in Transformers; default the one that takes any

    def folder(self, folder: Path, core: Tokenizer, *, padding: int = 0) -> Path:
        """Write a model with random weights and a tokenizer."""
        made = PreTrainedTokenizerFast(tokenizer_object=core, **self.special)
        ids = {name: made.convert_tokens_to_ids(token) for name, token in self.special.items()}
        kind: Any = getattr(transformers, self.model)
        named = {f"{name}_id": index for name, index in ids.items()}
        named["vocab_size"] = len(made) + padding
        config = kind.config_class(**{**named, **self.options})
        torch.manual_seed(0)
        model = kind(config)
        for parameter in model.parameters():  # biases and norms too
            parameter.data.add_(torch.randn(parameter.shape) * 0.02)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape))
        model.save_pretrained(folder)
        made.save_pretrained(folder)
        if self.tokenizer is not None:
            with edited(folder / "tokenizer_config.json") as settings:
                settings["tokenizer_class"] = self.tokenizer
        return folder


def _fallback_decoder() -> decoders.Decoder:
    """Joins pieces with `▁` for blanks, and bytes to characters."""
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def _word_pieces(texts: Texts, size: int) -> Tokenizer:
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=size, special_tokens=_BERT)
    )
    core.decoder = decoders.WordPiece()
    ids = [(name, core.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    core.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, ids)
    return core


def _byte_pairs(texts: Texts, size: int) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[_GPT], initial_alphabet=alphabet)
    core.train_from_iterator(texts, trainer)
    return core


def _whole_words(texts: Texts, size: int) -> Tokenizer:
    """Like that of Llama 3: words that are pieces are not merged, special tokens come last."""
    core = _byte_pairs(texts, size)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    settings = json.loads(core.to_str())
    vocabulary = settings["model"]["vocab"]
    del vocabulary[_GPT]
    settings["model"]["vocab"] = {piece: at for at, piece in enumerate(vocabulary)}
    settings["model"]["ignore_merges"] = True
    settings["added_tokens"] = []
    core = Tokenizer.from_str(json.dumps(settings))
    core.add_special_tokens([_GPT, "<|pad|>", "<|eot|>"])
    at = core.token_to_id(_GPT)
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(f"{_GPT} $A", f"{_GPT} $A {_GPT} $B", [(_GPT, at)]),
        ]
    )
    return core


def _sentence_pieces(texts: Texts, size: int) -> Tokenizer:
    """Like that of Llama 2: blanks are `▁`, and characters without a piece are bytes."""
    core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>"]
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size - 256, special_tokens=special)
    )
    settings = json.loads(core.to_str())
    pieces = [piece for piece in settings["model"]["vocab"] if piece not in special]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    settings["model"] |= {"vocab": {piece: at for at, piece in enumerate(pieces)}}
    settings["model"] |= {"byte_fallback": True}
    settings["pre_tokenizer"] = None
    core = Tokenizer.from_str(json.dumps(settings))
    core.decoder = _fallback_decoder()
    core.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return core


def _endings(texts: Texts, size: int) -> Tokenizer:
    """Like that of CLIP: the last piece of a word says so."""
    core = Tokenizer(models.BPE(unk_token=_GPT, end_of_word_suffix=_END))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_GPT, *(f"{letter}{_END}" for letter in sorted(alphabet))],
        initial_alphabet=alphabet,
        end_of_word_suffix=_END,
    )
    core.train_from_iterator(texts, trainer)
    settings = json.loads(core.to_str())
    settings["added_tokens"] = settings["added_tokens"][:1]
    core = Tokenizer.from_str(json.dumps(settings))
    core.post_processor = processors.RobertaProcessing((_GPT, 0), (_GPT, 0))
    return core


def _likeliest(texts: Texts, size: int) -> Tokenizer:
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    core.decoder = decoders.Metaspace()
    core.train_from_iterator(
        texts, trainers.UnigramTrainer(vocab_size=size, special_tokens=SPECIAL, unk_token="<unk>")
    )
    core.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    )
    return core


def _likeliest_bytes(texts: Texts, size: int) -> Tokenizer:
    core = _likeliest(texts, size - 256)
    settings = json.loads(core.to_str())
    pairs = settings["model"]["vocab"]
    count = len(SPECIAL)
    pairs[count:count] = [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    settings["model"]["byte_fallback"] = True
    core = Tokenizer.from_str(json.dumps(settings))
    core.decoder = _fallback_decoder()
    return core


_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 64, "max_position_embeddings": 130}
_GPT_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 130}
_ENCODER_DECODER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip
_OF_BERT = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
_OF_SPM = {
    "bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>",
    "mask_token": "<mask>",
}  # fmt: skip
_OF_GPT = {"bos_token": _GPT, "eos_token": _GPT}

KINDS: dict[str, Kind] = {
    "WordPiece": Kind(_word_pieces, "BertForMaskedLM", _OF_BERT, _SIZES, tokenizer="BertTokenizer"),
    "byte-level BPE": Kind(
        _byte_pairs, "GPT2LMHeadModel", _OF_GPT, _GPT_SIZES, tokenizer="GPT2Tokenizer"
    ),
    "BPE of whole words": Kind(
        _whole_words,
        "LlamaForCausalLM",
        {"bos_token": _GPT, "eos_token": "<|eot|>", "pad_token": "<|pad|>"},
        {**_SIZES, "tie_word_embeddings": False},
    ),
    "BPE with bytes": Kind(
        _sentence_pieces,
        "LlamaForCausalLM",
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        {**_SIZES, "tie_word_embeddings": True},
    ),
    "BPE with endings": Kind(_endings, "GPT2LMHeadModel", _OF_GPT, _GPT_SIZES),
    "Unigram": Kind(
        _likeliest, "XLMRobertaForMaskedLM", _OF_SPM, _SIZES, tokenizer="XLMRobertaTokenizer"
    ),
    "Unigram of a decoder": Kind(
        _likeliest,
        "BartForConditionalGeneration",
        _OF_SPM,
        {**_ENCODER_DECODER, "forced_bos_token_id": 0, "decoder_start_token_id": 2},
    ),
    "Unigram with bytes": Kind(_likeliest_bytes, "XLMRobertaModel", _OF_SPM, _SIZES),
}


def save_letters(folder: Path, size: int) -> None:
    """Write a tokenizer of so few pieces that it suits the tiny models, for lower-case text."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=size, limit_alphabet=30, special_tokens=special)
    core.train_from_iterator([text.lower() for text in builtin_texts()[:300]], trainer)
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **named).save_pretrained(folder)
