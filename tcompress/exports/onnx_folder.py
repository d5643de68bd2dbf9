"""A folder that ONNX Runtime, OpenVINO and what stands on them open: the whole way, and back.

`RuntimeFiles` opens models in ONNX Runtime: from the files in their folders, or from new ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tcompress
from tcompress.artifact.averages import main_of, set_of
from tcompress.artifact.checksums import seal
from tcompress.artifact.manifest import (
    ExportedFile,
    Metric,
    manifest_of_dense,
    read_manifest,
    write_manifest,
)
from tcompress.artifact.reader import open_checked
from tcompress.artifact.workplace import Workplace, check_apart, check_output, identity_of
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import DataError, InputError, first_line, read_settings
from tcompress.exports.dense import export_dense
from tcompress.exports.onnx_graph import LARGEST_FILE, expressible, write_graph
from tcompress.exports.onnx_parts import parts_of
from tcompress.exports.onnx_proof import Proof, runtime_versions, samples_of
from tcompress.exports.onnx_quantize import quantize_int4, quantize_int8
from tcompress.exports.onnx_smooth import activations_of, smooth
from tcompress.fields import ExportFormat, RuntimeName
from tcompress.files import second_name, write_text
from tcompress.hf.opening import load_model
from tcompress.models import SourceModel
from tcompress.models.names import (
    CARD,
    MANIFEST,
    carry_files,
    forget_code,
    name_of,
    without_code,
)
from tcompress.options.commands import OnnxFiles
from tcompress.progress import Progress, Silent
from tcompress.runtimes.installed import require
from tcompress.runtimes.sessions import OnnxModel, OnnxModule, OpenvinoModel, bytes_of

FOLDER = "onnx"
"""Folder inside that of a model where libraries look for ONNX files."""
SUFFIXES = {32: "", 8: "_int8", 4: "_q4"}
"""Ends of names of files by bits of weights, as transformers.js has them."""
_CONFIG = "config.json"


@dataclass(frozen=True)
class ExportedOnnx:
    """Written folder, its files, and doubts that the user should know of."""

    folder: Path
    files: tuple[ExportedFile, ...]
    notes: tuple[str, ...] = ()


def export_onnx(
    model: Path | str,
    output: Path | str,
    settings: OnnxFiles | None = None,
    *,
    to: ExportFormat = "onnx",
    force: bool = False,
    token: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> ExportedOnnx:
    """Do what `api.export_onnx` says, with settings in place of options."""
    settings, progress = settings or OnnxFiles(), progress or Silent()
    require(to)
    settings.refuse_bits(to)
    output = Path(output).expanduser().absolute()
    source = open_checked(name_of(model), token=token, trust=trust_remote_code)
    origin = source.origin or source.folder
    inside = output.is_dir() and output.samefile(origin)
    force = force or inside
    if not inside:
        check_apart(output, origin, "the model itself")
    check_output(output, force=force)
    identity = identity_of(
        {
            "export": to,
            "settings": settings.model_dump(mode="json"),
            "weights": source.store.fingerprint(),
            "tool": tcompress.__version__,
            **runtime_versions(to),
        }
    )
    place = Workplace(output, identity, force=force)
    with place.working(lambda error: False):
        if place.published:  # a kill came after it
            place.discard()
            manifest = read_manifest(output)
            written = manifest.exports if manifest else ()
            return ExportedOnnx(output, tuple(f for f in written if f.file.startswith(f"{to}/")))
        place.need((2 + len(settings.bits_of_files)) * source.store.total_bytes)
        _carry(source, place.model, output if inside else None, to)
        files, notes = _write_files(source, place, settings, to, progress)
        _record(source, place.model, files, to)
        if inside:
            _lead_out(output, place.model, from_copy=False)
        place.publish(force=force)
    return ExportedOnnx(output, files, notes)


def _carry(source: SourceModel, folder: Path, whole: Path | None, to: ExportFormat) -> None:
    """Put the files of a model beside what is written, but for `config.json`, which comes last.

    Of a `whole` folder all is kept, whatever it is, but for older files of the same kind.
    """
    shutil.rmtree(folder)
    if whole is not None:
        top = os.fspath(whole)
        shutil.copytree(
            whole,
            folder,
            ignore=lambda inside, _: {to, _CONFIG} if os.fspath(inside) == top else set(),
            copy_function=second_name,
            symlinks=True,
        )
        _lead_out(whole, folder, from_copy=True)
        return
    folder.mkdir()
    patterns = ("*.index.json", CARD, MANIFEST)
    others = (path.name for pattern in patterns for path in source.folder.glob(pattern))
    for name in sorted({*source.store.files, *others}):
        shutil.copyfile(source.folder / name, folder / name)
    carry_files(source.folder, source.auxiliary_files(), folder)
    if not source.trust_remote_code:
        forget_code(folder)


def _lead_out(whole: Path, folder: Path, *, from_copy: bool) -> None:
    """Make links out of a folder work in its copy, which lies deeper; or be as they were."""
    for path in whole.rglob("*"):
        copy = folder / path.relative_to(whole)
        if copy.is_symlink() and path.is_symlink():
            target = path.resolve()
            if not target.is_relative_to(whole.resolve()):
                copy.unlink()
                copy.symlink_to(target if from_copy else path.readlink())


def _write_files(
    source: SourceModel, place: Workplace, settings: OnnxFiles, to: ExportFormat, progress: Progress
) -> tuple[tuple[ExportedFile, ...], tuple[str, ...]]:
    """Write all files, and compare each with PyTorch."""
    if settings.dense:
        dense = export_dense(source.folder, place.folder / "dense", force=True, progress=progress)
        source = open_checked(str(dense))
    encoder, notes = _encoder(source, settings)
    (place.model / to).mkdir()
    files: list[ExportedFile] = []
    proofs = proofs_of(source, encoder, samples_of(source))
    progress.stage("exporting", len(proofs) * len(settings.bits_of_files), "files")
    for proof in proofs:
        if to == "onnx":
            files += _write_part(proof, place.model, settings, progress)
        else:
            files.append(_write_openvino_part(proof, place, progress))
    return tuple(files), notes


def proofs_of(
    source: SourceModel,
    encoder: SentenceEncoder | None = None,
    batches: Sequence[dict[str, Tensor]] = (),
) -> list[Proof]:
    """Load a model, and run the parts of it that become files; an `InputError` names its class.

    Attention and experts are computed in the way that is plain products.
    """
    ways: dict[str, Any] = {"attn_implementation": "eager"}
    if source.model_class._can_set_experts_implementation():
        ways["experts_implementation"] = "batched_mm"
    model = load_model(source, dtype=torch.float32, **ways)
    with expressible(model):
        return [Proof.of(part.eval(), batches) for part in parts_of(source, model, encoder)]


def _write_part(
    proof: Proof, folder: Path, settings: OnnxFiles, progress: Progress
) -> list[ExportedFile]:
    name = proof.part.file
    path = folder / FOLDER / f"{name}.onnx"
    write_graph(proof.part, path)
    external = bytes_of(path) > LARGEST_FILE
    found = []
    for bits in settings.bits_of_files:
        file = path.with_name(f"{name}{SUFFIXES[bits]}.onnx")
        left: tuple[str, ...] = ()
        if bits == 8:
            options: dict[str, Any] = {"table_bits": settings.embedding_bits, "external": external}
            if not external:  # memory would hold it twice
                activations = activations_of(path, [inputs for inputs, _ in proof.samples])
                options["prepare"] = partial(smooth, activations=activations)
            left = quantize_int8(path, file, **options)
        elif bits == 4:
            left = quantize_int4(path, file, external=external)
        found.append(proof.facts(OnnxModel.open(file), bits, left))
        progress.advance(1, file.name)
    return found


def _write_openvino_part(proof: Proof, place: Workplace, progress: Progress) -> ExportedFile:
    """Write a part by way of an ONNX file, which is not kept.

    Names begin as optimum and sentence-transformers look for them. An `InputError` says that
    OpenVINO has no form for an operator.
    """
    import openvino

    name = proof.part.file
    target = place.model / "openvino" / f"openvino_{name}.xml"
    with tempfile.TemporaryDirectory(dir=place.folder) as scratch:
        graph = Path(scratch) / f"{name}.onnx"
        write_graph(proof.part, graph)
        try:
            # `convert_model` does the same, and reports to its authors over the network.
            model = openvino.Core().read_model(graph)
        except Exception as error:  # of classes that OpenVINO does not document
            raise InputError(
                f"OpenVINO {openvino.__version__} cannot read the ONNX file of this model "
                f"({first_line(error)})",
                "use `--to onnx`",
            ) from error
        openvino.save_model(model, target, compress_to_fp16=False)
    facts = proof.facts(OpenvinoModel.open(target), 32)
    progress.advance(1, target.name)
    return facts


def _encoder(
    source: SourceModel, settings: OnnxFiles
) -> tuple[SentenceEncoder | None, tuple[str, ...]]:
    """Read how a sentence encoder pools, where embeddings are to be an output."""
    if settings.sentence_embedding is False:
        return None, ()
    try:
        encoder = SentenceEncoder.of(source)
        if not encoder.stated and settings.sentence_embedding:
            text = f"`{source.id}` has no `modules.json` that says how it pools"
            raise DataError(text, "leave `--sentence-embedding` out")
        return (encoder if encoder.stated else None), ()
    except DataError as error:
        if settings.sentence_embedding:
            raise
        return None, (f"no output `sentence_embedding`: {error.message}",)


def _record(
    source: SourceModel, folder: Path, files: Sequence[ExportedFile], to: ExportFormat
) -> None:
    """Write what was measured into card and manifest, and `config.json`, which makes it load."""
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    for kind in _HEADINGS:
        if not (folder / kind).is_dir():  # of a folder that came with a table, but not its files
            text = without_files(text, kind)
    write_text(card, with_files(text, files, to))
    manifest = read_manifest(folder) or manifest_of_dense(source)
    older = (item for item in manifest.exports if not item.file.startswith(f"{to}/"))
    kept = [item for item in older if (folder / item.file).is_file()]
    settings = read_settings(source.folder / _CONFIG)
    settings = settings if source.trust_remote_code else without_code(settings)
    config = json.dumps(settings, indent=2) + "\n"
    sealed = seal(folder, None, {_CONFIG: config.encode()})
    write_manifest(folder, manifest.model_copy(update={"exports": [*kept, *files], **sealed}))
    write_text(folder / _CONFIG, config)


_HEADINGS: dict[ExportFormat, str] = {"onnx": "## ONNX files", "openvino": "## OpenVINO files"}
_RUNTIMES: dict[ExportFormat, str] = {"onnx": "ONNX Runtime", "openvino": "OpenVINO in float32"}
_READERS: dict[ExportFormat, str] = {
    "onnx": 'ONNX Runtime, sentence-transformers (`backend="onnx"`), optimum and transformers.js '
    "open these files without tcompress: each needs but the file, `config.json` and the "
    "tokenizer.",
    "openvino": 'OpenVINO, sentence-transformers (`backend="openvino"`) and optimum open these '
    "files without tcompress: each needs but the file, the `.bin` beside it, `config.json` and the "
    "tokenizer.",
}


def _quality(metric: Metric | None) -> str:
    """Quality of a file, with its interval and as a share of the dense model's in PyTorch."""
    if metric is None:
        return ""
    ends, ratio = metric.interval, metric.ratio
    around = "" if ends is None else f" [{ends.low:.4f}, {ends.high:.4f}]"
    return f"{metric.value:.4f}{around}" + ("" if ratio is None else f", {ratio:.3f} x dense")


def with_files(card: str, files: Sequence[ExportedFile], to: ExportFormat = "onnx") -> str:
    """Put a table of the files at the end of a card, in the place of an older one."""
    several = [len(set(map(set_of, item.metrics))) > 1 for item in files]
    metrics = [main_of(item.metrics, several=s) for item, s in zip(files, several, strict=True)]
    main = next((metric for metric in metrics if metric is not None), None)
    rows = [
        f"| `{item.file}` | {item.bits} | {item.bytes / 1e6:.1f} | {item.ratio:.2f} x | "
        f"{item.agreement:.4f} |" + (f" {_quality(metric)} |" if main else "")
        for item, metric in zip(files, metrics, strict=True)
    ]
    name = f" {main.label} |" if main else ""
    protocol = files[0].protocol
    table = "\n".join(
        [
            _HEADINGS[to],
            "",
            f"| file | bits of weights | MB | speed | cosine |{name}",
            "|---|---|---|---|---|" + ("---|" if main else ""),
            *rows,
            "",
            f"Speed is that of {_RUNTIMES[to]} over this model in PyTorch in float32, for "
            f"{files[0].size} on {protocol['threads']} threads of {protocol['device_name']} "
            f"({protocol['instructions']}); the cosine is the mean of outputs, with the same.",
            "",
            _READERS[to],
            "",
        ]
    )
    before = without_files(card, to).rstrip("\n")
    return f"{before}\n\n{table}" if before else table


def without_files(card: str, to: ExportFormat) -> str:
    """Take the table of files for a runtime out of a card; what others wrote around it stays."""
    written = (
        rf"^{_HEADINGS[to]}\n\n\| file \| bits of weights \|.*\n(?:\|.*\n?)+"
        r"(?:\nSpeed is that of .*?of outputs(?:, with the same)?\.\n?)?"
        rf"(?:\n{re.escape(_READERS[to])})?\n*"
    )
    return re.sub(written, "", card, flags=re.MULTILINE)


_FILES: dict[RuntimeName, tuple[str, ...]] = {
    "onnx": ("model.onnx",),
    # Ours and transformers.js's, then those of sentence-transformers and optimum.
    "onnx-int8": ("model_int8.onnx", "model_quantized.onnx", "model_qint8*.onnx"),
    "onnx-q4": ("model_q4.onnx",),
}
"""Names inside `onnx/`, the first one of which counts."""
_SETTINGS: dict[RuntimeName, OnnxFiles] = {
    "onnx": OnnxFiles(),
    "onnx-int8": OnnxFiles(int8=True),
    "onnx-q4": OnnxFiles(bits=4),
}


@dataclass(frozen=True)
class RuntimeFiles:
    """Files for other runtimes; those that a model's folder lacks are made for the time being."""

    scratch: Path

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[RuntimeFiles]:
        """Keep new files until the block ends."""
        with tempfile.TemporaryDirectory(prefix="tcompress-onnx-") as folder:
            yield cls(Path(folder))

    def __call__(
        self, source: SourceModel, runtime: RuntimeName, threads: int | None = None
    ) -> OnnxModule:
        """Open a model in a runtime, any but `torch`; a pass has torch's threads by default.

        An `InputError` says that it is not installed, or that the model has no form for it.
        """
        require("onnx")
        paths = (sorted((source.folder / FOLDER).glob(pattern)) for pattern in _FILES[runtime])
        path = next(chain.from_iterable(paths), None) or self._new(source, runtime)
        return OnnxModule(OnnxModel.open(path, threads), source.config)

    def _new(self, source: SourceModel, runtime: RuntimeName) -> Path:
        # A fingerprint alone samples the weights: two models may share it.
        folder = source.origin or source.folder
        facts = {"folder": folder.resolve(), "settings": source.settings}
        identity = identity_of({**facts, "weights": source.store.fingerprint()})
        key = hashlib.sha256(identity.encode()).hexdigest()
        output = self.scratch / f"{key}-{runtime}"
        path = output / FOLDER / _FILES[runtime][0]
        if not output.exists():
            trust = source.trust_remote_code
            export_onnx(folder, output, _SETTINGS[runtime], trust_remote_code=trust)
        if not path.is_file():
            text = f"`{source.id}` becomes several files in ONNX, which are not run together here"
            raise InputError(text, "measure this model with `--runtime torch`")
        return path
