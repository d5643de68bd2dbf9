"""Experts whose stacked weights are structured, against loops over experts."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.moshi.modeling_moshi import MoshiFlexibleLinear
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from tcompress.roles.projections import shapes_of
from tcompress.structures import Site, structure
from tcompress.structures.modules.experts import StructuredExperts
from tcompress.structures.modules.linear import PartLayout, keep_weights
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


EVERY_ONE = [*product(METHODS, ["unbalanced", "dropped tokens"]), *product(["residual"], ROUTINGS)]


@pytest.mark.parametrize(("method", "routing"), EVERY_ONE)
def test_equals_a_loop_over_experts(method: str, routing: str) -> None:
    experts, call = _structured(method), _call(routing)
    assert_close(experts(*call), _loop(_weights(experts), *call))


@pytest.mark.parametrize("routing", ["unbalanced", "nobody"])
@pytest.mark.parametrize("method", ["lowrank", "fitted", "padded", "tt", "residual"])
def test_kept_weights_change_nothing(method: str, routing: str) -> None:
    experts, call = _structured(method).eval(), _call(routing)
    with torch.no_grad():
        wanted = experts(*call)
        assert keep_weights(experts) == 8 * EXPERTS * 3 * UNITS * WIDTH
        assert_close(experts(*call), wanted)
        for stack in experts.stacks.values():
            weight = stack.cached_weight()
            weight.zero_()
        assert not bool(experts(*call).any())  # they are what is applied


@pytest.mark.parametrize("rewritten", [(), ("gate_up_proj",), ("down_proj",)], ids=str)
def test_weights_that_are_not_rewritten_stay_dense(rewritten: tuple[str, ...]) -> None:
    experts, call = _structured("fitted", rewritten), _call("unbalanced")
    assert_close(experts(*call), _loop(_weights(experts), *call))
    for name in BOTH:  # what is rewritten leaves nothing under the dense name
        assert bool(getattr(experts, name).numel()) == (name not in rewritten)


@pytest.mark.parametrize("routing", ["unbalanced", "dropped tokens"])
@pytest.mark.parametrize("method", ["lowrank", "dft", "fitted", "residual", "tt"])
def test_gradients_equal_those_of_the_loop(method: str, routing: str) -> None:
    experts, call = _structured(method), _call(routing)
    wanted_of = [*experts.parameters(), call[0], call[2]]
    mixing = randn(TOKENS, WIDTH, seed=7)
    got = torch.autograd.grad((experts(*call) * mixing).sum(), wanted_of)
    wanted = torch.autograd.grad((_loop(_weights(experts), *call) * mixing).sum(), wanted_of)
    assert_close(got, wanted)


def test_an_exported_graph_knows_no_routing() -> None:
    experts = _structured("residual")
    traced: Any = torch.export.export(experts, _call("balanced"))
    for routing in ("unbalanced", "all to one", "dropped tokens"):
        call = _call(routing)
        assert_close(traced.module()(*call), _loop(_weights(experts), *call))


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
    apply = type(kind).apply

    def counting(self: object, z: Tensor, *rest: object) -> Tensor:
        seen.append(z.shape[0] * z.shape[1])
        return apply(self, z, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(kind), "apply", counting)
    experts = _structured("lowrank")
    index = torch.zeros(60, 2, dtype=torch.long)
    index[:, 1] = 1
    experts(randn(60, WIDTH), index, torch.ones(60, 2, dtype=torch.float64))
    assert max(seen) <= 2 * index.numel() + EXPERTS


def _config(name: str) -> Any:
    """A config of any family, with every name for the same sizes."""
    sizes = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS}
    widths = {"moe_intermediate_size": UNITS, "intermediate_size": UNITS, "moe_hidden_size": WIDTH}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = getattr(transformers, name)(hidden_size=WIDTH, **sizes, **widths, hidden_act="silu")
    config._experts_implementation = "eager"
    return config


HOSTS: dict[str, Callable[[], nn.Module]] = {
    "gate up down": _host,
    "interleaved, transposed, biased, clamped": lambda: GptOssExperts(_config("GptOssConfig")),
    "no gate": lambda: NemotronHExperts(_config("NemotronHConfig")),
    "norm after each": lambda: MuseSparkExperts(_config("MuseSparkTextConfig")),
    "own forward, transposed": lambda: Llama4TextExperts(_config("Llama4TextConfig")),
    "own forward, split rows": lambda: JetMoeParallelExperts(EXPERTS, WIDTH, UNITS),
    "own forward, all picked": lambda: MoshiFlexibleLinear(WIDTH, UNITS, EXPERTS),
}


def _arguments(host: nn.Module) -> tuple[Any, ...]:
    if isinstance(host, Llama4TextExperts):
        return (randn(EXPERTS * 3, WIDTH, seed=3),)
    if isinstance(host, JetMoeParallelExperts):
        return randn(9, WIDTH, seed=3), [4, 0, 2, 3, 0]
    if isinstance(host, MoshiFlexibleLinear):
        return randn(2, 3, WIDTH, seed=3), torch.tensor([2, 0, 2])
    return tuple(item.detach() for item in _call("unbalanced"))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("layout", HOSTS)
def test_every_layout_computes_what_its_own_module_does(layout: str, kept: bool) -> None:
    host = HOSTS[layout]().double().eval()
    fill_random(host, seed=2)
    shapes, call = shapes_of(host), _arguments(host)
    assert {shape.parameter for shape in shapes} == {
        name for name, weight in host.named_parameters() if weight.ndim == 3
    }
    wrapped = StructuredExperts(copy.deepcopy(host)).eval()
    kind = structure("lowrank")
    for shape in shapes:
        site = Site(shape.in_features, shape.out_features, "in")
        part = PartLayout(name="all", terms=(kind.layout(kind.spec(rank=3), site),))
        options = {"transposed": shape.transposed, "dtype": torch.float64}
        wrapped.rewrite(shape.parameter, (part,), **options)  # type: ignore[arg-type]
    stacks = wrapped.stacks
    for seed, stack in enumerate(stacks.values()):
        fill_random(stack, seed)
    with torch.no_grad():
        for shape in shapes:
            weight = stacks[shape.parameter].dense_weight()
            getattr(host, shape.parameter).copy_(weight.mT if shape.transposed else weight)
        if kept:
            keep_weights(wrapped)
        assert_close(wrapped(*call), host(*call))
        assert_close(copy.deepcopy(wrapped)(*call), host(*call))


def test_biases_that_follow_do_not_hide_experts_that_nobody_chose() -> None:
    host = GptOssExperts(_config("GptOssConfig")).double()
    fill_random(host, seed=2)
    x = randn(4, WIDTH)
    index, scale = torch.tensor([[1, 2]] * 4), randn(4, 2, seed=6).abs()
    assert_close(StructuredExperts(copy.deepcopy(host))(x, index, scale), host(x, index, scale))
