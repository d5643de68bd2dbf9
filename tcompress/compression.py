"""The whole way from a dense model to a folder that ships: plan, convert, heal, export, measure.

Each stage is one that can be run by itself, in a folder beside the output; a stage that is finished
is not run again after an interruption.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tcompress
from tcompress import files
from tcompress.artifact.manifest import ExportedFile, Manifest, read_manifest
from tcompress.artifact.reader import open_checked
from tcompress.artifact.workplace import Workplace, check_output, identity_of
from tcompress.conversion.converter import convert
from tcompress.data.tables import check_data
from tcompress.errors import InputError, Problems
from tcompress.evaluation.measuring import check_measurement, evaluate
from tcompress.exports.onnx_folder import export_onnx
from tcompress.exports.runtime_files import RuntimeFiles
from tcompress.fields import RuntimeName
from tcompress.latency.benchmark import bench
from tcompress.models import SourceModel
from tcompress.options import Bench, Evaluate, Finetune
from tcompress.options.choose import conversion
from tcompress.options.commands import OnnxFiles
from tcompress.options.compress_options import Compress
from tcompress.options.read import read
from tcompress.progress import Progress, Silent
from tcompress.runtimes.installed import require_onnx
from tcompress.training.finetuning import finetune

HEADROOM = 0.97
"""Share of a size that a conversion is given: names and shapes of a graph take some bytes too."""
NEAR = 0.98
"""Share of a speed below which a conversion is repeated for a higher one."""
REPEATS, ATTEMPTS = 9, 3
SMOKE_SAMPLES = 64

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """A model in the table at the end."""

    name: str
    bytes: int
    speedup: float  # over the dense model in PyTorch
    cosine: float | None = None  # of the file's outputs with those of the same model in PyTorch
    quality: float | None = None


@dataclass(frozen=True)
class Compressed:
    """What was written, and what was measured of it."""

    folder: Path
    file: str  # that the runtime reads, inside the folder
    rows: tuple[Row, ...]
    quality: str | None  # name of the number
    healed: str  # what became of healing, in words
    missed: tuple[str, ...] = ()  # goals that were not reached, in words
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Give all of it as plain data."""
        return {**asdict(self), "folder": str(self.folder)}


def compress(
    model: Path | str,
    output: Path | str,
    settings: Compress,
    *,
    force: bool = False,
    token: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> Compressed:
    """Write a small model in one folder for Transformers, sentence-transformers and ONNX Runtime.

    Args:
        model: A dense model: folder, short name or hub id.
        output: Folder to write; it appears only when everything is finished.
        settings: The goal, the data and the time.
        force: Replace a folder that is not empty.
        token: Access token for the hub.
        trust_remote_code: Whether Python code that comes with the model may run.
        progress: Hears how far it is.
        say: Hears what a user should know.

    Raises:
        InputError: Something given cannot be used, or the goal is out of reach.
    """
    output = Path(output).expanduser().absolute()
    _check(output, settings, force)
    source = open_checked(str(model), token=token, trust=trust_remote_code)
    if settings.task is not None:
        check_measurement(_measurement(settings), source, heads=True)
    facts = {"compress": settings.model_dump(mode="json"), "tool": tcompress.__version__}
    identity = identity_of({**facts, "weights": source.store.fingerprint()})
    place = Workplace(output, identity, force=force)
    with place.working():
        run = _Run(source, settings, place, progress or Silent(), say, time.monotonic())
        result = run.all_stages()
        place.publish(force=force)
    return result


def _check(output: Path, settings: Compress, force: bool) -> None:
    """Refuse, before any work, what would fail in the end; name all problems."""
    problems = Problems()
    with problems.collected():
        check_output(output, force=force)
    with problems.collected():
        check_data([*settings.data, *settings.test_data])
    if settings.runtime != "torch":
        with problems.collected():
            require_onnx()
    problems.report()


def _measurement(settings: Compress, runtimes: tuple[str, ...] = ("torch",)) -> Evaluate:
    options = {"bootstrap": 0, "seed": settings.seed, "runtime": list(runtimes), "device": "cpu"}
    if settings.smoke:
        options["limit"] = 200
    return read(Evaluate, {"task": settings.task, "data": list(settings.test_data), **options})


@dataclass(frozen=True)
class _Run:
    """One run with what it reads and where it works."""

    source: SourceModel
    settings: Compress
    place: Workplace
    progress: Progress
    say: Say
    began: float

    def all_stages(self) -> Compressed:
        """Do everything that is not done yet."""
        dense = self._exported(self.original, "dense")
        converted = self._converted(dense)
        healed, words = self._healed(converted)
        shipped = self._exported(healed, "shipped")
        rows, quality = self._measured(dense, shipped)
        shutil.rmtree(self.place.model)
        if shipped == self.original:
            shutil.copytree(shipped, self.place.model)
        else:
            shipped.rename(self.place.model)
        file = _file_of(read_manifest(self.place.model), self.settings.runtime)
        name = "model.safetensors" if file is None else file.file
        notes = () if self.settings.data else (_NO_DATA,)
        missed = self._missed(rows[-1])
        return Compressed(self.place.output, name, rows, quality, words, missed, notes)

    @property
    def original(self) -> Path:
        """The folder that was given."""
        return Path(self.source.origin or self.source.folder)

    def _missed(self, row: Row) -> tuple[str, ...]:
        """Say which goals a model does not reach."""
        goal, missed = self.settings, []
        if goal.most_bytes is not None and row.bytes > goal.most_bytes:
            missed.append(f"{row.bytes / 1e6:.2f} MB, not {goal.most_bytes / 1e6:.2f} MB")
        if goal.speedup is not None and row.speedup < NEAR * goal.speedup:
            missed.append(f"{row.speedup:.2f} x as fast, not {goal.speedup:g} x")
        return tuple(missed)

    @property
    def minutes_left(self) -> float:
        return self.settings.most_minutes - (time.monotonic() - self.began) / 60

    def _exported(self, model: Path, name: str) -> Path:
        """A model with its files for the runtime; the model itself where that is PyTorch."""
        if self.settings.runtime == "torch":
            return model
        folder = self.place.folder / name
        if not (folder / "config.json").is_file():
            bits = _embedding_bits(read_manifest(model))
            settings = OnnxFiles(int8=True, embedding_bits=bits)
            trust = self.source.trust_remote_code
            export_onnx(model, folder, settings, trust_remote_code=trust, progress=self.progress)
        return folder

    # The goal
    def _converted(self, dense: Path) -> Path:
        """The conversion that meets the goal; the dense model itself where its file does."""
        goal, folder = self.settings, self.place.folder / "converted"
        if self.place.notes("converted"):  # and measured, before a run was stopped
            return folder
        speed, size = self._speed(dense, dense), self._bytes(dense)
        self.say(f"dense in {goal.runtime}: {size / 1e6:.1f} MB, {speed:.2f} x as fast as PyTorch")
        fast = goal.speedup is None or speed >= goal.speedup
        small = goal.most_bytes is None or size <= goal.most_bytes
        if fast and small and (goal.speedup or goal.most_bytes):
            self.say("The dense model reaches the goal in this runtime: nothing is cut.")
            return self.original
        factor = None if goal.speedup is None else max(1.05, goal.speedup / speed)
        room = None if goal.most_bytes is None else int(HEADROOM * goal.most_bytes)
        for attempt in range(ATTEMPTS):
            options = self._options(None if fast else factor, None if small else room)
            convert(self.source, options, folder, force=True, progress=self.progress)
            files.remove(self.place.folder / f"trial-{attempt}")
            trial = self._exported(folder, f"trial-{attempt}")
            row = Row("converted", self._bytes(trial), self._speed(trial, dense))
            self.say(f"converted: {row.bytes / 1e6:.1f} MB, {row.speedup:.2f} x as fast as PyTorch")
            if not self._missed(row):
                break
            if goal.speedup is not None and row.speedup < NEAR * goal.speedup:
                factor, fast = (factor or 1.05) * goal.speedup / row.speedup, False
            if goal.most_bytes is not None and row.bytes > goal.most_bytes and room is not None:
                # What a graph takes beside its numbers does not shrink with them.
                room, small = room - (row.bytes - goal.most_bytes) - goal.most_bytes // 200, False
        self.place.note("converted")
        return folder

    def _options(self, factor: float | None, room: int | None) -> Any:
        """Options of a conversion for a speed in PyTorch and bytes of weights."""
        goal = self.settings
        calibration: dict[str, Any] = {"seed": goal.seed}
        if goal.data:
            calibration["source"] = list(goal.data)
        if goal.smoke:
            calibration["samples"] = SMOKE_SAMPLES
        said: dict[str, Any] = {"method": {"name": "width"}, "calibration": calibration}
        if factor is not None:
            said |= {"speedup": factor, "at": goal.at, "threads": goal.threads, "device": "cpu"}
        if room is not None:
            said["target_bytes"] = room
            if goal.runtime != "torch":
                said |= {"bits": 8, "embedding_bits": 4}
        if factor is None and room is None:
            said["max_loss"] = goal.max_loss or 0.01
        return conversion({name: value for name, value in said.items() if value is not None})

    def _speed(self, folder: Path, dense: Path) -> float:
        """Times as fast as the dense model in PyTorch; of that too the files are there."""
        batch, length = self.settings.batch_and_length
        options = Bench(
            batch=(batch,),
            length=(length,),
            runtime=(self.settings.runtime,),
            repeats=3 if self.settings.smoke else REPEATS,
            threads=self.settings.threads,
            device="cpu",
        )
        with RuntimeFiles.opened() as opened:
            shared: dict[str, Any] = {"save": False, "in_runtime": opened}
            shared |= {"trust_remote_code": self.source.trust_remote_code}
            [timed] = bench([str(folder)], str(dense), options, progress=self.progress, **shared)
        return timed.speed[0].ratio

    def _bytes(self, folder: Path) -> int:
        """Bytes of what the runtime reads."""
        file = _file_of(read_manifest(folder), self.settings.runtime)
        if file is not None:
            return file.bytes
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    # What follows
    def _healed(self, converted: Path) -> tuple[Path, str]:
        """The healed model, in the minutes that are left."""
        folder = self.place.folder / "healed"
        if converted != self.place.folder / "converted":
            return converted, "not needed"
        if not (folder / "config.json").is_file():
            reserve = 0.25 if self.settings.smoke else min(2.0, 0.2 * self.settings.most_minutes)
            minutes = max(0.1, self.minutes_left - reserve)
            options: dict[str, Any] = {"minutes": minutes, "seed": self.settings.seed}
            if self.settings.data:
                options["data"] = {"source": list(self.settings.data)}
            model = open_checked(str(converted), trust=self.source.trust_remote_code)
            settings = read(Finetune, options)
            finetune(model, settings, folder, force=True, progress=self.progress, say=self.say)
        manifest = read_manifest(folder)
        runs = manifest.training if manifest else []
        steps = sum(run.steps for run in runs)
        if not steps:
            return folder, "no (no time was left)"
        if all(run.keeps_start for run in runs):
            return folder, f"no ({steps:,} steps tried, none better)"
        return folder, f"{steps:,} steps"

    def _measured(self, dense: Path, shipped: Path) -> tuple[tuple[Row, ...], str | None]:
        """Dense in PyTorch and in the runtime, and what ships."""
        runtime = self.settings.runtime
        stored, name, scores = self.source.store.total_bytes, None, dict[str, float]()
        if self.settings.task is not None:
            runtimes: tuple[RuntimeName, ...] = tuple(dict.fromkeys(("torch", runtime)))
            models = [str(dense), str(shipped)]
            measured = evaluate(
                models,
                _measurement(self.settings, runtimes),
                save=False,
                trust_remote_code=self.source.trust_remote_code,
                progress=self.progress,
            )
            mains = [item.means[0] if item.means else item.metrics[0] for item in measured]
            name = mains[0].name
            keys = [f"{model} {one}" for model in models for one in runtimes]
            scores = {key: main.value for key, main in zip(keys, mains, strict=True)}
        rows = [Row("dense, PyTorch", stored, 1.0, None, scores.get(f"{dense} torch"))]
        dense_file = [("dense", dense)] if runtime != "torch" else []
        for label, folder in [*dense_file, ("this model", shipped)]:
            file = _file_of(read_manifest(folder), runtime)
            cosine = None if file is None else file.agreement
            facts = (self._bytes(folder), self._speed(folder, dense), cosine)
            rows.append(Row(f"{label}, {runtime}", *facts, scores.get(f"{folder} {runtime}")))
        return tuple(rows), name


_NO_DATA = "fitted and healed on text that ships: `--data` with texts of your own does better"


def _file_of(manifest: Manifest | None, runtime: str) -> ExportedFile | None:
    """The measured file for a runtime, if a folder has one."""
    if manifest is None or runtime == "torch":
        return None
    exported = next((file for file in manifest.exports if file.bits == 8), None)
    if exported is None:
        raise InputError("no file of eight bits was exported", "give `--runtime torch`")
    return exported


def _embedding_bits(manifest: Manifest | None) -> int:
    """Bits that a conversion chose for the word embedding; 8 where it chose none."""
    storage = None if manifest is None else manifest.plan.storage
    rounding = None if storage is None else storage.embeddings
    return 8 if rounding is None else max(4, min(8, rounding.bits))
