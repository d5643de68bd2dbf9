"""Classification of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tcompress.errors import DataError
from tcompress.evaluation.labels import match_labels
from tcompress.evaluation.runner import Runner, checked
from tcompress.evaluation.statistics import Statistic, class_statistics, ratio
from tcompress.evaluation.tasks.base import Prepared, Task
from tcompress.integration.models import Head
from tcompress.reading.examples import Examples, Needs
from tcompress.reading.images import decode, has_processor_file, image_reader
from tcompress.reading.inputs import image_shape
from tcompress.source import SourceModel

_KEPT = 2**29  # bytes of pictures that are kept, once they are read


@dataclass(frozen=True)
class ImageClassification(Task):
    """Class of an image."""

    name: ClassVar[str] = "image-classification"
    summary: ClassVar[str] = "class of an image"
    needs: ClassVar[Needs] = Needs(image=True, target="class")
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "top5", "macro_f1", "matthews")
    head: ClassVar[Head | None] = "image-classification"
    max_length: ClassVar[int | None] = None

    def check(self, source: SourceModel, examples: Examples) -> None:
        super().check(source, examples)
        match_labels(source.config, examples)

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        return _Prepared(source, examples)


class _Prepared(Prepared):
    def __init__(self, source: SourceModel, examples: Examples) -> None:
        super().__init__()
        if not has_processor_file(source):
            raise DataError(
                f"`{source.folder}` has no usable image processor",
                "add its `preprocessor_config.json`",
            )
        self._examples = examples
        self._channels, *_ = image_shape(source.config)
        # Its file is there, so where the library for it is not, its main options are followed.
        self._read = image_reader(source, needed=False)
        self._kept: dict[int, Tensor] = {}
        self._room = _KEPT

    @property
    def units(self) -> int:
        return len(self._examples)

    def run(self, runner: Runner) -> Sequence[Statistic]:
        labels = match_labels(runner.model.config, self._examples)
        self.facts["labels_matched_by"] = labels.by
        self.notes = [labels.note] if labels.note else []
        logits = torch.cat(list(self._logits(runner)))
        scores = checked(logits).numpy()
        truth, classes = np.asarray(self._examples.targets), len(self._examples.classes)
        accuracy, *others = class_statistics(labels.class_of[scores.argmax(-1)], truth, classes)
        if classes <= 5:
            return [accuracy, *others]
        right = np.take_along_axis(scores, labels.of_class[truth][:, None], axis=1)
        top = (scores > right).sum(axis=1) < 5
        return [accuracy, ratio("top5", top), *others]

    def _logits(self, runner: Runner) -> Iterator[Tensor]:
        for first in range(0, self.units, runner.batch_size):
            chosen = range(first, min(first + runner.batch_size, self.units))
            pixels = torch.stack([self._pixels(index) for index in chosen])
            pixels = pixels.to(runner.device, runner.model.dtype)
            yield runner.model(pixel_values=pixels).logits.float().cpu()
            runner.advance(len(chosen))

    def _pixels(self, index: int) -> Tensor:
        if index in self._kept:
            return self._kept[index]
        place = f"`{self._examples.name}`"
        values = self._read(decode(self._examples.images[index], self._channels, place))
        if values.nbytes <= self._room:
            self._room -= values.nbytes
            self._kept[index] = values
        return values
