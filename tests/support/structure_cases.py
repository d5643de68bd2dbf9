"""Rows of test cases for every structure; a new structure adds its own."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest
import torch  # noqa: F401 - for rows that are added below
from torch import Tensor

from tcompress.structures import Layout, Site, Structure, structure, structures
from tests.support.structures import REFERENCES


@dataclass(frozen=True)
class Case:
    """Options of a structure and the site they are applied to.

    Attributes:
        structure: Name of the structure.
        name: What is special about the row.
        options: Options of the spec.
        inputs: Width of the input.
        outputs: Width of the output.
        side: Placement by role.
        budget: Parameters that may be spent.
        sharing_sites: Number of like sites that share factors with this one, itself included.
        exact: Whether the layout holds every weight of its size.
        optimal: Whether the fit is the optimum of its class.
    """

    structure: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    inputs: int = 16
    outputs: int = 24
    side: Literal["in", "out", "both"] = "in"
    budget: int | None = None
    sharing_sites: int = 0
    exact: bool = False
    optimal: bool = True

    @property
    def kind(self) -> Structure[Any, Any]:
        return structure(self.structure)

    def layout(self) -> Layout:
        spec = self.kind.spec(**self.options)
        site = Site(self.inputs, self.outputs, self.side, role="q", block="layers.0", head=4)
        site = dataclasses.replace(site, sharing_sites=(site,) * self.sharing_sites)
        return self.kind.layout(spec, site, self.budget)

    def __str__(self) -> str:
        return f"{self.structure}-{self.name}"


KINDS = ("dct", "identity", "haar", "hadamard", "random", "dft", "learned", "fitted")
PLACES: tuple[Literal["in", "out", "both"], ...] = ("in", "out", "both")
_OWN = ("inputs", "outputs", "side", "budget", "sharing_sites", "exact", "optimal")


def _case(structure: str, label: str, **rest: Any) -> Case:
    """A row from fields of `Case` and options of the structure."""
    own = {key: rest.pop(key) for key in _OWN if key in rest}
    return Case(structure, label, rest, **own)


def _lprod(label: str, kind: str, **rest: Any) -> Case:
    return _case("lprod", label, transform=kind, **{"p": 4, **rest})


_tucker = partial(_case, "tucker")

# Widths that p does not divide. Outputs that are cut off are fitted too, to zero: where a
# transform mixes them with those that are kept, the fit is not the optimum.
_PADDED: dict[str, Any] = {"pad": True, "inputs": 14, "outputs": 22}


def _more_lprod_cases() -> list[Case]:
    often = {case.name for case in CASES["lprod"]}
    placed = [_lprod(f"{kind}-{side}", kind, side=side) for kind in KINDS for side in PLACES]
    return [case for case in placed if case.name not in often] + [
        _lprod("fitted-b4-in", "fitted", side="in", block=4),
        _lprod("fitted-b4-out", "fitted", side="out", block=4),
        _lprod("fitted-b4-4-stages", "fitted", side="in", block=4, stages=4),
        _lprod("fitted-b8-1-stage", "fitted", side="in", block=8, stages=1),
        _lprod("tubal-rank-out", "fitted", side="out", tubal_rank=1),
        _lprod("tubal-rank-too-large", "dct", tubal_rank=9),
        _lprod("placement-over-role", "dct", side="in", placement="out"),
        _lprod("seed", "random", p=5, inputs=15, outputs=10, seed=7),
        _lprod("as-many-slices-as-inputs", "dct", p=8, inputs=8, outputs=16),
        _lprod("p1-dct", "dct", p=1, exact=True),
        _lprod("p1-dft", "dft", p=1, exact=True),
        _lprod("p1-prime", "fitted", p=1, inputs=7, outputs=11, exact=True),
        _lprod("pad-identity", "identity", side="in", **_PADDED),
        _lprod("pad-dct-in", "dct", side="in", **_PADDED),
        _lprod("pad-dct-both", "dct", side="both", **_PADDED, optimal=False),
        _lprod("pad-dft", "dft", **_PADDED, optimal=False),
        _lprod("pad-fitted-out", "fitted", side="out", **_PADDED, optimal=False),
        _lprod("pad-tubal-rank", "dct", side="in", **_PADDED, tubal_rank=1),
    ]


# Beyond two cores, and with padding, a fit of a tensor train only comes near an optimum.
_tt = partial(_case, "tt")
_NEAR: dict[str, Any] = {"optimal": False}
_TURNED: dict[str, Any] = {"inputs": 24, "outputs": 16, "side": "out"}
CASES: dict[str, list[Case]] = {
    "lowrank": [
        Case("lowrank", "tall", {"rank": 3}, inputs=10, outputs=16),
        Case("lowrank", "wide", {"rank": 3}, inputs=16, outputs=10, side="out"),
        Case("lowrank", "full", {"rank": 10}, inputs=10, outputs=16, exact=True),
    ],
    # One row for each way of storing slices or applying a transform, of the smallest sizes.
    "lprod": [
        _lprod("dct-in", "dct", side="in"),
        _lprod("dft-both", "dft", side="both"),
        _lprod("learned-out", "learned", side="out"),
        _lprod("fitted-in", "fitted", side="in"),
        _lprod("fitted-out", "fitted", side="out"),
        # Stages that the transform of the tubes folds into (4 divides b), and odd counts.
        _lprod("fitted-b4-3-stages", "fitted", side="out", block=4, stages=3),
        _lprod("tubal-rank-in", "dct", side="in", tubal_rank=2),
        _lprod("dft-odd", "dft", p=5, inputs=15, outputs=10),
        _lprod("p1-learned", "learned", p=1, exact=True),
        _lprod("pad-fitted-in", "fitted", side="in", **_PADDED),
        _lprod("pad-dct-out", "dct", side="out", **_PADDED, optimal=False),
    ],
    "width": [Case("width", "tall", inputs=10, outputs=16, exact=True)],
    "tt": [
        _tt("2-cores", rank=3, **_NEAR),
        _tt("3-cores", order=3, rank=4, **_NEAR),
        _tt("contract", rank=3, apply="contract", side="out", **_NEAR),
        # An outer product is no product of matrices to torch's counter: not rebuilt.
        _tt("rank-1", rank=1, apply="contract", **_NEAR),
        _tt("heads", rank=2, chains="heads", **_NEAR),
        _tt("heads-out", rank=2, chains="heads", side="out", **_NEAR),
        _tt("qtt-padded", name="qtt", inputs=12, outputs=7, **_NEAR),
        _tt("full", rank=99, exact=True),
    ],
    "tucker": [
        _tucker("tall", rank=3, share="none"),
        _tucker("inputs", rank=5, sharing_sites=3),
        _tucker("full", rank=99, exact=True),
        _tucker("heads-out", share="heads", cores=3, rank=[3, 5], sharing_sites=2, **_TURNED),
        _tucker("model", share="model", cores=3, rank=5, inputs=8, outputs=24, sharing_sites=2),
    ],
}
LADDERS: dict[str, list[list[Case]]] = {
    # Options by growing capacity, each class inside the next.
    "lowrank": [[Case("lowrank", f"{rank}", {"rank": rank}) for rank in (1, 2, 4, 8, 12, 16)]],
    "width": [],
    "lprod": [
        *(
            [_lprod(f"p{p}-{kind}", kind, p=p, side=side) for p in (8, 4, 2, 1)]
            for kind in ("identity", "hadamard", "dft")
            for side in PLACES
        ),
        *(
            [_lprod(f"k{k}-{kind}", kind, p=2, tubal_rank=k) for k in (1, 2, 3, 4, None)]
            for kind in ("dct", "fitted")
        ),
    ],
    # Two cores: what more of them reach depends on where the alternation starts.
    "tt": [[_tt(f"{rank}", rank=rank) for rank in (1, 2, 4, 8, 16, 24)]],
    "tucker": [[_tucker(f"{rank}", rank=rank) for rank in (1, 2, 4, 8, 16)]],
}
_NO_RANK = "no rank is given: set `rank` or `target`"
_TWO = "transform `{}` needs a power of two as number of slices, found 6"
_UNEQUAL = "the input 16 has 3 modes and the output 24 has 2: give both equally many"


def _too_small(budget: int, what: str) -> str:
    return f"the budget of {budget} parameters does not pay for {what}"


REFUSALS: dict[str, list[tuple[Case, str]]] = {
    "width": [],
    "lowrank": [
        (Case("lowrank", "no-rank"), _NO_RANK),
        (Case("lowrank", "small-budget", budget=39), _too_small(39, "rank 1")),
    ],
    "lprod": [
        (_lprod("input", "dct", p=3, outputs=24), "p=3 does not divide the input 16"),
        (_lprod("output", "dct", p=16), "p=16 does not divide the output 24"),
        (_lprod("both", "fitted", p=7), "p=7 does not divide the input 16 and the output 24"),
        (_lprod("haar", "haar", p=6, inputs=12), _TWO.format("haar")),
        (_lprod("hadamard-padded", "hadamard", p=6, pad=True), _TWO.format("hadamard")),
        (_lprod("dft", "dft", tubal_rank=1), "`tubal_rank` needs a real transform, not `dft`"),
    ],
    "tt": [
        (_tt("no-rank"), _NO_RANK),
        (_tt("small-budget", budget=39), _too_small(39, "rank 1, which takes 40")),
        (_tt("modes", modes={16: [3, 5]}, rank=2),
         "modes [3, 5] do not make up 16, or are fewer than two"),
        (_tt("one-mode", modes={24: [24]}, rank=2),
         "modes [24] do not make up 24, or are fewer than two"),
        (_tt("unequal", modes={16: [2, 2, 4], 24: [4, 6]}, rank=2), _UNEQUAL),
        (_tt("modes-against-order", modes={16: [2, 2, 4]}, order=2, rank=2), _UNEQUAL),
        (_tt("ranks", order=3, rank=[4]), "3 cores have 2 inner ranks, not 1"),
    ],
    "tucker": [
        (_tucker("no-rank"), _NO_RANK),
        (_tucker("small-budget", budget=39), _too_small(39, "rank 1")),
        (_tucker("small-core", share="none", budget=40), _too_small(40, "rank 1")),
        (_tucker("alone", share="heads", rank=4),
         "`share: heads` has no factors for it, and no `target` gives it a rank"),
        (_tucker("no-shared-rank", share="layers", sharing_sites=2), _NO_RANK),
        (_tucker("small-bank", share="layers", sharing_sites=2, budget=20),
         _too_small(40, "factors of rank 1")),
        (_tucker("no-core", share="layers", rank=8, sharing_sites=2, budget=160),
         _too_small(320, "one core")),
    ],
}  # fmt: skip
MORE: dict[str, list[Case]] = {
    "lowrank": [
        Case("lowrank", "budget", budget=5 * (16 + 24), side="both"),
        Case("lowrank", "rank-beyond-full", {"rank": 99}, inputs=16, outputs=10, exact=True),
        Case("lowrank", "one", {"rank": 1}, inputs=1, outputs=5, exact=True),
    ],
    "lprod": _more_lprod_cases(),
    "tt": [
        _tt("rebuild", rank=3, apply="rebuild", **_NEAR),
        _tt("budget", budget=200, side="both", **_NEAR),
        _tt("prime", inputs=17, outputs=23, rank=3, **_NEAR),
        _tt("qtt-square", name="qtt", inputs=16, outputs=16, **_NEAR),
        _tt("full-qtt", name="qtt", rank=999, inputs=8, outputs=8, exact=True),
        _tt("4-cores", order=4, rank=2, **_NEAR),
        _tt("3-cores-rebuild", order=3, rank=3, apply="rebuild", **_NEAR),
        _tt("modes", modes={16: [2, 8], 24: [6, 4]}, rank=3, **_NEAR),
        _tt("modes-give-the-order", modes={16: [2, 2, 4]}, rank=3, **_NEAR),
        _tt("square", modes={16: [2, 8]}, inputs=16, outputs=16, rank=3, **_NEAR),
        _tt("ranks", order=3, rank=[2, 5], **_NEAR),
        _tt("prime-3-cores", inputs=23, outputs=17, order=3, rank=3, **_NEAR),
        _tt("padded-contract", inputs=14, outputs=22, modes={14: [4, 4]}, rank=2, **_NEAR,
            apply="contract"),
        _tt("qtt-rectangular", name="qtt", inputs=8, outputs=32, **_NEAR),
        _tt("qtt-rank", name="qtt", rank=4, **_NEAR),
        _tt("qtt-budget", name="qtt", budget=250, **_NEAR),
        _tt("full-3-cores", order=3, rank=999, exact=True),
        _tt("full-prime", inputs=7, outputs=11, rank=99, exact=True),
    ],
    "tucker": [
        _tucker("wide", share="none", rank=3, **_TURNED),
        _tucker("budget", share="none", budget=5 * (16 + 24 + 5), side="both"),
        _tucker("inputs-budget", budget=200, sharing_sites=2),
        _tucker("inputs-alone", rank=4),
        _tucker("one", rank=1, inputs=1, outputs=5, exact=True),
        _tucker("heads", share="heads", cores=3, rank=[3, 5], sharing_sites=2),
        _tucker("layers", share="layers", cores=2, rank=5, sharing_sites=3),
        _tucker("model-out", share="model", cores=3, rank=5, inputs=24, outputs=8, side="out",
                sharing_sites=2),
        _tucker("model-budget", share="model", inputs=8, outputs=24, sharing_sites=2, budget=100),
        _tucker("full-model", share="model", rank=2, cores=4, inputs=2, outputs=6, sharing_sites=4,
                exact=True),
        _tucker("layers-out", share="layers", cores=2, rank=[4, 3], side="out", sharing_sites=3),
        _tucker("heads-one-core", share="heads", cores=1, rank=2, sharing_sites=2),
        _tucker("model-one-block", share="model", rank=3, inputs=8, outputs=8, sharing_sites=4),
        _tucker("rank-beyond-full", rank=99, inputs=16, outputs=10, exact=True),
    ],
}  # fmt: skip
"""Rows for the full grid: other sizes, and combinations of what the others have one by one."""


def all_cases() -> list[Case]:
    """Rows of every registered structure."""
    return [case for kind in structures() for case in CASES[kind.name]]


def six_cases() -> list[Case]:
    """One row for each way of layers to store and apply their weight.

    For tests of what all layers do alike, such as being copied or cast.
    """
    names = "lowrank-tall lprod-dft-both lprod-fitted-out tt-contract tt-2-cores tucker-heads-out"
    return [case for case in all_cases() if str(case) in names.split()]


def marked_cases(wanted: Callable[[Case], bool] = lambda _: True) -> list[Any]:
    """All rows as parameters of a test, those for the full grid marked so."""
    more = [case for rows in MORE.values() for case in rows]
    return [
        *(case for case in all_cases() if wanted(case)),
        *(pytest.param(case, marks=pytest.mark.grid) for case in more if wanted(case)),
    ]


def add_row(
    name: str,
    *,
    reference: Callable[[Any, Mapping[str, Tensor]], Tensor],
    cases: list[Case],
    ladders: list[list[Case]],
    refusals: list[tuple[Case, str]],
) -> None:
    """Adds a structure to the contract suite.

    Args:
        name: Its name.
        reference: Builds the dense weight from a layout and stored tensors, not as `apply` does.
        cases: Sizes and options to try.
        ladders: Options by growing capacity, each class inside the next.
        refusals: What its layout refuses, and in which words.
    """
    REFERENCES[name] = reference
    CASES[name], LADDERS[name], REFUSALS[name] = cases, ladders, refusals
