"""What a converted model looks like on disk: format, shards, and whether both are the plan's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tcompress.errors import ArtifactError, TCompressError, first_line, listed
from tcompress.files import beside, write_text
from tcompress.models.keymap import FACTOR_PREFIX
from tcompress.models.names import CALLED, FORMAT_VERSION, MANIFEST
from tcompress.planning.entries import AttentionPlan, FormPlan, LayerPlan
from tcompress.structures.modules.experts import child_of

# A folder holds the files of an ordinary Transformers model; `config.json` has a
# `quantization_config` section with the plan, and `tcompress.json` is the manifest. Rewritten
# layers store `tc_*` tensors and an empty tensor under the dense name.


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

NOTE = (
    "converted by tcompress: `pip install tcompress`, then `import tcompress` before loading; "
    "without this section nothing can load the model"
)
"""For those who look into `config.json` since Transformers told them to delete the section."""

_AGAIN = "copy the folder again, or convert the model again"

E = TypeVar("E", LayerPlan, AttentionPlan)
P = TypeVar("P", LayerPlan, AttentionPlan, FormPlan)
Entry = LayerPlan | AttentionPlan


def check_format_version(version: Any) -> None:
    """Refuses a format that is newer than this version of tcompress.

    Raises:
        ArtifactError: The version is not an integer from 1 to `FORMAT_VERSION`.
    """
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ArtifactError(
            f"the model has format version `{version}`, this tcompress reads up to "
            f"{FORMAT_VERSION}",
            "upgrade: `pip install --upgrade tcompress`",
        )


def needed_version(attention: Sequence[AttentionPlan], *, drawn: bool = False) -> int:
    """Returns the oldest format that can hold a plan, so that older readers can have it.

    Args:
        attention: Attentions that have another mechanism.
        drawn: Whether the model began at random, which the manifest says.
    """
    return 3 if drawn else 2 if attention else 1


def quantization_section(
    layers: Sequence[LayerPlan],
    attention: Sequence[AttentionPlan] = (),
    forms: Sequence[FormPlan] = (),
    **facts: Any,
) -> dict[str, Any]:
    """Returns the section of `config.json` from which the model is rebuilt.

    Args:
        layers: The rewritten layers.
        attention: Attentions with another mechanism.
        forms: Other modules that have another form.
        **facts: Of weights that are less than the class in `architectures`: `stored_as`, the class
            that they are, and `absent`, names in the model of tensors that are not stored.
    """
    plan = {"layers": [entry.model_dump(mode="json", exclude_defaults=True) for entry in layers]}
    if attention:
        dumped = [entry.model_dump(mode="json", exclude_defaults=True) for entry in attention]
        plan["attention"] = dumped
    if forms:
        plan["forms"] = [entry.model_dump(mode="json", exclude_defaults=True) for entry in forms]
    section = {
        "quant_method": CALLED,
        "note": NOTE,
        "format_version": needed_version(attention, drawn=bool(forms)),
        "plan": plan,
        **facts,
    }
    return {**section, "digest": section_digest(section)}


def section_digest(section: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of what a section says, whatever the layout of the file."""
    said = {name: section.get(name) for name in ("format_version", "plan", "stored_as", "absent")}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def first_problem(error: Exception) -> str:
    """Says in one line what is wrong with data."""
    if not isinstance(error, ValidationError):
        return first_line(error)
    first, count = error.errors(include_url=False)[0], error.error_count()
    place = ".".join(map(str, first["loc"]))
    more = f", and {count - 1} more problems" if count > 1 else ""
    return f"{f'`{place}`: ' if place else ''}{first['msg']}{more}"


@dataclass(frozen=True)
class Rebuilt:
    """What differs from the family's own model.

    Attributes:
        layers: Layers that are stored in a structure.
        attention: Attentions that have another mechanism.
        forms: Other modules that have another form.
    """

    layers: tuple[LayerPlan, ...]
    attention: tuple[AttentionPlan, ...] = ()
    forms: tuple[FormPlan, ...] = ()


def parse_plan(section: Mapping[str, Any], wanted: Rebuilt | None = None) -> Rebuilt:
    """Reads the plan back.

    Args:
        section: The section of `config.json`.
        wanted: The plan in the manifest, if there is one.

    Raises:
        ArtifactError: It is damaged, or differs from the manifest's; entries are named.
    """
    version, plan = section.get("format_version"), section.get("plan")
    check_format_version(version)
    if not isinstance(plan, Mapping) or not isinstance(plan.get("layers"), list):
        raise ArtifactError("`quantization_config` in `config.json` has no plan", _AGAIN)
    found = Rebuilt(
        _parsed(plan["layers"], LayerPlan, "layer"),
        _parsed(plan.get("attention", []), AttentionPlan, "attention"),
        _parsed(plan.get("forms", []), FormPlan, "module"),
    )
    if wanted is not None and found != wanted:
        raise ArtifactError(
            f"`{MANIFEST}` and `config.json` hold different plans: {_difference(found, wanted)}",
            _AGAIN,
        )
    if "digest" in section and section["digest"] != section_digest(section):
        raise ArtifactError(
            "the plan in `config.json` was changed since it was written (its digest differs)",
            _AGAIN,
        )
    return found


def _parsed(entries: Any, kind: type[P], what: str) -> tuple[P, ...]:
    if not isinstance(entries, list):
        raise ArtifactError(f"the plan in `config.json` is damaged: no list of {what}s", _AGAIN)
    found = []
    for index, entry in enumerate(entries):
        name = entry.get("name", index) if isinstance(entry, dict) else index
        try:
            found.append(made := kind.model_validate(entry))
            if isinstance(made, LayerPlan | AttentionPlan):
                stored_tensors(made)
        # What sizes that do not go together make of shapes may be anything.
        except Exception as error:
            raise ArtifactError(
                f"the plan in `config.json` is damaged at {what} `{name}`: {first_problem(error)}",
                "convert the model again, or take `config.json` from a good copy",
            ) from error
    return tuple(found)


def _difference(found: Rebuilt, wanted: Rebuilt) -> str:
    """Names the entries that differ, and in what."""
    ours, theirs = _named(found), _named(wanted)
    texts = [f"`{name}` is missing" for _, name in theirs.keys() - ours.keys()]
    texts += [f"`{name}` is not in `{MANIFEST}`" for _, name in ours.keys() - theirs.keys()]
    for key in [key for key in ours if key in theirs and ours[key] != theirs[key]]:
        fields = vars(ours[key]).items()
        changed = [name for name, value in fields if value != getattr(theirs[key], name)]
        texts.append(f"`{key[1]}` differs in {listed(changed)}")
    more = f", and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more if texts else "entries stand twice, or in another order"


def _named(plan: Rebuilt) -> dict[tuple[str, str], Any]:
    """All entries by kind and name."""
    found: dict[tuple[str, str], Any] = {}
    for kind, entries in vars(plan).items():
        for entry in entries:
            name = f"{entry.name}.{entry.parameter}" if kind == "layers" else entry.name
            found[kind, name] = entry
    return found


def stored_tensors(entry: Entry) -> dict[str, tuple[int, ...]]:
    """Names, in the checkpoint, and shapes of what an entry stores, biases left out."""
    if isinstance(entry, AttentionPlan):
        stored = dict(entry.tensor_shapes) | dict.fromkeys(entry.guards, (0,))
        if entry.guard is not None:
            stored[f"{entry.guard.name}.{FACTOR_PREFIX}weight"] = entry.guard.shape
        return stored
    if entry.kind != "experts":
        names = dict(entry.tensor_shapes)
        names["weight"] = (0,)
    else:
        child = child_of(entry.parameter)
        names = {f"{child}.{name}": shape for name, shape in entry.tensor_shapes.items()}
        names[entry.parameter] = (0,)
    return {f"{entry.name}.{name}": shape for name, shape in names.items()}


def renamed_like(layers: Sequence[E], keys: Collection[str]) -> tuple[E, ...]:
    """Renames a plan like the weights of a model that was saved again with another head.

    A model saved without its head, or with a head added, stores the same layers under names that
    lack, or gain, one prefix such as `bert.`, while the plan in its config stays as it was.

    Args:
        layers: The plan.
        keys: Names of the stored tensors.

    Returns:
        The plan with the names found; as it was if they are not found.
    """
    marks = [key for layer in layers[:1] for key in stored_tensors(layer)]
    if not marks or marks[0] in keys:
        return tuple(layers)
    for key in keys:
        if key.endswith(f".{marks[0]}"):
            return tuple(_moved(layer, "", key.removesuffix(marks[0])) for layer in layers)
        if marks[0].endswith(f".{key}"):
            return tuple(_moved(layer, marks[0].removesuffix(key), "") for layer in layers)
    return tuple(layers)


def _moved(entry: E, lost: str, gained: str) -> E:
    def move(name: str) -> str:
        return gained + name.removeprefix(lost)

    changed: dict[str, Any] = {"name": move(entry.name), "block": move(entry.block)}
    if isinstance(entry, AttentionPlan):
        own = [layer.model_copy(update={"name": move(layer.name)}) for layer in entry.unused]
        changed |= {"unused": tuple(own), "like": move(entry.like)}
        if entry.guard is not None:
            named = {"name": move(entry.guard.name)}
            changed["guard"] = entry.guard.model_copy(update=named)
        return entry.model_copy(update=changed)
    if entry.input_of:
        changed["input_of"] = move(entry.input_of)
    changed["bank_of"] = {bank: move(name) for bank, name in entry.bank_of.items()}
    return entry.model_copy(update=changed)


# Strict comparison of stored tensors with the plan, before anything is loaded.


_SHOWN = 12
_MARK = ".tc_"


def stored_shapes(files: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Reads names and shapes from the headers of weight files; others than safetensors are not.

    Raises:
        ArtifactError: A file cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if not file.endswith(".safetensors"):
            continue
        try:
            with safe_open(file, "pt") as shard:
                for key in shard.keys():  # noqa: SIM118 - not a mapping
                    shapes[key] = tuple(shard.get_slice(key).get_shape())
        except (SafetensorError, OSError) as error:
            raise ArtifactError(
                f"`{file}` cannot be read: {error}", "copy or convert the model again"
            ) from error
    return shapes


def verify_headers(
    plan: Rebuilt, found: Mapping[str, tuple[int, ...]], needed: Collection[str] | None = None
) -> None:
    """Compares the headers of weight files with the plan.

    Args:
        plan: The plan.
        found: Shapes of all stored tensors.
        needed: Names of the layers and attentions that must be there; default all.

    Raises:
        ArtifactError: Tensors are missing, unexpected or misshapen: all of them are named.
    """
    asked: tuple[Entry, ...] = (*plan.layers, *plan.attention)
    known: tuple[Entry, ...] = (
        *renamed_like(plan.layers, found),
        *renamed_like(plan.attention, found),
    )
    chosen = [
        new for old, new in zip(asked, known, strict=True) if needed is None or old.name in needed
    ]
    verify_shapes(chosen, found, known)


def verify_shapes(
    layers: Sequence[Entry],
    found: Mapping[str, tuple[int, ...]],
    known: Sequence[Entry] = (),
) -> None:
    """Compares shapes of stored tensors with the plan; see `verify_headers`.

    Args:
        layers: Layers that must be stored.
        found: Shapes of all stored tensors.
        known: Layers that may be stored too.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for entry in layers:
        expected |= stored_tensors(entry)
    allowed = {name for entry in known for name in stored_tensors(entry)} | set(expected)
    problems = [f"`{name}` is missing" for name in expected if name not in found]
    problems += [
        f"`{name}` has shape {list(found[name])}, the plan says {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    problems += [
        f"`{name}` is not in the plan" for name in found if _MARK in name and name not in allowed
    ]
    if problems:
        more = len(problems) - _SHOWN
        lines = "\n".join(f"  - {problem}" for problem in problems[:_SHOWN])
        rest = f"\n  and {more} more" if more > 0 else ""
        raise ArtifactError(
            f"the weights do not fit the plan in `config.json`, {len(problems)} problems:\n"
            f"{lines}{rest}",
            "take `config.json` and the weights from one and the same conversion",
        )


# Writes safetensors shards one tensor at a time.
#
# All names, shapes and dtypes are known before the first value is, so a shard's header is written
# first and values follow as they are made: memory never holds more than one tensor, where
# `save_file` would need the whole shard.


_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class Stored:
    """A tensor that will be written.

    Attributes:
        key: Its name.
        shape: Its shape.
        dtype: Its dtype.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One weight file and what it holds, in the order in which it is written."""

    file: str
    tensors: tuple[Stored, ...]


def plan_shards(tensors: Sequence[Stored], largest: str) -> list[Shard]:
    """Distributes tensors over files.

    Args:
        tensors: What will be written, in the order in which it is made.
        largest: Largest file, such as `2GB`.
    """
    by_key = {item.key: item for item in tensors}
    meta = {item.key: torch.empty(item.shape, dtype=item.dtype, device="meta") for item in tensors}
    split = split_torch_state_dict_into_shards(
        meta, filename_pattern="model{suffix}.safetensors", max_shard_size=largest
    )
    return [
        # Wide elements first: every tensor then starts at a multiple of its element size.
        Shard(file, tuple(sorted((by_key[key] for key in keys), key=_descending_size)))
        for file, keys in split.filename_to_tensors.items()
    ]


def _descending_size(item: Stored) -> int:
    return -item.dtype.itemsize


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
    """Writes one shard beside its final name, then renames it.

    Args:
        folder: Folder of the shard.
        shard: What it holds.
        value: Makes the value of a tensor.
        written: Called with the bytes of every tensor written.

    Returns:
        SHA-256 of the file.
    """
    digest = hashlib.sha256()
    with beside(folder / shard.file) as other, other.open("xb") as file:
        for chunk in _chunks(shard, value, written):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _chunks(
    shard: Shard, value: Callable[[Stored], Tensor], written: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    header = _header(shard.tensors)
    yield len(header).to_bytes(8, "little")
    yield header
    for item in shard.tensors:
        tensor = value(item)
        if tuple(tensor.shape) != item.shape or tensor.dtype != item.dtype:
            raise TCompressError(
                f"`{item.key}` came out as {list(tensor.shape)} {tensor.dtype}, "
                f"planned were {list(item.shape)} {item.dtype}",
                "please report this",
            )
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield flat.numpy().data
        written(item.nbytes)


def _header(tensors: Iterable[Stored]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for item in tensors:
        stop = start + item.nbytes
        entries[item.key] = {
            "dtype": _NAMES[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
