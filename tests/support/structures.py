"""Independent dense forms of every structure, from stored tensors with loops and `block_diag`."""

from collections.abc import Callable, Mapping
from itertools import product
from math import cos, pi, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcompress.linalg.moments import Moments
from tcompress.structures import Layout, Target, structure
from tcompress.structures.base import NO_OPERATORS, SIDES, Side, dense_of, shared_of, transform_of
from tcompress.structures.lowrank import LowRankLayout
from tcompress.structures.lprod import LprodLayout
from tcompress.structures.modules.linear import PartLayout, StructuredLinear
from tcompress.structures.tt import TTLayout
from tcompress.structures.tucker import TuckerLayout
from tests.support.numerics import randn

Stored = Mapping[str, Tensor]  # tensors of one term by name: `slices`, `in.generators`, `bank.u`
NO_BANK: Stored = {}


# ---------------------------------------------------------------- dense references
def dense_reference(layout: Layout, stored: Stored) -> Tensor:
    """Builds the dense weight of one term; differentiable in every stored tensor.

    Args:
        layout: Layout of the term.
        stored: Its tensors, those of a side as `in.name` and `out.name`.

    Returns:
        The weight, float64.  # (out, in)
    """
    return REFERENCES[layout.structure](layout, stored)


def _lowrank(layout: LowRankLayout, stored: Stored) -> Tensor:
    terms = [torch.outer(stored["a"][:, i], stored["b"][i]) for i in range(layout.rank)]
    return torch.stack(terms).sum(0)


def _lprod(layout: LprodLayout, stored: Stored) -> Tensor:
    if "slices" in stored:
        slices = list(stored["slices"])
    else:
        slices = [stored["left"][k] @ stored["right"][k] for k in range(layout.p)]
    if layout.transform == "dft":
        weight = _block_circulant(slices)
    else:
        weight = torch.block_diag(*slices)
        if layout.placement in ("in", "both"):
            weight = weight @ _transform(layout, "in", stored)
        if layout.placement in ("out", "both"):
            weight = _transform(layout, "out", stored).T @ weight
    return weight[: layout.out_features, : layout.in_features]


def _tt(layout: TTLayout, stored: Stored) -> Tensor:
    """A sum of Kronecker products, one for every way through the ranks."""
    if layout.chains > 1:  # side by side: of each head its rows, or its columns
        parts = [
            _tt(layout.chain, {name: core[index] for name, core in stored.items()})
            for index in range(layout.chains)
        ]
        return torch.cat(parts, 1 if layout.turned else 0)
    cores = [stored[f"core{n}"] for n in range(len(layout.in_modes))]
    total = torch.zeros((), dtype=torch.float64)
    for path in product(*(range(rank) for rank in layout.ranks)):
        bonds = (0, *path, 0)
        term = torch.ones(1, 1, dtype=torch.float64)
        for n, core in enumerate(cores):
            term = torch.kron(term, core[bonds[n], :, :, bonds[n + 1]])
        total = total + term
    return total[: layout.out_features, : layout.in_features]


def _tucker(layout: TuckerLayout, stored: Stored) -> Tensor:
    """Sums of outer products of columns, block by block."""
    if layout.share == "inputs":
        ones = torch.eye(layout.ranks[0]).double()
        return _outer_sum(stored["u"], ones, stored["v" if layout.bank is None else "bank.v"])
    if layout.bank is None:
        return _outer_sum(stored["u"], stored["core"], stored["v"])
    rows = []
    for weights in stored["mix"]:
        blocks = []
        for own in weights:
            core = sum(a * c for a, c in zip(own, stored["bank.cores"], strict=True))
            blocks.append(_outer_sum(stored["bank.u"], core, stored["bank.v"]))
        rows.append(torch.cat(blocks, 1))
    weight = torch.cat(rows)
    return weight.T if layout.turned else weight


def _outer_sum(u: Tensor, core: Any, v: Tensor) -> Tensor:
    pairs = product(range(u.shape[1]), range(v.shape[1]))
    return torch.stack([core[i, j] * torch.outer(u[:, i], v[:, j]) for i, j in pairs]).sum(0)


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "lowrank": _lowrank, "lprod": _lprod, "tt": _tt, "tucker": _tucker,
    "width": lambda layout, stored: stored["w"],
}  # fmt: skip


def _transform(layout: LprodLayout, side: Side, stored: Stored) -> Tensor:
    """The orthogonal matrix T of one side: stages of rotations, then Z (x) I."""
    features = layout.in_features if side == "in" else layout.out_features
    while features % layout.p:
        features += 1
    generators = stored.get(f"{side}.generators")
    if layout.transform == "learned":
        assert generators is not None
        z = rotation(generators, layout.p) @ TUBES["dct"](layout.p, 0)
    else:
        kind = "dct" if layout.transform == "fitted" else layout.transform
        z = TUBES[kind](layout.p, layout.seed)
    turn = torch.kron(z, torch.eye(features // layout.p, dtype=z.dtype))
    if layout.transform == "fitted":
        block = layout.block_in if side == "in" else layout.block_out
        for stage in reversed(range(layout.stages)):
            turn = turn @ _stage(generators[stage], block, strided=stage % 2 == 1)
    return turn


def _stage(generators: Tensor, block: int, *, strided: bool) -> Tensor:
    groups = len(generators)
    dense = torch.block_diag(*[rotation(generators[g], block) for g in range(groups)])
    places = [
        [g + groups * j if strided else g * block + j for j in range(block)] for g in range(groups)
    ]
    order = [place for group in places for place in group]
    pick = torch.eye(groups * block, dtype=dense.dtype)[order]
    return pick.T @ dense @ pick


def rotation(generators: Tensor, size: int) -> Tensor:
    """exp(A - A^T), the strict upper triangle of A filled row by row."""
    a = torch.zeros(size, size, dtype=generators.dtype)
    places = [(i, j) for i in range(size) for j in range(i + 1, size)]
    for place, value in zip(places, generators, strict=True):
        unit = torch.zeros(size, size, dtype=generators.dtype)
        unit[place] = 1.0
        a = a + value * unit
    return torch.linalg.matrix_exp(a - a.T)


def _block_circulant(slices: list[Tensor]) -> Tensor:
    """The t-product as a matrix: blocks W_(i - j mod p), W the inverse DFT of complex slices.

    Stored are the slices of cos0, cos1, sin1, ...: A_k + i B_k is the slice of frequency k.
    """
    p = len(slices)
    spectrum = [slices[0].to(torch.complex128)] + [torch.empty(0)] * (p - 1)
    for k in range(1, (p - 1) // 2 + 1):
        spectrum[k] = torch.complex(slices[2 * k - 1], slices[2 * k])
        spectrum[p - k] = spectrum[k].conj()
    if p % 2 == 0:
        spectrum[p // 2] = slices[p - 1].to(torch.complex128)
    tube = []
    for t in range(p):
        waves = [complex(cos(2 * pi * k * t / p), np.sin(2 * pi * k * t / p)) for k in range(p)]
        total = torch.stack([w * s for w, s in zip(waves, spectrum, strict=True)]).sum(0) / p
        assert float(total.detach().imag.abs().max()) < 1e-12
        tube.append(total.real)
    return torch.cat([torch.cat([tube[(i - j) % p] for j in range(p)], 1) for i in range(p)])


def _dct(p: int, seed: int) -> Tensor:
    scale = [sqrt((2 if k else 1) / p) for k in range(p)]
    rows = [[scale[k] * cos(pi * (j + 0.5) * k / p) for j in range(p)] for k in range(p)]
    return torch.tensor(rows, dtype=torch.float64)


def _haar(p: int, seed: int) -> Tensor:
    rows = [[1 / sqrt(p)] * p]
    width = p
    while width > 1:
        for start in range(0, p, width):
            row = [0.0] * p
            for j in range(width):
                row[start + j] = (1 if j < width // 2 else -1) / sqrt(width)
            rows.append(row)
        width //= 2
    return torch.tensor(rows, dtype=torch.float64)


def _hadamard(p: int, seed: int) -> Tensor:
    rows = [[(-1.0) ** (i & j).bit_count() / sqrt(p) for j in range(p)] for i in range(p)]
    return torch.tensor(rows, dtype=torch.float64)


def _random(p: int, seed: int) -> Tensor:
    # Q of the QR with a positive diagonal is unique: A R^-1 with R^T R = A^T A.
    a = torch.from_numpy(np.random.default_rng(seed).standard_normal((p, p)))
    r = torch.linalg.cholesky(a.T @ a).T
    return torch.linalg.solve_triangular(r, a, upper=True, left=False).contiguous()


TUBES: dict[str, Callable[[int, int], Tensor]] = {
    "dct": _dct,
    "identity": lambda p, seed: torch.eye(p, dtype=torch.float64),
    "haar": _haar,
    "hadamard": _hadamard,
    "random": _random,
}


# ---------------------------------------------------------------- layers and fits
def fill_random(layer: torch.nn.Module, seed: int = 0, scale: float = 0.4) -> None:
    """Draws all parameters; generators of this size turn well away from the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            values = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.copy_(scale * values)


def make_layer(layout: Layout, *, seed: int = 0, **options: object) -> StructuredLinear:
    """Builds a float64 layer of one term with random tensors."""
    options = {"dtype": torch.float64, **options}
    layer = StructuredLinear([PartLayout(name="w", terms=(layout,))], **options)  # type: ignore[arg-type]
    if not any(parameter.is_meta for parameter in layer.parameters()):
        fill_random(layer, seed)
    return layer


def stored_of(layer: StructuredLinear) -> dict[str, Tensor]:
    """Returns the tensors of a one-term layer by the names that `dense_reference` takes."""
    names = {"tc_in0": "in", "tc_out0": "out"}
    found = {}
    for name, parameter in layer.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if owner.startswith("tc_bank_"):
            found[f"bank.{leaf}"] = parameter
            continue
        if name != "bias":
            found[f"{names[owner]}.{leaf}" if owner else name.removeprefix("tc_")] = parameter
    return found


def reference_of(layer: StructuredLinear) -> Tensor:
    """Builds the dense weight of a one-term layer independently, from its tensors in float64."""
    stored = {name: tensor.double() for name, tensor in stored_of(layer).items()}
    return dense_reference(layer.parts[0].terms[0], stored)


def random_operators(layout: Layout, seed: int = 0) -> dict[Side, object]:
    """Builds the operators of both sides from random tensors."""
    operators: dict[Side, object] = {}
    for place, side in enumerate(SIDES):
        transform = transform_of(layout, side)
        if transform is not None:
            shapes = transform.shapes.items()
            tensors = {n: 0.4 * randn(*s, seed=seed + place) for n, s in shapes}
            operators[side] = transform.build(tensors, torch.zeros(1, dtype=torch.float64))
    return operators


def make_moments(features: int, rows: int, *, noise: float = 0.2, seed: int = 0) -> Moments:
    """Uncentred moments of correlated rows, the new stream a noisy copy of the dense one."""
    x = randn(rows, features, seed=seed) @ randn(features, features, seed=seed + 1)
    new = x + noise * randn(rows, features, seed=seed + 2)
    zero = torch.zeros(features, dtype=torch.float64)
    return Moments(new.T @ new / rows, x.T @ new / rows, x.T @ x / rows, zero, zero, rows)


def identity_moments(features: int) -> Moments:
    """G = C = D = I: with them a fit is the data-free one."""
    eye = torch.eye(features, dtype=torch.float64)
    zero = torch.zeros(features, dtype=torch.float64)
    return Moments(eye, eye, eye, zero, zero, 0)


def random_bank(layout: Layout, seed: int = 0) -> dict[str, Tensor]:
    """Draws the tensors of the bank that a layout uses."""
    shared = shared_of(layout)
    shapes = enumerate(shared.shapes.items() if shared else ())
    return {name: randn(*shape, seed=seed + n) for n, (name, shape) in shapes}


def target_of(
    weight: Tensor,
    moments: Moments | None,
    bank: Mapping[str, Tensor] = NO_BANK,
    operators: Mapping[Side, object] = NO_OPERATORS,
) -> Target:
    """Returns what a single term is fitted to; without moments the data-free target."""
    own: Any = {"factors": bank, "operators": operators}
    if moments is None:
        return Target(weight, None, float(weight.square().sum()), **own)
    scale = float((weight @ moments.dense).mul(weight).sum())
    return Target(weight @ moments.cross, moments.gram, scale, weight=weight, **own)


def fitted_weight(
    layout: Layout, weight: Tensor, moments: Moments | None, operators: Mapping[Side, object]
) -> Tensor:
    """Fits one term with given sides and returns the dense weight of the result."""
    kind, bank = structure(layout.structure), random_bank(layout)
    tensors = kind.fit(target_of(weight, moments, bank, operators), layout)
    return dense_of(layout, {**tensors, **bank}, operators)
