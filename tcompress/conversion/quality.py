"""How good a fit of a layer is: relative squared errors, and its predicted loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tcompress.conversion.parts import FittedPart, LayerMoments
from tcompress.linalg.curvature import curved_constant
from tcompress.linalg.moments import relative_error
from tcompress.structures import structure
from tcompress.structures.capabilities import decoded, encoded


@dataclass(frozen=True)
class Judge:
    """Moments that a fit is judged by.

    Attributes:
        gram: G.  # (in, in)
        curvature: S of the whole layer; None for the identity.  # (out, out)
    """

    gram: Tensor
    curvature: Tensor | None


PROBES = 64  # random inputs that measure a data-free fit


def whole_of(parts: Sequence[FittedPart]) -> tuple[Tensor, Tensor]:
    """Returns the dense weight of a layer, and what its parts were fitted to.  # (out, in) each."""
    weight = torch.cat([part.weight for part in parts])
    return weight, torch.cat([_total(part) for part in parts])


def _total(part: FittedPart) -> Tensor:
    return torch.stack([dense for dense in part.dense if dense is not None]).sum(0)


def errors_of(
    parts: Sequence[FittedPart], moments: LayerMoments, shift: Tensor | None
) -> dict[str, float]:
    """Returns the relative squared errors of one layer, or of one of its experts, by kind."""
    if moments.train is None:
        return {"weight": _probed_error(parts)}
    weight, dense = whole_of(parts)
    errors = {"calibration": moments.train.error(weight, dense)}
    if moments.holdout is not None:
        held = moments.holdout
        errors["held_out"] = held.error(weight, dense)
        if shift is not None:  # the bias was chosen on other rows
            gap = weight @ held.dense_mean - dense @ held.mean - shift
            norm = float((weight @ held.dense).mul(weight).sum())
            errors["held_out"] += relative_error(float(gap.square().sum()), norm)
    return errors


def _probed_error(parts: Sequence[FittedPart]) -> float:
    """Relative squared error of the weight, from random inputs: the dense form is never built."""
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(PROBES, parts[0].stored.shape[1], generator=generator)
    probes = probes.to(parts[0].stored.device).double()
    norm = error = 0.0
    for part in parts:
        wanted = probes @ part.weight.mT
        found = sum((_applied(part, term, probes) for term in range(len(part.terms))), 0)
        norm += float(wanted.square().sum())
        error += float((wanted - found).square().sum())
    return relative_error(error, norm)


def loss_of(parts: Sequence[FittedPart], judge: Judge) -> float:
    """Returns the predicted loss of a layer, relative to that of leaving it out.

    Args:
        parts: Its parts, fitted on data.
        judge: Moments to judge by, which may be of other data.
    """
    lost = missing = 0.0
    start = 0
    for part in parts:
        weight = part.weight
        stop = start + len(weight)
        if judge.curvature is None:
            curve = torch.eye(len(weight)).to(weight)
        else:
            curve = judge.curvature[start:stop, start:stop]
        lost += float(curved_constant(weight - _total(part), judge.gram, curve))
        missing += float(curved_constant(weight, judge.gram, curve))
        start = stop
    return relative_error(max(lost, 0.0), missing)


def _applied(part: FittedPart, term: int, x: Tensor) -> Tensor:
    layout = part.terms[term]
    kind = structure(layout.structure)
    tensors = {k: t.double() for k, t in part.tensors[term].items() if "." not in k}
    tensors |= part.banks[term]
    operators = part.operators[term]
    z = encoded(layout, x.double(), operators.get("in"))
    return decoded(layout, kind.apply(z, tensors, layout), operators.get("out"))
