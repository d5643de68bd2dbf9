"""Where `compress` works: what it reads, the files of models for a runtime, and their times.

Several processes do a `Job` together: conversions, and the healing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from tcompress import processes
from tcompress.artifact.manifest import (
    ExportedFile,
    Manifest,
    Speed,
    one_file,
    read_manifest,
    record,
    write_manifest,
)
from tcompress.artifact.reader import open_checked
from tcompress.artifact.workplace import Workplace
from tcompress.compression.attempts import Goal, Measured
from tcompress.compression.effort import (
    ALIKE,
    MOST_REPEATS,
    REPEATS_OF_SEVERAL,
    TIMINGS,
    Effort,
)
from tcompress.conversion.converter import convert
from tcompress.data.inputs import inputs_of
from tcompress.errors import InputError
from tcompress.exports.onnx_folder import RuntimeFiles, export_onnx
from tcompress.fields import RuntimeName
from tcompress.latency.benchmark import bench, same_pass
from tcompress.latency.paired_timing import InRuntime
from tcompress.models import SourceModel
from tcompress.models.store import WeightStore
from tcompress.options import Bench, Convert, Finetune
from tcompress.options.commands import OnnxFiles
from tcompress.options.compress_options import Compress
from tcompress.processes import Crew
from tcompress.progress import Overview, Progress, Silent
from tcompress.search.search import Statistics
from tcompress.training.finetuning import finetune

DENSE = "dense"
"""Name of the rows of the model that was given."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One conversion of the model that was given, or the healing of a conversion."""

    settings: Convert | Finetune  # how it is done
    folder: Path  # what is written
    narrowed: Path | None = None  # the conversion that is healed
    statistics: Statistics | None = None  # what conversions share that one process makes


@dataclass(frozen=True)
class Work:
    """One run of `compress`, with what it reads and where it works."""

    source: SourceModel
    settings: Compress
    place: Workplace
    progress: Progress
    say: Say
    crew: Crew[Job]
    runtime: RuntimeName = "torch"
    effort: Effort = field(default_factory=Effort)
    began: float = field(default_factory=time.monotonic)

    @property
    def original(self) -> Path:
        """The folder that was given."""
        return Path(self.source.origin or self.source.folder)

    @property
    def goal(self) -> Goal:
        return Goal(self.settings.speedup, self.settings.most_bytes)

    @property
    def minutes_left(self) -> float:
        """Minutes that this run has; those before an interruption are not counted."""
        return self.settings.most_minutes - (time.monotonic() - self.began) / 60

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Say that a stage begins, and keep how long it takes."""
        if isinstance(self.progress, Overview):
            self.progress.begin(stage, self.minutes_left)
        else:
            self.say(f"{stage} ({max(0.0, self.minutes_left):.1f} minutes left)")
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        self.place.note("seconds", stage=stage, seconds=seconds, began=self.began)

    def learn_agreement(self, values: Collection[float]) -> None:
        """Show how far the model agrees with the dense one, where that was measured."""
        if values and isinstance(self.progress, Overview):
            self.progress.learn("agreement", fmean(values))

    def is_ours(self, folder: Path) -> bool:
        """Tell whether a folder is one of this run, and not the user's, which is never changed."""
        return folder.is_relative_to(self.place.folder)

    def seconds_of(self, *stages: str) -> float:
        """Seconds that stages took, whenever that was."""
        notes = self.place.notes("seconds")
        return sum(float(note["seconds"]) for note in notes if note["stage"] in stages)

    def exported(self, model: Path, name: str, label: str) -> Path:
        """A model with its files for the runtime; the model itself where that is PyTorch.

        Args:
            model: The model.
            name: Name of the folder in the working folder.
            label: What the model is, for people.
        """
        if self.runtime == "torch":
            return model
        folder = self.place.folder / name
        if not (folder / "config.json").is_file():
            bits = _embedding_bits(read_manifest(model))
            shown = self.effort.other_rows and self.goal.bytes is not None
            four = 4 if name == DENSE and shown else None
            settings = OnnxFiles(int8=True, bits=four, embedding_bits=bits)
            trust = self.source.trust_remote_code
            with self.timed(f"Exporting {label}"):
                shared: dict[str, Any] = {"trust_remote_code": trust, "progress": self.progress}
                export_onnx(model, folder, settings, **shared)
                if name == DENSE:
                    _forget_times(folder)
            file_of(read_manifest(folder), self.runtime)  # there is one
        return folder

    @property
    def dense(self) -> Path:
        """The dense model, with its files."""
        return self.exported(self.original, DENSE, DENSE)

    def measured(self, folder: Path) -> Measured:
        return Measured(self.bytes_read(folder, self.runtime), self.speed(folder, self.runtime))

    def speed(self, folder: Path, runtime: RuntimeName) -> float:
        """Times as fast as the dense model in PyTorch; measured once, and kept in the manifest."""
        if folder == self.original and runtime == "torch":
            return 1.0
        batch, length = self.settings.batch_and_length
        reads = inputs_of(self.source)
        if self.is_ours(folder) and (ratio := _stored_ratio(folder, runtime)) is not None:
            return ratio
        # A goal of time goes by this number: one timing is not enough.
        in_full = self.effort.repeats >= MOST_REPEATS
        surely = in_full and self.goal.speedup is not None and runtime == self.runtime
        options = Bench(
            batch=(batch,),
            length=(length,) if reads.text or reads.decoder else (),
            runtime=(runtime,),
            repeats=REPEATS_OF_SEVERAL if surely else self.effort.repeats,
            threads=self.settings.threads,
            device="cpu",
        )
        trust = self.source.trust_remote_code
        times: list[Speed] = []
        with RuntimeFiles.opened() as files:
            shared: dict[str, Any] = {"save": False, "trust_remote_code": trust}
            shared["in_runtime"] = self._with_dense_files(files)
            while not _agree(times, surely=surely):
                timed = bench([str(folder)], str(self.original), options, **shared)
                times.append(timed[0].speed[0])
        speed = _fastest(times)
        if self.is_ours(folder):
            record(folder, "speed", [speed], same_pass)
        return speed.ratio

    def _with_dense_files(self, files: RuntimeFiles) -> InRuntime:
        """Open models in a runtime, the dense one from its files here: it is timed beside all."""
        fingerprint = self.source.store.fingerprint()

        def opened(source: SourceModel, runtime: RuntimeName) -> nn.Module:
            if source.store.fingerprint() == fingerprint:
                source = open_checked(str(self.dense), trust=source.trust_remote_code)
            return files(source, runtime)

        return opened

    def bytes_read(self, folder: Path, runtime: RuntimeName) -> int:
        """Bytes of what the runtime reads."""
        file = file_of(read_manifest(folder), runtime)
        if file is not None:
            return file.bytes
        store = self.store_of(folder)
        return sum((store.folder / name).stat().st_size for name in store.files)

    def store_of(self, folder: Path) -> WeightStore:
        """The weights of a model, be it the one that was given or one that was made here."""
        return self.source.store if folder == self.original else WeightStore.open(folder)


def _agree(times: Sequence[Speed], *, surely: bool) -> bool:
    """Tell whether a pass was timed often enough: the two fastest timings are alike.

    What else a machine does makes passes slower, some for as long as a process lives (where a
    thread has to be woken for every product), and none faster.
    """
    if not surely:
        return bool(times)
    if not TIMINGS[0] <= len(times) < TIMINGS[1]:
        return len(times) >= TIMINGS[1]
    both = ([one.milliseconds for one in times], [one.baseline_milliseconds for one in times])
    return all(sorted(series)[1] <= (1 + ALIKE) * min(series) for series in both)


def _fastest(times: Sequence[Speed]) -> Speed:
    """Join timings of one pass: the fastest of the model, beside the fastest of the dense one.

    In the timing where the model was fastest the dense one may have been slow by chance.
    """
    speed = min(times, key=lambda one: one.milliseconds)
    dense = min(one.baseline_milliseconds for one in times)
    beside = [one.same_runtime_milliseconds for one in times]
    return speed.model_copy(
        update={
            "baseline_milliseconds": dense,
            "ratio": dense / speed.milliseconds,
            "same_runtime_milliseconds": min((one for one in beside if one), default=None),
            "protocol": {**speed.protocol, "timings": len(times)},
        }
    )


def _forget_times(folder: Path) -> None:
    """Take times that came with a model out of its manifest: they are of other passes."""
    if (manifest := read_manifest(folder)) is not None:
        write_manifest(folder, manifest.model_copy(update={"speed": []}))


def _stored_ratio(folder: Path, runtime: RuntimeName) -> float | None:
    """Read a speed that was measured before; a run times one pass alone."""
    manifest = read_manifest(folder)
    mode = "eager" if runtime == "torch" else runtime
    times = [] if manifest is None else manifest.speed
    return next((item.ratio for item in times if item.mode == mode), None)


def file_of(manifest: Manifest | None, runtime: RuntimeName) -> ExportedFile | None:
    """The measured file for a runtime, if a folder has one."""
    if manifest is None or runtime == "torch":
        return None
    if (exported := one_file(manifest.exports, runtime)) is None:
        count = sum(file.runtime == runtime for file in manifest.exports)
        text = f"`{manifest.source.id}` becomes {count} files for `{runtime}`"
        raise InputError(f"{text}, which are not run together here", "give `--runtime torch`")
    return exported


def _embedding_bits(manifest: Manifest | None) -> int:
    """Bits that a conversion chose for the word embedding; 8 where it chose none."""
    storage = None if manifest is None else manifest.plan.storage
    rounding = None if storage is None else storage.embeddings
    return 8 if rounding is None else max(4, min(8, rounding.bits))


def perform(
    source: SourceModel,
    job: Job,
    progress: Progress | None = None,
    say: Say = lambda text: None,
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
    opened = cache(lambda: open_checked(str(model), token, trust_remote_code, converted=False))
    processes.Crew[Job](lambda job: perform(opened(), job)).follow()
