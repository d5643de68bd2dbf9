"""Training of models that no device holds whole: processes share their weights out.

Every block is gathered when it computes and given up after it, its gradients are summed up where
their weights are (PyTorch's `fully_shard`: Zhao et al., arXiv:2304.11277). Alike on CPUs and GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tcompress.errors import InputError, Problems, listed
from tcompress.linalg.rounding import Rounding
from tcompress.structures.modules.linear import StructuredLinear
from tcompress.training.setup import drop_no_blocks

_DDP = "or leave `--shard` out: each process then keeps the whole model"


def check_shardable(
    model: nn.Module, accelerator: Accelerator, roundings: Iterable[Rounding | None]
) -> None:
    """Refuse what weights cannot be shared out for, all of it at once.

    Raises:
        InputError: There is one process, precision is float16, weights are stored in few bits, or
            one is a single number.
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
    with problems.collected():
        if single := [name for name, value in model.named_parameters() if not value.ndim]:
            raise InputError(
                f"{listed(single)} of the model is a single number, which cannot be shared out",
                _DDP.removeprefix("or "),
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
    device, blocks = accelerator.device, [*blocks]
    mesh = init_device_mesh(device.type, (accelerator.num_processes,))
    empty = {value for value in model.parameters() if not value.numel()}
    for value in empty:  # there is nothing to share out
        value.data = value.data.to(device)
    drop_no_blocks(model)  # all processes run the same ones
    apart = _apart(model, blocks)
    for name in blocks:
        model.get_submodule(name).register_forward_hook(_with_all_weights, prepend=True)
    for module in (*map(model.get_submodule, apart), model):
        fully_shard(module, mesh=mesh, ignored_params=empty)
    model.register_forward_hook(_given_up)


def _apart(model: nn.Module, blocks: list[str]) -> list[str]:
    """Names of the blocks whose weights no other module uses."""
    users: dict[int, set[str]] = defaultdict(set)
    for path, module in model.named_modules(remove_duplicate=False):
        block = next((name for name in blocks if f"{path}.".startswith(f"{name}.")), "")
        modules = [module]
        if isinstance(module, StructuredLinear):  # factors of other layers are no children
            modules += module.factors.values()
        for value in chain.from_iterable(
            item.parameters(recurse=item is not module) for item in modules
        ):
            users[id(value)].add(block)
    return [
        name
        for name in blocks
        if all(users[id(value)] == {name} for value in model.get_submodule(name).parameters())
    ]


def _given_up(module: Any, *_: Any) -> None:
    """Give up what is in no block, which FSDP keeps gathered for a backward pass, after others.

    It would not see what is written into the parts.
    """
    if not torch.is_grad_enabled():
        module.reshard()


def _with_all_weights(module: nn.Module, _: Any, output: Any) -> Any:
    """Let the output of a block depend on all of its weights.

    Experts may be run by one process alone, and all have to reduce the same gradients.
    """
    trained = [value for value in module.parameters() if value.requires_grad and value.numel()]
    if not trained or not torch.is_grad_enabled():
        return output
    nothing = 0.0 * torch.stack([value.sum().float() for value in trained]).sum()
    if isinstance(output, tuple):
        return (output[0] + nothing.to(output[0].dtype), *output[1:])
    return output + nothing.to(output.dtype) if isinstance(output, Tensor) else output


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
    return distribute_tensor(value, pattern.device_mesh, pattern.placements, src_data_rank=None)


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
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = optimizer.state_dict()
    torch.save(
        {
            "weights": {name: _part(value.detach()) for name, value in values.items()},
            "groups": state["param_groups"],
            "state": {
                index: {key: _part(value) for key, value in item.items()}
                for index, item in state["state"].items()
            },
        },
        _file(folder),
    )


@torch.no_grad()
def _load(model: nn.Module, optimizer: Any, models: list[Any], folder: str) -> None:
    models.clear()
    saved = torch.load(_file(folder), map_location="cpu", weights_only=True)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, part in saved["weights"].items():
        _part(values[name]).copy_(part)
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    state = {
        index: {
            key: _of_part(part, parameters[index]) if key != "step" else part
            for key, part in item.items()
        }
        for index, item in saved["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})


def _file(folder: str) -> Path:
    return Path(folder) / f"shard-{PartialState().process_index}.pt"


def _part(value: Any) -> Any:
    """What this process has of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def _of_part(part: Tensor, pattern: Tensor) -> Tensor:
    """Make the tensor that processes share out like a pattern, of the part of this one."""
    if not isinstance(pattern, DTensor):
        return part
    return DTensor.from_local(
        part.to(pattern.device),
        pattern.device_mesh,
        pattern.placements,
        run_check=False,
        shape=pattern.shape,
        stride=pattern.stride(),
    )
