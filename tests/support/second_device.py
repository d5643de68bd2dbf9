"""A second device, in the memory of the CPU, on which mixing devices fails as it does on a GPU.

    install()
    torch.ones(2, device="second") + torch.ones(2)  # RuntimeError: ... on the same device

PyTorch keeps a key for devices that it does not know (`PrivateUse1`), and takes kernels for it from
Python. A tensor of this device is a plain `torch.Tensor` over memory that a tensor of the CPU owns;
its kernels are those of the CPU, run on the same memory. So numbers are those of the CPU, and
modules, optimizers and autograd need nothing of their own.

What fails as on a GPU: operations on tensors of both devices (but for indices, and for single
numbers in what goes element by element), `numpy()`, generators of the CPU. Empty tensors have no
address, so that they seem to share one.

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

    operations = 0  # that ran on it
    synchronized = 0  # how often somebody has waited for it

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
    writes: bool  # whether there is such a result
    resized: tuple[str, ...]  # keyword arguments that results are written to
    tensors: tuple[int, ...]  # arguments that are one tensor


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
    aten.impl("histc", _histc, "PrivateUse1")
    aten.impl("resize_", _resize_, "PrivateUse1")
    aten.impl("convolution_overrideable", _convolution, "PrivateUse1")
    aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    for name, op in _structured():
        aten.impl(name, partial(_kernel, op), "PrivateUse1")
    _libraries.extend([kernels, aten])
    # Who moves a module keeps its parameters, as on a GPU: optimizers hold them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.UntypedStorage.clone = _copied  # type: ignore[method-assign]
    torch.UntypedStorage.to = _moved  # type: ignore[method-assign]


def _structured() -> Iterator[tuple[str, Any]]:
    """Operations that PyTorch takes apart for devices that do not have them: shape, memory, values.

    As one step they take half as long.
    """
    key, known = DispatchKey.CompositeExplicitAutogradNonFunctional, torch._C
    for whole in known._dispatch_get_all_op_names():
        name = whole.removeprefix("aten::")
        if name != whole and known._dispatch_has_kernel_for_dispatch_key(whole, key):
            packet, _, overload = name.partition(".")
            yield name, getattr(getattr(torch.ops.aten, packet), overload or "default")


def _histc(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Counts values, which on a GPU may be integers."""
    counts = torch.histc(_lent(values).double(), *args, **kwargs)
    return _on_second(counts.to(values.dtype))


# PyTorch asks devices of other makers for these two, and no other device.


def _convolution(*args: Any) -> Tensor:
    return _kernel(torch.ops.aten.convolution.default, *args)


def _convolution_backward(gradient: Tensor, values: Tensor, weight: Tensor, *args: Any) -> Any:
    op = torch.ops.aten.convolution_backward.default
    return _kernel(op, gradient, values, weight, None, *args)


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation on the CPU's view of the same memory."""
    facts = _facts(op)
    if facts.is_view:  # shapes and places in the memory, which stays; `set_` is of this kind
        return op.redispatch(_ON_CPU, *args, **kwargs)
    Device.operations += 1
    others: list[Tensor] = []  # tensors that are on the CPU
    given = [_on_cpu(value, others) for value in args]
    named = {name: _on_cpu(value, others) for name, value in kwargs.items()}
    if others or "generator" in kwargs:
        _check(op, facts, args, kwargs, others)
    for index in facts.tensors:  # numbers among them have become plain ones on the way here
        if index < len(given) and isinstance(given[index], int | float | complex):
            given[index] = torch.tensor(given[index])
    for name in facts.resized:  # a new one: memory of another has a size that stays
        if isinstance(kwargs.get(name), Tensor) and not kwargs[name].numel():
            named[name] = torch.empty(0, dtype=kwargs[name].dtype)
    results = op(*given, **named)
    for name in facts.resized:
        if isinstance(kwargs.get(name), Tensor) and kwargs[name].shape != named[name].shape:
            kwargs[name].data = _on_second(named[name])
    if not facts.writes:
        return _on_second(results)
    several = results if isinstance(results, tuple | list) else (results,)
    told = tuple(
        _on_second(result) if name is None else _argument(name, args, kwargs)
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
    outputs = tuple(written.get(frozenset(kind.before_set)) if kind else None for kind in kinds)
    return _Facts(
        is_view=schema.name == "aten::set_"
        or torch.Tag.inplace_view in op.tags
        or any(kind and not kind.is_write for kind in kinds),
        is_pointwise=torch.Tag.pointwise in op.tags or schema.name.startswith("aten::_foreach"),
        outputs=outputs,
        writes=any(name is not None for name in outputs),
        resized=tuple(name for name in written.values() if isinstance(name, str)),
        tensors=tuple(i for i, own in enumerate(schema.arguments) if str(own.type) == "Tensor"),
    )


def _check(
    op: Any, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any], others: list[Tensor]
) -> None:
    """Refuses what a GPU refuses."""
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != NAME:
        raise RuntimeError(
            f"Expected a '{NAME}' device type for generator but found '{generator.device.type}'"
        )
    name = op._schema.name
    if facts.is_pointwise:  # single numbers may come from anywhere
        others = [own for own in others if own.ndim]
    elif "index" in name and isinstance(args[1], list) and args[0].device.type == NAME:
        places = {id(own) for own in args[1] if own is not None}
        others = [own for own in others if own.ndim and id(own) not in places]
    if others:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and {others[0].device}! (when computing {name})"
        )


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """The one operation between devices."""
    _lent(target).copy_(_lent(source))
    return target


def _made(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    kwargs |= {"device": "cpu", "pin_memory": False}
    return _on_second(make(*args, **kwargs))


def _resize_(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    made = torch.empty(size, dtype=tensor.dtype)
    flat, before = made.flatten(), _lent(tensor).flatten()
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


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _lent(tensor: Tensor) -> Tensor:
    """A tensor of either device as the CPU's."""
    return tensor if tensor.device.type == "cpu" else _same_memory(tensor, _CPU)


def _on_cpu(value: Any, others: list[Tensor]) -> Any:
    """An argument for the CPU; what is there already is added to `others`."""
    if isinstance(value, Tensor):
        if value.device.type == NAME:
            return _same_memory(value, _CPU)
        others.append(value)
    elif isinstance(value, list | tuple):
        return [_on_cpu(item, others) for item in value]
    elif isinstance(value, torch.device):
        return torch.device("cpu")
    return value


def _on_second(value: Any) -> Any:
    """A result for the device, or several."""
    if isinstance(value, Tensor):
        return _same_memory(value, _SECOND)
    if isinstance(value, list | tuple):
        return type(value)([_on_second(item) for item in value])
    return value


def _same_memory(tensor: Tensor, device: int) -> Tensor:
    """A tensor over the same memory that says to be on another device."""
    capsule = torch._C._to_dlpack(tensor.detach() if tensor.requires_grad else tensor)
    place = _pointer(capsule, b"dltensor") + _DEVICE_OFFSET
    ctypes.c_int32.from_address(place).value = device
    moved = torch._C._from_dlpack(capsule)
    if tensor.is_conj():  # DLPack has no words for it
        moved = torch._conj(moved)
    return torch._neg_view(moved) if tensor.is_neg() else moved
