"""Ways to imitate teachers: one that is alike runs beside the student, others read texts first.

A teacher of the student's width and tokenizer shows it all that it computes. Of any other one only
what is said of a whole text can be compared: embeddings, classes; or of the next token, where both
have one vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from tcompress.data.encoding import load_tokenizer
from tcompress.data.labels import few, label_names, order_of
from tcompress.data.sentences import SentenceEncoder
from tcompress.errors import DataError, InputError, Problems, listed
from tcompress.hf.opening import has_head
from tcompress.models import SourceModel
from tcompress.options import Finetune
from tcompress.planning.entries import DepthPlan
from tcompress.training.objectives import OBJECTIVES
from tcompress.training.schedule import blocks_first
from tcompress.training.tasks import TASKS

# What logits are about, by parts of the names of model classes, and of the heads that are added.
_PREDICTED = {
    "tokens": "CausalLM|MaskedLM|LMHead|ConditionalGeneration|MTModel|EncoderDecoderModel",
    "classes of tokens": "TokenClassification",
    "classes": "SequenceClassification|ImageClassification",
}
_HEADS = dict.fromkeys(("masked-lm", "causal-lm", "seq2seq"), "tokens") | {"regression": "scores"}

Kind = Literal["states", "logits", "vectors", "classes"]
"""Outputs that are compared: all (`states`), tokens' `logits`; `vectors` or `classes` of texts."""

COMPARABLE: dict[Kind, tuple[str, ...]] = {
    "logits": ("logits",),
    "vectors": ("similarities", "embedding"),
    "classes": ("logits",),
}
"""Objectives, also by default, where teachers are not alike."""

_ALIKE = "give the dense model that it was converted from, or its like"
OTHER_TASK = "give a teacher of the same task, or leave `logits` out of `objectives`"


@dataclass(frozen=True)
class Teaching:
    """Teachers and how they are imitated."""

    teachers: tuple[SourceModel, ...] = ()
    kind: Kind = "states"

    @property
    def beside(self) -> tuple[SourceModel, ...]:
        """The teachers that read every batch as the student does; others read texts first."""
        return self.teachers if self.kind in ("states", "logits") else ()


def predicted(kind: type[PreTrainedModel]) -> str | None:
    """Subject of the logits of a class of models."""
    subjects = (what for what, parts in _PREDICTED.items() if re.search(parts, kind.__name__))
    return next(subjects, None)


def predicts(student: SourceModel, options: Finetune) -> str | None:
    """Subject of the student's logits once it has the head of its task."""
    head = TASKS[options.task].head if options.task else None
    return predicted(student.model_class) if head is None else _HEADS.get(head, "classes")


def arranged(
    student: SourceModel,
    teachers: Sequence[SourceModel],
    options: Finetune,
    depth: DepthPlan | None = None,
) -> Teaching:
    """Decide how teachers are imitated; the `depth` plan says which blocks the student's were.

    Raises:
        InputError: They cannot be compared with the student, or not by the objectives that are
            asked for. All problems are named.
    """
    if not teachers or not _imitates(options):
        return Teaching()
    has_blocks = depth is not None or options.teacher_blocks  # which say whose states are compared
    differ = differences if has_blocks else _all_differences
    if len(teachers) == 1 and not differ(student, teachers[0]):
        return Teaching((*teachers,))
    problems = Problems()
    kind = _kind(student, options)
    if kind is None:
        texts = [text for teacher in teachers for text in _all_differences(student, teacher)]
        text = "; ".join(texts) or "the model has several teachers"
        what = f"a `{student.model_class.__name__}`"
        if options.task is not None:
            what += f" with the task `{options.task}`"
        raise InputError(f"{text}, and {what} puts out nothing to compare", _ALIKE)
    for teacher in teachers:
        with problems.collected():
            _check(student, teacher, kind, options)
    with problems.collected():
        _check_objectives(teachers, kind, options)
    with problems.collected():
        _check_stages(teachers, options)
    problems.report()
    return Teaching((*teachers,), kind)


def _imitates(options: Finetune) -> bool:
    """True if an objective, or a stage, compares with a teacher."""
    names = options.objectives
    needing = (OBJECTIVES[name].needs_teacher for name in names)
    return not names or blocks_first(options) or any(needing)


def differences(student: SourceModel, teacher: SourceModel) -> list[str]:
    """List what keeps a teacher from running beside the student, state by state."""
    reads, other_reads = (kind.model_class.main_input_name for kind in (student, teacher))
    if reads != other_reads:
        return [f"the model reads `{reads}`, its teacher `{teacher.id}` `{other_reads}`"]
    texts = []
    for name, words in (("hidden_size", "width"), ("vocab_size", "vocabulary")):
        size, taught = (_number(model, name) for model in (student, teacher))
        if size is not None and taught is not None and size != taught:
            texts.append(f"the model has {words} {size:,}, its teacher `{teacher.id}` {taught:,}")
    if not texts and not _same_pieces(student, teacher):
        texts.append(f"the model has another tokenizer than its teacher `{teacher.id}`")
    return texts


def _all_differences(student: SourceModel, teacher: SourceModel) -> list[str]:
    """List the `differences`, and whether the teacher has fewer blocks than the student."""
    texts = differences(student, teacher)
    count, taught = (_number(model, "num_hidden_layers") for model in (student, teacher))
    if count is not None and taught is not None and count > taught:
        texts.append(f"the model has {count} blocks, but its teacher `{teacher.id}` only {taught}")
    return texts


def _number(model: SourceModel, name: str) -> int | None:
    value = getattr(model.config.get_text_config(), name, None)
    return value if isinstance(value, int) else None


def _same_pieces(student: SourceModel, teacher: SourceModel) -> bool:
    """True if tokens mean the same to both; models without a tokenizer are taken at their word."""
    if student.model_class.main_input_name != "input_ids" or teacher.vocabulary is not None:
        return True
    files = [model.folder / "tokenizer.json" for model in (student, teacher)]
    with suppress(OSError):
        if files[0].read_bytes() == files[1].read_bytes():
            return True
    with suppress(DataError):
        models = (student, teacher)
        tokenizers = [load_tokenizer(it.folder, trust=it.trust_remote_code) for it in models]
        return bool(tokenizers[0].get_vocab() == tokenizers[1].get_vocab())
    return True


def _kind(student: SourceModel, options: Finetune) -> Kind | None:
    """Outputs that can be compared with teachers that are not alike."""
    if student.model_class.main_input_name != "input_ids":
        return None
    what = predicts(student, options)
    if what == "tokens":
        return "logits"
    if what in ("classes", "scores") and options.task in (None, "classification", "regression"):
        return "classes"
    return "vectors" if student.embeds_texts and options.task in (None, "sts") else None


def _check(student: SourceModel, teacher: SourceModel, kind: Kind, options: Finetune) -> None:
    """Refuse a teacher that says nothing of texts that could be compared."""
    if teacher.model_class.main_input_name != student.model_class.main_input_name:
        raise InputError("; ".join(differences(student, teacher)), _ALIKE)
    if kind == "vectors":
        _check_encoder(student, teacher)
        return
    what, taught = predicts(student, options), predicted(teacher.model_class)
    if what != taught and (what, taught) != ("scores", "classes"):
        raise InputError(
            f"the objective `logits` compares predictions, but the model predicts {what}, its "
            f"teacher `{teacher.id}`, a `{teacher.model_class.__name__}`, {taught or 'nothing'}",
            OTHER_TASK,
        )
    if kind == "logits":
        _check_vocabulary(student, teacher)
    else:
        _check_classes(student, teacher, options)


def _check_encoder(student: SourceModel, teacher: SourceModel) -> None:
    if not teacher.embeds_texts:
        raise InputError(
            f"the model is an encoder of texts, its teacher `{teacher.id}`, a "
            f"`{teacher.model_class.__name__}`, embeds none",
            "give an encoder, as sentence-transformers saves it",
        )
    texts = _all_differences(student, teacher)
    if texts and not SentenceEncoder.of(teacher).stated:
        raise InputError(
            f"{'; '.join(texts)}; embeddings could be compared, but `{teacher.id}` does not say "
            "how its tokens become one: it has no `modules.json`",
            f"{_ALIKE}, or an encoder with its pooling, as sentence-transformers saves it",
        )


def _check_vocabulary(student: SourceModel, teacher: SourceModel) -> None:
    sizes = [_number(model, "vocab_size") for model in (student, teacher)]
    if sizes[0] == sizes[1] and _same_pieces(student, teacher):
        return
    words = [f"{size:,}" if size is not None else "unknown" for size in sizes]
    taught = f"{words[1]}, as many but others" if sizes[0] == sizes[1] else words[1]
    raise InputError(
        f"the objective `logits` compares tokens one by one, but the model has vocabulary "
        f"{words[0]}, its teacher `{teacher.id}` {taught}",
        "give a teacher with the model's own tokenizer",
    )


def _check_classes(student: SourceModel, teacher: SourceModel, options: Finetune) -> None:
    head = TASKS[options.task].head if options.task else None
    if head is not None and not has_head(student, head):
        return  # its labels are those of the data, which are numbered like the teacher's
    labels, taught = (label_names(model.config) for model in (student, teacher))
    if order_of(labels, taught) is None:
        raise InputError(
            f"the model predicts {len(labels)} classes ({few(labels)}), its teacher `{teacher.id}` "
            f"{len(taught)} ({few(taught)})",
            OTHER_TASK,
        )


def _check_objectives(teachers: Iterable[SourceModel], kind: Kind, options: Finetune) -> None:
    """Refuse objectives that need the states of a teacher that is alike."""
    allowed = listed(COMPARABLE[kind])
    unfit = [name for name in options.objectives if name not in (*COMPARABLE[kind], "task")]
    if unfit:
        raise InputError(
            f"{listed(unfit)} cannot be compared with {_named(teachers)}: of a teacher of another "
            f"width or tokenizer, or of several, only {allowed} can",
            f"leave such objectives out, or weigh {allowed}",
        )


def _check_stages(teachers: Iterable[SourceModel], options: Finetune) -> None:
    """Refuse what is about the blocks of a teacher that is alike."""
    if options.stage == "blocks" or options.block_steps is not None or options.teacher_blocks:
        raise InputError(
            "`stage`, `block_steps` and `teacher_blocks` are about blocks of one teacher of the "
            f"model's width and tokenizer, not of {_named(teachers)}",
            "leave `stage`, `block_steps` and `teacher_blocks` out",
        )


def _named(teachers: Iterable[SourceModel]) -> str:
    return ", ".join(f"`{teacher.id}`" for teacher in teachers)
