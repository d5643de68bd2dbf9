"""Keeping times in the manifest of the model that they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tcompress.artifact.manifest import Speed, read_manifest, write_manifest

_SAME = ("device", "device_name", "dtype", "threads", "kept_weights_bytes")


def save_speed(folder: Path, found: Iterable[Speed]) -> bool:
    """Adds times to a manifest; those of the same pass on the same machine are replaced.

    Args:
        folder: Folder of the model.
        found: The times.

    Returns:
        Whether there is a manifest that can be written.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    new = list(found)
    replaced = {_key(speed) for speed in new}
    kept = [speed for speed in manifest.speed if _key(speed) not in replaced]
    try:
        write_manifest(folder, manifest.model_copy(update={"speed": [*kept, *new]}))
    except OSError:  # models are often kept where they cannot be changed
        return False
    return True


def _key(speed: Speed) -> tuple[object, ...]:
    return (
        speed.batch,
        speed.length,
        speed.mode,
        speed.baseline,
        *(str(speed.protocol.get(name)) for name in _SAME),
    )
