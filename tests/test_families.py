"""Families by rule: most have no table of roles, and convert all ordinary layers of their blocks.

`benchmarks/families.py` does the same with every family that the installed Transformers knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from benchmarks import zoo
from benchmarks.families import CLOSE, ENOUGH, METHODS, examine
from tcompress import api

WHOLE = """
    albert audio-spectrogram-transformer bark beit biogpt bitnet blip bloom canine clvp codegen
    convbert dab-detr data2vec-audio deberta-v2 decision_transformer deformable_detr detr dinov2
    distilbert dpt electra esm falcon flaubert fnet focalnet fsmt funnel gpt_bigcode gptj granite gte
    hubert ibert idefics internvl jina_embeddings_v3 layoutlm led longformer mgp-str mobilebert
    mobilevit molmo2_text mpt nomic_bert olmo2 patchtst pegasus_x perceiver radio roformer rt_detr_v2
    rwkv sam2 sapiens2 seamless_m4t segformer smollm3 splinter swinv2 timesfm trocr ultravox upernet
    vilt vits wav2vec2 xglm xlm xlnet yolos
""".split()
