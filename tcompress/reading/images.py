"""From pictures to a model's `pixel_values`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.errors import DataError
from tcompress.reading.inputs import image_shape
from tcompress.source import SourceModel
from tcompress.source.text import first_line

Pixels = NDArray[np.uint8]  # (height, width, channels)

_HINT = "a conversion can do without (`--calib none`) or with made-up pictures (`--calib builtin`)"


def decode(data: bytes, channels: int, place: str) -> Pixels:
    """Decode a picture from the bytes of a JPEG, PNG or similar file.

    Args:
        data: Content of the file.
        channels: 1 for grey, 3 for colour.
        place: Where the picture comes from, for the error.

    Raises:
        DataError: If it cannot be decoded.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "reading pictures needs Pillow, which is not installed", hint="pip install pillow"
        ) from error
    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"), dtype=np.uint8)
    except Exception as error:
        # Pillow's decoders raise errors of many classes on damaged files.
        raise DataError(
            f"a picture of {place} cannot be decoded ({first_line(error)})",
            hint="remove it, or name the right column",
        ) from error
    return pixels.reshape(*pixels.shape[:2], channels)


def image_reader(source: SourceModel, needed: bool) -> Callable[[Pixels], Tensor]:
    """Give the function that turns a picture into the model's input, of shape (channels, h, w).

    Args:
        source: The model, whose own image processor is used.
        needed: Without processor: fail, rather than scale and normalise in a plain way.

    Raises:
        DataError: If the model comes without image processor and one is needed.
    """
    from transformers import AutoImageProcessor

    try:
        processor: Any = AutoImageProcessor.from_pretrained(
            source.folder, trust_remote_code=source.trust_remote_code, local_files_only=True
        )
    except Exception as error:
        # Its file may be missing or of an unknown kind, or a library that it needs.
        if needed:
            raise DataError(
                f"`{source.folder}` has no usable image processor ({first_line(error)})",
                hint=f"add its `preprocessor_config.json`; or {_HINT}",
            ) from error
        return plain_reader(source)

    def read(pixels: Pixels) -> Tensor:
        try:
            made = processor(
                images=[pixels], input_data_format="channels_last", return_tensors="pt"
            )
            values: Tensor = made["pixel_values"][0]
        except Exception as error:
            # Processors check nothing, so a wrong option fails in any line.
            raise DataError(
                f"the image processor in `{source.folder}` cannot take a picture of shape "
                f"{pixels.shape} ({type(error).__name__}: {first_line(error)})",
                hint="check `preprocessor_config.json`, or convert without data: `--calib none`",
            ) from error
        return values.float()

    return read


def has_processor_file(source: SourceModel) -> bool:
    """Tell whether the model's folder says how its pictures are prepared."""
    return bool(_options(source))


def _options(source: SourceModel) -> dict[str, Any]:
    for path, key in (
        (source.folder / "preprocessor_config.json", None),
        (source.folder / "processor_config.json", "image_processor"),
    ):
        if not path.is_file():
            continue
        try:
            options = json.loads(path.read_text(encoding="utf-8"))
            options = options.get(key, {}) if key else options
        except (ValueError, AttributeError):
            continue
        if isinstance(options, dict) and options:
            return options
    return {}


def plain_reader(source: SourceModel) -> Callable[[Pixels], Tensor]:
    """Resize, rescale and normalise without Pillow; for pictures of the model's own proportions."""
    options = _options(source)
    channels, *shape = image_shape(source.config)
    cropped = options.get("do_center_crop") and options.get("crop_size")
    size = _size(cropped or options.get("size"), (shape[0], shape[1]))
    factor = options.get("rescale_factor", 1 / 255) if options.get("do_rescale", True) else 1.0
    normalised = options.get("do_normalize", True)
    mean = _per_channel(options.get("image_mean", 0.5) if normalised else 0.0, channels)
    spread = _per_channel(options.get("image_std", 0.5) if normalised else 1.0, channels)

    def read(pixels: Pixels) -> Tensor:
        values = torch.from_numpy(pixels).permute(2, 0, 1).float()
        if tuple(values.shape[1:]) != size:
            values = torch.nn.functional.interpolate(
                values[None], size=size, mode="bilinear", antialias=True
            )[0]
        return (values * factor - mean) / spread

    return read


def _per_channel(value: Any, channels: int) -> Tensor:
    return torch.tensor(value, dtype=torch.float32).expand(channels).reshape(channels, 1, 1)


def _size(value: Any, default: tuple[int, int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    if isinstance(value, dict):
        if "shortest_edge" in value:
            return int(value["shortest_edge"]), int(value["shortest_edge"])
        return int(value.get("height", default[0])), int(value.get("width", default[1]))
    return default
