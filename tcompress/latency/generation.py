"""Text that a model generates: a prompt that fills a cache, then one token after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from tcompress.data.inputs import Inputs, inputs_of
from tcompress.errors import InputError
from tcompress.latency.passes import Pass
from tcompress.models import SourceModel
from tcompress.options.steps import CacheName

# As `generate` of Transformers does it without sampling: scores of the prompt's last token alone,
# an encoder runs once, and only steps of one token are compiled.


def check_generates(source: SourceModel) -> None:
    """Refuse a model that generates no text, or keeps what it read in no cache of Transformers."""
    kind = source.model_class
    why = "does not generate text"
    if kind.can_generate():
        if _cache_names(inputs_of(source)) and kind._supports_default_dynamic_cache():
            return
        why = "fills no cache of Transformers"
    raise InputError(f"`{source.id}` is a `{kind.__name__}`, which {why}", "leave `--generate` out")


def _cache_names(kinds: Inputs) -> list[str]:
    return [name for name in ("past_key_values", "cache_params") if name in kinds.names]


class Generation:
    """One model that reads a prompt and decodes tokens after it, the likeliest each time."""

    def __init__(
        self,
        model: nn.Module,
        kinds: Inputs,
        inputs: dict[str, Tensor],
        tokens: int,
        cache: CacheName = "dynamic",
        step: Callable[..., Any] | None = None,
    ) -> None:
        """Read inputs of a forward pass as the prompt; `step` is the model, or it compiled.

        A decoder that has a text to read begins with one token.
        """
        self._model, self._kinds, self._tokens = model, kinds, tokens
        self._static = cache == "static"
        self._step = model if step is None else step
        self._name = "decoder_input_ids" if kinds.decoder else "input_ids"
        (self._cache_name,) = _cache_names(kinds)
        self._encoded = {name: value for name, value in inputs.items() if name != self._name}
        self._prompt = inputs[self._name][:, : 1 if kinds.decoder and kinds.text else None]

    def prefilling(self) -> Pass:
        """The pass over the prompt, until the first token after it is there."""
        return Pass(lambda _: self._prefill())

    def decoding(self) -> Pass:
        """The steps after the prompt, which is read now; each time begins with a copy of that."""
        read = self._prefill()
        return Pass(self._decode, lambda: copy.deepcopy(read), self._tokens)

    def _prefill(self) -> dict[str, Any]:
        """Inputs of the first step."""
        arguments: dict[str, Any] = {self._name: self._prompt, "use_cache": True}
        lengths = [self._prompt.shape[1] + self._tokens]
        if self._kinds.decoder:
            encoder: Any = self._model
            arguments["encoder_outputs"] = encoder.get_encoder()(**self._encoded)
            lengths.append(arguments["encoder_outputs"][0].shape[1])
        arguments[self._cache_name] = self._cache(lengths)
        last = {"logits_to_keep": 1} if "logits_to_keep" in self._kinds.names else {}
        return arguments | {self._name: _likeliest(self._model(**arguments, **last))}

    def _decode(self, arguments: dict[str, Any]) -> None:
        for _ in range(self._tokens):
            arguments[self._name] = _likeliest(self._step(**arguments))

    def _cache(self, lengths: list[int]) -> Any:
        """Make a cache for so many tokens; after an encoder also one for what that read."""
        config: Any = self._model.config
        text = config.get_text_config(decoder=True)
        caches = [
            StaticCache(text, n) if self._static else DynamicCache(config=text) for n in lengths
        ]
        return EncoderDecoderCache(*caches) if len(caches) == 2 else caches[0]


def _likeliest(output: Any) -> Tensor:
    """Find the next tokens.  # -> (batch, 1)."""
    return output.logits[:, -1:].argmax(-1)
