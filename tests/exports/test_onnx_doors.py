"""ONNX files in sentence-transformers and optimum, in an environment that has no tcompress.

`ONNX_DOOR` names its Python: optimum takes older versions of Transformers than tcompress does.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tcompress.conversion.converter import convert
from tcompress.data.sentences import SentenceEncoder
from tcompress.exports.onnx_folder import export_onnx
from tcompress.models import SourceModel
from tcompress.options.commands import OnnxFiles
from tests.support.converted import recipe
from tests.support.model_folders import edited, save_tokenizer, sentences
from tests.support.other_python import there
from tests.support.sentence_folders import MEAN, base, with_dense
from tests.support.tiny import build

PYTHON = os.environ.get("ONNX_DOOR", "")
pytestmark = [
    pytest.mark.doors,
    pytest.mark.skipif(not PYTHON, reason="ONNX_DOOR names no Python with optimum"),
]
TEXTS = sentences(12)
FILES = ("model.onnx", "model_int8.onnx", "model_q4.onnx")

_ENCODE = """
import json, sys
from sentence_transformers import SentenceTransformer
folder, texts, files = json.loads(sys.argv[1])
found = []
for name in files:
    options = {"file_name": name, "provider": "CPUExecutionProvider"}
    model = SentenceTransformer(folder, backend="onnx", device="cpu", model_kwargs=options)
    found.append(model.encode(texts).tolist())
assert "tcompress" not in sys.modules
print("\\n" + json.dumps(found))
"""
_GENERATE = """
import json, sys, torch
from optimum.onnxruntime import ORTModelForCausalLM
folder, ids = json.loads(sys.argv[1])
model = ORTModelForCausalLM.from_pretrained(folder, subfolder="onnx", file_name="model.onnx")
ids = torch.tensor(ids)
new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
print("\\n" + json.dumps(new.tolist()))
"""


def test_sentence_transformers_gives_the_same_vectors(tmp_path: Path) -> None:
    source = with_dense(base(tmp_path / "model", MEAN, "Dense", "Normalize"))
    with edited(source / "tokenizer_config.json") as settings:  # older versions know no newer one
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    small = convert(str(source), recipe(), tmp_path / "small").folder
    out = export_onnx(small, tmp_path / "out", OnnxFiles(int8=True, bits=4)).folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = transformers.AutoModel.from_pretrained(out)(**inputs).last_hidden_state
    ours = SentenceEncoder.of(SourceModel.open(str(source)))(hidden, inputs["attention_mask"])
    theirs = np.array(there(PYTHON, _ENCODE, str(out), TEXTS, FILES))
    assert np.abs(theirs[0] - ours.numpy()).max() < 1e-5
    for vectors, least in zip(theirs, (1 - 1e-6, 0.995, 0.9), strict=True):
        assert (vectors * ours.numpy()).sum(-1).mean() > least


def test_optimum_generates_the_same_text(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    out = export_onnx(tmp_path / "model", tmp_path / "out").folder
    ids = torch.tensor([[5, 17, 23, 42]])
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert there(PYTHON, _GENERATE, str(out), ids.tolist()) == expected.tolist()
