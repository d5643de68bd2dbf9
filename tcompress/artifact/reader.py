"""Strict reading of a converted model's folder: what it says must be what it holds."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tcompress.artifact.checksums import (
    AGAIN,
    check_format_version,
    digest_of,
    files_in,
    read_converted_config,
)
from tcompress.artifact.format import parse_plan, verify_shapes
from tcompress.artifact.manifest import Manifest, read_manifest
from tcompress.errors import ArtifactError, InputError, Problems, after_colon
from tcompress.models import SourceModel, resolve
from tcompress.models.names import MANIFEST, REWRITTEN, own_section
from tcompress.models.store import WeightStore
from tcompress.planning.entries import AttentionPlan, FormPlan, LayerPlan, Storage


@dataclass(frozen=True, eq=False)
class Artifact:
    """A converted model on disk. Use `Artifact.open`."""

    folder: Path
    config: dict[str, Any] = field(repr=False)  # content of `config.json`
    # Its plan of layers, attentions and other modules, named as in the weight files.
    layers: tuple[LayerPlan, ...] = field(repr=False)
    attention: tuple[AttentionPlan, ...] = field(repr=False)
    forms: tuple[FormPlan, ...] = field(repr=False)
    manifest: Manifest | None = field(repr=False)  # None if the model was saved again elsewhere
    store: WeightStore = field(repr=False)

    @property
    def storage(self) -> Storage | None:
        """Bits that tensors were rounded to, as `config.json` has it."""
        section = (own_section(self.config) or {}).get("storage")
        return None if section is None else Storage.model_validate(section)

    @classmethod
    def open(cls, folder: Path | str) -> Artifact:
        """Open a converted model and compare its weight files with its plan.

        All damages are in one `ArtifactError`.
        """
        folder = Path(folder).expanduser()
        config = read_converted_config(folder, strict=True)
        section = own_section(config)
        if section is None:
            raise _not_converted(folder)
        # Nothing more can be said of a format that is not known.
        check_format_version(section.get("format_version"))
        problems = Problems()
        store = manifest = plan = None
        with problems.collected():
            store = WeightStore.open(folder)
        with problems.collected():
            manifest = read_manifest(folder)
        with problems.collected():
            plan = parse_plan(section, manifest.rebuilt if manifest else None)
        if plan is not None and store is not None:
            shapes = {key: store.shape(key) for key in store.keys()}  # noqa: SIM118
            plan = plan.renamed(shapes)
            with problems.collected():
                verify_shapes(plan.entries, shapes)
        if problems.found or plan is None or store is None:
            raise _joined(folder, problems.found)
        return cls(folder, config, plan.layers, plan.attention, plan.forms, manifest, store)


def _not_converted(folder: Path) -> ArtifactError:
    if (manifest := read_manifest(folder)) is not None and manifest.plan.compresses:
        return ArtifactError(
            f"`{folder}` is smaller than its source, but says so in its own config: it is a plain "
            "model already",
            "use it as it is; it needs no tcompress",
        )
    hint = f"convert it first: `tcompress convert {shlex.quote(str(folder))}`"
    return ArtifactError(f"`{folder}` is a model that was not converted by tcompress", hint)


@dataclass(frozen=True)
class Verified:
    """Files compared with the checksums of a manifest, and `others`, which it does not know."""

    files: int
    bytes: int
    others: tuple[str, ...]


def verify_files(folder: Path) -> Verified:
    """Compare all files of a model that tcompress wrote with its manifest; an error names all."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise ArtifactError(
            f"`{folder}` has no `{MANIFEST}`, so there are no checksums to compare",
            "only the folders that `tcompress convert` and `tcompress finetune` write have them",
        )
    _compare(folder, manifest, card=True)
    names = [*manifest.checksums, *([MANIFEST] if manifest.digest else [])]
    names = [name for name in names if name not in REWRITTEN or (folder / name).is_file()]
    size = sum((folder / name).stat().st_size for name in names)
    others = [name for name in files_in(folder) if name not in manifest.checksums]
    return Verified(len(names), size, tuple(others))


def check_files(folder: Path) -> Artifact | None:
    """Compare files with the manifest, if any, before use; return a converted model, else None."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return _compare(folder, manifest)
    return Artifact.open(folder) if is_converted(folder) else None


def open_checked(
    name: str,
    token: str | None = None,
    trust: bool = False,
    *,
    converted: bool = True,
    **options: Any,
) -> SourceModel:
    """Open a dense or converted model to use it; arguments as for `SourceModel.open`.

    Where none may be `converted`, such a model is a `SourceError`.
    """
    check_files(resolve(name, token=token))
    options |= {"trust_remote_code": trust, "converted": converted}
    return SourceModel.open(name, token=token, **options)


def _compare(folder: Path, manifest: Manifest, *, card: bool = False) -> Artifact | None:
    """Compare a folder with its manifest; the converted model, None for one that is plain."""
    weights: list[str] = []
    with contextlib.suppress(InputError):  # what is wrong with them is in the checksums
        weights = WeightStore.open(folder).files if manifest.checksums else []
    problems = _damages(folder, manifest, weights, card)
    if problems:
        raise ArtifactError(
            f"`{folder}` is not as it was written: {'; '.join(problems)}",
            f"{AGAIN}; if you changed it on purpose, delete `{folder / MANIFEST}`, which "
            "describes what was there before",
        )
    if is_converted(folder):
        return Artifact.open(folder)
    if manifest.plan.changes_model:
        raise ArtifactError(
            f"`config.json` in `{folder}` has no plan, but `{MANIFEST}` says that the model was "
            "converted",
            AGAIN,
        )
    return None


def _damages(folder: Path, manifest: Manifest, weights: list[str], card: bool) -> list[str]:
    """List files that are missing, unknown or not as the manifest says; older ones have no sizes.

    Card and page, which people rewrite and downloads leave out, are compared only with `card`, and
    where they are there; files of `weights` must have a checksum.
    """
    checksums, sizes = manifest.checksums, manifest.sizes
    names = [n for n in checksums if n not in REWRITTEN or (card and (folder / n).exists())]
    damages = (_damage(folder, name, checksums[name], sizes.get(name)) for name in names)
    unknown = [f"`{name}` is not in `{MANIFEST}`" for name in weights if name not in checksums]
    return unknown + [damage for damage in damages if damage is not None]


def _damage(folder: Path, name: str, checksum: str, size: int | None) -> str | None:
    path, parts = folder / name, PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name:
        return f"`{MANIFEST}` names `{name}`, outside the folder"
    try:
        if not path.is_file():
            return f"`{name}` is missing"
        if size not in (None, path.stat().st_size):
            return f"`{name}` has {path.stat().st_size} bytes, written were {size}"
        return None if digest_of(path) == checksum else f"`{name}` differs from its checksum"
    except OSError as error:
        return f"`{name}` cannot be read ({error.strerror})"


def is_converted(folder: Path | str) -> bool:
    """True where a folder holds a model that tcompress converted."""
    try:
        return own_section(read_converted_config(Path(folder).expanduser())) is not None
    except ArtifactError:
        return False


def _joined(folder: Path, problems: list[InputError]) -> ArtifactError:
    if len(problems) == 1:
        return ArtifactError(problems[0].message, problems[0].hint)
    many = f"{len(problems)} problems:{after_colon([problem.message for problem in problems])}"
    return ArtifactError(f"the converted model in `{folder}` is damaged, {many}", AGAIN)
