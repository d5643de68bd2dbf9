"""The tasks, by name."""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from typing import Any

from tcompress.errors import InputError
from tcompress.evaluation.tasks.base import Prepared, Task
from tcompress.evaluation.tasks.classification import Classification
from tcompress.evaluation.tasks.forecasting import Forecasting
from tcompress.evaluation.tasks.image_classification import ImageClassification
from tcompress.evaluation.tasks.masked_lm import MaskedLM
from tcompress.evaluation.tasks.perplexity import Perplexity
from tcompress.evaluation.tasks.response_selection import ResponseSelection
from tcompress.evaluation.tasks.retrieval import Retrieval
from tcompress.evaluation.tasks.sts import Similarity
from tcompress.evaluation.tasks.volume_classification import VolumeClassification

__all__ = ["TASKS", "Prepared", "Task", "find_task"]

TASKS: dict[str, type[Task]] = {
    kind.name: kind
    for kind in (
        Classification,
        Similarity,
        Perplexity,
        MaskedLM,
        ImageClassification,
        VolumeClassification,
        Forecasting,
        Retrieval,
        ResponseSelection,
    )
}


def find_task(name: str, **options: Any) -> Task:
    """Gives a task.

    Args:
        name: Its name.
        **options: Its options; None stands for the default.

    Raises:
        InputError: There is no such task, or it has no such option.
    """
    if name not in TASKS:
        known = ", ".join(f"`{task}`" for task in TASKS)
        close = get_close_matches(name, list(TASKS), 1)
        raise InputError(
            f"unknown task `{name}`; tasks are {known}",
            f"did you mean `{close[0]}`?" if close else "choose one of them",
        )
    kind = TASKS[name]
    given = {option: value for option, value in options.items() if value is not None}
    known_options = {field.name for field in dataclasses.fields(kind)}
    for option in given:
        if option not in known_options:
            raise InputError(
                f"the task `{name}` has no option `--{option}`", f"leave out `--{option}`"
            )
    return kind(**given)
