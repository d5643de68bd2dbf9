"""The L-product transformer, from the text of its paper alone, in numpy and float64.

Paper: "Structured Multidimensional Representation Learning for Large Language Models"
(Elichi, Jbilou, El Guide, Dufrenois; arXiv:2603.05727v1). Numbers of equations, definitions,
theorems and remarks are the paper's. One sequence at a time (no batch); loops where the paper has
indices. Every tensor has the slice index last, (rows, columns, p), as the paper writes it.

Where the paper leaves a choice, an argument names the readings:

- *Positions of Definition 13* (`first`): "t = 1, ..., T" says that the first token is at 1; Remark
  5 says that p = 1 is the standard encoding, which begins at 0.
- *Learnable positions*: Section 5.4 trains the whole tensor P (T d numbers); Section 6 "Notation"
  trains alpha (p numbers). Table 9 counts 270 K - 254 K = 16 K = T d, so the experiments are the
  tensor. The tensor needs no function (it is added); alpha is an argument of `positions`.
- *Where sigma acts* (`activation_domain`): equation (3) has sigma between two L-products, that is
  on L^-1 of the first one; Theorem 16 has sigma on the slices in the transform domain and says it
  is the same, which it is for p = 1 and for linear sigma only. The paper's code is Theorem 16
  (Section 5.8, "what is implemented").
- *Where LayerNorm acts* (`norm_domain`): Definition 17, Definition 18 and Remarks 7 and 8 say the
  original domain; equation (13), Figure 5 and footnote 5 ("transformed once per encoder block") put
  whole compact layers, their LayerNorm among them, into the transform domain.
- *Biases of attention*: Section 5.5 has none. The counts of Table 11 have them: p (12 ds^2 + 13 ds)
  for each layer is 7,117,824 for p = 4, ds = 192, four layers, as printed ("7,118 K").
  `encoder_parameters` counts; at d = 128 and 256 the paper's own tables have 3 ds^2 + 3 ds more
  for each slice and layer and 2 ds more for each model, for which its equations have no term.
- *Weights*: Algorithm 1 transforms W; "Implementation details" trains W hat itself. All functions
  take W hat; `transform` makes one from the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Array = np.ndarray
Activation = Callable[[Array], Array]


# --------------------------------------------------------------------------- transform and product


def dct_matrix(p: int) -> Array:
    """Z of Definition 2 as footnote 3 has it: the orthonormal DCT-II, (p, p), Z Z^T = I."""
    z = np.zeros((p, p))
    for frequency in range(p):
        scale = math.sqrt((1.0 if frequency == 0 else 2.0) / p)
        for sample in range(p):
            z[frequency, sample] = scale * math.cos(
                math.pi * frequency * (2 * sample + 1) / (2 * p)
            )
    return z


def mode_product(tensor: Array, matrix: Array, mode: int) -> Array:
    """Definition 1: (A x_n X) with `mode` counted from 1; sum over i_n of a[..i_n..] x[j, i_n]."""
    moved = np.moveaxis(tensor, mode - 1, 0)
    result = np.zeros((matrix.shape[0], *moved.shape[1:]))
    for j in range(matrix.shape[0]):
        for i in range(matrix.shape[1]):
            result[j] += matrix[j, i] * moved[i]
    return np.moveaxis(result, 0, mode - 1)


def transform(tensor: Array, z: Array) -> Array:
    """Definition 2: L(A) = A x_3 Z."""
    return mode_product(tensor, z, 3)


def inverse_transform(tensor: Array, z: Array) -> Array:
    """Definition 2: L^-1(A) = A x_3 Z^-1."""
    return mode_product(tensor, np.linalg.inv(z), 3)


def facewise(a: Array, b: Array) -> Array:
    """Definition 3: C hat^(k) = A hat^(k) B hat^(k) for each slice k."""
    return np.stack([a[:, :, k] @ b[:, :, k] for k in range(a.shape[2])], axis=2)


def l_product(a: Array, b: Array, z: Array) -> Array:
    """Definition 4, equation (1): A *_L B = L^-1(L(A) facewise L(B))."""
    return inverse_transform(facewise(transform(a, z), transform(b, z)), z)


def l_identity(m: int, z: Array) -> Array:
    """Definition 5: the tensor whose transform has I_m in every slice."""
    return inverse_transform(np.repeat(np.eye(m)[:, :, None], z.shape[0], axis=2), z)


def l_transpose(a: Array, z: Array) -> Array:
    """Definition 6, real case: transpose each slice of the transform."""
    return inverse_transform(np.swapaxes(transform(a, z), 0, 1), z)


def l_svd(a: Array, z: Array) -> tuple[Array, Array, Array]:
    """Theorem 8, by Remark 2: (U, S, V) with A = U *_L S *_L V^T; S is f-diagonal."""
    hat = transform(a, z)
    m, n, p = a.shape
    u, s, v = np.zeros((m, m, p)), np.zeros((m, n, p)), np.zeros((n, n, p))
    for k in range(p):
        left, values, right = np.linalg.svd(hat[:, :, k])
        u[:, :, k], v[:, :, k] = left, right.T
        for i, value in enumerate(values):
            s[i, i, k] = value
    return inverse_transform(u, z), inverse_transform(s, z), inverse_transform(v, z)


def truncated_l_svd(a: Array, rank: int, z: Array) -> Array:
    """Section 4.4: A with its `rank` singular tubes of largest 2-norm."""
    u, s, v = l_svd(a, z)
    norms = [np.linalg.norm(s[i, i, :]) for i in range(min(a.shape[:2]))]
    kept = np.argsort(norms)[::-1][:rank]
    cut = np.zeros_like(s)
    for i in kept:
        cut[i, i, :] = s[i, i, :]
    return l_product(l_product(u, cut, z), l_transpose(v, z), z)


# ------------------------------------------------------------------------- tokens and positions


def fold(x: Array, p: int) -> Array:
    """Equation (2), Ten_p: X(t, (k-1) ds + j) to X(t, j, k); (T, d) to (T, d / p, p)."""
    length, width = x.shape
    if width % p:
        raise ValueError(f"the width {width} is no multiple of p = {p}")
    ds = width // p
    tensor = np.zeros((length, ds, p))
    for k in range(p):
        for j in range(ds):
            tensor[:, j, k] = x[:, k * ds + j]
    return tensor


def unfold(tensor: Array) -> Array:
    """Mat_p after equation (2): the slices side by side; (T, ds, p) to (T, ds p)."""
    return np.concatenate([tensor[:, :, k] for k in range(tensor.shape[2])], axis=1)


def frequency_scales(strategy: str, p: int) -> Array:
    """Remark 4 and Section 6 "Notation": alpha_k for k = 1, ..., p."""
    scales = {
        "standard": lambda k: 1.0,
        "linear": lambda k: k / p,
        "exponential": lambda k: 1.0 if p == 1 else 2.0 ** ((k - 1) / (p - 1)),
        "harmonic": lambda k: float(k),
    }
    return np.array([scales[strategy](k) for k in range(1, p + 1)])


def positions(length: int, ds: int, alpha: Array, first: int = 1) -> Array:
    """Definition 13: P, (T, ds, p); `first` is the position of the first token (see the module)."""
    table = np.zeros((length, ds, len(alpha)))
    for row in range(length):
        t = row + first
        for j in range(1, ds + 1):
            angle = t / 10000.0 ** (2 * ((j - 1) // 2) / ds)
            for k in range(len(alpha)):
                value = math.sin if j % 2 == 1 else math.cos
                table[row, j - 1, k] = value(angle * alpha[k])
    return table


# ------------------------------------------------------------------------------------- operators


def softmax(scores: Array) -> Array:
    """Definition 11: softmax of each row; -inf is a masked entry."""
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def causal_mask(length: int) -> Array:
    """The mask of "MHA^masked" in equation (6): token t sees u <= t; (T, T), True where seen."""
    return np.tril(np.ones((length, length), dtype=bool))


def relu(x: Array) -> Array:
    """ReLU, one of the two sigmas of Definition 15."""
    return np.maximum(x, 0.0)


def gelu(x: Array) -> Array:
    """GELU, the exact one (by erf), one of the two sigmas of Definition 15."""
    return np.vectorize(lambda v: 0.5 * v * (1.0 + math.erf(v / math.sqrt(2.0))))(x)


def _bias(weights: Mapping[str, Array], name: str, columns: int, p: int) -> Array:
    return weights.get(name, np.zeros((columns, p)))


def attention(
    hat: Array,
    weights: Mapping[str, Array],
    heads: int,
    *,
    context: Array | None = None,
    mask: Array | None = None,
) -> Array:
    """Section 5.5, lines 4 to 16 of Algorithm 1 (Algorithm 2 in full), in the transform domain.

    Arguments:
        hat: X hat of the queries, (T, ds, p).
        weights: W hat of `q`, `k`, `v`, `o`, each (ds, ds, p). Head j has the columns (j-1) dh to
            j dh of q, k and v, so that Definition 12's concatenation is the identity. Biases
            `bq`, `bk`, `bv`, `bo`, (ds, p), if any (see the module).
        heads: h, heads in each slice; dh = ds / h.
        context: X hat of keys and values, (U, ds, p); without it self-attention ("cross" in (7)).
        mask: (T, U), True where a token is seen; the same for each slice and head.
    """
    source = hat if context is None else context
    _, ds, p = hat.shape
    dh = ds // heads
    result = np.zeros_like(hat)
    for i in range(p):
        q = hat[:, :, i] @ weights["q"][:, :, i] + _bias(weights, "bq", ds, p)[:, i]
        k = source[:, :, i] @ weights["k"][:, :, i] + _bias(weights, "bk", ds, p)[:, i]
        v = source[:, :, i] @ weights["v"][:, :, i] + _bias(weights, "bv", ds, p)[:, i]
        outputs = []
        for j in range(heads):
            columns = slice(j * dh, (j + 1) * dh)
            scores = q[:, columns] @ k[:, columns].T / math.sqrt(dh)
            if mask is not None:
                scores = np.where(mask, scores, -np.inf)
            outputs.append(softmax(scores) @ v[:, columns])
        joined = np.concatenate(outputs, axis=1)
        result[:, :, i] = joined @ weights["o"][:, :, i] + _bias(weights, "bo", ds, p)[:, i]
    return result


def l_attention(
    x: Array,
    weights: Mapping[str, Array],
    heads: int,
    z: Array,
    *,
    context: Array | None = None,
    mask: Array | None = None,
) -> Array:
    """MHA_L of Section 5.5: L^-1(attention(L(X))), from and to the original domain."""
    there = None if context is None else transform(context, z)
    return inverse_transform(
        attention(transform(x, z), weights, heads, context=there, mask=mask), z
    )


def feed_forward(hat: Array, weights: Mapping[str, Array], sigma: Activation) -> Array:
    """Theorem 16: a standard feed-forward network for each slice, in the transform domain.

    `weights`: W hat of `w1`, (ds, dff, p), and `w2`, (dff, ds, p); `b1`, (dff, p); `b2`, (ds, p).
    """
    result = np.zeros_like(hat)
    for i in range(hat.shape[2]):
        hidden = sigma(hat[:, :, i] @ weights["w1"][:, :, i] + weights["b1"][:, i])
        result[:, :, i] = hidden @ weights["w2"][:, :, i] + weights["b2"][:, i]
    return result


def l_feed_forward(
    x: Array,
    weights: Mapping[str, Array],
    sigma: Activation,
    z: Array,
    activation_domain: str = "transform",
) -> Array:
    """Definition 15, from and to the original domain; weights and biases as in `feed_forward`.

    `activation_domain`: "transform" (Theorem 16) or "original" (equation (3) as it is written).
    """
    hat = transform(x, z)
    if activation_domain == "transform":
        return inverse_transform(feed_forward(hat, weights, sigma), z)
    hidden = facewise(hat, weights["w1"]) + weights["b1"][None]
    hidden = transform(sigma(inverse_transform(hidden, z)), z)
    return inverse_transform(facewise(hidden, weights["w2"]) + weights["b2"][None], z)


def layer_norm(x: Array, gamma: Array, beta: Array, epsilon: float = 1e-5) -> Array:
    """Definition 17, TLN: mean and variance over mode 2 for each token and slice; (T, ds, p).

    `gamma` and `beta` are (ds, p), one of each for every slice. Epsilon is not given in the paper.
    """
    result = np.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(x.shape[2]):
            row = x[t, :, k]
            mean = row.sum() / len(row)
            variance = ((row - mean) ** 2).sum() / len(row)
            result[t, :, k] = gamma[:, k] * (row - mean) / math.sqrt(variance + epsilon)
            result[t, :, k] += beta[:, k]
    return result


# ----------------------------------------------------------------------------------------- layers


def encoder_layer(
    x: Array,
    weights: Mapping[str, Mapping[str, Array]],
    heads: int,
    z: Array,
    *,
    sigma: Activation = gelu,
    mask: Array | None = None,
    epsilon: float = 1e-5,
    norm_domain: str = "original",
    activation_domain: str = "transform",
) -> Array:
    """Definition 18, equations (4) and (5): one encoder layer, post-norm; (T, ds, p) to the same.

    `weights`: groups `attention`, `feed_forward`, and `norm1`, `norm2` with `gamma` and `beta`.
    With `norm_domain="transform"` the layer is equation (13), p whole layers of width ds.
    """
    if norm_domain == "transform":
        hat = transform(x, z)
        inner = attention(hat, weights["attention"], heads, mask=mask)
        hat = layer_norm(hat + inner, **weights["norm1"], epsilon=epsilon)
        inner = feed_forward(hat, weights["feed_forward"], sigma)
        return inverse_transform(layer_norm(hat + inner, **weights["norm2"], epsilon=epsilon), z)
    inner = l_attention(x, weights["attention"], heads, z, mask=mask)
    x = layer_norm(x + inner, **weights["norm1"], epsilon=epsilon)  # (4)
    inner = l_feed_forward(x, weights["feed_forward"], sigma, z, activation_domain)
    return layer_norm(x + inner, **weights["norm2"], epsilon=epsilon)  # (5)


def decoder_layer(
    x: Array,
    encoded: Array | None,
    weights: Mapping[str, Mapping[str, Array]],
    heads: int,
    z: Array,
    *,
    sigma: Activation = gelu,
    mask: Array | None = None,
    encoded_mask: Array | None = None,
    epsilon: float = 1e-5,
    activation_domain: str = "transform",
) -> Array:
    """Definition 20, equations (6), (7) and (8): one decoder layer, post-norm.

    Arguments:
        x: The decoder stream, (Td, ds, p).
        encoded: The encoder stream, (Te, ds, p); None leaves (7) out ("decoder-only", Section 5.9).
        weights: Groups `attention`, `norm1`, `cross`, `norm2`, `feed_forward`, `norm3`.
        heads: Heads in each slice.
        z: The transform.
        sigma: The activation of the feed-forward network.
        mask: More to hide in self-attention than what comes later, (Td, Td), True where seen.
        encoded_mask: What cross-attention sees, (Td, Te).
        epsilon: Of the layer norms.
        activation_domain: As in `l_feed_forward`.
    """
    seen = causal_mask(x.shape[0])
    if mask is not None:
        seen = seen & mask
    inner = l_attention(x, weights["attention"], heads, z, mask=seen)
    x = layer_norm(x + inner, **weights["norm1"], epsilon=epsilon)  # (6)
    if encoded is not None:
        inner = l_attention(x, weights["cross"], heads, z, context=encoded, mask=encoded_mask)
        x = layer_norm(x + inner, **weights["norm2"], epsilon=epsilon)  # (7)
    inner = l_feed_forward(x, weights["feed_forward"], sigma, z, activation_domain)
    return layer_norm(x + inner, **weights["norm3"], epsilon=epsilon)  # (8)


def transformer(
    source: Array,
    target: Array,
    encoder: Sequence[Mapping[str, Mapping[str, Array]]],
    decoder: Sequence[Mapping[str, Mapping[str, Array]]],
    heads: int,
    z: Array,
    source_positions: Array,
    target_positions: Array,
    output: Array,
    *,
    sigma: Activation = gelu,
    epsilon: float = 1e-5,
) -> Array:
    """Section 5.10, equations (9) to (12): logits (Tt, V) of embedded tokens (T, d).

    `output` is W_out, (d, V), applied to the unfolded decoder stream.
    """
    p = z.shape[0]
    encoded = fold(source, p) + source_positions  # (9)
    for layer in encoder:
        encoded = encoder_layer(encoded, layer, heads, z, sigma=sigma, epsilon=epsilon)  # (10)
    decoded = fold(target, p) + target_positions  # (11)
    for layer in decoder:
        decoded = decoder_layer(decoded, encoded, layer, heads, z, sigma=sigma, epsilon=epsilon)
    return unfold(decoded) @ output  # after (12)


def encoder_parameters(d: int, layers: int, p: int = 1) -> int:
    """Count parameters of an encoder with dff = 4 d and every bias: p (12 ds^2 + 13 ds) a layer."""
    ds = d // p
    return layers * p * (12 * ds * ds + 13 * ds)
