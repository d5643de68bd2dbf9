"""Inputs of a model's forward pass, and batches of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tcompress.errors import DataError
from tcompress.models import SourceModel
from tcompress.roles.find import text_positions

IGNORED = -100  # label of tokens that are not predicted
_FILLERS = {"labels": IGNORED, "words": IGNORED}


def collate(rows: Sequence[Mapping[str, Tensor]], pad: int) -> dict[str, Tensor]:
    """Puts examples with the same inputs together; sequences (1-D) are padded on the right."""
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        filler = pad if name.endswith("input_ids") else _FILLERS.get(name, 0)
        if values[0].ndim == 1:
            batch[name] = pad_sequence(values, batch_first=True, padding_value=filler)
        else:
            batch[name] = torch.stack(values)
    return batch


VOLUMES, SERIES = "grid_values", "past_values"

_NO_DATA = "a conversion can do without data: `--calib none`"


Batch = Mapping[str, Tensor]
"""Inputs of a model for some examples, by the names of its arguments."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a model."""

    names: frozenset[str]  # keyword arguments that the forward pass accepts
    text: bool  # it reads `input_ids`
    image: bool  # it reads `pixel_values`
    audio: bool  # it reads `input_features`
    decoder: bool  # it has a decoder that reads `decoder_input_ids`
    # Name of its input on a grid, if it has one: `grid_values` for volumes, `past_values` for
    # series.
    grid: str | None = None


def inputs_of(source: SourceModel) -> Inputs:
    """Find out which inputs a model takes, and refuse one that there can be no data for."""
    kind = source.model_class
    names = set(inspect.signature(kind.forward).parameters)
    if kind.main_input_name not in names:
        # Code that comes with a model may hide its inputs behind `**kwargs`.
        names |= {kind.main_input_name, "attention_mask"}
    text = "input_ids" in names

    def marked(kind: str) -> bool:
        """Chat models mark the place of a picture or sound; without it they read text alone."""
        tokens = (getattr(source.config, f"{kind}_token_{end}", None) for end in ("id", "index"))
        return text and any(isinstance(token, int) for token in tokens)

    image = "pixel_values" in names and not marked("image")
    audio = "input_features" in names and not marked("audio")
    grid = next((name for name in (VOLUMES, SERIES) if name in names), None)
    if not (text or image or audio or grid):
        raise DataError(
            f"there is no kind of data for `{kind.__name__}`, whose input is "
            f"`{kind.main_input_name}`; `input_ids`, `pixel_values`, `input_features`, "
            "`grid_values` and `past_values` are known",
            hint=_NO_DATA,
        )
    return Inputs(frozenset(names), text, image, audio, "decoder_input_ids" in names, grid)


def check_texts(source: SourceModel, count: int, name: str) -> None:
    """Compare the number of texts in an example of the data called `name` with what a model reads.

    Raises:
        DataError: A third text is missing, or is one too many.
    """
    reads, model = getattr(source.config, "reads_semantics", False), source.model_class.__name__
    if reads and count != 3:
        text = f"`{model}` reads three texts (query, response, semantics), and `{name}` gives "
        text += "one" if count == 1 else "two"
        hint = "name all three: `--columns text=COLUMN,pair=COLUMN,semantics=COLUMN`"
        raise DataError(text, hint)
    if count == 3 and not reads:
        text = f"`{name}` gives three texts, and `{model}` reads two at most"
        raise DataError(text, "leave `semantics` out of the columns, or take `tcompress_tam`")


def longest_text(source: SourceModel, inputs: Inputs) -> int | None:
    """Give the most tokens that the model has positions for; None if there is no limit."""
    names = ["max_position_embeddings", "n_positions"]
    limits: list[int] = []
    if inputs.text:
        limits += _numbers(_text_configs(source.config, decoder=False), *names)
    if inputs.decoder:
        configs = _text_configs(source.config, decoder=True)
        limits += _numbers(configs, *names, "max_target_positions")
    return text_positions(source.meta_model(), min(limits)) if limits else None


def vocabulary_size(source: SourceModel, inputs: Inputs) -> int | None:
    """Give the number of tokens that the model's text part knows."""
    configs = _text_configs(source.config, decoder=not inputs.text)
    return next(iter(_numbers(configs, "vocab_size")), None)


def decoder_start(source: SourceModel) -> int:
    """Give the token that a decoder starts with."""
    from transformers import GenerationConfig

    configs = _text_configs(source.config, decoder=True)
    if (source.folder / "generation_config.json").is_file():
        configs.append(GenerationConfig.from_pretrained(source.folder))
    for name, config in product(("decoder_start_token_id", "bos_token_id"), configs):
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    raise DataError(
        f"the configuration in `{source.folder}` does not say which token its decoder starts with",
        hint="set `decoder_start_token_id` in `config.json`, or convert with `--calib none`",
    )


def image_shape(config: Any) -> tuple[int, int, int]:
    """Give channels, height and width of a model's pictures."""
    parts = _parts(config, "vision_config", "encoder")
    channels, size = [3, *_numbers(parts, "num_channels")][-1], (224, 224)
    for part in parts:
        stated = getattr(part, "image_size", None)
        stated = (stated, stated) if isinstance(stated, int) else stated
        if isinstance(stated, list | tuple) and len(stated) == 2:
            size = (int(stated[0]), int(stated[1]))
    return (channels, *size)


def frames_of(config: Any) -> int | None:
    """Give the number of pictures in a clip; None for models that take single pictures."""
    return next(iter(_numbers([config], "num_frames")), None)


def spectrogram_shape(source: SourceModel) -> tuple[int, int]:
    """Give frequency bands and frames of a model's log-mel spectrograms, laid out as Whisper's."""
    sizes = _numbers([source.config], "num_mel_bins", "max_source_positions")
    if len(sizes) < 2:
        raise DataError(f"there is no built-in sound for `{source.model_class.__name__}`", _NO_DATA)
    return sizes[0], 2 * sizes[1]  # the second convolution halves the number of frames


def grid_shape(source: SourceModel, inputs: Inputs) -> tuple[int, ...]:
    """Give the shape of one input on a grid: (channels, *sizes), or (time steps, variables)."""
    config = source.config
    size = getattr(config, "input_size", None)
    if not isinstance(size, list | tuple) or (inputs.grid == SERIES and len(size) != 2):
        raise DataError(
            f"the config of `{source.model_class.__name__}` does not say how large its "
            f"`{inputs.grid}` are",
            hint=f"{_NO_DATA}; or use the own model `tcompress_grid`, which has `input_size`",
        )
    if inputs.grid == SERIES:
        return int(size[1]), int(size[0])
    return (int(config.num_channels), *map(int, size))


def window_of(source: SourceModel) -> tuple[int, int]:
    """Give the time steps that a model for forecasting sees, and those that it forecasts."""
    inputs = inputs_of(source)
    horizon = getattr(source.config, "horizon", None)
    if inputs.grid != SERIES or not isinstance(horizon, int):
        raise DataError(
            f"`{source.id}` is a `{source.model_class.__name__}`, which forecasts no series",
            hint="give a model for forecasting, such as the own model `tcompress_grid`",
        )
    return grid_shape(source, inputs)[0], horizon


def _parts(config: Any, *names: str) -> list[Any]:
    parts = (getattr(config, name, None) for name in names)
    return [config, *(part for part in parts if part is not None)]


def _text_configs(config: Any, *, decoder: bool) -> list[Any]:
    return _parts(config, "text_config", "decoder" if decoder else "encoder")


def _numbers(configs: Iterable[Any], *names: str) -> list[int]:
    values = [getattr(config, name, None) for config in configs for name in names]
    # Some configurations write "no limit" as -1.
    return [value for value in values if isinstance(value, int) and value > 0]
