"""The training loop, on accelerate."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from tcompress.artifact.manifest import CurvePoint
from tcompress.errors import TrainingError
from tcompress.memory import pins
from tcompress.progress import Progress
from tcompress.training.batches import LengthBatches, loader
from tcompress.training.checkpoints import Checkpoints, RunState
from tcompress.training.final_rounding import SAMPLES, round_model
from tcompress.training.losses import Losses, examples_in, tokens_in
from tcompress.training.memory_limits import FittingLosses
from tcompress.training.mixing import JUDGED, best_mix, mixing_validations
from tcompress.training.objectives import Batch, TokenTeachers
from tcompress.training.optimizers import optimizer_of
from tcompress.training.rates import rate_for, tested_rate
from tcompress.training.rounded import RoundedWeights
from tcompress.training.schedule import (
    HEALING_STEPS,
    SURE,
    Pace,
    highest_rate,
    learning_rate,
    total_steps,
)
from tcompress.training.setup import Setup
from tcompress.training.sharding import gathered, like, shard, whole, with_shards
from tcompress.training.teacher_outputs import TeacherOutputs

READ_EVERY = 10
"""Steps after which the host reads what they computed, and waits for the device so long."""

WRITING = 4.0
"""Times as long as opening the model takes to write it, and to open and compare the result."""

SLOW = 0.5
"""Seconds from which a step is worth reading by itself: to wait for its end costs nothing then."""


@contextmanager
def stopping(say: Callable[[str], None]) -> Iterator[threading.Event]:
    """Let Ctrl-C set the event, to stop after the step; a second one stops at once."""
    interrupted = threading.Event()

    def hear(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()
        say("stopping after this step")

    main = threading.current_thread() is threading.main_thread()  # which alone receives signals
    before = signal.signal(signal.SIGINT, hear) if main else None
    try:
        yield interrupted
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


@dataclass
class Loop:
    """One run; `say` tells the user something unexpected."""

    setup: Setup
    accelerator: Accelerator
    checkpoints: Checkpoints
    progress: Progress
    say: Callable[[str], None]
    state: RunState = field(default_factory=RunState)
    spent: float = 0.0  # seconds of a limit of time that went by before

    def __post_init__(self) -> None:
        setup, options, data = self.setup, self.setup.options, self.setup.data
        lengths, processes = data.train.lengths, self.accelerator.num_processes
        self.sampler = LengthBatches(lengths, options.batch_size, processes, options.seed)
        pinned = pins(self.accelerator.device)
        batches = loader(data.train, data.pad, self.sampler, pinned=pinned)
        self.model, self.optimizer = _prepared(setup, self.accelerator)
        # `Losses` counts what is in batches before they are moved.
        self.loader = self.accelerator.prepare_data_loader(batches, device_placement=False)
        self.per_epoch = len(self.loader)
        self._most = self.state.total = total_steps(options, self.per_epoch)
        if options.minutes is not None:  # until it is clear how many they allow
            self.state.total = min(self._most, HEALING_STEPS)
        self.state.parts = min(options.accumulate, options.batch_size)
        self.rounded = RoundedWeights.of(setup.model, setup.source, setup.roundings)
        # All processes must allow as many steps.
        spent, self._writing = self._shared(self.spent, WRITING * setup.opening)
        self.pace = Pace(options.minutes, options.evaluate_every, spent)
        self._has_told_steps = False  # that the time allows
        self.numbers = StepNumbers(setup, self.accelerator)
        self._validation = 0.0  # time that the first validation took, the same in all processes
        self._start = time.perf_counter()  # less the time before it was resumed
        self._now = 0.0  # time after the last step, the same in all processes
        again = [data.train] if self._most > self.per_epoch else []
        teachers = TeacherOutputs(setup, self.accelerator)
        teachers = teachers.cached(self.checkpoints.folder, data.validation, *again)
        teachers = teachers.with_targets(self.checkpoints.folder, self.progress)
        self.losses = Losses(setup, self.accelerator, self.model, teachers)
        self.fitting = FittingLosses(self.losses, self.optimizer, self.rounded, self.say)

    def run(self) -> RunState:
        """Train from the last checkpoint on; Ctrl-C is raised once a checkpoint is written."""
        if (checkpoint := self.checkpoints.last()) is not None:
            self.accelerator.load_state(str(checkpoint))
            self.state = self.checkpoints.read_state(checkpoint)
            if self.pace.minutes is None:  # what a limit had cut off
                self.state.total = self._most
            self._start = time.perf_counter() - self.state.seconds
        self.losses.prepare_objectives()
        state = self.state
        if state.rate is None and not state.step:
            state.rate = tested_rate(self.fitting, state)
        self.progress.stage("training", state.total, "steps")
        self.progress.advance(state.step)
        if not state.curve:
            before = self._seconds()
            self._validate()
            state.validation = self._seconds() - before
        self._validation = state.validation
        self._agree(interrupted=False)
        mixing = mixing_validations(self.setup)
        after = 2 if mixing else 1  # validations: of a mixture too
        self.pace.reserve(self._validation * (after + mixing) + self._writing)
        self.pace.note(state.step, self._now)
        begun = state.step
        self.model.train()
        with stopping(self.say) as interrupted:
            while not self._finished():
                for batch in self._batches():
                    self._step(batch)
                    self._between_steps(begun, interrupted=interrupted.is_set())
                    if self._finished():
                        break
        if state.curve[-1].step != state.step:
            self._validate()
        if state.best_step != state.step:
            self._restore_best()
        if mixing and state.best_step:
            self._mix()
        if self.rounded.later:
            self._round()
        elif 0 < state.share < 1:  # the weights are none of those that were validated
            state.best = self.fitting.validate(state)
        state.seconds = self._seconds()
        return state

    def _mix(self) -> None:
        """Go back as far on the way from the first weights as agrees best with the teacher."""
        seconds = math.inf
        if self.setup.options.minutes is not None and self.accelerator.num_processes == 1:
            self.pace.reserve(self._validation + self._writing)
            seconds = self.pace.left(self._seconds())
        start = self.checkpoints.best(0)
        run = partial(best_mix, self.losses, start, self.rounded, self.progress, seconds)
        mix = self.fitting.in_batches(self.state, JUDGED, run)
        self.state.share, self.state.sources = mix.share, [*mix.sources]
        self.accelerator.wait_for_everyone()

    def _round(self) -> None:
        """Give weights the values that will be read, where they are stored in few bits."""
        losses, model = self.losses, self.setup.model
        model.eval()

        def rounded(size: int) -> None:
            batches = losses.spread(SAMPLES, size)
            round_model(model, self.rounded.roundings, batches, losses.run_student)

        self.fitting.in_batches(self.state, JUDGED, rounded)
        self.state.best = self.fitting.validate(self.state)

    def _between_steps(self, begun: int, *, interrupted: bool) -> None:
        state, options = self.state, self.setup.options
        if self._meets():
            interrupted = self._agree(interrupted=interrupted)
            self._keep_pace(sure=state.step - begun >= SURE)
        else:
            interrupted = False  # until all have heard of it
        if state.step % options.evaluate_every == 0 or state.step == state.total:
            self._validate()
        if interrupted or (state.step % options.checkpoint_every == 0 and state.step < state.total):
            self._save()
        if interrupted:
            raise KeyboardInterrupt

    def _meets(self) -> bool:
        """True if processes hear of one another after this step: where they wait anyway."""
        step, options = self.state.step, self.setup.options
        waits = step % options.evaluate_every == 0 or step % options.checkpoint_every == 0
        waits = waits or step == self.state.total or self._reads_now()
        return waits or self.accelerator.num_processes == 1

    def _agree(self, *, interrupted: bool) -> bool:
        """Take the time and hear of Ctrl-C; all processes must stop after the same step."""
        numbers = self._seconds(), self._validation, float(interrupted)
        self._now, self._validation, heard = self._shared(*numbers)
        return heard > 0

    def _shared(self, *numbers: float) -> Sequence[float]:
        """Return the means of numbers over all processes."""
        if self.accelerator.num_processes == 1:
            return numbers
        shared: Any = torch.tensor(numbers, device=self.accelerator.device)
        return self.accelerator.reduce(shared, "mean").tolist()  # type: ignore[no-any-return]

    def _reads_now(self) -> bool:
        """True of steps whose numbers are read; alike in all processes."""
        each = self.pace.each(self._validation)
        return each is None or each > SLOW or self.state.step % READ_EVERY == 0

    def _read(self) -> None:
        """Read the losses of the last steps, and end the run where a number is not finite."""
        self.state.recent += self.numbers.read(self.state.step)

    def _keep_pace(self, *, sure: bool) -> None:
        """Fit the schedule into the time that there is."""
        state = self.state
        self.pace.note(state.step, self._now)
        possible = self.pace.possible(self._validation)
        if possible is None:
            return
        state.total = min(possible, self._most)
        self.progress.shorten(state.total)
        if sure and not self._has_told_steps and state.total < self._most:
            self._has_told_steps = True
            self.say(f"{self.pace.minutes:g} minutes allow about {state.total:,} steps")

    def _step(self, batch: Batch) -> None:
        options, state = self.setup.options, self.state
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(state.step)
        loss = self.fitting.gradients(batch, state)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), options.clip)
        norm = None if norm is None else whole(norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.samples += examples_in(batch) * self.accelerator.num_processes
        state.tokens += tokens_in(batch) * self.accelerator.num_processes
        self.numbers.add(loss, norm)
        if self._reads_now():
            self._read()
        self.progress.advance(1, self._note())

    def _rate(self, step: int) -> float:
        options, state = self.setup.options, self.state
        highest = highest_rate(options, untrained=self.setup.untrained)
        if state.rate is not None:
            highest = rate_for(state.total, state.rate, highest)
        return learning_rate(options, step, state.total, highest)

    def _note(self) -> str:
        state, pace, validation = self.state, self.pace, self._validation
        each, seconds = pace.each(validation), pace.ahead(state.total, validation)
        numbers = f"loss {self.numbers.last_loss:.4g}  {self.setup.validated}"
        note = f"{numbers} {state.curve[-1].validation:.4g}"
        if each is None or seconds is None:
            return note
        rate, minutes = state.tokens / state.step / each, int(seconds) // 60
        return f"{note}  {rate:,.0f} tokens/s  {minutes}:{int(seconds) % 60:02d} left"

    def _finished(self) -> bool:
        patience = self.setup.options.patience
        tired = patience is not None and self.state.stale >= patience
        return self.state.step >= self.state.total or tired or self.pace.left(self._now) < 0

    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _batches(self) -> Iterator[Batch]:
        """The rest of the epoch."""
        epoch, done = divmod(self.state.step, self.per_epoch)
        self.sampler.epoch = self.setup.data.train.epoch = epoch
        yield from skip_first_batches(self.loader, done) if done else self.loader

    def _validate(self) -> None:
        state, task = self.state, self.setup.task
        self._read()
        # All must decide alike what comes of it.
        value = broadcast_object_list([self.fitting.validate(state)])[0]
        check_finite(self.setup, f"the {self.setup.validated}", value, state.step)
        point = CurvePoint(
            step=state.step,
            loss=sum(state.recent) / len(state.recent) if state.recent else None,
            validation=value,
            learning_rate=self._rate(max(0, state.step - 1)),
            seconds=round(self._seconds(), 2),
        )
        is_best = state.add(point, higher_is_better=task is not None and task.higher_is_better)
        self.accelerator.log(point.model_dump(exclude_none=True), step=state.step)
        if is_best:
            weights = gathered(self.setup.changed, self.accelerator)
            if self.accelerator.is_main_process:
                self.checkpoints.keep_best(weights, state.step)

    def _restore_best(self) -> None:
        self.accelerator.wait_for_everyone()
        changed = self.setup.changed
        with torch.no_grad():
            for name, value in self.checkpoints.best(self.state.best_step).items():
                changed[name].copy_(like(value, changed[name]))
        self.accelerator.wait_for_everyone()  # the main process removes them when it has written

    def _save(self) -> None:
        self._read()
        self.state.seconds = self._seconds()
        self.checkpoints.save(self.state, self.accelerator)


def _prepared(setup: Setup, accelerator: Accelerator) -> tuple[nn.Module, Any]:
    """The model as it is run, on its device, and its optimizer; teachers are moved too."""
    device, teachers = accelerator.device, setup.teacher_observer
    fused = True if device.type == "cuda" and accelerator.scaler is None else None
    if not setup.options.shard:
        if teachers is not None:
            teachers.model.to(device)  # type: ignore[arg-type]
        model, optimizer = accelerator.prepare(setup.model, optimizer_of(setup, fused=fused))
        return model, optimizer
    observers = teachers.observers if isinstance(teachers, TokenTeachers) else [teachers]
    for observer in filter(None, (setup.observer, *observers)):
        shard(observer.model, observer.blocks, accelerator)
    optimizer = optimizer_of(setup, fused=fused)
    with_shards(accelerator, setup.model, optimizer)
    # Mixed precision alone, and nothing around it.
    model = accelerator.prepare_model(setup.model, device_placement=False, evaluation_mode=True)
    return model, optimizer


class StepNumbers:
    """Losses and gradient norms of steps, which stay on the device until they are read together.

    To read one, the host waits for the device.
    """

    def __init__(self, setup: Setup, accelerator: Accelerator) -> None:
        self._setup, self._accelerator = setup, accelerator
        self._unread: list[tuple[Tensor, Tensor]] = []  # loss and norm, on the device
        self.last_loss = math.nan  # of the last step that was read

    def add(self, loss: Tensor, norm: Tensor | None) -> None:
        """Note what a step computes; the loss is that of this process."""
        self._unread.append((loss, loss.new_zeros(()) if norm is None else norm.to(loss)))

    def read(self, step: int) -> list[float]:
        """Read the losses of the unread steps, of which the last one is `step`.

        Raises:
            TrainingError: A loss is not finite, or the norm of the gradient.
        """
        if not self._unread:
            return []
        computed = torch.stack([torch.stack(pair) for pair in self._unread], 1)
        first = step - len(self._unread) + 1
        self._unread.clear()
        if self._accelerator.num_processes > 1:
            computed[0] = self._accelerator.reduce(computed[0], "sum")  # type: ignore[index]
        losses, norms = computed.tolist()
        for index, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
            check_finite(self._setup, "the loss", loss, first + index)
            # A scaler of float16 meets infinite gradients at times, and leaves such steps out.
            if self._accelerator.scaler is None:
                check_finite(self._setup, "the gradient's norm", norm, first + index)
        self.last_loss = losses[-1]
        return losses


def check_finite(setup: Setup, what: str, value: float, step: int) -> None:
    """End a run whose numbers are not finite.

    Raises:
        TrainingError: The value is NaN or infinity.
    """
    if math.isfinite(value):
        return
    usual = setup.options.model_copy(update={"learning_rate": None})
    rates = [highest_rate(item, untrained=setup.untrained) for item in (setup.options, usual)]
    raise TrainingError(
        f"{what} is {value} at step {step:,}",
        f"lower the learning rate, such as `--lr {min(rates[0] / 4, rates[1]):g}`, or train in "
        "float32: `--mixed-precision no`",
    )
