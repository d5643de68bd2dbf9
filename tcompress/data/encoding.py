"""From texts to token ids and from pictures to pixel values, as the model's folder says."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.data.inputs import Inputs, decoder_start, image_shape, longest_text, vocabulary_size
from tcompress.errors import DataError, first_line
from tcompress.models import SourceModel

# From texts to token ids, as the model's own tokenizer writes them.


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_CHUNK = 256  # texts handed to the tokenizer at a time


@dataclass(frozen=True)
class TextEncoder:
    """Writes texts as inputs of a model. Use `TextEncoder.open`.

    Attributes:
        tokenizer: The model's tokenizer.
        inputs: Inputs of the model.
        limit: Most tokens of a text.
        pad: Token to fill up with; its attention mask is 0.
        start: First token of the decoder, None without decoder.
        place: Folder of the tokenizer, for errors.
        vocabulary: Number of tokens that the model knows, None if unknown.
    """

    tokenizer: Any
    inputs: Inputs
    limit: int
    pad: int
    start: int | None
    place: str
    vocabulary: int | None

    @classmethod
    def open(cls, source: SourceModel, inputs: Inputs, max_length: int) -> TextEncoder:
        """Load the tokenizer of a model.

        Raises:
            DataError: If the model comes without one.
        """
        tokenizer = load_tokenizer(source.folder, trust_remote_code=source.trust_remote_code)
        limits = (max_length, longest_text(source, inputs), tokenizer.model_max_length)
        vocabulary = vocabulary_size(source, inputs)
        # A padding token may have been added to a tokenizer whose model never learnt of it.
        fillers = [
            token
            for token in (tokenizer.pad_token_id, tokenizer.eos_token_id)
            if token is not None and (vocabulary is None or token < vocabulary)
        ]
        return cls(
            tokenizer=tokenizer,
            inputs=inputs,
            limit=int(min(limit for limit in limits if limit is not None)),
            pad=fillers[0] if fillers else 0,
            start=decoder_start(source) if inputs.decoder else None,
            place=str(source.folder),
            vocabulary=vocabulary,
        )

    @property
    def end(self) -> int | None:
        """The token that ends a text, if the model knows it."""
        token = self.tokenizer.eos_token_id
        known = token is not None and (self.vocabulary is None or token < self.vocabulary)
        return token if known else None

    def encode(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, Tensor]]:
        """Write each text as the model's inputs: 1-D tensors of one length, not padded.

        Texts without tokens give an empty dictionary.

        Args:
            texts: The texts.
            pairs: Second texts that are read together with the first ones.

        Raises:
            DataError: If the tokenizer and the model do not belong together.
        """
        rows: list[dict[str, Tensor]] = []
        for first in range(0, len(texts), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            second = None if pairs is None else list(pairs[chunk])
            rows.extend(self._encode(list(texts[chunk]), second))
        return rows

    def encode_whole(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Write each text as tokens, however long it is."""
        for first in range(0, len(texts), _CHUNK):
            chunk = list(texts[first : first + _CHUNK])
            for text, tokens in zip(chunk, self.tokenizer(chunk)["input_ids"], strict=True):
                if tokens:
                    self._check(max(tokens), text)
                yield tokens

    def _encode(self, texts: list[str], pairs: list[str] | None) -> list[dict[str, Tensor]]:
        columns = self.tokenizer(texts, pairs, truncation=True, max_length=self.limit)
        types = columns.get("token_type_ids")
        rows: list[dict[str, Tensor]] = []
        for index, tokens in enumerate(columns["input_ids"]):
            if not tokens:
                rows.append({})
                continue
            self._check(max(tokens), texts[index])
            ids = torch.tensor(tokens, dtype=torch.long)
            row: dict[str, Tensor] = {}
            if self.inputs.text:
                row["input_ids"] = ids
                row["attention_mask"] = torch.ones_like(ids)
                if types is not None:
                    row["token_type_ids"] = torch.tensor(types[index], dtype=torch.long)
            if self.start is not None:
                row["decoder_input_ids"] = self._shifted(ids)
                row["decoder_attention_mask"] = torch.ones_like(ids)
            rows.append({name: row[name] for name in row if name in self.inputs.names})
        return rows

    def _shifted(self, ids: Tensor) -> Tensor:
        """What a decoder reads while it is taught to write this text."""
        if ids[0] == self.start:  # the tokenizer writes for the decoder
            return ids.clone()
        return torch.cat([ids.new_tensor([self.start]), ids[:-1]])

    def _check(self, largest: int, text: str) -> None:
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise DataError(
                f"the tokenizer in `{self.place}` gives token {largest} for `{text[:40]}`, "
                f"but the model knows only the tokens 0 to {self.vocabulary - 1}",
                hint="put the model's own tokenizer into its folder, "
                "or convert without data: `--calib none`",
            )


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer in a folder.

    Raises:
        DataError: If there is none.
    """
    from transformers import AutoTokenizer

    reason = "no vocabulary file"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        # Without its files a tokenizer fails in whatever line first misses them.
        reason = first_line(error).rstrip(":")
    else:
        # Most tokenizers can also be built from nothing, and then know no words.
        own = set(getattr(tokenizer, "vocab_files_names", {}).values())
        if not own or any((folder / name).is_file() for name in {*_TOKENIZER_FILES, *own}):
            return tokenizer
    raise DataError(
        f"`{folder}` has no usable tokenizer ({reason}), which reading text needs",
        hint="add the tokenizer's files to the folder (`tokenizer.save_pretrained`), "
        "or convert without data: `--calib none`",
    )


# From pictures to a model's `pixel_values`.


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
