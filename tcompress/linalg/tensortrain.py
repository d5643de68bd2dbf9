"""Tensor-train matrices: their shapes, applied, rebuilt, and made from a dense one by SVDs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from itertools import count, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from tcompress.errors import FitError
from tcompress.linalg.moments import balancing_ratio

# A matrix of I = I_1 ... I_N rows and J = J_1 ... J_N columns, both indexed with the last mode
# fastest, is a chain of cores of shape (R_{n-1}, I_n, J_n, R_n) with R_0 = R_N = 1:
# W[i_1 ... i_N, j_1 ... j_N] = G_1[:, i_1, j_1, :] G_2[:, i_2, j_2, :] ... G_N[:, i_N, j_N, :].
# It maps J inputs to I outputs; `ranks` are the inner ones, R_1 to R_{N-1}.
#
# Reference: Oseledets (2011), Tensor-train decomposition; Novikov et al. (2015), Tensorizing neural
# networks.

Ints = Sequence[int]
Modes = tuple[int, ...]
BALANCE = 2  # the largest mode may exceed the geometric mean by this factor
NARROW, WIDE = 8, 24  # states in between are left in place for small cores only
SMALL = 2**17  # numbers of a core that caches hold while every row reads it


@lru_cache(maxsize=1024)
def balanced_modes(size: int, order: int) -> Modes:
    """Factors a size into modes as equal as possible, padding it where it has no such factors.

    Modes are balanced if the largest is at most twice the `order`-th root of their product. A size
    whose most even factorisation is not (a prime, twice a prime) gives the modes of the next size
    that has one. So from size 4 on at least two modes are larger than 1, whatever the size.
    """
    for padded in count(size):  # ends at the next power of `order`, at the latest
        modes = min(_factorisations(padded, order), key=lambda found: (found[-1] / found[0], found))
        if modes[-1] ** order <= BALANCE**order * padded:
            return modes
    raise AssertionError  # the loop only ends by returning


def _factorisations(size: int, order: int, smallest: int = 1) -> Iterator[Modes]:
    """All ascending factorisations into `order` factors that start at `smallest` or above."""
    if order == 1:
        yield (size,)
        return
    for factor in range(smallest, size + 1):
        if factor**order > size:
            return
        if size % factor == 0:
            for rest in _factorisations(size // factor, order - 1, factor):
                yield (factor, *rest)


def quantized_modes(size: int) -> Modes:
    """Returns modes of 2 whose product is the next power of two; (1,) for a size of 1."""
    return (2,) * (size - 1).bit_length() or (1,)


def matrix_modes(in_features: int, out_features: int, order: int) -> tuple[Modes, Modes]:
    """Chooses balanced modes of the inputs, which descend, and of the outputs, which ascend.

    That makes the products I_n J_n of the cores more equal: fewer parameters at every rank.
    """
    return balanced_modes(in_features, order)[::-1], balanced_modes(out_features, order)


def quantized_matrix_modes(in_features: int, out_features: int) -> tuple[Modes, Modes]:
    """Chooses modes of 2 for inputs and outputs.

    Where one has fewer, the leading cores are 2 x 1 or 1 x 2: none is padded beyond its own power
    of two.
    """
    in_modes, out_modes = quantized_modes(in_features), quantized_modes(out_features)
    length = max(len(in_modes), len(out_modes))
    return (1,) * (length - len(in_modes)) + in_modes, (1,) * (length - len(out_modes)) + out_modes


def clip_ranks(ranks: Ints, in_modes: Ints, out_modes: Ints) -> Modes:
    """Clips inner ranks to what the shape admits.

    No rank can usefully exceed the number of entries of the cores on either side of it, nor,
    within a list of different ranks, what its neighbours and the modes between them admit.
    """
    sizes = _core_sizes(in_modes, out_modes)
    clipped = [1, *ranks, 1]
    for n, size in enumerate(sizes[:-1], 1):
        clipped[n] = min(clipped[n], clipped[n - 1] * size)
    for n in range(len(sizes) - 1, 0, -1):
        clipped[n] = min(clipped[n], clipped[n + 1] * sizes[n])
    return tuple(clipped[1:-1])


def full_ranks(in_modes: Ints, out_modes: Ints) -> Modes:
    """Returns the ranks at which a tensor train represents every matrix of its shape."""
    sizes = _core_sizes(in_modes, out_modes)
    return clip_ranks([math.prod(sizes)] * (len(sizes) - 1), in_modes, out_modes)


def parameter_count(in_modes: Ints, out_modes: Ints, ranks: Ints) -> int:
    """Counts the numbers in the cores of these inner ranks."""
    sizes = _core_sizes(in_modes, out_modes)
    bonds = pairwise((1, *ranks, 1))
    return sum(a * size * b for (a, b), size in zip(bonds, sizes, strict=True))


def rank_for_budget(in_modes: Ints, out_modes: Ints, budget: int) -> int:
    """Finds the largest uniform rank, clipped at every position, that a budget pays for."""
    most = max(full_ranks(in_modes, out_modes), default=1)

    def price(rank: int) -> int:  # grows with the rank
        ranks = clip_ranks([rank] * (len(in_modes) - 1), in_modes, out_modes)
        return parameter_count(in_modes, out_modes, ranks)

    return bisect_right(range(1, most + 1), budget, key=price)


def _core_sizes(in_modes: Ints, out_modes: Ints) -> list[int]:
    """I_n J_n of every core."""
    return [rows * columns for rows, columns in zip(out_modes, in_modes, strict=True)]


def tt_shape(cores: Sequence[Tensor]) -> tuple[Modes, Modes, Modes]:
    """Reads input modes, output modes and inner ranks off a list of cores."""
    in_modes = tuple(core.shape[-2] for core in cores)
    out_modes = tuple(core.shape[-3] for core in cores)
    return in_modes, out_modes, tuple(core.shape[-1] for core in cores[:-1])


def merge_cores(left: Tensor, right: Tensor) -> Tensor:
    """Contracts two neighbours into one core.

    # (..., a, i, j, b), (..., b, k, l, c) -> (..., a, i * k, j * l, c)
    """
    merged = torch.einsum("...aijb,...bklc->...aikjlc", left, right)
    return merged.flatten(-5, -4).flatten(-3, -2)


def tt_to_matrix(cores: Sequence[Tensor]) -> Tensor:
    """Rebuilds the dense matrix; gradients flow to the cores.

    The chain is contracted from both ends towards the bond where that costs least.

    # (..., R_{n-1}, I_n, J_n, R_n) -> (..., I, J), padding of its modes included
    """
    if len(cores) == 1:
        return cores[0][..., 0, :, :, 0]
    costs = _cut_macs(*tt_shape(cores))
    cut = costs.index(min(costs)) + 1
    left = reduce(merge_cores, cores[:cut])
    right = reduce(lambda done, core: merge_cores(core, done), reversed(cores[cut:]))
    return merge_cores(left, right)[..., 0, :, :, 0]


def tt_rows(index: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Builds single rows of the matrix; gradients flow to the cores.

    # (n,), (R_{n-1}, I_n, J_n, R_n) -> (n, J)
    """
    digits = torch.unravel_index(index, [core.shape[1] for core in cores])
    # Every word has a chain of its own: (n, J so far, R).
    chain = torch.ones((), dtype=cores[0].dtype, device=index.device).expand(len(index), 1, 1)
    for core, digit in zip(cores, digits, strict=True):
        own = core.transpose(0, 1)[digit]  # (n, R_{n-1}, J_n, R_n)
        width = chain.shape[1] * core.shape[2]
        chain = (chain @ own.flatten(2)).view(len(index), width, core.shape[-1])
    return chain[..., 0]


def rebuild_macs(in_modes: Ints, out_modes: Ints, ranks: Ints) -> int:
    """Counts the multiply-adds of `tt_to_matrix`."""
    return min(_cut_macs(in_modes, out_modes, ranks)) if ranks else 0


def _cut_macs(in_modes: Ints, out_modes: Ints, ranks: Ints) -> list[int]:
    """Multiply-adds of contracting both ends towards each of the N - 1 bonds."""
    sizes = _core_sizes(in_modes, out_modes)
    bonds = (1, *ranks, 1)
    # The k-th entry: merging the first, or the last, k + 1 cores one after another.
    left, right = [0], [0]
    for n in range(1, len(sizes) - 1):
        left.append(left[-1] + math.prod(sizes[: n + 1]) * bonds[n] * bonds[n + 1])
        right.append(right[-1] + math.prod(sizes[-n - 1 :]) * bonds[-n - 1] * bonds[-n - 2])
    whole = math.prod(sizes)
    ends = zip(left, right[::-1], ranks, strict=True)
    return [one + two + whole * rank for one, two, rank in ends]


def tt_apply(x: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Multiplies rows by the transposed matrix, core by core, without building it.

    Starts at the end of the chain where that costs less. Gradients flow to rows and cores. Rows
    narrower than J are padded with zeros; outputs include padding.

    # (..., tokens, in), (..., R_{n-1}, I_n, J_n, R_n) -> (..., tokens, I)
    """
    in_modes, out_modes, ranks = tt_shape(cores)
    batch = cores[0].shape[:-4]
    rows, width = x.shape[len(batch) : -1], math.prod(in_modes)
    if x.shape[-1] < width:
        x = pad(x, (0, width - x.shape[-1]))
    tokens = math.prod(rows)
    first, last = _apply_macs(in_modes, out_modes, ranks)
    if first < last:  # from the last core on, no core has to be copied
        state = _from_first(x.reshape(*batch, tokens, 1, width), cores)
    else:
        state = _from_last(x.reshape(*batch, tokens * width, 1, 1), cores)
    return state.reshape(*batch, *rows, math.prod(out_modes))


def _from_first(state: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Contracts the first core first; state: (..., tokens and outputs so far, R, inputs left)."""
    for core in cores:
        _, i, j, s = core.shape[-4:]
        state = state.unflatten(-1, (j, state.shape[-1] // j)).flatten(-3, -2)
        matrix = core.transpose(-3, -2).flatten(-4, -3).flatten(-2).mT  # (i * s, r * j)
        state = _contract(state, matrix).unflatten(-2, (i, s)).flatten(-4, -3)
    return state


def _from_last(state: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """Contracts the last core first; state: (..., tokens and inputs left, R, outputs so far)."""
    for core in reversed(cores):
        r, i, j, _ = core.shape[-4:]
        state = state.unflatten(-3, (state.shape[-3] // j, j)).flatten(-3, -2)
        matrix = core.flatten(-4, -3).flatten(-2)  # (r * i, j * s), as it is stored
        state = _contract(state, matrix).unflatten(-2, (r, i)).flatten(-2)
    return state


def _contract(state: Tensor, matrix: Tensor) -> Tensor:
    """Multiplies the middle dimension; (..., a, k, b) and (..., m, k) to (..., a, m, b)."""
    if state.shape[-1] == 1:
        return (state.squeeze(-1) @ matrix.mT).unsqueeze(-1)
    # One product per row moves no data, but its gradient for the matrix would be one per row too.
    in_place = _stays(state.shape[-1], matrix.numel())
    if state.dim() == 3 and in_place and not torch.is_grad_enabled():
        return torch.bmm(matrix.expand(len(state), -1, -1), state)
    return torch.einsum("...akb,...mk->...amb", state, matrix)


def _stays(width: int, core: int) -> bool:
    """Return whether a state so wide is multiplied where it lies, by a core of so many numbers."""
    return width >= WIDE or (width >= NARROW and core <= SMALL)


def contract_macs(in_modes: Ints, out_modes: Ints, ranks: Ints) -> int:
    """Counts the multiply-adds of `tt_apply` for one token."""
    return min(_apply_macs(in_modes, out_modes, ranks))


def contract_moves(in_modes: Ints, out_modes: Ints, ranks: Ints) -> int:
    """Counts the numbers that `tt_apply` gathers for one token where no gradients are wanted."""
    first, last = _apply_macs(in_modes, out_modes, ranks)
    ready, waiting = (out_modes, in_modes) if first < last else (in_modes, out_modes)
    bonds, moved = (1, *ranks, 1), 0
    for n, (i, j) in enumerate(zip(ready, waiting, strict=True)):
        before, behind = math.prod(ready[:n]), math.prod(waiting[n + 1 :])
        if behind > 1 and not _stays(behind, i * j * bonds[n] * bonds[n + 1]):
            moved += before * (bonds[n] * j + i * bonds[n + 1]) * behind
    return moved


def _apply_macs(in_modes: Ints, out_modes: Ints, ranks: Ints) -> tuple[int, int]:
    """Multiply-adds for one token from the first core on, and from the last core on."""
    bonds = (1, *ranks, 1)
    first = last = 0
    for n in range(len(in_modes)):
        bond = bonds[n] * bonds[n + 1]
        first += math.prod(out_modes[: n + 1]) * math.prod(in_modes[n:]) * bond
        last += math.prod(in_modes[: n + 1]) * math.prod(out_modes[n:]) * bond
    return first, last


def tt_svd(matrix: Tensor, in_modes: Ints, out_modes: Ints, ranks: Ints) -> list[Tensor]:
    """Decomposes a dense matrix by successive truncated SVDs, without regard to any data.

    Where the modes are larger, zeros pad it. The cores are float64 and of equal scale.

    # (out, in) -> (R_{n-1}, I_n, J_n, R_n)
    """
    rows, columns = math.prod(out_modes) - len(matrix), math.prod(in_modes) - matrix.shape[1]
    if not bool(torch.isfinite(matrix).all()):
        raise FitError("a weight holds NaN or infinity")
    tensor = pad(matrix.detach().double(), (0, columns, 0, rows)).reshape(*out_modes, *in_modes)
    # Imported here because it takes a second, which only a conversion should wait for.
    import tensorly
    from tensorly.decomposition import tensor_train_matrix

    with tensorly.backend_context("pytorch", local_threadsafe=True):
        bonds = [1, *clip_ranks(ranks, in_modes, out_modes), 1]
        return balance_cores(list(tensor_train_matrix(tensor, bonds).factors))


def bond_tails(matrix: Tensor, in_modes: Ints, out_modes: Ints) -> list[Tensor]:
    """Returns what a truncation at every bond cuts off, at every rank.  # (out, in)."""
    rows, columns = math.prod(out_modes) - len(matrix), math.prod(in_modes) - matrix.shape[1]
    tensor = pad(matrix, (0, columns, 0, rows)).reshape(*out_modes, *in_modes)
    order = len(in_modes)
    chain = tensor.permute([axis for n in range(order) for axis in (n, order + n)])  # I_1, J_1, ...
    tails = []
    for n in range(1, order):
        values = torch.linalg.svdvals(chain.flatten(2 * n).flatten(0, 2 * n - 1))
        tails.append(pad(values.square().flip(0).cumsum(0).flip(0), (0, 1)))
    return tails


def balance_cores(cores: Sequence[Tensor]) -> list[Tensor]:
    """Scale neighbouring cores alike, bond index by bond index, where they meet.

    Low precision and training need it. The matrix stays as it is.  # (R_{n-1}, I_n, J_n, R_n)
    """
    norms = torch.stack([core.norm() for core in cores])
    if not bool((norms > 0).all()):
        return list(cores)
    level = norms.log().mean().exp()
    cores = [core * (level / norm) for core, norm in zip(cores, norms, strict=True)]
    for _ in range(3):
        for n in range(len(cores) - 1):
            ratio = balancing_ratio(cores[n].flatten(0, 2), cores[n + 1].flatten(1))
            cores[n] = cores[n] * ratio
            cores[n + 1] = cores[n + 1] / ratio[:, None, None, None]
    return cores
