"""Replacements of softmax attention: ways of mixing tokens. The import list below is the registry.

`replacement` says what one consists of; one file each for graph, Kronecker, TAM and multilinear
attention. Open `replacement.py` first, then `graph.py` as the plainest example.
"""

from __future__ import annotations

from tcompress.attention import graph as graph
from tcompress.attention import kronecker as kronecker
from tcompress.attention import multilinear as multilinear
from tcompress.attention import tam as tam
from tcompress.attention.replacement import (
    Host,
    Mechanism,
    MechanismLayout,
    Visible,
    mechanism,
    mechanism_named,
    mechanism_of,
    mechanisms,
    register,
)
from tcompress.options.method_options import MechanismSpec

__all__ = [
    "Host",
    "Mechanism",
    "MechanismLayout",
    "MechanismSpec",
    "Visible",
    "mechanism",
    "mechanism_named",
    "mechanism_of",
    "mechanisms",
    "register",
]
