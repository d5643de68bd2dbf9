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

from tcompress.data.encoding import image_reader, pixels_of, processor_settings
from tcompress.data.examples import Examples, Needs
from tcompress.data.grids import Windows, as_input
from tcompress.data.inputs import VOLUMES, grid_shape, image_shape, inputs_of, window_of
from tcompress.data.labels import Match, is_independent, label_names, matched
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
from tcompress.evaluation.task_base import EvaluationTask, Measured, Prepared, Runner, checked
from tcompress.models import SourceModel

Indices = NDArray[np.int64]


class _ClassTask(EvaluationTask):
    """Classes of an example: one, or several where the data has lists of them.

    Labels of the head are matched by name if they are called so, else by number.
    """

    @classmethod
    def check(cls, source: SourceModel, examples: Examples) -> None:
        super().check(source, examples)
        names = label_names(source.config)
        if examples.targets is not None:
            matched(names, examples.labels, examples.name)
        elif len(names) < 2 and not is_independent(source.config):
            raise DataError(
                f"the head of `{source.id}` has one output, and so no classes to agree on",
                "measure pairs by `--task sts`, or give labels",
            )

    @property
    def match(self) -> Match | None:
        """The label of each class, if the data has classes."""
        if self.examples.targets is None:
            return None
        return matched(self.labels, self.examples.labels, self.examples.name)

    def prepare(self) -> Prepared:
        examples, match, several = self.examples, self.match, self.examples.labels.several
        if match is None:
            return Prepared(len(examples))
        facts: dict[str, str] = {"labels_matched_by": match.by}
        notes = (match.doubt,) if match.doubt else ()
        if several != is_independent(self.source.config):
            notes = (*notes, _OTHERWISE[several])
        if several:
            facts["decision"] = "each label by itself, at a probability of one half"
        return Prepared(len(examples), facts=facts, notes=notes)

    def run(self, runner: Runner, reference: Any) -> Measured:
        scores, match = self.logits(runner).numpy(), self.match
        statistics = [] if match is None else self._against_labels(match, scores)
        if reference is not None and reference.shape == scores.shape:
            several = self.examples.labels.several
            independent = is_independent(runner.model.config) if match is None else several
            compare = agreement_of_sets if independent else agreement
            statistics += compare(scores, reference)
        return Measured(statistics, scores)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label_names(self.source.config))

    def _against_labels(self, match: Match, scores: Array) -> list[Statistic]:
        of_class, classes = np.array(match.labels), self.examples.labels
        if classes.several:
            truth = np.zeros(scores.shape, dtype=bool)
            for row, ids in enumerate(self.examples.targets or ()):
                truth[row, of_class[[*ids]]] = True  # type: ignore[misc]
            return set_statistics(scores > 0, truth)
        # Of labels that the data has no class for, it is -1.
        class_of = np.full(len(self.labels), -1)
        class_of[of_class[of_class >= 0]] = np.flatnonzero(of_class >= 0)
        targets = np.asarray(self.examples.targets)
        accuracy, *means = class_statistics(class_of[scores.argmax(-1)], targets, len(classes))
        return [accuracy, *self.of_scores(scores, of_class, targets), *means]

    @abstractmethod
    def logits(self, runner: Runner) -> Tensor:
        """Compute finite logits of all examples.  # (examples, labels)."""

    def of_scores(self, scores: Array, labels: Indices, truth: Indices) -> list[Statistic]:
        """Make numbers that not only the best class decides, from the label of each class."""
        return []


_INDEPENDENT = "`problem_type: multi_label_classification`"
_OTHERWISE = {
    True: "the data has several labels an example, and the model's config does not say "
    f"{_INDEPENDENT}: each of its labels is taken for a yes or no of its own",
    False: f"the model's config says {_INDEPENDENT}, and the data has one label an example: the "
    "likeliest label counts",
}
"""Notes on data with several labels an example, or one, that a head is not made for."""


class Classification(_ClassTask):
    """Class of one text or of two."""

    name = "classification"
    needs = Needs(texts=(1, 2), target="class", unlabelled=True, several=True)
    head = "classification"
    answers_texts = True

    def prepare(self) -> Prepared:
        classes, reader = super().prepare(), self.reader
        rows = reader.encode(*self.examples.texts)
        truncated = reader.truncated(rows, *self.examples.texts)
        facts = {"truncated": truncated, **classes.facts}
        return replace(classes, rows=rows, signature=reader.signature(rows), facts=facts)

    def logits(self, runner: Runner) -> Tensor:
        return runner.logits(self.prepared.rows, self.reader.pad)


class _GridTask(_ClassTask):
    """Class of an example on a grid, all of one size."""

    head = "image-classification"
    max_length = None
    input_name: ClassVar[str]

    @abstractmethod
    def reader_of_inputs(self) -> Callable[[int], Tensor]:
        """Make the function that reads the model's input of an example."""

    def logits(self, runner: Runner) -> Tensor:
        read, logits = self.reader_of_inputs(), []
        for indices in runner.slices(self.prepared.units):
            rows = [read(index) for index in range(indices.start, indices.stop)]
            one, *others = dict.fromkeys(tuple(row.shape) for row in rows)
            if others:
                text = f"`{self.examples.name}` has inputs of shapes {one} and {others[0]}"
                hint = "have `preprocessor_config.json` say `do_resize` and a `size`, or give "
                raise DataError(text, hint + "data of one size")
            batch = torch.stack(rows).to(runner.device, runner.model.dtype)
            logits.append(runner.model(**{self.input_name: batch}).logits.float().cpu())
        return checked(torch.cat(logits))


class ImageClassification(_GridTask):
    """Class of an image."""

    name = "image-classification"
    needs = Needs(image=True, target="class", unlabelled=True, several=True)
    input_name = "pixel_values"

    def prepare(self) -> Prepared:
        if not processor_settings(self.source):
            hint = "add its `preprocessor_config.json`"
            raise DataError(f"`{self.source.folder}` has no usable image processor", hint)
        return super().prepare()

    def reader_of_inputs(self) -> Callable[[int], Tensor]:
        # Its file is there, so where the library for it is not, its main options are followed.
        process, images = image_reader(self.source, needed=False), self.examples.images
        channels, name = image_shape(self.source.config)[0], f"`{self.examples.name}`"
        return lambda index: process(pixels_of(images[index], channels, name))

    def of_scores(self, scores: Array, labels: Indices, truth: Indices) -> list[Statistic]:
        if len(self.examples.classes) <= 5:
            return []
        right = np.take_along_axis(scores, labels[truth][:, None], axis=1)
        # Ties come first, so that a ruined model gets no credit; the right one counts itself.
        return [ratio("top5", (scores >= right).sum(axis=1) <= 5)]


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
        shape = grid_shape(source, inputs)
        if examples.shape != shape:
            has = f"`{examples.name}` has volumes of shape {examples.shape}"
            text = f"{has}, the model takes {shape}"
            raise DataError(text, "give data of that shape, or a model for this one")

    def reader_of_inputs(self) -> Callable[[int], Tensor]:
        volumes = self.examples.volumes
        assert volumes is not None
        return lambda index: as_input(volumes[index])

    def of_scores(self, scores: Array, labels: Indices, truth: Indices) -> list[Statistic]:
        if len({*truth.tolist()}) < max(2, len(self.examples.classes)):
            return []  # not defined without an example of each, nor of one class
        return [auc(softmax(scores, axis=-1)[:, labels], truth)]


FITTED_ROWS, RIDGE = 2**16, 1e-3
"""Rows that the linear forecast is fitted to, and its ridge in units of their mean square."""

Forecast = Callable[[Tensor], Tensor]


class Forecasting(EvaluationTask):
    """All variables of a series after its context, in standardised values."""

    name = "forecasting"
    needs = Needs(window=(0, 0))
    head = "forecasting"
    max_length = None
    unit = "windows"

    def prepare(self) -> Prepared:
        facts = {
            "context": self._windows.context,
            "horizon": self._windows.horizon,
            "values": "standardised by the training part",
            "naive": naive_errors(self._windows),
        }
        return Prepared(len(self.examples), facts=facts)

    @property
    def _windows(self) -> Windows:
        assert self.examples.windows is not None  # that is what the task needs
        return self.examples.windows

    @classmethod
    def needs_for(cls, sources: Sequence[SourceModel]) -> Needs:
        """Windows of the size that the models were made for."""
        windows = {source.id: window_of(source) for source in sources}
        if len({*windows.values()}) > 1:
            sizes = ", ".join(f"`{name}` {c} + {h}" for name, (c, h) in windows.items())
            text = f"the models have windows of different sizes, context and horizon: {sizes}"
            raise DataError(text, "compare models of one size, or measure them one by one")
        return replace(cls.needs, window=next(iter(windows.values())))

    @classmethod
    def check(cls, source: SourceModel, examples: Examples) -> None:
        super().check(source, examples)
        assert examples.windows is not None
        count, variables = grid_shape(source, inputs_of(source))[1], examples.windows.variables
        if len(variables) != count:
            text = f"`{examples.name}` has {len(variables)} series, the model takes {count}"
            raise DataError(text, "give data with so many columns beside `date`")

    def run(self, runner: Runner, reference: Any) -> Measured:
        squares, sizes = [], []
        for indices in runner.slices(self.prepared.units):
            past, future = self._windows.batch(indices)
            past = past.to(runner.device, runner.model.dtype)
            forecast = runner.model(past_values=past).prediction_outputs
            error = (forecast.float().cpu() - future).double()
            squares.append(error.square().mean((1, 2)))
            sizes.append(error.abs().mean((1, 2)))
        return Measured(
            [
                ratio(name, checked(torch.cat(values)).numpy(), higher_is_better=False)
                for name, values in (("mse", squares), ("mae", sizes))
            ]
        )


def naive_errors(windows: Windows) -> dict[str, dict[str, float]]:
    """Measure forecasts that need no model, which every model has to beat, by their names."""
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
        name: dict(zip(("mse", "mae"), (total / len(windows)).tolist(), strict=True))
        for name, total in sums.items()
    }


def _parts(windows: Windows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield contexts and futures in float64, as many at a time as fit well into memory."""
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
