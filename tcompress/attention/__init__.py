"""Replacements of softmax attention: ways of mixing tokens. The import list below is the registry.

`replacement` says what one consists of; one file each for additive, graph, Kronecker, TAM and
multilinear attention, with its options. `visibility` says which keys a query sees, and `module`
holds a replacement inside a model. Open `replacement.py` first, then `graph.py` as the plainest
example.
"""

from __future__ import annotations

from tcompress.attention import additive as additive
from tcompress.attention import graph as graph
from tcompress.attention import kronecker as kronecker
from tcompress.attention import multilinear as multilinear
from tcompress.attention import tam as tam
from tcompress.attention.replacement import AttentionReplacement as AttentionReplacement
from tcompress.attention.replacement import BaseAttention as BaseAttention
from tcompress.attention.replacement import ReplacementSpec as ReplacementSpec
from tcompress.attention.replacement import replacement_named as replacement_named
from tcompress.attention.replacement import replacement_of as replacement_of
from tcompress.attention.replacement import replacements as replacements
