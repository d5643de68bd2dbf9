"""From texts, and pairs of texts, to token ids, and from picture files to pixel values.

As the model's folder says.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from tcompress.data.inputs import (
    Inputs,
    decoder_start,
    image_shape,
    inputs_of,
    longest_text,
    vocabulary_size,
)
from tcompress.data.tables import Picture
from tcompress.errors import DataError, first_line, parse_json
from tcompress.models import SourceModel
from tcompress.progress import tell

Pixels = NDArray[np.uint8]  # (height, width, channels)

_WIDEST, _NARROW = 65535.0, 4096  # white of 16 bits; what cameras of 12 bits do not reach
_BACKGROUNDS = (255, 0)  # white, black
_CHUNK = 256  # texts handed to the tokenizer at a time
_WITHOUT = "convert without data: `--calib none`"


@dataclass(frozen=True)
class TextEncoder:
    """Writes texts as inputs of a model. Use `TextEncoder.open`."""

    tokenizer: Any
    inputs: Inputs
    limit: int  # most tokens of a text
    pad: int  # token to fill up with; its attention mask is 0
    end: int | None  # the token that ends a text, if the model knows it
    start: int | None  # first token of the decoder, None without decoder
    place: str  # folder of the tokenizer, for errors
    vocabulary: int | None  # number of tokens that the model knows, None if unknown

    @classmethod
    def open(
        cls,
        source: SourceModel,
        inputs: Inputs,
        max_length: int | None,
        *,
        length: int | None = None,
        lower: bool = False,
    ) -> TextEncoder:
        """Opens the tokenizer; a `length` is in the place of the one that its files say."""
        tokenizer = load_tokenizer(source.folder, trust=source.trust_remote_code, lower=lower)
        length = length or tokenizer.model_max_length
        limits = (max_length, longest_text(source, inputs), length)
        vocabulary = vocabulary_size(source, inputs)
        # A padding token may have been added to a tokenizer whose model never learnt of it.
        stated = getattr(source.config.get_text_config(), "pad_token_id", None)
        pad, stated, end = (
            token if token is not None and 0 <= token < (vocabulary or inf) else None
            for token in (tokenizer.pad_token_id, stated, tokenizer.eos_token_id)
        )
        return cls(
            tokenizer=tokenizer,
            inputs=inputs,
            # Tokenizers without a length say 10**30, which is more than they can count.
            limit=int(min(2**31 - 1, *(limit for limit in limits if limit is not None))),
            pad=next((token for token in (pad, stated, end) if token is not None), 0),
            end=end,
            start=decoder_start(source) if inputs.decoder else None,
            place=str(source.folder),
            vocabulary=vocabulary,
        )

    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        semantics: Sequence[str] | None = None,
    ) -> list[dict[str, Tensor]]:
        """Write each text, or pair, as the model's inputs: 1-D tensors of one length, not padded.

        A third text follows behind a pair as tokens of type 2, in a quarter of the length. Texts
        without tokens give an empty dictionary.
        """
        rows: list[dict[str, Tensor]] = []
        room = self.limit if semantics is None else self.limit - self.third
        for first in range(0, len(texts), _CHUNK):
            part = slice(first, first + _CHUNK)
            chunk = list(texts[part])
            second = None if pairs is None else list(pairs[part])
            columns = self.tokenizer(chunk, second, truncation=True, max_length=room)
            types = columns.get("token_type_ids", [None] * len(chunk))
            thirds = [list[int]()] * len(chunk)
            if semantics is not None:
                thirds = self._thirds(list(semantics[part]))
            parts = zip(chunk, columns["input_ids"], types, thirds, strict=True)
            for text, tokens, kinds, third in parts:
                ids = [*tokens, *third]
                self._check(ids, text)
                if third and kinds is None:
                    what = f"the tokenizer in `{self.place}` does not tell texts apart"
                    raise DataError(what, "give one that makes `token_type_ids`")
                kinds = kinds and [*kinds, *(2 for _ in third)]
                rows.append(self._row(ids, kinds) if tokens else {})
        return rows

    @property
    def third(self) -> int:
        """Most tokens of a third text, its end included."""
        return max(2, self.limit // 4)

    def _thirds(self, texts: list[str]) -> list[list[int]]:
        """Tokens of third texts, each with the token that ends a text."""
        end = self.tokenizer.sep_token_id
        last = [] if end is None else [end]
        options = {"add_special_tokens": False, "truncation": True}
        columns = self.tokenizer(texts, max_length=self.third - len(last), **options)
        return [[*tokens, *last] for tokens in columns["input_ids"]]

    def encode_whole(self, texts: Sequence[str], *, targets: bool = False) -> Iterator[list[int]]:
        """Yield all tokens of each text; at most `limit` of `targets`, which a decoder writes."""
        for first in range(0, len(texts), _CHUNK):
            chunk = list(texts[first : first + _CHUNK])
            if targets:  # tokenizers of translation models write another language than they read
                columns = self.tokenizer(text_target=chunk, truncation=True, max_length=self.limit)
            else:
                columns = self.tokenizer(chunk)
            for text, tokens in zip(chunk, columns["input_ids"], strict=True):
                self._check(tokens, text)
                yield tokens

    def pieces(self, texts: Sequence[str], count: int, name: str, cells: int) -> list[str]:
        """Cut further samples off long texts, in turns, up to `count` in all.

        Tells what is not read. The texts were drawn from so many `cells` of the data called `name`.
        """
        room = self.limit - self.tokenizer.num_special_tokens_to_add()
        more = max(0, count - len(texts))
        # No token stands for less than a byte, so that short texts need no counting.
        long = [text for text in texts if len(text.encode()) > room > 0]
        reach = 16 * room * (more + 2)  # characters, so that a file in one line is not all read
        parts = [part for text in long if (part := list(self._cut(text[:reach], room)))]
        turns = chain.from_iterable(zip_longest(*parts))
        pieces = list(islice((piece for piece in turns if piece), more))
        if cells > len(texts) == count:
            tell(f"{name}: {count:,} of {cells:,} texts are drawn")
        if parts:
            read = f"longer than {self.limit} tokens: {len(parts):,}; further samples cut off them:"
            beyond = "; what is beyond is not read" if len(texts) + len(pieces) >= count else ""
            tell(f"{name}: texts {read} {len(pieces):,}{beyond}")
        return pieces

    def _cut(self, text: str, room: int) -> Iterator[str]:
        """Cut a text after so many tokens, between words where there are any; skip the first."""
        if self.tokenizer.is_fast:
            tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            starts = [start for start, _ in tokens["offset_mapping"]]
        else:  # tells no places: they are as good as even
            total = len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            starts = [index * len(text) // total for index in range(total)]
        first, token = 0, 0
        while token + room < len(starts):
            end = starts[token + room]
            if end <= first:  # one character that has more tokens
                end = next((start for start in starts[token:] if start > first), len(text))
            blank = text.rfind(" ", first + (end - first) // 2, end)
            end = blank + 1 if blank > 0 and token else end
            if token:
                yield text[first:end].strip()
            first, token = end, bisect_left(starts, end)
        # A few words that are left over are no sample like others.
        if token and 4 * (len(starts) - token) >= room and text[first:].strip():
            yield text[first:].strip()

    def _row(self, tokens: list[int], types: list[int] | None) -> dict[str, Tensor]:
        row: dict[str, list[int]] = {}
        if self.inputs.text:
            row |= {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
            if types is not None:
                row["token_type_ids"] = types
        if self.start is not None:
            # Shifted, unless the tokenizer writes for the decoder.
            shifted = tokens if tokens[0] == self.start else [self.start, *tokens[:-1]]
            row |= {"decoder_input_ids": shifted, "decoder_attention_mask": [1] * len(tokens)}
        return {name: torch.tensor(row[name]) for name in row if name in self.inputs.names}

    def _check(self, tokens: list[int], text: str) -> None:
        largest = max(tokens, default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise DataError(
                f"the tokenizer in `{self.place}` gives token {largest} for `{text[:40]}`, "
                f"but the model knows only the tokens 0 to {self.vocabulary - 1}",
                f"put the model's own tokenizer into its folder, or {_WITHOUT}",
            )


def load_tokenizer(folder: Path, *, trust: bool = False, lower: bool = False) -> Any:
    """Load the tokenizer in a folder; a `DataError` says that there is none.

    With `lower` it lowercases texts, even if its files do not say so.
    """
    from transformers import AutoTokenizer

    reason = missing = "no vocabulary file"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust, local_files_only=True
        )
    except Exception as error:
        # Without its files a tokenizer fails in whatever line first misses them. A line that ends
        # with a colon begins a list of what else might be there.
        line = first_line(error).rstrip()
        reason = missing if line.endswith(":") else line
    else:
        # Most tokenizers can also be built from nothing, and then know no words.
        names = getattr(tokenizer, "vocab_files_names", {}).values()
        files = ("tokenizer.json", "tokenizer.model", *names)
        if not names or any((folder / name).is_file() for name in files):
            return _lowercasing(tokenizer) if lower else tokenizer
    raise DataError(
        f"`{folder}` has no usable tokenizer ({reason}), which reading text needs",
        f"add the tokenizer's files to the folder (`tokenizer.save_pretrained`), or {_WITHOUT}",
    )


def _lowercasing(tokenizer: Any) -> Any:
    from tokenizers.normalizers import Lowercase, Sequence

    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:  # written in Python
        tokenizer.do_lower_case = True
    elif core.normalizer is None:
        core.normalizer = Lowercase()
    else:
        core.normalizer = Sequence([Lowercase(), core.normalizer])
    return tokenizer


def pixels_of(data: bytes, channels: int, label: str) -> Pixels:
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


_HINT = "a conversion can do without (`--calib none`) or with made-up pictures (`--calib builtin`)"


def image_reader(source: SourceModel, needed: bool) -> Callable[[Pixels], Tensor]:
    """Give the function that turns a picture into the model's input, of shape (channels, h, w).

    Without an image processor that is an error if one is `needed`, else the plain way.
    """
    from transformers import AutoImageProcessor

    try:
        # Of two forms of a processor that of Pillow, so that pictures are the same numbers with
        # torchvision and without it.
        processor: Any = AutoImageProcessor.from_pretrained(
            source.folder,
            backend="pil",
            trust_remote_code=source.trust_remote_code,
            local_files_only=True,
        )
    except Exception as error:
        # Its file may be missing or of an unknown kind, or a library that it needs.
        if needed:
            text = f"`{source.folder}` has no usable image processor ({first_line(error)})"
            raise DataError(text, f"add its `preprocessor_config.json`; or {_HINT}") from error
        return plain_reader(source)

    def read(pixels: Pixels) -> Tensor:
        how = {"input_data_format": "channels_last", "return_tensors": "pt"}
        try:
            values: Tensor = processor(images=[pixels], **how)["pixel_values"][0]
        except Exception as error:
            # Processors check nothing, so a wrong option fails in any line.
            raise DataError(
                f"the image processor in `{source.folder}` cannot take a picture of shape "
                f"{pixels.shape} ({type(error).__name__}: {first_line(error)})",
                f"check `preprocessor_config.json`, or {_WITHOUT}",
            ) from error
        return values.float()

    return read


def processor_settings(source: SourceModel) -> dict[str, Any]:
    """Read how pictures are prepared, which cannot be opened without Pillow; {} if none is said."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        with suppress(OSError, ValueError, AttributeError):
            # As Transformers reads it, which takes no byte order mark.
            options = parse_json((source.folder / name).read_text(encoding="utf-8"))
            if name == "processor_config.json":
                options = options.get("image_processor", {})
            if isinstance(options, dict) and options:
                return options
    return {}


def plain_reader(source: SourceModel) -> Callable[[Pixels], Tensor]:
    """Resize, rescale and normalise without Pillow; for pictures of the model's own proportions."""
    options = processor_settings(source)
    channels, height, width = image_shape(source.config)
    cropped = options.get("do_center_crop") and options.get("crop_size")
    target = cropped or options.get("size")
    if isinstance(target, int):
        target = {"shortest_edge": target}
    target = target if isinstance(target, dict) else {}
    edge = target.get("shortest_edge")
    size = int(edge or target.get("height", height)), int(edge or target.get("width", width))
    factor = options.get("rescale_factor", 1 / 255) if options.get("do_rescale", True) else 1.0
    normalised = options.get("do_normalize", True)
    scales = ("image_mean", 0.5, 0.0), ("image_std", 0.5, 1.0)
    mean, spread = (
        torch.tensor(options.get(name, usual) if normalised else neutral, dtype=torch.float32)
        .expand(channels)
        .reshape(channels, 1, 1)
        for name, usual, neutral in scales
    )

    def read(pixels: Pixels) -> Tensor:
        values = torch.from_numpy(pixels).permute(2, 0, 1).float()
        if tuple(values.shape[1:]) != size:
            values = interpolate(values[None], size=size, mode="bilinear", antialias=True)[0]
        return (values * factor - mean) / spread

    return read


def check_seq2seq(source: SourceModel) -> None:
    """Refuse a model that does not make a text of another one.

    Raises:
        DataError: It has no encoder, no decoder, or its family has no head for that.
    """
    if _head_of(source) is None or not inputs_of(source).decoder:
        raise DataError(
            f"`{source.id}` is a `{source.model_class.__name__}`, and the task `seq2seq` needs an "
            "encoder with a decoder",
            "give a model such as T5 or BART, or choose another task (`causal-lm`: text alone)",
        )


def encode_seq2seq(
    source: SourceModel,
    encoder: TextEncoder,
    texts: Sequence[str],
    targets: Sequence[str],
    name: str,
) -> list[dict[str, Tensor]]:
    """Write pairs of texts as a model's inputs, with `labels`; nothing is padded.

    Label t is what the decoder is to write once it has read its inputs 0 to t.

    Args:
        source: The model, whose class says how labels are shifted.
        encoder: Writes texts as its inputs.
        texts: Texts that the encoder reads.
        targets: Texts that the decoder writes.
        name: Of the data, for errors.

    Raises:
        DataError: A text has no token.
    """
    shifted, rows = _shift_of(source), encoder.encode(texts)
    for row, tokens in zip(rows, encoder.encode_whole(targets, targets=True), strict=True):
        if not row or not tokens:
            raise DataError(f"`{name}` has texts without any token", "remove rows with empty texts")
        labels = torch.tensor(tokens)
        row |= {"labels": labels, "decoder_input_ids": shifted(labels)}
        if "decoder_attention_mask" in encoder.inputs.names:
            row["decoder_attention_mask"] = torch.ones_like(labels)
    return rows


def _head_of(source: SourceModel) -> Any:
    """Class of a model's family that makes texts of others, if there is one."""
    from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING as KINDS

    kind = KINDS.get(type(source.config), None)
    return kind[0] if isinstance(kind, tuple | list) else kind


def _shift_of(source: SourceModel) -> Callable[[Tensor], Tensor]:
    """Shift of a family: one token behind its start, unless it begins with that of a language.

    Gives a decoder's inputs, by labels.  # (tokens,) -> (tokens,).
    """
    start = decoder_start(source)
    model = replace(source, model_class=_head_of(source)).meta_model()
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    # A config may leave the start to `generation_config.json`, which classes do not read.
    if shift is not None:
        with suppress(TypeError, ValueError, RuntimeError):
            shift(torch.tensor([[start, start]]))
            return lambda labels: shift(labels[None])[0]  # type: ignore[no-any-return]
    return lambda labels: torch.cat([labels.new_tensor([start]), labels[:-1]])
