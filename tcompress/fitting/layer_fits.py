"""Fits all layers that read one input: sums of structures, with the input transform shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import isnan
from typing import Any

import torch
from torch import Tensor

from tcompress import processes
from tcompress.blockwise.sensitivity import Sensitivity
from tcompress.errors import FitError, message_of
from tcompress.linalg.fits import curved_constant, damped_curvature
from tcompress.linalg.moments import (
    DampedMoments,
    Moments,
    RowErrors,
    is_finite,
    relative_error,
)
from tcompress.linalg.rounding import Rounding, rounded
from tcompress.planning.entries import FactorsKey, LayerPlan
from tcompress.structures import Layout, Structure, Target, structure
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
    holdout: Moments | RowErrors | None = None  # to measure on, if rows were held out


@dataclass(frozen=True)
class LayerStatistics:
    """Weight of one layer, and moments of all rows, per row and not damped."""

    weight: Tensor  # dense  # (out, in)
    gram: Tensor  # G  # (in, in)
    mean: Tensor  # of the inputs  # (in,)
    curvature: Tensor | None = None  # S of the whole layer; None for the identity  # (out, out)
    rows: int = 1

    @classmethod
    def of(cls, weight: Tensor, sums: Sensitivity, *, centred: bool) -> LayerStatistics:
        gram, [mean, _] = sums.inputs.moments(centred=centred).gram, sums.inputs.means
        return cls(weight, gram, mean, sums.curvature.total / sums.rows, sums.rows)


@dataclass
class _Term:
    """One summand of a weight, as far as it is fitted."""

    layout: Layout
    shared: dict[str, Tensor]  # factors that layers share, float64
    roundings: Mapping[str, Rounding]  # by name, with the side in front for a transform's
    tensors: dict[str, Tensor] = field(default_factory=dict)  # as they are stored, named alike
    transforms: dict[Side, Any] = field(default_factory=dict)  # built
    dense: Tensor | None = None

    @property
    def kind(self) -> Structure[Any, Any]:
        return structure(self.layout.structure)

    @property
    def exact(self) -> dict[str, Tensor]:
        """Its own tensors in float64, without those of transforms."""
        return {key: t.double() for key, t in self.tensors.items() if "." not in key}


@dataclass
class _Split:
    """One weight being fitted: an output split of a layer, of one expert."""

    key: tuple[str, int]  # name of the layer, and index of the split
    expert: int
    stored: Tensor  # dense weight as the checkpoint has it  # (out, in)
    moments: DampedMoments | None
    stored_curvature: Tensor | None  # as it was measured  # (out, out)
    terms: Sequence[_Term]

    @property
    def weight(self) -> Tensor:
        """Dense weight in float64; made anew each time, so that large layers are held once."""
        return self.stored.double()

    @property
    def curvature(self) -> Tensor | None:
        """Damped curvature in float64; made anew each time, like the weight."""
        if self.stored_curvature is None:
            return None
        return damped_curvature(self.stored_curvature.double(), CURVATURE_DAMPING)

    @property
    def total(self) -> Tensor:
        """Sum of the fitted summands."""
        return torch.stack([term.dense for term in self.terms if term.dense is not None]).sum(0)

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

    def target(self, term: _Term) -> Target:
        """Target of one summand: what the others leave over."""
        m = self.moments
        weight: Tensor | None = self.weight
        gram = None if m is None else m.gram
        product = weight if m is None else self._product
        assert product is not None
        if m is not None and m.lift is not None:  # of other channels than what is fitted
            weight = None
        for other in self.terms:
            if other is not term and other.dense is not None:
                weight = None if weight is None else weight - other.dense
                product = product - (other.dense if gram is None else other.dense @ gram)
        shared, transforms = term.shared, term.transforms
        return Target(product, gram, 1.0, self.curvature, weight, term.exact, shared, transforms)


PROBES = 64  # random inputs that measure a data-free fit


def _sampled_error(splits: Sequence[_Split]) -> float:
    """Relative squared error of the weight, from random inputs: the dense form is never built."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(PROBES, splits[0].stored.shape[1], generator=generator)
    inputs = inputs.to(splits[0].stored.device).double()
    norm = error = 0.0
    for split in splits:
        exact = inputs @ split.weight.mT
        outputs: Tensor | int = 0
        for term in split.terms:
            z = encoded(term.layout, inputs, term.transforms.get("in"))
            z = term.kind.apply(z, term.exact | term.shared, term.layout)
            outputs = outputs + decoded(term.layout, z, term.transforms.get("out"))
        norm += float(exact.square().sum())
        error += float((exact - outputs).square().sum())
    return relative_error(error, norm)


def _predicted(splits: Sequence[_Split], evaluation: LayerStatistics) -> float:
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


MORE_DATA = "use more calibration data or a larger `damping`, or leave the layer out with `--keep`"

ROUNDS = 6  # passes over the summands; the error changes in the fourth digit after four

WIDER = "store a wider dtype, such as `--dtype bfloat16` or `--dtype float32`"

DampedCache = dict[tuple[int, int, float], DampedMoments]
"""Damped moments by the identities of moments and lift, which are held meanwhile, and damping."""

CURVATURE_DAMPING = 0.05  # ridge on S in units of its mean diagonal: one probe per row is noisy


@dataclass(frozen=True)
class FittedLayer:
    """Result for one layer."""

    tensors: dict[str, Tensor]  # to store, by name relative to the layer
    errors: dict[str, float]  # relative, by kind: `calibration` and `held_out`, or `weight`
    shift: Tensor | None = None  # what the bias gains, float64  # (out,)
    loss: float | None = None  # predicted, relative to leaving it out, where it was asked for


@dataclass(frozen=True)
class BlockResult:
    """Fits of one block."""

    block: str  # its name
    layers: dict[str, FittedLayer]  # by weight name
    biases: dict[str, Tensor]  # new ones, by layer name
    attention: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of attentions that begin with what queries and keys are like, by stored name."""


def fit_layers(
    entries: Sequence[LayerPlan],
    weights: Sequence[Tensor],
    moments: Sequence[Sequence[LayerMoments]],
    *,
    dtype: torch.dtype,
    damping: float,
    curvatures: Mapping[str, Tensor] = {},
    factors: SharedFactors = NO_FACTORS,
    lifts: Mapping[str, Tensor] = {},
    evaluation: Mapping[str, LayerStatistics] = {},
    roundings: Mapping[str, Rounding] = {},
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
        evaluation: Moments to predict losses of fits on data by, by name of the layer.
        roundings: Of tensors that will be stored in few bits, by name with the layer's in front.
            With data they are rounded here, where it is known what that costs.
    """
    damped: DampedCache = {}
    owners = [owner for owner, entry in enumerate(entries) if entry.input_of is None]

    def fit(owner: int) -> dict[str, FittedLayer]:
        """Fit a layer, and those that read what it makes of their input."""
        first, results = entries[owner], dict[str, FittedLayer]()
        members = [owner, *(i for i, e in enumerate(entries) if e.input_of == first.name)]
        with torch.no_grad():
            splits_of: dict[int, list[_Split]] = {}
            for i in members:
                measured = (curvatures.get(entries[i].name), lifts.get(entries[i].name))
                settings = (damping, *measured, factors, roundings, damped)
                splits_of[i] = _splits(entries[i], weights[i], moments[i], *settings)
            try:
                _fit_sum([split for splits in splits_of.values() for split in splits], dtype)
            except (FitError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                listed = ", ".join(f"`{entries[i].name}`" for i in members)
                raise FitError(
                    f"the fit of {listed} failed: {message_of(error)}",
                    getattr(error, "hint", None) or MORE_DATA,
                ) from error
            for i, splits in splits_of.items():
                entry = entries[i]
                fitted = _collect(entry, splits, moments[i], evaluation.get(entry.name))
                fitted.tensors.update(owned_factors(entry, factors))
                results[entry.key] = fitted
        return results

    results: dict[str, FittedLayer] = {}
    for part in processes.shared_out(fit, owners, weights[0].device if weights else "cpu"):
        results |= part
    return [results[entry.key] for entry in entries]


def _splits(
    entry: LayerPlan,
    weight: Tensor,
    moments: Sequence[LayerMoments],
    damping: float,
    curvature: Tensor | None,
    lift: Tensor | None,
    factors: SharedFactors,
    roundings: Mapping[str, Rounding],
    cache: DampedCache,
) -> list[_Split]:
    stack = weight if entry.experts else weight[None]
    if not is_finite(stack):
        raise FitError(
            f"the weight of layer `{entry.name}` holds NaN or infinity",
            "repair the checkpoint, or leave the layer out with `--keep`",
        )
    damping *= entry.parts[0].terms[0].regressors
    lifts: list[Tensor | None] = [None] * len(stack)
    if lift is not None:
        lifts = [*(lift if entry.experts else lift[None])]
    damped: list[DampedMoments | None] = []
    for measured, up in zip(moments, lifts, strict=False):
        train = measured.train
        if train is None:
            damped.append(None)
            continue
        key = (id(train), id(up), damping)  # layers that read one input have the same moments
        if key not in cache:
            cache[key] = replace(train, lift=up).damped(damping / train.rows)
        damped.append(cache[key])
    sizes = [part.out_features for part in entry.parts]
    curves: list[Tensor | None] = [None] * len(sizes)
    if curvature is not None:  # splits are fitted one by one
        rows = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        curves = [curvature[part, part] for part in rows]
    splits = []
    for expert, (matrix, up) in enumerate(zip(stack, lifts, strict=True)):
        read = damped[min(expert, len(damped) - 1)]
        if read is None and up is not None:
            matrix = matrix @ up.to(matrix)
        for index, (part, dense) in enumerate(zip(entry.parts, matrix.split(sizes), strict=True)):
            terms = [
                _Term(
                    layout,
                    shared_factors(entry, layout, factors, dense.device),
                    _term_roundings(entry, index, term, roundings),
                )
                for term, layout in enumerate(part.terms)
            ]
            splits.append(_Split((entry.name, index), expert, dense, read, curves[index], terms))
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
    stored = {name: entry.stored_name(leaf) for name, leaf in names.items()}
    return {name: roundings[key] for name, key in stored.items() if key in roundings}


_Summands = Sequence[tuple[_Split, _Term]]  # summands at the same place of several weights


def _fit_sum(splits: Sequence[_Split], dtype: torch.dtype) -> None:
    count = max(len(split.terms) for split in splits)
    summands: list[_Summands] = [
        [(split, split.terms[n]) for split in splits if n < len(split.terms)] for n in range(count)
    ]
    for members in reversed(summands):  # the residual first: it takes what everybody needs
        _fit_transform(members, "in", dtype)  # one for all
        for key in dict.fromkeys(split.key for split, _ in members):
            _fit_transform([item for item in members if item[0].key == key], "out", dtype)
        _fit_terms(members, dtype)
    for _ in range(ROUNDS if count > 1 else 0):
        for members in summands:
            _fit_terms([item for item in members if len(item[0].terms) > 1], dtype)
    for split, term in chain(*summands):  # where a structure knows how to lose little by it
        widths = {name: item for name, item in term.roundings.items() if "." not in name}
        kind = term.kind
        if widths and split.moments is not None and isinstance(kind, RoundsInNorm):
            target = split.target(term)
            _keep(split, term, kind.rounded(target, term.layout, target.start, widths), dtype)


def _fit_transform(members: _Summands, side: Side, dtype: torch.dtype) -> None:
    """Fit a transform that these share, if there is one, and build it as it is stored."""
    split, first = members[0]
    transform = transform_of(first.layout, side)
    if transform is None:
        return
    tensors: Mapping[str, Tensor] = {}
    kind = first.kind
    if isinstance(kind, Transformed) and transform_shapes(first.layout, side):  # not a fixed one
        targets = [replace(split.target(term), scale=split.scale) for split, term in members]
        if side == "in":
            targets = _with_mean_moments(targets)
        tensors = kind.fit_transform(targets, first.layout, side)
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if not all(map(is_finite, stored.values())):
        raise FitError(f"the fitted transform is not finite in {dtype}")
    for name in stored:
        if (width := first.roundings.get(f"{side}.{name}")) is not None:  # of who stores it
            stored[name] = rounded(stored[name], width)
    exact = {name: tensor.double() for name, tensor in stored.items()}
    built = transform.build(exact, torch.empty(0, dtype=torch.float64, device=split.stored.device))
    for _, term in members:
        term.transforms[side] = built
        term.tensors |= {f"{side}.{name}": tensor for name, tensor in stored.items()}


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


def _fit_terms(members: _Summands, dtype: torch.dtype) -> None:
    for split, term in members:
        _keep(split, term, term.kind.fit(split.target(term), term.layout), dtype)


def _keep(split: _Split, term: _Term, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    if not all(map(is_finite, tensors.values())):
        raise FitError("the result holds NaN or infinity")
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if not all(map(is_finite, stored.values())):
        raise FitError(f"the result does not fit into {dtype}", WIDER)
    term.tensors |= stored
    if len(split.terms) > 1 or split.moments is not None:
        term.dense = dense_of(term.layout, term.exact | term.shared, term.transforms)


def _collect(
    entry: LayerPlan,
    splits: Sequence[_Split],
    moments: Sequence[LayerMoments],
    evaluation: LayerStatistics | None,
) -> FittedLayer:
    tensors: dict[str, Tensor] = {}
    for index, part in enumerate(entry.parts):
        for number in range(len(part.terms)):
            fits = [it.terms[number].tensors for it in splits if it.key == (entry.name, index)]
            prefix = tensor_prefix(entry.parts, index, number)
            for name, first in fits[0].items():
                side, _, leaf = name.rpartition(".")
                if not side:
                    stack = [fit[name] for fit in fits]
                    tensors[prefix + name] = torch.stack(stack) if entry.experts else first
                elif side == "out" or (index == 0 and entry.input_of is None):
                    owner = transform_name(entry.parts, side, index, number)  # type: ignore[arg-type]
                    tensors[f"{owner}.{leaf}"] = first
    errors: list[dict[str, float]] = []
    shift: Tensor | None = None
    for expert in range(entry.copies):
        parts = [split for split in splits if split.expert == expert]
        read = moments[min(expert, len(moments) - 1)]
        train, held = read.train, read.holdout
        if train is None:
            errors.append({"weight": _sampled_error(parts)})
            continue
        weight = torch.cat([split.weight for split in parts])
        dense = torch.cat([split.total for split in parts])
        errors.append({"calibration": train.error(weight, dense)})
        if entry.bias and not entry.experts:
            shift = weight @ train.dense_mean - dense @ train.mean
        if held is not None:
            errors[-1]["held_out"] = held.error(weight, dense)
        if held is not None and shift is not None:  # the bias was chosen on other rows
            gap = weight @ held.dense_mean - dense @ held.mean - shift
            norm = held.norm(weight)
            errors[-1]["held_out"] += relative_error(float(gap.square().sum()), norm)
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
