"""The loss of a batch: teacher and student together, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tcompress.blockwise.output_sampler import OutputSampler
from tcompress.data.inputs import IGNORED
from tcompress.progress import Progress
from tcompress.training.batches import BY_EXAMPLE, Encoded, in_order, loader, pins
from tcompress.training.kept import KeptOutputs
from tcompress.training.masks import unread_masks
from tcompress.training.objectives import Batch, Observed, Similarities, embedded, fed_with
from tcompress.training.setup import Setup
from tcompress.training.targets import Targets
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
    targets: Targets | None = field(default=None, init=False)  # of teachers that read by themselves
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

    def read_texts(self, folder: Path, progress: Progress) -> None:
        """Let teachers that read by themselves do so, before the first step is taken.

        The student is as it began, which is where embeddings are mapped to.
        """
        setup, data = self.setup, self.setup.data
        if not setup.readers:
            return
        self.targets = targets = Targets.of(
            setup.readers,
            [data.train, data.validation, *data.held.values()],
            folder,
            self.accelerator,
            progress,
            independent=any(objective.setting.independent for objective, _ in setup.objectives),
        )
        if any(objective.name == "embedding" for objective, _ in setup.objectives):
            main, path = self.accelerator.is_main_process, folder / "map.outputs"
            if main:
                targets.fit_map(data.train, self._embeddings, path)
            self.accelerator.wait_for_everyone()
            if not main:
                targets.fit_map(data.train, self._embeddings, path)

    @torch.no_grad()
    def _embeddings(self, places: list[int]) -> Tensor:
        """The student's embeddings of training examples, in float32.  # (texts, width)."""
        setup = self.setup
        is_training = setup.model.training
        setup.model.eval()
        order = [part.tolist() for part in torch.tensor(places).split(64)]
        found = []
        for batch in self.loaded(setup.data.train, order):
            seen = setup.observer.run(_inputs(batch))
            found.append(embedded(setup.sentences, batch, seen).cpu())
        setup.model.train(is_training)
        return torch.cat(found)

    def gradients(self, batch: Batch, parts: int, *, alone: bool) -> Tensor:
        """Adds a batch's gradients and returns its loss, in which processes are to be summed up.

        Neither depends on how many pieces or processes share the batch.
        """
        counts, cuts = self._counts_of_all(batch), list(pieces(batch, parts))
        total = torch.zeros((), device=self.accelerator.device)
        peers = self._peers(cuts)
        for index, piece in enumerate(cuts):
            last = index == len(cuts) - 1
            moved, modules = self._moved(piece), self.setup.observer.modules
            with self._told_of(piece):
                teacher = self._imitated(moved, self.setup.data.train)
                teacher.peers = peers
                # Blocks that are computed again in the backward pass must be fed again.
                feed = fed_with(modules, teacher.states) if alone else nullcontext()
                with nullcontext() if last else self.accelerator.no_sync(self.model), feed:
                    loss = self._loss(moved, counts, teacher)
                    # Gradients are averaged over processes, but sums are already divided by all.
                    self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach()
        return total

    @torch.no_grad()
    def _peers(self, cuts: Sequence[Batch]) -> tuple[Tensor, Tensor] | None:
        """Embeddings of all texts of a step, where it is cut or shared; else pieces have them."""
        compare = self._comparing
        if compare is None or (len(cuts) == 1 and self.accelerator.num_processes == 1):
            return None
        found: list[tuple[Tensor, Tensor]] = []
        for piece in cuts:
            moved = self._moved(piece)
            with self._told_of(piece), self.accelerator.autocast():
                student = self.setup.observer.run(_inputs(moved))
                teacher = self._imitated(moved, self.setup.data.train)
            found.append(compare.vectors(moved, student, teacher))
        both = [torch.cat(own).contiguous() for own in zip(*found, strict=True)]
        if self.accelerator.num_processes > 1:
            both = [self.accelerator.gather(own) for own in both]  # type: ignore[misc]
        return both[0], both[1]

    @property
    def _comparing(self) -> Similarities | None:
        """The term that compares texts with each other, if there is one."""
        terms = (objective for objective, _ in self.setup.objectives)
        return next((own for own in terms if isinstance(own, Similarities)), None)

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
        data = self.setup.data.train
        if self.setup.teacher_observer is None and self.targets is None:
            return
        # By index, not as the loader deals them: equal in every process.
        order = [part.tolist() for part in torch.arange(len(data)).split(64)]
        for objective, _ in self.setup.objectives:
            batches = self.loaded(data, order)
            objective.prepare((batch, self._seen_first(batch)) for batch in batches)

    def _seen_first(self, batch: Batch) -> Observed:
        """What a teacher computes for training examples before the first step."""
        if self.targets is not None:
            return self._imitated(batch, self.setup.data.train)
        assert self.setup.teacher_observer is not None
        return self.setup.teacher_observer.run(_inputs(batch))

    def on_host(self, order: list[list[int]]) -> Iterator[Batch]:
        """Batches of training examples, by their places, on the CPU."""
        yield from self._host_batches(self.setup.data.train, order)

    def loss_on(self, order: list[list[int]]) -> Callable[[], Tensor]:
        """Give what measures the loss of training examples, which the teacher sees but once."""
        known: list[tuple[Batch, Batch, dict[str, Tensor], Observed]] = []
        for batch in self.on_host(order):
            moved = self._moved(batch)
            with self._told_of(batch):
                teacher = self.taught(_inputs(moved))
                if self.targets is not None:
                    teacher = self._imitated(moved, self.setup.data.train)
                known.append((batch, moved, self._counts_of_all(batch), teacher))

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

    def taught_on(self, held: Encoded, batch: Batch, sampler: OutputSampler) -> tuple[Batch, Any]:
        """Inputs of held-out texts with their variants, and what teachers put out for them."""
        if self.targets is None:
            inputs = dict(sampler.with_variants(batch))
            return inputs, self.taught(inputs).output
        seen = self.targets.observed(held, batch["place"], self.accelerator.device)
        return _inputs(batch), seen.output if seen.vectors is None else seen.vectors

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
        if self.targets is not None:
            return self.targets.observed(data, batch["place"], self.accelerator.device)
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
        compared: list[tuple[Tensor, Tensor]] = []
        counts = [0.0] * len(UNITS)
        for batch in batches:
            moved = self._moved(batch)
            with self._told_of(batch), self.accelerator.autocast():
                teacher = self._imitated(moved, self.setup.data.validation)
                student = self.setup.observer.run(_inputs(moved), self.model)
            for own, (objective, _) in zip(lost, chosen, strict=True):
                if isinstance(objective, Similarities):
                    compared.append(objective.vectors(moved, student, teacher))
                else:
                    own.append(objective.loss(moved, student, teacher))
            counts = [one + more for one, more in zip(counts, _counts(batch), strict=True)]
        for own, (objective, _) in zip(lost, chosen, strict=True):
            if isinstance(objective, Similarities):  # of all texts, however they come in batches
                both = [torch.cat(side) for side in zip(*compared, strict=True)]
                own.append(objective.between(*both, *both))
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
