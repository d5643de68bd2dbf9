"""Whether weights are those that a config describes: told from names, shapes and types alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tcompress.errors import SourceError
from tcompress.source.keymap import KeyMap, made_of
from tcompress.source.store import WeightStore
from tcompress.source.text import listed

_FULL_PRECISION = "give the model in full precision; quantise after converting if need be"
_BELONGING = (
    "take `config.json` and the weights from one and the same model, or download them again"
)


def check_weights(
    folder: Path, store: WeightStore, keymap: KeyMap, unknown: Sequence[str] = ()
) -> tuple[str, ...]:
    """Compare a checkpoint with the model that its config describes; no weight is read.

    Args:
        folder: Folder of the model, for messages.
        store: The weights.
        keymap: Names of checkpoint and model.
        unknown: Classes that the config asks for and nobody knows.

    Returns:
        What a user should know, though the model can be used.

    Raises:
        SourceError: Weights are missing, of another shape or of a type that only a quantised model
            has, or belong to a head of a class that is not known; all problems are in one error.
    """
    kind = type(keymap.model).__name__
    lost, unset = _missing(keymap)
    problems = []
    if lost:
        problems.append(f"nothing is stored for {_under(lost, _filled(keymap))}")
    problems += _misshapen(store, keymap)
    coded = tuple(_coded(store, keymap))
    problems += coded
    extra, notes = "", []
    if keymap.unmatched:
        used = set(store.keys()) - set(keymap.unmatched)
        extra = _under(keymap.unmatched, used)
    if unknown and extra:
        problems.append(
            f"`architectures` names {listed(unknown)}, which nobody knows, and a `{kind}`, which "
            f"would be taken instead, has no place for {extra}"
        )
    elif extra:
        notes.append(
            f"a `{kind}` with this `config.json` has no place for {extra} of the checkpoint: they "
            "are not carried over"
        )
    if unknown and not extra:
        notes.append(f"nobody knows the class {listed(unknown)}: a `{kind}` is taken instead")
    if problems:
        quantised = coded and len(coded) == len(problems)
        named = (
            "set `architectures` to the class that the weights belong to; or " if unknown else ""
        )
        lines = problems[0] if len(problems) == 1 else "".join(f"\n  - {p}" for p in problems)
        raise SourceError(
            f"the weights in `{folder}` are not those of the `{kind}` that `config.json` "
            f"describes: {lines}",
            _FULL_PRECISION if quantised else named + _BELONGING,
        )
    if unset:
        notes.append(
            f"the checkpoint holds nothing for {_under(unset, _filled(keymap))}: it starts at "
            "random wherever the model is loaded"
        )
    return tuple(notes)


def _filled(keymap: KeyMap) -> set[str]:
    return set(keymap.model.state_dict()) - set(keymap.missing)


def _missing(keymap: KeyMap) -> tuple[list[str], list[str]]:
    """What a forward pass needs, and what Transformers itself often leaves out of a file."""
    model = keymap.model
    needed = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            needed |= {f"{path}.running_mean", f"{path}.running_var"}
    lost: list[str] = []
    unset: list[str] = []
    for name in keymap.missing:
        if name in needed:
            # Poolers that nobody trained, and vectors that mask inputs while training.
            spare = "pooler" in name.split(".") or "mask" in name.rpartition(".")[2]
            (unset if spare else lost).append(name)
    return lost, unset


def _under(names: Collection[str], others: Collection[str]) -> str:
    """Name the largest modules that hold these tensors and no other ones, and say how many."""
    above = {
        ".".join(steps[:depth]) for steps in map(_steps, others) for depth in range(len(steps))
    }
    found = []
    for steps in map(_steps, names):
        starts = (".".join(steps[:depth]) for depth in range(1, len(steps)))
        found.append(next((start for start in starts if start not in above), ".".join(steps)))
    many = f" ({len(names)} tensors)" if len(names) > 1 else ""
    return listed(set(found)) + many


def _steps(name: str) -> list[str]:
    return name.split(".")


def _misshapen(store: WeightStore, keymap: KeyMap) -> Iterator[str]:
    wrong = {}
    for name, wanted in keymap.model.state_dict().items():
        if keymap.has(name):
            found = _stored_shape(store, keymap, name)
            if found is not None and found != wanted.shape:
                wrong[f"`{name}` has shape {list(found)}"] = f"not {list(wanted.shape)}"
    for found_text, wanted_text in list(wrong.items())[:_MOST]:
        yield f"{found_text}, {wanted_text}"
    if len(wrong) > _MOST:
        yield f"{len(wrong) - _MOST} more have other shapes"


def _stored_shape(store: WeightStore, keymap: KeyMap, param_name: str) -> tuple[int, ...] | None:
    """Shape that a parameter has by the headers of files; None if only reading tells it."""
    sources = keymap.sources(param_name)
    if sources.converter is None:
        return store.shape(sources.keys[0])

    def empty(key: str) -> Tensor:
        return torch.empty(store.shape(key), dtype=store.dtype(key), device="meta")

    try:
        return tuple(made_of(empty, keymap, param_name, sources).shape)
    except (SourceError, NotImplementedError):
        return None


_MOST = 8


def _coded(store: WeightStore, keymap: KeyMap) -> Iterator[str]:
    """Weights in types that mean nothing without the scales of a quantiser."""
    found: dict[torch.dtype, set[str]] = {}
    for name, parameter in keymap.model.named_parameters():
        if parameter.is_floating_point() and keymap.has(name):
            for key in keymap.sources(name).keys:
                dtype = store.dtype(key)
                if not dtype.is_floating_point or dtype.itemsize < 2:
                    found.setdefault(dtype, set()).add(key)
    for dtype, keys in found.items():
        yield (
            f"{listed(keys)} {'is' if len(keys) == 1 else 'are'} stored as "
            f"`{str(dtype).removeprefix('torch.')}`, and no `quantization_config` says what that "
            "means"
        )
