"""Mechanisms: ways of mixing tokens. The import list below is the registry."""

from __future__ import annotations

from tcompress.mechanisms import graph as graph
from tcompress.mechanisms import kronecker as kronecker
from tcompress.mechanisms import multilinear as multilinear
from tcompress.mechanisms import tam as tam
from tcompress.mechanisms.base import (
    Host,
    Mechanism,
    MechanismLayout,
    MechanismSpec,
    mechanism,
    mechanism_named,
    mechanism_of,
    mechanisms,
    register,
)
from tcompress.mechanisms.visible import Visible

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
