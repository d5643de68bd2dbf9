"""The training loop, on accelerate."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from tcompress.artifact.manifest import CurvePoint
from tcompress.blockwise.output_sampler import VARIANTS, sampler_of
from tcompress.data.sentences import embeds_texts
from tcompress.errors import TrainingError
from tcompress.progress import Progress
from tcompress.training.batches import LengthBatches, loader, pins
from tcompress.training.checkpoints import Checkpoints, RunState
from tcompress.training.final_rounding import SAMPLES, round_model
from tcompress.training.losses import Losses, examples_in, is_out_of_memory, tokens_in
from tcompress.training.mixing import FEWEST, JUDGED, SHARES, batches_of, best_mix
from tcompress.training.objectives import Batch
from tcompress.training.optimizers import optimizer_of
from tcompress.training.rates import EXAMPLES, find_rate, rate_for
from tcompress.training.rounded import RoundedWeights
from tcompress.training.setup import (
    HEALING_STEPS,
    SURE,
    Pace,
    Setup,
    block_steps,
    blocks_first,
    highest_rate,
    learning_rate,
    total_steps,
)

READ_EVERY = 10
"""Steps after which the host reads what they computed, and waits for the device so long."""

LIGHTER = 3.0
"""Times as long as to compare outputs a pass takes in the first validation, which warms up."""

WRITING = 4.0
"""Times as long as opening the model takes writing it, with opening and comparing what was."""

SLOW = 0.5
"""Seconds from which a step is worth reading by itself: to wait for its end costs nothing then."""


@contextmanager
def stopping(say: Callable[[str], None]) -> Iterator[threading.Event]:
    """Lets Ctrl-C set the event, to stop after the step; a second one stops at once."""
    asked = threading.Event()

    def hear(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        say("stopping after this step")

    main = threading.current_thread() is threading.main_thread()  # which alone receives signals
    before = signal.signal(signal.SIGINT, hear) if main else None
    try:
        yield asked
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
        device, scaled = self.accelerator.device, self.accelerator.scaler is not None
        batches = loader(data.train, data.pad, self.sampler, pinned=pins(device))
        fused = True if device.type == "cuda" and not scaled else None
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            setup.model,
            optimizer_of(setup, fused=fused),
            batches,
            device_placement=[None, None, False],  # `Losses` counts what is in them first
        )
        if setup.teacher_observer is not None:
            setup.teacher_observer.model.to(device)  # type: ignore[arg-type]
        self.losses = Losses(setup, self.accelerator, self.model)
        self.per_epoch = len(self.loader)
        self._most = self.state.total = total_steps(options, self.per_epoch)
        if options.minutes is not None:  # until it is known how many they allow
            self.state.total = min(self._most, HEALING_STEPS)
        again = [data.train] if self._most > self.per_epoch else []
        self.losses.keep_outputs(self.checkpoints.folder, data.validation, *again)
        self.state.parts = min(options.accumulate, options.batch_size)
        self.rounded = RoundedWeights.of(setup.model, setup.source, setup.roundings)
        self.pace = Pace(options.minutes, options.evaluate_every, self.spent)
        self._told = False  # how many steps the time allows
        self._unread: list[tuple[Tensor, Tensor]] = []  # loss and norm of steps, on the device
        self._loss = math.nan  # of the last step that was read
        self._validation = 0.0  # time that the first validation took, the same in all processes
        self._start = time.perf_counter()  # less the time before it was resumed
        self._now = 0.0  # time after the last step, the same in all processes

    @property
    def validated(self) -> str:
        """Name of the validated number."""
        task = self.setup.task
        return "validation loss" if task is None or task.validated == "loss" else task.validated

    def run(self) -> RunState:
        """Trains from the last checkpoint on; Ctrl-C is raised once a checkpoint is written."""
        self.losses.read_texts(self.checkpoints.folder, self.progress)
        if (found := self.checkpoints.last()) is not None:
            self.accelerator.load_state(str(found))
            self.state = self.checkpoints.read_state(found)
            self._start = time.perf_counter() - self.state.seconds
        self.losses.prepare_objectives()
        state = self.state
        if state.rate is None and not state.step:
            state.rate = self._test_rate()
        self.progress.stage("training", state.total, "steps")
        self.progress.advance(state.step)
        if not state.curve:
            before = self._seconds()
            self._validate()
            self._validation = self._seconds() - before
        self._agree(asked=False)
        self.pace.reserve(self._validation * (1 + self._mixing) + self._writing)
        self.pace.note(state.step, self._now)
        begun = state.step
        self.model.train()
        with stopping(self.say) as asked:
            while not self._finished():
                for batch in self._batches():
                    self._step(batch)
                    self._between_steps(begun, asked=asked.is_set())
                    if self._finished():
                        break
        if state.curve[-1].step != state.step:
            self._validate()
        if state.best_step != state.step:
            self._restore_best()
        self._mix()
        self._round()
        state.seconds = self._seconds()
        return state

    @property
    def _writing(self) -> float:
        """Seconds to write the model, and to open and compare what was written."""
        return WRITING * self.setup.opening

    @property
    def _mixing(self) -> float:
        """Least that it takes to compare mixtures, in validations; nothing where none is made."""
        setup, teacher = self.setup, self.setup.teacher_observer
        alike = teacher is None or type(teacher.model).__name__ == type(setup.model).__name__
        if not setup.imitates or (setup.kind == "states" and not alike):
            return 0.0  # they put out other things
        held = sum(min(len(part), FEWEST * JUDGED) for part in setup.data.held.values())
        held *= VARIANTS if embeds_texts(setup.source) else 1
        # The teacher and each share, where a validation is of the teacher and the student.
        return (len(SHARES) + 1) * held / (2 * len(setup.data.validation)) / LIGHTER

    def _mix(self) -> None:
        """Goes back as far on the way from the first weights as agrees best with the teacher."""
        setup, state = self.setup, self.state
        if not self._mixing or not state.best_step:
            return
        name = "comparing weights between the first and the best ones"
        self.progress.stage(name, batches_of(setup.data.held), "batches")
        sampler = sampler_of(setup.source, setup.options.seed)
        how: dict[str, Any] = {"heard": self.progress.advance}
        if setup.options.minutes is not None and self.accelerator.num_processes == 1:
            self.pace.reserve(self._writing)
            how["seconds"] = self.pace.left(self._seconds())
        mix = best_mix(self.losses, self.checkpoints.best(0), sampler, self.rounded, **how)
        state.share, state.sources = mix.share, [*mix.sources]
        self.accelerator.wait_for_everyone()

    def _round(self) -> None:
        """Gives weights the values that will be read, where they are stored in few bits."""
        setup, rounded = self.setup, self.rounded
        if not rounded.later:
            return
        data = setup.data.train
        data.epoch = 0
        count = min(SAMPLES, len(data))
        order = torch.linspace(0, len(data) - 1, count).long().split(JUDGED)
        batches = self.losses.loaded(data, [part.tolist() for part in order])
        setup.model.eval()
        round_model(setup.model, rounded.roundings, batches, self.losses.run_student)
        self.state.best = self._validation_value()

    def _between_steps(self, begun: int, *, asked: bool) -> None:
        state, options = self.state, self.setup.options
        if self._meets():
            asked = self._agree(asked=asked)
            self._keep_pace(sure=state.step - begun >= SURE)
        else:
            asked = False  # until all have heard of it
        if state.step % options.evaluate_every == 0 or state.step == state.total:
            self._validate()
        if asked or (state.step % options.checkpoint_every == 0 and state.step < state.total):
            self._save()
        if asked:
            raise KeyboardInterrupt

    def _meets(self) -> bool:
        """Whether processes hear of one another after this step: where they wait anyway."""
        step, options = self.state.step, self.setup.options
        waits = step % options.evaluate_every == 0 or step % options.checkpoint_every == 0
        waits = waits or step == self.state.total or self._reads_now()
        return waits or self.accelerator.num_processes == 1

    def _agree(self, *, asked: bool) -> bool:
        """Takes the time and hears of Ctrl-C; all processes must stop after the same step."""
        if self.accelerator.num_processes == 1:
            self._now = self._seconds()
            return asked
        own = [self._seconds(), self._validation, float(asked)]
        told: Any = torch.tensor(own, device=self.accelerator.device)
        self._now, self._validation, heard = self.accelerator.reduce(told, "mean").tolist()
        return bool(heard > 0)

    def _reads_now(self) -> bool:
        """Whether the step is one of those whose numbers are read; alike in all processes."""
        each = self.pace.each(self._validation)
        return each is None or each > SLOW or self.state.step % READ_EVERY == 0

    def _read(self) -> None:
        """Reads what the last steps computed, and ends the run where a number is not finite."""
        if not self._unread:
            return
        computed = torch.stack([torch.stack(pair) for pair in self._unread], 1)
        step = self.state.step - len(self._unread)
        self._unread.clear()
        if self.accelerator.num_processes > 1:
            computed[0] = self.accelerator.reduce(computed[0], "sum")  # type: ignore[index]
        for loss, norm in zip(*computed.tolist(), strict=True):
            step += 1
            self._check_finite("the loss", loss, step)
            # A scaler of float16 meets infinite gradients at times, and leaves such steps out.
            if self.accelerator.scaler is None:
                self._check_finite("the gradient's norm", norm, step)
            self.state.recent.append(loss)
            self._loss = loss

    def _keep_pace(self, *, sure: bool) -> None:
        """Fits the schedule into the time that there is."""
        state = self.state
        self.pace.note(state.step, self._now)
        possible = self.pace.possible(self._validation)
        if possible is None:
            return
        state.total = min(possible, self._most)
        self.progress.shorten(state.total)
        if sure and not self._told and state.total < self._most:
            self._told = True
            self.say(f"{self.pace.minutes:g} minutes allow about {state.total:,} steps")

    def _step(self, batch: Batch) -> None:
        options, state = self.setup.options, self.state
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(state.step)
        loss = self._gradients(batch)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.samples += examples_in(batch) * self.accelerator.num_processes
        state.tokens += tokens_in(batch) * self.accelerator.num_processes
        self._unread.append((loss, loss.new_zeros(()) if norm is None else norm.to(loss)))
        if self._reads_now():
            self._read()
        self.progress.advance(1, self._note())

    def _rate(self, step: int) -> float:
        options, state, untrained = self.setup.options, self.state, self.setup.untrained
        highest = highest_rate(options, untrained=untrained)
        if state.rate is not None:
            highest = rate_for(state.total, state.rate, highest)
        return learning_rate(options, step, state.total, untrained=untrained, highest=highest)

    def _test_rate(self) -> float | None:
        """Find the rate of short runs where none is given and a teacher is imitated alone."""
        setup, options = self.setup, self.setup.options
        count = min(EXAMPLES, len(setup.data.train) // 2)
        given = options.learning_rate is not None or setup.task is not None
        alone = blocks_first(options) or not setup.imitates
        if given or alone or setup.untrained or not count:
            return None
        size = max(1, options.batch_size // self.state.parts)
        while True:
            try:
                return self._rate_found(count, size)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                clear_device_cache(garbage_collection=True)
                if size == 1:
                    return None  # the first step says what to do
                size //= 2
            finally:
                self.optimizer.zero_grad(set_to_none=True)

    def _rate_found(self, count: int, size: int) -> float:
        """Find the highest rate by two times so many examples, of which `size` are read at once."""
        setup = self.setup
        one, two = (
            [part.tolist() for part in torch.arange(first, first + count).split(size)]
            for first in (0, count)
        )
        self.model.train()
        for batch in self.losses.on_host(one):
            self._gradients(batch)
        self.model.eval()
        return find_rate(
            setup.trained,
            self.losses.loss_on(two),
            highest=highest_rate(setup.options),
            batch_size=setup.options.batch_size * self.accelerator.num_processes,
        )

    def _check_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            options, untrained = self.setup.options, self.setup.untrained
            own = highest_rate(options, untrained=untrained)
            usual = options.model_copy(update={"learning_rate": None})
            lower = min(own / 4, highest_rate(usual, untrained=untrained))
            raise TrainingError(
                f"{what} is {value} at step {step:,}",
                f"lower the learning rate, such as `--lr {lower:g}`, or train in float32: "
                "`--mixed-precision no`",
            )

    def _gradients(self, batch: Batch) -> Tensor:
        """Gradients of one step; where memory runs out, the batch is cut into smaller pieces."""
        state, count = self.state, examples_in(batch)
        alone = state.step < block_steps(self.setup.options, state.total)
        while True:
            try:
                with self.rounded.applied(self.setup.trained, quick=True):
                    return self.losses.gradients(batch, state.parts, alone=alone)
            except RuntimeError as error:
                # Another process would wait for ever for the gradients of this one.
                final = state.parts >= count or self.accelerator.num_processes > 1
                self._check_memory(error, -(-count // state.parts), final=final)
            self.optimizer.zero_grad(set_to_none=True)
            state.parts *= 2
            clear_device_cache()
            self.say(
                f"memory ran out; going on with {-(-count // state.parts)} examples at a time, "
                "which changes nothing else"
            )

    def _check_memory(self, error: RuntimeError, count: int, *, final: bool) -> None:
        """Passes lack of memory with so many examples at a time, unless fewer are impossible."""
        if not is_out_of_memory(error):
            raise error
        if final:
            raise TrainingError(
                f"memory ran out at step {self.state.step + 1:,} with {count} examples at a time",
                "shorten texts (`--max-length`), lower `--batch-size`, or compute blocks twice: "
                "`--gradient-checkpointing`",
            ) from error

    def _note(self) -> str:
        state, validation = self.state, self._validation
        note = f"loss {self._loss:.4g}  {self.validated} {state.curve[-1].validation:.4g}"
        each, left = self.pace.each(validation), self.pace.ahead(state.total, validation)
        if each is None or left is None:
            return note
        rate = state.tokens / state.step / each
        return f"{note}  {rate:,.0f} tokens/s  {int(left) // 60}:{int(left) % 60:02d} left"

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
        value = self._validation_value()
        self._check_finite(f"the {self.validated}", value, state.step)
        point = CurvePoint(
            step=state.step,
            loss=sum(state.recent) / len(state.recent) if state.recent else None,
            validation=value,
            learning_rate=self._rate(max(0, state.step - 1)),
            seconds=round(self._seconds(), 2),
        )
        state.recent.clear()
        state.curve.append(point)
        self.accelerator.log(point.model_dump(exclude_none=True), step=state.step)
        higher = task is not None and task.higher_is_better
        if state.best is not None and not (value > state.best if higher else value < state.best):
            state.stale += 1
            return
        state.best, state.best_step, state.stale = value, state.step, 0
        if self.accelerator.is_main_process:
            weights = {name: item.detach().cpu() for name, item in self.setup.trained.items()}
            self.checkpoints.keep_best(weights, state.step)

    def _validation_value(self) -> float:
        """The validated number, with smaller batches where memory runs out."""
        size = max(1, self.setup.options.batch_size // self.state.parts)
        while True:
            try:
                with self.rounded.applied(self.setup.trained):
                    return self.losses.validate(size)
            except RuntimeError as error:
                self._check_memory(error, size, final=size == 1)
                size //= 2

    def _restore_best(self) -> None:
        self.accelerator.wait_for_everyone()
        trained = self.setup.trained
        with torch.no_grad():
            for name, value in self.checkpoints.best(self.state.best_step).items():
                trained[name].copy_(value)
        self.accelerator.wait_for_everyone()  # the main process removes them when it has written

    def _save(self) -> None:
        self._read()
        self.state.seconds = self._seconds()
        main, wait = self.accelerator.is_main_process, self.accelerator.wait_for_everyone
        self.checkpoints.save(self.state, self._save_state, wait, main)

    def _save_state(self, folder: Path) -> None:
        """Saves everything, as it is in memory.

        In safetensors it would leave out what shares memory, for which it takes empty parameters
        too, once they are on a GPU; and it would not load what it had left out.
        """
        self.accelerator.save_state(str(folder), safe_serialization=False)
