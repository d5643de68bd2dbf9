"""Names of options, and the fields of a recipe that they set."""

from __future__ import annotations

METHOD_OPTIONS = (
    "p",
    "transform",
    "block",
    "stages",
    "tubal_rank",
    "rank",
    "order",
    "modes",
    "apply",
    "share",
    "cores",
    "tol",
    "offer",
    "trials",
)
"""Options of `convert` that belong to a method: fields of its options in a recipe."""

RECIPE_ONLY = ("name", "placement", "pad", "seed")
"""Fields of a method's options that are no options of `convert` under their own name."""

MECHANISM_OPTIONS = ("filter_order", "grid", "fold", "kernel", "core", "memory", "length")
"""Options of `convert` that belong to a mechanism: fields of its options in a recipe."""

DIGITS = 15
"""Most digits of a whole number: more than any size has."""


def flag(field: str) -> str:
    """Names the option that sets a field."""
    return f"--{field.replace('_', '-')}"
