"""Tensorized spectral attention (TSA), from the text of its paper alone, in numpy and float64.

Paper: "A Tensorized Spectral Attention Mechanism for Efficient Natural Language Processing" (Xu,
Konstantinidis, Li, Mandic). Numbers of equations, remarks and sections are the paper's. One
sequence at a time, (L, I).

Where the paper leaves a choice, an argument names the readings:

- *Scale* (`scale`): our text prints "rho 1/d_k" where a root sign is lost; the sister paper (TGA)
  has 1 / sqrt(d_k): "root". "plain" is 1 / d_k, as the text's algorithm prints. d_k is not defined;
  it is taken as J, the length of a key of one head.
- *Order of tensorization* (`order`): section 2.1 announces the little-endian convention (the first
  index fastest, Fortran's), and defines a Kronecker index in which the last is fastest. "little" or
  "big"; one is the other with the modes, and so the cores, in opposite order.
- *The graph* (`graph`): 3.1 prints Psi = Omega Theta; Figure 1 and Algorithm 1 have the Hadamard
  product, and only that one is symmetric, which 3.2 needs.
- *Heads*: "repeated for H different heads" with "a set of attention filters" (end of 3.2, 5): each
  head has chains of its own for keys and for values (Algorithm 1 initializes both, and is what is
  repeated). How heads are joined is "combined together": `combine` is "concat" (2.3, of classical
  attention), "sum" or "mean". A matrix after it (`output`) is not in the paper.
- *Filter* (`alpha`): equation (1) is a polynomial of Psi; the method is alpha = (1, 1), "K = 2".
- *Baselines* (6): "Luong-style Dot-Product Attention" and "Bahdanau-style Additive Attention" have
  names only. 2.3 writes the first (with the scale; Luong's has none: "none"). The second, from
  Bahdanau et al. 2015: e_ij = v^T tanh(W q_i + U k_j), then a softmax over j.
- *Masks* of padding are not in the paper; a masked token here has no edges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

Array = np.ndarray


def softmax(scores: Array) -> Array:
    """Softmax of each row; -inf is a masked entry."""
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


# ------------------------------------------------------------------------------------ tensor trains


def tensorize(x: Array, modes: Sequence[int], order: str = "little") -> Array:
    """Ten() of 2.1: (L, I) to (L, I_1, ..., I_N)."""
    return np.stack([row.reshape(modes, order="F" if order == "little" else "C") for row in x])


def matricize(x: Array, order: str = "little") -> Array:
    """Mat() of Algorithm 1: (L, J_1, ..., J_N) to (L, J)."""
    return np.stack([row.reshape(-1, order="F" if order == "little" else "C") for row in x])


def tt_contract(x: Array, cores: Sequence[Array]) -> Array:
    """Equation (4): X x_2^2 G_1 x_{2,N+3}^{2,1} G_2 ..., (L, I_1..I_N) to (L, J_1..J_N).

    `cores`: G_n, (R_{n-1}, I_n, J_n, R_n), R_0 = R_N = 1. Modes are counted from 1, as written.
    """
    y = np.tensordot(x, cores[0], axes=([1], [1]))  # (L, I_2..I_N, R_0, J_1, R_1)
    last = y.ndim - 1  # the mode N + 3
    for core in cores[1:]:
        y = np.tensordot(y, core, axes=([1, last], [1, 0]))  # (L, I_3.., R_0, J_1, J_2, R_2)
    return y.reshape(x.shape[0], *(core.shape[2] for core in cores))


def tt_matrix(cores: Sequence[Array], order: str = "little") -> Array:
    """Equation (3): the matrix W, (I, J), that the cores stand for; every entry a product."""
    ins, outs = [core.shape[1] for core in cores], [core.shape[2] for core in cores]
    layout = "F" if order == "little" else "C"
    w = np.zeros((math.prod(ins), math.prod(outs)))
    for row in range(w.shape[0]):
        i = np.unravel_index(row, ins, order=layout)
        for column in range(w.shape[1]):
            j = np.unravel_index(column, outs, order=layout)
            product = np.eye(1)
            for n, core in enumerate(cores):
                product = product @ core[:, i[n], j[n], :]
            w[row, column] = product[0, 0]
    return w


def tt_parameters(cores: Sequence[Array]) -> int:
    """Remark 6: the sum of R_{n-1} I_n J_n R_n; 16 (N - 1) for the quantized train."""
    return sum(core.size for core in cores)


def quantized_shapes(width_in: int, width_out: int, rank: int = 2) -> list[tuple[int, ...]]:
    """QTTD (end of 4.2): cores of I_n = J_n = 2 and rank 2, for I = J a power of 2."""
    n = int(math.log2(width_in))
    if 2**n != width_in or width_in != width_out:
        raise ValueError(f"{width_in} x {width_out} is no square with a power of 2")
    ranks = [1] + [rank] * (n - 1) + [1]
    return [(ranks[i], 2, 2, ranks[i + 1]) for i in range(n)]


# ------------------------------------------------------------------------------- graphs and filters


def time_graph(length: int, damping: float) -> Array:
    """2.4: A, upper triangular, a = c^(l2 - l1) for l2 > l1; (L, L), c < 1."""
    a = np.zeros((length, length))
    for l1 in range(length):
        for l2 in range(l1 + 1, length):
            a[l1, l2] = damping ** (l2 - l1)
    return a


def bidirectional_graph(length: int, damping: float) -> Array:
    """2.4: Omega = (A^T + A) / 2."""
    a = time_graph(length, damping)
    return 0.5 * (a.T + a)


def coefficients(keys: Array, scale: str = "root") -> Array:
    """3.1: theta = relu(scale k_l1 k_l2), 0 where l1 = l2; of keys (L, J), (L, L)."""
    d_k = keys.shape[1]
    factor = {"root": 1.0 / math.sqrt(d_k), "plain": 1.0 / d_k, "none": 1.0}[scale]
    theta = np.zeros((keys.shape[0], keys.shape[0]))
    for l1 in range(len(keys)):
        for l2 in range(len(keys)):
            if l1 != l2:
                theta[l1, l2] = max(0.0, factor * float(keys[l1] @ keys[l2]))
    return theta


def attention_graph(
    keys: Array,
    omega: Array,
    scale: str = "root",
    graph: str = "hadamard",
    mask: Array | None = None,
) -> Array:
    """3.1 and Algorithm 1: Psi = Omega * Theta (or their matrix product, as 3.1 prints it).

    `mask`: (L,), True for a token; the others lose their edges.
    """
    theta = coefficients(keys, scale)
    if mask is not None:
        theta = theta * mask[:, None] * mask[None, :]
    return omega * theta if graph == "hadamard" else omega @ theta


def spectral_filter(psi: Array, values: Array, alpha: Sequence[float] = (1.0, 1.0)) -> Array:
    """Equation (1): Phi f_alpha(Lambda) Phi^T x by the eigendecomposition of Psi, for each column.

    With alpha = (1, 1) it is (I + Psi) x, the filter of the method.
    """
    eigenvalues, phi = np.linalg.eigh(psi)
    gamma = sum(a * eigenvalues**k for k, a in enumerate(alpha))
    return phi @ (gamma[:, None] * (phi.T @ values))


def polynomial_filter(psi: Array, values: Array, alpha: Sequence[float] = (1.0, 1.0)) -> Array:
    """Equation (1), last line: f_alpha(Psi) x by powers of Psi."""
    result, power = np.zeros_like(values), np.eye(psi.shape[0])
    for a in alpha:
        result += a * (power @ values)
        power = power @ psi
    return result


# --------------------------------------------------------------------------------------- attention


def head(
    x: Array,
    key_cores: Sequence[Array],
    value_cores: Sequence[Array],
    omega: Array,
    *,
    scale: str = "root",
    order: str = "little",
    graph: str = "hadamard",
    alpha: Sequence[float] = (1.0, 1.0),
    mask: Array | None = None,
) -> Array:
    """Algorithm 1, one head: (L, I) to (L, J), with the chains of this head."""
    tensor = tensorize(x, [core.shape[1] for core in key_cores], order)
    keys = matricize(tt_contract(tensor, key_cores), order)
    tensor = tensorize(x, [core.shape[1] for core in value_cores], order)
    values = matricize(tt_contract(tensor, value_cores), order)
    psi = attention_graph(keys, omega, scale, graph, mask)
    return polynomial_filter(psi, values, alpha)


def combine_heads(
    outputs: Sequence[Array], combine: str = "concat", output: Array | None = None
) -> Array:
    """Join heads: "concat", "sum" or "mean"; then a matrix (columns, d) if one is given."""
    joined = np.concatenate(outputs, axis=1) if combine == "concat" else sum(outputs)
    if combine == "mean":
        joined = joined / len(outputs)
    return joined if output is None else joined @ output


def attention(
    x: Array,
    heads: Sequence[tuple[Sequence[Array], Sequence[Array]]],
    damping: float,
    *,
    combine: str = "concat",
    output: Array | None = None,
    **how: object,
) -> Array:
    """Algorithm 1 "repeated for H different heads"; `heads`: (key cores, value cores) of each."""
    omega = bidirectional_graph(x.shape[0], damping)
    outputs = [head(x, keys, values, omega, **how) for keys, values in heads]  # type: ignore[arg-type]
    return combine_heads(outputs, combine, output)


def dot_product(
    x: Array, weights: Mapping[str, Array], scale: str = "root", mask: Array | None = None
) -> Array:
    """2.3, the baseline DPA, one head: softmax(scale Q K^T) V; `weights` `q`, `k`, `v`, (I, J)."""
    q, k, v = x @ weights["q"], x @ weights["k"], x @ weights["v"]
    factor = {"root": k.shape[1] ** -0.5, "plain": 1.0 / k.shape[1], "none": 1.0}[scale]
    scores = factor * (q @ k.T)
    if mask is not None:
        scores = np.where(mask[None, :], scores, -np.inf)
    return softmax(scores) @ v


def additive(x: Array, weights: Mapping[str, Array], mask: Array | None = None) -> Array:
    """The baseline ADA, one head: e_ij = v^T tanh(q_i + k_j + b), softmax over j, times values.

    `weights`: `q`, `k`, `v`, (I, J), `scale`, (J,), which is Bahdanau's v_a, and `bias`, (J,), if
    any. Bahdanau's W_a and U_a are the projections `q` and `k`.
    """
    q, k, v = x @ weights["q"], x @ weights["k"], x @ weights["v"]
    scores = np.zeros((len(x), len(x)))
    for i in range(len(x)):
        for j in range(len(x)):
            inner = np.tanh(q[i] + k[j] + weights.get("bias", 0.0))
            scores[i, j] = float(weights["scale"] @ inner)
    if mask is not None:
        scores = np.where(mask[None, :], scores, -np.inf)
    return softmax(scores) @ v


def classify(y: Array, weights: Mapping[str, Array], mask: Array | None = None) -> Array:
    """Section 6, layers (iii) to (vii) without drop-out: probabilities of classes.

    `weights`: `w1`, (J, 20), `b1`, `w2`, (20, classes), `b2`. The mean is over all tokens; over
    those of `mask` if it is given (the paper's sequences are padded to 200, it does not say).
    """
    pooled = y.mean(axis=0) if mask is None else y[mask].mean(axis=0)
    hidden = np.maximum(pooled @ weights["w1"] + weights["b1"], 0.0)
    return softmax(hidden @ weights["w2"] + weights["b2"])
