"""The loss of a batch: teacher and student together, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tcompress.data.inputs import IGNORED
from tcompress.training.batches import BY_EXAMPLE, Encoded, in_order, loader
from tcompress.training.kept import KeptOutputs
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


def _counts(batch: Batch) -> Tensor:
    """Numbers of the `UNITS` in a batch."""
    labels = batch.get("labels")
    targets = 0 if labels is None else int((labels != IGNORED).sum())
    return torch.tensor([examples_in(batch), tokens_in(batch), targets], dtype=torch.float32)


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
    """Computes losses and gradients of the student, which accelerate has wrapped."""

    setup: Setup
    accelerator: Accelerator
    model: nn.Module
    _kept: dict[Encoded, KeptOutputs] = field(default_factory=dict, init=False)

    def keep_outputs(self, folder: Path, *data: Encoded) -> None:
        """Lets the teacher compute what it says of texts once, where that is kept in a folder."""
        setup, process = self.setup, self.accelerator.process_index
        logits = any(objective.name == "logits" for objective, _ in setup.objectives)
        for index, own in enumerate(data):
            if setup.teacher_observer is not None and own.is_fixed:
                path = folder / f"teacher-{index}-{process}"
                self._kept[own] = KeptOutputs(path, own.lengths, logits=logits)
                own.tells_places = True

    def gradients(self, batch: Batch, parts: int, *, alone: bool) -> float:
        """Adds a batch's gradients and returns its loss, over all processes and pieces alike."""
        device = self.accelerator.device
        found = self.accelerator.reduce(_counts(batch).to(device), "sum")
        counts = dict(zip(UNITS, found.clamp_min(1.0), strict=True))  # type: ignore[union-attr]
        cuts = list(pieces(batch, parts))
        total = torch.zeros((), device=device)
        for index, piece in enumerate(cuts):
            last = index == len(cuts) - 1
            teacher = self._imitated(piece, self.setup.data.train)
            # Blocks that are computed again in the backward pass must be fed again.
            feed = fed_with(self.setup.observer.modules, teacher.states) if alone else nullcontext()
            with nullcontext() if last else self.accelerator.no_sync(self.model), feed:
                loss = self._loss(piece, counts, teacher)
                # Gradients are averaged over processes, but sums are already divided by all.
                self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
        return float(self.accelerator.reduce(total, "sum"))  # type: ignore[arg-type]

    @torch.no_grad()
    def validate(self, size: int) -> float:
        """The validated number on held-out data; every process measures all of it."""
        self.model.eval()
        task, held = self.setup.task, self.setup.data.validation
        held.epoch = 0
        batches = self.loaded(held, in_order(held, size))
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

    def _imitated(self, batch: Batch, data: Encoded) -> Observed:
        """What the teacher computes for a batch of these examples, or has computed."""
        kept, inputs = self._kept.get(data), _inputs(batch)
        if kept is None:
            return self.taught(inputs)
        return kept.observed(batch["place"], lambda: self.taught(inputs))

    def loaded(self, data: Encoded, order: list[list[int]]) -> Iterator[Batch]:
        """Batches on the device, of these examples each."""
        for batch in loader(data, self.setup.data.pad, order):
            yield send_to_device(batch, self.accelerator.device)

    def _mean_loss(self, batches: Iterator[Batch]) -> float:
        """Sums of all terms over the data, divided at the end: batches leave no trace."""
        chosen = [
            (objective, share)
            for objective, share in self.setup.objectives
            if self.setup.task is None or objective.name == "task"
        ] or self.setup.objectives
        sums, counts = [0.0] * len(chosen), torch.zeros(len(UNITS), dtype=torch.float64)
        for batch in batches:
            with self.accelerator.autocast():
                teacher = self._imitated(batch, self.setup.data.validation)
                student = self.setup.observer.run(_inputs(batch), self.model)
            for index, (objective, _) in enumerate(chosen):
                sums[index] += float(objective.loss(batch, student, teacher))
            counts += _counts(batch)
        return sum(
            share * total / max(1.0, float(counts[UNITS.index(objective.unit)]))
            for (objective, share), total in zip(chosen, sums, strict=True)
        )

    def _score(self, task: Task, batches: Iterator[Batch]) -> float:
        predictions, labels = [], []
        for batch in batches:
            with self.accelerator.autocast():
                seen = self.setup.observer.run(_inputs(batch), self.model)
                predictions.append(task.predictions(seen, batch).float().cpu())
            labels.append(batch["labels"].cpu())
        return task.score(torch.cat(predictions), torch.cat(labels))


def _inputs(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name not in BY_EXAMPLE}
