"""Tasks with targets: classes of texts, images and volumes, and series to forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.data.encoding import decode, has_processor_file, image_reader
from tcompress.data.examples import Examples, Needs, by_name, doubts, few, label_names
from tcompress.data.grids import Windows, as_input
from tcompress.data.inputs import VOLUMES, grid_shape, image_shape, inputs_of, window_of
from tcompress.errors import DataError
from tcompress.evaluation.statistics import Auc, Statistic, class_statistics, ratio
from tcompress.evaluation.task_base import Prepared, Runner, Task, TextReader, checked, signature
from tcompress.hf.opening import Head
from tcompress.models import SourceModel

# Which of a model's labels is which class of the data.


@dataclass(frozen=True)
class Labels:
    """How labels and classes correspond.

    Attributes:
        of_class: The label of each class.  # (classes,)
        class_of: The class of each label, -1 if the data has no such class.  # (labels,)
        by: `name` or `index`.
        note: What is doubtful about it, if anything.
    """

    of_class: NDArray[Any]
    class_of: NDArray[Any]
    by: str
    note: str | None = None


def match_labels(config: Any, examples: Examples) -> Labels:
    """Matches labels with classes: by name if every class is called as a label is, else by order.

    Args:
        config: The model's configuration.
        examples: Examples with classes.

    Raises:
        DataError: The model has fewer labels than the data has classes.
    """
    names, classes = label_names(config), examples.classes
    if len(names) < len(classes):
        raise DataError(
            f"the model's head has {_counted(len(names), 'label')}, but `{examples.name}` has "
            f"{_counted(len(classes), 'class', 'classes')} ({few(classes)})",
            "give a model that was trained on this task, or name another label column",
        )
    order = by_name(names, classes)
    by, note = ("name", None) if order is not None else ("index", doubts(names, classes))
    of_class = np.arange(len(classes)) if order is None else np.array(order)
    class_of = np.full(len(names), -1)
    class_of[of_class] = np.arange(len(classes))
    return Labels(of_class, class_of, by, note)


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


# Classification of texts, and of pairs of texts.


@dataclass(frozen=True)
class Classification(Task):
    """Class of one text or of two."""

    name: ClassVar[str] = "classification"
    summary: ClassVar[str] = "class of a text, or of a pair of texts"
    needs: ClassVar[Needs] = Needs(texts=(1, 2), target="class")
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "macro_f1", "matthews")
    head: ClassVar[Head | None] = "classification"

    def check(self, source: SourceModel, examples: Examples) -> None:
        super().check(source, examples)
        match_labels(source.config, examples)

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        return _Prepared(TextReader.open(source, max_length or self.max_length or 0), examples)


class _Prepared(Prepared):
    def __init__(self, reader: TextReader, examples: Examples) -> None:
        super().__init__()
        self._examples, self._pad = examples, reader.pad
        self._rows = reader.encode(*examples.texts)
        self.signature = signature(self._rows)
        self.facts["truncated"] = reader.truncated(self._rows, *examples.texts)

    @property
    def units(self) -> int:
        return len(self._rows)

    def run(self, runner: Runner) -> Sequence[Statistic]:
        labels = match_labels(runner.model.config, self._examples)
        self.facts["labels_matched_by"] = labels.by
        self.notes = [labels.note] if labels.note else []
        logits: Tensor = runner.logits(self._rows, self._pad)
        predicted = labels.class_of[logits.argmax(-1).numpy()]
        truth, classes = self._examples.targets or [], len(self._examples.classes)
        return class_statistics(predicted, truth, classes)


# Classification of images.


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
        return _PreparedImages(source, examples)


class _PreparedImages(Prepared):
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


# Classification of volumes.


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
        return _PreparedVolumes(examples)


class _PreparedVolumes(Prepared):
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


# Forecasting of multivariate series.


FITTED_ROWS, RIDGE = 2**16, 1e-3
"""Rows that the linear forecast is fitted to, and its ridge in units of their mean square."""

Forecast = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Forecasting(Task):
    """What comes next in all variables of a series, in standardised values."""

    name: ClassVar[str] = "forecasting"
    summary: ClassVar[str] = "what comes next in the variables of a series"
    needs: ClassVar[Needs] = Needs(window=(0, 0))
    metrics: ClassVar[tuple[str, ...]] = ("mse", "mae")
    head: ClassVar[Head | None] = "forecasting"
    max_length: ClassVar[int | None] = None

    def needs_for(self, sources: Sequence[SourceModel]) -> Needs:
        """Windows of the size that the models were made for.

        Raises:
            DataError: A model forecasts nothing, or they do not forecast alike.
        """
        found = {source.id: window_of(source) for source in sources}
        if len({*found.values()}) > 1:
            sizes = ", ".join(f"`{name}` {c} + {h}" for name, (c, h) in found.items())
            raise DataError(
                f"the models have windows of different sizes, context and horizon: {sizes}",
                "compare models of one size, or measure them one by one",
            )
        return replace(self.needs, window=next(iter(found.values())))

    def check(self, source: SourceModel, examples: Examples) -> None:
        super().check(source, examples)
        assert examples.windows is not None  # that is what the task needs
        wanted, found = grid_shape(source, inputs_of(source))[1], examples.windows.variables
        if len(found) != wanted:
            raise DataError(
                f"`{examples.name}` has {len(found)} series, the model takes {wanted}",
                "give data with so many columns beside `date`",
            )

    def prepare(
        self, source: SourceModel, examples: Examples, max_length: int | None, seed: int
    ) -> Prepared:
        assert examples.windows is not None
        return _PreparedSeries(examples.windows)


class _PreparedSeries(Prepared):
    unit = "windows"

    def __init__(self, windows: Windows) -> None:
        super().__init__()
        self._windows = windows
        self.facts = {
            "context": windows.context,
            "horizon": windows.horizon,
            "values": "standardised by the training part",
        }

    @property
    def units(self) -> int:
        return len(self._windows)

    def run(self, runner: Runner) -> Sequence[Statistic]:
        if "naive" not in self.facts:  # the same for every model
            self.facts["naive"] = naive_errors(self._windows)
        squares, sizes = [], []
        for first in range(0, self.units, runner.batch_size):
            past, future = self._windows.batch(slice(first, first + runner.batch_size))
            past = past.to(runner.device, runner.model.dtype)
            forecast = runner.model(past_values=past).prediction_outputs.float().cpu()
            error = (forecast - future).double()
            squares.append(error.square().mean((1, 2)))
            sizes.append(error.abs().mean((1, 2)))
            runner.advance(len(past))
        return [
            ratio(name, checked(torch.cat(values)).numpy(), higher_is_better=False)
            for name, values in (("mse", squares), ("mae", sizes))
        ]


def naive_errors(windows: Windows) -> dict[str, dict[str, float]]:
    """Measures forecasts that need no model: what every model has to beat.

    Args:
        windows: What is measured.

    Returns:
        `mse` and `mae` by name of the forecast, of the values that models are measured on.
    """
    forecasts: dict[str, Forecast] = {
        "last value": lambda past: past[:, -1:],
        "context mean": lambda past: past.mean(1, keepdim=True),
    }
    linear = _linear(windows)
    if linear is not None:
        forecasts["linear"] = linear
    sums = {name: [0.0, 0.0] for name in forecasts}
    step = _step(windows)
    for first in range(0, len(windows), step):
        past, future = (part.double() for part in windows.batch(slice(first, first + step)))
        for name, forecast in forecasts.items():
            error = forecast(past) - future
            sums[name][0] += float(error.square().mean((1, 2)).sum())
            sums[name][1] += float(error.abs().mean((1, 2)).sum())
    return {
        name: {"mse": mse / len(windows), "mae": mae / len(windows)}
        for name, (mse, mae) in sums.items()
    }


def _step(windows: Windows) -> int:
    """Windows that are held in float64 at a time."""
    return max(1, 2**22 // ((windows.context + windows.horizon) * len(windows.variables)))


def _linear(windows: Windows) -> Forecast | None:
    """One linear map from a context to a horizon for all variables, fitted to the training part.

    Values count less the last of the context; None without a training part.
    """
    last = windows.train - windows.context - windows.horizon
    if last < 0:
        return None
    step = -(-(last + 1) * len(windows.variables) // FITTED_ROWS)
    training = replace(windows, starts=np.arange(0, last + 1, step))
    size = windows.context
    gram = torch.zeros(size, size, dtype=torch.float64)
    cross = torch.zeros(size, windows.horizon, dtype=torch.float64)
    count = _step(windows)
    for first in range(0, len(training), count):
        past, future = (part.double() for part in training.batch(slice(first, first + count)))
        x, y = ((part - past[:, -1:]).mT.flatten(0, 1) for part in (past, future))
        gram, cross = gram + x.mT @ x, cross + x.mT @ y
    level = RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny
    weight = torch.linalg.solve(gram + level * torch.eye(size).to(gram), cross)

    def forecast(past: Tensor) -> Tensor:
        return past[:, -1:] + (weight.mT @ (past - past[:, -1:]))

    return forecast
