"""Fits all layers that read one input: sums of terms, sides shared among layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isnan
from typing import Any

import torch
from torch import Tensor

from tcompress.errors import FitError, message_of
from tcompress.linalg.fits import curved_constant, damped_curvature
from tcompress.linalg.moments import Moments, relative_error
from tcompress.planning.entries import BankKey, LayerPlan
from tcompress.structures import Layout, Target, structure
from tcompress.structures.base import Side
from tcompress.structures.capabilities import (
    Transformed,
    decoded,
    dense_of,
    encoded,
    shared_of,
    transform_of,
    transform_shapes,
)
from tcompress.structures.modules.linear import side_name, tensor_prefix
from tcompress.structures.modules.shared import bank_module

# Fitted banks, as the layers that use them see them.


Banks = Mapping[BankKey, Mapping[str, Tensor]]
"""Tensors of banks as they are stored, by owner and name of the bank."""

NO_BANKS: Banks = {}


def bank_of(
    entry: LayerPlan, layout: Layout, banks: Banks, device: torch.device
) -> dict[str, Tensor]:
    """Returns the bank that a term of a layer uses, in float64; nothing if it uses none."""
    shared = shared_of(layout)
    if shared is None:
        return {}
    found = banks[entry.bank_of.get(shared.name, entry.name), shared.name]
    return {key: tensor.to(device).double() for key, tensor in found.items()}


def owned(entry: LayerPlan, banks: Banks) -> dict[str, Tensor]:
    """Returns the banks that are stored with a layer, by name relative to it."""
    return {
        f"{bank_module(name)}.{key}": tensor
        for name in entry.own_banks
        for key, tensor in banks[entry.name, name].items()
    }


# A weight while it is being fitted, and the moments that it is fitted on.


Operators = dict[Side, Any]


@dataclass(frozen=True)
class LayerMoments:
    """Moments of one layer input: those to fit on, and those to measure on.

    Attributes:
        train: Moments of the calibration rows, or None for a data-free fit.
        holdout: Moments of rows kept back, if there are any.
    """

    train: Moments | None = None
    holdout: Moments | None = None


@dataclass
class FittedPart:
    """One weight being fitted: a part of a layer, of one expert."""

    entry: LayerPlan
    index: int
    expert: int
    stored: Tensor  # dense weight as the checkpoint has it  # (out, in)
    moments: Moments | None  # damped
    curvature: Tensor | None  # damped
    tensors: list[dict[str, Tensor]] = field(default_factory=list)
    operators: list[Operators] = field(default_factory=list)
    banks: list[dict[str, Tensor]] = field(default_factory=list)
    dense: list[Tensor | None] = field(default_factory=list)

    @property
    def weight(self) -> Tensor:
        """Dense weight in float64; made anew each time, so that large layers are held once."""
        return self.stored.double()

    @property
    def terms(self) -> tuple[Layout, ...]:
        return self.entry.parts[self.index].terms

    @cached_property
    def scale(self) -> float:
        """E||W x||^2, never zero."""
        weight = self.weight
        seen = weight if self.moments is None else weight @ self.moments.dense
        return max(float(seen.mul(weight).sum()), torch.finfo(torch.float64).tiny)

    @cached_property
    def _product(self) -> Tensor:
        """W C, which every round of a sum starts from."""
        assert self.moments is not None
        return self.weight @ self.moments.cross

    def target(self, term: int) -> Target:
        """What is left for one term."""
        m = self.moments
        weight = self.weight
        product = weight if m is None else self._product
        for other, dense in enumerate(self.dense):
            if other != term and dense is not None:
                weight = weight - dense
                product = weight if m is None else product - dense @ m.gram
        gram = None if m is None else m.gram
        last, bank = self._fitted(term), self.banks[term]
        operators = self.operators[term]
        return Target(product, gram, 1.0, self.curvature, weight, last, bank, operators)

    def _fitted(self, term: int) -> dict[str, Tensor]:
        """The term's own tensors of the last round, as they are stored."""
        tensors = self.tensors[term]
        return {name: tensor.double() for name, tensor in tensors.items() if "." not in name}


# How good a fit of a layer is: relative squared errors, and its predicted loss.


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


# Fits all layers that read one input: sums of terms, sides shared among layers.
#
# The terms of a sum are fitted in turn, each to what the others leave over; every step is a closed
# form, so the error never grows. What is stored is rounded before the next step looks at it.


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
    return entry.key


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
            f"the fit of {listed} failed: {message_of(error)}",
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
