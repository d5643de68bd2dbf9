"""What each mechanism computes, against what its paper writes."""

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.flop_counter import FlopCounterMode

from tcompress.attention import (
    BaseAttention,
    ReplacementSpec,
    replacement_named,
    replacement_of,
)
from tcompress.attention.graph import GraphSpec
from tcompress.attention.kronecker import KroneckerLayout, KroneckerSpec, mix_grid
from tcompress.attention.replacement import QueryKeyMoments
from tcompress.attention.tam import TamLayout, TamSpec
from tcompress.attention.visibility import Visible
from tcompress.structures import Refusal
from tests.reference import hot, tam, tsa
from tests.reference.copied import CLOSE, array
from tests.support.replacements import (
    CASES,
    HEADS,
    TEXT,
    WIDTH,
    inputs_of,
    layout_of,
    randn,
    run,
    tensors_of,
)


@pytest.mark.parametrize(
    "name", ["tsa-causal", "hot-folded", "hot-two-special", "tam-gru", "multilinear"]
)
def test_multiply_adds_are_those_of_a_real_pass(name: str) -> None:
    layout = layout_of(name)
    kind = replacement_named(layout.mechanism)
    tensors = tensors_of(name)
    for tokens in {CASES[name][2], 5 if CASES[name][1].tokens is None else CASES[name][2]}:
        own = [x[:1, :, :tokens] for x in inputs_of(name)]
        with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
            kind.apply(*own, tensors, layout, Visible())
        assert counted.get_total_flops() == 2 * kind.macs(layout, tokens)


# ---------------------------------------------------------------- graph
@pytest.mark.parametrize("name", ["tga", "tga-causal", "tsa", "tsa-causal"])
def test_graph_filters_are_powers_of_the_papers_graph(name: str) -> None:
    q, k, v = inputs_of(name)
    tensors, layout = tensors_of(name), layout_of(name)
    mixed = run(name, (q, k, v), tensors)
    weights = tensors.get("coefficients", torch.ones(2, HEADS).double())
    for b in range(2):
        for h in range(HEADS):
            shared = h * layout.key_heads // HEADS
            omega = tsa.bidirectional_graph(6, float(tensors["decay"][h].sigmoid()))
            if layout.causal:
                omega = 2 * np.tril(omega)
            psi = tsa.attention_graph(array(k[b, shared]), omega)
            expected = tsa.polynomial_filter(psi, array(v[b, shared]), weights[:, h].tolist())
            np.testing.assert_allclose(array(mixed[b, h]), expected, **CLOSE)


@pytest.mark.parametrize("decay", [None, 0.7])
@pytest.mark.parametrize("pretrained", [False, True])
def test_edges_begin_short_beside_trained_weights(pretrained: bool, decay: float | None) -> None:
    kind, host = replacement_named("graph"), BaseAttention(HEADS, HEADS, WIDTH)
    layout = kind.layout(GraphSpec(decay=decay), host)
    first = kind.start(layout, torch.Generator(), pretrained=pretrained)["decay"].sigmoid()
    expected = decay or (0.05 if pretrained else 0.9)
    torch.testing.assert_close(first, torch.full((HEADS,), expected))


# ---------------------------------------------------------------- Kronecker
def _mask(word: str, size: int) -> NDArray[np.bool_]:
    """What a row of an axis may see."""
    apart = np.subtract.outer(np.arange(size), np.arange(size))
    kind, _, width = word.partition(":")
    return {"none": apart > -size, "causal": apart >= 0}.get(kind, abs(apart) <= int(width or 0))


@pytest.mark.parametrize("kernel", ["softmax", "smreg"])
@pytest.mark.parametrize("pool", ["sum", "mean"])
@pytest.mark.parametrize(
    ("grid", "axes", "masks"),
    [
        ((6,), None, None),
        ((2, 3), None, None),
        ((3, 4, 2), None, None),
        ((3, 4, 2), (0, 2), None),
        ((3, 4, 2), (1,), ("causal",)),
        ((3, 4, 2), None, ("window:1", "none", "causal")),
        ((3, 4, 2), (), None),
    ],
)
def test_kronecker_attention_is_that_of_the_paper(
    kernel: Any,
    pool: Any,
    grid: tuple[int, ...],
    axes: tuple[int, ...] | None,
    masks: tuple[str, ...] | None,
) -> None:
    """Factors of some axes, from sums or means; half of a learnt scale is on either side."""
    kind = replacement_named("kronecker")
    host = BaseAttention(HEADS, HEADS, WIDTH, tokens=prod(grid), grid=grid)
    spec = KroneckerSpec(kernel=kernel, pool=pool, features=12, axes=axes, masks=masks)
    layout: Any = kind.layout(spec, host)
    constants = {key: value.double() for key, value in kind.constants(layout).items()}
    scale = 0.5 * randn(len(layout.mixed), HEADS, seed=3)
    q, k, v = (0.4 * randn(1, HEADS, prod(grid), WIDTH, seed=s) for s in range(3))
    mixed = kind.apply(q, k, v, {**constants, "scale": scale}, layout, Visible())[0]
    how: dict[str, Any] = {"pooling": pool}
    if kernel == "smreg":
        how["features"] = lambda x: hot.smreg_features(x, array(constants["directions"]))
    hidden = zip(layout.mixed, masks or (), strict=False)
    how["masks"] = {axis: _mask(word, grid[axis]) for axis, word in hidden}
    for head in range(HEADS):
        queries, keys, expected = (array(x[0, head]).reshape(*grid, WIDTH) for x in (q, k, v))
        for axis, exponent in zip(layout.mixed, scale[:, head].tolist(), strict=True):
            root = np.exp(exponent / 2)
            factors = hot.factors(root * queries, root * keys, axes=(axis,), **how)
            expected = hot.mode_product(expected, factors[axis], axis + 1)
        np.testing.assert_allclose(array(mixed[0, head]), expected.reshape(-1, WIDTH), **CLOSE)


def test_special_tokens_see_all_and_are_gated_in() -> None:
    q, k, v = inputs_of("hot-two-special")
    tensors = tensors_of("hot-two-special")
    mixed = run("hot-two-special", (q, k, v), tensors)
    torch.testing.assert_close(mixed[:, :, :2], sdpa(q, k, v)[:, :, :2])
    layout = layout_of("hot-two-special")
    grid = mix_grid(*(x[:, :, 2:] for x in (q, k, v)), None, tensors, layout)  # type: ignore[arg-type]
    special = sdpa(q, k[:, :, :2], v[:, :, :2])[:, :, 2:]
    gate = tensors["gate"].sigmoid()[:, None, None]
    torch.testing.assert_close(mixed[:, :, 2:], gate * grid + (1 - gate) * special)


@pytest.mark.parametrize(("name", "share"), [("hot-image", 6 / 7), ("hot-two-special", 6 / 8)])
def test_the_gate_starts_at_the_share_of_the_grid(name: str, share: float) -> None:
    kind, layout = replacement_named("kronecker"), layout_of(name)
    values = kind.start(layout, torch.Generator(), pretrained=True)
    torch.testing.assert_close(values["gate"].sigmoid(), torch.full((HEADS,), share))


def test_random_features_come_near_to_softmax() -> None:
    few, many = (
        KroneckerLayout(
            heads=HEADS, key_heads=HEADS, head_dim=WIDTH, grid=(4, 5), kernel="favor", features=n
        )
        for n in (8, 4096)
    )
    exact = few.model_copy(update={"kernel": "softmax"})
    q, k, v = (0.5 * randn(2, HEADS, 20, WIDTH, seed=s) for s in range(3))
    scale = {"scale": torch.zeros(2, HEADS).double()}
    right = mix_grid(q, k, v, None, scale, exact)
    kind = replacement_named("kronecker")

    def error(layout: KroneckerLayout) -> float:
        own = {key: value.double() for key, value in kind.constants(layout).items()}
        mixed = mix_grid(q, k, v, None, {**scale, **own}, layout)
        return float((mixed - right).norm() / right.norm())

    assert error(many) < 0.01
    assert error(many) < error(few) < 0.5


def test_directions_of_the_regularised_kernel_are_orthogonal_and_of_one_length() -> None:
    width = 8
    host = BaseAttention(1, 1, width, tokens=12, grid=(4, 3))
    kind, spec = replacement_named("kronecker"), KroneckerSpec(kernel="smreg", features=20)
    directions = array(kind.constants(kind.layout(spec, host))["directions"])
    np.testing.assert_allclose(np.linalg.norm(directions, axis=1), width**0.5, rtol=1e-5)
    first = directions[:width] @ directions[:width].T
    np.testing.assert_allclose(first, width * np.eye(width), atol=1e-4)


def test_axes_that_are_not_mixed_pass_values_through() -> None:
    host = BaseAttention(HEADS, HEADS, WIDTH, tokens=6, grid=(2, 3))
    kind, v = replacement_named("kronecker"), randn(1, HEADS, 6, WIDTH)
    none = kind.layout(KroneckerSpec(axes=()), host)
    assert kind.tensors(none) == {}
    assert torch.equal(kind.apply(v, v, v, {}, none, Visible())[0], v)
    whole = kind.layout(KroneckerSpec(axes=(0, 1), masks=("none", "none")), host)
    assert whole == kind.layout(KroneckerSpec(), host)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": (0, 2, 0, 2)}, "`axes` names `0`, `2` more than once: name each once"),
        ({"axes": (-1,)}, "greater than or equal to 0"),
        ({"masks": ("future",)}, "should match pattern"),
        ({"masks": ("window:0",)}, "should match pattern"),
    ],
)
def test_axes_and_masks_that_mean_nothing_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KroneckerSpec(**options)


@pytest.mark.parametrize(
    ("spec", "host", "reason"),
    [
        (KroneckerSpec(grid=(4, 4), fold=4), TEXT, "both given"),
        (KroneckerSpec(fold=4), BaseAttention(HEADS, HEADS, WIDTH, window=4), "sees only 4 others"),
        (
            KroneckerSpec(fold=4),
            BaseAttention(HEADS, HEADS, WIDTH, biased=True),
            "bias of positions",
        ),
        (TamSpec(), BaseAttention(3, 2, WIDTH), "do not share 2 heads"),
    ],
)
def test_hosts_that_do_not_suit_are_refused(
    spec: ReplacementSpec, host: BaseAttention, reason: str
) -> None:
    with pytest.raises(Refusal, match=reason):
        replacement_of(spec).layout(spec, host)


# ---------------------------------------------------------------- TAM and multilinear
@pytest.mark.parametrize("core", ["aligned", "cp"])
def test_a_pass_without_softmax_is_the_papers(core: Any) -> None:
    """The first text says the semantics, summed over its tokens; scores weigh values directly."""
    q, k, v = (randn(1, 1, 5, 3, seed=seed) for seed in range(3))
    g, weight, bias = randn(2, 1, 3, seed=3), randn(1, 3, 3, seed=4), randn(1, 3, seed=5)
    first = torch.tensor([[True, True, False, False, False]])
    valid = torch.tensor([[[[True, True, True, True, False]]]])
    tensors = {"core": g, "semantic_weight": weight, "semantic_bias": bias}
    sizes: dict[str, Any] = {"heads": 1, "key_heads": 1, "head_dim": 3, "cores": 2}
    layout = TamLayout(**sizes, core=core, normalize="none")
    found = replacement_named("tam").apply(q, k, v, tensors, layout, Visible(valid, first))[0]
    queries, keys = array(q[0, 0]), array(k[0, 0, :4])
    semantics = array(q[0, 0, :2] @ weight[0].T + bias[0])
    aligned = core == "aligned"
    parts = [
        tam.attention_tensor(
            queries, keys, semantics, tam.diagonal_core(one, 5 if aligned else 3, 3), aligned
        )
        for one in array(g[:, 0])
    ]
    expected = tam.fuse(tam.sum_cores(parts)) @ array(v[0, 0, :4])
    np.testing.assert_allclose(array(found[0, 0]), expected, **CLOSE)


@pytest.mark.parametrize("core", ["cp", "tucker"])
def test_converted_tam_starts_as_the_hosts_own_attention(core: Any) -> None:
    kind, spec = replacement_named("tam"), TamSpec(core=core)
    layout = kind.layout(spec, TEXT)
    values = kind.start(layout, torch.Generator().manual_seed(0), pretrained=True)
    q, k, v = (randn(2, HEADS, 6, WIDTH, seed=s) for s in range(3))
    own = {key: value.double() for key, value in values.items()}
    mixed = kind.apply(q, k, v, own, layout, Visible())[0]
    torch.testing.assert_close(mixed, sdpa(q, k, v), atol=0.02, rtol=0)


def test_a_small_tucker_core_loses_what_the_best_one_must() -> None:
    """E (q^T (I - P R^T) k)^2 comes to the squares of the smallest singular values."""
    kind, host = replacement_named("tam"), BaseAttention(HEADS, 1, WIDTH)
    layout = kind.layout(TamSpec(core="tucker", rank=2), host)
    q, k = randn(HEADS, 50, WIDTH), randn(1, 60, WIDTH, seed=1) * torch.tensor([3.0, 2, 1, 0.1])
    first = kind.start(layout, torch.Generator(), pretrained=True)
    found = kind.adapted(layout, QueryKeyMoments(q.mT @ q, k.mT @ k), first)
    for head in range(HEADS):
        scores = q[head] @ k[0].mT
        core = found["core"][0, head, ..., 0] * WIDTH  # where semantics say one
        low = q[head] @ found["factor_q"][head] @ core @ found["factor_k"][head].mT @ k[0].mT
        assert (core - core.diag().diag()).abs().max() == 0
        values = torch.linalg.svdvals(scores)[:2]  # those of W_q^T W_k, where there is no data
        torch.testing.assert_close(core.diag() / core[0, 0], values / values[0], rtol=1e-4, atol=0)
        least = torch.linalg.svdvals(scores)[2:].square().sum()
        torch.testing.assert_close((scores - low).square().sum(), least, rtol=1e-4, atol=0)
    assert kind.centres_keys(layout) is True
    assert kind.centres_keys(kind.layout(TamSpec(core="tucker"), host)) is None


def test_the_aligned_core_says_how_far_it_sees() -> None:
    kind = replacement_named("tam")
    for normalize, left in (("softmax", "see all tokens alike"), ("none", "get nothing")):
        spec = TamSpec.model_validate({"core": "aligned", "normalize": normalize})
        note = kind.note(kind.layout(spec, TEXT), None, pretrained=True)
        assert note.endswith(f"those after token {WIDTH} {left}")
        assert kind.note(kind.layout(spec, TEXT), WIDTH, pretrained=True) is None
    assert kind.note(kind.layout(TamSpec(), TEXT), None, pretrained=True) is None
