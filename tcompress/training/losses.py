"""The loss of a batch: teacher and student together, in pieces that fit into memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, get_args

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MAKERS

from tcompress.data.inputs import IGNORED
from tcompress.memory import pins
from tcompress.training.batches import Encoded, in_order, loader, model_inputs, on_device
from tcompress.training.objectives import (
    Batch,
    Objective,
    Observed,
    Similarities,
    Unit,
    fed_with,
    predicted_at,
)
from tcompress.training.setup import Setup
from tcompress.training.tasks import TrainingTask
from tcompress.training.teacher_outputs import TeacherOutputs


def examples_in(batch: Batch) -> int:
    """Number of examples; pairs of sentences are two rows each."""
    labels = batch.get("labels")
    return len(labels if labels is not None else next(iter(batch.values())))


def tokens_in(batch: Batch) -> int:
    """Number of tokens, padding left out; without a mask an example counts as one."""
    mask = batch.get("attention_mask", batch.get("decoder_attention_mask"))
    return examples_in(batch) if mask is None else int(mask.sum())


def _counts(batch: Batch) -> dict[Unit, float]:
    """Numbers of the units in a batch that is still on the CPU."""
    labels = batch.get("labels")
    targets = 0.0
    if labels is not None:  # a score may have any value
        targets = float(labels.numel() if labels.is_floating_point() else (labels != IGNORED).sum())
    examples, tokens = float(examples_in(batch)), float(tokens_in(batch))
    mask = batch.get("decoder_attention_mask")
    decoded = tokens if mask is None else float(mask.sum())
    return {"examples": examples, "tokens": tokens, "decoded": decoded, "targets": targets}


def pieces(batch: Batch, parts: int) -> Iterator[Batch]:
    """Cut a batch along its examples, into so many pieces if there are as many examples."""
    count = examples_in(batch)
    size = -(-count // parts)
    for first in range(0, count, size):
        # A pair of sentences is two rows of inputs and one label.
        yield {
            name: value[first * len(value) // count : (first + size) * len(value) // count]
            for name, value in batch.items()
        }


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if a device, or this machine, has run out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


@dataclass(frozen=True, eq=False)
class Losses:
    """Losses and gradients of the student, which accelerate has wrapped.

    Batches come from the CPU: what is counted in them is known without waiting for the device.
    """

    setup: Setup
    accelerator: Accelerator
    model: nn.Module
    teachers: TeacherOutputs

    def gradients(self, batch: Batch, parts: int, *, alone: bool) -> Tensor:
        """Add a batch's gradients and return its loss, in which processes are to be summed up.

        Neither depends on how many pieces or processes share the batch.
        """
        counts, cuts = self._counts_of_all(batch), list(pieces(batch, parts))
        total = torch.zeros((), device=self.accelerator.device)
        peers = self._peers(cuts)
        for index, piece in enumerate(cuts):
            last = index == len(cuts) - 1
            moved, modules = self._moved(piece), self.setup.observer.modules
            with self._unread_masks(piece):
                teacher = self.teachers.of_batch(moved, self.setup.data.train)
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
        terms = (objective for objective, _ in self.setup.objectives)
        similarities = next((term for term in terms if isinstance(term, Similarities)), None)
        if similarities is None or (len(cuts) == 1 and self.accelerator.num_processes == 1):
            return None
        pairs: list[tuple[Tensor, Tensor]] = []
        for piece in cuts:
            moved = self._moved(piece)
            with self._unread_masks(piece), self.accelerator.autocast():
                student = self.setup.observer.run(model_inputs(moved))
                teacher = self.teachers.of_batch(moved, self.setup.data.train)
            pairs.append(similarities.vectors(moved, student, teacher))
        both = [torch.cat(parts).contiguous() for parts in zip(*pairs, strict=True)]
        if self.accelerator.num_processes > 1:
            both = [self.accelerator.gather(vectors) for vectors in both]  # type: ignore[misc]
        return both[0], both[1]

    def _counts_of_all(self, batch: Batch) -> dict[Unit, Tensor]:
        """Numbers of the units in the batches of all processes, at least 1."""
        device, numbers = self.accelerator.device, _counts(batch)
        counts = torch.stack([torch.full((), count, device=device) for count in numbers.values()])
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.reduce(counts, "sum")  # type: ignore[assignment]
        return dict(zip(numbers, counts.clamp_min(1.0), strict=True))

    def _moved(self, batch: Batch) -> Batch:
        return on_device(batch, self.accelerator.device)

    def _unread_masks(self, batch: Batch) -> AbstractContextManager[None]:
        """Tell models on a device of the padding in a batch that is still on the CPU."""
        return nullcontext() if self.accelerator.device.type == "cpu" else unread_masks(batch)

    @torch.no_grad()
    def validate(self, size: int) -> float:
        """The validated number on held-out data; every process measures all of it."""
        self.model.eval()
        task, held = self.setup.task, self.setup.data.validation
        held.epoch = 0
        batches = self.on_host(held, in_order(held, size))
        if task is None or task.validated == "loss":
            value = self._mean_loss(batches)
        else:
            value = self._score(task, batches)
        self.model.train()
        return value

    @torch.no_grad()
    def prepare_objectives(self) -> None:
        """Show the teacher's states on some training examples to the objectives."""
        data = self.setup.data.train
        if self.setup.teacher_observer is None and self.teachers.targets is None:
            return
        # By index, not as the loader deals them: equal in every process.
        order = [part.tolist() for part in torch.arange(len(data)).split(64)]
        for objective, _ in self.setup.objectives:
            batches = self.loaded(data, order)
            objective.prepare((batch, self.teachers.before_training(batch)) for batch in batches)

    def loss_on(self, order: list[list[int]], *, keeps: bool = True) -> Callable[[], Tensor]:
        """Make the function that measures the loss of training examples.

        The teacher reads them once, whatever the calls, unless what it says is not kept.
        """
        on_host = self.on_host(self.setup.data.train, order)
        batches = [(batch, self._counts_of_all(batch)) for batch in on_host]
        said = [self._taught(batch) for batch, _ in batches] if keeps else None

        @torch.no_grad()
        def measure() -> Tensor:
            total = torch.zeros((), device=self.accelerator.device)
            for number, (batch, counts) in enumerate(batches):
                moved, teacher = self._taught(batch) if said is None else said[number]
                with self._unread_masks(batch), self.accelerator.autocast():
                    total += self._loss(moved, counts, teacher)
            return self.accelerator.reduce(total, "sum")  # type: ignore[return-value]

        return measure

    def _taught(self, batch: Batch) -> tuple[Batch, Observed]:
        """A batch on the device, and what the teacher says of it."""
        moved = self._moved(batch)
        with self._unread_masks(batch):
            return moved, self.teachers.of_batch(moved, self.setup.data.train, cached=False)

    def _loss(self, batch: Batch, counts: Mapping[Unit, Tensor], teacher: Observed) -> Tensor:
        student = self._student(batch)
        terms = [
            weight * total / counts[unit]
            for objective, weight in self.setup.objectives
            for unit, total in objective.sums(batch, student, teacher).items()
        ]
        if isinstance(self.model, DistributedDataParallel):
            # It waits for gradients of all parameters, also of those that no term depends on.
            trained = self.setup.trained.values()
            terms.append(0.0 * torch.stack([value.sum() for value in trained]).sum())
        return torch.stack(terms).sum()

    def _student(self, batch: Batch) -> Observed:
        with predicted_at(self.setup.observer.model, batch.get("words")):
            return self.setup.observer.run(model_inputs(batch), self.model)

    def run_student(self, batch: Batch) -> Observed:
        """Run the model as it is, without gradients' wrappers."""
        with torch.no_grad(), self.accelerator.autocast():
            return self.setup.observer.run(model_inputs(batch))

    def spread(self, count: int, size: int) -> Iterator[Batch]:
        """Yield so many training examples at equal distances, in batches of a size."""
        data = self.setup.data.train
        data.epoch = 0
        order = torch.linspace(0, len(data) - 1, min(count, len(data))).long().split(size)
        yield from self.loaded(data, [part.tolist() for part in order])

    def loaded(self, data: Encoded, order: list[list[int]]) -> Iterator[Batch]:
        """Yield batches on the device, of these examples each."""
        return map(self._moved, self.on_host(data, order))

    def on_host(self, data: Encoded, order: list[list[int]]) -> Iterable[Batch]:
        """Load batches on the CPU, of these examples each."""
        return loader(data, self.setup.data.pad, order, pinned=pins(self.accelerator.device))

    def _mean_loss(self, batches: Iterable[Batch]) -> float:
        """Sums of all terms over the data, divided at the end: batches leave no trace."""
        chosen = [
            (objective, share)
            for objective, share in self.setup.objectives
            if self.setup.task is None or objective.name == "task"
        ] or self.setup.objectives
        taught = any(objective.needs_teacher for objective, _ in chosen)
        sums = defaultdict[tuple[Objective, Unit], list[Tensor]](list)
        vectors: list[tuple[Tensor, Tensor]] = []
        counts = dict.fromkeys(get_args(Unit), 0.0)
        for batch in batches:
            moved = self._moved(batch)
            with self._unread_masks(batch), self.accelerator.autocast():
                held = self.setup.data.validation
                teacher = self.teachers.of_batch(moved, held) if taught else Observed()
                student = self._student(moved)
            for objective, _ in chosen:
                if isinstance(objective, Similarities):
                    vectors.append(objective.vectors(moved, student, teacher))
                    continue
                for unit, total in objective.sums(moved, student, teacher).items():
                    sums[objective, unit].append(total)
            counts = {unit: count + counts[unit] for unit, count in _counts(batch).items()}
        for objective, _ in chosen:
            if isinstance(objective, Similarities):  # of all texts, however they come in batches
                both = [torch.cat(side) for side in zip(*vectors, strict=True)]
                sums[objective, objective.unit].append(objective.between(*both, *both))
        shares = dict(chosen)
        # Of newer Pythons `sum` would round losses of batches in another way.
        return sum(
            shares[objective] * reduce(add, torch.stack(losses).tolist()) / max(1.0, counts[unit])
            for (objective, unit), losses in sums.items()
        )

    def _score(self, task: TrainingTask, batches: Iterable[Batch]) -> float:
        predictions, labels = [], []
        for batch in batches:
            moved = self._moved(batch)
            with self._unread_masks(batch), self.accelerator.autocast():
                outputs = self.setup.observer.run(model_inputs(moved), self.model)
                predictions.append(task.predictions(outputs, moved).float())
            labels.append(batch["labels"])
        return task.score(torch.cat(predictions).cpu(), torch.cat(labels))


# Makers of attention masks, and what asks them to look whether a token is padding.
_MAKERS = ("sdpa", "eager")
_LOOKS = ("allow_is_causal_skip", "allow_is_bidirectional_skip")


@contextmanager
def unread_masks(batch: Batch) -> Iterator[None]:
    """Tell models of the padding in a batch that is still on the CPU.

    Where no token is padding no mask is needed, and kernels are faster. To see that, Transformers
    reads the mask in every forward pass, and the host waits until the device has come so far.
    """
    masks = [value for name, value in batch.items() if name.endswith("attention_mask")]
    if not masks:
        yield
        return
    full = {mask.shape for mask in masks} if all(map(Tensor.all, masks)) else set[torch.Size]()
    before = {name: MAKERS[name] for name in _MAKERS}
    for name, maker in before.items():
        MAKERS.register(name, partial(_mask, maker, full))
    try:
        yield
    finally:
        for name, maker in before.items():
            MAKERS.register(name, maker)


def _mask(
    maker: Callable[..., Tensor | None],
    full: set[torch.Size],
    *args: Any,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    if attention_mask is not None and attention_mask.shape in full:
        attention_mask = None
    if attention_mask is not None:
        options |= {name: False for name in _LOOKS if name in options}
    return maker(*args, attention_mask=attention_mask, **options)
