"""What a converted model looks like on disk: names, versions, and how a plan is stored.

A folder holds the files of an ordinary Transformers model; `config.json` has a
`quantization_config` section with the plan, and `tcompress.json` is the manifest. Rewritten
layers store `tc_*` tensors and an empty tensor under the dense name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from tcompress.errors import ArtifactError
from tcompress.planning.entries import AttentionPlan, FormPlan, LayerPlan
from tcompress.source.keymap import FACTOR_PREFIX
from tcompress.source.names import CALLED
from tcompress.source.names import CARD as CARD
from tcompress.source.names import FORMAT_VERSION as FORMAT_VERSION
from tcompress.source.names import MANIFEST as MANIFEST
from tcompress.source.text import first_line, listed
from tcompress.structures.experts import child_of

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
