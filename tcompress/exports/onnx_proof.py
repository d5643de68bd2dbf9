"""A file for another runtime beside PyTorch: how far outputs are apart, how long both take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.artifact.manifest import ExportedFile, environment
from tcompress.data.calibration import load_batches
from tcompress.errors import DataError, WriteError, first_line
from tcompress.exports.onnx_parts import CausalPart, Part, Size
from tcompress.fields import ExportFormat
from tcompress.latency.paired_timing import device_name, instructions
from tcompress.latency.passes import Pass, turns
from tcompress.models import SourceModel
from tcompress.options.convert_options import Calibration
from tcompress.runtimes.sessions import Arrays, OnnxModel, OpenvinoModel

LARGEST_DIFFERENCE = 1e-3
"""Of a file in float32 from PyTorch, as a share of the largest output: beyond it is a defect."""
TIMED = Size(batch=32, length=32)
PICTURES = 4
"""Sizes of the passes that are timed."""
REPEATS, MOST_SECONDS = 7, 30.0
"""Times that a pass is timed; fewer where it is long, once at least."""
SAMPLES = 64
"""Texts or pictures that agreement is measured on."""
_HINT = "please report it with the command; nothing was published"

Opened = OnnxModel | OpenvinoModel
Answers = list[tuple[dict[str, Tensor], Arrays]]
"""Inputs, and what PyTorch computes from them."""


@dataclass(frozen=True, eq=False)
class Proof:
    """Outputs of a part of a model in PyTorch, to compare files with. Use `Proof.of`."""

    part: Part
    shapes: Answers  # random inputs of several shapes
    samples: Answers  # of built-in texts, pictures or sounds, or the same where there are none

    @classmethod
    def of(cls, part: Part, batches: Sequence[Mapping[str, Tensor]] = ()) -> Proof:
        """Run a part on random inputs of three shapes, and on batches of a model's data."""
        longest = min(part.draw.longest or 128, 128)
        middle = Size(3, min(21, longest), pictures=4)
        sizes = [Size(1, min(5, longest)), middle, Size(2, longest)]
        if isinstance(part, CausalPart):  # the last one decodes a token
            sizes[-1] = Size(2, 1, longest - 1)
        shapes = _answers(part, [part.sample(size, seed) for seed, size in enumerate(sizes, 1)])
        given = [found for batch in batches if (found := part.completed(batch)) is not None]
        return cls(part, shapes, _answers(part, given) or shapes)

    def difference(self, file: Opened) -> float:
        """Largest absolute difference of an output from PyTorch's, without padding.

        A `WriteError` says that a shape cannot be run, or that an output is not finite.
        """
        largest = 0.0
        for inputs, answer in self.shapes:
            computed = _run(file, inputs)
            for name, value in answer.items():
                apart = np.abs(_inside(computed[name] - value, inputs)).max(initial=0.0)
                if not np.isfinite(apart):
                    raise WriteError(f"`{file.path.name}` gives a `{name}` of NaN or inf", _HINT)
                largest = max(largest, float(apart))
        return largest

    @property
    def largest(self) -> float:
        """Largest absolute value of an output."""
        values = (np.abs(v).max(initial=0.0) for _, answer in self.shapes for v in answer.values())
        return float(max(values))

    def agreement(self, file: Opened) -> float:
        """Mean cosine of outputs with PyTorch's, on samples: of embeddings, or the first output.

        An output for each token is taken token by token, without padding.
        """
        names = self.part.outputs
        name = "sentence_embedding" if "sentence_embedding" in names else names[0]
        cosines = []
        for inputs, answer in self.samples:
            one, two = _inside(answer[name], inputs), _inside(_run(file, inputs)[name], inputs)
            one, two = (item.reshape(-1, item.shape[-1]).astype(np.float64) for item in (one, two))
            lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1)
            cosines.append((one * two).sum(1)[lengths > 0] / lengths[lengths > 0])
        found = np.concatenate(cosines)
        return float(found.mean()) if found.size else 1.0

    @property
    def timed(self) -> Size:
        """Sizes of the pass that is timed."""
        longest = self.part.draw.longest or TIMED.length
        batch = TIMED.batch if self.part.has_length else PICTURES
        return Size(batch, min(TIMED.length, longest))

    def seconds(self, file: Opened) -> tuple[float, float]:
        """Median times of a pass, of the file and of PyTorch, in turn."""
        inputs = self.part.sample(self.timed)
        passes = (Pass(lambda _: file.run(inputs)), Pass(lambda _: _answer(self.part, inputs)))
        first = sum(item.seconds() for item in passes)
        repeats = max(1, min(REPEATS, int(MOST_SECONDS / first)))
        own, dense = map(median, zip(*islice(turns(passes), repeats), strict=True))
        return own, dense

    def facts(self, file: Opened, bits: int, left: Sequence[str] = ()) -> ExportedFile:
        """Compare a file with PyTorch in all that a manifest records.

        A `WriteError` says that a file in float32 computes something else.
        """
        difference, name = self.difference(file), f"{file.path.parent.name}/{file.path.name}"
        if bits == 32 and difference > LARGEST_DIFFERENCE * max(1.0, self.largest):
            raise WriteError(
                f"`{name}` computes something else than PyTorch: outputs differ by "
                f"{difference:.2g} where the largest is {self.largest:.2g}",
                _HINT,
            )
        own, dense = self.seconds(file)
        size = self.timed
        samples = sum(len(next(iter(inputs.values()))) for inputs, _ in self.samples)
        return ExportedFile(
            file=name,
            bits=bits,
            bytes=file.nbytes,
            difference=difference,
            agreement=self.agreement(file),
            milliseconds=1e3 * own,
            baseline_milliseconds=1e3 * dense,
            ratio=dense / own,
            left=list(left),
            protocol={
                "compared": "outputs with PyTorch in float32, at three shapes of random inputs",
                "agreement": f"mean cosine of outputs on {samples} samples",
                "batch": size.batch,
                **({"length": size.length} if self.part.has_length else {}),
                "threads": torch.get_num_threads(),
                "device_name": device_name(torch.device("cpu")),
                "instructions": instructions(),
                **environment(),
                **runtime_versions("onnx" if isinstance(file, OnnxModel) else "openvino"),
            },
        )


def samples_of(source: SourceModel) -> list[dict[str, Tensor]]:
    """Make batches of what ships: texts, pictures or sounds; none for what they do not suit."""
    options = Calibration(source=("builtin",), samples=SAMPLES, max_length=64, holdout=0.5)
    try:
        return load_batches(source, options).batches
    except DataError:
        return []


def _answers(part: Part, inputs: Sequence[dict[str, Tensor]]) -> Answers:
    return [(item, _answer(part, item)) for item in inputs]


def _answer(part: Part, inputs: dict[str, Tensor]) -> Arrays:
    with torch.inference_mode():
        values = part(inputs)
    return {name: value.numpy() for name, value in zip(part.outputs, values, strict=True)}


def _run(file: Opened, inputs: Mapping[str, Tensor]) -> Arrays:
    try:
        return file.run(inputs)
    except Exception as error:  # runtimes raise errors of their own for every kind of problem
        shapes = ", ".join(f"`{name}` {tuple(item.shape)}" for name, item in inputs.items())
        text = f"`{file.path.name}` cannot be run with {shapes} ({first_line(error)})"
        raise WriteError(text, _HINT) from error


def _inside(value: NDArray[Any], inputs: Mapping[str, Tensor]) -> NDArray[Any]:
    """Leave out what belongs to padding, of outputs for each token."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None or mask is None or value.ndim < 3 or value.shape[:2] != tuple(ids.shape):
        return value
    return value[mask[:, -ids.shape[1] :].numpy().astype(bool)]  # it may be of a cache too


def runtime_versions(runtime: ExportFormat) -> dict[str, str]:
    """Versions that a file depends on."""
    last = "onnxruntime" if runtime == "onnx" else "openvino"
    return {name: version(name) for name in ("onnx", last, "onnxscript")}
