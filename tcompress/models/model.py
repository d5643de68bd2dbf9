"""A model as the input of a conversion: config, class, names, and weights read or random."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import meta_device_safe_creation_ops
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from tcompress.errors import SourceError, first_line
from tcompress.models.adapters import Adapter, base_of, check_adapter, merge
from tcompress.models.keymap import KeyMap, check_weights, plain_names
from tcompress.models.mended import Copy, copying, with_names, with_settings
from tcompress.models.names import (
    ALIASES,
    METHODS,
    MODULES,
    WEIGHTS,
    adapter_files,
    auxiliary_files,
    encodes_sentences,
    is_only_rounded,
    local_folder,
    own_section,
    read_config,
    resolve,
    sentence_root,
    without_code,
)
from tcompress.models.store import Shard, TensorInfo, WeightStore, plain_types
from tcompress.models.vocabulary import Vocabulary


def draw_model(kind: Any, config: Any, seed: int) -> PreTrainedModel:
    """Build a model with the float32 values that its class begins training with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind._from_config(deepcopy(config), dtype=torch.float32)
    return model.eval()


class _RandomShard(Shard):
    def __init__(self, path: Path, kind: Any, config: Any, seed: int) -> None:
        self.path = path
        self._kind, self._config, self._seed = kind, config, seed
        model = _on_meta(kind, config, dtype=torch.float32)
        self.infos = {name: TensorInfo.of(tensor) for name, tensor in _stored(model).items()}

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        # Kept, since making them again takes longer than reading a file.
        return _stored(draw_model(self._kind, self._config, self._seed))

    def read(self, key: str) -> Tensor:
        return self._values[key].clone()

    def digest(self) -> bytes:
        config = self._config.to_dict()
        config.pop("_name_or_path", None)  # where it was read
        facts = {"class": self._kind.__name__, "config": config, "seed": self._seed}
        facts["versions"] = [torch.__version__, transformers.__version__]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()


class RandomStore(WeightStore):
    """The weights of a randomly initialised model, by the names that a file would have.

    Shapes are known without making anything; values are made when the first of them is read.
    """

    def __init__(self, folder: Path, kind: Any, config: Any, seed: int) -> None:
        self.seed, file = seed, "model.safetensors"
        self._shard = _RandomShard(folder / file, kind, config, seed)
        super().__init__(folder, {file: self._shard}, {k: (file, k) for k in self._shard.infos})

    def fingerprint(self) -> str:
        return self._shard.digest().hex()

    def times(self) -> list[tuple[str, int]]:
        return []  # there is no file


def _stored(model: Any) -> dict[str, Tensor]:
    """Collect the tensors that `save_pretrained` would write, by the names that it would use."""
    tied = getattr(model, "all_tied_weights_keys", None)
    ignored = {*(model._keys_to_ignore_on_save or ()), *(tied or ())}
    state = {key: item.detach() for key, item in model.state_dict().items() if key not in ignored}
    found: dict[str, Tensor] = revert_weight_conversion(model, state)
    return found


@dataclass(frozen=True, eq=False)
class SourceModel:
    """A model that can be converted, pretrained or not. Use `SourceModel.open`."""

    id: str  # hub id, or the local folder as it was given
    # Commit on the hub if known, else what was asked for; None for local folders.
    revision: str | None
    folder: Path  # folder with the model's files
    config: PreTrainedConfig  # the model's configuration
    # Class of the model, from `architectures` in the configuration.
    model_class: type[PreTrainedModel]
    store: WeightStore = field(repr=False)  # its weights
    trust_remote_code: bool = False  # whether the model's own Python code may run
    settings: dict[str, Any] = field(default_factory=dict, repr=False)  # content of `config.json`
    # Of a model with fewer layers, starts of names (in the checkpoint and in the model) with those
    # that they had before.
    renumbered: tuple[tuple[str, str], ...] = ()
    # What has to live as long as the model, such as a temporary folder.
    keeps: Any = field(default=None, repr=False)
    # What a user should know of the weights, such as tensors that the class has no use for.
    notes: tuple[str, ...] = ()
    origin: Path | None = None  # the folder that was given, where `folder` is a copy to be read
    # Class that `architectures` names, of a sentence encoder that is run without its head.
    headed: type[PreTrainedModel] | None = None
    vocabulary: Vocabulary | None = None  # of a model with fewer tokens, those that are left
    whole: SourceModel | None = field(default=None, repr=False)  # the same with all its tokens
    autocast: torch.dtype | None = None  # dtype of products in its blocks; None is that of weights

    @classmethod
    def open(
        cls,
        name: str,
        revision: str | None = None,
        token: str | None = None,
        trust_remote_code: bool = False,
        *,
        converted: bool = False,
        seed: int | None = None,
        adapter: Adapter | None = None,
    ) -> SourceModel:
        """Open a local folder, alias or hub id; weights are checked but not read.

        On the hub `revision` is a branch, tag or commit. A model that tcompress may have
        `converted` is described as the dense one. With the `seed` of random weights, the path of a
        `config.json` is enough. An `adapter` beside the weights is merged into them, or refused.
        """
        origin = resolve(name, revision=revision, token=token, weights=seed is None)
        copies: list[Copy] = []
        if seed is None and (adapter is not None or adapter_files(origin)):
            check_adapter(origin, adapter)
            copies.append(_merged(origin, token, trust_remote_code))
        folder = copies[-1].folder if copies else origin
        raw = read_config(folder)
        raw = raw if converted else _without_rounding(raw)
        ours = own_section(raw) is not None
        if not (converted and ours):
            _refuse_quantised(raw, folder)
        if not ours and (mended := plain_types(raw, folder / "config.json")) != raw:
            copies.append(with_settings(folder, mended))
            folder = copies[-1].folder
        source = cls.described(folder, {}, trust_remote_code, token)
        if not converted:
            source = replace(source, settings=_without_rounding(source.settings))
        if local_folder(name) is None and not (seed is not None and Path(name).is_file()):
            # The name of a folder in the hub's cache is that of the commit.
            snapshot = (sentence_root(origin) or origin).name
            commit = snapshot if re.fullmatch("[0-9a-f]{40}", snapshot) else revision
            source = replace(source, id=ALIASES.get(name, name), revision=commit)
        else:
            source = replace(source, id=name)
        source = replace(source, origin=origin if copies else None, keeps=copies or None)
        if seed is not None:
            return source.as_encoder().at_random(seed)
        notes = () if adapter is None else (f"the adapter in `{name}` is merged into its weights",)
        return source._with_weights(checked=not ours, notes=notes)

    def _with_weights(self, *, checked: bool, notes: tuple[str, ...]) -> SourceModel:
        """Open the weights; those that are no plain model's are compared with their own plan."""
        asked, kind = self.config.architectures or [], self.model_class.__name__
        source, store = self, WeightStore.open(self.folder)
        if checked and (names := plain_names(store.keys())):
            copy = with_names(self.folder, read_config(self.folder), store, names)
            store, origin = WeightStore.open(copy.folder), self.origin or self.folder
            keeps = [*(self.keeps or ()), copy]
            source = replace(self, folder=copy.folder, origin=origin, keeps=keeps)
        source = replace(source, store=store).as_stored().as_encoder()
        if checked:
            # The object is not handed out yet, and a copy would map all names again.
            unknown = () if kind in asked else asked
            notes += check_weights(source.origin or source.folder, store, source.keymap, unknown)
            name = source.model_class.__name__
            if kind != name and not (source.folder / MODULES).is_file():
                text = (
                    f"`architectures` names a `{kind}`, but nothing is stored of its head: it is "
                    f"taken as a `{name}`, and results name that class"
                )
                notes = (text, *notes)
            if source.headed is not None:
                text = (
                    f"`architectures` names a `{source.headed.__name__}`, and `modules.json` a "
                    f"sentence encoder: it is taken as a `{name}`, as sentence-transformers runs it"
                )
                notes = (text, *notes)
            object.__setattr__(source, "notes", notes)
            source = source._without_copies()
        return source

    def _without_copies(self) -> SourceModel:
        """Leave out what is stored again of tied parameters: a `.bin` file has every name."""
        store = self.store
        groups = self.keymap.stored_again()
        copies = {k for first, *keys in groups for k in keys if store.are_same(first, k)}
        keys_once = {key: key for key in store.keys() if key not in copies}  # noqa: SIM118
        return replace(self, store=store.renamed(keys_once)) if copies else self

    @classmethod
    def described(
        cls,
        folder: Path,
        stored: Mapping[str, object],
        trust_remote_code: bool = False,
        token: str | None = None,
    ) -> SourceModel:
        """Describe the class that `architectures` names, with tensors by name for a store."""
        raw = read_config(folder)
        config = _load_config(raw, folder, token, trust_remote_code)
        kind = _model_class(config, folder, token, trust_remote_code)
        names: Any = stored
        if not trust_remote_code:  # the class is one of Transformers', and its code stays behind
            raw = without_code(raw)
            vars(config).pop("auto_map", None)
        return cls(str(folder), None, folder, config, kind, names, trust_remote_code, raw)

    def as_stored(self) -> SourceModel:
        """Describe the bare model where the head that `architectures` names is not stored.

        Sentence encoders are often saved so, with the settings of the model they were trained from.
        """
        bare = MODEL_MAPPING.get(type(self.config), None)
        prefix = self.model_class.base_model_prefix
        if not isinstance(bare, type) or bare is self.model_class or not prefix:
            return self
        keymap = self.keymap
        names, inside = list(keymap.model.state_dict()), f"{prefix}."
        head = [
            name  # and not that of an embedding
            for name in names
            if not any(other.startswith(inside) for other in (name, *keymap.tied(name)))
        ]
        if not head or len(head) == len(names) or any(map(keymap.has, head)):
            return self
        return self._of_class(bare)

    def _of_class(self, kind: type[PreTrainedModel], **changes: Any) -> SourceModel:
        settings = {**self.settings, "architectures": [kind.__name__]}
        return replace(self, model_class=kind, settings=settings, **changes)

    def as_encoder(self) -> SourceModel:
        """Describe the class that sentence-transformers runs, where the folder is such an encoder.

        It has neither the head that a language model predicts tokens with nor, of T5, a decoder.
        """
        encodes = encodes_sentences(self.folder)
        kind = _encoder_class(self.config, self.model_class) if encodes else self.model_class
        if kind is self.model_class:
            return self
        config = deepcopy(self.config)
        config.architectures = [kind.__name__]
        return self._of_class(kind, config=config, headed=self.model_class)

    @property
    def gives_states(self) -> bool:
        """True where it reads texts and puts out states alone, without the scores of a head."""
        kind = self.model_class
        scores = re.search("For[A-Z]", kind.__name__) or kind.can_generate()
        return kind.main_input_name == "input_ids" and not scores

    @property
    def embeds_texts(self) -> bool:
        """True where what it puts out is pooled to embeddings of texts: no states of a decoder."""
        decodes = "decoder_input_ids" in signature(self.model_class.forward).parameters
        return self.gives_states and not decodes

    @property
    def unread(self) -> frozenset[str]:
        """Keys of stored tensors that are not carried over: nobody has a use for them."""
        keymap = self.keymap
        decoder = () if self.headed is None else keymap.ignored
        return frozenset((*keymap.stale, *keymap.unmatched, *decoder))

    @property
    def seed(self) -> int | None:
        """The seed of random weights; None for weights that are read."""
        return self.store.seed if isinstance(self.store, RandomStore) else None

    def at_random(self, seed: int) -> SourceModel:
        if self.seed == seed:
            return self
        store = RandomStore(self.folder, self.model_class, self.config, seed)
        unfit = ("torch_dtype", "quantization_config", WEIGHTS)
        settings = {key: value for key, value in self.settings.items() if key not in unfit}
        settings |= {"architectures": [self.model_class.__name__], "dtype": "float32"}
        return replace(self, store=store, settings=settings, notes=())

    def with_settings(self, settings: dict[str, Any]) -> SourceModel:
        config = _without_section(type(self.config).from_dict(deepcopy(settings)))
        return replace(self, config=config, settings=settings)

    def original_name(self, name: str) -> str:
        """Give the name that something had before layers were dropped."""
        for now, before in self.renumbered:
            if name.startswith(now) and name[len(now) : len(now) + 1] in ("", "."):
                return before + name.removeprefix(now)
        return name

    @property
    def rows_gone(self) -> int:
        """Parameters that the model had for tokens that are left out."""
        return self.vocabulary.parameters if self.vocabulary else 0

    def meta_model(self) -> PreTrainedModel:
        """Build the model without weights, on the meta device; a new one at every call."""
        return _on_meta(self.model_class, self.config).eval()

    @cached_property
    def keymap(self) -> KeyMap:
        """Checkpoint names and runtime names; holds a meta model of its own."""
        return KeyMap(self.meta_model(), self.store.keys())

    def auxiliary_files(self) -> tuple[Path, ...]:
        return auxiliary_files(self.folder, with_code=self.trust_remote_code)


def _merged(folder: Path, token: str | None, trust: bool) -> Copy:
    """Make a copy of a model with the adapter that lies in its folder, or in one of its own."""
    if WeightStore.are_in(folder):
        # Out of sight of its adapter, which Transformers would load too, where PEFT is installed.
        alone = with_settings(folder, read_config(folder))
        base = SourceModel.open(str(alone.folder), token=token, trust_remote_code=trust)
    else:
        alone, (name, revision) = None, base_of(folder)
        base = SourceModel.open(name, revision, token, trust_remote_code=trust)
    with copying(folder) as copy:
        merge(base.folder, folder, base.model_class, copy.folder, trust=trust)
        for part in (base.folder, folder):
            copy.take(part)
        age = max(path.stat().st_mtime for path in folder.iterdir())
        for path in copy.folder.glob("*.safetensors"):
            os.utime(path, (age, age))  # the same again is as old
        return copy


_PREDICTS_TOKENS = re.compile(r"For(MaskedLM|PreTraining)$")


def _encoder_class(config: Any, kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Find the class that sentence-transformers runs; other heads, as of classifiers, stay."""
    has_decoder = bool(config.is_encoder_decoder)
    if not (has_decoder or kind.can_generate() or _PREDICTS_TOKENS.search(kind.__name__)):
        return kind
    found: Any = MODEL_MAPPING.get(type(config), None)
    if has_decoder and not config.sub_configs:  # such as a `T5EncoderModel`
        name = type(config).__name__.removesuffix("Config") + "EncoderModel"
        found = getattr(transformers, name, found)
    return found if isinstance(found, type) else kind


def _on_meta(kind: Any, config: Any, **options: Any) -> PreTrainedModel:
    """Build a model without values; building writes to its config, hence the copy."""
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            model: PreTrainedModel = kind._from_config(deepcopy(config), **options)
    except Exception as error:
        # The class of a model may raise anything where sizes do not go together.
        raise SourceError(
            f"no `{kind.__name__}` can be built with these sizes "
            f"({type(error).__name__}: {first_line(error)})",
            hint="check the numbers of the configuration",
        ) from error
    return model


def _without_rounding(raw: dict[str, Any]) -> dict[str, Any]:
    """Take our section out of settings where tensors are in fewer bits, and nothing else is new.

    Readers of weights undo that by themselves, so that such a model is as good as any.
    """
    if not is_only_rounded(raw.get("quantization_config")):
        return raw
    return {key: value for key, value in raw.items() if key != "quantization_config"}


def _refuse_quantised(raw: dict[str, Any], folder: Path) -> None:
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        section = part.get("quantization_config") or part.get("compression_config")
        if not section:
            continue
        facts = section if isinstance(section, dict) else {}
        method = facts.get("quant_method", "unknown")
        if method in METHODS:
            hint = "convert the original model again, with the new options"
            raise SourceError(f"`{folder}` is already converted by tcompress", hint)
        hint = "give the model in full precision; quantise after converting if need be"
        raise SourceError(f"`{folder}` is already quantised with `{method}`", hint)


def _load_config(
    raw: dict[str, Any], folder: Path, token: str | None, trust_remote_code: bool
) -> PreTrainedConfig:
    model_type = raw.get("model_type")
    known = model_type in transformers.CONFIG_MAPPING
    # Many models that Transformers knows still carry their old code, which is then not needed.
    if raw.get("auto_map") and not known and not trust_remote_code:
        raise SourceError(
            f"`{folder}` needs Python code that comes with the model "
            f"(model type `{model_type}` is not part of Transformers)",
            hint="read that code, then allow it with `--allow-remote-code`",
        )
    if not model_type and not raw.get("auto_map"):
        hint = "save the model with `save_pretrained` of a recent Transformers"
        raise SourceError(f"`config.json` in `{folder}` has no `model_type`", hint)
    if not known and not raw.get("auto_map"):
        raise SourceError(
            f"`{folder}` has the model type `{model_type}`, which Transformers "
            f"{transformers.__version__} does not know",
            hint="a newer Transformers may know it",
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, token=token, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        # A config class, above all a remote one, may raise anything.
        raise SourceError(
            f"the configuration in `{folder}` cannot be read "
            f"({type(error).__name__}: {first_line(error)})",
            hint="check `config.json`",
        ) from error
    return _without_section(config)


def _without_section(config: Any) -> Any:
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    vars(config).pop(WEIGHTS, None)
    return config


def _model_class(
    config: PreTrainedConfig, folder: Path, token: str | None, trust_remote_code: bool
) -> type[PreTrainedModel]:
    names = config.architectures or []
    remote = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    for reference in remote.values():
        if str(reference).rpartition(".")[2] in names:
            own: Any = get_class_from_dynamic_module(reference, folder, token=token)
            return own  # type: ignore[no-any-return]
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    for kind in registered_classes(config):
        if kind.__name__ in names:
            return kind
    if type(config) in MODEL_MAPPING:
        base: Any = MODEL_MAPPING[type(config)]
        return base[0] if isinstance(base, tuple | list) else base  # type: ignore[no-any-return]
    raise SourceError(
        f"`config.json` in `{folder}` names no model class that Transformers has "
        f"(architectures {names}, model type `{config.model_type}`)",
        hint='set `architectures` to the class of the model, such as `["BertModel"]`',
    )


def registered_classes(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    """List the classes, registered ones too, that Transformers' Auto classes know for a config."""
    found: dict[str, type[PreTrainedModel]] = {}
    for mapping in vars(modeling_auto).values():
        if isinstance(mapping, _LazyAutoMapping) and type(config) in mapping:
            kinds: Any = mapping[type(config)]
            for kind in kinds if isinstance(kinds, tuple | list) else (kinds,):
                found.setdefault(kind.__name__, kind)
    return list(found.values())


def tell_padding(model: Any, pad: int | None = None) -> None:
    """Let a head that reads the last token of a text know which tokens are padding.

    Without `pad`, where the config is silent too, that is what ends a text.
    """
    if "SequenceClassification" not in type(model).__name__:
        return
    config = model.config.get_text_config()
    if pad is not None:
        config.pad_token_id = pad
    elif getattr(config, "pad_token_id", None) is None:
        end = getattr(config, "eos_token_id", None)
        config.pad_token_id = end if isinstance(end, int) else 0
