"""An ONNX file beside the model in PyTorch: how far outputs are apart, and how long both take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.artifact.manifest import ExportedFile, environment
from tcompress.errors import WriteError
from tcompress.exports.onnx_parts import CausalPart, Part, Size
from tcompress.latency.paired_timing import device_name, instructions
from tcompress.latency.passes import Pass, turns
from tcompress.runtimes.onnx_session import OnnxModel

LARGEST_DIFFERENCE = 1e-3
"""Of a file in float32 from PyTorch, as a share of the largest output: beyond it is a defect."""
TIMED = (32, 32)
"""Batch and length of the passes that are timed."""
REPEATS = 5

Arrays = dict[str, NDArray[Any]]
Answers = list[tuple[dict[str, Tensor], Arrays]]
"""Inputs, and what PyTorch computes from them."""


@dataclass(frozen=True, eq=False)
class Proof:
    """What a part of a model computes in PyTorch, to compare files with."""

    part: Part
    answers: Answers

    @classmethod
    def of(cls, part: Part, batches: Sequence[dict[str, Tensor]] = ()) -> Proof:
        """Run a part at three shapes of random inputs, and on `batches` of real ones."""
        longest = min(part.draw.longest or 128, 128)
        # The last one decodes a token, where there is a cache.
        sizes = Size(1, min(5, longest)), Size(3, min(21, longest), 0), Size(2, longest)
        if isinstance(part, CausalPart):
            sizes = *sizes[:2], Size(2, 1, longest - 1)
        inputs = [part.sample(size, seed=index) for index, size in enumerate(sizes, start=1)]
        inputs += batches
        return cls(part, [(item, _answer(part, item)) for item in inputs])

    def difference(self, file: OnnxModel) -> float:
        """Largest absolute difference of an output from PyTorch's, without padding.

        A `WriteError` says that a shape cannot be run, or that an output is not finite.
        """
        largest = 0.0
        for inputs, answer in self.answers:
            computed = _run(file, inputs)
            for name, value in answer.items():
                apart = np.abs(_inside(computed[name] - value, inputs)).max(initial=0.0)
                if not np.isfinite(apart):
                    raise WriteError(f"`{file.path.name}` computes a `{name}` that is not finite")
                largest = max(largest, float(apart))
        return largest

    @property
    def timed(self) -> Size:
        """Sizes of the pass that is timed."""
        batch, length = TIMED
        length = min(length, self.part.draw.longest or length)
        return Size(batch if self.part.has_length else 4, length)

    @property
    def largest(self) -> float:
        """Largest absolute value of an output."""
        values = (np.abs(v).max(initial=0.0) for _, answer in self.answers for v in answer.values())
        return float(max(values))

    def agreement(self, file: OnnxModel) -> float:
        """Mean cosine of outputs and PyTorch's, of the last output that the file has.

        An output with one vector for each token is taken token by token, without padding.
        """
        name, cosines = self.part.outputs[-1], []
        for inputs, answer in self.answers:
            one, two = _inside(answer[name], inputs), _inside(_run(file, inputs)[name], inputs)
            one, two = (item.reshape(-1, item.shape[-1]).astype(np.float64) for item in (one, two))
            lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1)
            cosines.append(((one * two).sum(1)[lengths > 0]) / lengths[lengths > 0])
        return float(np.concatenate(cosines).mean())

    def seconds(self, file: OnnxModel) -> tuple[float, float]:
        """Median times of a pass, of the file and of PyTorch, in turn."""
        inputs = self.part.sample(self.timed)
        passes = (Pass(lambda _: file.run(inputs)), Pass(lambda _: _answer(self.part, inputs)))
        for item in passes:
            item()
        times = zip(*islice(turns(passes), REPEATS), strict=True)
        one, two = map(median, times)
        return one, two

    def facts(
        self, file: OnnxModel, name: str, bits: int, nbytes: int, left: Sequence[str] = ()
    ) -> ExportedFile:
        """Compare a file with PyTorch, in all that a manifest records."""
        difference, (own, dense) = self.difference(file), self.seconds(file)
        if bits == 32 and difference > LARGEST_DIFFERENCE * max(1.0, self.largest):
            raise WriteError(
                f"`{name}` computes something else: outputs differ by {difference:.2g} where the "
                f"largest is {self.largest:.2g}",
                "please report it with the command; nothing was published",
            )
        return ExportedFile(
            file=name,
            bits=bits,
            bytes=nbytes,
            difference=difference,
            agreement=self.agreement(file),
            milliseconds=1e3 * own,
            baseline_milliseconds=1e3 * dense,
            ratio=dense / own,
            left=list(left),
            protocol={
                "compared": f"outputs of {len(self.answers)} batches with PyTorch in float32",
                "batch": self.timed.batch,
                "length": self.timed.length,
                "threads": torch.get_num_threads(),
                "device_name": device_name(torch.device("cpu")),
                "instructions": instructions(),
                **environment(),
                **runtime_versions(),
            },
        )


def _answer(part: Part, inputs: dict[str, Tensor]) -> Arrays:
    with torch.inference_mode():
        values = part(inputs)
    return {name: value.numpy() for name, value in zip(part.outputs, values, strict=True)}


def _run(file: OnnxModel, inputs: Mapping[str, Tensor]) -> Arrays:
    try:
        return file.run(inputs)
    except Exception as error:  # ONNX Runtime raises errors of its own for every kind of problem
        shapes = ", ".join(f"`{name}` {tuple(item.shape)}" for name, item in inputs.items())
        text = f"`{file.path.name}` cannot be run with {shapes} ({error})"
        raise WriteError(
            text, "please report it with the command; nothing was published"
        ) from error


def _inside(value: NDArray[Any], inputs: Mapping[str, Tensor]) -> NDArray[Any]:
    """Leave out what belongs to padding, of outputs for each token."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None or mask is None or value.ndim < 3 or value.shape[:2] != tuple(ids.shape):
        return value
    return value[mask[:, -ids.shape[1] :].numpy().astype(bool)]  # it may be of a cache too


def runtime_versions() -> dict[str, str]:
    """Versions that a file depends on."""
    from importlib.metadata import version

    return {name: version(name) for name in ("onnx", "onnxruntime", "onnxscript")}
