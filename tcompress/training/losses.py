"""The loss of a batch: teacher and student together, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tcompress.data.inputs import IGNORED
from tcompress.training.batches import BY_EXAMPLE, Encoded, in_order, loader, pins
from tcompress.training.kept import KeptOutputs
from tcompress.training.masks import unread_masks
from tcompress.training.objectives import Batch, Observed, fed_with
from tcompress.training.setup import Setup
from tcompress.training.tasks import Task

UNITS = ("examples", "tokens", "targets")


def examples_in(batch: Batch) -> int:
    """Number of examples; pairs of sentences are two rows each."""
    labels = batch.get("labels")
    return len(labels if labels is not None else next(iter(batch.values())))


def tokens_in(batch: Batch) -> int:
    """Number of tokens, padding left out; without a mask an example counts as one."""
    mask = batch.get("attention_mask", batch.get("decoder_attention_mask"))
    return examples_in(batch) if mask is None else int(mask.sum())


def _counts(batch: Batch) -> list[float]:
    """Numbers of the `UNITS` in a batch that is still on the CPU."""
    labels = batch.get("labels")
    targets = 0 if labels is None else int((labels != IGNORED).sum())
    return [float(examples_in(batch)), float(tokens_in(batch)), float(targets)]


def pieces(batch: Batch, parts: int) -> Iterator[Batch]:
    """Cuts a batch along its examples, into so many pieces if there are as many examples."""
    count = examples_in(batch)
    size = -(-count // parts)
    for first in range(0, count, size):
        # A pair of sentences is two rows of inputs and one label.
        yield {
            name: value[first * len(value) // count : (first + size) * len(value) // count]
            for name, value in batch.items()
        }


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tells whether a device, or this machine, has run out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


@dataclass
class Losses:
    """Computes losses and gradients of the student, which accelerate has wrapped.

    Batches come from the CPU: what is counted in them is known without waiting for the device.
    """

    setup: Setup
    accelerator: Accelerator
    model: nn.Module
    _kept: dict[Encoded, KeptOutputs] = field(default_factory=dict, init=False)

    def keep_outputs(self, folder: Path, *data: Encoded) -> None:
        """Lets the teacher compute what it says of texts once, where a folder is faster than it."""
        setup, process = self.setup, self.accelerator.process_index
        if self.accelerator.device.type != "cpu":
            return
        logits = any(objective.name == "logits" for objective, _ in setup.objectives)
        for index, own in enumerate(data):
            if setup.teacher_observer is not None and own.is_fixed:
                path = folder / f"teacher-{index}-{process}"
                self._kept[own] = KeptOutputs(path, own.lengths, logits=logits)
                own.tells_places = True

    def gradients(self, batch: Batch, parts: int, *, alone: bool) -> Tensor:
        """Adds a batch's gradients and returns its loss, in which processes are to be summed up.

        Neither depends on how many pieces or processes share the batch.
        """
        counts, cuts = self._counts_of_all(batch), list(pieces(batch, parts))
        total = torch.zeros((), device=self.accelerator.device)
        for index, piece in enumerate(cuts):
            last = index == len(cuts) - 1
            moved, modules = self._moved(piece), self.setup.observer.modules
            with self._told_of(piece):
                teacher = self._imitated(moved, self.setup.data.train)
                # Blocks that are computed again in the backward pass must be fed again.
                feed = fed_with(modules, teacher.states) if alone else nullcontext()
                with nullcontext() if last else self.accelerator.no_sync(self.model), feed:
                    loss = self._loss(moved, counts, teacher)
                    # Gradients are averaged over processes, but sums are already divided by all.
                    self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
        return total

    def _counts_of_all(self, batch: Batch) -> dict[str, Tensor]:
        """Numbers of the `UNITS` in the batches of all processes, one at least."""
        device = self.accelerator.device
        found = torch.stack([torch.full((), count, device=device) for count in _counts(batch)])
        if self.accelerator.num_processes > 1:
            found = self.accelerator.reduce(found, "sum")  # type: ignore[assignment]
        return dict(zip(UNITS, found.clamp_min(1.0), strict=True))

    def _moved(self, batch: Batch) -> Batch:
        """The batch on the device, without waiting for it; what is kept lies on the CPU."""
        device = self.accelerator.device
        return {
            name: value if name == "place" else value.to(device, non_blocking=pins(device))
            for name, value in batch.items()
        }

    def _told_of(self, batch: Batch) -> AbstractContextManager[None]:
        """Tells models on a device of the padding in a batch that is still on the CPU."""
        return nullcontext() if self.accelerator.device.type == "cpu" else unread_masks(batch)

    @torch.no_grad()
    def validate(self, size: int) -> float:
        """The validated number on held-out data; every process measures all of it."""
        self.model.eval()
        task, held = self.setup.task, self.setup.data.validation
        held.epoch = 0
        batches = self._host_batches(held, in_order(held, size))
        if task is None or task.validated == "loss":
            value = self._mean_loss(batches)
        else:
            value = self._score(task, batches)
        self.model.train()
        return value

    @torch.no_grad()
    def prepare_objectives(self) -> None:
        """Shows the teacher's states on some training examples to the objectives."""
        observer, data = self.setup.teacher_observer, self.setup.data.train
        if observer is None:
            return
        # By index, not as the loader deals them: equal in every process.
        order = [part.tolist() for part in torch.arange(len(data)).split(64)]
        for objective, _ in self.setup.objectives:
            batches = self.loaded(data, order)
            objective.prepare((batch, observer.run(_inputs(batch))) for batch in batches)

    def on_host(self, order: list[list[int]]) -> Iterator[Batch]:
        """Batches of training examples, by their places, on the CPU."""
        yield from self._host_batches(self.setup.data.train, order)

    def loss_on(self, order: list[list[int]]) -> Callable[[], Tensor]:
        """Give what measures the loss of training examples, which the teacher sees but once."""
        known: list[tuple[Batch, Batch, dict[str, Tensor], Observed]] = []
        for batch in self.on_host(order):
            moved = self._moved(batch)
            with self._told_of(batch):
                known.append(
                    (batch, moved, self._counts_of_all(batch), self.taught(_inputs(moved)))
                )

        @torch.no_grad()
        def measure() -> Tensor:
            total = torch.zeros((), device=self.accelerator.device)
            for batch, moved, counts, teacher in known:
                with self._told_of(batch), self.accelerator.autocast():
                    total += self._loss(moved, counts, teacher)
            return self.accelerator.reduce(total, "sum")  # type: ignore[return-value]

        return measure

    def _loss(self, batch: Batch, counts: Mapping[str, Tensor], teacher: Observed) -> Tensor:
        student = self.setup.observer.run(_inputs(batch), self.model)
        terms = [
            weight * objective.loss(batch, student, teacher) / counts[objective.unit]
            for objective, weight in self.setup.objectives
        ]
        if isinstance(self.model, DistributedDataParallel):
            # It waits for gradients of all parameters, also of those that no term depends on.
            trained = self.setup.trained.values()
            terms.append(0.0 * torch.stack([value.sum() for value in trained]).sum())
        return torch.stack(terms).sum()

    def taught(self, inputs: Batch) -> Observed:
        """What the teacher computes, if there is one."""
        if self.setup.teacher_observer is None:
            return Observed()
        with torch.no_grad(), self.accelerator.autocast():
            return self.setup.teacher_observer.run(inputs)

    def run_student(self, batch: Batch) -> Observed:
        """Runs the model as it is, without gradients' wrappers."""
        with torch.no_grad(), self.accelerator.autocast():
            return self.setup.observer.run(_inputs(batch))

    def _imitated(self, batch: Batch, data: Encoded) -> Observed:
        """What the teacher computes for a batch of these examples, or has computed."""
        kept, inputs = self._kept.get(data), _inputs(batch)
        if kept is None:
            return self.taught(inputs)
        # A piece of a batch is padded as the whole of it is.
        tokens = next(iter(inputs.values())).shape[1]
        return kept.observed(batch["place"], lambda: self.taught(inputs), tokens)

    def loaded(self, data: Encoded, order: list[list[int]]) -> Iterator[Batch]:
        """Batches on the device, of these examples each."""
        yield from map(self._moved, self._host_batches(data, order))

    def _host_batches(self, data: Encoded, order: list[list[int]]) -> Iterator[Batch]:
        """Batches on the CPU, of these examples each."""
        yield from loader(data, self.setup.data.pad, order, pinned=pins(self.accelerator.device))

    def _mean_loss(self, batches: Iterator[Batch]) -> float:
        """Sums of all terms over the data, divided at the end: batches leave no trace."""
        chosen = [
            (objective, share)
            for objective, share in self.setup.objectives
            if self.setup.task is None or objective.name == "task"
        ] or self.setup.objectives
        lost: list[list[Tensor]] = [[] for _ in chosen]
        counts = [0.0] * len(UNITS)
        for batch in batches:
            moved = self._moved(batch)
            with self._told_of(batch), self.accelerator.autocast():
                teacher = self._imitated(moved, self.setup.data.validation)
                student = self.setup.observer.run(_inputs(moved), self.model)
            for own, (objective, _) in zip(lost, chosen, strict=True):
                own.append(objective.loss(moved, student, teacher))
            counts = [one + more for one, more in zip(counts, _counts(batch), strict=True)]
        return sum(
            share * _sum(own) / max(1.0, counts[UNITS.index(objective.unit)])
            for (objective, share), own in zip(chosen, lost, strict=True)
        )

    def _score(self, task: Task, batches: Iterator[Batch]) -> float:
        predictions, labels = [], []
        for batch in batches:
            moved = self._moved(batch)
            with self._told_of(batch), self.accelerator.autocast():
                seen = self.setup.observer.run(_inputs(moved), self.model)
                predictions.append(task.predictions(seen, moved).float())
            labels.append(batch["labels"])
        return task.score(torch.cat(predictions).cpu(), torch.cat(labels))


def _sum(values: list[Tensor]) -> float:
    """Sum of single numbers, read together."""
    total = 0.0
    for value in torch.stack(values).tolist():
        total += value
    return total


def _inputs(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name not in BY_EXAMPLE}
