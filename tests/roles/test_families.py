"""Families by rule: most have no table of roles, and convert all ordinary layers of their blocks.

`benchmarks/families.py` does the same with every family that the installed Transformers knows.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from benchmarks import zoo
from benchmarks.families import CLOSE, ENOUGH, METHODS, examine
from tcompress import api

pytestmark = pytest.mark.filterwarnings("ignore")  # of Transformers, at sizes as small as these

# What stays dense is named with a reason.
PARTLY = {"bamba": 0.85, "deberta": 0.6, "falcon_h1": 0.7, "mamba": 0.3, "mamba2": 0.7}
PARTLY |= {"wavlm": 0.45, "zamba2": 0.8, "reformer": 0.7, "squeezebert": 0.3}
WHOLE = """
albert audio-spectrogram-transformer bart beit bert biogpt bitnet blip bloom blt_patcher canine clip
codegen convbert dab-detr data2vec-audio deformable_detr detr dinov2 electra falcon
flaubert focalnet funnel gemma4_audio gpt2 gptj granite gte hubert
jina_embeddings_v3 layoutlm led longformer mgp-str mobilebert mobilenet_v2
molmo2_text mpt nomic_bert olmo2 patchtst pegasus_x radio roformer rt_detr_v2 sam3_video sapiens2
smollm3 t5 wav2vec2 wav2vec2-conformer xglm xlm yolos
"""


@pytest.mark.often("patchtst", "albert", "clip", "gpt2", "nomic_bert", "squeezebert", "wav2vec2")
@pytest.mark.parametrize("family", [*WHOLE.split(), *PARTLY])
def test_a_family_converts_loads_saves_and_exports(family: str, tmp_path: Path) -> None:
    row = examine(family, tmp_path, {"svd": METHODS["svd"]})
    assert row["outcome"] == "ok", row
    assert row["fraction"]["svd"] >= PARTLY.get(family, ENOUGH), row["dense"]
    assert all(reason != "not said" for *_, reason in row["dense"])
    assert bool(row["dense"]) == (family in PARTLY)
    assert row["narrow"] or row.get("error", {}).get("svd", 0.0) < CLOSE


def test_parts_of_a_fused_weight_may_stay_dense(tmp_path: Path) -> None:
    model, inputs = zoo.build("nomic_bert")
    model.save_pretrained(tmp_path / "dense")
    options = {"method": "svd", "target": 0.5, "calibration": "none", "only": ["q_proj"]}
    api.convert(tmp_path / "dense", output=tmp_path / "small", **options)
    loaded = type(model).from_pretrained(tmp_path / "small")
    loaded.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again")
    assert inputs is not None
    want = zoo.outputs(model, inputs)[0]
    for found in (loaded, again):
        torch.testing.assert_close(zoo.outputs(found, inputs)[0], want, rtol=1e-4, atol=1e-5)
    small = AutoModel.from_pretrained(tmp_path / "small")
    assert sum("tc_" in name for name, _ in small.named_parameters()) == 2 * 2


@pytest.mark.parametrize("calibration", ["none", "builtin"])
def test_a_pattern_reaches_layers_outside_of_blocks(calibration: str, tmp_path: Path) -> None:
    model, _ = zoo.build("bert")
    model.save_pretrained(tmp_path / "dense")
    options = {"method": "svd", "target": 0.5, "only": ["transform.dense"]}
    if calibration == "none":
        api.convert(tmp_path / "dense", output=tmp_path / "o", calibration="none", **options)
    plan = api.plan(tmp_path / "dense", calibration=calibration, **options)
    assert [layer.name for layer in plan.layers] == ["cls.predictions.transform.dense"]
    whole = api.plan(tmp_path / "dense", method="svd", target=0.5)
    assert all(layer.name.startswith("bert.encoder.layer.") for layer in whole.layers)
