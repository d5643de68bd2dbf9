"""Tasks with targets: classes of texts, images and volumes, and series to forecast."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor

from tcompress.data.encoding import has_processor_file, image_reader
from tcompress.data.examples import Examples, Needs
from tcompress.data.grids import Windows, as_input
from tcompress.data.inputs import VOLUMES, grid_shape, image_shape, inputs_of, window_of
from tcompress.data.labels import is_independent, label_names, matched
from tcompress.data.pictures import decode
from tcompress.errors import DataError
from tcompress.evaluation.statistics import (
    Array,
    Statistic,
    agreement,
    agreement_of_sets,
    auc,
    class_statistics,
    ratio,
    set_statistics,
)
from tcompress.evaluation.task_base import Runner, Task, checked
from tcompress.models import SourceModel

Places = NDArray[np.int64]


class _ClassTask(Task):
    """Classes of an example: one, or several where the data has lists of them.

    Labels of the head are matched by name if they are called so, else by number.
    """

    @classmethod
    def check(cls, source: SourceModel, examples: Examples) -> None:
        super().check(source, examples)
        if examples.targets is not None:
            matched(label_names(source.config), examples.labels, examples.name)

    def run(self, runner: Runner) -> Sequence[Statistic]:
        self.predictions = scores = self.logits(runner).numpy()
        config = runner.model.config
        made = [] if self.examples.targets is None else self._against_labels(config, scores)
        if self.reference is None or self.reference.shape != scores.shape:
            return made
        compared = agreement_of_sets if is_independent(config) else agreement
        return [*made, *compared(scores, self.reference)]

    def _against_labels(self, config: Any, scores: Array) -> list[Statistic]:
        names, classes = label_names(config), self.examples.labels
        match = matched(names, classes, self.examples.name)
        self.facts["labels_matched_by"] = match.by
        self.notes = [match.doubt] if match.doubt else []
        if classes.several != is_independent(config):
            self.notes.append(_several_words(several=classes.several))
        of_class = np.array(match.labels)
        if classes.several:
            self.facts["decision"] = "each label by itself, at a probability of one half"
            truth = np.zeros(scores.shape, dtype=bool)
            for row, ids in enumerate(self.examples.targets or ()):
                truth[row, of_class[[*ids]]] = True  # type: ignore[misc]
            return set_statistics(scores > 0, truth)
        class_of = np.full(len(names), -1)  # labels that the data has no class for
        class_of[of_class[of_class >= 0]] = np.flatnonzero(of_class >= 0)
        right = np.asarray(self.examples.targets)
        accuracy, *others = class_statistics(class_of[scores.argmax(-1)], right, len(classes))
        return [accuracy, *self.of_scores(scores, of_class, right), *others]

    @abstractmethod
    def logits(self, runner: Runner) -> Tensor:
        """Computes finite logits of all examples.  # (examples, labels)."""

    def of_scores(self, scores: Array, labels: Places, truth: Places) -> list[Statistic]:
        """Makes numbers that not only the best class decides, from the label of each class."""
        return []


def _several_words(*, several: bool) -> str:
    key = "`problem_type: multi_label_classification`"
    if several:
        return (
            f"the data has several labels an example, and the model's config does not say {key}: "
            "each of its labels is taken for a yes or no of its own"
        )
    return (
        f"the model's config says {key}, and the data has one label an example: the likeliest "
        "label counts"
    )


class Classification(_ClassTask):
    """Class of one text or of two."""

    name = "classification"
    needs = Needs(texts=(1, 2), target="class", unlabelled=True, several=True)
    head = "classification"

    def prepare(self) -> None:
        self._rows = self.reader.encode(*self.examples.texts)
        self.signature = self.reader.signature(self._rows)
        self.facts["truncated"] = self.reader.truncated(self._rows, *self.examples.texts)

    @property
    def compares_texts(self) -> bool:
        return self.reader.vocabulary is not None

    def logits(self, runner: Runner) -> Tensor:
        return runner.logits(self._rows, self.reader.pad)


class _GridTask(_ClassTask):
    """Class of an example on a grid, all of one size."""

    head = "image-classification"
    max_length = None
    input_name: ClassVar[str]

    @abstractmethod
    def read(self, index: int) -> Tensor:
        """Reads the model's input of one example."""

    def logits(self, runner: Runner) -> Tensor:
        found = []
        for places in runner.slices(self.units):
            batch = torch.stack([self.read(index) for index in range(places.start, places.stop)])
            batch = batch.to(runner.device, runner.model.dtype)
            found.append(runner.model(**{self.input_name: batch}).logits.float().cpu())
        return checked(torch.cat(found))


class ImageClassification(_GridTask):
    """Class of an image."""

    name = "image-classification"
    needs = Needs(image=True, target="class", unlabelled=True, several=True)
    input_name = "pixel_values"

    def prepare(self) -> None:
        if not has_processor_file(self.source):
            hint = "add its `preprocessor_config.json`"
            raise DataError(f"`{self.source.folder}` has no usable image processor", hint)
        # Its file is there, so where the library for it is not, its main options are followed.
        self._process = image_reader(self.source, needed=False)

    def read(self, index: int) -> Tensor:
        channels = image_shape(self.source.config)[0]
        place = f"`{self.examples.name}`"
        return self._process(decode(self.examples.images[index], channels, place))

    def of_scores(self, scores: Array, labels: Places, truth: Places) -> list[Statistic]:
        if len(self.examples.classes) <= 5:
            return []
        right = np.take_along_axis(scores, labels[truth][:, None], axis=1)
        return [ratio("top5", (scores > right).sum(axis=1) < 5)]


class VolumeClassification(_GridTask):
    """Class of a volume."""

    name = "volume-classification"
    needs = Needs(volume=True, target="class", unlabelled=True)
    input_name = VOLUMES

    @classmethod
    def check(cls, source: SourceModel, examples: Examples) -> None:
        inputs = inputs_of(source)
        if inputs.grid != VOLUMES:
            text = f"`{source.id}` is a `{source.model_class.__name__}`, which reads no volumes"
            raise DataError(text, "give a model for volumes, such as `tcompress_grid`")
        super().check(source, examples)
        wanted = grid_shape(source, inputs)
        if examples.shape != wanted:
            has = f"`{examples.name}` has volumes of shape {examples.shape}"
            text = f"{has}, the model takes {wanted}"
            raise DataError(text, "give data of that shape, or a model for this one")

    def read(self, index: int) -> Tensor:
        assert self.examples.volumes is not None
        return as_input(self.examples.volumes[index])

    def of_scores(self, scores: Array, labels: Places, truth: Places) -> list[Statistic]:
        if len({*truth.tolist()}) < len(self.examples.classes):
            return []  # not defined without an example of each
        return [auc(softmax(scores, axis=-1)[:, labels], truth)]


FITTED_ROWS, RIDGE = 2**16, 1e-3
"""Rows that the linear forecast is fitted to, and its ridge in units of their mean square."""

Forecast = Callable[[Tensor], Tensor]


class Forecasting(Task):
    """What comes next in all variables of a series, in standardised values."""

    name = "forecasting"
    needs = Needs(window=(0, 0))
    head = "forecasting"
    max_length = None
    unit = "windows"

    def prepare(self) -> None:
        assert self.examples.windows is not None  # that is what the task needs
        self._windows = self.examples.windows
        self.facts = {
            "context": self._windows.context,
            "horizon": self._windows.horizon,
            "values": "standardised by the training part",
            "naive": naive_errors(self._windows),
        }

    @classmethod
    def needs_for(cls, sources: Sequence[SourceModel]) -> Needs:
        """Windows of the size that the models were made for."""
        found = {source.id: window_of(source) for source in sources}
        if len({*found.values()}) > 1:
            sizes = ", ".join(f"`{name}` {c} + {h}" for name, (c, h) in found.items())
            text = f"the models have windows of different sizes, context and horizon: {sizes}"
            raise DataError(text, "compare models of one size, or measure them one by one")
        return replace(cls.needs, window=next(iter(found.values())))

    @classmethod
    def check(cls, source: SourceModel, examples: Examples) -> None:
        super().check(source, examples)
        assert examples.windows is not None
        wanted, found = grid_shape(source, inputs_of(source))[1], examples.windows.variables
        if len(found) != wanted:
            text = f"`{examples.name}` has {len(found)} series, the model takes {wanted}"
            raise DataError(text, "give data with so many columns beside `date`")

    def run(self, runner: Runner) -> Sequence[Statistic]:
        squares, sizes = [], []
        for places in runner.slices(self.units):
            past, future = self._windows.batch(places)
            past = past.to(runner.device, runner.model.dtype)
            forecast = runner.model(past_values=past).prediction_outputs
            error = (forecast.float().cpu() - future).double()
            squares.append(error.square().mean((1, 2)))
            sizes.append(error.abs().mean((1, 2)))
        return [
            ratio(name, checked(torch.cat(values)).numpy(), higher_is_better=False)
            for name, values in (("mse", squares), ("mae", sizes))
        ]


def naive_errors(windows: Windows) -> dict[str, dict[str, float]]:
    """Measures forecasts that need no model, which every model has to beat, by their names."""
    forecasts: dict[str, Forecast] = {
        "last value": lambda past: past[:, -1:],
        "context mean": lambda past: past.mean(1, keepdim=True),
    }
    linear = _linear(windows)
    if linear is not None:
        forecasts["linear"] = linear
    sums = {name: np.zeros(2) for name in forecasts}
    for past, future in _parts(windows):
        for name, forecast in forecasts.items():
            error = forecast(past) - future
            sums[name] += [float(x.mean((1, 2)).sum()) for x in (error.square(), error.abs())]
    return {
        name: dict(zip(("mse", "mae"), (found / len(windows)).tolist(), strict=True))
        for name, found in sums.items()
    }


def _parts(windows: Windows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields contexts and futures in float64, as many at a time as fit well into memory."""
    size = max(1, 2**22 // ((windows.context + windows.horizon) * len(windows.variables)))
    for first in range(0, len(windows), size):
        past, future = windows.batch(slice(first, first + size))
        yield past.double(), future.double()


def _linear(windows: Windows) -> Forecast | None:
    """A linear map of values less the last one, fitted to the training part if there is one."""
    last = windows.train - windows.context - windows.horizon
    if last < 0:
        return None
    step = -(-(last + 1) * len(windows.variables) // FITTED_ROWS)
    training = replace(windows, starts=np.arange(0, last + 1, step))
    size = windows.context
    gram = torch.zeros(size, size, dtype=torch.float64)
    cross = torch.zeros(size, windows.horizon, dtype=torch.float64)
    for past, future in _parts(training):
        x, y = ((part - past[:, -1:]).mT.flatten(0, 1) for part in (past, future))
        gram, cross = gram + x.mT @ x, cross + x.mT @ y
    level = RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny
    weight = torch.linalg.solve(gram + level * torch.eye(size).to(gram), cross)

    def forecast(past: Tensor) -> Tensor:
        return past[:, -1:] + (weight.mT @ (past - past[:, -1:]))

    return forecast
