"""Strict comparison of stored tensors with the plan, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from safetensors import SafetensorError, safe_open

from tcompress.artifact.format import Entry, Rebuilt, renamed_like, stored_tensors
from tcompress.errors import ArtifactError

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
