"""Devices and dtypes by the names that users type."""

from __future__ import annotations

import torch

from tcompress.errors import InputError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

KINDS = ("cpu", "cuda", "mps", "xpu")


def pick_device(name: str) -> torch.device:
    """Returns the device to compute on.

    Raises:
        InputError: There is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in KINDS:
        listed = ", ".join(f"`{known}`" for known in ("auto", *KINDS, "cuda:1"))
        raise InputError(f"unknown device `{name}`; known are {listed}", "use `--device auto`")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise InputError(
            f"device `{name}` cannot be used here", "use `--device cpu`, or `auto`"
        ) from error
    return device


def pick_dtype(name: str | None) -> torch.dtype | None:
    """Returns the dtype of that name; None stands for whatever a model is stored in.

    Raises:
        InputError: It is not one of `DTYPES`.
    """
    if name is not None and name not in DTYPES:
        listed = ", ".join(f"`{known}`" for known in DTYPES)
        raise InputError(f"unknown dtype `{name}`; known are {listed}", "leave `--dtype` out")
    return None if name is None else DTYPES[name]
