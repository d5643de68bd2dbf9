"""Speed of models: passes over a grid of sizes, and generation, beside a dense baseline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from pydantic import BaseModel

from tcompress.artifact.manifest import Manifest, Speed, read_manifest, record
from tcompress.artifact.reader import open_checked
from tcompress.errors import InputError
from tcompress.hf.opening import load_model, pick_device, pick_dtype
from tcompress.latency import paired_timing
from tcompress.latency.generation import check_generates
from tcompress.latency.paired_timing import InRuntime, PairedTiming, TimedModel, threads
from tcompress.latency.passes import Clock
from tcompress.latency.sizes import LENGTHS, RandomInputs, cells
from tcompress.models import ALIASES, SourceModel
from tcompress.models.names import local_folder
from tcompress.options import Bench as BenchOptions
from tcompress.progress import Progress, Silent
from tcompress.structures.modules.linear import keep_weights


class Bench(BaseModel, frozen=True):
    """Times of one model."""

    model: str  # name, as it was given
    baseline: str
    speed: tuple[Speed, ...]
    saved: bool  # whether the times are in the model's manifest now
    notes: tuple[str, ...] = ()  # what one should know to read the numbers


Opened = tuple[str, SourceModel]  # a model on disk, and its name for people


def bench(
    models: Sequence[str],
    against: str | None = None,
    settings: BenchOptions | None = None,
    *,
    save: bool = True,
    clock: Clock = time.perf_counter,
    in_runtime: InRuntime | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> tuple[Bench, ...]:
    """Time models against dense ones: the one that is named, or that of each model's manifest.

    `in_runtime` opens a model in another runtime than PyTorch, where the settings ask for one.

    With `save`, times are kept in the manifests, also what was measured before an error. Models
    that cannot be found or run, or take other inputs than the baseline, are an `InputError`.
    """
    settings = settings or BenchOptions()
    device, dtype = pick_device(settings.device), pick_dtype(settings.dtype)
    if "compiled" in settings.mode:
        if settings.keep_weights:
            hint = "leave one of the two options out"
            raise InputError("compiled passes use no kept weights", hint)
        paired_timing.require_compiler(device)
    if settings.runtime != ("torch",) and device.type != "cpu":
        text = f"ONNX Runtime is timed on the CPU, not on `{device}`"
        raise InputError(text, "give `--device cpu`, or leave `--runtime` out")
    # All errors of names come first.
    pairs = [_pair(name, against, settings, trust_remote_code) for name in models]
    benches: list[Bench] = []
    dense: TimedModel | None = None
    with threads(settings.threads):
        for model, baseline, inputs in pairs:
            fingerprint = baseline[1].store.fingerprint()
            if dense is None or dense.source.store.fingerprint() != fingerprint:
                dense = None  # freed before the next one is loaded
                dense = TimedModel(*baseline, load_model(baseline[1], dtype=dtype, device=device))
            kinds = (tensor.dtype for tensor in dense.model.parameters())
            stored = next((kind for kind in kinds if kind.is_floating_point), torch.float32)
            loaded = load_model(model[1], dtype=dtype or stored, device=device)
            kept_bytes = keep_weights(loaded) if settings.keep_weights else None
            timed = TimedModel(*model, loaded, kept_bytes)
            options = (inputs, device, dtype or stored, settings, clock, in_runtime or _torch_alone)
            timing = PairedTiming(timed, dense, *options)
            benches.append(_bench(timing, save, progress or Silent()))
            del timing, timed, loaded  # freed before the next one is loaded
    return tuple(benches)


def _torch_alone(source: SourceModel, runtime: str) -> Any:
    raise InputError(f"`{runtime}` cannot be opened here", "leave `runtime` out")


def _pair(
    name: str, against: str | None, settings: BenchOptions, trust: bool
) -> tuple[Opened, Opened, RandomInputs]:
    model = open_checked(name, trust=trust)
    if against is None:
        baseline = baseline_of(model, trust)
    else:
        baseline = (against, open_checked(against, trust=trust))
    inputs = RandomInputs.of(model, baseline[1])
    if settings.length and not inputs.has_length:
        fixed = f"`{name}` reads pictures or sounds, whose length is fixed"
        raise InputError(fixed, "leave `--length` out")
    if settings.generate:
        for source in (model, baseline[1]):
            check_generates(source)
    if settings.length:
        inputs.check(settings.length, settings.generate or 0)
    return (name, model), baseline, inputs


def _bench(timing: PairedTiming, save: bool, progress: Progress) -> Bench:
    settings, inputs, model = timing.settings, timing.inputs, timing.model
    chosen = settings.length or inputs.fitting(LENGTHS, settings.generate or 0)
    lengths = chosen if inputs.has_length else (timing.own_length(),)
    grid = cells(settings.batches, lengths, settings.modes, settings.caches)
    progress.stage(f"timing {model.name}", len(grid), "sizes")
    speed: list[Speed] = []
    try:
        for cell in grid:
            speed.append(timing.measure(cell))
            progress.advance(1, f"batch {cell.batch}, length {cell.length}, {speed[-1].how}")
    finally:
        keeps = save and bool(speed) and local_folder(model.name) is not None
        saved = keeps and record(model.source.folder, "speed", speed, same_pass)
    dense, notes = timing.baseline.name, []
    kind, dense_kind = (item.source.model_class.__name__ for item in (model, timing.baseline))
    if kind != dense_kind:
        why = "what their heads cost is part of the times"
        notes.append(f"`{model.name}` is a {kind}, `{dense}` a {dense_kind}: {why}")
    if model.kept_bytes is not None:
        stored = sum(parameter.nbytes for parameter in model.model.parameters())
        held = f"{model.kept_bytes:,} bytes of memory beside {stored:,} of parameters"
        notes.append(f"kept weights take {held}")
    return Bench(
        model=model.name, baseline=dense, speed=tuple(speed), saved=saved, notes=tuple(notes)
    )


def baseline_of(model: SourceModel, trust: bool = False) -> Opened:
    """Open the model that the manifest names, if it is here and as it was.

    A random one is made anew; nothing is downloaded.
    """
    manifest = read_manifest(model.folder)
    if manifest is None:
        text = f"nothing says which dense model `{model.id}` is to be compared with"
        raise InputError(text, "name it with `--against`")
    if manifest.source.init == "random":  # what it computes does not matter for its time
        origin, seed = str(model.folder), manifest.source.seed
        dense = SourceModel.open(origin, trust_remote_code=trust, converted=True, seed=seed)
        return "dense, at random", dense
    name, folder = manifest.source.id, _folder(manifest)
    if folder is None:
        hint = "name it with `--against`: a folder, or a hub id to download"
        raise InputError(f"`{model.id}` was made from `{name}`, which is not on this machine", hint)
    source = open_checked(str(folder), trust=trust, adapter=manifest.recipe.get("adapter"))
    if source.store.fingerprint() != manifest.source.fingerprint:
        text = f"`{folder}` no longer holds the weights that `{model.id}` was made from"
        raise InputError(text, f"to compare all the same, say `--against {folder}`")
    return name, source


def _folder(manifest: Manifest) -> Path | None:
    """Find a local folder, or the snapshot in the hub's cache."""
    name, revision = manifest.source.id, manifest.source.revision
    if (folder := local_folder(name)) is not None:
        return folder
    try:
        name = ALIASES.get(name, name)
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        # The hub client raises errors of unrelated classes; all mean that it is not there.
        return None


_SAME = ("device", "device_name", "dtype", "threads", "kept_weights_bytes", "new_tokens")


def same_pass(speed: Speed) -> tuple[object, ...]:
    """Equal for two times, of one machine, of which a manifest keeps the newer one."""
    machine = (str(speed.protocol.get(name)) for name in _SAME)
    return (speed.batch, speed.length, speed.how, speed.baseline, *machine)
