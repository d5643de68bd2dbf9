"""Checkpoint names and runtime names of one model, and whether its weights are complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from tcompress.errors import FitError, SourceError, after_colon, listed
from tcompress.models.store import WeightStore

CPU = torch.device("cpu")
"""Where tensors are that are only written."""

# A checkpoint may call a tensor `vit.encoder.layer.0.attention.attention.query.weight` where the
# model in memory has `layers.0.attention.q_proj.weight`, and may keep every expert of a layer apart
# where the model has one tensor of three dimensions. Transformers translates on loading; this file
# asks it how. It and `conversions.py` alone use `transformers.core_model_loading`, which is
# internal: verified with 5.21 (5.20 has no `apply_renamings`), 5.23 and 5.24.


FACTOR_PREFIX = "tc_"  # start of the name of every tensor that a structured layer owns
# What a structured layer may store under the checkpoint name of the layer it replaces.
_LEAVES = (f"{FACTOR_PREFIX}a", "weight", "bias")


@dataclass(frozen=True)
class Sources:
    """The checkpoint tensors behind a runtime parameter."""

    keys: tuple[str, ...]  # checkpoint names, in the order the converter wants them
    # What makes the parameter of several tensors, or of a part of one; None if the parameter is
    # the one tensor in `keys` as it is.
    converter: Any = None
    patterns: tuple[str, ...] = ()  # for each key, the converter's pattern that it matched
    target: str = ""  # runtime name under which the converter collects


class KeyMap:
    """Both directions between the names of a checkpoint and of a model on the meta device."""

    def __init__(self, model: Any, checkpoint_keys: Iterable[str]) -> None:
        self.model = model
        transforms = get_model_conversion_mapping(model)
        self._renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
        self._converters = [item for item in transforms if isinstance(item, WeightConverter)]
        self._names = dict.fromkeys(model.state_dict(), True)
        self._modules = {name for name, _ in model.named_modules() if name}
        # The names of a model in which every module were a structured layer.
        self._probe = {f"{name}.{leaf}": True for name in self._modules for leaf in _LEAVES}
        self._ties = _tied_groups(model)
        self._module_keys: dict[str, str] = {}
        self._stored: dict[str, str] = {}  # prefixes in the checkpoint by name of the module
        self._sources: dict[str, Sources] = {}
        unmatched = self._collect(checkpoint_keys)
        missing, unexpected = self._differences(unmatched)
        self.missing = tuple(name for name in self._names if name in missing)
        self.unmatched = tuple(key for key in unmatched if self._module_keys[key] in unexpected)
        # Of no use, such as old buffers.
        self.ignored = tuple(key for key in unmatched if self._module_keys[key] not in unexpected)
        self._used = [item.reverse_transform() for item in self._renamings if item.was_used()][::-1]

    def sources(self, param_name: str) -> Sources:
        """Give the checkpoint tensors behind a runtime parameter or buffer, or a tied one."""
        for name in (param_name, *self.tied(param_name)):
            if name in self._sources:
                return self._sources[name]
        hint = "such a parameter starts at random: keep it out of the conversion"
        raise SourceError(f"the checkpoint has no tensor for parameter `{param_name}`", hint)

    def tied(self, param_name: str) -> tuple[str, ...]:
        """Give the other runtime names of the same parameter."""
        return tuple(name for name in self._ties.get(param_name, ()) if name != param_name)

    def stored_again(self) -> list[tuple[str, ...]]:
        """List the keys of tied parameters that are stored more than once, the model's first."""
        groups_of_keys = []
        for group in dict.fromkeys(self._ties.values()):
            stored = (self._sources[name] for name in group if name in self._sources)
            keys = dict.fromkeys(item.keys[0] for item in stored if item.converter is None)
            if len(keys) > 1:
                groups_of_keys.append(tuple(keys))
        return groups_of_keys

    def checkpoint_prefix(self, module_name: str) -> str:
        """Translate a runtime module name into its stored name; for experts the prefix of all.

        A `SourceError` says that Transformers would not load what is stored under it back into it.
        """
        if module_name not in self._stored:  # planning asks many times, and all names are looked at
            self._stored[module_name] = self._stored_prefix(module_name)
        return self._stored[module_name]

    def _stored_prefix(self, module_name: str) -> str:
        back = [(f"{module_name}.{leaf}", None) for leaf in _LEAVES]
        for prefix in self._prefixes(module_name):
            if [self._rename(f"{prefix}.{leaf}", self._probe) for leaf in _LEAVES] == back:
                return prefix
        raise SourceError(
            f"module `{module_name}` has no name of its own in the checkpoint, since Transformers "
            "builds it of other tensors on loading",
            hint="leave this module out of the conversion",
        )

    def apart(self, param_names: Iterable[str]) -> dict[str, str]:
        """Find other parameters stored fused with given ones, by names that load each by itself."""
        given = {name: self._sources[name] for name in param_names if name in self._sources}
        fused = {id(sources) for sources in given.values() if sources.converter is not None}
        found = {}
        for name, sources in self._sources.items() if fused else ():
            if id(sources) in fused and name not in given:
                module, _, leaf = name.rpartition(".")
                found[f"{self.checkpoint_prefix(module)}.{leaf}"] = name
        return found

    def stored_together(self, param_name: str) -> tuple[str, ...]:
        """Give the parameters, itself included, that are made of the same checkpoint tensors."""
        sources = self.sources(param_name)
        return tuple(name for name, own in self._sources.items() if own is sources)

    def as_stored(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Give the checkpoint tensors of parameters that are stored together, by their keys.

        The inverse of `read_parameter`; shapes may be others than those of the model.
        """
        sources = self.sources(next(iter(values)))
        keys = sources.keys
        if sources.converter is None:
            return dict(zip(keys, values.values(), strict=True))
        found = revert_weight_conversion(self.model, dict(values))
        named = {key: name for key in keys for name in found if f".{key}".endswith(f".{name}")}
        if not len(named) == len(found) == len(keys):
            raise SourceError(
                f"Transformers would store {listed(values)} as {listed(found)}, and the checkpoint "
                f"has {listed(keys)}",
                hint="load the model with Transformers and save it again, then convert that",
            )
        return {key: found[name] for key, name in named.items()}

    def runtime_name(self, checkpoint_prefix: str) -> str | None:
        """Translate the stored name of a module back, across heads; None if there is none."""
        leaf = f".{_LEAVES[0]}"
        name, pattern = self._rename(checkpoint_prefix + leaf, self._probe)
        module = name.removesuffix(leaf)
        return module if pattern is None and module in self._modules else None

    def _rename(self, key: str, names: Any) -> tuple[str, str | None]:
        """Rename like `transformers.core_model_loading.convert_and_load_state_dict_in_model`."""
        base = self.model.base_model_prefix
        renamed, pattern = rename_source_key(key, self._renamings, self._converters, base, names)
        if renamed not in names and key in names:
            renamed, pattern = rename_source_key(key, [], [], base, names)
        return str(renamed), pattern

    def _collect(self, checkpoint_keys: Iterable[str]) -> list[str]:
        """Find the sources of all parameters; return keys that are none."""
        by_pattern = {text: item for item in self._converters for text in item.source_patterns}
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        unmatched: list[str] = []
        # The order is part of the meaning: experts are stacked in it.
        for key in sorted(checkpoint_keys, key=dot_natural_key):
            target, pattern = self._rename(key, self._names)
            self._module_keys[key] = target
            if target not in self._names or (pattern is None and target in self._sources):
                unmatched.append(key)
            elif pattern is None:
                self._sources[target] = Sources((key,))
            else:
                groups[target].append((key, pattern))
        for target, pairs in groups.items():
            keys, patterns = zip(*pairs, strict=True)
            sources = Sources(keys, by_pattern[patterns[0]], patterns, target)
            for name in self._targets(target, sources.converter):
                self._sources.setdefault(name, sources)
        return unmatched

    def _differences(self, unmatched: Iterable[str]) -> tuple[Collection[str], Collection[str]]:
        """Names that are missing and unexpected, where the model class says that it matters."""
        info = SimpleNamespace(
            missing_keys={name for name in self._names if not self.has(name)},
            unexpected_keys={self._module_keys[key] for key in unmatched},
        )
        self.model._adjust_missing_and_unexpected_keys(info)
        return info.missing_keys, info.unexpected_keys

    def has(self, name: str) -> bool:
        return any(other in self._sources for other in (name, *self.tied(name)))

    @cached_property
    def stale(self) -> frozenset[str]:
        """Keys of old buffers of modules that are there; others may be of use to another class."""
        owners = {key: self._module_keys[key].rpartition(".")[0] for key in self.ignored}
        return frozenset(key for key, owner in owners.items() if owner in self._modules)

    def _targets(self, first: str, converter: Any) -> Iterator[str]:
        head, _, tail = first.partition(converter.target_patterns[0].replace("*", "0"))
        for pattern in converter.target_patterns:
            count = 0
            while (name := head + pattern.replace("*", str(count)) + tail) in self._names:
                yield name
                count += 1
                if "*" not in pattern:
                    break

    def _prefixes(self, module_name: str) -> Iterator[str]:
        """Candidates for the stored name of a module, likely ones first."""
        below = [name for name in self._sources if name.startswith(f"{module_name}.")]
        # The weight first, then what belongs to the module itself, then a submodule's.
        below.sort(key=lambda name: (name.count("."), not name.endswith(".weight")))
        for name in below[:4]:
            prefix = self._sources[name].keys[0]
            while "." in prefix:
                prefix = prefix.rpartition(".")[0]
                yield prefix
        # Of a layer that a converter makes: as Transformers names it when it saves the model again.
        # No other name will do: what is saved again would not be found under it.
        yield apply_renamings(f"{module_name}.weight", self._used).removesuffix(".weight")


def read_parameter(store: WeightStore, keymap: KeyMap, param_name: str) -> Tensor:
    """Read a runtime parameter, as stored: only the tensors behind it, merged or split."""
    tensor = _made_of(store.tensor, keymap, param_name)
    expected = keymap.model.get_parameter_or_buffer(param_name).shape
    if tensor.shape != expected:
        raise SourceError(
            f"`{param_name}` has shape {list(tensor.shape)} in the checkpoint, "
            f"but {list(expected)} by `config.json`",
            hint="use the `config.json` that belongs to these weights",
        )
    return tensor


def read_finite(
    store: WeightStore, keymap: KeyMap, param_name: str, device: torch.device
) -> Tensor:
    """Read a runtime parameter as `read_parameter` does, and refuse NaN and infinity.

    Whoever reads has to say which device computes with it; what is only written stays on the CPU.
    """
    value = read_parameter(store, keymap, param_name)
    bounds = value.aminmax() if value.is_floating_point() and value.numel() else ()
    if not all(bound.isfinite() for bound in bounds):
        key = keymap.sources(param_name).keys[0]
        text = f"tensor `{store.name_inside(key)}` of the source holds NaN or infinity"
        raise FitError(text, "repair the checkpoint first")  # what is kept is written too
    return value.to(device)


def _made_of(read: Callable[[str], Tensor], keymap: KeyMap, param_name: str) -> Tensor:
    sources = keymap.sources(param_name)
    if sources.converter is None:
        return read(sources.keys[0])
    converter = deepcopy(sources.converter)
    for key, pattern in zip(sources.keys, sources.patterns, strict=True):
        # A callable is read by the converter at the moment it needs the tensor.
        converter.add_tensor(sources.target, key, pattern, lambda key=key: read(key))
    try:
        with torch.no_grad():
            made = converter.convert(sources.target, model=keymap.model, config=keymap.model.config)
        value = made[param_name]
    except SourceError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SourceError(
            f"`{param_name}` cannot be made of {listed(sources.keys)} ({error})",
            hint="the checkpoint does not have the layout that Transformers expects of this model",
        ) from error
    tensor: Tensor = value[0] if isinstance(value, list) else value
    # A part of a fused tensor must not keep all of it in memory.
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _tied_groups(model: Any) -> dict[str, tuple[str, ...]]:
    """Names that mean the same parameter object, for each of them."""
    names: dict[int, list[str]] = defaultdict(list)
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[id(tensor)].append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


_MOST = 8


def check_weights(
    folder: Path, store: WeightStore, keymap: KeyMap, unknown: Sequence[str] = ()
) -> tuple[str, ...]:
    """Compare a checkpoint with its config, without reading it; give what a user should know.

    Names in `unknown` are classes that the config asks for and nobody knows. A `SourceError` lists
    all problems: weights missing, misshapen, quantised, or of a head that is not known.
    """
    kind = type(keymap.model).__name__
    filled = set(keymap.model.state_dict()) - set(keymap.missing)
    lost, unset = _missing(keymap)
    coded = list(_coded(store, keymap))
    problems = [f"nothing is stored for {_under(lost, filled)}"] if lost else []
    problems += [*_misshapen(store, keymap), *coded]
    notes = []
    if keymap.unmatched:
        extra = _under(keymap.unmatched, set(store.keys()) - set(keymap.unmatched))
        if unknown:
            problems.append(
                f"`architectures` names {listed(unknown)}, which nobody knows, and a `{kind}`, "
                f"which would be taken instead, has no place for {extra}"
            )
        else:
            notes.append(
                f"a `{kind}` with this `config.json` has no place for {extra} of the checkpoint: "
                "they are not carried over"
            )
    elif unknown:
        notes.append(f"nobody knows the class {listed(unknown)}: a `{kind}` is taken instead")
    if problems:
        hint = "take `config.json` and the weights from one and the same model, or download them"
        hint += " again"
        if len(coded) == len(problems):
            hint = "give the model in full precision; quantise after converting if need be"
        elif unknown:
            hint = f"set `architectures` to the class that the weights belong to; or {hint}"
        raise SourceError(
            f"the weights in `{folder}` are not those of the `{kind}` that `config.json` "
            f"describes:{after_colon(problems)}",
            hint,
        )
    if unset:
        notes.append(
            f"the checkpoint holds nothing for {_under(unset, filled)}: it starts at random "
            "wherever the model is loaded"
        )
    return tuple(notes)


def _missing(keymap: KeyMap) -> tuple[list[str], list[str]]:
    """Names that a forward pass needs, and those that Transformers often leaves out of a file."""
    model = keymap.model
    needed = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            needed |= {f"{path}.running_mean", f"{path}.running_var"}
    missing = [name for name in keymap.missing if name in needed]
    # Poolers that nobody trained, and vectors that mask inputs while training.
    unset = [n for n in missing if "pooler" in n.split(".") or "mask" in n.rpartition(".")[2]]
    return [name for name in missing if name not in unset], unset


def _under(names: Collection[str], others: Iterable[str]) -> str:
    """Name the largest modules that hold these tensors and no other ones, and say how many."""
    taken = {module for other in others for module in modules_above(other)}
    found = {
        next((module for module in modules_above(name) if module not in taken), name)
        for name in names
    }
    return listed(found) + (f" ({len(names)} tensors)" if len(names) > 1 else "")


def modules_above(name: str) -> list[str]:
    """List the paths of the modules that a parameter is in, the largest first."""
    steps = name.split(".")
    return [".".join(steps[:depth]) for depth in range(1, len(steps))]


def _misshapen(store: WeightStore, keymap: KeyMap) -> Iterator[str]:
    def empty(key: str) -> Tensor:
        return torch.empty(store.shape(key), dtype=store.dtype(key), device="meta")

    wrong = []
    for name, wanted in keymap.model.state_dict().items():
        try:
            found = _made_of(empty, keymap, name).shape if keymap.has(name) else wanted.shape
        except (SourceError, NotImplementedError):
            continue  # only reading tells it
        if found != wanted.shape:
            wrong.append(f"`{name}` has shape {list(found)}, not {list(wanted.shape)}")
    yield from wrong[:_MOST]
    if len(wrong) > _MOST:
        yield f"{len(wrong) - _MOST} more have other shapes"


def _coded(store: WeightStore, keymap: KeyMap) -> Iterator[str]:
    """Weights in types that mean nothing without the scales of a quantiser."""
    found: dict[torch.dtype, set[str]] = defaultdict(set)
    for name, parameter in keymap.model.named_parameters():
        if parameter.is_floating_point() and keymap.has(name):
            for key in keymap.sources(name).keys:
                dtype = store.dtype(key)
                if not dtype.is_floating_point or dtype.itemsize < 2:
                    found[dtype].add(key)
    for dtype, keys in found.items():
        yield (
            f"{listed(keys)} {'is' if len(keys) == 1 else 'are'} stored as "
            f"`{str(dtype).removeprefix('torch.')}`, and no `quantization_config` says what that "
            "means"
        )


# What torch.compile, FSDP and activation checkpoints put into names, wherever they wrap a module.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PARALLEL = "module"  # DDP and DataParallel wrap whole models alone


def plain_names(keys: Iterable[str]) -> dict[str, str]:
    """Give names without what wrappers put into them, by the stored ones; empty if none did."""
    keys = list(keys)
    parts = [[part for part in key.split(".") if part not in _WRAPPERS] for key in keys]
    while parts and all(key[0] == _PARALLEL and len(key) > 1 for key in parts):
        parts = [key[1:] for key in parts]
    names = {key: ".".join(left) for key, left in zip(keys, parts, strict=True)}
    clear = len({*names.values()}) == len(names) and all(names.values())
    return names if clear and any(key != name for key, name in names.items()) else {}
