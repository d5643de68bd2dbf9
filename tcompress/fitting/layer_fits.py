"""Fits all layers that read one input: sums of structures, with the input transform shared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from math import isnan
from typing import Any, cast

import torch
from torch import Tensor

from tcompress import processes
from tcompress.errors import FitError, SourceError
from tcompress.linalg.fits import damped_curvature
from tcompress.linalg.moments import (
    DampedMoments,
    Moments,
    RowErrors,
    is_finite,
    naming,
    relative_error,
)
from tcompress.linalg.rounding import Rounding, rounded
from tcompress.models import SourceModel, read_finite
from tcompress.planning.costs import path_of
from tcompress.planning.entries import FactorsKey, LayerPlan
from tcompress.planning.sites import module_path, tied_to
from tcompress.structures import Layout, Structure, Target, structure
from tcompress.structures.base import (
    RoundsInNorm,
    Side,
    Transformed,
    decoded,
    dense_of,
    encoded,
    shared_of,
    transform_of,
)
from tcompress.structures.modules.linear import tensor_prefix, transform_name

SharedFactors = Mapping[FactorsKey, Mapping[str, Tensor]]
"""Factors that layers share, as they are stored, by owner and name of the group."""


def dense_matrix(source: SourceModel, entry: LayerPlan, device: torch.device) -> Tensor:
    """Read the dense weight of a planned layer, or table.  # ([experts,] out, in).

    Heads that are tied to a table, and are stored apart, have to be the same.
    """
    keymap, path, name = source.keymap, module_path(source, entry.name), path_of(source, entry)
    weight = read_finite(source.store, keymap, name, device)
    for tied in tied_to(source, path) if entry.kind == "embedding" else ():
        head = f"{tied}.weight"
        if keymap.sources(head).keys != keymap.sources(name).keys and not torch.equal(
            read_finite(source.store, keymap, head, device), weight
        ):
            raise SourceError(
                f"the config ties `{tied}` to `{path}`, but the checkpoint stores both, and they "
                "differ",
                "set `tie_word_embeddings` to false in `config.json`, or leave the word embedding "
                "as it is",
            )
    return entry.matrix(weight)


def shared_factors(
    entry: LayerPlan, layout: Layout, factors: SharedFactors, device: torch.device
) -> dict[str, Tensor]:
    """Return the shared factors that a summand uses, float64; nothing if it has none."""
    shared = shared_of(layout)
    if shared is None:
        return {}
    tensors = factors[entry.bank_of.get(shared.name, entry.name), shared.name]
    return {key: tensor.to(device).double() for key, tensor in tensors.items()}


@dataclass(frozen=True)
class LayerMoments:
    """Moments of one layer input."""

    train: Moments | None = None  # to fit on; None for a data-free fit
    holdout: Moments | RowErrors | None = None  # to measure on, if rows were held out


DATA_FREE = (LayerMoments(),)


@dataclass(frozen=True)
class LayerToFit:
    """One layer, and what it is fitted to."""

    entry: LayerPlan
    weight: Tensor  # dense  # ([experts,] out, in)
    moments: Sequence[LayerMoments] = DATA_FREE  # of its input: one, or one per expert
    curvature: Tensor | None = None  # moments S of the gradients at its output  # (out, out)
    condensed: Tensor | None = None  # weight condensed by them, in their place  # (in, in)
    _: KW_ONLY
    lift: Tensor | None = None
    """From the inputs that are left to all, of which the moments are.  # ([experts,] in, left)."""
    is_judged: bool = False  # whether the loss of a fit on data is told, all outputs counting alike

    def moments_of(self, expert: int) -> LayerMoments:
        return self.moments[min(expert, len(self.moments) - 1)]


@dataclass
class _Term:
    """One summand of a weight, as far as it is fitted."""

    number: int  # among the summands
    layout: Layout
    shared: dict[str, Tensor]  # factors that layers share, float64
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """As they are stored, by name, with the side in front for a transform's."""
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

    layer: LayerToFit
    index: int  # of the split
    rows: slice  # of the layer's outputs
    stored: Tensor  # dense weight as the checkpoint has it  # (out, in)
    moments: DampedMoments | None
    terms: Sequence[_Term]
    dtype: torch.dtype  # in which its tensors are stored
    roundings: Mapping[str, Rounding]  # of those that are stored in few bits, by name

    @property
    def weight(self) -> Tensor:
        """Dense weight in float64; made anew each time, so that large layers are held once."""
        return self.stored.double()

    @property
    def curvature(self) -> Tensor | None:
        """Its damped curvature in float64; made anew each time, like the weight.  # (out, out)."""
        if self.layer.curvature is None:
            return None
        curvature = self.layer.curvature[self.rows, self.rows]
        return damped_curvature(curvature.double(), CURVATURE_DAMPING)

    @property
    def total(self) -> Tensor:
        """Sum of the fitted summands."""
        return torch.stack([term.dense for term in self.terms if term.dense is not None]).sum(0)

    @cached_property
    def scale(self) -> float:
        """E||W x||^2, never zero."""
        weight, moments = self.weight, self.moments
        norm = float(weight.mul(weight).sum()) if moments is None else moments.norm(weight)
        return max(norm, torch.finfo(torch.float64).tiny)

    @cached_property
    def _product(self) -> Tensor:
        """W C, which every round of a sum starts from."""
        assert self.moments is not None
        return self.moments.product(self.stored, self.rows)

    def name_of(self, term: _Term, tensor: str) -> str:
        """Name, relative to the layer, of a tensor of a summand or of its transform."""
        side, _, leaf = tensor.rpartition(".")
        parts, index = self.layer.entry.parts, self.index
        if not side:
            return tensor_prefix(parts, index, term.number) + tensor
        return f"{transform_name(parts, cast(Side, side), index, term.number)}.{leaf}"

    def target(self, term: _Term) -> Target:
        """Target of one summand: what the others leave over."""
        moments, curvature = self.moments, self.curvature
        lazy = len(self.terms) == 1 and not term.kind.reads_product
        if lazy and moments is not None and (condensed := self.layer.condensed) is not None:
            whole = Target(None, moments.gram, dense_weight=self.weight, start=term.exact)
            return replace(whole, condensed=condensed, cross=moments.cross)
        if lazy and moments is not None and moments.is_same:
            facts: dict[str, Any] = {"curvature": curvature, "start": term.exact}
            return Target.of_weight(self.weight, moments.gram, **facts)
        gram = None if moments is None else moments.gram
        narrow = moments is not None and moments.lift is not None  # the weight has more channels
        weight: Tensor | None = None if narrow else self.weight
        product = weight if moments is None else self._product
        assert product is not None
        for other in self.terms:
            if other is not term and other.dense is not None:
                weight = None if weight is None else weight - other.dense
                product = product - (other.dense if gram is None else other.dense @ gram)
        shared, transforms = term.shared, term.transforms
        return Target(product, gram, 1.0, curvature, weight, term.exact, shared, transforms)

    def roundings_of(self, term: _Term, tensors: Iterable[str]) -> dict[str, Rounding]:
        """Look up the roundings of tensors of a summand, or of its transform."""
        keys = {t: self.layer.entry.stored_name(self.name_of(term, t)) for t in tensors}
        return {name: self.roundings[key] for name, key in keys.items() if key in self.roundings}

    def fit(self, term: _Term) -> None:
        """Fit one summand to what the others leave over."""
        self.keep(term, term.kind.fit(self.target(term), term.layout))

    def keep(self, term: _Term, tensors: Mapping[str, Tensor]) -> None:
        """Store what was fitted of a summand."""
        if not all(map(is_finite, tensors.values())):
            raise FitError("the result holds NaN or infinity")
        stored = {name: tensor.to(self.dtype).contiguous() for name, tensor in tensors.items()}
        if not all(map(is_finite, stored.values())):
            raise FitError(f"the result does not fit into {self.dtype}", WIDER)
        term.tensors |= stored
        if len(self.terms) > 1 or self.moments is not None:
            term.dense = dense_of(term.layout, term.exact | term.shared, term.transforms)


_Splits = Sequence[Sequence[_Split]]  # of one layer, by expert and by part
_Summands = Sequence[tuple[_Split, _Term]]  # summands at the same place of several weights


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


def _predicted(splits: Iterable[_Split], gram: Tensor) -> float:
    """Predicted loss of a layer fitted on data, relative to that of leaving it out."""
    lost = missing = 0.0
    for split in splits:
        weight = split.weight
        missed = weight - split.total
        lost += float(missed.mul(missed @ gram).sum())
        missing += float(weight.mul(weight @ gram).sum())
    return relative_error(max(lost, 0.0), missing)


# The summands of a sum are fitted in turn, each to what the others leave over; every step is a
# closed form, so the error never grows. What is stored is rounded before the next step looks at it.


MORE_DATA = "use more calibration data or a larger `damping`, or leave the layer out with `--keep`"
WIDER = "store a wider dtype, such as `--dtype bfloat16` or `--dtype float32`"

ROUNDS = 6  # passes over the summands; the error changes in the fourth digit after four
CURVATURE_DAMPING = 0.05  # ridge on S in units of its mean diagonal: one probe per row is noisy


@dataclass(frozen=True)
class FittedLayer:
    """Result for one layer."""

    tensors: dict[str, Tensor]  # to store, by name relative to the layer; in the end its bias too
    errors: dict[str, float]  # relative, by kind: `calibration` and `held_out`, or `weight`
    shift: Tensor | None = None  # what the bias gains, float64  # (out,)
    loss: float | None = None  # predicted, relative to leaving it out, where it was asked for


@dataclass(frozen=True)
class BlockResult:
    """Fits of one block."""

    block: str  # its name
    layers: dict[str, FittedLayer] = field(default_factory=dict)  # by weight name
    attention: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of attentions that begin with what queries and keys are like, by stored name."""


def fit_layers(
    layers: Sequence[LayerToFit],
    *,
    dtype: torch.dtype,
    damping: float,
    factors: Mapping[FactorsKey, Mapping[str, Tensor]] = {},
    roundings: Mapping[str, Rounding] = {},
) -> list[FittedLayer]:
    """Fit layers that read the same input; transforms are shared within this list only.

    Args:
        layers: One or more, with those that read transforms of others in the list.
        dtype: Dtype in which tensors are stored.
        damping: Ridge added to the moments at one row per regressor, as a multiple of their mean
            diagonal: the fewer rows, the less they are trusted.
        factors: What layers share, fitted before.
        roundings: Of tensors that will be stored in few bits, by name with the layer's in front.
            With data they are rounded here, where it is known what that costs.
    """

    @cache  # layers that read one input have the same moments
    def damped(train: Moments, lift: Tensor | None, regressors: int) -> DampedMoments:
        return replace(train, lift=lift).damped(damping * regressors / train.rows)

    def fit(owner: LayerToFit) -> list[tuple[str, FittedLayer]]:
        """Fit a layer, and those that read what it makes of their input."""
        members = [owner, *(item for item in layers if item.entry.input_of == owner.entry.name)]
        with torch.no_grad():
            splits_of = [_splits(layer, damped, factors, dtype, roundings) for layer in members]
            names = ", ".join(f"`{layer.entry.name}`" for layer in members)
            with naming(f"the fit of {names} failed", MORE_DATA):
                _fit_sum(splits_of)
            pairs = zip(members, splits_of, strict=True)
            return [(layer.entry.key, _collect(layer, splits)) for layer, splits in pairs]

    owners = [layer for layer in layers if layer.entry.input_of is None]
    results = dict(chain(*processes.shared_out(fit, owners, layers[0].weight.device)))
    return [results[layer.entry.key] for layer in layers]


def _splits(
    layer: LayerToFit,
    damped: Callable[[Moments, Tensor | None, int], DampedMoments],
    factors: SharedFactors,
    dtype: torch.dtype,
    roundings: Mapping[str, Rounding],
) -> _Splits:
    entry, experts = layer.entry, layer.entry.experts
    stack = layer.weight if experts else layer.weight[None]
    if not is_finite(stack):
        raise FitError(
            f"the weight of layer `{entry.name}` holds NaN or infinity",
            "repair the checkpoint first",
        )
    regressors = entry.parts[0].terms[0].regressors
    splits: list[list[_Split]] = []
    for expert, matrix in enumerate(stack):
        splits.append([])
        lift = layer.lift[expert] if layer.lift is not None and experts else layer.lift
        train, start = layer.moments_of(expert).train, 0
        moments = None if train is None else damped(train, lift, regressors)
        if moments is None and lift is not None:
            matrix = matrix @ lift.to(matrix)
        for index, part in enumerate(entry.parts):
            rows = slice(start, start + part.out_features)
            start = rows.stop
            terms = [
                _Term(number, layout, shared_factors(entry, layout, factors, matrix.device))
                for number, layout in enumerate(part.terms)
            ]
            weight = (matrix[rows], moments, terms)
            splits[-1].append(_Split(layer, index, rows, *weight, dtype, roundings))
    return splits


def _fit_sum(layers: Sequence[_Splits]) -> None:
    splits = [*chain(*chain(*layers))]
    count = max(len(split.terms) for split in splits)
    summands: list[_Summands] = [
        [(split, split.terms[n]) for split in splits if n < len(split.terms)] for n in range(count)
    ]
    for n in reversed(range(count)):  # the residual first: it takes what everybody needs
        _fit_transform(summands[n], "in")  # one for all
        for stacked in chain(*(zip(*layer, strict=True) for layer in layers)):
            if n < len(stacked[0].terms):
                _fit_transform([(split, split.terms[n]) for split in stacked], "out")
        for split, term in summands[n]:
            split.fit(term)
    for split, term in ROUNDS * [*chain(*summands)]:
        if len(split.terms) > 1:
            split.fit(term)
    for split, term in chain(*summands):  # where a structure knows how to lose little by it
        widths = split.roundings_of(term, term.kind.tensors(term.layout))
        if widths and split.moments is not None and isinstance(term.kind, RoundsInNorm):
            target = split.target(term)
            split.keep(term, term.kind.rounded(target, term.layout, target.start, widths))


def _fit_transform(members: _Summands, side: Side) -> None:
    """Fit a transform that these share, if there is one, and build it as it is stored."""
    split, first = members[0]
    kind, transform = first.kind, transform_of(first.layout, side)
    if transform is None:
        return
    tensors: Mapping[str, Tensor] = {}
    if isinstance(kind, Transformed) and transform.shapes:  # not a fixed one
        targets = [replace(split.target(term), scale=split.scale) for split, term in members]
        if side == "in":
            targets = _with_mean_moments(targets)
        tensors = kind.fit_transform(targets, first.layout, side)
    stored = {f"{side}.{name}": tensor.to(split.dtype) for name, tensor in tensors.items()}
    if not all(map(is_finite, stored.values())):
        raise FitError(f"the fitted transform is not finite in {split.dtype}")
    for name, width in split.roundings_of(first, stored).items():  # of who stores it
        stored[name] = rounded(stored[name], width)
    exact = {name: stored[f"{side}.{name}"].double() for name in tensors}
    built = transform.build(exact, torch.empty(0, dtype=torch.float64, device=split.stored.device))
    for _, term in members:
        term.transforms[side] = built
        term.tensors |= stored


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
            averaged.append(target.aiming_at(target.product, gram=mean))
    return averaged


def _collect(layer: LayerToFit, splits: _Splits) -> FittedLayer:
    """Take the tensors of a layer, and measure what is lost."""
    entry, tensors = layer.entry, dict[str, Tensor]()
    for stacked in zip(*splits, strict=True):  # one part of all experts
        for terms in zip(*(split.terms for split in stacked), strict=True):
            for name, tensor in terms[0].tensors.items():
                if entry.experts and "." not in name:
                    tensor = torch.stack([term.tensors[name] for term in terms])
                if not name.startswith("in.") or not (stacked[0].index or entry.input_of):
                    tensors[stacked[0].name_of(terms[0], name)] = tensor
    errors = defaultdict[str, list[float]](list)
    shift: Tensor | None = None
    for expert, parts in enumerate(splits):
        train, held = layer.moments_of(expert).train, layer.moments_of(expert).holdout
        if train is None:
            errors["weight"].append(_sampled_error(parts))
            continue
        weight = torch.cat([split.weight for split in parts])
        dense = torch.cat([split.total for split in parts])
        errors["calibration"].append(train.error(weight, dense))
        if entry.bias and not entry.experts:
            shift = weight @ train.dense_mean - dense @ train.mean
        if held is not None:
            error = held.error(weight, dense)
            if shift is not None:  # the bias was chosen on other rows
                gap = weight @ held.dense_mean - dense @ held.mean - shift
                error += relative_error(float(gap.square().sum()), held.norm(weight))
            errors["held_out"].append(error)
    if any(map(isnan, chain(*errors.values()))):
        raise FitError(
            f"the error of layer `{entry.name}` is not a number: its weight or its inputs are too "
            "large",
            "leave the layer out with `--keep`",
        )
    means = {kind: sum(values) / len(values) for kind, values in errors.items()}
    loss = _predicted(chain(*splits), train.gram) if layer.is_judged and train is not None else None
    return FittedLayer(tensors, means, shift, loss)
