"""Classification of volumes."""

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
from tcompress.evaluation.statistics import Auc, Statistic, class_statistics
from tcompress.evaluation.tasks.base import Prepared, Task
from tcompress.integration.models import Head
from tcompress.reading.examples import Examples, Needs
from tcompress.reading.inputs import VOLUMES, grid_shape, inputs_of
from tcompress.reading.volumes import as_input
from tcompress.source import SourceModel


@dataclass(frozen=True)
class VolumeClassification(Task):
    """Class of a volume."""

    name: ClassVar[str] = "volume-classification"
    summary: ClassVar[str] = "class of a volume"
    needs: ClassVar[Needs] = Needs(volume=True, target="class")
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "auc", "macro_f1", "matthews")
    head: ClassVar[Head | None] = "image-classification"
    max_length: ClassVar[int | None] = None

    def check(self, source: SourceModel, examples: Examples) -> None:
        inputs = inputs_of(source)
        if inputs.grid != VOLUMES:
            raise DataError(
                f"`{source.id}` is a `{source.model_class.__name__}`, which reads no volumes",
                "give a model for volumes, such as the host `tcompress_grid`",
            )
        super().check(source, examples)
        match_labels(source.config, examples)
        assert examples.volumes is not None  # that is what the task needs
        found, wanted = (1, *examples.volumes.shape[1:]), grid_shape(source, inputs)
        if found != wanted:
            raise DataError(
                f"`{examples.name}` has volumes of shape {found}, the model takes {wanted}",
                "give data of that shape, or a model for this one",
            )

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        return _Prepared(examples)


class _Prepared(Prepared):
    def __init__(self, examples: Examples) -> None:
        super().__init__()
        self._examples = examples

    @property
    def units(self) -> int:
        return len(self._examples)

    def run(self, runner: Runner) -> Sequence[Statistic]:
        labels = match_labels(runner.model.config, self._examples)
        self.facts["labels_matched_by"] = labels.by
        self.notes = [labels.note] if labels.note else []
        scores = checked(torch.cat(list(self._logits(runner)))).numpy()
        truth, classes = np.asarray(self._examples.targets), len(self._examples.classes)
        accuracy, *others = class_statistics(labels.class_of[scores.argmax(-1)], truth, classes)
        if len(set(truth.tolist())) < classes:  # not defined without an example of each
            return [accuracy, *others]
        exponents = np.exp(scores - scores.max(-1, keepdims=True))
        shares = exponents / exponents.sum(-1, keepdims=True)
        return [accuracy, Auc(shares[:, labels.of_class], truth), *others]

    def _logits(self, runner: Runner) -> Iterator[Tensor]:
        volumes = self._examples.volumes
        assert volumes is not None
        for first in range(0, self.units, runner.batch_size):
            chosen = volumes[first : first + runner.batch_size]
            batch = torch.stack([as_input(volume) for volume in chosen])
            batch = batch.to(runner.device, runner.model.dtype)
            yield runner.model(grid_values=batch).logits.float().cpu()
            runner.advance(len(chosen))
