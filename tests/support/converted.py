"""Tiny models that were converted without data."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tcompress.conversion.converter import Converted, convert
from tcompress.linalg.fits import fit_rotation
from tcompress.options import Convert
from tests.support.tiny import build

LPROD = {"name": "lprod", "p": 4}


def recipe(**options: Any) -> Convert:
    """Make a recipe that needs no data; the method is lprod with p=4 unless given."""
    return Convert.model_validate({"method": LPROD, "calibration": {"source": "none"}} | options)


def converted(family: str, folder: Path, **options: Any) -> Converted:
    """Save a tiny model as `<folder>/<family>` and convert it to `<folder>/<family>-small`.

    Fitted transforms are only begun, which takes no time.
    """
    source = folder / family
    if not source.exists():
        build(family).save_pretrained(source)
    begun = partial(fit_rotation, steps=2)
    with patch("tcompress.linalg.fit_rotation", begun):
        return convert(str(source), recipe(**options), folder / f"{family}-small", force=True)
