"""Strict reading of a converted model's folder: what it says must be what it holds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tcompress.artifact.format import (
    check_format_version,
    parse_attention,
    parse_forms,
    parse_layers,
    renamed_like,
)
from tcompress.artifact.manifest import Manifest, read_manifest
from tcompress.artifact.shards import digest_of
from tcompress.artifact.verify import verify_shapes
from tcompress.errors import ArtifactError, InputError
from tcompress.planning.entries import AttentionPlan, FormPlan, LayerPlan
from tcompress.source.names import METHOD
from tcompress.source.store import WeightStore

_AGAIN = "copy the folder again, or convert the model again"

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Artifact:
    """A converted model on disk. Use `Artifact.open`.

    Attributes:
        folder: Its folder.
        config: Content of `config.json`.
        layers: The rewritten layers, from `config.json`, named as in the weight files.
        attention: The attentions that have another mechanism, likewise.
        forms: Other modules that have another form, likewise.
        manifest: Content of `tcompress.json`; None if the model was saved again elsewhere.
        store: Its weights, of which only the headers were read.
    """

    folder: Path
    config: dict[str, Any] = field(repr=False)
    layers: tuple[LayerPlan, ...] = field(repr=False)
    attention: tuple[AttentionPlan, ...] = field(repr=False)
    forms: tuple[FormPlan, ...] = field(repr=False)
    manifest: Manifest | None = field(repr=False)
    store: WeightStore = field(repr=False)

    @classmethod
    def open(cls, folder: Path | str) -> Artifact:
        """Opens a converted model and compares its weight files with its plan.

        Args:
            folder: Folder of the model.

        Raises:
            ArtifactError: There is no converted model, its format is newer than this tcompress,
                or it is damaged; all damages are in one error.
        """
        folder = Path(folder).expanduser()
        config = _read_config(folder)
        section = _section(config)
        if section is None:
            if (manifest := read_manifest(folder)) is not None and manifest.plan.depth:
                raise ArtifactError(
                    f"`{folder}` has fewer blocks than its source, but no rewritten layer: it is a "
                    "plain model already",
                    "use it as it is; it needs no tcompress",
                )
            raise ArtifactError(
                f"`{folder}` is a model that was not converted by tcompress",
                f"convert it first: `tcompress convert {shlex.quote(str(folder))}`",
            )
        # Nothing more can be said of a format that is not known.
        check_format_version(section.get("format_version"))
        problems: list[InputError] = []
        layers = _attempt(problems, lambda: parse_layers(_plan_of(section)))
        attention = _attempt(problems, lambda: parse_attention(section.get("plan") or {}))
        forms = _attempt(problems, lambda: parse_forms(section.get("plan") or {}))
        store = _attempt(problems, lambda: WeightStore.open(folder))
        manifest = _attempt(problems, lambda: read_manifest(folder))
        plan = None if manifest is None else manifest.plan
        read = layers is not None and attention is not None and forms is not None
        if (
            read
            and plan
            and (plan.entries, plan.attention, plan.forms)
            != (
                layers,
                attention,
                forms,
            )
        ):
            problems.append(
                ArtifactError("`tcompress.json` and `config.json` hold different plans", _AGAIN)
            )
        if layers is not None and attention is not None and store is not None:
            names = store.keys()
            shapes = {key: tuple(store.shape(key)) for key in names}
            layers, attention = renamed_like(layers, shapes), renamed_like(attention, shapes)
            _attempt(problems, partial(verify_shapes, (*layers, *attention), shapes))
        if problems or layers is None or attention is None or forms is None or store is None:
            raise _joined(folder, problems)
        return cls(folder, config, layers, attention, forms, manifest, store)

    def verify_checksums(self) -> None:
        """Reads all weight files and compares their SHA-256 with the manifest.

        Raises:
            ArtifactError: A file differs, is missing or was added, or there is no manifest.
        """
        if self.manifest is None:
            raise ArtifactError(
                f"`{self.folder}` has no `tcompress.json`, so there are no checksums to compare",
                "only the folder that `tcompress convert` wrote has them",
            )
        wanted = self.manifest.checksums
        problems = [f"`{name}` is missing" for name in wanted if name not in self.store.files]
        problems += [
            f"`{name}` is not in `tcompress.json`"
            if name not in wanted
            else f"`{name}` differs from its checksum"
            for name in self.store.files
            if digest_of(self.folder / name) != wanted.get(name)
        ]
        if problems:
            raise ArtifactError(
                f"the weights in `{self.folder}` are not those that were written: "
                + "; ".join(problems),
                "expected after training in place; otherwise " + _AGAIN,
            )


def is_converted(folder: Path | str) -> bool:
    """Tells whether a folder holds a model that tcompress converted."""
    try:
        return _section(_read_config(Path(folder).expanduser())) is not None
    except ArtifactError:
        return False


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not folder.is_dir():
        raise ArtifactError(f"there is no folder `{folder}`", "check the path")
    if not path.is_file():
        raise ArtifactError(
            f"`{folder}` has no `config.json`", "give the folder that `tcompress convert` wrote"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"`{path}` is no valid JSON ({error})", _AGAIN) from error
    if not isinstance(config, dict):
        raise ArtifactError(f"`{path}` holds a {type(config).__name__}, expected an object", _AGAIN)
    return config


def _section(config: dict[str, Any]) -> dict[str, Any] | None:
    section = config.get("quantization_config")
    if isinstance(section, dict) and section.get("quant_method") == METHOD:
        return section
    return None


def _plan_of(section: dict[str, Any]) -> dict[str, Any]:
    plan = section.get("plan")
    if not isinstance(plan, dict) or not isinstance(plan.get("layers"), list):
        raise ArtifactError("`quantization_config` in `config.json` has no plan", _AGAIN)
    return plan


def _attempt(problems: list[InputError], step: Callable[[], T]) -> T | None:
    try:
        return step()
    except InputError as error:
        problems.append(error)
        return None


def _joined(folder: Path, problems: list[InputError]) -> ArtifactError:
    if len(problems) == 1:
        return ArtifactError(problems[0].message, problems[0].hint)
    lines = "".join(f"\n  - {problem.message}" for problem in problems)
    return ArtifactError(
        f"the converted model in `{folder}` is damaged, {len(problems)} problems:{lines}", _AGAIN
    )
