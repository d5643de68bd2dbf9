"""L-product slices: a transform of the features, then one small matrix per slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, gcd, log2
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field

from tcompress import linalg
from tcompress.fields import option
from tcompress.structures.base import (
    FitCost,
    Layout,
    Refusal,
    Roundings,
    RoundsInNorm,
    Shapes,
    Side,
    Site,
    Spec,
    Structure,
    Target,
    Tensors,
    Transform,
    Transformed,
    dense_of,
    first_operators,
    register,
    svd_flops,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TransformKind = Literal["dct", "identity", "haar", "hadamard", "random", "dft", "learned", "fitted"]
Placement = Literal["in", "out", "both"]


class Operator(NamedTuple):
    """A built transform."""

    blocks: Tensor | None  # stages of the rotation, if any  # (stages, groups, b, b)
    tubes: Tensor | None  # transform of the tubes that follows, if any  # (p, p)


@dataclass(frozen=True)
class TransformLayout(Transform):
    """Kind and sizes of one orthogonal transform: fixed, learned or fitted.

    What is stored (nothing, or generators) is turned into an *operator*, which a layer applies.
    """

    kind: TransformKind
    features: int
    p: int
    block: int
    stages: int
    seed: int

    @property
    def rotation(self) -> linalg.Stages:
        """Shape of the staged rotation of the `fitted` kind."""
        return linalg.Stages(self.features, self.block, self.stages)

    def tube_matrix(self) -> Tensor:
        """Returns the fixed p x p part, float64."""
        kind = "dct" if self.kind in ("learned", "fitted") else self.kind
        return linalg.fixed_transform(kind, self.p, self.seed)

    @property
    def shapes(self) -> Shapes:
        if self.kind == "learned":
            return {"generators": (self.p * (self.p - 1) // 2,)}
        return {"generators": self.rotation.generators_shape} if self.kind == "fitted" else {}

    def constants(self) -> Tensors:
        # Compilers cannot trace into scipy, so a module makes the fixed part beforehand.
        return {"tubes": self.tube_matrix()}

    def build(self, tensors: Tensors, like: Tensor) -> Operator:
        """Builds the operator; gradients flow to the generators."""
        fixed = tensors["tubes"] if "tubes" in tensors else self.tube_matrix()
        if linalg.has_float64(like.device):
            fixed = fixed.to(like.device)
        if self.kind not in ("learned", "fitted"):
            return Operator(None, fixed.to(like))
        generators = linalg.in_float64(tensors["generators"])
        if self.kind == "learned":
            turn = linalg.build_blocks(generators, self.p)
            return Operator(None, (turn @ fixed.to(turn)).to(like))
        blocks = linalg.build_blocks(generators, self.block)
        if linalg.merges_with(self.rotation, self.p):
            return Operator(linalg.fold_tube_transform(blocks, fixed).to(like), None)
        return Operator(blocks.to(like), fixed.to(like))


def apply_transform(x: Tensor, operator: Operator) -> Tensor:
    """Applies the transform.  # (tokens, features) -> (tokens, features)."""
    if operator.blocks is not None:
        x = linalg.rotate(x, operator.blocks)
    return x if operator.tubes is None else linalg.mix_tubes(x, operator.tubes)


def apply_inverse(x: Tensor, operator: Operator) -> Tensor:
    """Applies the inverse, which is the transpose.  # (tokens, features) -> same."""
    if operator.tubes is not None:
        x = linalg.mix_tubes(x, operator.tubes.mT)
    return x if operator.blocks is None else linalg.rotate_back(x, operator.blocks)


STEPS = 15  # of conjugate gradients with output moments: nearly all of the gain
MORE_STEPS = 4  # from slices fitted before: sums fit a term often, to a target that hardly moves


class LprodSpec(Spec):
    """Options of `lprod`."""

    name: Literal["lprod"] = "lprod"
    p: int = option(4, "number of slices; 1/p of the weights is kept", ge=1)
    transform: TransformKind | None = option(
        None, "transform of the features; default `fitted` with calibration, else `dct`"
    )
    block: int | None = option(
        None, "block size of the fitted transform; default width / 12, at most 32", ge=2
    )
    stages: int = option(2, "stages of the fitted transform", ge=1, le=8)
    placement: Placement | None = option(
        None, "where the transform sits; default by the role of the layer"
    )
    tubal_rank: int | None = option(None, "keep only this many singular tubes of the slices", gt=0)
    pad: bool = option(False, "pad widths that p does not divide; instead of refusing")
    seed: int = option(0, "seed of the `random` transform", ge=0, off=True)

    def clipped(self, layout: Any) -> str | None:
        if self.tubal_rank is None or layout.tubal_rank is not None:
            return None
        return f"a tubal rank of {self.tubal_rank} became whole slices, which take no more"

    def unused(self, layouts: Sequence[Any]) -> Iterator[str]:
        kind = layouts[0].transform  # the same in all
        needs = f"does nothing: it needs `transform: fitted`, not `{kind}`"
        if self.block is not None and kind != "fitted":
            yield f"`block` {self.block} {needs}"
        if self.stages != type(self).model_fields["stages"].default and kind != "fitted":
            yield f"`stages` {self.stages} {needs}"
        given = f"`placement` {self.placement} does nothing"
        if self.placement is not None and kind == "identity":
            yield f"{given}: it needs a transform, not `identity`"
        elif self.placement is not None and self.placement != layouts[0].placement:
            side = "on both sides" if kind == "dft" else "on one side"
            yield f"{given}: `{kind}` is always {side}, and it needs another `transform`"

    def settled(self, *, calibrated: bool) -> Self:
        if self.transform is not None:
            return self
        return self.model_copy(update={"transform": "fitted" if calibrated else "dct"})

    def offered(self, target: float) -> tuple[Self, ...]:
        # A quarter for the slices: layers that get little of a budget need small ones.
        return self._halvings(ceil(log2(4 / target)))

    def alone(self, target: float) -> tuple[Self, ...]:
        # Half for the slices, an eighth of the weight at most: transforms and a low-rank term take
        # the rest, and do better with it.
        return self._halvings(max(3, ceil(log2(2 / target))))

    def _halvings(self, most: int) -> tuple[Self, ...]:
        return tuple(self.model_copy(update={"p": 2**power}) for power in range(most, 0, -1))


class LprodLayout(Layout):
    """Slices of one weight; widths are padded to multiples of p where allowed."""

    structure: Literal["lprod"] = "lprod"
    p: int = Field(ge=1)
    placement: Placement
    transform: TransformKind
    block_in: int = 0
    block_out: int = 0
    stages: int = 0
    tubal_rank: int | None = None
    seed: int = 0

    @property
    def regressors(self) -> int:
        return self.padded_in // self.p

    @property
    def padded_in(self) -> int:
        """Input width, a multiple of p."""
        return -(-self.in_features // self.p) * self.p

    @property
    def padded_out(self) -> int:
        """Output width, a multiple of p."""
        return -(-self.out_features // self.p) * self.p

    def transform_of(self, side: Side) -> TransformLayout:
        """Describes the transform of the input or of the output."""
        features = self.padded_in if side == "in" else self.padded_out
        block = self.block_in if side == "in" else self.block_out
        return TransformLayout(self.transform, features, self.p, block, self.stages, self.seed)


def _usable(kind: str, spec: LprodSpec, site: Site, *, padded: bool) -> str:
    """Names the numbers of slices that a layer can have, of which those near the asked one."""
    common = gcd(site.in_features, site.out_features)
    divisors = (p for p in range(2, common + 1) if not common % p)
    sizes = [p for p in divisors if not linalg.check_transform(kind, p)]
    near = sorted(sorted(sizes, key=lambda p: abs(log2(p) - log2(spec.p)))[:4])
    listed = " or ".join(", ".join(map(str, near)).rsplit(", ", 1))
    hint = "choose another method" + (f", or p={listed}" if near else "")
    return hint + (", or `pad: true` in the method's options of a recipe" if padded else "")


class Lprod(Structure[LprodSpec, LprodLayout], Transformed, RoundsInNorm):
    """Slices of an L-product with a fixed, learned or fitted transform."""

    name = "lprod"
    summary = "L-product slices behind a DCT, learned or fitted orthogonal transform"
    reference = "Elichi et al. 2026, arXiv:2603.05727"
    spec = LprodSpec
    layout_type = LprodLayout
    in_auto = True

    def layout(self, spec: LprodSpec, site: Site, budget: int | None = None) -> LprodLayout:
        kind = spec.transform or "dct"
        reason = linalg.check_transform(kind, spec.p)
        widths = {"input": site.in_features, "output": site.out_features}
        uneven = [f"{name} {size}" for name, size in widths.items() if size % spec.p]
        if uneven and not spec.pad:
            reason = f"p={spec.p} does not divide the {' and the '.join(uneven)}"
        if reason:
            raise Refusal(reason, _usable(kind, spec, site, padded=bool(uneven)))
        placement = spec.placement or site.side
        if kind == "dft":
            placement = "both"
        elif kind == "fitted" and placement == "both":
            placement = "in"
        seed = spec.seed if kind == "random" else 0
        form = {"p": spec.p, "placement": placement, "transform": kind, "seed": seed}
        layout = LprodLayout(**site.widths, **form)
        if kind == "fitted":
            inward = placement == "in"
            width = layout.padded_in if inward else layout.padded_out
            block = linalg.nearest_block(width, spec.block or min(32, max(2, width // 12)))
            sizes = {"block_in" if inward else "block_out": block, "stages": spec.stages}
            layout = layout.model_copy(update=sizes)
        if spec.tubal_rank is None:
            return layout
        if kind == "dft":
            raise Refusal("`tubal_rank` needs a real transform, not `dft`")
        rows, cols = layout.padded_out // layout.p, layout.padded_in // layout.p
        if spec.tubal_rank * (rows + cols) >= rows * cols:
            return layout  # the truncated form would be larger than the slices themselves
        return layout.model_copy(update={"tubal_rank": spec.tubal_rank})

    def tensors(self, layout: LprodLayout) -> Shapes:
        rows, cols = layout.padded_out // layout.p, layout.padded_in // layout.p
        if layout.tubal_rank is None:
            return {"slices": (layout.p, rows, cols)}
        rank = layout.tubal_rank
        return {"left": (layout.p, rows, rank), "right": (layout.p, rank, cols)}

    def fit_cost(self, layout: LprodLayout, *, calibrated: bool) -> FitCost:
        rows, columns = layout.out_features, layout.in_features
        if layout.tubal_rank is not None:
            return FitCost(svd_flops(rows, columns))
        return FitCost(2.0 * rows * columns**2 if calibrated else 0.0)

    def quick_fit(self, target: Target, layout: LprodLayout) -> Tensor:
        """Fits slices behind a DCT in place of a transform that would take long to fit."""
        if layout.transform == "fitted":
            fixed = {"transform": "dct", "block_in": 0, "block_out": 0, "stages": 0}
            layout = layout.model_copy(update=fixed)
        operators = first_operators(layout, target.product)
        alike = target.aiming_at(target.product, curvature=None, operators=operators)
        fitted = self.fit(alike, layout)
        return dense_of(layout, fitted, operators)

    def transform(self, layout: LprodLayout, side: Side) -> TransformLayout | None:
        has_one = layout.transform != "identity" and layout.placement in (side, "both")
        return layout.transform_of(side) if has_one else None

    def encode(self, x: Tensor, operator: Any, layout: LprodLayout) -> Tensor:
        if layout.padded_in != layout.in_features:
            from torch.nn.functional import pad

            x = pad(x, (0, layout.padded_in - layout.in_features))
        return x if operator is None else apply_transform(x, operator)

    def decode(self, u: Tensor, operator: Any, layout: LprodLayout) -> Tensor:
        if operator is not None:
            u = apply_inverse(u, operator)
        return u[..., : layout.out_features]

    def apply(self, x: Tensor, tensors: Tensors, layout: LprodLayout) -> Tensor:
        if layout.transform == "dft":
            own, partner, swap = linalg.expand_conjugate_slices(tensors["slices"])
            swapped = x.unflatten(-1, own.shape[-3::2])[..., swap, :].flatten(-2)
            return _facewise(x, own) + _facewise(swapped, partner)
        late = layout.transform == "fitted" and layout.placement == "out"
        if layout.tubal_rank is None:
            return _facewise(x, tensors["slices"], feature_major=late)
        inner = _facewise(x, tensors["right"], feature_major=False)
        return _facewise(inner, tensors["left"], feature_major=late)

    def fit(self, target: Target, layout: LprodLayout) -> dict[str, Tensor]:
        product, gram = _turned_target(target, layout)
        if layout.transform == "dft":
            return {"slices": linalg.fit_conjugate_slices(product, gram, layout.p)}
        if layout.tubal_rank is not None:
            slices = linalg.diagonal_blocks(product, layout.p)
            grams = None if gram is None else linalg.diagonal_blocks(gram, layout.p)
            left, right = linalg.fit_lowrank(slices, grams, layout.tubal_rank)
            return {"left": left, "right": right}
        if target.curvature is None:
            return {"slices": linalg.fit_slices(product, gram, layout.p)}
        gram = target.full_gram() if gram is None else gram
        curvature = _padded_gram(target.curvature, layout.padded_out)
        if (turn_out := target.operators.get("out")) is not None:
            curvature = _turned(curvature, turn_out)
        before = target.start.get("slices")
        steps = STEPS if before is None else MORE_STEPS
        moments = (product, gram, layout.p, curvature)
        return {"slices": linalg.fit_slices_curved(*moments, before, iterations=steps)}

    def rounded(
        self, target: Target, layout: LprodLayout, tensors: Tensors, roundings: Roundings
    ) -> dict[str, Tensor]:
        product, gram = _turned_target(target, layout)
        if gram is None or layout.transform == "dft":  # pairs of slices read one another's inputs
            return {
                name: linalg.rounded(tensor, roundings[name]) if name in roundings else tensor
                for name, tensor in tensors.items()
            }
        grams = linalg.diagonal_blocks(gram, layout.p)
        if layout.tubal_rank is None:
            rounding = roundings.get("slices")
            if rounding is None:
                return dict(tensors)
            return {"slices": linalg.rounded_in_norm(tensors["slices"], grams, rounding)}
        slices = linalg.diagonal_blocks(product, layout.p)
        factors = tensors["left"], tensors["right"]
        widths = roundings.get("left"), roundings.get("right")
        left, right = linalg.rounded_factors(slices, grams, factors, widths)
        return {"left": left, "right": right}

    def fit_transform(
        self, targets: Sequence[Target], layout: LprodLayout, side: Side
    ) -> dict[str, Tensor]:
        shape, width = layout.transform_of(side), layout.padded_in
        if layout.transform != "fitted":
            return shape.first()
        problems = []
        for target in targets:
            product, gram = _padded(target.product, layout), target.full_gram()
            problems.append(linalg.Problem(product, _padded_gram(gram, width), target.scale))
        z, output = shape.tube_matrix(), side == "out"
        found = linalg.fit_rotation(problems, shape.rotation, count=layout.p, z=z, output=output)
        return {"generators": found}

    def start(self, layout: LprodLayout, generator: torch.Generator) -> dict[str, Tensor]:
        tensors = super().start(layout, generator)
        if layout.transform == "dft":  # paired coefficients are sums of two products
            tensors["slices"][1 : 1 + 2 * ((layout.p - 1) // 2)] /= 2**0.5
        return tensors


def _facewise(z: Tensor, slices: Tensor, *, feature_major: bool = False) -> Tensor:
    """Facewise product; slices of experts, and their inputs, carry a leading dimension."""
    if slices.dim() == 3:
        return linalg.slice_product(z, slices, feature_major=feature_major)
    parts = z.unflatten(-1, (slices.shape[-3], slices.shape[-1])).transpose(-3, -2)
    return (parts @ slices.mT).transpose(-3, -2).flatten(-2)


def _turned_target(target: Target, layout: LprodLayout) -> tuple[Tensor, Tensor | None]:
    """Brings W C and G, where it is no identity, to the coordinates of the slices."""
    product, gram = _padded(target.product, layout), target.gram
    if gram is not None or layout.padded_in != layout.in_features:
        gram = _padded_gram(target.full_gram(), layout.padded_in)
    turn_in, turn_out = target.operators.get("in"), target.operators.get("out")
    if turn_in is not None:
        product = apply_transform(product, turn_in)
        gram = None if gram is None else _turned(gram, turn_in)
    if turn_out is not None:
        product = apply_transform(product.mT.contiguous(), turn_out).mT
    return product, gram


def _padded(product: Tensor, layout: LprodLayout) -> Tensor:
    """Extends W C to widths that p divides; those that share a transform may differ in outputs."""
    from torch.nn.functional import pad

    right, below = layout.padded_in - product.shape[1], -product.shape[0] % layout.p
    return pad(product, (0, right, 0, below)) if right or below else product


def _turned(moment: Tensor, operator: Any) -> Tensor:
    """Brings a moment to the transform's coordinates, on both of its sides."""
    return apply_transform(apply_transform(moment, operator).mT.contiguous(), operator)


def _padded_gram(gram: Tensor, width: int) -> Tensor:
    """Extends G to padded features, which are always zero but must not be singular."""
    extra = width - gram.shape[-1]
    if not extra:
        return gram
    from torch.nn.functional import pad

    grown = pad(gram, (0, extra, 0, extra))
    grown.diagonal()[-extra:] = 1e-9 * gram.diagonal().mean()
    return grown


register(Lprod())
