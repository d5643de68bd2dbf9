"""Solvers and transforms: tensors in, tensors out, and nothing known of models.

`moments` say in which norm a weight is fitted, `fits` do it; `channels` orders what lies between
layers; `calibrated` rounds in that norm; the algebra of the L-product, tensor
trains and Tucker factors have a file each. Open `moments.py` first. Structures say `linalg.NAME`:
names are looked up on first use, so that reading a structure's options costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcompress.linalg.calibrated import *  # noqa: F403
    from tcompress.linalg.channels import *  # noqa: F403
    from tcompress.linalg.fits import *  # noqa: F403
    from tcompress.linalg.moments import *  # noqa: F403
    from tcompress.linalg.rounding import *  # noqa: F403
    from tcompress.linalg.tensortrain import *  # noqa: F403
    from tcompress.linalg.transforms import *  # noqa: F403
    from tcompress.linalg.ttfit import *  # noqa: F403
    from tcompress.linalg.tuckerfit import *  # noqa: F403

_FILES = (
    *("moments", "fits", "channels", "rounding", "calibrated"),
    *("transforms", "tensortrain", "ttfit", "tuckerfit"),
)


def __getattr__(name: str) -> Any:
    for file in () if name.startswith("_") or name in _FILES else _FILES:
        found = vars(import_module(f"{__name__}.{file}"))
        if name in found:
            globals()[name] = found[name]
            return found[name]
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
