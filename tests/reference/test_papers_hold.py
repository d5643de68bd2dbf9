"""The reference has the properties that the papers state."""

import numpy as np
import pytest

from tests.reference import hot, lprod, tam, tga, tsa

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_l_product_has_an_algebra(rng: np.random.Generator) -> None:
    """Definitions 4 to 7 and Theorem 8, and backwards from the transform of footnote 3."""
    z = lprod.dct_matrix(3)
    a, b = rng.standard_normal((4, 2, 3)), rng.standard_normal((2, 5, 3))
    np.testing.assert_allclose(z @ z.T, np.eye(3), **TOLERANCE)
    np.testing.assert_allclose(lprod.l_product(lprod.l_identity(4, z), a, z), a, **TOLERANCE)
    left = lprod.l_transpose(lprod.l_product(a, b, z), z)
    right = lprod.l_product(lprod.l_transpose(b, z), lprod.l_transpose(a, z), z)
    np.testing.assert_allclose(left, right, **TOLERANCE)
    np.testing.assert_allclose(lprod.truncated_l_svd(a, 2, z), a, **TOLERANCE)


def test_l_product_readings_meet_where_the_paper_says_so(rng: np.random.Generator) -> None:
    """Remark 5 (p = 1 is the standard encoding); Theorem 16 is (3) for a linear sigma only."""
    standard = lprod.positions(3, 4, lprod.frequency_scales("linear", 1))[:, :, 0]
    angles = np.arange(1, 4)[:, None] / np.array([1.0, 100.0])
    expected = np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(3, 4)
    np.testing.assert_allclose(standard, expected, **TOLERANCE)
    z, x = lprod.dct_matrix(2), rng.standard_normal((3, 2, 2))
    shapes = {"w1": (2, 8, 2), "w2": (8, 2, 2), "b1": (8, 2), "b2": (2, 2)}
    weights = {name: rng.standard_normal(shape) for name, shape in shapes.items()}

    def both(sigma: lprod.Activation) -> list[np.ndarray]:
        domains = ("transform", "original")
        return [lprod.l_feed_forward(x, weights, sigma, z, domain) for domain in domains]

    np.testing.assert_allclose(*both(lambda h: 2.0 * h), **TOLERANCE)
    assert np.abs(np.subtract(*both(lprod.relu))).max() > 0.1


def test_l_product_counts_are_those_of_table_11() -> None:
    assert lprod.encoder_parameters(768, 4) == 28_351_488  # "28,352 K" in Table 13
    assert lprod.encoder_parameters(768, 4, 4) == 7_117_824  # "7,118 K"


def _hot_heads(rng: np.random.Generator, width: int, heads: int) -> list[dict[str, np.ndarray]]:
    size = width // heads
    return [
        {
            **{name: rng.standard_normal((width, size)) * 0.3 for name in "qkv"},
            "o": rng.standard_normal((size, width)),
        }
        for _ in range(heads)
    ]


def test_hot_never_needs_the_kronecker_product(rng: np.random.Generator) -> None:
    """Equation (9) is (8), for every axis or some; (6) as printed is not."""
    x, heads = rng.standard_normal((2, 3, 2, 4)), _hot_heads(rng, 4, 2)
    for axes in (None, (0, 2), ()):
        left = hot.attention(x, heads, axes=axes)
        np.testing.assert_allclose(left, hot.kronecker_attention(x, heads, axes=axes), **TOLERANCE)
    assert np.abs(hot.attention(x, heads) - hot.attention(x, heads, orientation="eq6")).max() > 0.1
    line = x[0, :, 0]
    np.testing.assert_allclose(
        hot.full_attention(line, heads), hot.attention(line, heads), **TOLERANCE
    )


def test_hot_linear_attention_never_needs_the_matrix(rng: np.random.Generator) -> None:
    """Equation (12) is (10) applied; SMREG is near the softmax."""
    q, k, v = (rng.standard_normal((n, d)) * 0.5 for n, d in ((3, 8), (3, 8), (3, 2)))
    w = hot.smreg_projection(512, 8, rng)

    def phi(x: np.ndarray) -> np.ndarray:
        return hot.smreg_features(x, w)

    s = hot.linear_factor(q, k, phi)
    np.testing.assert_allclose(hot.linear_apply(v, 1, phi(q), phi(k)), s @ v, **TOLERANCE)
    np.testing.assert_allclose(s, hot.factor(q, k), atol=0.1)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_rotary_scores_know_distances_only(rng: np.random.Generator, pairing: str) -> None:
    q, k = rng.standard_normal((2, 1, 6))
    rows = hot.rotate(np.repeat(q, 5, axis=0), pairing), hot.rotate(np.repeat(k, 5, 0), pairing)
    scores = rows[0] @ rows[1].T
    np.testing.assert_allclose(scores[1:, 1:], scores[:-1, :-1], **TOLERANCE)


def test_rotation_and_sum_over_other_axes_change_places(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4, 6))
    turned = hot.pool(hot.rotate_axis(x, 1), 1)
    np.testing.assert_allclose(turned, hot.rotate(hot.pool(x, 1)), **TOLERANCE)


def test_hot_shapes_are_those_of_the_appendix(rng: np.random.Generator) -> None:
    series = rng.standard_normal((96, 3))
    patches = hot.time_patches(series, rng.standard_normal((5, 4)), np.zeros(5))
    assert patches.shape == (3, 24, 5)
    assert hot.image_shape((28, 28, 28), 5) == (7, 7, 7, 5)
    image = rng.standard_normal((8, 8, 8, 1))
    assert hot.patches(image, rng.standard_normal((5, 4, 4, 4, 1)), np.zeros(5)).shape == (
        *hot.image_shape((8, 8, 8), 5),
    )


def test_tam_is_what_equation_4_says(rng: np.random.Generator) -> None:
    """The i of (4) is in the query alone; a diagonal core leaves late tokens without attention."""
    q, k, s = (rng.standard_normal((n, 3)) for n in (5, 4, 2))
    core = rng.standard_normal((5, 3, 3))
    expected = np.einsum("qi,qjl,kj,sl->qks", q, core, k, s)
    np.testing.assert_allclose(tam.attention_tensor(q, k, s, core), expected, **TOLERANCE)
    g = tam.core_weights(rng.standard_normal(3))
    short = tam.attention_tensor(q, k, s, tam.diagonal_core(g, 5, 3))
    expected = np.einsum("q,q,kq,sq->qks", q.sum(1)[:3], g, k, s)
    np.testing.assert_allclose(short[:3], expected, **TOLERANCE)
    assert not short[3:].any()
    free = tam.attention_tensor(q, k, s, tam.diagonal_core(g, 3, 3), aligned=False)
    np.testing.assert_allclose(free, np.einsum("qd,d,kd,sd->qks", q, g, k, s), **TOLERANCE)
    np.testing.assert_allclose(
        free, tam.attention_td(g, q, k, s), **TOLERANCE
    )  # not aligned is (1) with lengths of their own


def test_tam_memory_is_partitioned(rng: np.random.Generator) -> None:
    """The second stream does not know the first; with zero weights a GRU stays at zero."""
    shapes = {"w": (3, 2), "u": (3, 3)}
    weights = {a + b: rng.standard_normal(shapes[a]) for a in "wu" for b in "rzn"}
    first, second = rng.standard_normal((2, 4, 2))
    memory = tam.gru_memory([first, second], weights)
    assert memory.shape == (8, 3)
    np.testing.assert_allclose(memory[4:], tam.gru(second, weights), **TOLERANCE)
    whole = tam.gru(np.concatenate([first, second]), weights)
    assert np.abs(whole[4:] - memory[4:]).max() > 1e-3
    zero = {name: np.zeros_like(value) for name, value in weights.items()}
    assert not tam.gru(first, zero).any()


def _chains(rng: np.random.Generator, n: int) -> list[np.ndarray]:
    return [rng.standard_normal(shape) for shape in tsa.quantized_shapes(2**n, 2**n)]


@pytest.mark.parametrize("order", ["little", "big"])
def test_a_train_contracts_to_its_matrix(rng: np.random.Generator, order: str) -> None:
    """Equation (4) is (2) with (3), and 16 (N - 1) numbers are enough (end of 4.2)."""
    cores, x = _chains(rng, 3), rng.standard_normal((4, 8))
    y = tsa.matricize(tsa.tt_contract(tsa.tensorize(x, [2, 2, 2], order), cores), order)
    np.testing.assert_allclose(y, x @ tsa.tt_matrix(cores, order), **TOLERANCE)
    assert tsa.tt_parameters(cores) == 32


def test_spectral_filters_are_polynomials(rng: np.random.Generator) -> None:
    """Equation (1), and TGA's Algorithm 1 is TSA's."""
    x, chains = rng.standard_normal((5, 4)), (_chains(rng, 2), _chains(rng, 2))
    omega = tsa.bidirectional_graph(5, 0.7)
    psi = tsa.attention_graph(rng.standard_normal((5, 4)), omega)
    alpha = (0.5, 2.0, -0.3)
    left = tsa.spectral_filter(psi, x, alpha)
    np.testing.assert_allclose(left, tsa.polynomial_filter(psi, x, alpha), **TOLERANCE)
    spectral = tsa.attention(x, [chains, chains[::-1]], 0.7, order="big")
    np.testing.assert_allclose(spectral, tga.attention(x, [chains, chains[::-1]], 0.7), **TOLERANCE)
    little = tsa.head(x, *chains, omega, order="little")
    turned = [[core.transpose(3, 1, 2, 0) for core in chain[::-1]] for chain in chains]
    np.testing.assert_allclose(little, tsa.head(x, *turned, omega, order="big"), **TOLERANCE)
