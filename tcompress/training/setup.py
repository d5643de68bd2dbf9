"""Everything that a training run needs, put together before its first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import PreTrainedModel

from tcompress.artifact.manifest import Manifest
from tcompress.attention.module import ReplacementModule
from tcompress.data.inputs import inputs_of
from tcompress.data.labels import is_independent, label_names, order_of
from tcompress.data.sentences import PLAIN, SentenceEncoder
from tcompress.errors import InputError, Problems, listed
from tcompress.hf.opening import has_head, load_model, pick_device
from tcompress.linalg.rounding import Rounding
from tcompress.models import SourceModel, tell_padding
from tcompress.options import Finetune
from tcompress.progress import Progress
from tcompress.roles import Roles
from tcompress.structures.modules.embedding import StructuredEmbedding
from tcompress.structures.modules.experts import StructuredExperts
from tcompress.structures.modules.linear import StructuredLinear
from tcompress.structures.modules.shared import TransformModule
from tcompress.training.objectives import (
    OBJECTIVES,
    Objective,
    Observer,
    Setting,
    TokenTeachers,
    loaded_roles,
)
from tcompress.training.rounded import round_frozen, roundings_of
from tcompress.training.schedule import blocks_first, texts_beside
from tcompress.training.targets import TextTeacher
from tcompress.training.task_heads import with_head
from tcompress.training.tasks import TASKS, TrainingTask
from tcompress.training.teacher import blocks_to_imitate, check_length
from tcompress.training.teaching import (
    COMPARABLE,
    OTHER_TASK,
    Kind,
    Teaching,
    arranged,
    predicted,
    predicts,
)
from tcompress.training.training_data import Data, check_training_data, load_data

_REWRITTEN = (StructuredLinear, StructuredExperts, TransformModule, ReplacementModule)


@dataclass
class Setup:
    """A run before its first step; `untrained` weights are as they began at random."""

    options: Finetune
    load: Callable[[], PreTrainedModel]  # opens the model as it was at first
    model: PreTrainedModel
    observer: Observer
    teacher_observer: Observer | TokenTeachers | None
    objectives: list[tuple[Objective, float]]
    data: Data
    task: TrainingTask | None
    source: SourceModel
    roundings: Mapping[str, Rounding | None]  # of what will be stored, by key of the source
    untrained: bool = False
    opening: float = 0.0  # seconds that it took to load the model
    readers: Sequence[TextTeacher] = ()  # teachers that read the texts before the first step
    sentences: SentenceEncoder = PLAIN
    kind: Kind = "states"

    @property
    def validated(self) -> str:
        """Name of the validated number."""
        task = self.task
        return "validation loss" if task is None or task.validated == "loss" else task.validated

    @property
    def imitates(self) -> bool:
        """True if there is a teacher."""
        return self.teacher_observer is not None or bool(self.readers)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained."""
        named = self.model.named_parameters()
        return {name: value for name, value in named if value.requires_grad}

    @property
    def changed(self) -> dict[str, Tensor]:
        """All that training changes: what is trained, and statistics of batches."""
        ends = ("running_mean", "running_var")
        counted = {n: value for n, value in self.model.named_buffers() if n.endswith(ends)}
        return {**self.trained, **counted}


def set_up(
    source: SourceModel,
    teachers: Sequence[SourceModel],
    options: Finetune,
    manifest: Manifest | None,
    progress: Progress | None = None,
) -> Setup:
    """Load data and models, and decide what is trained on what."""
    _check_checkpointing(source, options)
    from_random = manifest is not None and manifest.source.init == "random"
    depth = None if manifest is None else manifest.plan.depth
    teaching = arranged(source, teachers, options, depth)
    names = _objective_weights(source, teaching, options, from_random=from_random)
    sentences, task = _sentences_and_task(source, options, names)
    first = next(iter(teachers), None)
    data = load_data(
        source,
        options.data,
        task,
        options.seed,
        first,
        progress,
        texts_beside(options),
        variants=teaching.kind == "vectors",
        device=pick_device(options.device),
    )
    for teacher in teaching.beside:
        compares = teaching.kind != "states" or teacher.model_class is source.model_class
        parts = (data.train, data.validation, *(data.held.values() if compares else ()))
        check_length(teacher, max(length for part in parts for length in part.lengths))
    set_seed(options.seed)
    data, head = with_head(task, data, source, first if "logits" in names else None)
    task = task and task.suited_to(data.labels)
    begun = time.perf_counter()
    load = partial(load_model, source, task.head if task else None, dtype=torch.float32, **head)
    model = load()
    opening = time.perf_counter() - begun
    if options.task == "causal-lm" and _sees_ahead(model):
        raise InputError(
            f"a `{type(model).__name__}` sees the tokens that it is to predict",
            "choose the task `masked-lm`, or a model that writes text",
        )
    if options.task == "pretraining" and not _tells_what_follows(model):
        raise InputError(
            f"`{type(model).__name__}` has no head that tells whether a text follows another, "
            "which the task `pretraining` trains beside hidden words",
            "choose the task `masked-lm`, or a model with both heads, such as BERT",
        )
    roles = loaded_roles(source, model)
    projections = any(OBJECTIVES[name].needs_projections for name in names)
    observer = Observer(model, roles, range(len(roles.blocks)), projections)
    stacks = sorted({block.name.rpartition(".")[0] for block in roles.blocks})
    if blocks_first(options) and len(stacks) > 1:
        raise InputError(
            f"the stage `blocks` needs one stack of blocks, but the model has {len(stacks)}: "
            f"{listed(stacks)}",
            "leave `stage` and `block_steps` out",
        )
    teacher_observer = None
    if teaching.beside:
        watched = []
        for teacher in teaching.beside:
            taught = load_model(teacher, dtype=torch.float32).requires_grad_(requires_grad=False)
            taught_roles, blocks = loaded_roles(teacher, taught), list[int]()
            if teaching.kind == "states":
                blocks = blocks_to_imitate(roles, taught_roles, options.teacher_blocks, depth)
            watched.append(Observer(taught, taught_roles, blocks, projections))
            if "logits" in names:
                named = options.teacher != ("source",)
                watched[-1].order = _order_of_logits(model, taught, named=named)
            tell_padding(taught, data.pad)
        teacher_observer = watched[0] if teaching.kind == "states" else TokenTeachers(watched)
    tell_padding(model, data.pad)
    if not (not teaching.teachers if options.dropout is None else options.dropout):
        drop_nothing(model)
    elif teaching.beside:
        drop_no_blocks(model)  # whose states are compared with the teacher's
    setting = Setting(
        temperature=options.temperature,
        per_token=predicted(type(model)) != "classes",
        per_target=task is not None and task.needs.generates,
        independent=is_independent(model.config),
        heads=getattr(source.config.get_text_config(), "num_attention_heads", None) or 1,
        causal=any(
            getattr(module, "is_causal", False) is True for module in observer.modules[-1].modules()
        ),
        sentences=sentences,
        task=task.loss if task else None,
    )
    objectives = [(OBJECTIVES[name](setting), weight) for name, weight in names.items()]
    fresh = task is not None and task.head is not None and not has_head(source, task.head)
    _choose_trained(model, roles, options, from_random=from_random, fresh_head=fresh)
    untrained = manifest is not None and manifest.is_untrained
    setup = Setup(
        options,
        load,
        model,
        observer,
        teacher_observer,
        objectives,
        data,
        task,
        source,
        roundings_of(source, options, manifest),
        untrained,
        opening,
        _readers(teaching, model, options),
        sentences,
        teaching.kind,
    )
    if options.bits is not None:  # else they are as they are stored
        round_frozen(model, source, setup.roundings)
    return setup


def _sees_ahead(model: PreTrainedModel) -> bool:
    """True if predictions depend on tokens that come later, as those of encoders do."""
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
    with torch.no_grad(), suppress(Exception):  # what such a model lacks is said where it is read
        first, second = model(input_ids=ids).logits[:, :-1].float()
        return not torch.allclose(first, second, atol=1e-3)
    return False


def _tells_what_follows(model: PreTrainedModel) -> bool:
    """True of models pretrained as BERT was, whose families all call that head alike."""
    return any(name.endswith("seq_relationship") for name, _ in model.named_modules())


def check_run(source: SourceModel, teachers: Sequence[SourceModel], options: Finetune) -> None:
    """Refuse, before any work, what a run on a model made of the source would meet."""
    problems = Problems()
    with problems.collected():
        pick_device(options.device)
    with problems.collected():
        _check_checkpointing(source, options)
    names: dict[str, float] = {}
    with problems.collected():
        from_random = source.seed is not None
        teaching = arranged(source, teachers, options)
        names = _objective_weights(source, teaching, options, from_random=from_random)
    with problems.collected():
        _, task = _sentences_and_task(source, options, names)
        first = next(iter(teachers), None)
        check_training_data(source, options.data, task, options.seed, first)
    problems.report()


def _check_checkpointing(source: SourceModel, options: Finetune) -> None:
    kind = source.model_class
    if options.gradient_checkpointing and not getattr(kind, "supports_gradient_checkpointing", 1):
        raise InputError(
            f"Transformers cannot compute blocks of `{kind.__name__}` twice",
            "leave out `--gradient-checkpointing`; `--accumulate 8` takes less memory too",
        )


def _objective_weights(
    source: SourceModel, teaching: Teaching, options: Finetune, *, from_random: bool
) -> dict[str, float]:
    """Weights of the objectives, given or by default; fails where nothing can be learnt."""
    names = {str(name): weight for name, weight in options.objectives.items()}
    names = names or _default_weights(source, teaching, options)
    if not names and from_random:
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
    if teaching.teachers:
        return names
    if blocks_first(options):
        text = "the stage `blocks` needs a teacher, whose states blocks are trained on"
        raise InputError(text, "add `--teacher MODEL`, or leave `stage` and `block_steps` out")
    lonely = ", ".join(f"`{name}`" for name in names if OBJECTIVES[name].needs_teacher)
    if lonely:
        raise InputError(f"{lonely} need a teacher, but there is none", "add `--teacher MODEL`")
    return names


def _default_weights(
    source: SourceModel, teaching: Teaching, options: Finetune
) -> dict[str, float]:
    names = ["task"] if options.task else []
    if teaching.teachers and teaching.kind != "states":
        names += COMPARABLE[teaching.kind]
    elif teaching.teachers:
        names.append("hidden")
        prediction = predicts(source, options)
        reads_text = source.model_class.main_input_name == "input_ids"
        if prediction is not None and prediction == predicted(teaching.teachers[0].model_class):
            names.append("logits")
        elif options.task is None and reads_text and not inputs_of(source).decoder:
            names.append("embedding")
    return dict.fromkeys(names, 1.0)


def _choose_trained(
    model: PreTrainedModel,
    roles: Roles,
    options: Finetune,
    *,
    from_random: bool,
    fresh_head: bool,
) -> None:
    """Freeze what is not trained; what began at random, model or head, may not stay as it is."""
    how, paths = options.train, list[str]()
    if how == "auto":
        how = "all" if options.task or from_random else "blocks"
    if how == "blocks":
        paths = [block.name for block in roles.blocks] + _paths(model, StructuredEmbedding)
    elif how == "rewritten":
        paths = _paths(model, *_REWRITTEN)
        if not paths:
            hint = "train `blocks` or `all` of it instead"
            raise InputError("no layer of the model is rewritten", hint)
    prefixes, base = tuple(f"{path}." for path in paths), f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters():
        is_new = fresh_head and not name.startswith(base)
        parameter.requires_grad_(how == "all" or is_new or name.startswith(prefixes))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        hint = "train `blocks` or `all` of it instead"
        raise InputError("what is rewritten of the model has nothing that can be trained", hint)


def _paths(model: PreTrainedModel, *kinds: type[nn.Module]) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, kinds)]


def drop_nothing(model: nn.Module) -> None:
    """Turn dropout and layer dropping off, wherever a module has them."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def drop_no_blocks(model: nn.Module) -> None:
    """Turn layer dropping off, wherever a module has it."""
    for module in model.modules():
        for name in [name for name in vars(module) if name.lower() == "layerdrop"]:
            setattr(module, name, 0.0)


def _sentences_and_task(
    source: SourceModel, options: Finetune, names: Iterable[str]
) -> tuple[SentenceEncoder, TrainingTask | None]:
    """Pooling of sentences to embeddings, where that matters, and the task."""
    sentences = PLAIN
    if options.task == "sts":
        sentences = SentenceEncoder.of(source)
    elif "embedding" in names or "similarities" in names:
        # Modules that are unknown are not rewritten: imitating what they read is enough.
        sentences = SentenceEncoder.of(source, last=False)
    return sentences, TASKS[options.task](sentences) if options.task else None


def _readers(
    teaching: Teaching, model: PreTrainedModel, options: Finetune
) -> tuple[TextTeacher, ...]:
    """Teachers that read texts by themselves, with the student's order of classes."""
    if teaching.kind not in ("vectors", "classes"):
        return ()
    labels = label_names(model.config) if teaching.kind == "classes" else ()
    for teacher in teaching.teachers if labels else ():
        if (count := len(label_names(teacher.config))) != len(labels):
            text = f"the model predicts {len(labels)} classes, its teacher `{teacher.id}` {count}"
            raise InputError(text, OTHER_TASK)
    length = options.data.max_length
    return tuple(
        TextTeacher.of(teacher, length, teaching.kind, labels) for teacher in teaching.teachers
    )


def _order_of_logits(
    model: PreTrainedModel, teacher: PreTrainedModel, *, named: bool
) -> list[int] | None:
    """Find the label of the teacher for each of the model's; None where they are the same.

    Other labels are refused of a teacher that was named; those of the dense model are its own.
    """
    kind, other_kind = predicted(type(model)), predicted(type(teacher))
    if kind != other_kind:
        raise InputError(
            f"the objective `logits` compares predictions, but `{type(model).__name__}` predicts "
            f"{kind or 'nothing'}, its teacher `{type(teacher).__name__}` "
            f"{other_kind or 'nothing'}",
            OTHER_TASK,
        )
    if kind == "tokens":
        return None
    labels, taught = (label_names(item.config) for item in (model, teacher))
    if len(labels) != len(taught):
        text = f"the model predicts {len(labels)} classes, its teacher {len(taught)}"
        raise InputError(text, OTHER_TASK)
    order = order_of(labels, taught)
    if order is None and named:
        text = f"the model predicts {listed(labels)}, its teacher {listed(taught)}"
        raise InputError(text, OTHER_TASK)
    return None if order in (None, [*range(len(labels))]) else order
