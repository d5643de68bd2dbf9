"""What a converted model looks like on disk: names, versions, and how a plan is stored.

A folder holds the files of an ordinary Transformers model; `config.json` has a
`quantization_config` section with the plan, and `tcompress.json` is the manifest. Rewritten
layers store `tc_*` tensors and an empty tensor under the dense name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tcompress.errors import ArtifactError, RecipeError
from tcompress.planning.entries import LayerPlan
from tcompress.source.names import METHOD
from tcompress.structures.experts import CHILD_OF

FORMAT_VERSION = 1
MANIFEST = "tcompress.json"
CARD = "README.md"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def check_format_version(version: Any) -> None:
    """Refuses a format that is newer than this version of tcompress.

    Raises:
        ArtifactError: The version is not an integer from 1 to `FORMAT_VERSION`.
    """
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise ArtifactError(
            f"the model has format version `{version}`, this tcompress reads up to "
            f"{FORMAT_VERSION}",
            "upgrade: `pip install --upgrade tcompress`",
        )


def quantization_section(layers: Sequence[LayerPlan]) -> dict[str, Any]:
    """Returns the section of `config.json` from which the model is rebuilt."""
    dumped = [entry.model_dump(mode="json", exclude_defaults=True) for entry in layers]
    return {
        "quant_method": METHOD,
        "format_version": FORMAT_VERSION,
        "plan": {"layers": dumped},
    }


def parse_layers(plan: Mapping[str, Any]) -> tuple[LayerPlan, ...]:
    """Reads the plan back.

    Raises:
        ArtifactError: An entry is not understood; the message names it.
    """
    layers = []
    for index, entry in enumerate(plan.get("layers", ())):
        name = entry.get("name", index) if isinstance(entry, dict) else index
        try:
            layers.append(LayerPlan.model_validate(entry))
        except (ValidationError, RecipeError) as error:
            raise ArtifactError(
                f"the plan in `config.json` is damaged at layer `{name}`: {error}",
                "convert the model again, or take `config.json` from a good copy",
            ) from error
    return tuple(layers)


def stored_tensors(entry: LayerPlan) -> dict[str, tuple[int, ...]]:
    """Names, in the checkpoint, and shapes of what a rewritten layer stores, biases left out."""
    if entry.kind != "experts":
        names = dict(entry.tensor_shapes)
        names["weight"] = (0,)
    else:
        child = CHILD_OF[entry.parameter]
        names = {f"{child}.{name}": shape for name, shape in entry.tensor_shapes.items()}
        names[entry.parameter] = (0,)
    return {f"{entry.name}.{name}": shape for name, shape in names.items()}


def renamed_like(layers: Sequence[LayerPlan], keys: Collection[str]) -> tuple[LayerPlan, ...]:
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


def _moved(layer: LayerPlan, lost: str, gained: str) -> LayerPlan:
    names = {"name": layer.name, "block": layer.block, "input_of": layer.input_of}
    moved = {field: gained + name.removeprefix(lost) for field, name in names.items() if name}
    banks = {bank: gained + name.removeprefix(lost) for bank, name in layer.bank_of.items()}
    return layer.model_copy(update={**moved, "bank_of": banks})
