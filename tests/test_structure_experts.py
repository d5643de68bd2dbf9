"""Experts whose stacked weights are structured, against loops over experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tcompress.structures import Site, structure
from tcompress.structures.experts import StructuredExperts
from tcompress.structures.linear import PartLayout, keep_weights
from tests.support.structures import fill_random, randn

WIDTH, UNITS, EXPERTS, TOKENS = 16, 24, 5, 12
BOTH = ("gate_up_proj", "down_proj")

METHODS = {
    "lowrank": [("lowrank", {"rank": 3})],
    "dct": [("lprod", {"transform": "dct"})],
    "dft": [("lprod", {"transform": "dft"})],
    "learned": [("lprod", {"transform": "learned"})],
    "fitted": [("lprod", {"transform": "fitted", "block": 4})],
    "tubal": [("lprod", {"transform": "fitted", "block": 4, "tubal_rank": 1})],
    "padded": [("lprod", {"p": 5, "transform": "dct", "pad": True})],
    "tt": [("tt", {"rank": 3})],
    "tt rebuilt": [("tt", {"order": 3, "rank": 3, "apply": "rebuild"})],
    "residual": [("lprod", {"transform": "fitted", "block": 4}), ("lowrank", {"rank": 2})],
}

ROUTINGS = {
    "balanced": [[t % EXPERTS, (t + 1) % EXPERTS] for t in range(TOKENS)],
    "all to one": [[2, 4]] * TOKENS,
    "idle experts": [[1, 3] if t % 4 else [3, 1] for t in range(TOKENS)],
    "unbalanced": [[0, t % EXPERTS] if t % EXPERTS else [0, 1] for t in range(TOKENS)],
    "one choice": [[t % 2] for t in range(TOKENS)],
    "dropped tokens": [[EXPERTS, EXPERTS] if t % 3 else [4, EXPERTS] for t in range(TOKENS)],
    "nobody": [[EXPERTS, EXPERTS]] * TOKENS,
    "no tokens": [],
}


def _host(seed: int = 0) -> MixtralExperts:
    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=UNITS, num_local_experts=EXPERTS, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    host = MixtralExperts(config).double()
    fill_random(host, seed)
    return host


def _parts(method: str, name: str) -> tuple[PartLayout, ...]:
    inputs, outputs, side = (
        (WIDTH, UNITS, "in") if name == "gate_up_proj" else (UNITS, WIDTH, "out")
    )
    terms = []
    for kind_name, options in METHODS[method]:
        kind = structure(kind_name)
        terms.append(kind.layout(kind.spec(**options), Site(inputs, outputs, side)))  # type: ignore[arg-type]
    names = ("gate", "up") if name == "gate_up_proj" else ("down",)
    return tuple(PartLayout(name=part, terms=tuple(terms)) for part in names)


def _structured(method: str, rewritten: tuple[str, ...] = BOTH) -> StructuredExperts:
    experts = StructuredExperts(_host())
    for name in rewritten:
        experts.rewrite(name, _parts(method, name), dtype=torch.float64)
    fill_random(experts, seed=1)
    return experts


def _weights(experts: StructuredExperts) -> dict[str, Tensor]:
    """Dense weights of both stacks."""
    found = {}
    for name in BOTH:
        stack = experts.stacks.get(name)
        found[name] = getattr(experts, name) if stack is None else stack.dense_weight()
    return found


def _loop(weights: dict[str, Tensor], x: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    rows = []
    for token in range(len(x)):
        total = torch.zeros(WIDTH, dtype=x.dtype)
        for place in range(index.shape[1]):
            expert = int(index[token, place])
            if expert < EXPERTS:
                gate, up = (weights["gate_up_proj"][expert] @ x[token]).chunk(2)
                hidden = nn.functional.silu(gate) * up
                total = total + scale[token, place] * (weights["down_proj"][expert] @ hidden)
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def _call(routing: str) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.tensor(ROUTINGS[routing] or [[0, 0]], dtype=torch.long)
    index = index[: len(ROUTINGS[routing])]
    x = randn(len(index), WIDTH, seed=5).requires_grad_()
    return x, index, randn(*index.shape, seed=6).abs().requires_grad_()


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_equals_a_loop_over_experts(method: str, routing: str) -> None:
    experts, call = _structured(method), _call(routing)
    assert_close(experts(*call), _loop(_weights(experts), *call))


@pytest.mark.parametrize("routing", ["unbalanced", "dropped tokens", "nobody"])
@pytest.mark.parametrize("method", METHODS)
def test_kept_weights_change_nothing(method: str, routing: str) -> None:
    experts, call = _structured(method).eval(), _call(routing)
    with torch.no_grad():
        wanted = experts(*call)
        assert keep_weights(experts) == 8 * EXPERTS * 3 * UNITS * WIDTH
        assert_close(experts(*call), wanted)
        for stack in experts.stacks.values():
            weight = stack.kept_weight()
            assert weight is not None
            weight.zero_()
        assert not bool(experts(*call).any())  # they are what is applied


@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "no tokens"])
def test_equals_the_transformers_module(routing: str) -> None:
    experts, host, call = _structured("fitted"), _host(), _call(routing)
    with torch.no_grad():
        for name, weight in _weights(experts).items():
            getattr(host, name).copy_(weight)
    assert_close(experts(*call), host(*call))


@pytest.mark.parametrize("rewritten", [(), ("gate_up_proj",), ("down_proj",)], ids=str)
def test_weights_that_are_not_rewritten_stay_dense(rewritten: tuple[str, ...]) -> None:
    experts, call = _structured("fitted", rewritten), _call("unbalanced")
    assert_close(experts(*call), _loop(_weights(experts), *call))
    for name in BOTH:  # what is rewritten leaves nothing under the dense name
        assert bool(getattr(experts, name).numel()) == (name not in rewritten)


@pytest.mark.parametrize("routing", ["unbalanced", "idle experts", "dropped tokens"])
@pytest.mark.parametrize("method", ["lowrank", "dft", "fitted", "residual", "tt"])
def test_gradients_equal_those_of_the_loop(method: str, routing: str) -> None:
    experts, call = _structured(method), _call(routing)
    wanted_of = [*experts.parameters(), call[0], call[2]]
    mixing = randn(TOKENS, WIDTH, seed=7)
    got = torch.autograd.grad((experts(*call) * mixing).sum(), wanted_of)
    wanted = torch.autograd.grad((_loop(_weights(experts), *call) * mixing).sum(), wanted_of)
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("bad", [float("nan"), 1e200])
def test_experts_that_a_token_did_not_choose_do_not_touch_it(bad: float) -> None:
    experts, call = _structured("lowrank"), _call("idle experts")
    wanted = experts(*call)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter[0] = bad  # nobody chose this one; its products overflow
    assert_close(experts(*call), wanted)


def test_dtype_follows_the_hidden_states() -> None:
    experts, (x, index, scale) = _structured("fitted").bfloat16(), _call("unbalanced")
    wanted = _loop({n: w.double() for n, w in _weights(experts).items()}, x, index, scale)
    y = experts(x.bfloat16(), index, scale.float())  # routers often compute in float32
    assert y.dtype == torch.bfloat16
    assert float((y.double() - wanted).detach().norm() / wanted.detach().norm()) < 0.06
    nobody = torch.full_like(index, EXPERTS)
    assert experts(x.bfloat16(), nobody, scale.float()).dtype == torch.bfloat16


def test_state_dict_names_and_round_trip() -> None:
    experts, other, call = _structured("fitted"), _structured("fitted"), _call("balanced")
    names = {name.split(".")[0] for name in experts.state_dict()}
    assert names == {"gate_up_proj", "down_proj", "tc_gate_up", "tc_down"}
    with torch.no_grad():
        fill_random(other, seed=9)
        other(*call)
        other.load_state_dict(experts.state_dict())
        assert_close(other(*call), experts(*call), rtol=0, atol=0)


def test_memory_stays_bounded_where_routing_is_not_balanced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, seen = structure("lowrank"), []
    core = type(kind).core

    def counting(self: object, z: Tensor, *rest: object) -> Tensor:
        seen.append(z.shape[0] * z.shape[1])
        return core(self, z, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(kind), "core", counting)
    experts = _structured("lowrank")
    index = torch.zeros(60, 2, dtype=torch.long)
    index[:, 1] = 1
    experts(randn(60, WIDTH), index, torch.ones(60, 2, dtype=torch.float64))
    assert max(seen) <= 2 * index.numel() + EXPERTS
