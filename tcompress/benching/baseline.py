"""The dense model that a converted one is timed against."""

from __future__ import annotations

from pathlib import Path

from tcompress.artifact.manifest import Manifest, read_manifest
from tcompress.artifact.reader import open_checked
from tcompress.errors import InputError
from tcompress.source import ALIASES, SourceModel
from tcompress.source.names import local_folder


def baseline_of(model: SourceModel, trust_remote_code: bool = False) -> tuple[str, SourceModel]:
    """Opens the model that the manifest names, without downloading anything.

    Args:
        model: A converted model.
        trust_remote_code: Whether Python code that comes with the baseline may run.

    Returns:
        Its name as the manifest has it, and the model.

    Raises:
        InputError: There is no manifest, the model is not here, or it has changed.
    """
    manifest = read_manifest(model.folder)
    if manifest is None:
        raise InputError(
            f"nothing says which dense model `{model.id}` is to be compared with",
            "name it with `--against`",
        )
    if manifest.source.init == "random":  # what it computes does not matter for its time
        dense = SourceModel.open(
            str(model.folder),
            trust_remote_code=trust_remote_code,
            converted=True,
            seed=manifest.source.seed,
        )
        return "dense, at random", dense
    name, folder = manifest.source.id, _folder(manifest)
    if folder is None:
        raise InputError(
            f"`{model.id}` was made from `{name}`, which is not on this machine",
            "name it with `--against`: a folder, or a hub id to download",
        )
    source = open_checked(str(folder), trust=trust_remote_code)
    if source.store.fingerprint() != manifest.source.fingerprint:
        raise InputError(
            f"`{folder}` no longer holds the weights that `{model.id}` was made from",
            f"to compare all the same, say `--against {folder}`",
        )
    return name, source


def _folder(manifest: Manifest) -> Path | None:
    """Finds a local folder, or the snapshot in the hub's cache."""
    name = manifest.source.id
    if (folder := local_folder(name)) is not None:
        return folder
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                ALIASES.get(name, name),
                revision=manifest.source.revision,
                local_files_only=True,
            )
        )
    except Exception:
        # The hub client raises errors of unrelated classes; all mean that it is not there.
        return None
