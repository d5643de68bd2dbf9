"""How fast models are: one forward pass over a grid of sizes, beside a dense baseline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel, ConfigDict

from tcompress.artifact.manifest import Speed
from tcompress.artifact.reader import open_checked
from tcompress.benching import compiler
from tcompress.benching.baseline import baseline_of
from tcompress.benching.duel import Duel, Side
from tcompress.benching.feed import Feed
from tcompress.benching.grid import BATCHES, LENGTHS, Cell, Mode, cells
from tcompress.benching.machine import threads
from tcompress.benching.record import save_speed
from tcompress.benching.timing import Clock
from tcompress.errors import InputError
from tcompress.integration.devices import pick_device, pick_dtype
from tcompress.integration.models import load_model
from tcompress.progress import Progress, Silent
from tcompress.source import SourceModel
from tcompress.source.names import local_folder
from tcompress.structures.linear import keep_weights


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        batches: Sequences or pictures in a batch.
        lengths: Tokens in a sequence; default those of `LENGTHS` that the models have positions
            for. Pictures have a length of their own.
        modes: `eager`, `compiled` or both.
        repeats: Timed passes of each model.
        device: Where to run; `auto` takes a GPU if there is one.
        dtype: What to compute in; default as the baseline is stored, for both.
        threads: Threads on a CPU; default as PyTorch chooses.
        seed: Seed of the inputs.
        keep_weights: Whether converted layers keep a dense weight; for eager passes only.
        clock: Tells the time in seconds.
    """

    batches: tuple[int, ...] = BATCHES
    lengths: tuple[int, ...] | None = None
    modes: tuple[Mode, ...] = ("eager",)
    repeats: int = 7
    device: str = "auto"
    dtype: str | None = None
    threads: int | None = None
    seed: int = 0
    keep_weights: bool = False
    clock: Clock = field(default=time.perf_counter, repr=False)


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
    settings: Settings | None = None,
    *,
    save: bool = True,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> tuple[Bench, ...]:
    """Times models against dense ones.

    Args:
        models: Converted or dense models: folders, short names or hub ids.
        against: The baseline; default the dense model that the manifest names.
        settings: How to measure.
        save: Keep the times in the manifests; what was measured before an error is kept too.
        progress: Hears how far it is.
        trust_remote_code: Whether Python code that comes with a model may run.

    Raises:
        InputError: A model cannot be found or run, the baseline takes other inputs, the compiler
            does not work here, or weights are to be kept in compiled passes.
    """
    settings = settings or Settings()
    device = pick_device(settings.device)
    pick_dtype(settings.dtype)
    if settings.keep_weights and "compiled" in settings.modes:
        raise InputError("compiled passes use no kept weights", "leave one of the two options out")
    if "compiled" in settings.modes:
        compiler.require_compiler(device)
    bencher = _Bencher(settings, device, save, progress or Silent(), trust_remote_code)
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
    settings: Settings
    device: torch.device
    save: bool
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
        if not feed.has_length and self.settings.lengths is not None:
            raise InputError(
                f"`{name}` reads pictures or sounds, whose length is fixed", "leave `--length` out"
            )
        if self.settings.lengths is not None:
            feed.allowed(self.settings.lengths)
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
        asked, feed = self.settings.lengths, duel.feed
        if not feed.has_length:
            lengths: tuple[int, ...] = (duel.own_length(),)
        else:
            lengths = feed.fitting(LENGTHS) if asked is None else feed.allowed(asked)
        return cells(self.settings.batches, lengths, self.settings.modes)

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
            self.settings.clock,
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
