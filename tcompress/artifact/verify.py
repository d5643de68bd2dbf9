"""Strict comparison of stored tensors with the plan, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from safetensors import SafetensorError, safe_open

from tcompress.artifact.format import Entry, renamed_like, stored_tensors
from tcompress.errors import ArtifactError
from tcompress.planning.entries import AttentionPlan, LayerPlan

_SHOWN = 12
_MARK = ".tc_"


def verify_headers(
    layers: Sequence[LayerPlan],
    files: Sequence[str],
    needed: Collection[str] | None = None,
    attention: Sequence[AttentionPlan] = (),
) -> None:
    """Compares the headers of weight files with the plan.

    Args:
        layers: The plan.
        files: Weight files; others than safetensors are left to Transformers.
        needed: Names of the layers and attentions that must be there; default all.
        attention: Attentions with another mechanism.

    Raises:
        ArtifactError: Tensors are missing, unexpected or misshapen: all of them are named.
    """
    files = [file for file in files if file.endswith(".safetensors")]
    if files:
        found = _shapes(files)
        asked: tuple[Entry, ...] = (*layers, *attention)
        known: tuple[Entry, ...] = (
            *renamed_like(layers, found),
            *renamed_like(attention, found),
        )
        chosen = [
            new
            for old, new in zip(asked, known, strict=True)
            if needed is None or old.name in needed
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


def _shapes(files: Sequence[str]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as shard:
                for key in shard.keys():  # noqa: SIM118 - not a mapping
                    shapes[key] = tuple(shard.get_slice(key).get_shape())
        except (SafetensorError, OSError) as error:
            raise ArtifactError(
                f"`{file}` cannot be read: {error}", "copy or convert the model again"
            ) from error
    return shapes
