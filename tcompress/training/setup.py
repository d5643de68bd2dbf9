"""Everything that a training run needs, put together before its first step."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tcompress.artifact.manifest import Manifest
from tcompress.attention.module import MechanismModule
from tcompress.data.inputs import MEAN, Pooling
from tcompress.errors import InputError, Problems, listed
from tcompress.hf.opening import load_model, pick_device
from tcompress.models import SourceModel
from tcompress.options import Finetune
from tcompress.planning.entries import DepthPlan
from tcompress.roles import Anatomy
from tcompress.structures.modules.embedding import StructuredEmbedding
from tcompress.structures.modules.experts import StructuredExperts
from tcompress.structures.modules.linear import StructuredLinear
from tcompress.structures.modules.shared import SideModule
from tcompress.training.objectives import OBJECTIVES, Objective, Observer, Setting, skeleton_anatomy
from tcompress.training.tasks import TASKS, Task
from tcompress.training.teacher import blocks_to_imitate, check_length, check_teacher
from tcompress.training.training_data import Data, check_training_data, head_options, load_data

# How long a run is, and the learning rate of each step.


HEALING_STEPS = 1000
TASK_EPOCHS = 3.0
"""Where neither steps nor epochs are given."""

HEALING_RATE = 1e-3
TASK_RATE = 1e-4
"""Where no learning rate is given; measured in docs/healing.md."""

SCRATCH_RATE = 1e-3
"""Likewise for models that begin at random; measured in docs/scratch.md."""

_FIRST = 5  # steps, or
_EARLY = 0.1  # part of the time, before the pace is taken for known
SURE = 25
"""Steps after which it hardly changes any more."""


def total_steps(options: Finetune, per_epoch: int) -> int:
    """Number of optimizer steps.

    Args:
        options: Settings of the run.
        per_epoch: Steps in a pass over the data.
    """
    if options.steps is not None:
        return options.steps
    if options.epochs is None and options.task is None:
        return HEALING_STEPS
    return max(1, round((options.epochs or TASK_EPOCHS) * per_epoch))


def block_steps(options: Finetune, total: int) -> int:
    """Number of first steps in which each block is trained alone.

    Args:
        options: Settings of the run.
        total: Steps in all.
    """
    if not blocks_first(options):
        return 0
    return total // 4 if options.block_steps is None else options.block_steps


def blocks_first(options: Finetune) -> bool:
    """Whether a run begins with blocks alone; the number of such steps asks for them too."""
    return options.stage == "blocks" or options.block_steps is not None


def highest_rate(options: Finetune, *, untrained: bool = False) -> float:
    """The learning rate after warming up.

    Args:
        options: Settings of the run.
        untrained: Whether the model's weights are as they were drawn at random.
    """
    if options.learning_rate is not None:
        return options.learning_rate
    if untrained:
        return SCRATCH_RATE
    return HEALING_RATE if options.task is None else TASK_RATE


def learning_rate(options: Finetune, step: int, total: int, *, untrained: bool = False) -> float:
    """Learning rate of a step.

    Args:
        options: Settings of the run.
        step: Steps done before.
        total: Steps in all.
        untrained: Whether the model's weights are as they were drawn at random.
    """
    highest = highest_rate(options, untrained=untrained)
    warm = round(options.warmup * total)
    if step < warm:
        return highest * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, total - warm))
    falling = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "constant": 1.0,
    }[options.schedule]
    return highest * falling


@dataclass
class Pace:
    """Finds out how many steps a time limit allows, so that the schedule comes to its end in time.

    Attributes:
        minutes: The limit; None for none.
        every: Steps between validations.
    """

    minutes: float | None
    every: int = 100
    _times: list[tuple[int, float]] = field(default_factory=list)

    def possible(self, step: int, seconds: float, validation: float = 0.0) -> int | None:
        """Total number of steps that the limit allows at the pace so far.

        Args:
            step: Steps done; the first call comes before those that count.
            seconds: Time spent.
            validation: Time that a validation takes.

        Returns:
            The number, None where there is no limit and while the pace is unknown: for some steps,
            or a tenth of the time where steps take long.
        """
        if self.minutes is None:
            return None
        if len(self._times) < 3:
            self._times.append((step, seconds))
        first, limit = self._times[0][0], 60 * self.minutes
        if step == first or (step - first <= _FIRST and seconds < _EARLY * limit):
            return None
        before, start = self._times[min(1, len(self._times) - 2)]  # the first step is a slow one
        inside = (step - 1) // self.every - max(0, before - 1) // self.every  # validations between
        each = max((seconds - start - inside * validation) / (step - before), 1e-9)
        return step + max(0, int((limit - seconds) / (each + validation / self.every)))

    def left(self, seconds: float) -> float:
        """Returns the seconds that the limit leaves; infinite where there is none."""
        return math.inf if self.minutes is None else 60 * self.minutes - seconds

    def over(self, seconds: float) -> bool:
        """Tells whether time is up."""
        return self.left(seconds) < 0


# Everything that a training run needs, put together before its first step.


# What logits are about, by parts of the names of model classes, and of the heads that are added.
_PREDICTED = {
    "tokens": ("CausalLM", "MaskedLM", "LMHead", "ConditionalGeneration"),
    "classes of tokens": ("TokenClassification",),
    "classes": ("SequenceClassification", "ImageClassification"),
}
_HEADS = {"masked-lm": "tokens", "causal-lm": "tokens", "regression": "scores"}


@dataclass
class Setup:
    """A run before its first step.

    Attributes:
        options: The settings.
        source: The student on disk.
        model: The student.
        teacher: The teacher, if there is one.
        observer: Reads the student's states.
        teacher_observer: Reads the teacher's.
        objectives: Terms of the loss and their weights.
        data: Training and validation data.
        task: The task, if there is one.
        trained: Names of the parameters that are trained.
        untrained: Whether the student's weights are as they were drawn at random.
    """

    options: Finetune
    source: SourceModel
    model: PreTrainedModel
    teacher: PreTrainedModel | None
    observer: Observer
    teacher_observer: Observer | None
    objectives: list[tuple[Objective, float]]
    data: Data
    task: Task | None
    trained: list[str]
    untrained: bool = False


def set_up(
    source: SourceModel, teacher: SourceModel | None, options: Finetune, manifest: Manifest | None
) -> Setup:
    """Loads data and models, and decides what is trained on what.

    Args:
        source: The student.
        teacher: The teacher, if there is one.
        options: The settings.
        manifest: The student's manifest, if it has one.

    Raises:
        InputError: Model, teacher, data and task do not fit one another.
    """
    drawn = manifest is not None and manifest.source.init == "random"
    names = objective_names(source, teacher, options, drawn=drawn)
    pooling = _pooling(source, options, names)
    task = TASKS[options.task](pooling) if options.task else None
    if teacher is not None:
        check_teacher(source, teacher)
    data = load_data(source, options.data, task, options.seed)
    if teacher is not None:
        check_length(teacher, max(data.train.lengths + data.validation.lengths))
    seed_everything(options.seed)
    model = load_model(
        source,
        task.head if task else None,
        dtype=torch.float32,
        **head_options(task, data, source, teacher if "logits" in names else None),
    )
    anatomy = skeleton_anatomy(source, model)
    projections = any(OBJECTIVES[name].needs_projections for name in names)
    observer = Observer(model, anatomy, projections=projections)
    if blocks_first(options):
        _check_one_stack(anatomy)
    teacher_observer = None
    if teacher is not None:
        depth = None if manifest is None else manifest.plan.depth
        teacher_observer = _observed(teacher, anatomy, options, depth, projections=projections)
        _check_logits(model, teacher_observer.model, names)
    for reader in (model, teacher_observer.model if teacher_observer else None):
        _tell_padding(reader, data.pad)
    if not (teacher is None if options.dropout is None else options.dropout):
        drop_nothing(model)
    setting = _setting(source, observer, options, pooling, task)
    objectives = [(OBJECTIVES[name](setting), weight) for name, weight in names.items()]
    for objective, _ in objectives:
        if objective.name == "logits":
            per_token = _predicted(type(model)) != "classes"
            objective.per_token = per_token  # type: ignore[attr-defined]
    trained = choose_trained(model, anatomy, options, drawn=drawn)
    return Setup(
        options=options,
        source=source,
        model=model,
        teacher=teacher_observer.model if teacher_observer else None,
        observer=observer,
        teacher_observer=teacher_observer,
        objectives=objectives,
        data=data,
        task=task,
        trained=trained,
        untrained=manifest is not None and manifest.is_untrained,
    )


def check_run(source: SourceModel, teacher: SourceModel | None, options: Finetune) -> None:
    """Refuses, before any work, what a run on a model made of the source would meet.

    Args:
        source: The dense model that the student is made from.
        teacher: The teacher, if there is one.
        options: The settings.

    Raises:
        InputError: Teacher, data, device and task do not fit one another; names all problems.
    """
    problems = Problems()
    with problems.collected():
        pick_device(options.device)
    names: dict[str, float] = {}
    with problems.collected():
        names = objective_names(source, teacher, options, drawn=source.seed is not None)
    if teacher is not None:
        with problems.collected():
            check_teacher(source, teacher)
    with problems.collected():
        pooling = _pooling(source, options, names)
        task = TASKS[options.task](pooling) if options.task else None
        check_training_data(source, options.data, task, options.seed)
    problems.report()


def _observed(
    teacher: SourceModel,
    student: Anatomy,
    options: Finetune,
    depth: DepthPlan | None,
    *,
    projections: bool,
) -> Observer:
    """Loads the teacher."""
    model = load_model(teacher, dtype=torch.float32).requires_grad_(requires_grad=False)
    anatomy = skeleton_anatomy(teacher, model)
    chosen = blocks_to_imitate(student, anatomy, options.teacher_blocks, depth)
    return Observer(model, anatomy, chosen, projections=projections)


def objective_names(
    source: SourceModel, teacher: SourceModel | None, options: Finetune, *, drawn: bool = False
) -> dict[str, float]:
    """Weights of the objectives, given or by default.

    Args:
        source: The student.
        teacher: The teacher, if there is one.
        options: The settings.
        drawn: Whether the student began at random.

    Raises:
        InputError: There is nothing to learn from.
    """
    names: dict[str, float] = {str(name): weight for name, weight in options.objectives.items()}
    if not names:
        if options.task:
            names["task"] = 1.0
        if teacher is not None:
            names["hidden"] = 1.0
            own, other = _will_predict(source, options), _predicted(teacher.model_class)
            if own is not None and own == other:
                names["logits"] = 1.0
            elif options.task is None and _is_text_encoder(source):
                names["embedding"] = 1.0
    if not names and drawn:
        raise InputError(
            f"`{source.id}` began at random, so that there is no dense model to imitate: it needs "
            "a task",
            "give `--task` and `--data` with labels, or `--teacher MODEL` to imitate",
        )
    if not names:
        raise InputError(
            f"there is nothing to learn from: `{source.id}` has no known teacher, and no task is "
            "given",
            "give `--teacher MODEL` to imitate, or `--task` and `--data` with labels",
        )
    if "task" in names and not options.task:
        raise InputError("the objective `task` needs a task", "add `--task`")
    if blocks_first(options) and teacher is None:
        raise InputError(
            "the stage `blocks` needs a teacher, whose states blocks are trained on",
            "add `--teacher MODEL`, or leave `stage` and `block_steps` out",
        )
    lonely = [name for name in names if OBJECTIVES[name].needs_teacher and teacher is None]
    if lonely:
        listed = ", ".join(f"`{name}`" for name in lonely)
        raise InputError(f"{listed} need a teacher, but there is none", "add `--teacher MODEL`")
    return names


def _tell_padding(model: PreTrainedModel | None, pad: int) -> None:
    """Lets heads that read the last token of a text know padding, where the config is silent."""
    if model is None or "SequenceClassification" not in type(model).__name__:
        return
    config: Any = model.config.get_text_config()
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = pad


def choose_trained(
    model: PreTrainedModel, anatomy: Anatomy, options: Finetune, *, drawn: bool = False
) -> list[str]:
    """Freezes what is not trained, and names what is.

    Args:
        model: The student.
        anatomy: Its blocks.
        options: The settings.
        drawn: Whether it began at random, so that nothing of it may stay as it is.
    """
    how = options.train
    if how == "auto":
        how = "all" if options.task or drawn else "blocks"
    if how == "all":
        chosen = {name for name, _ in model.named_parameters()}
    elif how == "blocks":
        inside = tuple(f"{block.name}." for block in anatomy.blocks)
        inside += tuple(f"{name}." for name in _tables(model))
        chosen = {name for name, _ in model.named_parameters() if name.startswith(inside)}
    else:
        kinds = (StructuredLinear, StructuredExperts, SideModule, MechanismModule)
        chosen = {
            f"{path}.{name}"
            for path, module in model.named_modules()
            if isinstance(module, kinds)
            for name, _ in module.named_parameters()
        }
        if not chosen:
            raise InputError(
                "no layer of the model is rewritten", "train `blocks` or `all` of it instead"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _tables(model: PreTrainedModel) -> list[str]:
    """Paths of rewritten word embeddings."""
    modules = model.named_modules()
    return [path for path, module in modules if isinstance(module, StructuredEmbedding)]


def drop_nothing(model: nn.Module) -> None:
    """Turns dropout and layer dropping off, wherever a module has them."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def seed_everything(seed: int) -> None:
    """Seeds all generators that training may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _pooling(source: SourceModel, options: Finetune, names: Iterable[str]) -> Pooling:
    """How sentences are pooled, where that matters."""
    if options.task == "sts":
        return Pooling.of(source)
    # What follows the pooling is not rewritten: imitating what it reads is enough.
    return Pooling.of(source, last=False) if "embedding" in names else MEAN


def _setting(
    source: SourceModel,
    observer: Observer,
    options: Finetune,
    pooling: Pooling,
    task: Task | None,
) -> Setting:
    config = source.config.get_text_config()
    inside = observer.modules[-1].modules()
    return Setting(
        temperature=options.temperature,
        heads=getattr(config, "num_attention_heads", None) or 1,
        causal=any(getattr(module, "is_causal", False) is True for module in inside),
        pooling=pooling,
        task=task.loss if task else None,
    )


def _predicted(kind: type[PreTrainedModel]) -> str | None:
    """What the logits of a class of models are about."""
    for what, parts in _PREDICTED.items():
        if any(part in kind.__name__ for part in parts):
            return what
    return None


def _will_predict(source: SourceModel, options: Finetune) -> str | None:
    """What the student's logits are about once it has the head of its task."""
    head = TASKS[options.task].head if options.task else None
    return _predicted(source.model_class) if head is None else _HEADS.get(head, "classes")


def _check_one_stack(anatomy: Anatomy) -> None:
    stacks = sorted({block.name.rpartition(".")[0] for block in anatomy.blocks})
    if len(stacks) > 1:
        raise InputError(
            f"the stage `blocks` needs one stack of blocks, but the model has {len(stacks)}: "
            f"{listed(stacks)}",
            "leave `stage` and `block_steps` out",
        )


def _is_text_encoder(source: SourceModel) -> bool:
    reads_text = source.model_class.main_input_name == "input_ids"
    return reads_text and not source.config.is_encoder_decoder


def _check_logits(
    model: PreTrainedModel, teacher: PreTrainedModel, names: Mapping[str, float]
) -> None:
    if "logits" not in names:
        return
    kind, other_kind = _predicted(type(model)), _predicted(type(teacher))
    if kind != other_kind:
        raise InputError(
            f"the objective `logits` compares predictions, but `{type(model).__name__}` predicts "
            f"{kind or 'nothing'}, its teacher `{type(teacher).__name__}` "
            f"{other_kind or 'nothing'}",
            "give a teacher of the same task, or leave `logits` out of `objectives`",
        )
    own, other = getattr(model.config, "num_labels", 0), getattr(teacher.config, "num_labels", 0)
    if kind != "tokens" and own != other:
        raise InputError(
            f"the model predicts {own} classes, its teacher {other}",
            "give a teacher of the same task, or leave `logits` out of `objectives`",
        )
