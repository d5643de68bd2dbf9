"""Fits all layers that read one input: sums of structures, with the input transform shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isnan
from typing import Any

import torch
from torch import Tensor

from tcompress.blockwise.sensitivity import Sensitivity
from tcompress.errors import FitError, message_of
from tcompress.linalg.fits import curved_constant, damped_curvature
from tcompress.linalg.moments import Moments, is_finite, relative_error
from tcompress.linalg.rounding import Rounding, rounded
from tcompress.planning.entries import FactorsKey, LayerPlan
from tcompress.structures import Layout, Target, structure
from tcompress.structures.base import (
    SIDES,
    RoundsInNorm,
    Side,
    Transformed,
    decoded,
    dense_of,
    encoded,
    shared_of,
    transform_of,
    transform_shapes,
)
from tcompress.structures.modules.linear import tensor_prefix, transform_name
from tcompress.structures.modules.shared import factors_module

SharedFactors = Mapping[FactorsKey, Mapping[str, Tensor]]
"""Factors that layers share, as they are stored, by owner and name of the group."""

NO_FACTORS: SharedFactors = {}


def shared_factors(
    entry: LayerPlan, layout: Layout, factors: SharedFactors, device: torch.device
) -> dict[str, Tensor]:
    """Return the shared factors that a summand uses, float64; nothing if it has none."""
    shared = shared_of(layout)
    if shared is None:
        return {}
    tensors = factors[entry.bank_of.get(shared.name, entry.name), shared.name]
    return {key: tensor.to(device).double() for key, tensor in tensors.items()}


def owned_factors(entry: LayerPlan, factors: SharedFactors) -> dict[str, Tensor]:
    """Return the shared factors that are stored with a layer, by name relative to it."""
    return {
        f"{factors_module(name)}.{key}": tensor
        for name in entry.own_factors
        for key, tensor in factors[entry.name, name].items()
    }


@dataclass(frozen=True)
class LayerMoments:
    """Moments of one layer input."""

    train: Moments | None = None  # to fit on; None for a data-free fit
    holdout: Moments | None = None  # to measure on, if rows were held out


@dataclass(frozen=True)
class EvaluationMoments:
    """Moments that a fit is judged by, per row and not damped."""

    gram: Tensor  # G  # (in, in)
    curvature: Tensor | None  # S of the whole layer; None for the identity  # (out, out)
    rows: int = 1


@dataclass(frozen=True)
class LayerStatistics:
    """Weight and moments of one layer."""

    weight: Tensor  # dense  # (out, in)
    whole: EvaluationMoments  # of all rows
    mean: Tensor  # of the inputs  # (in,)

    @classmethod
    def of(cls, weight: Tensor, sums: Sensitivity, *, centred: bool) -> LayerStatistics:
        gram, curvature = sums.moment(centred=centred), sums.curvature / sums.rows
        return cls(weight, EvaluationMoments(gram, curvature, sums.rows), sums.mean)


@dataclass
class _Split:
    """One weight being fitted: an output split of a layer, of one expert."""

    entry: LayerPlan
    index: int
    expert: int
    stored: Tensor  # dense weight as the checkpoint has it  # (out, in)
    moments: Moments | None  # damped
    curvature: Tensor | None  # damped
    # Of every summand:
    shared: list[dict[str, Tensor]]
    roundings: Sequence[Mapping[str, Rounding]]  # by name, with the side in front for a transform's
    tensors: list[dict[str, Tensor]] = field(default_factory=list)
    transforms: list[dict[Side, Any]] = field(default_factory=list)
    dense: list[Tensor | None] = field(default_factory=list)

    @property
    def weight(self) -> Tensor:
        """Dense weight in float64; made anew each time, so that large layers are held once."""
        return self.stored.double()

    @property
    def total(self) -> Tensor:
        """Sum of the fitted summands."""
        return torch.stack([dense for dense in self.dense if dense is not None]).sum(0)

    @property
    def terms(self) -> tuple[Layout, ...]:
        return self.entry.parts[self.index].terms

    @cached_property
    def scale(self) -> float:
        """E||W x||^2, never zero."""
        weight = self.weight
        product = weight if self.moments is None else weight @ self.moments.dense
        return max(float(product.mul(weight).sum()), torch.finfo(torch.float64).tiny)

    @cached_property
    def _product(self) -> Tensor:
        """W C, which every round of a sum starts from."""
        assert self.moments is not None
        return self.weight @ self.moments.cross

    def target(self, term: int) -> Target:
        """Target of one summand: what the others leave over."""
        m = self.moments
        weight: Tensor | None = self.weight
        product = self.weight if m is None else self._product
        if m is not None and m.lift is not None:  # of other channels than what is fitted
            weight = None
        for index, dense in enumerate(self.dense):
            if index != term and dense is not None:
                weight = None if weight is None else weight - dense
                product = product - (dense if m is None else dense @ m.gram)
        gram = None if m is None else m.gram
        last = {k: t.double() for k, t in self.tensors[term].items() if "." not in k}
        shared, transforms = self.shared[term], self.transforms[term]
        return Target(product, gram, 1.0, self.curvature, weight, last, shared, transforms)


PROBES = 64  # random inputs that measure a data-free fit


def _errors(
    splits: Sequence[_Split], moments: LayerMoments, shift: Tensor | None
) -> dict[str, float]:
    """Relative squared errors of one layer, or of one of its experts, by kind."""
    if moments.train is None:
        return {"weight": _sampled_error(splits)}
    weight = torch.cat([split.weight for split in splits])
    dense = torch.cat([split.total for split in splits])
    errors = {"calibration": moments.train.error(weight, dense)}
    held = moments.holdout
    if held is not None:
        errors["held_out"] = held.error(weight, dense)
        if shift is not None:  # the bias was chosen on other rows
            gap = weight @ held.dense_mean - dense @ held.mean - shift
            norm = float((weight @ held.dense).mul(weight).sum())
            errors["held_out"] += relative_error(float(gap.square().sum()), norm)
    return errors


def _sampled_error(splits: Sequence[_Split]) -> float:
    """Relative squared error of the weight, from random inputs: the dense form is never built."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(PROBES, splits[0].stored.shape[1], generator=generator)
    inputs = inputs.to(splits[0].stored.device).double()
    norm = error = 0.0
    for split in splits:
        exact = inputs @ split.weight.mT
        outputs: Tensor | int = 0
        for term, layout in enumerate(split.terms):
            tensors = {k: t.double() for k, t in split.tensors[term].items() if "." not in k}
            transforms = split.transforms[term]
            z = encoded(layout, inputs, transforms.get("in"))
            z = structure(layout.structure).apply(z, tensors | split.shared[term], layout)
            outputs = outputs + decoded(layout, z, transforms.get("out"))
        norm += float(exact.square().sum())
        error += float((exact - outputs).square().sum())
    return relative_error(error, norm)


def _predicted(splits: Sequence[_Split], evaluation: EvaluationMoments) -> float:
    """Predicted loss of a layer fitted on data, relative to that of leaving it out."""
    lost = missing = 0.0
    start = 0
    for split in splits:
        weight = split.weight
        stop = start + len(weight)
        if evaluation.curvature is None:
            curve = torch.eye(len(weight)).to(weight)
        else:
            curve = evaluation.curvature[start:stop, start:stop]
        lost += float(curved_constant(weight - split.total, evaluation.gram, curve))
        missing += float(curved_constant(weight, evaluation.gram, curve))
        start = stop
    return relative_error(max(lost, 0.0), missing)


# The summands of a sum are fitted in turn, each to what the others leave over; every step is a
# closed form, so the error never grows. What is stored is rounded before the next step looks at it.


ROUNDS = 6  # passes over the summands; the error changes in the fourth digit after four

WIDER = "store a wider dtype, such as `--dtype bfloat16` or `--dtype float32`"

CURVATURE_DAMPING = 0.05  # ridge on S in units of its mean diagonal: one probe per row is noisy
NO_CURVATURES: Mapping[str, Tensor] = {}
NO_EVALUATION: Mapping[str, EvaluationMoments] = {}
NO_ROUNDINGS: Mapping[str, Rounding] = {}


@dataclass(frozen=True)
class FittedLayer:
    """Result for one layer."""

    tensors: dict[str, Tensor]  # to store, by name relative to the layer
    errors: dict[str, float]  # relative, by kind: `calibration` and `held_out`, or `weight`
    shift: Tensor | None = None  # what the bias gains, float64  # (out,)
    loss: float | None = None  # predicted, relative to leaving it out, where it was asked for


def fit_layers(
    entries: Sequence[LayerPlan],
    weights: Sequence[Tensor],
    moments: Sequence[Sequence[LayerMoments]],
    *,
    dtype: torch.dtype,
    damping: float,
    curvatures: Mapping[str, Tensor] = NO_CURVATURES,
    factors: SharedFactors = NO_FACTORS,
    lifts: Mapping[str, Tensor] = NO_CURVATURES,
    evaluation_moments: Mapping[str, EvaluationMoments] = NO_EVALUATION,
    roundings: Mapping[str, Rounding] = NO_ROUNDINGS,
) -> list[FittedLayer]:
    """Fit layers that read the same input; transforms are shared within this list only.

    Args:
        entries: Their plans.
        weights: Dense weights.  # ([experts,] out, in) each
        moments: Moments of the input, for every layer: one entry, or one per expert.
        dtype: Dtype in which tensors are stored.
        damping: Ridge added to the moments at one row per regressor, as a multiple of their mean
            diagonal: the fewer rows, the less they are trusted.
        curvatures: Moments S of the gradients at the output, by name of the layer.  # (out, out)
        factors: What layers share, fitted before.
        lifts: From the inputs that are left to all, by name of layers that read fewer; their
            moments are of those that are left.  # ([experts,] in, left)
        evaluation_moments: Moments to predict losses of fits on data by, by name of the layer.
        roundings: Of tensors that will be stored in few bits, by name with the layer's in front.
            With data they are rounded here, where it is known what that costs.
    """
    results: dict[str, FittedLayer] = {}
    for owner, first in enumerate(entries):
        if first.input_of is not None:
            continue
        members = [owner, *(i for i, e in enumerate(entries) if e.input_of == first.name)]
        with torch.no_grad():
            settings = (damping, curvatures, factors, lifts, roundings)
            splits_of = {i: _splits(entries[i], weights[i], moments[i], *settings) for i in members}
            try:
                _fit_sum([split for splits in splits_of.values() for split in splits], dtype)
            except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                listed = ", ".join(f"`{entries[i].name}`" for i in members)
                raise FitError(
                    f"the fit of {listed} failed: {message_of(error)}",
                    getattr(error, "hint", None)
                    or "use more calibration data or a larger `damping`, or leave the layer out "
                    "with `--keep`",
                ) from error
            for i, splits in splits_of.items():
                entry = entries[i]
                fitted = _collect(entry, splits, moments[i], evaluation_moments.get(entry.name))
                fitted.tensors.update(owned_factors(entry, factors))
                results[entry.key] = fitted
    return [results[entry.key] for entry in entries]


def _splits(
    entry: LayerPlan,
    weight: Tensor,
    moments: Sequence[LayerMoments],
    damping: float,
    curvatures: Mapping[str, Tensor],
    factors: SharedFactors,
    lifts: Mapping[str, Tensor],
    roundings: Mapping[str, Rounding],
) -> list[_Split]:
    stack = weight if entry.experts else weight[None]
    if not is_finite(stack):
        raise FitError(
            f"the weight of layer `{entry.name}` holds NaN or infinity",
            "repair the checkpoint, or leave the layer out with `--keep`",
        )
    regressors = entry.parts[0].terms[0].regressors
    lift = lifts.get(entry.name)
    rising: list[Tensor | None] = [None] * len(moments)
    if lift is not None:
        rising = [*(lift if entry.experts else lift[None])][: len(moments)]
    damped = [
        None if m.train is None else _damped(replace(m.train, lift=lifted), damping * regressors)
        for m, lifted in zip(moments, rising, strict=True)
    ]
    sizes = [part.out_features for part in entry.parts]
    curves: list[Tensor | None] = [None] * len(sizes)
    curvature = curvatures.get(entry.name)
    if curvature is not None:  # splits are fitted one by one
        rows = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        blocks = [curvature[part, part].double() for part in rows]
        curves = [damped_curvature(block, CURVATURE_DAMPING) for block in blocks]
    splits = []
    for expert, matrix in enumerate(stack):
        read = damped[min(expert, len(damped) - 1)]
        if read is None and lift is not None:
            matrix = matrix @ (lift[expert] if entry.experts else lift).to(matrix)
        for index, part_rows in enumerate(matrix.split(sizes)):
            terms = entry.parts[index].terms
            shared = [shared_factors(entry, item, factors, part_rows.device) for item in terms]
            widths = [_term_roundings(entry, index, term, roundings) for term in range(len(terms))]
            curve = curves[index]
            splits.append(_Split(entry, index, expert, part_rows, read, curve, shared, widths))
    return splits


def _term_roundings(
    entry: LayerPlan, part: int, term: int, roundings: Mapping[str, Rounding]
) -> dict[str, Rounding]:
    """Look up the roundings of a summand's tensors; its transforms' have the side in front."""
    if not roundings:
        return {}
    layout = entry.parts[part].terms[term]
    prefix = tensor_prefix(entry.parts, part, term)
    names = {name: prefix + name for name in structure(layout.structure).tensors(layout)}
    for side in SIDES:
        owner = transform_name(entry.parts, side, part, term)
        names |= {f"{side}.{leaf}": f"{owner}.{leaf}" for leaf in transform_shapes(layout, side)}
    stored = {name: f"{entry.name}.{entry.stored_name(leaf)}" for name, leaf in names.items()}
    return {name: roundings[key] for name, key in stored.items() if key in roundings}


def _damped(moments: Moments, damping: float) -> Moments:
    return moments.damped(damping / moments.rows)


def _fit_sum(splits: Sequence[_Split], dtype: torch.dtype) -> None:
    count = max(len(split.terms) for split in splits)
    having = [[split for split in splits if term < len(split.terms)] for term in range(count)]
    for split in splits:
        split.tensors = [{} for _ in split.terms]
        split.transforms = [{} for _ in split.terms]
        split.dense = [None for _ in split.terms]
    for term in reversed(range(count)):  # the residual first: it takes what everybody needs
        members = having[term]
        _fit_transform(members, term, "in", dtype)  # one for all
        for key in dict.fromkeys((split.entry.name, split.index) for split in members):
            experts = [split for split in members if (split.entry.name, split.index) == key]
            _fit_transform(experts, term, "out", dtype)
        _fit_term(members, term, dtype)
    for _ in range(ROUNDS if count > 1 else 0):
        for term in range(count):
            _fit_term([split for split in having[term] if len(split.terms) > 1], term, dtype)
    for term in range(count):
        _round_term([split for split in having[term] if split.moments is not None], term, dtype)


def _fit_transform(splits: Sequence[_Split], term: int, side: Side, dtype: torch.dtype) -> None:
    """Fit a transform that these share, if there is one, and build it as it is stored."""
    layout = splits[0].terms[term]
    transform = transform_of(layout, side)
    if transform is None:
        return
    tensors: Mapping[str, Tensor] = {}
    kind = structure(layout.structure)
    if isinstance(kind, Transformed) and transform_shapes(layout, side):  # else it is a fixed one
        targets = [replace(split.target(term), scale=split.scale) for split in splits]
        if side == "in":
            targets = _with_mean_moments(targets)
        tensors = kind.fit_transform(targets, layout, side)
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if not all(map(is_finite, stored.values())):
        raise FitError(f"the fitted transform is not finite in {dtype}")
    widths = splits[0].roundings[term]  # the layer's that stores it
    for name in stored.keys() & {key.removeprefix(f"{side}.") for key in widths}:
        stored[name] = rounded(stored[name], widths[f"{side}.{name}"])
    exact = {name: tensor.double() for name, tensor in stored.items()}
    like = torch.empty(0, dtype=torch.float64, device=splits[0].stored.device)
    built = transform.build(exact, like)
    for split in splits:
        split.transforms[term][side] = built
        split.tensors[term] |= {f"{side}.{name}": tensor for name, tensor in stored.items()}


def _with_mean_moments(targets: list[Target]) -> list[Target]:
    """Replace moments of experts, whose inputs differ, by their mean, to choose one transform."""
    grams = [target.gram for target in targets if target.gram is not None]
    if not grams or all(gram is grams[0] for gram in grams):
        return targets
    mean = torch.stack(grams).mean(0)
    averaged = []
    for target in targets:
        if target.gram is None:  # no token chose this expert
            product = target.product @ mean
            averaged.append(Target(product, mean, float(product.mul(target.product).sum())))
        else:
            averaged.append(replace(target, gram=mean))
    return averaged


def _fit_term(splits: Sequence[_Split], term: int, dtype: torch.dtype) -> None:
    for split in splits:
        layout = split.terms[term]
        _keep_term(split, term, structure(layout.structure).fit(split.target(term), layout), dtype)


def _round_term(splits: Sequence[_Split], term: int, dtype: torch.dtype) -> None:
    """Round what is stored in few bits, where a structure knows how to lose little by it."""
    for split in splits:
        widths = {name: item for name, item in split.roundings[term].items() if "." not in name}
        layout = split.terms[term]
        kind = structure(layout.structure)
        if widths and isinstance(kind, RoundsInNorm):
            target = split.target(term)
            _keep_term(split, term, kind.rounded(target, layout, target.start, widths), dtype)


def _keep_term(split: _Split, term: int, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    if not all(map(is_finite, tensors.values())):
        raise FitError("the result holds NaN or infinity")
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if not all(map(is_finite, stored.values())):
        raise FitError(f"the result does not fit into {dtype}", WIDER)
    split.tensors[term] |= stored
    if len(split.terms) > 1 or split.moments is not None:
        exact = {name: tensor.double() for name, tensor in stored.items()} | split.shared[term]
        split.dense[term] = dense_of(split.terms[term], exact, split.transforms[term])


def _collect(
    entry: LayerPlan,
    splits: Sequence[_Split],
    moments: Sequence[LayerMoments],
    evaluation: EvaluationMoments | None,
) -> FittedLayer:
    tensors: dict[str, Tensor] = {}
    for index, part in enumerate(entry.parts):
        for term in range(len(part.terms)):
            experts = [split.tensors[term] for split in splits if split.index == index]
            prefix = tensor_prefix(entry.parts, index, term)
            for name in experts[0]:
                side, _, leaf = name.rpartition(".")
                if not side:
                    values = [expert[name] for expert in experts]
                    tensors[prefix + name] = torch.stack(values) if entry.experts else values[0]
                elif side == "out" or (index == 0 and entry.input_of is None):
                    owner = transform_name(entry.parts, side, index, term)  # type: ignore[arg-type]
                    tensors[f"{owner}.{leaf}"] = experts[0][name]
    errors: list[dict[str, float]] = []
    shift: Tensor | None = None
    for expert in range(entry.copies):
        parts = [split for split in splits if split.expert == expert]
        read = moments[min(expert, len(moments) - 1)]
        if read.train is not None and entry.bias and not entry.experts:
            weight = torch.cat([split.weight for split in parts])
            dense = torch.cat([split.total for split in parts])
            shift = weight @ read.train.dense_mean - dense @ read.train.mean
        errors.append(_errors(parts, read, shift))
    if any(isnan(value) for of_expert in errors for value in of_expert.values()):
        raise FitError(
            f"the error of layer `{entry.name}` is not a number: its weight or its inputs are too "
            "large",
            "leave the layer out with `--keep`",
        )
    kinds = dict.fromkeys(kind for e in errors for kind in e)  # in order, unlike a set
    lists = {kind: [e[kind] for e in errors if kind in e] for kind in kinds}
    mean = {kind: sum(values) / len(values) for kind, values in lists.items()}
    return FittedLayer(tensors, mean, shift, _predicted(splits, evaluation) if evaluation else None)
