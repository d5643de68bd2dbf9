"""Conversions that several benchmarks compare."""

from __future__ import annotations

from typing import Any

_METHODS: dict[str, dict[str, Any]] = {
    "svd": {"name": "svd"},
    "lprod p=8 + low rank": {"name": "lprod", "p": 8},
    "tt": {"name": "tt"},
    "tucker": {"name": "tucker"},
    "auto": {"name": "auto"},
}

SLICES: dict[str, dict[str, Any]] = {
    "lprod p=4": {"method": {"name": "lprod", "p": 4}},
    "lprod p=2": {"method": {"name": "lprod", "p": 2}},
}

BUDGETS: dict[str, dict[str, Any]] = {
    f"{label} {target:.0%}".replace("%", " %"): {"method": method, "target": target}
    for target in (0.25, 0.5)
    for label, method in _METHODS.items()
}
"""Every method at a quarter and at a half of the rewritten layers."""


def with_depth(label: str, depth: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of fewer layers, by themselves and at half of what they keep.

    Args:
        label: What stays or goes, such as "layers 1, 3, 5".
        depth: The same as settings of a conversion, such as `{"drop_layers": 3}`.
    """
    halves = {name: row for name, row in BUDGETS.items() if name.endswith("50 %")}
    return {label: depth} | {f"{label}, {name}": depth | row for name, row in halves.items()}
