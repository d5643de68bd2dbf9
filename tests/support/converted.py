"""Tiny models that were converted without data."""

from pathlib import Path
from typing import Any

from tcompress.conversion.converter import Converted, convert
from tcompress.options import Convert
from tests.support.tiny import build

LPROD = {"name": "lprod", "p": 4}


def recipe(**options: Any) -> Convert:
    """Make a recipe that needs no data; the method is lprod with p=4 unless given."""
    return Convert.model_validate({"method": LPROD, "calibration": {"source": "none"}} | options)


def converted(family: str, folder: Path, **options: Any) -> Converted:
    """Save a tiny model as `<folder>/<family>` and convert it to `<folder>/<family>-small`."""
    source = folder / family
    if not source.exists():
        build(family).save_pretrained(source)
    return convert(str(source), recipe(**options), folder / f"{family}-small", force=True)
