"""Which channels between two layers matter most: neurons in order, directions within heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tcompress.linalg.fits import diagonal_blocks
from tcompress.linalg.moments import balanced, safe_cholesky

_GROUP, _POOL = 64, 4  # neurons taken between two updates of all others; how many times as many vie
_MOST_GROUPS = 64  # else they are larger: an update reads and writes all moments
_LARGE, _DENSE = 2048, 0.75  # neurons; the share of them below which matrices are cut down
_ROWS = 512  # of a matrix that is cut down, at a time
_FLOOR = 1e-9  # of a neuron's own variance: what is left below it tells nothing


@dataclass(frozen=True)
class NeuronOrder:
    """Neurons, the most useful first, and what is lost with none, one, two, ... of them."""

    order: Tensor  # (f,)
    losses: Tensor  # (f + 1,)


def order_neurons(gram: Tensor, target: Tensor, constant: float) -> NeuronOrder:
    """Orders neurons by orthogonal matching pursuit against what reads them.

    The next neuron is the one that, by least squares with all before it, explains most of what
    is still missing of the target. Neurons are taken in groups: within one, the best are found
    exactly among those that promised most before it.

    Args:
        gram: Damped moments G of the neurons, which are overwritten: they are large.  # (f, f)
        target: Correlation of what they should yield, in coordinates where errors are plain sums of
            squares, with each neuron; overwritten too.  # (m, f)
        constant: What is lost without any neuron.

    Reference: orthogonal matching pursuit (Pati et al. 1993) as a pivoted Cholesky factorisation.
    """
    count = len(gram)
    least = _FLOOR * gram.diagonal().clamp_min(0)
    left = torch.ones(count, dtype=torch.bool, device=gram.device)
    places = torch.arange(count, device=gram.device)  # of the rows that are still looked at
    order: list[Tensor] = []
    gains: list[Tensor] = []
    while bool(left.any()):
        # Those that are taken change no more.
        if len(gram) >= _LARGE and int(left.sum()) < _DENSE * len(gram):
            rows = left.nonzero().flatten()
            gram, target = _cut_down(gram, rows), target[:, rows]
            least, places, left = least[rows], places[rows], left[rows]
        variance = gram.diagonal()
        gain = target.square().sum(0) / variance.clamp_min(torch.finfo(gram.dtype).tiny)
        gain = torch.where(left & (variance > least), gain, torch.where(left, -1.0, -2.0))
        size = min(max(_GROUP, count // _MOST_GROUPS), int(left.sum()))
        pool = gain.topk(min(_POOL * size, int(left.sum()))).indices
        chosen, found = _pivots(gram[pool][:, pool], target[:, pool], least[pool], size)
        taken = pool[chosen]
        order.append(places[taken])
        gains.append(found)
        left[taken] = False
        root = safe_cholesky(gram[taken][:, taken])
        columns = torch.linalg.solve_triangular(root, gram[taken], upper=False)  # (g, f)
        yields = torch.linalg.solve_triangular(root, target[:, taken].mT, upper=False)  # (g, m)
        if len(gram) < _LARGE:
            gram -= columns.mT @ columns
            target -= yields.mT @ columns
        else:  # without a product as large beside it
            gram.addmm_(columns.mT, columns, alpha=-1)
            target.addmm_(yields.mT, columns, alpha=-1)
    losses = constant - torch.cat([gains[0].new_zeros(1), *gains]).cumsum(0)
    return NeuronOrder(torch.cat(order), losses.clamp_min(0).cummin(0).values)


def _cut_down(gram: Tensor, rows: Tensor) -> Tensor:
    """Takes rows and columns of a large matrix, in ascending order, in the memory that it has.

    What is written lies before all that is still to be read.  # (f, f), (left,) -> (left, left)
    """
    if not gram.is_contiguous():
        return gram[rows][:, rows]
    cut = gram.view(-1)[: len(rows) ** 2].view(len(rows), -1)
    for first in range(0, len(rows), _ROWS):
        some = rows[first : first + _ROWS]
        cut[first : first + len(some)] = gram[some][:, rows]
    return cut


def _pivots(gram: Tensor, target: Tensor, least: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Picks the best of a pool one after another: places, and what each explains.

    Of the moments that are left only diagonals are kept up to date, and columns of those taken.
    """
    products = target.mT @ target
    variance, promise = gram.diagonal().clone(), products.diagonal().clone()
    columns = gram.new_zeros(size, len(gram))  # l, of the Cholesky factor
    seen = torch.zeros_like(columns)  # y T, of the yields y = T[:, place] / s as they were then
    among = gram.new_zeros(size, size)  # y y', of the yields
    free = torch.ones(len(gram), dtype=torch.bool, device=gram.device)
    places, gains = [], []
    for index in range(size):
        useful = torch.where(variance > least, promise / variance, 0.0)
        place = int(torch.where(free, useful, -1.0).argmax())
        gain = useful[place].clamp_min(0)
        places.append(place)
        gains.append(gain)
        free[place] = False
        if not float(gain) > 0:
            continue
        before, scale = columns[:index, place], variance[place].sqrt()
        column = (gram[place] - before @ columns[:index]) / scale
        shared = (seen[:index, place] - before @ among[:index, :index]) / scale
        own = (products[place] - before @ seen[:index]) / scale
        promise = promise - column * (2 * (own - shared @ columns[:index]) - column * gain)
        variance = variance - column.square()
        columns[index], seen[index] = column, own
        among[index, :index] = among[:index, index] = shared
        among[index, index] = gain
    return torch.tensor(places, device=gram.device), torch.stack(gains)


def order_groups(gram: Tensor, target: Tensor, constant: float, size: int) -> NeuronOrder:
    """Orders groups of channels that go together, such as heads; see `order_neurons`.

    The order is of groups, and losses are with none, one, two, ... of them.

    Args:
        gram: As there, with the channels of a group beside each other.  # (groups * size, ...)
        target: As there.  # (m, groups * size)
        constant: What is lost without any group.
        size: Channels of a group.
    """
    gram, target = gram.clone(), target.clone()
    groups = len(gram) // size
    left = torch.ones(groups, dtype=torch.bool, device=gram.device)
    order, gains = [], []
    for _ in range(groups):
        roots = safe_cholesky(diagonal_blocks(gram, groups)[left])  # (groups left, size, size)
        sought = target.mT.unflatten(0, (groups, size))[left]
        gain = torch.linalg.solve_triangular(roots, sought, upper=False).square().sum((1, 2))
        best = int(gain.argmax())
        place = int(left.nonzero()[best])
        order.append(place)
        gains.append(gain[best])
        left[place] = False
        taken, root = slice(place * size, (place + 1) * size), roots[best]
        columns = torch.linalg.solve_triangular(root, gram[taken], upper=False)
        yields = torch.linalg.solve_triangular(root, target[:, taken].mT, upper=False)
        gram -= columns.mT @ columns
        target -= yields.mT @ columns
    losses = constant - torch.stack([gram.new_zeros(()), *gains]).cumsum(0)
    return NeuronOrder(
        torch.tensor(order, device=losses.device), losses.clamp_min(0).cummin(0).values
    )


@dataclass(frozen=True)
class HeadBases:
    """Directions within heads, the most useful first.

    `lift @ reduce` is the identity, and with the first r directions the best map of rank r.
    """

    reduce: Tensor  # (heads, r, size)
    lift: Tensor  # (heads, size, r)
    losses: Tensor  # with 0, 1, 2, ... directions left in every head  # (size + 1,)


def head_bases(moments: Tensor, curvature: Tensor) -> HeadBases:
    """Finds the directions of heads by a truncated SVD in two metrics.

    Args:
        moments: Damped second moments of what every head computes.  # (heads, size, size)
        curvature: What errors of it cost, damped.  # (heads, size, size)
    """
    inputs, outputs = safe_cholesky(moments), safe_cholesky(curvature)
    _, values, right = torch.linalg.svd(outputs.mT @ inputs)
    lift = inputs @ right.mT
    reduce = torch.linalg.solve_triangular(inputs.mT, right.mT, upper=True).mT
    lift, reduce = balanced(lift, reduce)
    lost = values.square().flip(-1).cumsum(-1).flip(-1).sum(0)
    return HeadBases(reduce, lift, torch.cat([lost, lost.new_zeros(1)]))
