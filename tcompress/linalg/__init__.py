"""Linear algebra of tcompress: tensors in, tensors out."""

from __future__ import annotations

from tcompress.linalg.lproduct import (
    facewise,
    is_l_orthogonal,
    l_identity,
    l_inverse,
    l_product,
    l_transpose,
    mat_p,
    mode3,
    t_product,
    ten_p,
)
from tcompress.linalg.lsvd import (
    average_rank,
    l_svd,
    singular_tubes,
    truncated_l_svd,
    tubal_rank,
)
from tcompress.linalg.transforms import (
    FIXED_TRANSFORMS,
    check_transform,
    complex_dft,
    fixed_transform,
)

__all__ = [
    "FIXED_TRANSFORMS",
    "average_rank",
    "check_transform",
    "complex_dft",
    "facewise",
    "fixed_transform",
    "is_l_orthogonal",
    "l_identity",
    "l_inverse",
    "l_product",
    "l_svd",
    "l_transpose",
    "mat_p",
    "mode3",
    "singular_tubes",
    "t_product",
    "ten_p",
    "truncated_l_svd",
    "tubal_rank",
]
