"""Structures: ways of storing and applying a weight. The import list below is the registry.

`base` says what a structure is, one file each for low rank, L-product, tensor train and Tucker;
`modules` are the layers that serve all of them. Open `base.py` first, then `lowrank.py`.
"""

from __future__ import annotations

from tcompress.structures import lowrank as lowrank
from tcompress.structures import lprod as lprod
from tcompress.structures import tt as tt
from tcompress.structures import tucker as tucker
from tcompress.structures import width as width
from tcompress.structures.base import Layout as Layout
from tcompress.structures.base import Refusal as Refusal
from tcompress.structures.base import Site as Site
from tcompress.structures.base import Spec as Spec
from tcompress.structures.base import Structure as Structure
from tcompress.structures.base import Target as Target
from tcompress.structures.base import structure as structure
from tcompress.structures.base import structures as structures
