"""Sizes of passes: batches, lengths and modes, and random inputs that both models take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from tcompress.data.inputs import (
    SERIES,
    VOLUMES,
    Inputs,
    frames_of,
    grid_shape,
    image_shape,
    inputs_of,
    longest_text,
    spectrogram_shape,
    vocabulary_size,
)
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import InputError
from tcompress.models import SourceModel
from tcompress.options.steps import CacheName
from tcompress.roles.find import find_roles

Mode = Literal["eager", "compiled", "onnx", "onnx-int8", "onnx-q4"]
Phase = Literal["forward", "prefill", "decode"]
LENGTHS = (32, 128)

_LEAST_VOCABULARY = 16  # known of every model whose config does not say
_WORDS = {"pixel_values": "pictures", "input_features": "spectrograms"}
_WORDS |= {SERIES: "series", VOLUMES: "volumes"}


class Cell(NamedTuple):
    """One point of the grid: sequences or pictures in a batch, tokens in a sequence, and how."""

    batch: int
    length: int  # of a prompt, where text is generated
    mode: Mode
    phase: Phase = "forward"
    cache: CacheName | None = None  # that `prefill` and `decode` fill

    def __str__(self) -> str:
        filled = f", {self.phase} with a {self.cache} cache" if self.cache else ""
        return f"batch {self.batch}, length {self.length}{filled}"


def cells(
    batches: Sequence[int],
    lengths: Sequence[int],
    modes: Sequence[str],
    caches: Sequence[CacheName] = (),
) -> list[Cell]:
    """List the grid without repetitions, eager passes first: they cost no compilation.

    With caches text is generated too; compiled, as Transformers does it: steps with a static one.
    """
    every = product(get_args(Mode), get_args(Phase), (None, *dict.fromkeys(caches)))
    ways = [
        (mode, phase, cache)
        for mode, phase, cache in every
        if mode in modes
        and (phase == "forward") == (cache is None)
        and (mode == "eager" or (phase, cache) in (("forward", None), ("decode", "static")))
    ]
    grid = product(ways, dict.fromkeys(lengths), dict.fromkeys(batches))
    return [Cell(batch, length, *way) for way, length, batch in grid]


@dataclass(frozen=True)
class RandomInputs:
    """Random inputs that a model and its baseline both take. Use `RandomInputs.of`."""

    inputs: Inputs
    shapes: dict[str, tuple[int, ...]]  # of pictures, sounds and grids by name, without the batch
    tokens: Tensor  # (tokens,)
    last: int | None  # token that ends every sequence, if the models have one and both know it
    # Most tokens that both have positions for, or read as sentence encoders; None without limit.
    longest: int | None

    @classmethod
    def of(cls, model: SourceModel, baseline: SourceModel) -> RandomInputs:
        """Describe what two models take, which must be the same."""
        both = (model, baseline)
        inputs, baseline_inputs = map(inputs_of, both)
        shapes, baseline_shapes = _shapes(model, inputs), _shapes(baseline, baseline_inputs)
        takes = (baseline_inputs.text, baseline_inputs.decoder, baseline_shapes)
        if (inputs.text, inputs.decoder, shapes) != takes:
            raise InputError(
                f"`{model.id}` takes {_words(inputs, shapes)}, "
                f"`{baseline.id}` takes {_words(baseline_inputs, baseline_shapes)}",
                "give a baseline that takes the same inputs",
            )
        last = getattr(model.config, "eos_token_id", None)
        sizes = (vocabulary_size(source, inputs) for source in both)
        smallest = min((size for size in sizes if size is not None), default=inf)
        last = last if isinstance(last, int) and 0 <= last < smallest else None
        limits = [longest_text(source, inputs) for source in both]
        limits += [SentenceEncoder.imitated(source).length for source in both]
        longest = min((limit for limit in limits if limit is not None), default=None)
        return cls(inputs, shapes, _ordinary_tokens(both, inputs), last, longest)

    @property
    def has_length(self) -> bool:
        """True where sequences may have any length; pictures and sounds have their own."""
        return self.inputs.text or self.inputs.decoder

    def check(self, lengths: Sequence[int], new: int = 0) -> None:
        """Refuse lengths that the models have no positions for, with `new` tokens after them."""
        if self.longest is None or max(lengths) + new <= self.longest:
            return
        room, have = self.longest - new, f"the models have {self.longest} positions"
        if room < 1:
            text = f"{new} tokens after a prompt were asked for, {have}"
            raise InputError(text, "give a smaller `--generate`")
        ending = f" with {new} tokens after it" if new else ""
        text = f"length {max(lengths)}{ending} was asked for, {have}"
        raise InputError(text, f"give `--length {room}` or less, or `--at` with so many tokens")

    def fitting(self, lengths: Sequence[int], new: int = 0) -> tuple[int, ...]:
        """Keep those lengths that the models have positions for; the longest possible if none."""
        self.check([1], new)
        fit = tuple(n for n in lengths if self.longest is None or n + new <= self.longest)
        return fit or (self.longest - new if self.longest else min(lengths),)

    def batch(
        self, batch: int, length: int, seed: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Draw the inputs of one pass; they depend on the sizes and the seed only."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, Tensor] = {}
        if self.inputs.text:
            tensors["input_ids"] = self._ids(batch, length, generator)
            if "attention_mask" in self.inputs.names:
                tensors["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
        if self.inputs.decoder:
            tensors["decoder_input_ids"] = self._ids(batch, length, generator)
        for name, shape in self.shapes.items():
            tensors[name] = torch.randn(batch, *shape, generator=generator).to(dtype)
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    def words(self) -> str:
        return f"random {_words(self.inputs, self.shapes)}"

    def _ids(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw token ids.  # (batch, length)."""
        ids = self.tokens[torch.randint(len(self.tokens), (batch, length), generator=generator)]
        if self.last is not None and length > 1:
            ids[:, -1] = self.last  # some classifiers read the state at this token
        return ids


def sequence_length(source: SourceModel, model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Count the tokens that the first block of a model gets, whatever they stand for.

    Some models call the forward of a block themselves, past all hooks, and some have channels
    before tokens (SqueezeBERT does both).
    """
    block = find_roles(source.meta_model()).blocks[0]
    first, width = model.get_submodule(block.name), block.layers[0].in_features
    forward, lengths = first.forward, list[int]()

    def heard(*positional: Any, **named: Any) -> Any:
        states = positional[0] if positional else named["hidden_states"]
        numbers = states[0].numel()
        by_shape = prod(states.shape[1:-1])  # windows of pictures have two axes
        lengths.append(by_shape if numbers % width else numbers // width)
        return forward(*positional, **named)

    first.forward = heard
    try:
        with torch.inference_mode():
            model(**inputs)
    finally:
        del first.forward
    return lengths[0]


def _shapes(source: SourceModel, inputs: Inputs) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if inputs.image:
        frames = frames_of(source.config)
        shapes["pixel_values"] = (*([frames] if frames else []), *image_shape(source.config))
    if inputs.audio:
        shapes["input_features"] = spectrogram_shape(source)
    if inputs.grid:
        shapes[inputs.grid] = grid_shape(source, inputs)
    return shapes


def _words(inputs: Inputs, shapes: dict[str, tuple[int, ...]]) -> str:
    words = ["token ids under a full mask"] if inputs.text else []
    words += [f"{_WORDS[name]} of {' x '.join(map(str, s))}" for name, s in shapes.items()]
    words += ["as many decoder ids" if inputs.text else "decoder ids"] if inputs.decoder else []
    return " and ".join(words)


def _ordinary_tokens(sources: Sequence[SourceModel], inputs: Inputs) -> Tensor:
    """List tokens that all models know and that mean nothing special to any."""
    sizes = [vocabulary_size(source, inputs) or _LEAST_VOCABULARY for source in sources]
    configs = [source.config for source in sources]
    configs += [part for c in configs if (part := getattr(c, "text_config", None)) is not None]
    special = {  # tokens for padding, ends, places of pictures
        value
        for config in configs
        for name, value in vars(config).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    ordinary = [token for token in range(min(sizes)) if token not in special]
    return torch.tensor(ordinary or list(range(min(sizes))))
