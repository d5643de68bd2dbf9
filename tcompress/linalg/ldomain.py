"""The transform domain of the L-product: what its functions share. Not public."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tcompress.errors import InputError

# Factorisations need these; integers would silently truncate Z.
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
# Ten times the usual rank tolerance, size * epsilon: slices carry the transform's rounding as well.
ROUNDING = 10


@dataclass(frozen=True)
class Domain:
    """The transform domain of Z for one call; slices come first, shape (p, n, m), for batching."""

    z: Tensor  # (p, p)
    inverse: Tensor  # (p, p)
    # Index of the slice that is the conjugate of slice k, set only where Z is complex and the
    # result is real all the same.
    partner: Tensor | None  # (p,)

    def slices(self, a: Tensor) -> Tensor:  # (n, m, p) -> (p, n, m)
        """Apply L."""
        return along_tubes(a, self.z).movedim(2, 0)

    def back(self, slices: Tensor) -> Tensor:  # (p, n, m) -> (n, m, p)
        """Apply L^-1; real where the result is known to be."""
        a = along_tubes(slices.movedim(0, 2), self.inverse)
        return a if self.partner is None else a.real

    def tubes(self, values: Tensor) -> Tensor:  # (p, r) -> (r, p)
        """Apply L^-1 to the diagonals of the slices."""
        return self.back(values[:, :, None])[:, 0]

    def svd(self, slices: Tensor, full: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return U (p, n, r), singular values (p, r) and V (p, m, r) of every slice."""
        if self.partner is None:
            u, s, vh = torch.linalg.svd(slices, full_matrices=full)
            return u, s, vh.mH
        # Singular vectors are free up to phases: computed slice by slice, those of conjugate slices
        # would not be conjugate and U, V not real. So one of each pair is computed and copied, and
        # slices that are their own conjugates are treated as the real matrices they are.
        index = torch.arange(len(self.partner), device=self.partner.device)
        own, first = index[self.partner == index], index[self.partner > index]
        place = torch.cat([own, first, self.partner[first]]).argsort()
        real = torch.linalg.svd(slices[own].real, full_matrices=full)
        pair = torch.linalg.svd(slices[first], full_matrices=full)
        u, s, vh = (torch.cat([r, c, c.conj()])[place] for r, c in zip(real, pair, strict=True))
        return u, s, vh.mH


def domain_of(where: str, z: Tensor, a: Tensor) -> Domain:
    """Check Z against a tensor of the final dtype (n, m, p) and prepare its transform."""
    check_square(where, z)
    if not z.isfinite().all():
        raise InputError(f"`{where}` needs a finite matrix `z`, found nan or infinite entries")
    if len(z) != a.shape[2]:
        raise InputError(
            f"`{where}` needs a transform `z` of shape {(a.shape[2], a.shape[2])} for a tensor of "
            f"shape {tuple(a.shape)}, found {tuple(z.shape)}"
        )
    if is_singular(z):
        raise InputError(
            f"`{where}` needs an invertible `z`, found a matrix of shape {tuple(z.shape)} that is "
            "singular to working precision"
        )
    inverse = torch.linalg.inv(z)
    partner = _conjugate_rows(z, inverse) if z.is_complex() and not a.is_complex() else None
    place = None if partner is None else partner.to(a.device)
    return Domain(like(z, a), like(inverse, a), place)


@torch.no_grad()
def _conjugate_rows(z: Tensor, inverse: Tensor) -> Tensor | None:
    """Find the permutation with conj(Z) = Z[permutation], up to rounding."""
    partner = (z.conj() @ inverse).abs().argmax(dim=1)
    limit = torch.finfo(z.dtype).eps ** 0.5 * z.abs().max()
    return partner if bool((z.conj() - z[partner]).abs().max() <= limit) else None


@torch.no_grad()
def is_singular(matrices: Tensor) -> Tensor:  # (..., n, n) -> (...)
    """Tell which matrices are singular to working precision."""
    values = torch.linalg.svdvals(matrices)
    limit = ROUNDING * matrices.shape[-1] * torch.finfo(matrices.dtype).eps * values[..., 0]
    return torch.le(values[..., -1], limit)


def along_tubes(a: Tensor, z: Tensor) -> Tensor:  # (n, m, p), (q, p) -> (n, m, q)
    """Apply a matrix to every tube; `z` comes from `like`."""
    return torch.matmul(a.to(z.dtype), z.mT)


def like(z: Tensor, a: Tensor) -> Tensor:
    """Bring Z to the precision and device of `a`; it stays complex if it is."""
    return z.to(a.device, a.dtype.to_complex() if z.is_complex() else a.dtype)


def check_tensor(where: str, name: str, a: Tensor, finite: bool = False) -> None:
    """Refuse what is not a third-order tensor, and entries that break a factorisation."""
    if a.ndim != 3 or 0 in a.shape:
        raise InputError(
            f"`{where}` needs `{name}` as a tensor of order 3 without empty modes, "
            f"found shape {tuple(a.shape)}"
        )
    check_dtype(where, name, a)
    if finite and not a.isfinite().all():
        raise InputError(f"`{where}` needs a finite `{name}`, found nan or infinite entries")


def check_square(where: str, z: Tensor) -> None:
    """Refuse what cannot be a transform."""
    if z.ndim != 2 or z.shape[0] != z.shape[1] or 0 in z.shape:
        raise InputError(f"`{where}` needs a square matrix `z`, found shape {tuple(z.shape)}")
    check_dtype(where, "z", z)


def check_dtype(where: str, name: str, a: Tensor) -> None:
    """Refuse the dtypes that torch cannot factor."""
    if a.dtype not in DTYPES:
        known = ", ".join(f"`{dtype}`" for dtype in DTYPES)
        raise InputError(f"`{where}` needs `{name}` of dtype {known}, found `{a.dtype}`")


def check_factors(where: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Check that two tensors can be multiplied and bring them to one dtype."""
    check_tensor(where, "a", a)
    check_tensor(where, "b", b)
    if a.shape[1] != b.shape[0] or a.shape[2] != b.shape[2]:
        raise InputError(
            f"`{where}` cannot multiply `a` of shape {tuple(a.shape)} by `b` of shape "
            f"{tuple(b.shape)}: it needs (m, l, p) and (l, n, p)"
        )
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)
