"""Fine-tuning: open, train, save, publish."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    AutocastKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    broadcast_object_list,
    patch_environment,
    set_seed,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import tcompress
from tcompress.artifact.checksums import seal
from tcompress.artifact.format import round_files
from tcompress.artifact.manifest import (
    Manifest,
    TrainingFacts,
    environment,
    manifest_of_dense,
    model_card,
    read_manifest,
    write_manifest,
)
from tcompress.artifact.reader import open_checked
from tcompress.artifact.workplace import (
    Workplace,
    check_apart,
    check_output,
    identity_of,
    partial_folder,
)
from tcompress.errors import InputError, first_line, listed
from tcompress.files import write_text
from tcompress.hf.opening import KINDS, Reopened, differs, pick_device, unloadable
from tcompress.linalg.rounding import pack, unpack
from tcompress.models import SourceModel, tell_padding
from tcompress.models.names import CARD, carry_files, forget_code, name_cure, stray_links
from tcompress.options import Finetune
from tcompress.processes import PATIENCE
from tcompress.progress import Progress, Silent
from tcompress.training.checkpoints import Checkpoints
from tcompress.training.loop import Loop
from tcompress.training.rounded import storage_of
from tcompress.training.schedule import blocks_first
from tcompress.training.setup import Setup, set_up
from tcompress.training.sharding import check_shardable, gathered
from tcompress.training.teacher import find_teachers


class FloatAttention(TorchFunctionMode):
    """Softmax attention in float32, whatever autocast says, to train on a CPU.

    There its backward pass in bfloat16 takes 0.9 of 1.2 seconds of a step of a small encoder. Not
    all models go through the attention interface, so that the call itself is caught.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = {name: _as_float(value) for name, value in (kwargs or {}).items()}
        with torch.autocast("cpu", enabled=False):
            return func(*map(_as_float, args), **named)


def _attention(accelerator: Accelerator) -> AbstractContextManager[object]:
    """How softmax attention is computed in passes of a run."""
    low = accelerator.mixed_precision != "no" and accelerator.device.type == "cpu"
    return FloatAttention() if low else nullcontext()


def _as_float(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value


Say = Callable[[str], None]
COMPARED = 24  # tensors of the written model that are read back


@dataclass(frozen=True)
class Finetuned:
    """Result of a training run."""

    folder: Path  # that was written
    facts: TrainingFacts  # record of the run
    resumed: bool = False  # whether an interrupted run was continued


def finetune(
    model: SourceModel | str,
    options: Finetune,
    output: Path | str,
    *,
    force: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
    say: Say | None = None,
    begun: float | None = None,
) -> Finetuned:
    """Train a model, converted or not, and write the result, as `tcompress.finetune` does.

    The output appears when all is finished; where it was stopped, the same call goes on. `say`
    hears of what the user should know, such as a smaller batch. A limit in minutes counts from when
    the work was `begun`, by `time.perf_counter`; default now.
    """
    begun = time.perf_counter() if begun is None else begun
    output = Path(output).expanduser().absolute()
    if isinstance(model, str):
        if not Path(model).exists():
            check_output(output, force=force)  # before a long download
        model = open_checked(model, token=token)
    check_apart(output, model.origin or model.folder, "the model's own folder")
    check_output(output, force=force)
    # Accelerate's launcher may say that weights are to be shared out, which is done here: where
    # Transformers reads the same, one process alone would load them.
    shard = options.shard or os.environ.get(_BY_LAUNCHER, "").lower() in ("true", "1")
    options = options.model_copy(update={"shard": shard})
    with patch_environment(**{_BY_LAUNCHER: "false"}):
        run = _prepared(model, options, output, token, progress, say, force=force, begun=begun)
        return run.go(progress or Silent(), say or (lambda text: None))


_OTHER_WAYS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_BY_LAUNCHER = "ACCELERATE_USE_FSDP"
_RECORDED = {"samples", "tokens", "best_step", "best", "curve", "share", "sources"}


def _prepared(
    model: SourceModel,
    options: Finetune,
    output: Path,
    token: str | None,
    progress: Progress | None,
    say: Say | None,
    *,
    force: bool,
    begun: float,
) -> _Run:
    """Open models and data, and refuse what cannot be."""
    accelerator = _accelerator(options, output)
    manifest = read_manifest(model.folder)
    teachers = find_teachers(options.teacher, manifest, token, trust=model.trust_remote_code)
    for teacher in teachers:
        check_apart(output, teacher.origin or teacher.folder, "the teacher's own folder")
    heard = progress if accelerator.is_main_process else None
    setup = set_up(model, teachers, options, manifest, heard)
    if options.shard:
        check_shardable(setup.model, accelerator, setup.roundings.values())
    if options.gradient_checkpointing:
        # Contexts of blocks in a forward pass, and in a backward pass, where no mode is on else.
        contexts = {"context_fn": lambda: (nullcontext(), _attention(accelerator))}
        setup.model.gradient_checkpointing_enable({"use_reentrant": False, **contexts})
    notes = [*setup.data.notes]
    for name in stray_links(model.folder, model.trust_remote_code):
        notes.append(f"`{name}` is a link out of the model's folder and is not carried along")
    if say is not None:
        for note in notes:
            say(note)
    return _Run(teachers, setup, accelerator, output, manifest, force, begun)


@dataclass
class _Run:
    teachers: Sequence[SourceModel]
    setup: Setup
    accelerator: Accelerator
    output: Path
    manifest: Manifest | None
    force: bool
    begun: float

    def go(self, progress: Progress, say: Say) -> Finetuned:
        with self._workplace() as workplace:
            # All processes have to know, and the main one alone looks.
            done = broadcast_object_list([workplace is not None and workplace.published])[0]
            checkpoints = Checkpoints(partial_folder(self.output) / "checkpoints")
            resumed = done or checkpoints.last() is not None
            if done:
                manifest = read_manifest(self.output)
                assert manifest is not None  # it was written before the output was published
                facts = manifest.training[-1]
                self.accelerator.wait_for_everyone()
                if workplace is not None:
                    workplace.discard()
            else:
                if workplace is None:  # this process has nothing to say
                    progress, say = Silent(), lambda text: None
                else:
                    best = sum(value.nbytes for value in self.setup.trained.values())
                    workplace.need(self.setup.source.store.total_bytes + 2 * best)
                run = self.setup, self.accelerator, checkpoints, progress, say
                spent = time.perf_counter() - self.begun
                facts = self._train(Loop(*run, spent=spent))
                model = self._trained_model()
                if workplace is not None:
                    self._write(model, workplace.model, facts)
                    workplace.publish(force=self.force)
            self.accelerator.wait_for_everyone()
        self.accelerator.end_training()  # ends the group of processes too
        return Finetuned(self.output, facts, resumed)

    def _workplace(self) -> AbstractContextManager[Workplace | None]:
        """Open the working folder in the main process; bad input leaves nothing behind."""
        if not self.accelerator.is_main_process:
            return nullcontext()
        identity = identity_of(
            {
                "kind": "finetune",
                # How long it may take says when it ends, not what was done until then.
                "options": self.setup.options.model_dump(mode="json", exclude={"minutes"}),
                "weights": self.setup.source.store.fingerprint(),
                "teacher": [teacher.store.fingerprint() for teacher in self.teachers],
                "data": self.setup.data.fingerprint,
                "tool": tcompress.__version__,
                "processes": self.accelerator.num_processes,
                "precision": self.accelerator.mixed_precision,
                "device": self.accelerator.device.type,
            }
        )
        workplace = Workplace(self.output, identity, force=self.force)

        def keeps(error: BaseException) -> bool:
            # What was trained so far is worth keeping, bad input is not.
            checkpoint = Checkpoints(workplace.folder / "checkpoints").last()
            begun = checkpoint is not None or any(workplace.model.iterdir())
            return begun or not isinstance(error, InputError)

        return workplace.working(keeps)

    def _train(self, loop: Loop) -> TrainingFacts:
        """Train, and record the run."""
        setup, options = self.setup, self.setup.options
        self.accelerator.init_trackers("tcompress")
        with _attention(self.accelerator):
            state = loop.run()
        assert state.best is not None  # a run begins and ends with a validation
        device = self.accelerator.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return TrainingFacts(
            **state.model_dump(include=_RECORDED),
            stage="blocks, then end-to-end" if blocks_first(options) else "end-to-end",
            task=options.task,
            teacher=" + ".join(teacher.id for teacher in self.teachers if setup.imitates) or None,
            data=setup.data.name,
            data_fingerprint=setup.data.fingerprint,
            files=dict(setup.data.files),
            objectives={objective.name: weight for objective, weight in setup.objectives},
            settings=options.model_dump(mode="json", exclude_defaults=True),
            steps=state.step,
            seconds=round(state.seconds, 2),
            validation=setup.validated,
            environment={
                **environment(),
                "device": name,
                "threads": str(torch.get_num_threads()),
                "processes": str(self.accelerator.num_processes),
                "precision": self.accelerator.mixed_precision,
            },
        )

    def _trained_model(self) -> PreTrainedModel:
        """The model to write; of one that is shared out, in the main process, a new one."""
        if not self.setup.options.shard:
            return self.setup.model
        changed = gathered(self.setup.changed, self.accelerator)
        if not self.accelerator.is_main_process:
            return self.setup.model
        set_seed(self.setup.options.seed)  # a head that stays as it was drawn is drawn again
        model = self.setup.load()
        tell_padding(model, self.setup.data.pad)
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, value in changed.items():
                values[name].copy_(value)
        return model

    def _write(self, trained: PreTrainedModel, folder: Path, facts: TrainingFacts) -> None:
        """Write the model; `config.json`, which makes it loadable, comes with the weights."""
        source, store = self.setup.source, self.setup.source.store
        kinds = Counter(store.dtype(key) for key in store.keys())  # noqa: SIM118 - no mapping
        stored = [kind for kind, _ in kinds.most_common() if kind.is_floating_point]
        # Nothing comes after it: the model itself takes the dtype that the source is stored in.
        model: Any = trained.to(stored[0] if stored else torch.float32)  # type: ignore
        weights = model.state_dict()
        model.save_pretrained(folder, state_dict=weights, max_shard_size="2GB")
        name_cure(folder)
        carry_files(source.folder, source.auxiliary_files(), folder)
        if not source.trust_remote_code:
            forget_code(folder)
        manifest = self.manifest or manifest_of_dense(source)
        storage = storage_of(source, self.setup.options, self.manifest)
        rounded = {} if storage is None else round_files(folder, self.setup.roundings, storage)
        plan = manifest.plan.model_copy(update={"storage": storage})
        manifest = manifest.model_copy(update={"plan": plan})
        # What was measured before belongs to other weights.
        training = [*manifest.training, facts]
        changes = {"training": training, "metrics": [], "tool_version": tcompress.__version__}
        changed = {**changes, "exports": [], "attention_map": None}
        manifest = manifest.model_copy(update=changed)
        write_text(folder / CARD, model_card(manifest, source.folder, type(model).__name__))
        write_manifest(folder, manifest.model_copy(update=seal(folder)))
        # Opens what was written, and compares some of the weights.
        written = Reopened(folder, type(model))
        # A class may leave out what it makes anew, such as tables of sines.
        names = [name for name in weights if written.keymap.has(name)]
        for name in names[:: max(1, len(names) // COMPARED)]:
            with unloadable():
                tensor = written.tensor(name)
            value, keys = weights[name].cpu(), written.keymap.sources(name).keys
            if keys[0] in rounded:
                if len(keys) > 1:  # rounded in parts
                    continue
                value = unpack(pack(value, rounded[keys[0]]))
            if not torch.equal(tensor, value):
                raise differs(name, "its values are others")


def _accelerator(options: Finetune, output: Path) -> Accelerator:
    device = pick_device(options.device)
    # Processes find one another only if accelerate is told that they are on a CPU.
    cpu = options.device == "cpu"
    cpu = cpu or (options.device == "auto" and not torch.accelerator.is_available())
    precision = options.mixed_precision
    if precision == "auto":
        on_gpu = torch.cuda.is_available() and not cpu
        precision = "bf16" if on_gpu and torch.cuda.is_bf16_supported() else "no"
    if options.device.startswith("cuda:"):
        torch.cuda.set_device(options.device)
    # It takes the CPU where it does not know the name of a device, unless it is told.
    variables = {} if cpu or device.type in KINDS else {"ACCELERATE_TORCH_DEVICE": str(device)}
    if not PartialState._shared_state or PartialState().num_processes == 1:
        # Accelerate keeps the settings of the run before, and refuses others.
        AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with patch_environment(**variables):
            accelerator = Accelerator(
                cpu=cpu,
                mixed_precision=precision,
                log_with=list(options.trackers) or None,
                # One process alone may work for hours while the others wait.
                # Of weights that are gathered for a block no copies are to stay.
                kwargs_handlers=[
                    InitProcessGroupKwargs(timeout=PATIENCE),
                    AutocastKwargs(cache_enabled=not options.shard),
                ],
                project_config=ProjectConfiguration(
                    project_dir=str(partial_folder(output)),
                    logging_dir=str(output.parent / f"{output.name}-logs"),
                ),
            )
    except ValueError as error:
        hint = "choose another `--mixed-precision`, `--track` or `--device`"
        raise InputError(f"accelerate cannot do this: {first_line(error)}", hint) from error
    if accelerator.distributed_type in _OTHER_WAYS:
        raise InputError(
            f"accelerate is told to train by {accelerator.distributed_type.value}, which does not "
            "go with training here",
            "launch it without that; `--shard` shares the model out over the processes",
        )
    if precision == "fp16" and accelerator.device.type == "cpu":
        hint = "choose `--mixed-precision bf16`, or `no`"
        raise InputError("mixed precision in float16 needs a GPU", hint)
    absent = {*options.trackers, "all"} - {"all", *map(str, accelerator.log_with)}
    if absent:
        hint = f"`pip install {' '.join(sorted(absent))}`, or leave `--track` out"
        raise InputError(f"the loggers {listed(sorted(absent))} are not installed", hint)
    return accelerator
