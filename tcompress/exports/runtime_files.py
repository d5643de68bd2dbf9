"""Models in other runtimes than PyTorch: from the files in their folders, or from new ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tcompress.errors import InputError
from tcompress.exports.onnx_folder import FOLDER, export_onnx
from tcompress.fields import RuntimeName
from tcompress.models import SourceModel
from tcompress.options.commands import OnnxFiles
from tcompress.runtimes.installed import require_onnx
from tcompress.runtimes.onnx_module import OnnxModule
from tcompress.runtimes.onnx_session import OnnxModel

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
        require_onnx()
        path = self._stored(source, runtime) or self._new(source, runtime)
        return OnnxModule(OnnxModel.open(path, threads), source.config)

    def _stored(self, source: SourceModel, runtime: RuntimeName) -> Path | None:
        paths = (sorted((source.folder / FOLDER).glob(pattern)) for pattern in _FILES[runtime])
        return next(chain.from_iterable(paths), None)

    def _new(self, source: SourceModel, runtime: RuntimeName) -> Path:
        output = self.scratch / f"{source.store.fingerprint()}-{runtime}"
        path = output / FOLDER / _FILES[runtime][0]
        if not output.exists():
            export_onnx(source.origin or source.folder, output, _SETTINGS[runtime])
        if not path.is_file():
            text = f"`{source.id}` becomes several files in ONNX, which are not run together here"
            raise InputError(text, "measure this model with `--runtime torch`")
        return path
