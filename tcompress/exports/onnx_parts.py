"""Parts of a model that become a file each, as functions of named inputs to a tuple of tensors.

Names of files, inputs and outputs are those of optimum, which transformers.js and
sentence-transformers look for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from tcompress.data.inputs import inputs_of
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import InputError
from tcompress.latency.sizes import RandomInputs
from tcompress.models import SourceModel

BATCH, LENGTH = "batch_size", "sequence_length"
PICTURES = "image_batch_size"
PAST, TOTAL = "past_sequence_length", "total_sequence_length"
ENCODED = "encoder_sequence_length"
"""Names of axes whose size is free."""
_TEXTS = ("_ids", "_mask")  # ends of names of inputs that have a length


@dataclass(frozen=True)
class Size:
    """Sizes of the free axes of one pass; `past` are tokens in a cache before the new ones.

    `pictures` is their number where it is free; 0 for as many as texts.
    """

    batch: int
    length: int
    past: int = 0
    pictures: int = 0


class Part(nn.Module):
    """A part of a model as a function of named inputs; by default all of it."""

    file = "model"
    """Name of its file, without suffix."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        draw: RandomInputs,
    ) -> None:
        super().__init__()
        self.model: Any = model  # classes of Transformers have methods that modules have not
        self.inputs, self.outputs, self.draw = inputs, outputs, draw

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute the outputs, in order."""
        computed = self.model(**inputs, return_dict=True)
        return tuple(computed[name] for name in self.outputs)

    @property
    def has_length(self) -> bool:
        """True if the length of its inputs is free."""
        return any(name.endswith(_TEXTS) for name in self.inputs)

    @property
    def compares(self) -> bool:
        """True if every picture is compared with every text: there may be more of one kind."""
        return "logits_per_image" in self.outputs

    def sample(self, size: Size, seed: int = 0) -> dict[str, Tensor]:
        """Draw inputs; every second text is padded at its end."""
        device = torch.device("cpu")
        drawn = self.draw.batch(size.batch, size.length, seed, device, torch.float32)
        if self.compares and size.pictures:
            others = self.draw.batch(size.pictures, size.length, seed, device, torch.float32)
            drawn["pixel_values"] = others["pixel_values"]
        self._draw_more(drawn, size, torch.Generator().manual_seed(seed))
        return {name: drawn[name] for name in self.inputs}

    def _draw_more(self, drawn: dict[str, Tensor], size: Size, generator: torch.Generator) -> None:
        drawn["attention_mask"] = _mask(size.batch, size.length)
        kinds = torch.zeros(size.batch, size.length, dtype=torch.long)
        kinds[:, size.length // 2 :] = 1
        drawn["token_type_ids"] = kinds

    def completed(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Make inputs of a batch of data for the whole model; None if it cannot be."""
        inputs = dict(batch)
        if "token_type_ids" in self.inputs and "input_ids" in inputs:
            inputs.setdefault("token_type_ids", torch.zeros_like(inputs["input_ids"]))
        complete = all(name in inputs for name in self.inputs)
        return {name: inputs[name] for name in self.inputs} if complete else None

    def axes(self, name: str) -> dict[int, str]:
        """Name the free axes of an input."""
        batch = PICTURES if self.compares and name == "pixel_values" else BATCH
        return {0: batch} | ({1: LENGTH} if name.endswith(_TEXTS) else {})


def _mask(batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1::2, length - length // 4 :] = 0
    return mask


class EmbeddingPart(Part):
    """A sentence encoder whose last output is the embedding, as sentence-transformers has it."""

    def __init__(self, part: Part, encoder: SentenceEncoder) -> None:
        outputs = ("last_hidden_state", "sentence_embedding")
        super().__init__(part.model, part.inputs, outputs, part.draw)
        self.encoder = encoder

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        hidden = self.model(**inputs, return_dict=True)["last_hidden_state"]
        return hidden, self.encoder.vectors(hidden, inputs["attention_mask"])


class CausalPart(Part):
    """A language model with its cache: keys and values go in and come out, longer by the text."""

    def __init__(self, part: Part, caches: tuple[tuple[int, int, int], ...]) -> None:
        """Take a model whose layers have caches of so many heads, with widths of key and value."""
        names = [f"{i}.{kind}" for i in range(len(caches)) for kind in ("key", "value")]
        past = tuple(f"past_key_values.{name}" for name in names)
        outputs = (*part.outputs, *(f"present.{name}" for name in names))
        super().__init__(part.model, (*part.inputs, *past), outputs, part.draw)
        widths = [(heads, width) for heads, *both in caches for width in both]
        self.past = dict(zip(past, widths, strict=True))

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute scores, and the cache with the new tokens in it."""
        given = [inputs[name] for name in self.past]
        cache = DynamicCache([*zip(given[::2], given[1::2], strict=True)])
        plain = {name: value for name, value in inputs.items() if name not in self.past}
        computed = self.model(**plain, past_key_values=cache, use_cache=True, return_dict=True)
        held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return (computed["logits"], *held)

    def _draw_more(self, drawn: dict[str, Tensor], size: Size, generator: torch.Generator) -> None:
        past = torch.ones(size.batch, size.past, dtype=torch.long)
        drawn["attention_mask"] = torch.cat([past, _mask(size.batch, size.length)], 1)
        steps = torch.arange(size.past, size.past + size.length)
        drawn["position_ids"] = steps.expand(size.batch, -1)
        for name, (heads, width) in self.past.items():  # a cache of any numbers
            shape = (size.batch, heads, size.past, width)
            drawn[name] = torch.randn(shape, generator=generator)

    def completed(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Add an empty cache to texts."""
        ids = batch["input_ids"]
        empty = self.sample(Size(len(ids), ids.shape[1]))
        mask = batch.get("attention_mask", torch.ones_like(ids))
        return empty | {"input_ids": ids, "attention_mask": mask}

    def axes(self, name: str) -> dict[int, str]:
        """Name the free axes of an input."""
        if name in self.past:
            return {0: BATCH, 2: PAST}
        return {0: BATCH, 1: TOTAL if name == "attention_mask" else LENGTH}


class EncoderPart(Part):
    """The encoder of a model that has a decoder too."""

    file = "encoder_model"

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute the hidden states that the decoder reads."""
        return (self.model.get_encoder()(**inputs, return_dict=True)["last_hidden_state"],)


class DecoderPart(Part):
    """The decoder of a model that has an encoder, without a cache."""

    file = "decoder_model"

    def __init__(self, part: Part, width: int) -> None:
        masks = ("encoder_attention_mask",) if "attention_mask" in part.inputs else ()
        inputs = ("input_ids", "encoder_hidden_states", *masks)
        super().__init__(part.model, inputs, part.outputs, part.draw)
        self.width = width

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute scores of the tokens that come next."""
        states = BaseModelOutput(last_hidden_state=inputs["encoder_hidden_states"])
        masks = {}
        if "encoder_attention_mask" in inputs:
            masks["attention_mask"] = inputs["encoder_attention_mask"]
        computed = self.model(
            encoder_outputs=states,
            decoder_input_ids=inputs["input_ids"],
            use_cache=False,
            return_dict=True,
            **masks,
        )
        return tuple(computed[name] for name in self.outputs)

    def _draw_more(self, drawn: dict[str, Tensor], size: Size, generator: torch.Generator) -> None:
        """Draw any numbers as states of an encoder that read a longer text."""
        frames = self.draw.shapes.get("input_features")
        length = frames[-1] // 2 if frames else size.length + 3
        shape = (size.batch, length, self.width)
        drawn["encoder_hidden_states"] = torch.randn(shape, generator=generator)
        drawn["encoder_attention_mask"] = _mask(size.batch, length)
        drawn["input_ids"] = drawn["decoder_input_ids"]

    def axes(self, name: str) -> dict[int, str]:
        return {0: BATCH, 1: ENCODED if name.startswith("encoder_") else LENGTH}


def parts_of(
    source: SourceModel, model: Any, encoder: SentenceEncoder | None = None
) -> tuple[Part, ...]:
    """Say which files a model takes; an `InputError` names a family that has no form here.

    With an `encoder`, sentence embeddings are an output too.
    """
    kinds, draw = inputs_of(source), RandomInputs.of(source, source)
    texts = ("input_ids", "attention_mask") if kinds.text else ()
    names = [name for name in texts if name in kinds.names]
    if "token_type_ids" in kinds.names and getattr(source.config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    names += draw.shapes
    part = Part(model, tuple(names), (), draw)
    if kinds.decoder and model.can_generate():
        return _with_decoder(part)
    if encoder is not None:
        return (EmbeddingPart(part, encoder),)
    inputs = part.sample(Size(2, 8))
    cached = {"use_cache": True} if model.can_generate() else {}
    with torch.no_grad():
        computed = model(**inputs, **cached, return_dict=True)
    part.outputs = _outputs(computed)
    return (_with_cache(part, computed, kinds.names) if cached else part,)


_LEFT_OUT = ("loss", "past_key_values", "hidden_states", "attentions", "cross_attentions")


def _outputs(computed: Mapping[str, Any]) -> tuple[str, ...]:
    # Sentence encoders pool by themselves; what BERT puts on its first token few models train.
    pooled = ("pooler_output",) if "last_hidden_state" in computed else ()
    tensors = (name for name, value in computed.items() if isinstance(value, Tensor))
    return tuple(name for name in tensors if name not in (*_LEFT_OUT, *pooled))


def _with_cache(part: Part, computed: Any, names: frozenset[str]) -> Part:
    """Add a cache of the usual kind, or refuse."""
    cache = computed.get("past_key_values")
    layers = getattr(cache, "layers", None)
    kind = type(part.model).__name__
    if not layers or not all(isinstance(getattr(layer, "keys", None), Tensor) for layer in layers):
        raise InputError(
            f"a `{kind}` remembers texts in another way than by keys and values of every layer, "
            "and has no form in ONNX here",
            "run it with PyTorch",
        )
    shapes = ((layer.keys.shape, layer.values.shape) for layer in layers)
    caches = tuple((keys[1], keys[3], values[3]) for keys, values in shapes)
    part.inputs += ("position_ids",) if "position_ids" in names else ()
    part.outputs = ("logits",)
    return CausalPart(part, caches)


def _with_decoder(part: Part) -> tuple[Part, ...]:
    encoder = EncoderPart(part.model, part.inputs, ("last_hidden_state",), part.draw)
    with torch.no_grad():
        (states,) = encoder(part.sample(Size(2, 8)))
    part.outputs = ("logits",)
    return encoder, DecoderPart(part, states.shape[-1])
