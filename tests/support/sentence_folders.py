"""Tiny sentence encoders as sentence-transformers stores them, of every kind."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.evaluation import headed, rows_file
from tests.support.model_folders import WORDS, save_tokenizer

WIDTH, NARROW = 32, 6
MEAN = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True}
PROMPTS = {"query": "tall tree w30 ", "document": "w31 stone ", "sts": "w33 w34 fox "}


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def base(
    folder: Path,
    pooling: Mapping[str, Any] = MEAN,
    *more: str,
    family: str = "bert",
    kind: str = "BertModel",
    **said: Any,
) -> Path:
    """Write an encoder with modules after its pooling, and what `config_...` says."""
    headed(family, folder, kind, seed=1)
    write_json(folder / "1_Pooling" / "config.json", dict(pooling))
    kinds = ("Transformer", "Pooling", *more)
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(kinds)
    ]
    for module in modules[2:]:
        (folder / str(module["path"])).mkdir()
    write_json(folder / "modules.json", modules)
    if said:
        write_json(folder / "config_sentence_transformers.json", said)
    return folder


def with_text_settings(folder: Path, **settings: Any) -> Path:
    write_json(folder / "sentence_bert_config.json", settings)
    return folder


def with_dense(
    folder: Path, inputs: int = WIDTH, activation: str = "activation.Tanh", bias: bool = True
) -> Path:
    """Fill `2_Dense`."""
    make = torch.Generator().manual_seed(5)
    tensors = {"linear.weight": torch.randn(NARROW, inputs, generator=make)}
    if bias:
        tensors["linear.bias"] = torch.randn(NARROW, generator=make)
    config = {
        "in_features": inputs,
        "out_features": NARROW,
        "bias": bias,
        "activation_function": f"torch.nn.modules.{activation}",
    }
    write_json(folder / "2_Dense" / "config.json", config)
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return folder


def with_layer_norm(folder: Path) -> Path:
    """Fill `2_LayerNorm`."""
    make = torch.Generator().manual_seed(6)
    write_json(folder / "2_LayerNorm" / "config.json", {"dimension": WIDTH})
    tensors = {f"norm.{name}": torch.randn(WIDTH, generator=make) for name in ("weight", "bias")}
    torch.save(tensors, folder / "2_LayerNorm" / "pytorch_model.bin")
    return folder


def in_old_layout(folder: Path) -> Path:
    """Move the transformer into a folder of its own, as it was done before 2021."""
    inner = folder / "0_Transformer"
    inner.mkdir()
    for path in list(folder.iterdir()):
        keeps = path.name in ("modules.json", "config_sentence_transformers.json")
        if path.is_file() and not keeps:
            shutil.move(path, inner / path.name)
    text = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(text.replace('"path": ""', '"path": "0_Transformer"'))
    return folder


def with_onnx(folder: Path) -> Path:
    """Put another form of the model beside it, as on the hub."""
    write_json(folder / "onnx" / "config.json", {"model_type": "bert"})
    (folder / "onnx" / "model.onnx").write_bytes(b"\x08\x07")
    return folder


def _last_token(folder: Path, padding: str, model: str = "Qwen3ForCausalLM", **said: Any) -> Path:
    """Write an encoder whose base is a language model; it reads the token that ends a text."""
    base(folder, _pooling("lasttoken"), "Normalize", family="qwen3", kind=model, **said)
    save_tokenizer(folder, padding_side=padding)
    return folder


def _without_prefix(folder: Path) -> Path:
    """Rename tensors as in Qwen3-Embedding: `layers.0...` under the class with a head."""
    path = folder / "model.safetensors"
    tensors = {key.removeprefix("model."): value for key, value in load_file(path).items()}
    tensors.pop("lm_head.weight", None)
    save_file(tensors, path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**settings, "tie_word_embeddings": True})
    return folder


def _t5(folder: Path, kind: str, **options: Any) -> Path:
    """Write an encoder like sentence-t5, whose positions have no end."""
    base(folder, MEAN, "Dense", "Normalize", family="t5", kind=kind, **options)
    return with_text_settings(with_dense(folder, bias=False), max_seq_length=12)


def _pooling(*modes: str, **more: Any) -> dict[str, Any]:
    return {"embedding_dimension": WIDTH, "pooling_mode": list(modes), **more}


HOSTS: dict[str, Callable[[Path], Path]] = {
    "qwen3": lambda at: _without_prefix(
        _last_token(at, "left", prompts=PROMPTS, default_prompt_name="sts")
    ),
    "qwen3 with a head": lambda at: _last_token(at, "right"),
    "gpt2": lambda at: base(at, _pooling("weightedmean"), family="gpt2", kind="GPT2LMHeadModel"),
    "t5": lambda at: _t5(at, "T5EncoderModel"),
    "t5 with a decoder": lambda at: _t5(at, "T5ForConditionalGeneration"),
    "bert with a head": lambda at: base(at, kind="BertForMaskedLM"),
}
"""Those whose class, or that of what they were trained from, does more than encode."""

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "mean": base,
    "cls": lambda at: base(
        at, {**MEAN, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    ),
    "max": lambda at: base(
        at, {**MEAN, "pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}
    ),
    "prompts": lambda at: base(at, prompts=PROMPTS, default_prompt_name="sts"),
    "lengths": lambda at: with_text_settings(base(at), max_seq_length=6, do_lower_case=False),
    "dense": lambda at: with_dense(base(at, MEAN, "Dense")),
    "normalize": lambda at: base(at, MEAN, "Normalize", similarity_fn_name="dot"),
    "old layout": lambda at: in_old_layout(
        with_text_settings(base(at, _pooling("cls")), max_seq_length=7)
    ),
    "mpnet": lambda at: base(at, family="mpnet", kind="MPNetModel"),
    "onnx": lambda at: with_onnx(base(at, MEAN, "Normalize")),
}
"""The ten that are common."""

OTHERS: dict[str, Callable[[Path], Path]] = {
    "lowercase": lambda at: with_text_settings(base(at), max_seq_length=128, do_lower_case=True),
    "joined": lambda at: with_dense(
        base(at, _pooling("weightedmean", "lasttoken", "mean_sqrt_len_tokens"), "Dense"),
        3 * WIDTH,
        "linear.Identity",
        bias=False,
    ),
    "prompt left out": lambda at: base(
        at,
        _pooling("cls", "mean", "weightedmean", include_prompt=False),
        prompts=PROMPTS,
        default_prompt_name="sts",
    ),
    "passage": lambda at: base(at, prompts={"query": "w40 ", "passage": "w41 "}),
    "all at once": lambda at: with_dense(
        base(
            at,
            _pooling("mean", include_prompt=False),
            *("Dense", "Normalize"),
            prompts=PROMPTS,
            similarity_fn_name="euclidean",
        )
    ),
    "layer norm": lambda at: with_layer_norm(base(at, MEAN, "LayerNorm")),
    "shortened": lambda at: base(at, MEAN, "Normalize", truncate_dim=5, similarity_fn_name="dot"),
    "dot": lambda at: base(at, similarity_fn_name="dot"),
    "euclidean": lambda at: base(at, similarity_fn_name="euclidean"),
    "manhattan": lambda at: base(at, similarity_fn_name="manhattan"),
}
"""What is rarer."""


def similar_pairs(path: Path, count: int = 40) -> Path:
    """Write pairs of sentences of 2 to 15 words, some in capitals, with a score."""
    draw = torch.Generator().manual_seed(3)
    texts, scores = [], []
    for index in range(count):
        length = 2 + index * 5 % 14
        words = [WORDS[int(torch.randint(len(WORDS), (1,), generator=draw))] for _ in range(length)]
        # No two texts are the same: cosines of 1 are ranked by their last digit.
        other, changed = list(words), 1 + index * 3 % length
        other[:changed] = [f"w{40 + (index + place) % 50}" for place in range(changed)]
        first = " ".join(words)
        texts.append((first.upper() if index % 7 == 0 else first, " ".join(other)))
        scores.append(round(1 - changed / length, 2))
    one, two = zip(*texts, strict=True)
    return rows_file(path, sentence1=one, sentence2=two, score=scores)
