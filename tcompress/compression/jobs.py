"""What all processes do together when one of them compresses: conversions, and the healing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tcompress import processes
from tcompress.artifact.reader import open_checked
from tcompress.conversion.converter import convert
from tcompress.models import SourceModel
from tcompress.options import Convert, Finetune
from tcompress.progress import Progress, Silent
from tcompress.search.search import Statistics
from tcompress.training.finetuning import finetune


@dataclass(frozen=True)
class Job:
    """One conversion of the model that was given, or the healing of a conversion.

    Attributes:
        settings: How it is done.
        folder: What is written.
        narrowed: The conversion that is healed.
        statistics: What conversions share that one process makes.
    """

    settings: Convert | Finetune
    folder: Path
    narrowed: Path | None = None
    statistics: Statistics | None = None


def perform(
    source: SourceModel,
    job: Job,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Do a job; several processes do it together."""
    if isinstance(job.settings, Convert):
        shared = {"statistics": job.statistics, "progress": progress}
        convert(source, job.settings, job.folder, force=True, **shared)  # type: ignore[arg-type]
        return
    model = open_checked(str(job.narrowed), trust=source.trust_remote_code)
    heard = progress or Silent()
    with processes.alone():  # accelerate has processes of its own
        finetune(model, job.settings, job.folder, force=True, progress=heard, say=say)


def follow(model: Path | str, *, token: str | None = None, trust_remote_code: bool = False) -> None:
    """Take part in what the first process does, until it says that it is over."""
    opened = cache(lambda: open_checked(str(model), token=token, trust=trust_remote_code))
    processes.Crew[Job](lambda job: perform(opened(), job)).follow()
