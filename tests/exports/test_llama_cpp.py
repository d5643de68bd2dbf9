"""Dense exports of decoders as llama.cpp's converter reads them.

`LLAMA_CPP` names a folder with its `convert_hf_to_gguf.py`, and `LLAMA_CPP_PYTHON` a Python with
what that needs (`sentencepiece`); without them the tables of the `gguf` package stand for it.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tcompress.exports.dense import export_dense
from tests.support.converted import converted
from tests.support.tiny import VOCAB, build

CONVERTER = os.environ.get("LLAMA_CPP", "")
PYTHON = os.environ.get("LLAMA_CPP_PYTHON", "python")
SVD = {"method": {"name": "svd"}, "target": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "llama": SVD | {"keep_layers": [0]},
    "mistral": {"method": {"name": "width"}, "target": 0.5},
    "qwen3": {"method": {"name": "lprod", "p": 4}},
}


@pytest.mark.doors
@pytest.mark.parametrize("family", CASES)
def test_its_converter_finds_all_that_it_reads(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path / family)
    _save_tokenizer(tmp_path / family)
    small = converted(family, tmp_path, **CASES[family]).folder
    out = export_dense(small, tmp_path / "dense")
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_parameters"]["rope_theta"] == 10_000
    assert AutoTokenizer.from_pretrained(out).vocab_size == config["vocab_size"] == VOCAB
    tensors = load_file(out / "model.safetensors")
    blocks = config["num_hidden_layers"]
    assert blocks == (1 if "keep_layers" in CASES[family] else 2)
    kind = "QWEN3" if family == "qwen3" else "LLAMA"  # Mistral is one of its Llamas
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind], blocks)
    found = {names.get_name(name, (".weight",)): tensor for name, tensor in tensors.items()}
    assert None not in found
    assert {name for name in found if "." in name.removesuffix(".weight")} >= {
        f"blk.{block}.{layer}.weight"
        for block in range(blocks)
        for layer in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down")
    }
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value")
    )
    sizes = {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "ffn_down": (hidden, wide)}
    for layer, size in sizes.items():
        assert tuple(found[f"blk.0.{layer}.weight"].shape) == size
    if CONVERTER and family != "qwen3":  # its tokenizers are recognised by their ids
        _convert(out, found)


def _convert(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Run the converter, and compare what it wrote; it reorders rows of queries and keys."""
    script, file = Path(CONVERTER) / "convert_hf_to_gguf.py", folder.parent / "model.gguf"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, script, folder, "--outfile", file, "--outtype", "f32"],
        capture_output=True,
        text=True,
        check=False,
        env=clean | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    assert tensors.keys() <= written.keys()
    for name, tensor in tensors.items():
        one, two = tensor.float().numpy(), np.asarray(written[name])
        if "attn_q" in name or "attn_k" in name:
            one, two = np.sort(one, axis=0), np.sort(two, axis=0)
        assert np.array_equal(one, two), name


def _save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the kind that Llama and Mistral have."""
    special = ("<unk>", "<s>", "</s>")
    ends = [f"<0x{byte:02X}>" for byte in range(32, 32 + VOCAB - len(special))]
    vocabulary = {piece: index for index, piece in enumerate((*special, *ends))}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokens = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=core, **tokens).save_pretrained(folder)
