"""The model that is imitated: which one it is, and whether it fits."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tcompress.artifact.manifest import Manifest
from tcompress.artifact.reader import open_checked
from tcompress.data.inputs import inputs_of, longest_text
from tcompress.errors import InputError, Problems, SourceError
from tcompress.models import SourceModel
from tcompress.models.names import local_folder
from tcompress.planning.entries import DepthPlan
from tcompress.roles import Roles
from tcompress.vocabulary.cut import cut_vocabulary


def find_teachers(
    names: Sequence[str],
    manifest: Manifest | None,
    token: str | None = None,
    *,
    trust: bool = False,
    dense: SourceModel | None = None,
) -> list[SourceModel]:
    """Open teachers by name; `dense` is `source`, where nothing is converted yet."""
    problems, teachers = Problems(), list[SourceModel]()
    for name in names:
        with problems.collected():
            is_dense = name == "source" and manifest is None and dense is not None
            teacher = dense if is_dense else find_teacher(name, manifest, token, trust=trust)
            if teacher is None and len(names) > 1:
                raise InputError(
                    f"`{name}` is no teacher here: the model was not converted from another one",
                    "name its dense model by its folder, or leave it out",
                )
            teachers += [] if teacher is None else [teacher]
    problems.report()
    return teachers


def find_teacher(
    name: str, manifest: Manifest | None, token: str | None = None, *, trust: bool = False
) -> SourceModel | None:
    """Open a teacher: `source`, `none`, or a model."""
    if name == "none":
        return None
    if name != "source":
        return with_tokens_of(manifest, open_checked(name, token=token, trust=trust))
    if manifest is None or not manifest.plan.compresses:
        return None
    facts = manifest.source
    if facts.init == "random":  # the dense model knows nothing either
        return None
    try:
        source = SourceModel.open(
            facts.id,
            revision=facts.revision,
            token=token,
            trust_remote_code=trust,
            adapter=manifest.recipe.get("adapter"),
        )
    except SourceError as error:
        raise SourceError(
            f"the dense model `{facts.id}`, which is the teacher, cannot be opened: "
            f"{error.message}",
            "name it with `--teacher FOLDER`, or do without: `--teacher none`",
        ) from error
    if local_folder(facts.id) is not None and source.store.fingerprint() != facts.fingerprint:
        raise SourceError(
            f"`{facts.id}` is not the model that was converted: its weights have changed",
            f"convert it again, or insist on it: `--teacher {shlex.quote(facts.id)}`",
        )
    return with_tokens_of(manifest, source)


def with_tokens_of(manifest: Manifest | None, teacher: SourceModel) -> SourceModel:
    """Leave a teacher the tokens of a converted model, if it has those of its dense one.

    Its other tokens are never read, and what it predicts is shared among those that are left: it
    says of every text what it says of the same tokens with all of its rows.
    """
    vocabulary = None if manifest is None else manifest.plan.vocabulary
    if vocabulary is None:
        return teacher
    size = getattr(teacher.config.get_text_config(), "vocab_size", None)
    return cut_vocabulary(teacher, vocabulary) if size == vocabulary.before else teacher


def blocks_to_imitate(
    student: Roles, teacher: Roles, blocks: Sequence[int], depth: DepthPlan | None = None
) -> list[int]:
    """The teacher's block for each of the student's: given, planned, or at equal distances."""
    count, available = len(student.blocks), len(teacher.blocks)
    if not blocks:
        if depth is not None and (depth.kept, depth.blocks) == (count, available):
            return list(depth.target_blocks)
        if count > available:
            text = f"the model has {count} blocks, but its teacher only {available}"
            raise InputError(text, "give a teacher with at least as many blocks")
        return [(index + 1) * available // count - 1 for index in range(count)]
    wrong = [index for index in blocks if not 0 <= index < available]
    if len(blocks) != count or wrong or list(blocks) != sorted(blocks):
        raise InputError(
            f"`teacher_blocks` are {list(blocks)}, expected {count} blocks from 0 to "
            f"{available - 1} in ascending order",
            "one for each block of the model",
        )
    return list(blocks)


def check_length(teacher: SourceModel, longest: int) -> None:
    """Compare the tokens of the longest text with the positions that the teacher has."""
    limit = longest_text(teacher, inputs_of(teacher))
    if limit is not None and longest > limit:
        text = f"texts have up to {longest} tokens, but the teacher `{teacher.id}` takes {limit}"
        raise InputError(text, f"shorten them: `--max-length {limit}`")
