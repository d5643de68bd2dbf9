"""What is timed: batches, lengths and modes, and random inputs that both models take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tcompress.data.inputs import (
    SERIES,
    Inputs,
    frames_of,
    grid_shape,
    image_shape,
    inputs_of,
    longest_text,
    spectrogram_shape,
    vocabulary_size,
)
from tcompress.errors import InputError
from tcompress.models import SourceModel
from tcompress.roles import anatomy_of

Mode = Literal["eager", "compiled"]
MODES: tuple[Mode, ...] = get_args(Mode)
LENGTHS = (32, 128)


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    Attributes:
        batch: Sequences or pictures in a batch.
        length: Tokens in a sequence.
        mode: How the pass runs.
    """

    batch: int
    length: int
    mode: Mode


def cells(batches: Sequence[int], lengths: Sequence[int], modes: Sequence[Mode]) -> list[Cell]:
    """Lists the grid without repetitions, eager passes first: they cost no compilation."""
    ordered = [mode for mode in MODES if mode in modes]
    grid = product(ordered, dict.fromkeys(lengths), dict.fromkeys(batches))
    return [Cell(batch, length, mode) for mode, length, batch in grid]


# Random inputs that a model and its baseline both take.


_LEAST_VOCABULARY = 16  # known of every model whose config does not say


@dataclass(frozen=True)
class Feed:
    """Makes inputs. Use `Feed.of`.

    Attributes:
        inputs: Which inputs the models take.
        tokens: Token ids to draw from.
        last: Token that ends every sequence, if the models have one.
        longest: Most tokens that both have positions for; None if there is no limit.
        image: Channels, height and width of a picture; before them the pictures of a clip.
        sound: Bands and frames of a spectrogram.
        grid: Shape of an input on a grid.
    """

    inputs: Inputs
    tokens: Tensor  # (tokens,)
    last: int | None
    longest: int | None
    image: tuple[int, ...] | None
    sound: tuple[int, int] | None
    grid: tuple[int, ...] | None = None

    @classmethod
    def of(cls, model: SourceModel, baseline: SourceModel) -> Feed:
        """Finds out what two models take.

        Raises:
            InputError: They do not take the same, or nothing that is known.
        """
        both = (model, baseline)
        inputs, other = (inputs_of(source) for source in both)
        sizes = [
            _shapes(source, found) for source, found in zip(both, (inputs, other), strict=True)
        ]
        if _kinds(inputs) != _kinds(other) or sizes[0] != sizes[1]:
            described = [
                f"`{source.id}` takes {_words(found, shapes)}"
                for source, found, shapes in zip(both, (inputs, other), sizes, strict=True)
            ]
            raise InputError(", ".join(described), "give a baseline that takes the same inputs")
        return cls(
            inputs,
            _ordinary_tokens(both, inputs),
            _token(model.config, "eos_token_id"),
            min(_known(longest_text(source, inputs) for source in both), default=None),
            *sizes[0],
        )

    @property
    def has_length(self) -> bool:
        """Whether sequences may have any length; pictures and sounds have their own."""
        return self.inputs.text or self.inputs.decoder

    def allowed(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Checks lengths that were asked for.

        Raises:
            InputError: The models have no positions for the longest.
        """
        if self.longest is not None and max(lengths) > self.longest:
            raise InputError(
                f"length {max(lengths)} was asked for, the models have {self.longest} positions",
                f"give `--length {self.longest}` or less",
            )
        return tuple(lengths)

    def fitting(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Keeps those lengths that the models have positions for; the longest possible if none."""
        fit = tuple(n for n in lengths if self.longest is None or n <= self.longest)
        return fit or (self.longest or min(lengths),)

    def batch(
        self, batch: int, length: int, seed: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Draws the inputs of one pass; they depend on the sizes and the seed only."""
        generator = torch.Generator().manual_seed(seed)
        drawn: dict[str, Tensor] = {}
        if self.inputs.text:
            drawn["input_ids"] = self._ids(batch, length, generator)
            drawn["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
        if self.inputs.decoder:
            drawn["decoder_input_ids"] = self._ids(batch, length, generator)
        if self.image is not None:
            drawn["pixel_values"] = torch.randn(batch, *self.image, generator=generator).to(dtype)
        if self.sound is not None:
            drawn["input_features"] = torch.randn(batch, *self.sound, generator=generator).to(dtype)
        if self.grid is not None and self.inputs.grid is not None:
            values = torch.randn(batch, *self.grid, generator=generator)
            drawn[self.inputs.grid] = values.to(dtype)
        return {
            name: tensor.to(device)
            for name, tensor in drawn.items()
            if name != "attention_mask" or name in self.inputs.names
        }

    def words(self) -> str:
        """Describes the inputs, for protocols."""
        return "random " + _words(self.inputs, (self.image, self.sound, self.grid))

    def _ids(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Draws token ids.  # (batch, length)."""
        chosen = torch.randint(len(self.tokens), (batch, length), generator=generator)
        ids = self.tokens[chosen]
        if self.last is not None and length > 1:
            ids[:, -1] = self.last  # some classifiers read the state at this token
        return ids


def sequence_length(source: SourceModel, model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Counts the tokens that the first block of a model gets; pictures have as many as they have.

    Args:
        source: What the model was loaded from.
        model: The model.
        inputs: Inputs of a pass.
    """
    first = model.get_submodule(anatomy_of(source.meta_model()).blocks[0].name)
    lengths: list[int] = []

    def look(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        states = positional[0] if positional else named["hidden_states"]
        lengths.append(prod(states.shape[1:-1]))  # windows of pictures have two axes

    hook = first.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with torch.inference_mode():
            model(**inputs)
    finally:
        hook.remove()
    return lengths[0]


def _kinds(inputs: Inputs) -> tuple[bool, ...]:
    return (inputs.text, inputs.image, inputs.audio, inputs.decoder, inputs.grid is not None)


def _shapes(
    source: SourceModel, inputs: Inputs
) -> tuple[tuple[int, ...] | None, tuple[int, int] | None, tuple[int, ...] | None]:
    image: tuple[int, ...] | None = None
    if inputs.image:
        frames = frames_of(source.config)
        image = (*([frames] if frames else []), *image_shape(source.config))
    sound = spectrogram_shape(source) if inputs.audio else None
    return image, sound, grid_shape(source, inputs) if inputs.grid else None


def _words(inputs: Inputs, shapes: Sequence[tuple[int, ...] | None]) -> str:
    image, sound, grid = ("" if s is None else " x ".join(map(str, s)) for s in shapes)
    words = ["token ids under a full mask"] if inputs.text else []
    words += [f"pictures of {image}"] if image else []
    words += [f"spectrograms of {sound}"] if sound else []
    words += [f"{'series' if inputs.grid == SERIES else 'volumes'} of {grid}"] if grid else []
    words += ["as many decoder ids" if inputs.text else "decoder ids"] if inputs.decoder else []
    return " and ".join(words)


def _ordinary_tokens(sources: Sequence[SourceModel], inputs: Inputs) -> Tensor:
    """Lists tokens that all models know and that mean nothing special to any."""
    sizes = _known(vocabulary_size(source, inputs) for source in sources)
    count = min(sizes, default=_LEAST_VOCABULARY)
    special = {token for source in sources for token in _special(source.config)}
    ordinary = [token for token in range(count) if token not in special]
    return torch.tensor(ordinary or list(range(count)))


def _special(config: Any) -> set[int]:
    """Tokens that a config names: those for padding, ends, places of pictures."""
    found: set[int] = set()
    for part in (config, getattr(config, "text_config", None)):
        for name, value in vars(part).items() if part is not None else ():
            if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
                found.add(value)
    return found


def _token(config: Any, name: str) -> int | None:
    found = getattr(config, name, None)
    return found if isinstance(found, int) else None


def _known(values: Any) -> list[int]:
    return [value for value in values if value is not None]
