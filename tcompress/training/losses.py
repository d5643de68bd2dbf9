"""The loss of a batch: teacher and student side by side, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tcompress.data.inputs import IGNORED
from tcompress.training.batches import in_order, loader
from tcompress.training.objectives import Batch, Observed, fed_with
from tcompress.training.setup import Setup

# Cutting a batch into pieces that fit into memory.


def examples_in(batch: Batch) -> int:
    """Number of examples; pairs of sentences are two rows each."""
    labels = batch.get("labels")
    return len(labels if labels is not None else next(iter(batch.values())))


def pieces(batch: Batch, parts: int) -> Iterator[Batch]:
    """Cuts a batch along its examples.

    Args:
        batch: The batch.
        parts: Number of pieces, if there are so many examples.
    """
    count = examples_in(batch)
    size = -(-count // parts)
    for first in range(0, count, size):
        last = min(first + size, count)
        yield {name: _cut(value, count, first, last) for name, value in batch.items()}


def _cut(value: torch.Tensor, count: int, first: int, last: int) -> torch.Tensor:
    rows = len(value) // count
    return value[first * rows : last * rows]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tells whether a device, or this machine, has run out of memory."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in text for words in ("out of memory", "not enough memory", "can't allocate memory")
    )


# The loss of a batch: teacher and student side by side, terms summed over all processes.


UNITS = ("examples", "tokens", "targets")


@dataclass
class Losses:
    """Computes losses and gradients.

    Attributes:
        setup: Models, objectives, data.
        accelerator: Devices and processes.
        model: The student, as accelerate has wrapped it.
    """

    setup: Setup
    accelerator: Accelerator
    model: nn.Module

    def gradients(self, batch: Batch, parts: int, *, alone: bool) -> float:
        """Adds the gradients of a batch and returns its loss, over all processes.

        Args:
            batch: The batch of this process.
            parts: Pieces to cut it into; the result does not depend on it.
            alone: Whether each block is trained alone, on the teacher's states.
        """
        counts = self._units(batch)
        cuts = list(pieces(batch, parts))
        total = torch.zeros((), device=self.accelerator.device)
        for index, piece in enumerate(cuts):
            last = index == len(cuts) - 1
            teacher = self._taught(_inputs(piece))
            # Blocks that are computed again in the backward pass must be fed again.
            feed = fed_with(self.setup.observer.modules, teacher.states) if alone else nullcontext()
            with nullcontext() if last else self.accelerator.no_sync(self.model), feed:
                loss = self._loss(piece, counts, teacher)
                # Gradients are averaged over processes, but sums are already divided by all.
                self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
        if self.accelerator.num_processes > 1:
            total = self.accelerator.reduce(total, "sum")  # type: ignore[assignment]
        return float(total)

    @torch.no_grad()
    def validate(self, size: int) -> float:
        """The validated number on held-out data; every process measures all of it.

        Args:
            size: Examples in a batch.
        """
        self.model.eval()
        task = self.setup.task
        held = self._held_out(size)
        value = self._score(held) if task and task.validated != "loss" else self._mean_loss(held)
        self.model.train()
        return value

    def prepare_objectives(self) -> None:
        """Shows the teacher's states on some training examples to the objectives."""
        if self.setup.teacher_observer is not None:
            for objective, _ in self.setup.objectives:
                objective.prepare(self._shown())

    def _loss(self, batch: Batch, counts: Mapping[str, Tensor], teacher: Observed) -> Tensor:
        student = self.setup.observer.run(_inputs(batch), self.model)
        terms = [
            weight * objective.loss(batch, student, teacher) / counts[objective.unit]
            for objective, weight in self.setup.objectives
        ]
        if isinstance(self.model, DistributedDataParallel):
            # It waits for gradients of all parameters, also of those that no term depends on.
            trained = [value for value in self.model.parameters() if value.requires_grad]
            terms.append(0.0 * torch.stack([value.sum() for value in trained]).sum())
        return torch.stack(terms).sum()

    def _taught(self, inputs: Batch) -> Observed:
        if self.setup.teacher_observer is None:
            return Observed()
        with torch.no_grad(), self.accelerator.autocast():
            return self.setup.teacher_observer.run(inputs)

    def _units(self, batch: Batch) -> dict[str, Tensor]:
        """Numbers of units in a step, over all processes."""
        counts = torch.tensor(_counts(batch), device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.reduce(counts, "sum")  # type: ignore[assignment]
        return dict(zip(UNITS, counts.clamp_min(1.0), strict=True))

    def _held_out(self, size: int) -> Iterator[Batch]:
        data = self.setup.data
        data.validation.epoch = 0
        for batch in loader(data.validation, data.pad, in_order(data.validation, size)):
            yield self._moved(batch)

    def _mean_loss(self, batches: Iterator[Batch]) -> float:
        """Sums of all terms over the data, divided at the end: batches leave no trace."""
        chosen = [
            (objective, share)
            for objective, share in self.setup.objectives
            if self.setup.task is None or objective.name == "task"
        ] or self.setup.objectives
        sums = [0.0] * len(chosen)
        counts = dict.fromkeys(UNITS, 0.0)
        for batch in batches:
            with self.accelerator.autocast():
                teacher = self._taught(_inputs(batch))
                student = self.setup.observer.run(_inputs(batch), self.model)
            for index, (objective, _) in enumerate(chosen):
                sums[index] += float(objective.loss(batch, student, teacher))
            for unit, count in zip(UNITS, _counts(batch), strict=True):
                counts[unit] += count
        return sum(
            share * total / max(1.0, counts[objective.unit])
            for (objective, share), total in zip(chosen, sums, strict=True)
        )

    def _score(self, batches: Iterator[Batch]) -> float:
        task = self.setup.task
        assert task is not None
        predictions, labels = [], []
        for batch in batches:
            with self.accelerator.autocast():
                seen = self.setup.observer.run(_inputs(batch), self.model)
                predictions.append(task.predictions(seen, batch).float().cpu())
            labels.append(batch["labels"].cpu())
        return task.score(torch.cat(predictions), torch.cat(labels))

    @torch.no_grad()
    def _shown(self) -> Iterator[tuple[Batch, Observed]]:
        data, observer = self.setup.data, self.setup.teacher_observer
        assert observer is not None
        # By index, not as the loader deals them: equal in every process.
        count = len(data.train)
        order = [list(range(first, min(first + 64, count))) for first in range(0, count, 64)]
        for raw in loader(data.train, data.pad, order):
            batch = self._moved(raw)
            yield batch, observer.run(_inputs(batch))

    def _moved(self, batch: Batch) -> Batch:
        return {name: value.to(self.accelerator.device) for name, value in batch.items()}


def tokens_in(batch: Batch) -> int:
    """Number of tokens, padding left out; without a mask an example counts as one."""
    mask = batch.get("attention_mask", batch.get("decoder_attention_mask"))
    return examples_in(batch) if mask is None else int(mask.sum())


def _counts(batch: Batch) -> tuple[float, float, float]:
    labels = batch.get("labels")
    targets = 0 if labels is None else int((labels != IGNORED).sum())
    return float(examples_in(batch)), float(tokens_in(batch)), float(targets)


def _inputs(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}
