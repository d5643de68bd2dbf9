"""A converted model on disk: format, shards, and whether both are the plan's.

A folder holds the files of an ordinary Transformers model; `config.json` has a
`quantization_config` section with the plan, and `tcompress.json` is the manifest. Rewritten layers
store `tc_*` tensors and an empty tensor under the dense name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import ValidationError
from torch import Tensor

from tcompress.artifact.checksums import AGAIN as AGAIN
from tcompress.artifact.checksums import check_format_version
from tcompress.errors import ArtifactError, first_line, listed, read_settings
from tcompress.files import beside, write_text
from tcompress.linalg.rounding import Rounding, pack, unpack
from tcompress.models.keymap import FACTOR_PREFIX
from tcompress.models.names import CALLED, MANIFEST
from tcompress.models.store import DTYPES, WeightStore
from tcompress.planning.entries import AttentionPlan, FormPlan, LayerPlan, Storage
from tcompress.project import INSTALL

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# For those who look into `config.json` since Transformers told them to delete the section.
NOTE = (
    f"converted by tcompress: `{INSTALL}`, then `import tcompress` before loading; "
    "without this section nothing can load the model"
)

P = TypeVar("P", LayerPlan, AttentionPlan, FormPlan)
Entry = LayerPlan | AttentionPlan


def needed_version(
    layers: Sequence[LayerPlan],
    attention: Sequence[AttentionPlan],
    *,
    drawn: bool = False,
    rounded: bool = False,
) -> int:
    """Returns the oldest format that can hold a plan, so that older readers can have it."""
    if rounded:
        return 5
    if any(entry.is_narrow for entry in layers):
        return 4
    return 3 if drawn else 2 if attention else 1


def quantization_section(
    layers: Sequence[LayerPlan],
    attention: Sequence[AttentionPlan] = (),
    forms: Sequence[FormPlan] = (),
    **facts: Any,
) -> dict[str, Any]:
    """Returns the section of `config.json` from which the model is rebuilt.

    Facts are of weights that are less than the class in `architectures`: `stored_as`, the class
    that they are, and `absent`, names in the model of tensors that are not stored; and `storage`,
    the bits that they were rounded to.
    """
    kinds = {"layers": layers, "attention": attention, "forms": forms}
    plan = {
        kind: [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]
        for kind, entries in kinds.items()
        if entries or kind == "layers"
    }
    section = {
        "quant_method": CALLED,
        "note": NOTE,
        "format_version": needed_version(
            layers, attention, drawn=bool(forms), rounded="storage" in facts
        ),
        "plan": plan,
        **facts,
    }
    return {**section, "digest": section_digest(section)}


def section_digest(section: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of what a section says, whatever the layout of the file."""
    facts = {name: section.get(name) for name in ("format_version", "plan", "stored_as", "absent")}
    facts |= {"storage": section["storage"]} if "storage" in section else {}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def first_problem(error: Exception) -> str:
    """Say in one line what is wrong with data."""
    if not isinstance(error, ValidationError):
        return first_line(error)
    first, count = error.errors(include_url=False)[0], error.error_count()
    path = ".".join(map(str, first["loc"]))
    rest = f", and {count - 1} more problems" if count > 1 else ""
    return f"{f'`{path}`: ' if path else ''}{first['msg']}{rest}"


@dataclass(frozen=True)
class Rebuilt:
    """All that differs from the family's own model: layers, attentions and other modules."""

    layers: tuple[LayerPlan, ...]
    attention: tuple[AttentionPlan, ...] = ()
    forms: tuple[FormPlan, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (*self.layers, *self.attention)

    def renamed(self, keys: Collection[str]) -> Rebuilt:
        """Rename the plan like the tensors of a model saved again with another head, or none.

        Their names lack, or gain, one prefix such as `bert.`, while the plan in its config stays as
        it was. A plan whose tensors are not found keeps its names.
        """
        firsts: tuple[Entry, ...] = (*self.layers[:1], *self.attention[:1])
        pairs = (pair for entry in firsts if (pair := _prefixes(entry, keys)) is not None)
        lost, gained = next(pairs, ("", ""))
        if lost == gained:
            return self

        def moved(item: Any) -> Any:
            return _moved(item, lambda name: gained + name.removeprefix(lost))

        return replace(self, **{kind: (*map(moved, items),) for kind, items in vars(self).items()})


def parse_plan(section: Mapping[str, Any], manifest: Rebuilt | None = None) -> Rebuilt:
    """Read the plan of a section of `config.json` back; it must be that of the manifest."""
    check_format_version(section.get("format_version"))
    plan = section.get("plan")
    if not isinstance(plan, Mapping) or not isinstance(plan.get("layers"), list):
        raise ArtifactError("`quantization_config` in `config.json` has no plan", AGAIN)
    rebuilt = Rebuilt(
        _parsed(plan["layers"], LayerPlan, "layer"),
        _parsed(plan.get("attention", []), AttentionPlan, "attention"),
        _parsed(plan.get("forms", []), FormPlan, "module"),
    )
    if manifest is not None and rebuilt != manifest:
        difference = _difference(rebuilt, manifest)
        text = f"`{MANIFEST}` and `config.json` hold different plans: {difference}"
        raise ArtifactError(text, AGAIN)
    if "digest" in section and section["digest"] != section_digest(section):
        text = "the plan in `config.json` was changed since it was written (its digest differs)"
        raise ArtifactError(text, AGAIN)
    return rebuilt


def _parsed(entries: Any, kind: type[P], what: str) -> tuple[P, ...]:
    if not isinstance(entries, list):
        raise ArtifactError(f"the plan in `config.json` is damaged: no list of {what}s", AGAIN)
    parsed = []
    for index, entry in enumerate(entries):
        name = entry.get("name", index) if isinstance(entry, dict) else index
        try:
            parsed.append(plan := kind.model_validate(entry))
            if not isinstance(plan, FormPlan):
                stored_tensors(plan)
        # What sizes that do not go together make of shapes may be anything.
        except Exception as error:
            raise ArtifactError(
                f"the plan in `config.json` is damaged at {what} `{name}`: {first_problem(error)}",
                "convert the model again, or take `config.json` from a good copy",
            ) from error
    return tuple(parsed)


def _difference(config: Rebuilt, manifest: Rebuilt) -> str:
    ours, theirs = _named(config), _named(manifest)
    texts = [f"`{name}` is missing" for _, name in theirs.keys() - ours.keys()]
    texts += [f"`{name}` is not in `{MANIFEST}`" for _, name in ours.keys() - theirs.keys()]
    for key in (key for key in ours if ours[key] != theirs.get(key, ours[key])):
        changed = [name for name, value in ours[key] if value != getattr(theirs[key], name)]
        texts.append(f"`{key[1]}` differs in {listed(changed)}")
    rest = f", and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + rest if texts else "entries stand twice, or in another order"


def _named(plan: Rebuilt) -> dict[tuple[str, str], Any]:
    return {
        (kind, f"{entry.name}.{entry.parameter}" if kind == "layers" else entry.name): entry
        for kind, entries in vars(plan).items()
        for entry in entries
    }


def stored_tensors(entry: Entry) -> dict[str, tuple[int, ...]]:
    """Names, in the checkpoint, and shapes of what an entry stores, biases left out."""
    if isinstance(entry, AttentionPlan):
        stored = dict(entry.tensor_shapes) | dict.fromkeys(entry.guards, (0,))
        if entry.guard is not None:
            stored[f"{entry.guard.name}.{FACTOR_PREFIX}weight"] = entry.guard.shape
        return stored
    return {**entry.stored_shapes, entry.key: (0,)}  # the guard under the dense name


def _prefixes(entry: Entry, keys: Collection[str]) -> tuple[str, str] | None:
    """Find the prefixes that names have lost, and gained, by the first tensor of an entry."""
    mark = next(iter(stored_tensors(entry)), "")
    if not mark or mark in keys:
        return "", ""
    for key in keys:
        if key.endswith(f".{mark}"):
            return "", key.removesuffix(mark)
        if mark.endswith(f".{key}"):
            return mark.removesuffix(key), ""
    return None


def _moved(entry: Any, move: Callable[[str], str]) -> Any:
    """Rename an entry, or a part of one, with all entries that it names."""
    changed: dict[str, Any] = {"name": move(entry.name)}
    if isinstance(entry, LayerPlan | AttentionPlan):
        changed["block"] = move(entry.block)
    if isinstance(entry, AttentionPlan):
        changed["unused"] = tuple(_moved(item, move) for item in entry.unused)
        changed |= {"guard": entry.guard and _moved(entry.guard, move), "like": move(entry.like)}
    elif isinstance(entry, LayerPlan):
        changed["input_of"] = entry.input_of and move(entry.input_of)
        changed["bank_of"] = {bank: move(name) for bank, name in entry.bank_of.items()}
    return entry.model_copy(update=changed)


def verify_shapes(
    needed: Sequence[Entry], stored: Mapping[str, tuple[int, ...]], allowed: Sequence[Entry] = ()
) -> None:
    """Compare shapes of stored tensors with the plan, before anything is loaded.

    Entries that are `needed` must be stored, `allowed` ones may be; an error names all that differ.
    """
    expected = {name: size for entry in needed for name, size in stored_tensors(entry).items()}
    names = {name for entry in allowed for name in stored_tensors(entry)} | set(expected)
    problems = [f"`{name}` is missing" for name in expected if name not in stored]
    problems += [
        f"`{name}` has shape {list(stored[name])}, the plan says {list(size)}"
        for name, size in expected.items()
        if name in stored and tuple(stored[name]) != size
    ]
    problems += [
        f"`{name}` is not in the plan"
        for name in stored
        if f".{FACTOR_PREFIX}" in name and name not in names
    ]
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems[:12])
        rest = f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise ArtifactError(
            f"the weights do not fit the plan in `config.json`, {len(problems)} problems:"
            f"{lines}{rest}",
            "take `config.json` and the weights from one and the same conversion",
        )


_NAMES = {getattr(torch, kind, None): name for name, (kind, _) in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor that will be written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # that it is read in
    rounding: Rounding | None = None  # to fewer bits, where it is packed

    @property
    def nbytes(self) -> int:
        if self.rounding is not None:
            return self.rounding.nbytes(self.shape)
        return prod(self.shape) * self.dtype.itemsize

    def read_back(self, value: Tensor) -> Tensor:
        """Give the value that is read again, once this one is written."""
        value = value.to(self.dtype)
        return value if self.rounding is None else unpack(pack(value, self.rounding))


@dataclass(frozen=True)
class Shard:
    """One weight file and what it holds, in the order in which it is written."""

    file: str
    tensors: tuple[Stored, ...]

    @classmethod
    def of(cls, file: str, tensors: Iterable[Stored]) -> Shard:
        """Put wide elements first: every tensor then starts at a multiple of its element size."""
        return cls(file, tuple(sorted(tensors, key=lambda item: -_in_file(item).itemsize)))


def plan_shards(tensors: Sequence[Stored], largest: str) -> list[Shard]:
    """Distributes tensors, in the order in which they are made, over files of a largest size."""
    by_key = {item.key: item for item in tensors}
    meta = {item.key: _in_file(item) for item in tensors}
    split = split_torch_state_dict_into_shards(
        meta, filename_pattern="model{suffix}.safetensors", max_shard_size=largest
    )
    return [
        Shard.of(file, (by_key[key] for key in keys))
        for file, keys in split.filename_to_tensors.items()
    ]


def _in_file(item: Stored) -> Tensor:
    """Give a tensor of the form that a file has it in, without values."""
    if item.rounding is not None:
        return torch.empty(item.nbytes, dtype=torch.uint8, device="meta")
    return torch.empty(item.shape, dtype=item.dtype, device="meta")


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Writes the index of several shards; a single file has none."""
    if len(shards) == 1 and shards[0].file == WEIGHTS:
        return
    total = sum(item.nbytes for shard in shards for item in shard.tensors)
    where = {item.key: shard.file for shard in shards for item in shard.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def write_shard(
    folder: Path, shard: Shard, value: Callable[[Stored], Tensor], written: Callable[[int], None]
) -> str:
    """Write one shard beside its final name, then rename it; return its SHA-256.

    All names, shapes and dtypes are known before the first value is, so the header is written first
    and values follow as they are made: memory never holds more than one tensor, where `save_file`
    would need the whole shard. `written` is called with the bytes of every tensor written.
    """
    digest = hashlib.sha256()
    with beside(folder / shard.file) as unfinished, unfinished.open("xb") as file:
        for chunk in _chunks(shard, value, written):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _chunks(
    shard: Shard, value: Callable[[Stored], Tensor], written: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for item in shard.tensors:
        start, stop = stop, stop + item.nbytes
        stored = _in_file(item)
        facts = {"dtype": _NAMES[stored.dtype], "shape": tuple(stored.shape)}
        entries[item.key] = {**facts, "data_offsets": [start, stop]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    header = text + b" " * (-len(text) % 8)
    yield len(header).to_bytes(8, "little") + header
    for item in shard.tensors:
        tensor = value(item)
        assert (tuple(tensor.shape), tensor.dtype) == (item.shape, item.dtype), item.key
        if item.rounding is not None:
            tensor = pack(tensor, item.rounding)
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield flat.numpy().data
        written(item.nbytes)


def round_files(
    folder: Path, roundings: Mapping[str, Rounding | None], storage: Storage
) -> dict[str, Rounding]:
    """Round a model that `save_pretrained` wrote, by names that may gain or lose a prefix.

    Returns the roundings by stored name. Memory holds one tensor.
    """
    store = WeightStore.open(folder)
    stored = _alike(roundings, store)
    if not stored:
        return {}
    shards = []
    for file in store.files:
        keys = sorted(key for key in store.keys() if store.file_of(key) == file)  # noqa: SIM118
        tensors = (Stored(k, store.shape(k), store.dtype(k), stored.get(k)) for k in keys)
        shards.append(Shard.of(file, tensors))
    for shard in shards:
        write_shard(folder, shard, lambda item: store.tensor(item.key), lambda _: None)
    write_index(folder, shards)
    path = folder / "config.json"
    config = read_settings(path)
    facts = storage.model_dump(mode="json", exclude_none=True)
    section: dict[str, Any] = config.get("quantization_config") or quantization_section(())
    section = {**section, "format_version": 5, "storage": facts}
    config["quantization_config"] = {**section, "digest": section_digest(section)}
    write_text(path, json.dumps(config, indent=2) + "\n")
    return stored


def _alike(roundings: Mapping[str, Rounding | None], store: WeightStore) -> dict[str, Rounding]:
    """Find the rounding of every stored tensor, by its name with or without a prefix."""
    chosen = {key: rounding for key, rounding in roundings.items() if rounding is not None}
    stored = {}
    for key in store.keys():  # noqa: SIM118 - no mapping
        ends = (k for k in chosen if key.endswith(f".{k}") or k.endswith(f".{key}"))
        match = key if key in chosen else None if key in roundings else next(ends, None)
        if match is not None:
            stored[key] = chosen[match]
    return stored
