"""Embeddings of sentences: what a sentence-transformers folder says of them, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, normalize

from tcompress.data.encoding import TextEncoder, load_tokenizer
from tcompress.data.inputs import Inputs
from tcompress.errors import DataError, listed, read_json
from tcompress.models import SourceModel
from tcompress.models.names import sentence_root

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_HINT = (
    "measure it with sentence-transformers, after `import tcompress`; heal it with objectives "
    "other than `embedding`"
)


@dataclass(frozen=True)
class Pooling:
    """Pooling of the vectors of tokens to one; the results of several ways are joined."""

    modes: tuple[str, ...] = ("mean",)
    stated: bool = False  # in the model's folder

    @property
    def words(self) -> str:
        return "+".join(self.modes) + ("" if self.stated else " (default)")

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Pool (batch, tokens, d) to vectors."""
        return torch.cat([_pooled(mode, hidden, mask) for mode in self.modes], dim=-1)


def _pooled(mode: str, hidden: Tensor, mask: Tensor) -> Tensor:
    valid = mask.bool().unsqueeze(-1)
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    if mode == "cls":  # the first one that counts: a prompt before it may not
        return hidden[rows, mask.bool().int().argmax(1)]
    if mode == "max":
        highest = hidden.masked_fill(~valid, -torch.inf).amax(1)
        return highest.masked_fill(~valid.any(1), 0.0)
    if mode == "lasttoken":
        return hidden[rows, (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)]
    if mode == "weightedmean":
        weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)
        return (hidden * weights.unsqueeze(-1)).sum(1) / weights.sum(1, keepdim=True).clamp_min(1)
    total = (hidden * valid).sum(1)
    count = valid.sum(1).clamp_min(1)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


@dataclass(frozen=True, eq=False)
class Dense:
    """A linear layer after pooling, with an activation."""

    name: str  # its folder, for errors
    weight: Tensor
    bias: Tensor | None = None
    activation: Callable[[Tensor], Tensor] = field(default_factory=nn.Tanh)
    is_residual: bool = False
    shortcut: Tensor | None = None  # weight of what is added, where widths differ

    def __call__(self, vectors: Tensor) -> Tensor:
        if vectors.shape[-1] != self.weight.shape[1]:
            raise DataError(
                f"`{self.name}` takes vectors of width {self.weight.shape[1]}, and pooling gives "
                f"{vectors.shape[-1]}",
                "put the folders of one and the same encoder together",
            )
        bias = None if self.bias is None else self.bias.to(vectors)
        changed = self.activation(linear(vectors, self.weight.to(vectors), bias))
        if not self.is_residual:
            return changed
        residual = vectors if self.shortcut is None else linear(vectors, self.shortcut.to(vectors))
        return changed + residual


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """A layer norm after pooling."""

    weight: Tensor
    bias: Tensor

    def __call__(self, vectors: Tensor) -> Tensor:
        scale, shift = self.weight.to(vectors), self.bias.to(vectors)
        return layer_norm(vectors, tuple(self.weight.shape), scale, shift)


def unit_length(vectors: Tensor) -> Tensor:
    """Scales vectors to length 1, but for zeros."""
    return normalize(vectors, dim=-1)


@dataclass(frozen=True)
class Prompt:
    """Text that is put before every text."""

    text: str = ""
    tokens: int = 0  # at the start of a text that pooling leaves out

    def before(self, texts: list[str]) -> list[str]:
        return [self.text + text for text in texts] if self.text else texts


@dataclass(frozen=True, eq=False)
class SentenceEncoder:
    """From texts to embeddings and how alike these are, as sentence-transformers does it.

    A model whose folder says nothing takes the mean over tokens, and cosines.
    """

    pooling: Pooling = Pooling()
    layers: tuple[Callable[[Tensor], Tensor], ...] = ()  # after pooling, in order
    normalized: bool = False  # whether a module after them scales vectors to length 1
    dimensions: int | None = None  # the first ones, that are kept
    similarity: str = "cosine"  # or `dot`, `euclidean`, `manhattan`
    default: Prompt = Prompt()
    query: Prompt = Prompt()
    document: Prompt = Prompt()
    length: int | None = None  # most tokens of a text; None for what the tokenizer says
    lower: bool = False  # whether texts are lowercased, whatever the tokenizer does
    stated: bool = False  # by a `modules.json`

    @classmethod
    def of(cls, source: SourceModel, *, last: bool = True) -> SentenceEncoder:
        """Reads the folder of a model.

        With `last`, modules that are unknown here are refused; without it, what they read is
        taken for the embedding. Unknown ways of pooling always are refused.
        """
        root = sentence_root(source.folder)
        if root is None or source.model_class.__name__.endswith("ForSequenceClassification"):
            return PLAIN
        return _read(source, root, last=last)

    @classmethod
    def imitated(cls, source: SourceModel) -> SentenceEncoder:
        """Reads the folder of a model that encodes sentences; others read texts as they are."""
        return cls.of(source, last=False) if source.gives_states else PLAIN

    @property
    def words(self) -> dict[str, Any]:
        """Facts that numbers depend on, for a protocol."""
        facts: dict[str, Any] = {
            "scoring": _SIMILARITIES[self.similarity],
            "pooling": self.pooling.words,
        }
        if self.layers:
            facts["layers"] = [
                getattr(layer, "__name__", type(layer).__name__) for layer in self.layers
            ]
        if self.dimensions is not None:
            facts["dimensions"] = self.dimensions
        return facts

    def reader(self, source: SourceModel, inputs: Inputs, max_length: int | None) -> TextEncoder:
        """Open what writes texts as the encoder reads them, with at most so many tokens."""
        return TextEncoder.open(source, inputs, max_length, length=self.length, lower=self.lower)

    def embed(self, hidden: Tensor, mask: Tensor, skipped: int | Tensor | None = None) -> Tensor:
        """Make embeddings of (batch, tokens, d) without the first `skipped` tokens, of each."""
        skipped = self.default.tokens if skipped is None else skipped
        if not isinstance(skipped, int) or skipped:
            steps = torch.arange(mask.shape[1], device=mask.device)
            mask = mask * (steps >= torch.as_tensor(skipped, device=mask.device).reshape(-1, 1))
        return self._pooled(hidden, mask)[:, : self.dimensions]

    def _pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        vectors = self.pooling(hidden, mask)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors

    def vectors(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Makes embeddings as sentence-transformers returns them, of texts without a prompt."""
        vectors = self._pooled(hidden, mask)
        return (unit_length(vectors) if self.normalized else vectors)[:, : self.dimensions]

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Makes embeddings of length 1 of texts with the default prompt; zeros of padding alone."""
        return unit_length(self.embed(hidden, mask))

    def compared(self, hidden: Tensor, mask: Tensor, skipped: int | Tensor) -> Tensor:
        """Makes embeddings ready for `likeness` and `likenesses`."""
        vectors = self.embed(hidden, mask, skipped)
        return unit_length(vectors) if self.similarity == "cosine" else vectors

    def likeness(self, first: Tensor, second: Tensor) -> Tensor:
        """Likeness of vectors, of the last axis; larger is more."""
        if self.similarity == "euclidean":
            return -(first - second).norm(dim=-1)
        if self.similarity == "manhattan":
            return -(first - second).abs().sum(-1)
        return (first * second).sum(-1)

    def likenesses(self, first: Tensor, second: Tensor) -> Tensor:
        """Likeness of all pairs of vectors.  # (n, d), (m, d) -> (n, m)."""
        if self.similarity in ("euclidean", "manhattan"):
            power = 2.0 if self.similarity == "euclidean" else 1.0
            return -torch.cdist(first, second, power, compute_mode="donot_use_mm_for_euclid_dist")
        return first @ second.T


Layers = tuple[Callable[[Tensor], Tensor], ...]

PLAIN = SentenceEncoder()  # models whose folder says nothing

_SIMILARITIES = {
    "cosine": "cosine of embeddings",
    "dot": "dot product of embeddings",
    "euclidean": "Euclidean distance of embeddings",
    "manhattan": "Manhattan distance of embeddings",
}

_STATES = "token_embeddings"  # what is pooled
_TEXT_SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_NOT_FOLLOWED = (
    *("processing_kwargs", "processor_kwargs", "tokenizer_args", "config_kwargs", "config_args"),
    *("query_length", "document_length", "query_expansion"),
)  # settings of a text's tokens and of the transformer, beside its files


def _says_something(setting: object) -> bool:
    """Tell whether a setting may change a number; that a model's code may run does not."""
    if isinstance(setting, Mapping):
        return any(_says_something(v) for k, v in setting.items() if k != "trust_remote_code")
    return bool(setting)


def _read(source: SourceModel, root: Path, *, last: bool) -> SentenceEncoder:
    modules = _modules(root)
    pooling = next((folder for kind, folder in modules if kind == "Pooling"), None)
    options = {} if pooling is None else _settings(pooling / "config.json")
    settings = _settings(root / "config_sentence_transformers.json", needed=False)
    files = (source.folder / name for name in _TEXT_SETTINGS)
    texts = next((content for file in files if (content := _settings(file, needed=False))), {})
    output = texts.get("module_output_name", _STATES)
    if last and output != _STATES:
        raise DataError(f"`{source.id}` embeds by `{output}`, expected `{_STATES}`", _HINT)
    if last and (unknown := [key for key in _NOT_FOLLOWED if _says_something(texts.get(key))]):
        text = "`sentence_bert_config.json` says how texts are read by"
        raise DataError(f"`{source.id}`: {text} {listed(unknown)}, not known here", _HINT)
    similarity = settings.get("similarity_fn_name")
    encoder = SentenceEncoder(
        pooling=Pooling(_modes(options, source), stated=pooling is not None),
        similarity=similarity if similarity in _SIMILARITIES else "cosine",
        dimensions=_count(settings, "truncate_dim", root / "config_sentence_transformers.json"),
        length=_count(texts, "max_seq_length", source.folder / "sentence_bert_config.json"),
        lower=bool(texts.get("do_lower_case")),
        stated=True,
    )
    layers = _layers(modules, source, last=last)
    # Of no effect on cosines, which scale vectors anyway.
    normalized = layers[-1:] == (unit_length,) and encoder.similarity == "cosine"
    while normalized and layers[-1:] == (unit_length,):
        layers = layers[:-1]
    prompts: dict[str, Any] = _prompts(root, settings)
    if not options.get("include_prompt", True):
        prompts = {role: _counted(prompt, source, encoder) for role, prompt in prompts.items()}
    return replace(encoder, layers=layers, normalized=normalized, **prompts)


def _modules(root: Path) -> list[tuple[str, Path]]:
    """Lists the modules of an encoder, each with its folder."""
    path = root / "modules.json"
    try:
        items = read_json(path)
        return [(str(it["type"]).rpartition(".")[2], root / str(it["path"])) for it in items]
    except (ValueError, TypeError, KeyError) as error:
        raise _unreadable(path) from error


def _settings(path: Path, *, needed: bool = True) -> dict[str, Any]:
    """Reads a JSON object; without the file it is empty, or an error if it is `needed`."""
    if not needed and not path.is_file():
        return {}
    try:
        content = read_json(path)
    except ValueError as error:
        raise _unreadable(path) from error
    if not isinstance(content, dict):
        raise _unreadable(path)
    return content


def _unreadable(path: Path) -> DataError:
    if path.name == "modules.json":
        return DataError(
            f"`{path}` is no list of sentence-transformers modules with their files",
            "repair it, or delete it to take the mean over the tokens",
        )
    text = f"`{path}` is missing or no object of JSON, as sentence-transformers writes it"
    return DataError(text, "repair it, or delete `modules.json` to take the mean over the tokens")


def _count(settings: Mapping[str, Any], key: str, path: Path) -> int | None:
    value = settings.get(key)
    if value is None or (type(value) is int and value > 0):
        return value
    text = f"`{path}` has `{str(value)[:40]}` as `{key}`, expected a number above 0, or null"
    raise DataError(text, "repair the file")


def _modes(options: Mapping[str, Any], source: SourceModel) -> tuple[str, ...]:
    modes = options.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if options.get(flag)]
    modes = [modes] if isinstance(modes, str) else list(modes)
    allowed = _FLAGS.values()
    if unknown := [mode for mode in modes if mode not in allowed]:
        text = f"`{source.id}` is pooled by `{unknown[0]}`; known are {', '.join(allowed)}"
        raise DataError(text, _HINT)
    return tuple(modes) or ("mean",)


_WITHOUT_WEIGHTS = ("Transformer", "Pooling", "Dropout")


def _layers(modules: list[tuple[str, Path]], source: SourceModel, *, last: bool) -> Layers:
    """Read the modules after pooling, as far as they are known."""
    unknown = [kind for kind, _ in modules if kind not in (*_WITHOUT_WEIGHTS, *_READERS)]
    if unknown and last:
        raise DataError(
            f"`{source.id}` has the sentence-transformers modules {', '.join(unknown)} after its "
            f"transformer, which are not known here; known are {', '.join(_READERS)}",
            _HINT,
        )
    readable = takewhile(lambda module: module[0] not in unknown, modules)
    return tuple(_READERS[kind](folder) for kind, folder in readable if kind in _READERS)


def _dense(folder: Path) -> Dense:
    options = _settings(folder / "config.json")
    _check_names(folder, options)
    activation = str(options.get("activation_function", "torch.nn.Tanh"))
    kind = getattr(nn, activation.rpartition(".")[2], None)
    if not activation.startswith("torch.") or not isinstance(kind, type):
        text = f"`{folder}` has the activation `{activation}`, expected one of `torch.nn`"
        raise DataError(text, _HINT)
    tensors = _tensors(folder, "linear.weight")
    return Dense(
        str(folder),
        tensors["linear.weight"],
        tensors.get("linear.bias"),
        kind(),
        bool(options.get("use_residual")),
        tensors.get("residual.weight"),
    )


def _check_names(folder: Path, options: Mapping[str, Any]) -> None:
    """Refuse a module that reads, or makes, anything else than the pooled vectors."""
    for key in ("module_input_name", "module_output_name"):
        if options.get(key) not in (None, "sentence_embedding"):
            text = f"`{folder}` has `{options[key]}` as `{key}`, expected `sentence_embedding`"
            raise DataError(text, _HINT)


def _normalize(folder: Path) -> Callable[[Tensor], Tensor]:
    _check_names(folder, _settings(folder / "config.json", needed=False))
    return unit_length


def _layer_norm(folder: Path) -> LayerNorm:
    tensors = _tensors(folder, "norm.weight", "norm.bias")
    return LayerNorm(tensors["norm.weight"], tensors["norm.bias"])


_READERS: dict[str, Callable[[Path], Callable[[Tensor], Tensor]]] = {
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
}


def _tensors(folder: Path, *names: str) -> dict[str, Tensor]:
    """Reads the weights of a module, on the CPU."""
    from safetensors.torch import load_file

    new, old = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if new.is_file():
            tensors = load_file(new, device="cpu")
        else:
            tensors = torch.load(old, map_location="cpu", weights_only=True)
        missing = [name for name in names if not isinstance(tensors[name], Tensor)]
    except Exception as error:
        # Damaged files fail in whatever line first reads them.
        text = f"`{folder}` has no `model.safetensors` or `pytorch_model.bin` with {names[0]}"
        raise DataError(text, "download the encoder again, with all of its folders") from error
    assert not missing
    return {name: tensor.float() for name, tensor in tensors.items()}


def _prompts(root: Path, settings: Mapping[str, Any]) -> dict[str, Prompt]:
    """Prompts of texts as such, of queries and of documents."""
    path, prompts = root / "config_sentence_transformers.json", settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(it, str | None) for it in prompts.values()
    ):
        text = f"`{path}` has `{str(prompts)[:40]}` as `prompts`, expected texts by name"
        raise DataError(text, "repair the file")
    default = settings.get("default_prompt_name")
    # sentence-transformers knows these two names with an empty text where a folder has none.
    texts = {"query": "", "document": "", **prompts}
    if default is not None and default not in texts:
        names = ", ".join(f"`{name}`" for name in texts)
        text = f"`{path}` has `{default}` as `default_prompt_name`, and the prompts {names}"
        raise DataError(text, "name one of them, or remove the key")
    chosen = {"default": default, "query": "query", "document": "document"}
    return {role: Prompt(texts.get(name) or "") for role, name in chosen.items()}


def _counted(prompt: Prompt, source: SourceModel, encoder: SentenceEncoder) -> Prompt:
    """Counts the tokens of a prompt, without the one that ends a text."""
    if not prompt.text:
        return prompt
    trust = source.trust_remote_code
    tokenizer = load_tokenizer(source.folder, trust=trust, lower=encoder.lower)
    ids = tokenizer(prompt.text)["input_ids"]
    ends = bool(ids) and ids[-1] in tokenizer.all_special_ids
    return replace(prompt, tokens=len(ids) - ends)
