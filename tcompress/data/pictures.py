"""Pixels of picture files of every mode: 8 bits for each channel, as their values mean."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcompress.data.tables import Picture
from tcompress.errors import DataError, first_line
from tcompress.progress import tell

Pixels = NDArray[np.uint8]  # (height, width, channels)

_WIDEST, _NARROW = 65535.0, 4096  # white of 16 bits; what cameras of 12 bits do not reach
_BACKGROUNDS = (255, 0)  # white, black


def decode(data: bytes, channels: int, label: str) -> Pixels:
    """Decode a picture of 1 channel or 3 from the bytes of a JPEG, PNG or similar file.

    Wider values are scaled to 8 bits, what is transparent shows white, and a camera is held upright
    as its file says.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        hint = "pip install pillow"
        raise DataError("reading pictures needs Pillow, which is not installed", hint) from error
    name = f"{data.file}, " if isinstance(data, Picture) and data.file else ""
    try:
        with Image.open(io.BytesIO(data)) as image:
            upright = ImageOps.exif_transpose(image)
            shown = _opaque(_in_bytes(upright, image.format))
            # A copy: torch warns of arrays that nobody may write to.
            pixels = np.array(shown.convert("L" if channels == 1 else "RGB"), dtype=np.uint8)
    except DataError as error:
        text = f"{name}a picture of {label}, {error.message}"
        raise DataError(text, error.hint) from error
    except Exception as error:
        # Pillow's decoders raise errors of many classes on damaged files.
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "of no known format" if unknown else first_line(error)
        text = f"{name}a picture of {label} cannot be decoded ({reason})"
        raise DataError(text, "remove it, or name the right column") from error
    return pixels.reshape(*pixels.shape[:2], channels)


def _in_bytes(image: Any, kind: str | None) -> Any:
    """Scale grey values of 16 bits, or from 0 to 1, to bytes; Pillow would cut them off at 255."""
    from PIL import Image

    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    if image.mode == "F":
        largest, allowed = 1.0, "from 0 to 1"
    elif image.mode == "I" and kind == "TIFF":
        largest, allowed = 255.0, "from 0 to 255"  # of 32 bits, which nobody fills
    else:
        largest, allowed = _WIDEST, "from 0 to 65535"
    if largest == _WIDEST and 0 < high < _NARROW:
        tell(
            f"pictures of 16 bits with values up to {_NARROW - 1} only are dark: where that is "
            f"their white, scale them to {_WIDEST:g}"
        )
    if not 0 <= low <= high <= largest:
        raise DataError(
            f"of mode `{image.mode}`, has values from {low:g} to {high:g}, where {allowed} have "
            "a meaning",
            "save the pictures with 8 or 16 bits for each channel",
        )
    return Image.fromarray(np.rint(values * (255 / largest)).astype(np.uint8))


def _opaque(image: Any) -> Any:
    """Lay a picture with transparent parts on white, or on black if nothing is seen there."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    layers = image.convert("RGBA")
    for level in _BACKGROUNDS:
        ground = Image.new("RGBA", image.size, (level, level, level, 255))
        laid = Image.alpha_composite(ground, layers).convert("RGB")
        spans: Any = laid.getextrema()
        if any(low != high for low, high in spans):
            return laid
    return layers.convert("RGB")
