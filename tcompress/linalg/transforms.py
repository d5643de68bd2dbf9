"""Transforms of the features: fixed p x p matrices, and orthogonal ones of a few stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.fft
import scipy.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcompress.memory import in_huge_pages

# Batched products that write where the result belongs.
#
# All slice and rotation products of the project are one operation: ``p`` independent matrix
# products whose operands and result are strided views of larger matrices. ``torch.bmm`` alone
# returns a contiguous ``(p, tokens, c)`` tensor, and the copy that brings slices side by side
# costs as much as the product, so the product is written into a strided view of the result.
#
# Activations are logically ``(tokens, features)``. Their memory is row-major, or feature-major
# (strides ``(1, tokens)``): between the stages of a rotation the feature-major form lets every
# operand keep a unit stride, so that no stage copies anything.

_ROWS = (1, 0, 2)  # memory order of (batch, rows, cols): rows outermost, batches side by side
_FEATURES = (0, 2, 1)  # feature-major: batches outermost, rows innermost
_STRIDED = (2, 0, 1)  # feature-major with interleaved batches
_LINE, _PAGE = 64, 4096  # bytes


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    strides: tuple[int, ...] = tensor.stride()
    return tuple(sorted(range(3), key=lambda axis: -strides[axis]))


class _ProductInto(torch.autograd.Function):
    """``a @ b`` over a batch, with a chosen memory order; twice differentiable."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, order: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(a, b)
        return _product_into(a, b, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        (grad,) = grads
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = _apply(grad, b.transpose(1, 2), _memory_order(a))
        if ctx.needs_input_grad[1]:
            grad_b = _apply(a.transpose(1, 2), grad, _memory_order(b))
        return grad_a, grad_b, None


def _apply(a: Tensor, b: Tensor, order: tuple[int, ...]) -> Tensor:
    return _ProductInto.apply(a, b, order)  # type: ignore[no-untyped-call]


def _product_into(a: Tensor, b: Tensor, order: tuple[int, ...]) -> Tensor:
    shape = (*a.shape[:2], b.shape[2])
    *outer, run = (shape[axis] for axis in order)
    on_cpu, size = a.device.type == "cpu", a.element_size()
    low = on_cpu and a.dtype in (torch.bfloat16, torch.float16)
    # The transposed product is contiguous: one call of a library for all matrices, not one for
    # each, between which all threads wait for the last.
    whole = on_cpu and order == _FEATURES and not low
    # Strided operands of low precision fall to loops that are hundreds of times slower on CPUs;
    # strided results are lost on `mps` of some systems.
    copies = low or a.device.type == "mps"
    # Runs whole pages apart fall into the same few lines of a CPU's caches.
    aliases = on_cpu and not whole and order != _ROWS and not run * size % _PAGE
    memory = a.new_empty([*outer, run + (_LINE // size if aliases else 0)])
    out = memory[..., :run].permute([order.index(axis) for axis in range(3)])
    if copies:
        return out.copy_(torch.bmm(a.contiguous(), b.contiguous()))
    if type(memory) is Tensor:  # not of fake ones
        in_huge_pages(memory)
    if whole:
        torch.bmm(b.mT, a.mT, out=memory)
    else:
        torch.bmm(a, b, out=out)
    return out


def batched_product(a: Tensor, b: Tensor, order: tuple[int, ...]) -> Tensor:
    """Multiplies two batches of matrices into a given memory order.

    # (batch, rows, inner), (batch, inner, cols) -> (batch, rows, cols)
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return torch.bmm(a, b)  # a compiler chooses the memory order itself
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _apply(a, b, order)
    return _product_into(a, b, order)


def slice_product(x: Tensor, slices: Tensor, *, feature_major: bool = False) -> Tensor:
    """Multiplies every slice of the features by its own matrix: the facewise product.

    # (tokens, p * a), (p, c, a) -> (tokens, p * c)
    """
    count, _, width = slices.shape
    parts = x.unflatten(1, (count, width)).transpose(0, 1)  # (p, tokens, a)
    out = batched_product(parts, slices.transpose(1, 2), _FEATURES if feature_major else _ROWS)
    return out.transpose(0, 1).flatten(1)


def rotate_strided(x: Tensor, blocks: Tensor) -> Tensor:
    """Multiplies every group of ``b`` features that lie ``m`` apart by its own block.

    # (tokens, b * m), (m, b, b) -> (tokens, b * m)
    """
    groups, size, _ = blocks.shape
    parts = x.unflatten(1, (size, groups)).permute(2, 0, 1)  # (m, tokens, b)
    return batched_product(parts, blocks.transpose(1, 2), _STRIDED).permute(1, 2, 0).flatten(1)


# Orthogonal transforms of a few block-diagonal stages: the fitted transform of ``lprod``.
#
# Even stages rotate each run of ``b`` neighbouring coordinates, odd stages each group of ``b``
# coordinates that lie ``d / b`` apart. Every block is ``exp(A - A^T)``; the stored numbers are the
# generators, the strict upper triangles of ``A``, so training them keeps orthogonality.


@dataclass(frozen=True)
class Stages:
    """Shape of a staged rotation."""

    features: int  # width d of the rotated space
    block: int  # size b of the blocks; divides d
    count: int  # stages, contiguous and strided in turn

    @property
    def generators_shape(self) -> tuple[int, int, int]:
        """Shape of the stored numbers: (stages, blocks in a stage, b (b - 1) / 2)."""
        return (self.count, self.features // self.block, self.block * (self.block - 1) // 2)


def nearest_block(features: int, wanted: int) -> int:
    """Returns the divisor of `features` that is closest to `wanted`, the smaller one of two."""
    divisors = [size for size in range(1, features + 1) if features % size == 0]
    return min(divisors, key=lambda size: (abs(size - wanted), size))


_SQUARINGS, _TERMS = 6, 10


def build_blocks(generators: Tensor, block: int) -> Tensor:
    """Builds the orthogonal blocks from their generators.  # (..., b (b - 1) / 2) -> (..., b, b).

    A Taylor series with scaling and squaring, in float64, is several times faster than
    `torch.linalg.matrix_exp`, which sorts matrices by norm; exact to rounding up to norms of about
    10, far beyond what a fit reaches.
    """
    rows, cols = torch.triu_indices(block, block, 1, device=generators.device)
    upper = generators.new_zeros(*generators.shape[:-1], block, block, dtype=torch.float64)
    upper[..., rows, cols] = generators.double()
    step = (upper - upper.mT) / 2**_SQUARINGS
    eye = torch.eye(block, dtype=torch.float64, device=generators.device)
    result = eye + step / _TERMS
    for term in range(_TERMS - 1, 0, -1):
        result = eye + step @ result / term
    for _ in range(_SQUARINGS):
        result = result @ result
    return result


def merges_with(stages: Stages, size: int) -> bool:
    """Return whether a p x p transform of tubes can be folded into the last, strided, stage."""
    return stages.count % 2 == 0 and stages.block % size == 0


def fold_tube_transform(blocks: Tensor, z: Tensor) -> Tensor:
    """Folds a tube transform into the last stage, at no cost when the model runs.

    The tubes of a p-slice tensor lie ``d / p`` apart; when p divides b they lie inside the groups
    of a strided stage, where ``Z`` acts as ``Z (x) I`` of size b.

    # (stages, groups, b, b), (p, p) -> (stages, groups, b, b)
    """
    inner = torch.eye(blocks.shape[-1] // z.shape[0], dtype=blocks.dtype, device=blocks.device)
    mixing = torch.kron(z.to(blocks), inner)
    return torch.cat([blocks[:-1], (mixing @ blocks[-1])[None]])


def mix_tubes(x: Tensor, z: Tensor) -> Tensor:
    """Multiplies the tubes of every token's p-slice tensor by a p x p transform.

    # (tokens, d), (p, p) -> (tokens, d)
    """
    size = z.shape[0]
    if x.stride(0) == 1 and x.stride(1) > 1:
        return (z @ x.mT.reshape(size, -1)).view(x.shape[1], x.shape[0]).mT
    return (z @ x.unflatten(1, (size, -1))).flatten(1)


def rotate(x: Tensor, blocks: Tensor) -> Tensor:
    """Applies the stages in order: T x.  # (tokens, d), (stages, groups, b, b) -> (tokens, d)."""
    for index, stage in enumerate(blocks.unbind(0)):
        x = rotate_strided(x, stage) if index % 2 else slice_product(x, stage, feature_major=True)
    return x


def rotate_back(x: Tensor, blocks: Tensor) -> Tensor:
    """Applies the transposed stages in reverse order: T^T x.

    # (tokens, d), (stages, groups, b, b) -> (tokens, d)
    """
    for index, stage in reversed([*enumerate(blocks.mT)]):
        inner = index > 0
        x = rotate_strided(x, stage) if index % 2 else slice_product(x, stage, feature_major=inner)
    return x


# Fixed p x p transforms Z for the mode-3 transform of the L-product.
#
# Everything is built in numpy and handed to torch at the very end, so that neither a default
# device (models are built under `torch.device("meta")`) nor a default dtype can change a transform.
Matrix = NDArray[np.float64]


def fixed_transform(kind: str, size: int, seed: int = 0) -> Tensor:  # (p, p)
    """Build a fixed orthogonal transform Z; its rows are the basis vectors.

    | kind       | basis                                                               | sizes     |
    |------------|---------------------------------------------------------------------|-----------|
    | `dct`      | orthonormal DCT-II, the transform of the paper's experiments        | any       |
    | `identity` | no mixing: slices are the contiguous blocks themselves              | any       |
    | `haar`     | Haar wavelets: the mean, then differences from coarse to fine       | power of 2|
    | `hadamard` | Sylvester's Hadamard matrix divided by sqrt(p)                      | power of 2|
    | `random`   | Q of a seeded Gaussian matrix's QR, signs such that diag(R) > 0     | any       |
    | `dft`      | real Fourier basis cos0, cos1, sin1, cos2, sin2, ..., [cos p/2]     | any       |

    `dft` is real: cos_k[j] = sqrt(2/p) cos(2 pi j k / p), likewise sin_k; cos0 and, for even p, the
    last row cos p/2 carry sqrt(1/p). With c_k and s_k the coefficients of a real tube, its unitary
    DFT is c_0 at 0, (c_k - i s_k) / sqrt(2) at k, the conjugate of that at p - k, and c_{p/2} at
    p/2. As a *real* Z it defines its own L-product; the t-product multiplies the complex numbers.

    The seed is that of `random`. Z has the shape (p, p), float64, on the CPU, with Z Z^T = I.

    Reference: arXiv:2603.05727, section 4.5 and section 5.2.
    """
    return torch.from_numpy(np.ascontiguousarray(FIXED_TRANSFORMS[kind](size, seed)))


def check_transform(kind: str, size: int) -> str | None:
    """Says why a fixed transform cannot have so many slices; None if it exists."""
    if kind in ("haar", "hadamard") and size.bit_count() != 1:
        return f"transform `{kind}` needs a power of two as number of slices, found {size}"
    return None


def _haar(size: int, seed: int) -> Matrix:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        finest = np.kron(np.eye(len(matrix)), [1.0, -1.0])
        matrix = np.concatenate([np.kron(matrix, [1.0, 1.0]), finest]) / np.sqrt(2)
    return matrix


def _random(size: int, seed: int) -> Matrix:
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))
    # Without the sign fix, Q would depend on the QR implementation and not be Haar distributed.
    signed: Matrix = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    return signed


def _dft(size: int, seed: int) -> Matrix:
    position = np.arange(size)
    frequency = np.arange(1, (size - 1) // 2 + 1)
    # j * k is reduced modulo p as an integer: no precision is lost in large angles.
    angle = 2 * np.pi * (np.outer(frequency, position) % size) / size
    pairs = np.stack([np.cos(angle), np.sin(angle)], axis=1).reshape(-1, size) * np.sqrt(2)
    rows = [np.ones((1, size)), pairs]
    if size % 2 == 0:
        rows.append((1.0 - 2.0 * (position % 2))[None])
    matrix: Matrix = np.concatenate(rows) / np.sqrt(size)
    return matrix


FIXED_TRANSFORMS: dict[str, Callable[[int, int], Matrix]] = {
    "dct": lambda size, seed: scipy.fft.dct(np.eye(size), norm="ortho", axis=0),
    "identity": lambda size, seed: np.eye(size),
    "haar": _haar,
    "hadamard": lambda size, seed: scipy.linalg.hadamard(size, dtype=np.float64) / np.sqrt(size),
    "random": _random,
    "dft": _dft,
}
