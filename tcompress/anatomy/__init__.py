"""Which module of a Hugging Face transformer plays which role in which block."""

from __future__ import annotations

from tcompress.anatomy.attention import Attention, attentions_of
from tcompress.anatomy.data import Anatomy, Block, Layer, Part, Refusal
from tcompress.anatomy.families import supported_families
from tcompress.anatomy.find import anatomy_of

__all__ = [
    "Anatomy",
    "Attention",
    "Block",
    "Layer",
    "Part",
    "Refusal",
    "anatomy_of",
    "attentions_of",
    "supported_families",
]
