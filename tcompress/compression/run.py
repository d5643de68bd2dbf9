"""The stages of `compress`, each one that can be run by itself, in a folder beside the output.

A stage that is finished is not done again after an interruption.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import tcompress
from tcompress import files
from tcompress.artifact.checksums import digest_of, seal
from tcompress.artifact.manifest import ExportedFile, Manifest, read_manifest, write_manifest
from tcompress.artifact.means import AGREEMENT, main_of
from tcompress.artifact.reader import open_checked
from tcompress.artifact.workplace import Workplace, check_output, identity_of
from tcompress.compression.attempts import Ask, Attempt, Goal, Measured, best, next_ask
from tcompress.compression.forecast import bytes_of_weights
from tcompress.compression.table import Compressed, Row, kept_layers, layers_that_reach, usage_of
from tcompress.conversion.converter import convert
from tcompress.conversion.shared_statistics import Statistics
from tcompress.data.inputs import inputs_of
from tcompress.data.tables import check_data
from tcompress.errors import InputError, PlanError, Problems
from tcompress.evaluation.measuring import check_measurement, evaluate
from tcompress.evaluation.scores import Baseline
from tcompress.exports.onnx_folder import export_onnx
from tcompress.exports.runtime_files import RuntimeFiles
from tcompress.fields import RuntimeName
from tcompress.latency.benchmark import bench
from tcompress.models import SourceModel
from tcompress.models.names import sentence_root
from tcompress.options import Bench, Convert, Evaluate, Finetune
from tcompress.options.choose import conversion
from tcompress.options.commands import OnnxFiles
from tcompress.options.compress_options import Compress
from tcompress.options.read import read
from tcompress.planning.sites import roles_of
from tcompress.progress import Progress, Silent
from tcompress.reporting.model_report import report_of
from tcompress.reporting.page import write_html
from tcompress.runtimes.installed import require_onnx
from tcompress.training.finetuning import finetune

REPEATS, ATTEMPTS = 9, 3
CUTTING = 0.5
"""Share of the time after which no further conversion is tried."""
DENSE = "dense"
"""Name of the rows of the model that was given."""
SHIPPED = "this model"
"""Name of the rows of the model that is written."""
PAGE = "report.html"
SMOKE_SAMPLES, SMOKE_EXAMPLES = 64, 200

Say = Callable[[str], None]


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
        if place.published:  # a kill came after it
            finished = place.notes("result")[-1]
            place.discard()
            return Compressed.of_json(finished["result"])
        run = _Run(source, settings, place, progress or Silent(), say)
        result = run.all_stages()
        place.note("result", result=result.to_json())
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


def _measurement(settings: Compress, runtime: RuntimeName = "torch") -> Evaluate:
    limit = {"limit": SMOKE_EXAMPLES, "bootstrap": 0} if settings.smoke else {}
    options = {"seed": settings.seed, "runtime": [runtime], "device": "cpu", **limit}
    return read(Evaluate, {"task": settings.task, "data": list(settings.test_data), **options})


@dataclass(frozen=True)
class _Run:
    """One run with what it reads and where it works."""

    source: SourceModel
    settings: Compress
    place: Workplace
    progress: Progress
    say: Say
    runtime: RuntimeName = "torch"
    began: float = field(default_factory=time.monotonic)

    def all_stages(self) -> Compressed:
        """Do everything that is not done yet."""
        run = replace(self, runtime=self._runtime())
        converted = run._converted()
        rows = run._baselines()
        healed, words = run._healed(converted)
        return run._finished(healed, words, rows)

    def _runtime(self) -> RuntimeName:
        """Export the dense model; where no runtime was named and it has no file, take PyTorch."""
        runtime = self.settings.runtime or "onnx-int8"
        if runtime == "torch" or self.place.notes("refused"):
            return "torch"
        try:
            replace(self, runtime=runtime)._exported(self.original, DENSE)
        except InputError as error:
            if self.settings.runtime is not None:
                raise
            self.say(f"{error.message}: size and speed are those of PyTorch (`--runtime torch`)")
            self.place.note("refused")
            return "torch"
        return runtime

    @property
    def original(self) -> Path:
        """The folder that was given."""
        return Path(self.source.origin or self.source.folder)

    @property
    def goal(self) -> Goal:
        """What is asked of the file."""
        return Goal(self.settings.speedup, self.settings.most_bytes)

    @property
    def minutes_left(self) -> float:
        """Minutes that this run has; those before an interruption are not counted."""
        return self.settings.most_minutes - (time.monotonic() - self.began) / 60

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Say that a stage begins, and keep how long it takes."""
        self.say(f"{stage} ({max(0.0, self.minutes_left):.1f} minutes left)")
        start = time.monotonic()
        yield
        self.place.note("seconds", stage=stage, seconds=time.monotonic() - start)

    def _seconds(self, *stages: str) -> float:
        """Seconds that stages took, whenever that was."""
        notes = self.place.notes("seconds")
        return sum(float(note["seconds"]) for note in notes if note["stage"] in stages)

    def _exported(self, model: Path, name: str) -> Path:
        """A model with its files for the runtime; the model itself where that is PyTorch."""
        if self.runtime == "torch":
            return model
        folder = self.place.folder / name
        if not (folder / "config.json").is_file():
            bits = _embedding_bits(read_manifest(model))
            four = 4 if name == DENSE and self.goal.bytes is not None else None
            settings = OnnxFiles(int8=True, bits=four, embedding_bits=bits)
            trust = self.source.trust_remote_code
            with self._timed(f"Exporting {name}"):
                shared: dict[str, Any] = {"trust_remote_code": trust, "progress": self.progress}
                export_onnx(model, folder, settings, **shared)
            _file_of(read_manifest(folder), self.runtime)  # there is one
        return folder

    @property
    def dense(self) -> Path:
        """The dense model, with its files."""
        return self._exported(self.original, DENSE)

    # The goal
    def _converted(self) -> Path:
        """The conversion that meets the goal; the dense model itself where its file does."""
        for note in self.place.notes("converted"):  # and measured, before a run was stopped
            return self.original if note["number"] is None else self._attempt(note["number"])
        dense = self._measured(self.dense)
        self.say(f"dense in {self.runtime}: {_words(dense)}")
        goal, ask = self.goal, Ask()
        if goal != Goal():
            first = Ask.first(goal, dense, bytes_of_weights(self.source, self.runtime))
            if first is None and self.settings.vocab is None:
                self.say("The dense model reaches the goal in this runtime: nothing is cut.")
                self.place.note("converted", number=None)
                return self.original
            ask = first or ask
        attempts = self._attempts(ask, dense)
        number = best(goal, attempts)
        self.place.note("converted", number=number)
        return self._attempt(number)

    def _attempt(self, number: int) -> Path:
        return self.place.folder / f"converted-{number}"

    def _attempts(self, ask: Ask, dense: Measured) -> list[Attempt]:
        """Convert and measure until the goal is met, or tries or time are spent."""
        attempts: list[Attempt] = []
        following: Ask | None = ask
        with tempfile.TemporaryDirectory(dir=self.place.folder, prefix="statistics-") as scratch:
            statistics = Statistics(Path(scratch))
            while following is not None and len(attempts) < ATTEMPTS:
                folder = self._attempt(len(attempts))
                try:
                    with self._timed("Converting"):
                        self._convert(following, folder, statistics)
                except PlanError as error:
                    if attempts:
                        break
                    raise self._out_of_reach(following, error) from error
                files.remove(self.place.folder / f"attempt-{len(attempts)}")
                found = self._measured(self._exported(folder, f"attempt-{len(attempts)}"))
                self.say(f"converted: {_words(found)}")
                attempts.append((following, found))
                following = next_ask(self.goal, dense, attempts)
                if self.minutes_left < (1 - CUTTING) * self.settings.most_minutes:
                    break
        return attempts

    def _convert(self, ask: Ask, folder: Path, statistics: Statistics) -> None:
        settings = self._options(ask)
        shared = {"force": True, "progress": self.progress}
        # Only speeds of one recipe share what they measure.
        given = statistics if settings.target_bytes is None and settings.speedup else None
        convert(self.source, settings, folder, statistics=given, **shared)  # type: ignore[arg-type]

    def _out_of_reach(self, ask: Ask, error: PlanError) -> PlanError:
        """Say what a goal comes to for a conversion that cannot meet it."""
        asked = [f"{ask.speedup:.2f} x in PyTorch"] if ask.speedup else []
        asked += [f"{ask.bytes / 1e6:.2f} MB of weights"] if ask.bytes else []
        text = f"the goal asks for {' and '.join(asked)}: {error.message}"
        return PlanError(text if asked else error.message, "ask for less, or give `--vocab data`")

    def _options(self, ask: Ask) -> Convert:
        """Options of a conversion for a speed in PyTorch and bytes of weights."""
        goal = self.settings
        calibration: dict[str, Any] = {"seed": goal.seed}
        if goal.data:
            calibration["source"] = list(goal.data)
        if goal.smoke:
            calibration["samples"] = SMOKE_SAMPLES
        said: dict[str, Any] = {"method": {"name": "width"}, "calibration": calibration}
        if ask.speedup is not None:
            said |= {"speedup": ask.speedup, "at": goal.at, "threads": goal.threads}
            said |= {"device": "cpu"}
        if ask.bytes is not None:
            # What becomes of the word embedding is chosen with the sizes of layers.
            said |= {"target_bytes": ask.bytes, "bits": None if self.runtime == "torch" else 8}
        if ask == Ask():
            if self.goal == Goal():
                said["max_loss"] = goal.max_loss or 0.01
            else:  # nothing to do but what was asked for by name
                del said["method"]
        said["vocab"] = goal.vocab
        return conversion({name: value for name, value in said.items() if value is not None})

    def _measured(self, folder: Path) -> Measured:
        return Measured(self._bytes(folder, self.runtime), self._speed(folder, self.runtime))

    def _speed(self, folder: Path, runtime: RuntimeName, *, save: bool = False) -> float:
        """Times as fast as the dense model in PyTorch; `save` keeps it in the manifest."""
        batch, length = self.settings.batch_and_length
        reads = inputs_of(self.source)
        options = Bench(
            batch=(batch,),
            length=(length,) if reads.text or reads.decoder else (),
            runtime=(runtime,),
            repeats=3 if self.settings.smoke else REPEATS,
            threads=self.settings.threads,
            device="cpu",
        )
        with RuntimeFiles.opened() as opened:
            shared: dict[str, Any] = {"save": save, "in_runtime": opened}
            shared |= {"trust_remote_code": self.source.trust_remote_code}
            timed = bench([str(folder)], str(self.original), options, **shared)
        return timed[0].speed[0].ratio

    def _bytes(self, folder: Path, runtime: RuntimeName) -> int:
        """Bytes of what the runtime reads."""
        file = _file_of(read_manifest(folder), runtime)
        if file is not None:
            return file.bytes
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    # What one would take in its place
    def _baselines(self) -> list[Row]:
        """Measure the dense model in PyTorch, in 8 and 4 bits, and a model of fewer layers."""
        rows = [self._row(DENSE, self.original, "torch")]
        if self.runtime != "torch":
            rows.append(self._row(DENSE, self.dense, self.runtime))
        there = rows[-1]
        if self.runtime != "torch" and self.goal.bytes is not None:
            rows.append(self._row(DENSE, self.dense, "onnx-q4"))
        if not self.settings.smoke:
            rows += self._fewer_layers(there)
        return rows

    def _fewer_layers(self, dense: Row) -> list[Row]:
        """Measure the most whole layers that reach the goal, as they are."""
        blocks = roles_of(self.source).blocks
        layers = [layer for block in blocks for layer in block.layers]
        numbers = sum(one.in_features * one.out_features * (one.experts or 1) for one in layers)
        each = numbers // max(1, len(blocks)) * (4 if self.runtime == "torch" else 1)
        reaching = (self.goal.speedup, dense.speedup, self.goal.bytes, dense.bytes, max(1, each))
        count = layers_that_reach(len(blocks), *reaching)
        if not 0 < count < len(blocks):
            return []
        name = f"{count} of {len(blocks)} layers, not healed"
        folder = self.place.folder / "fewer-layers"
        with suppress(PlanError):  # stacks of several kinds, and the like
            if not (folder / "config.json").is_file():
                bits = {} if self.runtime == "torch" else {"bits": 8}
                if bits and self.goal.bytes is not None:
                    bits["embedding_bits"] = 4
                kept = kept_layers(len(blocks), count)
                settings = conversion({"keep_layers": kept, **bits})
                convert(self.source, settings, folder, force=True, progress=self.progress)
            return [self._row(name, self._exported(folder, "fewer-layers-exported"), self.runtime)]
        return []

    def _row(self, name: str, folder: Path, runtime: RuntimeName) -> Row:
        """Measure a model once; what was measured before an interruption is read."""
        for note in self.place.notes("row"):
            if (note["row"]["name"], note["row"]["runtime"]) == (name, runtime):
                return Row.of_json(note["row"])
        with self._timed(f"Measuring {name} in {runtime}"):
            dense = (name, runtime) == (DENSE, "torch")
            size = self.source.store.total_bytes if dense else self._bytes(folder, runtime)
            speed = 1.0 if dense else self._speed(folder, runtime, save=name == SHIPPED)
            row = Row(name, runtime, size, speed)
            if self.settings.task is not None:
                row = self._with_quality(row, folder)
        self.place.note("row", row=row.to_json())
        return row

    def _with_quality(self, row: Row, folder: Path) -> Row:
        """Evaluate a model beside the dense one in PyTorch."""
        dense = (row.name, row.runtime) == (DENSE, "torch")
        baseline: Sequence[Baseline] = () if dense else self._baseline()
        settings = _measurement(self.settings, row.runtime)  # type: ignore[arg-type]
        trust = self.source.trust_remote_code
        shared: dict[str, Any] = {"trust_remote_code": trust, "progress": self.progress}
        save = row.name == SHIPPED
        [scores] = evaluate([folder], settings, baseline=baseline, save=save, **shared)
        main = main_of(scores.metrics, several=len(scores.sets) > 1)
        assert main is not None  # a task has a number
        if dense:
            self.place.note("quality", name=main.name)
            self.place.note("baseline", sets=[one.to_json() for one in scores.baseline])
        agreements = [one.value for one in scores.metrics if one.name == AGREEMENT]
        interval = None if main.interval is None else (main.interval.low, main.interval.high)
        agreement = fmean(agreements) if agreements else None
        return replace(row, quality=main.value, interval=interval, agreement=agreement)

    def _baseline(self) -> list[Baseline]:
        return [Baseline.of_json(one) for one in self.place.notes("baseline")[-1]["sets"]]

    # What follows
    def _healed(self, converted: Path) -> tuple[Path, str]:
        """The healed model, in the minutes that are left."""
        folder = self.place.folder / "healed"
        if converted == self.original:
            return converted, "not needed"
        if not (folder / "config.json").is_file():
            following = self._seconds(f"Exporting {DENSE}", f"Measuring {DENSE} in {self.runtime}")
            minutes = max(0.1, self.minutes_left - 1.1 * following / 60)
            options: dict[str, Any] = {"minutes": minutes, "seed": self.settings.seed}
            if _has_bfloat16():  # half as many steps again in the same time
                options["mixed_precision"] = "bf16"
            if self.settings.data:
                options["data"] = {"source": list(self.settings.data)}
            model = open_checked(str(converted), trust=self.source.trust_remote_code)
            shared: dict[str, Any] = {"progress": self.progress, "say": self.say}
            with self._timed("Healing"):
                finetune(model, read(Finetune, options), folder, force=True, **shared)
        manifest = read_manifest(folder)
        runs = manifest.training if manifest else []
        steps = sum(run.steps for run in runs)
        if not steps:
            return folder, "no (no time was left)"
        if all(run.keeps_start for run in runs):
            return folder, f"no ({steps:,} steps tried, none better)"
        return folder, f"{steps:,} steps"

    def _finished(self, healed: Path, words: str, rows: list[Row]) -> Compressed:
        """Measure what ships, and lay it out as the output."""
        shipped = self._exported(healed, "shipped") if healed != self.original else self.dense
        row = self._row(SHIPPED, shipped, self.runtime)
        if self.runtime != "torch" and not self.settings.smoke:
            rows = [*rows, self._row(SHIPPED, shipped, "torch")]
        shutil.rmtree(self.place.model)
        if shipped == self.original:
            shutil.copytree(shipped, self.place.model)
        else:
            shipped.rename(self.place.model)
        manifest = read_manifest(self.place.model)
        if manifest is not None:
            self._write_page(self.place.model, manifest)
        exported = _file_of(manifest, self.runtime)
        file = "model.safetensors" if exported is None else exported.file
        agreements = [
            source.kept
            for run in (manifest.training if manifest else [])[-1:]
            for source in run.sources
            if source.kept is not None
        ]
        usage = usage_of(
            self.place.output,
            file,
            self.source.model_class.__name__,
            sentences=sentence_root(self.place.model) is not None,
            pictures=inputs_of(self.source).image,
        )
        measured = Measured(row.bytes, row.speedup)
        return Compressed(
            folder=self.place.output,
            file=file,
            rows=(*rows, row),
            quality=self._quality_name(),
            healed=words,
            usage=usage,
            agreement=fmean(agreements) if agreements else None,
            missed=measured.missed(self.goal, near=NEAR),
            notes=() if self.settings.data else (_NO_DATA,),
        )

    def _write_page(self, folder: Path, manifest: Manifest) -> None:
        """Write the page of `report` into a folder, and seal it with what is there."""
        report = report_of(folder, trust_remote_code=self.source.trust_remote_code)
        write_html([report.model_copy(update={"name": self.place.output.name})], folder / PAGE)
        sealed = seal(folder, {**manifest.checksums, PAGE: digest_of(folder / PAGE)})
        write_manifest(folder, manifest.model_copy(update=sealed))

    def _quality_name(self) -> str | None:
        """Name the number that models are measured by."""
        if self.settings.task is None:
            return None
        sets = self.place.notes("baseline")[-1]["sets"]
        several = "mean " if len(sets) > 1 else ""
        return several + str(self.place.notes("quality")[-1]["name"])


_NO_DATA = "fitted and healed on text that ships: `--data` with texts of your own does better"
_BITS: dict[str, int] = {"onnx-int8": 8, "onnx-q4": 4}
NEAR = 0.98
"""Share of a speed that counts as reached in the end: times of a pass differ so much by chance."""


def _has_bfloat16() -> bool:
    """Tell whether products of this processor are faster in bfloat16."""
    if torch.accelerator.is_available():
        return False  # which healing asks itself
    has: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def _words(found: Measured) -> str:
    return f"{found.bytes / 1e6:.1f} MB, {found.speedup:.2f} x as fast as PyTorch"


def _file_of(manifest: Manifest | None, runtime: str) -> ExportedFile | None:
    """The measured file for a runtime, if a folder has one."""
    if manifest is None or runtime == "torch":
        return None
    exported = [file for file in manifest.exports if file.bits == _BITS[runtime]]
    if len(exported) != 1:
        text = f"`{manifest.source.id}` becomes {len(exported)} files of {_BITS[runtime]} bits"
        raise InputError(f"{text}, which are not run together here", "give `--runtime torch`")
    return exported[0]


def _embedding_bits(manifest: Manifest | None) -> int:
    """Bits that a conversion chose for the word embedding; 8 where it chose none."""
    storage = None if manifest is None else manifest.plan.storage
    rounding = None if storage is None else storage.embeddings
    return 8 if rounding is None else max(4, min(8, rounding.bits))
