"""Conversions that several benchmarks compare."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

TARGETS = (0.25, 0.5)

SLICES: dict[str, dict[str, Any]] = {
    "lprod p=4": {"method": {"name": "lprod", "p": 4}},
    "lprod p=2": {"method": {"name": "lprod", "p": 2}},
}


def recorded(out: Path) -> tuple[Path, dict[str, Any]]:
    """The file of results in a folder and what it holds so far; says what they are measured on."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    record = out / "results.json"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}")
    return record, json.loads(record.read_text()) if record.is_file() else {}


def budgets(target: float, p: int = 8) -> dict[str, dict[str, Any]]:
    """Every method at one budget.

    Args:
        target: Fraction to keep of all blocks' layers.
        p: Number of slices; layers whose widths it does not divide would stay dense.
    """
    methods: dict[str, dict[str, Any]] = {
        "svd": {"name": "svd"},
        f"lprod p={p} + low rank": {"name": "lprod", "p": p},
        "tt": {"name": "tt"},
        "tucker": {"name": "tucker", "share": "none"},
        "auto": {"name": "auto"},
    }
    return {
        f"{label} {target:.0%}".replace("%", " %"): {"method": method, "target": target}
        for label, method in methods.items()
    }


def every_budget() -> dict[str, dict[str, Any]]:
    """Every method at a quarter and at a half of the rewritten layers."""
    return {name: row for target in TARGETS for name, row in budgets(target).items()}
