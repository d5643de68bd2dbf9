"""A second device, in the memory of the CPU, on which mixing devices fails as it does on a GPU.

    install()
    torch.ones(2, device="second") + torch.ones(2)  # RuntimeError: ... on the same device

PyTorch keeps a key for devices that it does not know (`PrivateUse1`), and takes kernels for it from
Python. A tensor of this device is a plain `torch.Tensor` over memory that a tensor of the CPU owns;
its kernels are those of the CPU, run on the same memory. So numbers are those of the CPU, and
modules, optimizers and autograd need nothing of their own.

What fails as on a GPU: operations on tensors of both devices (but for indices, and for single
numbers in what goes element by element), `numpy()`, memory files, generators of the CPU.

What cannot live here, and what is done instead:

- `torch.Generator(device="second")`: hooks in Python make none. The CPU's default generator is the
  device's, too.
- Fused attention: which kernel is the fastest is asked for by device, and none is written for this
  one. Products and a softmax take its place, as on a GPU without such a kernel.
- Reduced precision (`torch.autocast`): its rules are compiled in for each device, and this one has
  none: everything is computed as it is stored.
- `safetensors` reads files onto devices whose names it knows. It does not know this one.
- Pinned memory, streams and peaks of memory: there are none, and the device says so.
- `torch.compile`: it writes code for devices that it knows.

A process keeps such a device until it ends: `torch.accelerator` then offers it to all, and threads
that compute gradients are made only for devices that are there when the first one starts. So tests
compute on it in processes of their own, see `tests.test_second_device`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils import backend_registration

NAME = "second"

_ON_CPU = DispatchKeySet(DispatchKey.CPU)
_CPU, _SECOND = 1, 12  # DLPack's numbers of devices
_DEVICE_OFFSET = 8  # of the device in DLPack's description of a tensor, behind a pointer


class Device:
    """What `torch.second` is: the functions that PyTorch asks a module of a device for."""

    synchronized = 0  # how often somebody has waited for the device

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Nothing: random numbers are the CPU's."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def synchronize(cls, device: object = None) -> None:
        cls.synchronized += 1


class _Facts(NamedTuple):
    """What a kernel needs to know of an operation."""

    is_view: bool
    is_pointwise: bool
    outputs: tuple[str | int | None, ...]  # the argument that each result is, where it is one
    resized: tuple[str, ...]  # keyword arguments that results are written to


_libraries: list[torch.library.Library] = []  # kernels are there as long as these


def install() -> None:
    """Makes the device known in this process, which keeps it."""
    if _libraries:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, Device)
    kernels = torch.library.Library("_", "IMPL")
    kernels.fallback(_kernel, "PrivateUse1")
    kernels.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", partial(_made, torch.empty), "PrivateUse1")
    aten.impl("empty_strided", partial(_made, torch.empty_strided), "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    for lazily in ("Conjugate", "Negative"):  # copying is what resolves them
        aten.impl("_copy_from", torch.library.fallthrough_kernel, lazily)
    aten.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "PrivateUse1")  # products, softmax
    aten.impl("resize_", _resize_, "PrivateUse1")
    _libraries.extend([kernels, aten])
    torch.UntypedStorage.clone = _copied  # type: ignore[method-assign]
    torch.UntypedStorage.to = _moved  # type: ignore[method-assign]


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation on the CPU's view of the same memory."""
    facts = _facts(op)
    _check(op, facts, args, kwargs)
    if facts.is_view:  # shapes and places in the memory, which stays; `set_` is of this kind
        return op.redispatch(_ON_CPU, *args, **kwargs)
    given = {name: _mapped(_on_cpu, value) for name, value in kwargs.items()}
    for name in facts.resized:  # a new one: memory of another has a size that stays
        if isinstance(kwargs.get(name), Tensor) and not kwargs[name].numel():
            given[name] = torch.empty(0, dtype=kwargs[name].dtype)
    results = op(*_mapped(_on_cpu, args), **given)
    for name in facts.resized:
        if isinstance(kwargs.get(name), Tensor) and kwargs[name].shape != given[name].shape:
            kwargs[name].data = _on_second(given[name])
    if not any(name is not None for name in facts.outputs):
        return _mapped(_on_second, results)
    several = results if isinstance(results, tuple | list) else (results,)
    told = tuple(
        _mapped(_on_second, result) if name is None else _argument(name, args, kwargs)
        for result, name in zip(several, facts.outputs, strict=True)
    )
    return told if isinstance(results, tuple | list) else told[0]


def _argument(name: str | int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[name] if isinstance(name, int) else kwargs[name]


@cache
def _facts(op: Any) -> _Facts:
    schema, written = op._schema, {}
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            key: str | int = argument.name if argument.kwarg_only else index
            written[frozenset(argument.alias_info.before_set)] = key
    kinds = [own.alias_info for own in schema.returns]
    return _Facts(
        is_view=schema.name == "aten::set_"
        or any(kind is not None and not kind.is_write for kind in kinds),
        is_pointwise=torch.Tag.pointwise in op.tags or schema.name.startswith("aten::_foreach"),
        outputs=tuple(
            written.get(frozenset(kind.before_set)) if kind is not None else None for kind in kinds
        ),
        resized=tuple(name for name in written.values() if isinstance(name, str)),
    )


def _check(op: Any, facts: _Facts, args: Any, kwargs: Any) -> None:
    """Refuses what a GPU refuses."""
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != NAME:
        raise RuntimeError(
            f"Expected a '{NAME}' device type for generator but found '{generator.device.type}'"
        )
    tensors = list(_tensors((args, tuple(kwargs.values()))))
    others = [own for own in tensors if own.device.type != NAME]
    if not others or len(others) == len(tensors):
        return
    if facts.is_pointwise:
        others = [own for own in others if own.ndim]
    elif "index" in op._schema.name and args[0].device.type == NAME and isinstance(args[1], list):
        others = [own for own in _tensors(args[2:]) if own.device.type != NAME and own.ndim]
    if others:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and {others[0].device}! (when computing {op._schema.name})"
        )


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """The one operation between devices."""
    _on_cpu(target).copy_(_on_cpu(source))
    return target


def _made(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    kwargs |= {"device": "cpu", "pin_memory": False}
    return _on_second(make(*args, **kwargs))


def _resize_(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    made = torch.empty(size, dtype=tensor.dtype)
    flat, before = made.flatten(), _on_cpu(tensor).flatten()
    count = min(len(flat), len(before))
    flat[:count] = before[:count]
    tensor.data = _on_second(made)
    return tensor


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Copies memory as it is: PyTorch asks for an allocator, of which Python makes none."""
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
    return made.untyped_storage().copy_(storage)  # type: ignore[return-value]


def _moved(
    storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False
) -> torch.UntypedStorage:
    if storage.device.type == torch.device(device).type:
        return storage
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    return made.untyped_storage().copy_(storage)  # type: ignore[return-value]


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies a function to all tensors in what operations take or give, in lists too."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)([_mapped(function, item) for item in value])
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _on_cpu(tensor: Tensor) -> Tensor:
    return _same_memory(tensor, _CPU) if tensor.device.type == NAME else tensor


def _on_second(tensor: Tensor) -> Tensor:
    return _same_memory(tensor, _SECOND) if tensor.device.type == "cpu" else tensor


def _same_memory(tensor: Tensor, device: int) -> Tensor:
    """A tensor over the same memory that says to be on another device."""
    flags = (tensor.is_conj(), tensor.is_neg())  # DLPack has no words for them
    capsule = torch._C._to_dlpack(tensor.detach())
    place = _pointer(capsule, b"dltensor") + _DEVICE_OFFSET
    ctypes.c_int32.from_address(place).value = device
    moved = torch._C._from_dlpack(capsule)
    moved = torch._conj(moved) if flags[0] else moved
    return torch._neg_view(moved) if flags[1] else moved
