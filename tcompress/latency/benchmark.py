"""How fast models are: one forward pass over a grid of sizes, beside a dense baseline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from tcompress.artifact.manifest import Manifest, Speed, read_manifest, write_manifest
from tcompress.artifact.reader import open_checked
from tcompress.errors import InputError
from tcompress.hf.opening import load_model, pick_device, pick_dtype
from tcompress.latency import paired_timing
from tcompress.latency.paired_timing import Clock, Duel, Side, threads
from tcompress.latency.sizes import LENGTHS, Cell, Feed, cells
from tcompress.models import ALIASES, SourceModel
from tcompress.models.names import local_folder
from tcompress.options import Bench as BenchOptions
from tcompress.progress import Progress, Silent
from tcompress.structures.modules.linear import keep_weights

# The dense model that a converted one is timed against.


def baseline_of(model: SourceModel, trust_remote_code: bool = False) -> tuple[str, SourceModel]:
    """Opens the model that the manifest names, without downloading anything.

    Args:
        model: A converted model.
        trust_remote_code: Whether Python code that comes with the baseline may run.

    Returns:
        Its name as the manifest has it, and the model.

    Raises:
        InputError: There is no manifest, the model is not here, or it has changed.
    """
    manifest = read_manifest(model.folder)
    if manifest is None:
        raise InputError(
            f"nothing says which dense model `{model.id}` is to be compared with",
            "name it with `--against`",
        )
    if manifest.source.init == "random":  # what it computes does not matter for its time
        dense = SourceModel.open(
            str(model.folder),
            trust_remote_code=trust_remote_code,
            converted=True,
            seed=manifest.source.seed,
        )
        return "dense, at random", dense
    name, folder = manifest.source.id, _folder(manifest)
    if folder is None:
        raise InputError(
            f"`{model.id}` was made from `{name}`, which is not on this machine",
            "name it with `--against`: a folder, or a hub id to download",
        )
    source = open_checked(str(folder), trust=trust_remote_code)
    if source.store.fingerprint() != manifest.source.fingerprint:
        raise InputError(
            f"`{folder}` no longer holds the weights that `{model.id}` was made from",
            f"to compare all the same, say `--against {folder}`",
        )
    return name, source


def _folder(manifest: Manifest) -> Path | None:
    """Finds a local folder, or the snapshot in the hub's cache."""
    name = manifest.source.id
    if (folder := local_folder(name)) is not None:
        return folder
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                ALIASES.get(name, name),
                revision=manifest.source.revision,
                local_files_only=True,
            )
        )
    except Exception:
        # The hub client raises errors of unrelated classes; all mean that it is not there.
        return None


# Keeping times in the manifest of the model that they belong to.


_SAME = ("device", "device_name", "dtype", "threads", "kept_weights_bytes")


def save_speed(folder: Path, found: Iterable[Speed]) -> bool:
    """Adds times to a manifest; those of the same pass on the same machine are replaced.

    Args:
        folder: Folder of the model.
        found: The times.

    Returns:
        Whether there is a manifest that can be written.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    new = list(found)
    replaced = {_key(speed) for speed in new}
    kept = [speed for speed in manifest.speed if _key(speed) not in replaced]
    try:
        write_manifest(folder, manifest.model_copy(update={"speed": [*kept, *new]}))
    except OSError:  # models are often kept where they cannot be changed
        return False
    return True


def _key(speed: Speed) -> tuple[object, ...]:
    return (
        speed.batch,
        speed.length,
        speed.mode,
        speed.baseline,
        *(str(speed.protocol.get(name)) for name in _SAME),
    )


# How fast models are: one forward pass over a grid of sizes, beside a dense baseline.


class Bench(BaseModel):
    """What was measured of one model.

    Attributes:
        model: Its name, as it was given.
        baseline: What it was compared with.
        speed: The grid.
        saved: Whether the times are in the model's manifest now.
        notes: What one should know to read the numbers.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    baseline: str
    speed: tuple[Speed, ...]
    saved: bool
    notes: tuple[str, ...] = ()


def bench(
    models: Sequence[str],
    against: str | None = None,
    settings: BenchOptions | None = None,
    *,
    save: bool = True,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> tuple[Bench, ...]:
    """Times models against dense ones.

    Args:
        models: Converted or dense models: folders, short names or hub ids.
        against: The baseline; default the dense model that the manifest names.
        settings: How to measure.
        save: Keep the times in the manifests; what was measured before an error is kept too.
        clock: Tells the time in seconds.
        progress: Hears how far it is.
        trust_remote_code: Whether Python code that comes with a model may run.

    Raises:
        InputError: A model cannot be found or run, the baseline takes other inputs, the compiler
            does not work here, or weights are to be kept in compiled passes.
    """
    settings = settings or BenchOptions()
    device = pick_device(settings.device)
    pick_dtype(settings.dtype)
    if settings.keep_weights and "compiled" in settings.mode:
        raise InputError("compiled passes use no kept weights", "leave one of the two options out")
    if "compiled" in settings.mode:
        paired_timing.require_compiler(device)
    bencher = _Bencher(settings, device, save, clock, progress or Silent(), trust_remote_code)
    pairs = [bencher.pair(name, against) for name in models]  # all errors of names come first
    with threads(settings.threads) as count:
        return tuple(bencher.bench(*pair, count) for pair in pairs)


@dataclass
class _Opened:
    """A model on disk, and its name for people."""

    name: str
    source: SourceModel


@dataclass
class _Bencher:
    settings: BenchOptions
    device: torch.device
    save: bool
    clock: Clock
    progress: Progress
    trust: bool
    baseline: Side | None = None  # the one that is loaded

    def pair(self, name: str, against: str | None) -> tuple[_Opened, _Opened, Feed]:
        """Opens a model and its baseline, and compares what they take."""
        model = self._open(name)
        if against is None:
            baseline = _Opened(*baseline_of(model.source, self.trust))
        else:
            baseline = self._open(against)
        feed = Feed.of(model.source, baseline.source)
        if not feed.has_length and self.settings.length:
            raise InputError(
                f"`{name}` reads pictures or sounds, whose length is fixed", "leave `--length` out"
            )
        if self.settings.length:
            feed.allowed(self.settings.length)
        return model, baseline, feed

    def bench(self, model: _Opened, baseline: _Opened, feed: Feed, count: int) -> Bench:
        """Times one pair."""
        duel = self._duel(model, baseline, feed, count)
        found: list[Speed] = []
        try:
            for speed in self._grid(duel):
                found.append(speed)
        finally:
            folder = model.source.folder
            wanted = self.save and bool(found) and local_folder(model.name) is not None
            saved = wanted and save_speed(folder, found)
        return Bench(
            model=model.name,
            baseline=baseline.name,
            speed=tuple(found),
            saved=saved,
            notes=(*_notes(model, baseline), *_kept_notes(duel.model)),
        )

    def _grid(self, duel: Duel) -> Iterator[Speed]:
        grid = self._cells(duel)
        self.progress.stage(f"timing {duel.model.name}", len(grid), "sizes")
        for cell in grid:
            yield duel.measure(cell)
            note = f"batch {cell.batch}, length {cell.length}, {cell.mode}"
            self.progress.advance(1, note)

    def _cells(self, duel: Duel) -> list[Cell]:
        asked, feed = self.settings.length, duel.feed
        if not feed.has_length:
            lengths: tuple[int, ...] = (duel.own_length(),)
        else:
            lengths = feed.allowed(asked) if asked else feed.fitting(LENGTHS)
        return cells(self.settings.batch, lengths, self.settings.mode)

    def _open(self, name: str) -> _Opened:
        return _Opened(name, open_checked(name, trust=self.trust))

    def _duel(self, model: _Opened, baseline: _Opened, feed: Feed, count: int) -> Duel:
        dense = self._loaded(baseline)
        dtype = pick_dtype(self.settings.dtype) or _dtype(dense)
        loaded = load_model(model.source, dtype=dtype, device=self.device)
        kept = keep_weights(loaded) if self.settings.keep_weights else None
        return Duel(
            Side(model.name, model.source, loaded, kept),
            dense,
            feed,
            self.device,
            dtype,
            count,
            self.settings.repeats,
            self.settings.seed,
            self.clock,
        )

    def _loaded(self, baseline: _Opened) -> Side:
        """Loads the baseline, unless it is that of the model before."""
        held = self.baseline
        if held is None or held.source.store.fingerprint() != baseline.source.store.fingerprint():
            self.baseline = None  # freed before the next one is loaded
            dtype = pick_dtype(self.settings.dtype)
            loaded = load_model(baseline.source, dtype=dtype, device=self.device)
            held = self.baseline = Side(baseline.name, baseline.source, loaded)
        return held


def _dtype(side: Side) -> torch.dtype:
    """The dtype that a model computes in."""
    kinds = (tensor.dtype for tensor in side.model.parameters() if tensor.is_floating_point())
    return next(kinds, torch.float32)


def _notes(model: _Opened, baseline: _Opened) -> tuple[str, ...]:
    kinds = [item.source.model_class.__name__ for item in (model, baseline)]
    if kinds[0] == kinds[1]:
        return ()
    return (
        f"`{model.name}` is a {kinds[0]}, `{baseline.name}` a {kinds[1]}: "
        "what their heads cost is part of the times",
    )


def _kept_notes(side: Side) -> tuple[str, ...]:
    if side.kept_bytes is None:
        return ()
    stored = sum(parameter.nbytes for parameter in side.model.parameters())
    return (
        f"kept weights take {side.kept_bytes:,} bytes of memory beside {stored:,} of parameters",
    )
