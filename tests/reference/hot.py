"""Higher-order transformers (HOT), from the text of their paper alone, in numpy and float64.

Paper: "Higher Order Transformers: Efficient Attention Mechanism for Tensor Structured Data"
(anonymous, under double-blind review). Numbers of equations are the paper's. One example at a time:
a tensor (N1, ..., Nk, D), the features last.

Where the paper leaves a choice, an argument names the readings:

- *Orientation* (`orientation`): equations (4) and (6) multiply V_(k+1) S, which sums over the rows
  of S (over queries); equations (8), (9) and (11) multiply S V^T, which sums over keys, as (2)
  does. The softmax is of rows, so (9) is the attention ("eq9") and (6) lacks a transpose ("eq6").
- *Pooling* (`pooling`): "summation over all modes except the i-th and last one" ("sum"). With it
  scores of (7) grow with the square of the number of summed positions; "mean" divides, and is not
  in the paper.
- *Rotary positions* (appendix D: "only for the time axis" in forecasting, "for all three spatial
  dimensions" in images). `rotary_axes` names the axes. How several axes share a head is not said:
  "each" turns the pooled matrices of axis i by positions along i, over the whole head (before or
  after the sum is the same, for the sum runs over other axes); "split" cuts the head into one part
  for each rotary axis, turns each part of the unpooled tensors by the positions of its axis, then
  pools, so that sums along any axis are of turned vectors, axes without rotations among them (with
  one rotary axis the parts are one, and that is all that differs from "each"). The pairs of
  RoFormer (its equation (15)) are neighbours (1, 2), (3, 4), ...
  ("interleaved"); many programs pair i with i + d/2 ("half").
- *Feature map* (4.3 and appendix D): "SMReg from Performer". This paper has no formula. Performer
  (Choromanski et al. 2020, Lemma 1 and Section 4) has positive features
  phi(x) = exp(-|x|^2 / 2) / sqrt(m) * (exp(w_1 x), ..., exp(w_m x)) of softmax's kernel exp(x y),
  and SMREG replaces each w by sqrt(d) w / |w|. `smreg_projection` draws them (orthogonal in blocks,
  as Performer does, or independent), `smreg_features` applies them. Queries and keys are multiplied
  by D_H^(-1/4) first, so that the kernel is exp(q k / sqrt(D_H)) of (7). `symmetric` is Performer's
  other positive map, (exp(w x), exp(-w x)) / sqrt(2 m); `epsilon` and `stabilized` are what
  Performer's program adds (not in either text).
- *Order of attention* (Tables 3 and 4): axes without attention have the identity for S^(i).
- *Masks* ("independent attention masks on each axis", 5.3.3): one (N_i, N_i) mask for an axis.
  With the linear kernel only a causal mask or a mask of keys is possible; no formula is given.
- *Block* (`norm`): "shares the same arrangement with the Transformer encoder", so "post" as in
  Vaswani et al. 2017; "pre" is the usual alternative. The width of the feed-forward network and its
  activation are not given. Algorithm A of the appendix is an image, absent from our text.
- *Convolution encoder of images*: "multilayer 3D convolution with a total downsampling by a factor
  of 4"; the number of layers, kernels and activations are not given. `patches` has the shape that
  every reading has; for time series it is said in full (kernel and stride 4, one layer).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Array = np.ndarray


def softmax(scores: Array) -> Array:
    """Softmax of each row ("applied row-wise", after (2)); -inf is a masked entry."""
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def mode_product(tensor: Array, matrix: Array, mode: int) -> Array:
    """Definition 5: T x_n A, `mode` counted from 1; sum over j of T[.., j, ..] A[i_n, j]."""
    moved = np.moveaxis(tensor, mode - 1, 0)
    result = np.zeros((matrix.shape[0], *moved.shape[1:]))
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            result[i] += matrix[i, j] * moved[j]
    return np.moveaxis(result, 0, mode - 1)


# ------------------------------------------------------------------------------- rotary positions


def rotate(vectors: Array, pairing: str = "interleaved", base: float = 10000.0) -> Array:
    """RoFormer's equation (15) on rows: row n, (N, d), turned by n theta_i, positions from 0.

    theta_i = base^(-2 (i - 1) / d) for i = 1, ..., d / 2; `pairing` as the module says.
    """
    count, width = vectors.shape
    result = np.zeros_like(vectors)
    for n in range(count):
        for i in range(width // 2):
            angle = n * base ** (-2.0 * i / width)
            a, b = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + width // 2)
            result[n, a] = vectors[n, a] * math.cos(angle) - vectors[n, b] * math.sin(angle)
            result[n, b] = vectors[n, a] * math.sin(angle) + vectors[n, b] * math.cos(angle)
    return result


def rotate_axis(tensor: Array, axis: int, pairing: str = "interleaved") -> Array:
    """`rotate` every fibre pair of a tensor (N1, ..., Nk, d) by its index along `axis` (from 0)."""
    moved = np.moveaxis(tensor, axis, -2)
    result = np.zeros_like(moved)
    for index in np.ndindex(*moved.shape[:-2]):
        result[index] = rotate(moved[index], pairing)
    return np.moveaxis(result, -2, axis)


def rotate_split(tensor: Array, axes: Sequence[int], pairing: str = "interleaved") -> Array:
    """The reading "split": a part of the features for each of `axes`, turned along its axis."""
    part = tensor.shape[-1] // len(axes)
    if part % 2 or part * len(axes) != tensor.shape[-1]:
        raise ValueError(f"{tensor.shape[-1]} features do not make {len(axes)} even parts")
    result = np.zeros_like(tensor)
    for number, axis in enumerate(axes):
        columns = slice(number * part, (number + 1) * part)
        result[..., columns] = rotate_axis(tensor[..., columns], axis, pairing)
    return result


# ---------------------------------------------------------------------------------- kernel features


def smreg_projection(
    features: int, width: int, rng: np.random.Generator, orthogonal: bool = True
) -> Array:
    """Draw Performer's w_1, ..., w_m for SMREG: (m, d), each of length sqrt(d).

    With `orthogonal`, blocks of d rows are orthogonal (Performer, Section 3.2 "ORF").
    """
    rows: list[Array] = []
    while len(rows) < features:
        block = rng.standard_normal((width, width))
        if orthogonal:
            block = np.linalg.qr(block)[0].T
        rows.extend(block)
    w = np.array(rows[:features])
    return w * math.sqrt(width) / np.linalg.norm(w, axis=1, keepdims=True)


def smreg_features(
    x: Array,
    projection: Array,
    *,
    scaled: bool = True,
    symmetric: bool = False,
    epsilon: float = 0.0,
    stabilized: str | None = None,
) -> Array:
    """Phi of equation (10): positive features of softmax's kernel, (N, d) to (N, m).

    Arguments:
        x: Pooled queries or keys of one head.
        projection: w, (m, d), from `smreg_projection`.
        scaled: Multiply by d^(-1/4) first, for the temperature sqrt(D_H) of equation (7).
        symmetric: Performer's map with exp(w x) and exp(-w x), (N, 2 m).
        epsilon: Added to each feature before the factor 1 / sqrt(m) (Performer's program).
        stabilized: Subtract the largest exponent: of each row ("row", queries) or of all rows
            ("all", keys), as Performer's program does. Cancels in (10) if epsilon is 0.
    """
    if scaled:
        x = x * x.shape[-1] ** -0.25
    exponents = x @ projection.T
    if symmetric:
        exponents = np.concatenate([exponents, -exponents], axis=1)
    exponents = exponents - 0.5 * (x**2).sum(axis=1, keepdims=True)
    if stabilized == "row":
        exponents = exponents - exponents.max(axis=1, keepdims=True)
    elif stabilized == "all":
        exponents = exponents - exponents.max()
    return (np.exp(exponents) + epsilon) / math.sqrt(exponents.shape[1])


# --------------------------------------------------------------------------------------- attention


def pool(tensor: Array, axis: int, pooling: str = "sum") -> Array:
    """g_pool before equation (7): (N1, ..., Nk, d) to (N_i, d), `axis` counted from 0."""
    result = np.zeros((tensor.shape[axis], tensor.shape[-1]))
    moved = np.moveaxis(tensor, axis, 0)
    for n in range(moved.shape[0]):
        rows = moved[n].reshape(-1, tensor.shape[-1])
        for row in rows:
            result[n] += row
        if pooling == "mean":
            result[n] /= len(rows)
    return result


def factor(q: Array, k: Array, mask: Array | None = None) -> Array:
    """Equation (7): S^(i) of pooled q and k, (N_i, N_i); `mask` is True where a key is seen."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    return softmax(scores)


def linear_factor(
    q: Array,
    k: Array,
    query_features: Callable[[Array], Array],
    key_features: Callable[[Array], Array] | None = None,
    mask: Array | None = None,
) -> Array:
    """Equation (10), written out: Z^-1 phi(Q) phi(K)^T, (N_i, N_i).

    A `mask` is read as zero kernel values, which is what the linear forms (causal sums, keys left
    out) compute.
    """
    left = query_features(q)
    right = (key_features or query_features)(k)
    kernel = left @ right.T
    if mask is not None:
        kernel = np.where(mask, kernel, 0.0)
    return kernel / kernel.sum(axis=1, keepdims=True)


def linear_apply(v: Array, mode: int, q_features: Array, k_features: Array) -> Array:
    """Equations (11) and (12): V x_i phi(K)^T, x_i phi(Q), x_i Z^-1; no (N_i, N_i) matrix."""
    inner = mode_product(mode_product(v, k_features.T, mode), q_features, mode)
    total = k_features.sum(axis=0)
    z = np.array([row @ total for row in q_features])
    return mode_product(inner, np.diag(1.0 / z), mode)


def project(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The projections before equation (3): X x_(k+1) W^T, W (D, D_H); published without bias."""
    result = mode_product(x, weight.T, x.ndim)
    return result if bias is None else result + bias


def factors(
    q: Array,
    k: Array,
    *,
    axes: Sequence[int] | None = None,
    masks: Mapping[int, Array] | None = None,
    pooling: str = "sum",
    rotary_axes: Sequence[int] = (),
    rotary: str = "each",
    pairing: str = "interleaved",
    features: Callable[[Array], Array] | None = None,
    key_features: Callable[[Array], Array] | None = None,
) -> dict[int, Array]:
    """S^(i) of one head for each attended axis: equation (7), or (10) where `features` is given.

    Arguments:
        q: Queries, (N1, ..., Nk, D_H).
        k: Keys, the same shape.
        axes: The axes with attention (the "order"), all of them if not given; from 0.
        masks: For an axis a mask (N_i, N_i), True where a key is seen.
        pooling: "sum" (published) or "mean".
        rotary_axes: The axes with rotary positions.
        rotary: "each" or "split", see the module.
        pairing: "interleaved" or "half".
        features: Phi of queries (and of keys, if `key_features` is not given).
        key_features: Phi of keys, where stabilization makes it another one.
    """
    order = q.ndim - 1
    axes = range(order) if axes is None else axes
    if rotary == "split" and rotary_axes:
        q, k = (rotate_split(tensor, rotary_axes, pairing) for tensor in (q, k))
    result = {}
    for axis in axes:
        left, right = pool(q, axis, pooling), pool(k, axis, pooling)
        if rotary == "each" and axis in rotary_axes:
            left, right = rotate(left, pairing), rotate(right, pairing)
        mask = (masks or {}).get(axis)
        if features is None:
            result[axis] = factor(left, right, mask)
        else:
            result[axis] = linear_factor(left, right, features, key_features, mask)
    return result


def attention(
    x: Array,
    weights: Sequence[Mapping[str, Array]],
    *,
    orientation: str = "eq9",
    **how: object,
) -> Array:
    """Equations (6) to (9): Kronecker-factorised attention, (N1, ..., Nk, D) to the same.

    Arguments:
        x: The input.
        weights: For each head `q`, `k`, `v`, (D, D_H), and `o`, (D_H, D); biases `bq`, `bk`, `bv`,
            `bo` if any (none are published; `bo` of the first head alone should be set).
        orientation: "eq9" or "eq6", see the module.
        how: The keywords of `factors`.
    """
    result = np.zeros_like(x)
    for head in weights:
        q = project(x, head["q"], head.get("bq"))
        k = project(x, head["k"], head.get("bk"))
        v = project(x, head["v"], head.get("bv"))
        for axis, s in factors(q, k, **how).items():  # type: ignore[arg-type]
            v = mode_product(v, s if orientation == "eq9" else s.T, axis + 1)  # (9)
        result += project(v, head["o"], head.get("bo"))
    return result


def kronecker_attention(x: Array, weights: Sequence[Mapping[str, Array]], **how: object) -> Array:
    """Equation (8) as written: the Kronecker product formed, (prod N, prod N); the same result."""
    shape = x.shape
    result = np.zeros_like(x)
    for head in weights:
        q = project(x, head["q"], head.get("bq"))
        k = project(x, head["k"], head.get("bk"))
        v = project(x, head["v"], head.get("bv"))
        parts = factors(q, k, **how)  # type: ignore[arg-type]
        s = np.eye(1)
        for axis in range(x.ndim - 1):
            s = np.kron(s, parts.get(axis, np.eye(shape[axis])))
        mixed = s @ v.reshape(-1, v.shape[-1])
        result += project(mixed.reshape(*shape[:-1], -1), head["o"], head.get("bo"))
    return result


def full_attention(x: Array, weights: Sequence[Mapping[str, Array]]) -> Array:
    """Equations (3) and (4): attention over all positions as one axis, the paper's comparison."""
    shape = x.shape
    flat = x.reshape(-1, shape[-1])
    return attention(flat, weights).reshape(shape)


# ------------------------------------------------------------------------------- block and patches


def layer_norm(x: Array, gamma: Array, beta: Array, epsilon: float = 1e-5) -> Array:
    """Layer normalisation over the features (of the transformer encoder; no number)."""
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return gamma * (x - mean) / np.sqrt(variance + epsilon) + beta


def block(
    x: Array,
    weights: Mapping[str, object],
    sigma: Callable[[Array], Array],
    *,
    norm: str = "post",
    epsilon: float = 1e-5,
    **how: object,
) -> Array:
    """Figure 1: attention and feed-forward network with residuals and norms.

    `weights`: `heads` (as in `attention`), `norm1` and `norm2` with `gamma` and `beta`, and `w1`,
    (D, F), `b1`, `w2`, (F, D), `b2`.
    """

    def feed(y: Array) -> Array:
        return sigma(y @ weights["w1"] + weights["b1"]) @ weights["w2"] + weights["b2"]

    norm1 = dict(weights["norm1"], epsilon=epsilon)  # type: ignore[call-overload]
    norm2 = dict(weights["norm2"], epsilon=epsilon)  # type: ignore[call-overload]
    if norm == "post":
        x = layer_norm(x + attention(x, weights["heads"], **how), **norm1)  # type: ignore[arg-type]
        return layer_norm(x + feed(x), **norm2)
    x = x + attention(layer_norm(x, **norm1), weights["heads"], **how)  # type: ignore[arg-type]
    return x + feed(layer_norm(x, **norm2))


def time_patches(series: Array, weight: Array, bias: Array) -> Array:
    """Appendix D: a 1D convolution along time, kernel and stride 4; (T, N) to (N, T / 4, D).

    Each variate is convolved alone ("dividing the input timeseries into patches of size 4 and
    applying a linear projection"). `weight` is (D, 4). A rest of the length is dropped, as a
    convolution without padding does.
    """
    length, variates = series.shape
    size = weight.shape[1]
    result = np.zeros((variates, length // size, weight.shape[0]))
    for n in range(variates):
        for patch in range(length // size):
            window = series[patch * size : (patch + 1) * size, n]
            result[n, patch] = weight @ window + bias
    return result


def image_shape(sizes: Sequence[int], width: int, downsampling: int = 4) -> tuple[int, ...]:
    """Appendix D: the shape after the convolution encoder of images; 28^3 gives (7, 7, 7, D)."""
    return (*(size // downsampling for size in sizes), width)


def patches(image: Array, weight: Array, bias: Array, size: int = 4) -> Array:
    """A convolution with kernel and stride `size` on every axis: (S1, ..., Sk, C) to (.., D).

    `weight` is (D, size, ..., size, C). One layer of the encoder of images; with size 4 all of it.
    """
    counts = tuple(length // size for length in image.shape[:-1])
    result = np.zeros((*counts, weight.shape[0]))
    for index in np.ndindex(*counts):
        window = image[tuple(slice(i * size, (i + 1) * size) for i in index)]
        result[index] = weight.reshape(weight.shape[0], -1) @ window.reshape(-1) + bias
    return result


def classify(x: Array, pooling: str, weight: Array, bias: Array) -> Array:
    """Appendix D: "pooled ... by either taking the average or flattening", then a linear layer.

    "The final MLP" has no depth in the paper; this is its last layer, `weight` (C, features).
    """
    features = x.reshape(-1, x.shape[-1]).mean(axis=0) if pooling == "average" else x.reshape(-1)
    return weight @ features + bias
