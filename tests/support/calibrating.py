"""Calibration data of tiny models."""

from pathlib import Path
from typing import Any

from tcompress.data.calibration import CalibrationData, load_batches
from tcompress.models import SourceModel
from tcompress.options import Calibration


def drawn(model: SourceModel, data: Path | str | list[str], **options: Any) -> CalibrationData:
    """Draw calibration data from files or a folder: all of it, unless it holds more than 500."""
    source = data if isinstance(data, list) else str(data)
    return load_batches(
        model, Calibration.model_validate({"samples": 500, "source": source} | options)
    )
