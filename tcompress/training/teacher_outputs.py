"""Outputs of the teachers for batches: computed beside the student, cached, or computed before.

A teacher that is alike reads every batch as the student does; on a CPU what it computes for texts
that the run meets again is cached (`teacher_cache`). Others have read all texts by themselves
before the first step (`targets`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from tcompress.blockwise.output_sampler import OutputSampler
from tcompress.memory import pins
from tcompress.progress import Progress
from tcompress.training.batches import Encoded, loader, model_inputs, on_device
from tcompress.training.objectives import Batch, Observed, embedded
from tcompress.training.setup import Setup
from tcompress.training.targets import FITTED, Targets
from tcompress.training.teacher_cache import TeacherCache


@dataclass(frozen=True, eq=False)
class TeacherOutputs:
    """The teachers of a run; what has none gets empty outputs."""

    setup: Setup
    accelerator: Accelerator
    targets: Targets | None = None  # of teachers that read texts by themselves
    caches: Mapping[Encoded, TeacherCache] = field(default_factory=dict)

    def cached(self, folder: Path, *data: Encoded) -> TeacherOutputs:
        """Cache outputs for these examples in a folder, where that is faster than the teacher."""
        setup, process = self.setup, self.accelerator.process_index
        if self.accelerator.device.type != "cpu" or setup.teacher_observer is None:
            return self
        if setup.options.shard:  # all processes have to run it together
            return self
        logits = any(objective.name == "logits" for objective, _ in setup.objectives)
        caches: dict[Encoded, TeacherCache] = {}
        for index, examples in enumerate(data):
            if examples.is_fixed:
                path = folder / f"teacher-{index}-{process}"
                caches[examples] = TeacherCache(path, examples.lengths, logits=logits)
                examples.tells_places = True
        return replace(self, caches=caches)

    def with_targets(self, folder: Path, progress: Progress) -> TeacherOutputs:
        """Let teachers that read by themselves do so, before the first step is taken.

        The student is as it began, which is where embeddings are mapped to.
        """
        setup, data = self.setup, self.setup.data
        if not setup.readers:
            return self
        targets = Targets.of(
            setup.readers,
            [data.train, data.validation, *data.held.values()],
            folder,
            self.accelerator,
            progress,
            independent=any(objective.setting.independent for objective, _ in setup.objectives),
        )
        if any(objective.name == "embedding" for objective, _ in setup.objectives):
            path, embed = folder / "map.outputs", self._student_embeddings
            is_main = self.accelerator.is_main_process  # which writes the map
            if setup.options.shard and not is_main and not path.is_file():
                embed([*range(min(len(data.train), FITTED))])  # its part of the student
            with self.accelerator.main_process_first():
                targets = targets.fit_map(data.train, embed, path)
        return replace(self, targets=targets)

    def of_batch(self, batch: Batch, data: Encoded, *, cached: bool = True) -> Observed:
        """Outputs for a batch of these examples, which is on the device."""
        if self.targets is not None:
            return self.targets.observed(data, batch["place"], self.accelerator.device)
        cache, inputs = self.caches.get(data) if cached else None, model_inputs(batch)
        if cache is None:
            return self.of_inputs(inputs)
        # A piece of a batch is padded as the whole of it is.
        tokens = next(iter(inputs.values())).shape[1]
        return cache.observed(batch["place"], lambda: self.of_inputs(inputs), tokens)

    def of_inputs(self, inputs: Batch) -> Observed:
        """Outputs of a teacher that runs beside the student."""
        if self.setup.teacher_observer is None:
            return Observed()
        with torch.no_grad(), self.accelerator.autocast():
            return self.setup.teacher_observer.run(inputs)

    def before_training(self, batch: Batch) -> Observed:
        """Outputs for training examples before the first step, without autocast or cache."""
        if self.targets is not None:
            return self.of_batch(batch, self.setup.data.train)
        assert self.setup.teacher_observer is not None
        return self.setup.teacher_observer.run(model_inputs(batch))

    def of_held_out(self, held: Encoded, batch: Batch, sampler: OutputSampler) -> tuple[Batch, Any]:
        """Inputs of held-out texts with their variants, and what teachers put out for them."""
        if self.targets is None:
            inputs = dict(sampler.with_variants(batch))
            return inputs, self.of_inputs(inputs).output
        outputs = self.targets.observed(held, batch["place"], self.accelerator.device)
        taught = outputs.output if outputs.vectors is None else outputs.vectors
        return model_inputs(batch), taught

    @torch.no_grad()
    def _student_embeddings(self, indices: list[int]) -> Tensor:
        """The student's embeddings of training examples, in float32.  # (texts, width)."""
        setup, device = self.setup, self.accelerator.device
        is_training = setup.model.training
        setup.model.eval()
        order = [part.tolist() for part in torch.tensor(indices).split(64)]
        parts = []
        for host_batch in loader(setup.data.train, setup.data.pad, order, pinned=pins(device)):
            batch = on_device(host_batch, device)
            outputs = setup.observer.run(model_inputs(batch))
            parts.append(embedded(setup.sentences, batch, outputs).cpu())
        setup.model.train(is_training)
        return torch.cat(parts)
