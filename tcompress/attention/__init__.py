"""Replacements of softmax attention: ways of mixing tokens. The import list below is the registry.

`replacement` says what one consists of; one file each for graph, Kronecker, TAM and multilinear
attention. Open `replacement.py` first, then `graph.py` as the plainest example.
"""

from __future__ import annotations

from tcompress.attention import graph as graph
from tcompress.attention import kronecker as kronecker
from tcompress.attention import multilinear as multilinear
from tcompress.attention import tam as tam
from tcompress.attention.replacement import Host as Host
from tcompress.attention.replacement import Mechanism as Mechanism
from tcompress.attention.replacement import MechanismLayout as MechanismLayout
from tcompress.attention.replacement import Visible as Visible
from tcompress.attention.replacement import mechanism as mechanism
from tcompress.attention.replacement import mechanism_of as mechanism_of
from tcompress.attention.replacement import mechanisms as mechanisms
from tcompress.options.method_options import MechanismSpec as MechanismSpec
