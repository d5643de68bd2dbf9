"""Tiny models with another attention, converted without data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tcompress.conversion.converter import convert
from tcompress.options import Convert
from tcompress.planning.entries import Plan
from tests.support.tiny import TINY, TinyModel, named

REPLACEMENTS: dict[str, dict[str, Any]] = {
    "tga": {"name": "tga"},
    "tsa": {"name": "tsa", "filter_order": 3},
    "hot": {"name": "hot"},
    "folded": {"name": "hot", "fold": 4},
    "favor": {"name": "hot", "kernel": "favor", "features": 8},
    "tam": {"name": "tam"},
    "memory": {"name": "tam", "memory": "gru"},
    "tucker": {"name": "tam", "core": "tucker", "rank": 4, "cores": 2},
    "multilinear": {"name": "multilinear", "length": 12},
    "additive": {"name": "additive"},
}


class _Videos(TinyModel):
    def inputs(self, batch: int, length: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {"pixel_values": torch.randn(batch, 4, 3, 16, 16, generator=generator)}


VIDEOMAE = _Videos(
    "VideoMAEConfig",
    "VideoMAEForVideoClassification",
    {**TINY["vit"].options, "num_frames": 4, "tubelet_size": 2},
)
HOSTS = {**TINY, "videomae": VIDEOMAE}
_NAMES = """
bert distilbert mpnet deberta-v2 modernbert gpt2 gpt_neox opt llama qwen3 gemma3 mixtral t5 bart
vit deit clip whisper videomae tcompress_text tcompress_grid tcompress_grid-series
"""
FAMILIES = {name: HOSTS[name] for name in _NAMES.split()}
_DECODERS = ("gpt2", "gpt_neox", "opt", "llama", "qwen3", "gemma3", "mixtral")
REASONS: dict[tuple[str, str], str] = {
    ("t5", "tga"): "bias of positions",
    ("t5", "tsa"): "bias of positions",
    ("t5", "additive"): "bias of positions",
    ("gemma3", "tsa"): "reaches beyond the window",
}
for _name in REPLACEMENTS:
    for _family in ("mpnet", "deberta-v2"):
        REASONS[_family, _name] = f"family `{_family}` computes attention itself"
    REASONS.setdefault(("t5", _name), "would look ahead")
for _name in ("hot", "folded", "favor", "tam", "memory", "tucker", "multilinear"):
    REASONS |= {(_family, _name): "would look ahead" for _family in _DECODERS}
for _name in ("hot", "favor"):
    for _family in ("bert", "distilbert", "modernbert", "bart", "whisper", "tcompress_text"):
        REASONS[_family, _name] = "give `grid`, or for text `fold`"
for _family in ("vit", "deit", "clip", "whisper", "videomae", "tcompress_grid"):
    REASONS[_family, "multilinear"] = "`length` is 12, and inputs have"
for _family in ("vit", "deit", "clip", "videomae", "tcompress_grid", "tcompress_grid-series"):
    REASONS[_family, "folded"] = "already: leave `fold` out"


def recipe_for(name: str, **options: Any) -> Convert:
    """Makes a recipe that needs no data."""
    base = {"attention": REPLACEMENTS[name], "calibration": {"source": "none"}}
    return Convert.model_validate({**base, **options})


@dataclass(frozen=True)
class Hosted:
    """A converted model on disk."""

    family: str
    folder: Path
    plan: Plan

    def load(self, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
        """Loads it with what was missing or unexpected."""
        kind: Any = named(HOSTS[self.family].model)
        model, info = kind.from_pretrained(self.folder, output_loading_info=True, **options)
        return model.eval(), info


class Workshop:
    """Makes tiny models below a folder and converts them, each once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[str, str], Hosted] = {}

    def source(self, family: str) -> Path:
        """Saves a dense model."""
        folder = self._root / "dense" / family
        if not folder.exists():
            HOSTS[family].build().save_pretrained(folder)
        return folder

    def hosted(self, family: str, name: str) -> Hosted:
        """Converts a model."""
        key = (family, name)
        if key not in self._made:
            folder = self._root / f"{family}-{name}"
            done = convert(str(self.source(family)), recipe_for(name), folder)
            self._made[key] = Hosted(family, done.folder, done.manifest.plan)
        return self._made[key]
