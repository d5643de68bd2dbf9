"""A folder that ONNX Runtime, sentence-transformers and transformers.js open: the whole way."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tcompress
from tcompress.artifact.checksums import seal
from tcompress.artifact.manifest import (
    CalibrationFacts,
    ExportedFile,
    Manifest,
    SourceFacts,
    environment,
    read_manifest,
    write_manifest,
)
from tcompress.artifact.reader import open_checked
from tcompress.artifact.workplace import Workplace, check_output, identity_of
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import DataError
from tcompress.exports.onnx_graph import LARGEST_FILE, write_graph
from tcompress.exports.onnx_parts import Part, parts_of
from tcompress.exports.onnx_proof import Proof, runtime_versions
from tcompress.exports.onnx_quantize import quantize_int4, quantize_int8
from tcompress.hf.opening import load_model
from tcompress.models import SourceModel
from tcompress.models.names import CARD, carry_files
from tcompress.options.commands import OnnxFiles
from tcompress.planning.entries import Plan
from tcompress.progress import Progress, Silent
from tcompress.runtimes.onnx_session import OnnxModel, require_onnx

FOLDER = "onnx"
"""Folder inside that of a model, where libraries look for ONNX files."""
SUFFIXES = {32: "", 8: "_int8", 4: "_q4"}
"""Ends of names of files by bits of weights, as transformers.js has them."""


@dataclass(frozen=True)
class ExportedOnnx:
    """What was written."""

    folder: Path
    files: tuple[ExportedFile, ...]
    notes: tuple[str, ...] = ()


def export_onnx(
    model: Path | str,
    output: Path | str,
    settings: OnnxFiles | None = None,
    *,
    force: bool = False,
    token: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> ExportedOnnx:
    """Writes a model's folder with ONNX files in it, each compared with PyTorch before.

    Args:
        model: A converted or dense model: folder, short name or hub id.
        output: Folder to write; it appears only when everything is finished. That of the model
            itself gets the files too.
        settings: Which files.
        force: Replace a folder that is not empty.
        token: Access token for the hub.
        trust_remote_code: Whether Python code that comes with the model may run.
        progress: Hears how far it is.

    Returns:
        The written folder, and what was measured of each file.

    Raises:
        InputError: Something given cannot be used, or the model cannot be exported.
        WriteError: A file computes something else than the model in PyTorch.
    """
    require_onnx()
    settings, progress = settings or OnnxFiles(), progress or Silent()
    output = Path(output).expanduser().absolute()
    source = open_checked(str(model), token=token, trust=trust_remote_code)
    inside = output.exists() and output.samefile(source.origin or source.folder)
    force = force or inside
    check_output(output, force=force)
    identity = identity_of(
        {
            "export": "onnx",
            "settings": settings.model_dump(mode="json"),
            "weights": source.store.fingerprint(),
            "tool": tcompress.__version__,
            **runtime_versions(),
        }
    )
    place = Workplace(output, identity, force=force)
    with place.working(lambda error: False):
        place.need(3 * source.store.total_bytes)
        _carry(source, place.model, whole=inside)
        files, notes = write_onnx_files(source, place.model, settings, progress)
        _record(source, place.model, files)
        place.publish(force=force)
    return ExportedOnnx(output, files, notes)


def _carry(source: SourceModel, folder: Path, *, whole: bool) -> None:
    """Put the files of a model beside what is written; `config.json` comes last, with the rest."""
    shutil.rmtree(folder)
    if whole:
        skipped = shutil.ignore_patterns(FOLDER, "config.json")
        shutil.copytree(source.folder, folder, ignore=skipped, copy_function=_linked)
        return
    folder.mkdir()
    weights = {*source.store.files, *(p.name for p in source.folder.glob("*.index.json"))}
    for name in sorted(weights):
        _linked(source.folder / name, folder / name)
    carry_files(source.folder, source.auxiliary_files(), folder)
    for name in (CARD, "tcompress.json"):
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)


def _linked(path: Any, target: Any) -> Any:
    try:
        os.link(path, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(path, target)
    return target


def write_onnx_files(
    source: SourceModel, folder: Path, settings: OnnxFiles, progress: Progress | None = None
) -> tuple[tuple[ExportedFile, ...], tuple[str, ...]]:
    """Write a model's ONNX files into `onnx/` of a folder; give their measurements, and notes."""
    progress = progress or Silent()
    model = _opened(source)
    notes: list[str] = []
    encoder = _encoder(source, settings, notes)
    target = folder / FOLDER
    target.mkdir()
    found: list[ExportedFile] = []
    parts = parts_of(source, model, encoder)
    progress.stage("exporting", len(parts) * len(settings.bits_of_files), "files")
    for part in parts:
        found += _write_part(part, target, settings, progress)
    return tuple(found), tuple(notes)


def _opened(source: SourceModel) -> Any:
    """Load a model with the ways of attention and experts that are plain products."""
    ways = {"attn_implementation": "eager"}
    if source.model_class._can_set_experts_implementation():
        ways["experts_implementation"] = "batched_mm"
    return load_model(source, dtype=torch.float32, **ways)


def _write_part(
    part: Part, folder: Path, settings: OnnxFiles, progress: Progress
) -> list[ExportedFile]:
    path = folder / f"{part.file}.onnx"
    proof = Proof.of(part)
    write_graph(part, path)
    external = _bytes_of(path) > LARGEST_FILE
    found = []
    for bits in settings.bits_of_files:
        file, left = folder / f"{part.file}{SUFFIXES[bits]}.onnx", ()
        if bits == 8:
            left = quantize_int8(path, file, external)
        elif bits == 4:
            left = quantize_int4(path, file, external)
        opened, name = OnnxModel.open(file), f"{FOLDER}/{file.name}"
        found.append(proof.facts(opened, name, bits, _bytes_of(file), left))
        progress.advance(1, file.name)
    return found


def _bytes_of(path: Path) -> int:
    """Bytes of a file, and of the weights beside it."""
    return sum(item.stat().st_size for item in path.parent.glob(f"{path.name}*"))


def _encoder(source: SourceModel, settings: OnnxFiles, notes: list[str]) -> SentenceEncoder | None:
    """Read how a sentence encoder pools, where embeddings are to be an output."""
    if settings.sentence_embedding is False:
        return None
    try:
        encoder = SentenceEncoder.of(source)
    except DataError as error:
        if settings.sentence_embedding:
            raise
        notes.append(f"without `sentence_embedding`: {error.message}")
        return None
    return encoder if encoder.stated or settings.sentence_embedding else None


def _record(source: SourceModel, folder: Path, files: tuple[ExportedFile, ...]) -> None:
    """Write what was measured into the manifest, and `config.json`, which makes it loadable."""
    manifest = read_manifest(folder) or Manifest(
        source=SourceFacts(
            id=source.id,
            revision=source.revision,
            fingerprint=source.store.fingerprint(),
            bytes=source.store.total_bytes,
        ),
        recipe={},
        plan=Plan(layers=(), source=source.id, method="dense"),
        calibration=CalibrationFacts(name="none"),
        fit={},
        checksums={},
        seconds=0.0,
        environment=environment(),
    )
    config = (source.folder / "config.json").read_bytes()
    sealed = seal(folder, manifest.checksums, {"config.json": config})
    write_manifest(folder, manifest.model_copy(update={"exports": list(files), **sealed}))
    (folder / "config.json").write_bytes(config)
