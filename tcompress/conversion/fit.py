"""Fits all layers that read one input: sums of terms, sides shared among layers.

The terms of a sum are fitted in turn, each to what the others leave over; every step is a closed
form, so the error never grows. What is stored is rounded before the next step looks at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan

import torch
from torch import Tensor

from tcompress.conversion.parts import FittedPart
from tcompress.conversion.parts import LayerMoments as LayerMoments
from tcompress.conversion.quality import Judge, errors_of, loss_of, whole_of
from tcompress.conversion.shared import NO_BANKS, Banks, bank_of, owned
from tcompress.errors import FitError, first_line
from tcompress.linalg.curvature import damped_curvature
from tcompress.planning.entries import LayerPlan
from tcompress.structures import Target, structure
from tcompress.structures.base import Side
from tcompress.structures.capabilities import (
    Transformed,
    dense_of,
    transform_of,
    transform_shapes,
)
from tcompress.structures.linear import side_name, tensor_prefix

ROUNDS = 6  # passes over the terms of a sum; the error changes in the fourth digit after four

WIDER = "store a wider dtype, such as `--dtype bfloat16` or `--dtype float32`"

CURVATURE_DAMPING = 0.05  # ridge on S in units of its mean diagonal: one probe per row is noisy
NO_CURVATURES: Mapping[str, Tensor] = {}
NO_JUDGES: Mapping[str, Judge] = {}


@dataclass(frozen=True)
class FittedLayer:
    """Result for one layer.

    Attributes:
        tensors: Tensors to store, by name relative to the layer.
        errors: Relative errors by kind: `calibration` and `held_out`, or `weight`.
        shift: What the bias gains, float64.  # (out,)
        loss: Predicted loss relative to that of leaving the layer out, where it was
            asked for.
    """

    tensors: dict[str, Tensor]
    errors: dict[str, float]
    shift: Tensor | None = None
    loss: float | None = None


def fit_layers(
    entries: Sequence[LayerPlan],
    weights: Sequence[Tensor],
    moments: Sequence[Sequence[LayerMoments]],
    *,
    dtype: torch.dtype,
    damping: float,
    curvatures: Mapping[str, Tensor] = NO_CURVATURES,
    banks: Banks = NO_BANKS,
    judges: Mapping[str, Judge] = NO_JUDGES,
) -> list[FittedLayer]:
    """Fits layers that read the same input.

    Args:
        entries: Their plans; sides are shared within this list only.
        weights: Dense weights.  # ([experts,] out, in) each
        moments: Moments of the input, for every layer: one entry, or one per expert.
        dtype: Dtype in which tensors are stored.
        damping: Ridge added to the moments at one row per regressor, as a multiple of their mean
            diagonal: the fewer rows, the less they are trusted.
        curvatures: Moments S of the gradients at the output, by name of the layer.  # (out, out)
        banks: Tensors of banks as they are stored, by owner and name.
        judges: Moments to predict losses of fits on data by, by name of the layer.

    Raises:
        FitError: A weight or a result is not finite; the message names the layer.
    """
    results: dict[str, FittedLayer] = {}
    for members in _clusters(entries):
        clear = [
            _parts(entries[i], weights[i], moments[i], damping, curvatures.get(entries[i].name))
            for i in members
        ]
        names = [entries[i].name for i in members]
        with torch.no_grad():
            for part in (part for parts in clear for part in parts):
                where = part.stored.device
                part.banks = [bank_of(part.entry, item, banks, where) for item in part.terms]
            _fit_cluster([part for parts in clear for part in parts], dtype, names)
            for i, parts in zip(members, clear, strict=True):
                fitted = _collect(entries[i], parts, moments[i], dtype, judges.get(entries[i].name))
                fitted.tensors.update(owned(entries[i], banks))
                results[_key(entries[i])] = fitted
    return [results[_key(entry)] for entry in entries]


def _key(entry: LayerPlan) -> str:
    return f"{entry.name}.{entry.parameter}"


def _clusters(entries: Sequence[LayerPlan]) -> Iterator[list[int]]:
    """Indices of layers that share their input sides, owner first."""
    for index, entry in enumerate(entries):
        if entry.input_of is None:
            yield [index] + [i for i, other in enumerate(entries) if other.input_of == entry.name]


def _parts(
    entry: LayerPlan,
    weight: Tensor,
    moments: Sequence[LayerMoments],
    damping: float,
    curvature: Tensor | None,
) -> list[FittedPart]:
    stack = weight if entry.experts else weight[None]
    if not _finite(stack):
        raise FitError(
            f"the weight of layer `{entry.name}` holds NaN or infinity",
            "repair the checkpoint, or leave the layer out with `--keep`",
        )
    regressors = entry.parts[0].terms[0].regressors
    damped = [
        None if m.train is None else m.train.damped(damping * regressors / m.train.rows)
        for m in moments
    ]
    sizes = [part.out_features for part in entry.parts]
    curves = _curvatures(curvature, sizes)
    return [
        FittedPart(entry, index, expert, rows, damped[min(expert, len(damped) - 1)], curves[index])
        for expert, matrix in enumerate(stack)
        for index, rows in enumerate(matrix.split(sizes))
    ]


def _curvatures(curvature: Tensor | None, sizes: Sequence[int]) -> list[Tensor | None]:
    """Every part's own block of S, damped; parts are fitted one by one."""
    if curvature is None:
        return [None] * len(sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    blocks = [
        curvature[start : start + size, start : start + size].double()
        for start, size in zip(starts, sizes, strict=True)
    ]
    return [damped_curvature(block, CURVATURE_DAMPING) for block in blocks]


def _fit_cluster(parts: Sequence[FittedPart], dtype: torch.dtype, names: Sequence[str]) -> None:
    count = max(len(part.terms) for part in parts)
    having = [[part for part in parts if term < len(part.terms)] for term in range(count)]
    try:
        for part in parts:
            part.tensors = [{} for _ in part.terms]
            part.operators = [{} for _ in part.terms]
            part.dense = [None for _ in part.terms]
        for term in reversed(range(count)):  # the residual first: it takes what everybody needs
            _fit_sides(having[term], term, dtype)
            _fit_terms(having[term], term, dtype)
        sums = [part for part in parts if len(part.terms) > 1]
        for _ in range(ROUNDS if sums else 0):
            for term in range(count):
                _fit_terms([part for part in sums if term < len(part.terms)], term, dtype)
    except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        listed = ", ".join(f"`{name}`" for name in names)
        raise FitError(
            f"the fit of {listed} failed: {first_line(error)}",
            getattr(error, "hint", None)
            or "use more calibration data or a larger `damping`, or leave the layer out with "
            "`--keep`",
        ) from error


def _fit_sides(parts: Sequence[FittedPart], term: int, dtype: torch.dtype) -> None:
    """Fits and builds both sides of a term; the input side is one for all parts."""
    layout = parts[0].terms[term]
    if transform_of(layout, "in") is not None:
        _install(parts, term, "in", _side_tensors(parts, term, "in"), dtype)
    by_part: dict[str, list[FittedPart]] = {}
    for part in parts:
        by_part.setdefault(f"{part.entry.name}/{part.index}", []).append(part)
    for group in by_part.values():
        layout = group[0].terms[term]
        if transform_of(layout, "out") is not None:
            _install(group, term, "out", _side_tensors(group, term, "out"), dtype)


def _side_tensors(parts: Sequence[FittedPart], term: int, side: Side) -> dict[str, Tensor]:
    layout = parts[0].terms[term]
    kind = structure(layout.structure)
    if not isinstance(kind, Transformed) or not transform_shapes(layout, side):
        return {}  # a fixed transform
    targets = [_scaled(part, term) for part in parts]
    return kind.fit_transform(_pooled(targets) if side == "in" else targets, layout, side)


def _scaled(part: FittedPart, term: int) -> Target:
    return replace(part.target(term), scale=part.scale)


def _pooled(targets: list[Target]) -> list[Target]:
    """Gives experts, whose inputs differ, the mean of their moments to choose one transform."""
    grams = [target.gram for target in targets if target.gram is not None]
    if not grams or all(gram is grams[0] for gram in grams):
        return targets
    mean = torch.stack(grams).mean(0)
    return [
        replace(target, gram=mean) if target.gram is not None else _seen(target, mean)
        for target in targets
    ]


def _seen(target: Target, gram: Tensor) -> Target:
    """Weighs an expert that no token chose by the others' mean moments."""
    product = target.product @ gram
    return Target(product, gram, float(product.mul(target.product).sum()))


def _install(
    parts: Sequence[FittedPart],
    term: int,
    side: Side,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if not all(map(_finite, stored.values())):
        raise FitError(f"the fitted transform is not finite in {dtype}")
    layout = parts[0].terms[term]
    exact = {name: tensor.double() for name, tensor in stored.items()}
    like = torch.empty(0, dtype=torch.float64, device=parts[0].stored.device)
    transform = transform_of(layout, side)
    assert transform is not None  # there is one to install
    operator = transform.build(exact, like)
    for part in parts:
        part.operators[term][side] = operator
        part.tensors[term] |= {f"{side}.{name}": tensor for name, tensor in stored.items()}


def _fit_terms(parts: Sequence[FittedPart], term: int, dtype: torch.dtype) -> None:
    for part in parts:
        layout = part.terms[term]
        kind = structure(layout.structure)
        fitted = kind.fit(part.target(term), layout)
        if not all(map(_finite, fitted.values())):
            raise FitError("the result holds NaN or infinity")
        stored = {name: tensor.to(dtype).contiguous() for name, tensor in fitted.items()}
        if not all(map(_finite, stored.values())):
            raise FitError(f"the result does not fit into {dtype}", WIDER)
        part.tensors[term] |= stored
        if len(part.terms) > 1 or part.moments is not None:
            exact = {name: tensor.double() for name, tensor in stored.items()}
            tensors = exact | part.banks[term]
            part.dense[term] = dense_of(layout, tensors, part.operators[term])


def _collect(
    entry: LayerPlan,
    parts: Sequence[FittedPart],
    moments: Sequence[LayerMoments],
    dtype: torch.dtype,
    judge: Judge | None,
) -> FittedLayer:
    tensors: dict[str, Tensor] = {}
    width = len(entry.parts)
    for index, layout_part in enumerate(entry.parts):
        for term in range(len(layout_part.terms)):
            experts = [part.tensors[term] for part in parts if part.index == index]
            prefix = tensor_prefix(entry.parts, index, term)
            for name in experts[0]:
                side, _, leaf = name.rpartition(".")
                if not side:
                    values = [own[name] for own in experts]
                    tensors[prefix + name] = torch.stack(values) if entry.experts else values[0]
                elif side == "out" or (index == 0 and entry.input_of is None):
                    owner = side_name(entry.parts, side, index, term)  # type: ignore[arg-type]
                    tensors[f"{owner}.{leaf}"] = experts[0][name]
    errors: list[dict[str, float]] = []
    shifts: list[Tensor] = []
    for expert in range(entry.copies):
        own = list(parts[expert * width : (expert + 1) * width])
        own_moments = moments[min(expert, len(moments) - 1)]
        if own_moments.train is not None and entry.bias and not entry.experts:
            m = own_moments.train
            weight, dense = whole_of(own)
            shifts.append(weight @ m.dense_mean - dense @ m.mean)
        errors.append(errors_of(own, own_moments, shifts[0] if shifts else None))
    if any(isnan(value) for own in errors for value in own.values()):
        raise FitError(
            f"the error of layer `{entry.name}` is not a number: its weight or its inputs are too "
            "large",
            "leave the layer out with `--keep`",
        )
    kinds = dict.fromkeys(kind for e in errors for kind in e)  # in order, unlike a set
    lists = {kind: [e[kind] for e in errors if kind in e] for kind in kinds}
    mean = {kind: sum(values) / len(values) for kind, values in lists.items()}
    return FittedLayer(
        tensors, mean, shifts[0] if shifts else None, loss_of(parts, judge) if judge else None
    )


def _finite(tensor: Tensor) -> bool:
    """NaN and infinity survive a sum; no mask of the tensor's size is made."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float64)))
