"""Calibration data of tiny models."""

from pathlib import Path
from typing import Any

from torch import Tensor

from tcompress.data.calibration import CalibrationData, load_batches
from tcompress.models import SourceModel
from tcompress.options import Calibration


def drawn(model: SourceModel, data: Path | str | list[str], **options: Any) -> CalibrationData:
    """Draw calibration data from files or a folder: all of it, unless it holds more than 500."""
    source = data if isinstance(data, list) else str(data)
    return load_batches(
        model, Calibration.model_validate({"samples": 500, "source": source} | options)
    )


def one_by_one(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The examples of a batch by themselves, without the padding of their texts."""

    def alone(name: str, index: int) -> Tensor:
        item = batch[name][index : index + 1]
        if not name.endswith(("input_ids", "attention_mask")):
            return item
        mask = batch[name.replace("input_ids", "attention_mask")]
        return item[:, : int(mask[index].sum())]

    count = len(next(iter(batch.values())))
    return [{name: alone(name, index) for name in batch} for index in range(count)]
