"""Training of models that no device holds whole: processes share their weights out.

Every block is gathered when it computes and given up after it, its gradients are summed up where
their weights are (PyTorch's `fully_shard`: Zhao et al., arXiv:2304.11277). Alike on CPUs and GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from tcompress.errors import InputError, Problems
from tcompress.linalg.rounding import Rounding

_SHARDS = "shards"  # folder of a checkpoint
_DDP = "or leave `--shard` out: each process then keeps the whole model"


def check_shardable(accelerator: Accelerator, roundings: Iterable[Rounding | None]) -> None:
    """Refuse what weights cannot be shared out for, all of it at once.

    Raises:
        InputError: There is one process, precision is float16, or weights are stored in few bits.
    """
    problems = Problems()
    with problems.collected():
        if accelerator.num_processes == 1:
            raise InputError(
                "`shard` shares weights out over processes, and there is one",
                "start more: `torchrun --nproc_per_node 2 -m tcompress finetune ... --shard`",
            )
    with problems.collected():
        if accelerator.mixed_precision == "fp16":
            hint = f"choose `--mixed-precision bf16`, {_DDP}"
            raise InputError("`shard` does not go with mixed precision in float16", hint)
    with problems.collected():
        if any(roundings):
            raise InputError(
                "`shard` trains weights as they are, and these are stored in few bits",
                f"train what was converted without `--bits` and export it in few, {_DDP}",
            )
    problems.report()


def shard(model: nn.Module, blocks: Iterable[str], accelerator: Accelerator) -> None:
    """Share the weights of a model out over all processes, by its blocks.

    Args:
        model: Is changed: its parameters become `DTensor`s of which each process has a part.
        blocks: Names of its blocks. Those that share weights with other modules are gathered with
            what is in no block.
        accelerator: Knows device and processes.
    """
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for name in _apart(model, [*blocks]):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)


def _apart(model: nn.Module, blocks: list[str]) -> list[str]:
    """Names of the blocks whose weights no other module has."""
    users: dict[int, set[str]] = defaultdict(set)
    for name, value in model.named_parameters(remove_duplicate=False):
        users[id(value)].add(next((item for item in blocks if name.startswith(f"{item}.")), ""))
    return [
        name
        for name in blocks
        if all(users[id(value)] == {name} for value in model.get_submodule(name).parameters())
    ]


def class_of(model: nn.Module) -> type:
    """Class of a model, which `fully_shard` derives another one from."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def whole(value: Tensor) -> Tensor:
    """The whole of a tensor, in every process; all of them have to ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Tensor, pattern: Tensor) -> Tensor:
    """The part of a whole tensor that this process has of a pattern, on its device."""
    value = value.to(pattern.device)
    if not isinstance(pattern, DTensor):
        return value
    mesh = pattern.device_mesh
    everywhere = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=pattern.placements)


def gathered(values: Mapping[str, Tensor], accelerator: Accelerator) -> dict[str, Tensor]:
    """Copy whole tensors to the CPU of the main process, one by one; others get none."""
    on_cpu: dict[str, Tensor] = {}
    for name, value in values.items():
        tensor = whole(value.detach())
        if accelerator.is_main_process:
            on_cpu[name] = tensor.cpu()
    return on_cpu


def with_shards(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    """Let accelerate's checkpoints hold the parts of all processes, of weights and optimizer."""
    accelerator.register_save_state_pre_hook(partial(_save, model, optimizer))
    accelerator.register_load_state_pre_hook(partial(_load, model, optimizer))


def _save(model: nn.Module, optimizer: Any, _: Any, weights: list[Any], folder: str) -> None:
    weights.clear()  # nothing is left to save for accelerate, which would save one part
    save(_state(model, optimizer), checkpoint_id=Path(folder) / _SHARDS)


def _load(model: nn.Module, optimizer: Any, models: list[Any], folder: str) -> None:
    models.clear()
    state = _state(model, optimizer)
    load(state, checkpoint_id=Path(folder) / _SHARDS)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}
