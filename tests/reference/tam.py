"""The tensorized attention model (TAM), from the text of its paper alone, in numpy and float64.

Paper: "Tensorized Attention Model" (anonymous, under double-blind review). Numbers of equations are
the paper's. One example at a time: query (Q, d), memory (M, d), semantics (S, d).

Where the paper leaves a choice, an argument names the readings:

- *Alignment* (`aligned`): TAM's core is (Q, D, D), its first index the position of the query
  (equation (4)); "w/o query aligned" (5.5) "shares the TAM method but with a core tensor size of
  D x D x D". That is all that it changes: neither text speaks of a softmax there.
- *Softmax of the scores* (`softmax`): equations (4), (6), (7) and the sentence O = Add&Norm(A V, Q)
  have none; the only softmax of the paper is the one that makes the core's weights g (after (2)).
  So "none" is published; "keys" (each row of A over the keys, as in a transformer) is a reading
  that Figure 1 (absent from our text) may or may not show.
- *Equation (4) to the letter*: i occurs in Q alone, so A_qks = (sum_i Q_qi) sum_jl G_qjl K_kj S_sl.
  The query acts by the sum of its features, and by its position. With the core of (5), diagonal,
  A_qks = (sum_i Q_qi) g_q K_kq S_sq for q <= D, and 0 for tokens after D: the last Q - D tokens of
  a query longer than D see nothing.
- *The core* (`core`): "a D-length trainable weight vector g primarily on its diagonal ... is
  initialized as" (5). Trainable are g (a diagonal core, `diagonal_core`) or the whole core that
  begins there; functions take a whole core, so both are covered. Whether g stays a softmax of free
  numbers ("computed along its diagonal using the softmax function", of (2)) or is free after a
  start with sum 1 is left: `core_weights` makes the first.
- *Cores* (`sum_cores`): equation (7) runs n from 1 to N - 1 and adds Delta^n to A^n, where A^1 is
  not defined; 4.3 says "averages them". "mean" is the mean over N cores, A^1 = 0 and n to N;
  "literal" has A^1 = Delta^1, so that the first core counts twice and the last one never.
- *Projections*: W^q, W^k, W^v, W^s (Figure 1 by 4.1). Values come from memory, as keys do. The
  width D of Q, K, V, S (192, 160) differs from the model's (768), so "Add&Norm ... through a dense
  network" needs a matrix from D to d (`dense`); a bias is not said.
- *Without semantic fusing* (5.5): split&concat makes (Q, S K) of the attention tensor and a linear
  layer makes (Q, d) of it (4.2). Values are then not used. `split` says whether the columns of one
  semantic token ("semantics") or of one key ("keys") stand together; 3.2 splits "along the V-axis".
- *Memory* (5.1, A.2): "applying GRU (Cho et al., 2014) to the word embedding streams in both";
  "partitioning the GRU streams before concatenation": each stream starts from a zero state, the
  states are joined along the tokens. One GRU for both streams or two is not said (`gru_memory`
  takes one or two). This paper has no equations of the GRU; `gru` has those of Cho et al. (2014).
- *Masks* of padding are not in the paper: `key_mask` and `semantic_mask` leave tokens out of the
  sums, which without a softmax is the same as a zero vector.
- *Scaling* by 1 / sqrt(D) is not in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

Array = np.ndarray


def row_softmax(scores: Array) -> Array:
    """Softmax over the last mode; -inf is a masked entry."""
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    """The logistic function."""
    return 1.0 / (1.0 + np.exp(-x))


# --------------------------------------------------------------- Tensorized Transformer (baseline)


def attention_td(g: Array, q: Array, k: Array, v: Array, reading: str = "columns") -> Array:
    """Equations (1) and (2): sum_r g_r of outer products, the core diagonal with `g`.

    "columns": column r of (N, d) matrices, an (N, N, N) tensor, rank up to d (the source, Ma et al.
    2019, and the weights "among the query, key, and value" that the text speaks of). "rows": row r
    as (1) writes Q_{q,:}, a (d, d, d) tensor, rank N.
    """
    if reading == "rows":
        q, k, v = q.T, k.T, v.T
    result = np.zeros((q.shape[0], k.shape[0], v.shape[0]))
    for r, weight in enumerate(g):
        for a in range(q.shape[0]):
            for b in range(k.shape[0]):
                result[a, b] += weight * q[a, r] * k[b, r] * v[:, r]
    return result


def split_concat(tensor: Array, split: str = "semantics") -> Array:
    """SplitConcat of (3) and 4.2: (Q, K, S) cut along one mode, the slices side by side, (Q, S K).

    "semantics": S slices (Q, K), column s K + k; "keys": K slices (Q, S), column k S + s.
    """
    if split == "semantics":
        return np.concatenate([tensor[:, :, s] for s in range(tensor.shape[2])], axis=1)
    return np.concatenate([tensor[:, k, :] for k in range(tensor.shape[1])], axis=1)


# -------------------------------------------------------------------------- multi-object attention


def core_weights(raw: Array) -> Array:
    """The weights g after (2) and in (5): a softmax of free numbers, so that their sum is 1."""
    return row_softmax(raw)


def diagonal_core(g: Array, first: int, width: int) -> Array:
    """Equation (5): G_ddd = g_d, else 0; (first, width, width), `first` is Q, or D if not aligned.

    g has min(Q, D) entries: "If D < Q, then the element where D < q becomes zero. If D >= Q, the
    length of g becomes equal to the length of Q."
    """
    core = np.zeros((first, width, width))
    for d, weight in enumerate(g[: min(first, width)]):
        core[d, d, d] = weight
    return core


def attention_tensor(q: Array, k: Array, s: Array, core: Array, aligned: bool = True) -> Array:
    """Equation (4): attention of query, key and semantic tokens, (Q, K, S).

    Arguments:
        q: Projected queries, (Q, D).
        k: Projected keys, (K, D).
        s: Projected semantics, (S, D).
        core: (Q, D, D), or (D, D, D) where it is not aligned.
        aligned: With the query's position as the core's first index (TAM), or "w/o query aligned".
    """
    result = np.zeros((q.shape[0], k.shape[0], s.shape[0]))
    width = q.shape[1]
    for a in range(q.shape[0]):
        for i in range(width):
            mixed = core[a] if aligned else core[i]  # (j, l)
            for b in range(k.shape[0]):
                for c in range(s.shape[0]):
                    result[a, b, c] += q[a, i] * (k[b] @ mixed @ s[c])
    return result


def fuse(tensor: Array) -> Array:
    """Semantic fusing of (6): the sum along the semantics, (Q, K, S) to (Q, K)."""
    result = np.zeros(tensor.shape[:2])
    for s in range(tensor.shape[2]):
        result += tensor[:, :, s]
    return result


def sum_cores(parts: Sequence[Array], reading: str = "mean") -> Array:
    """Equation (7): join what N cores give, by the readings "mean" or "literal" of the module."""
    total = np.zeros_like(parts[0]) if reading == "mean" else parts[0].copy()
    for part in parts if reading == "mean" else parts[:-1]:
        total = total + part
    return total / len(parts)


def attention(
    query: Array,
    memory: Array,
    semantics: Array,
    weights: Mapping[str, Array],
    cores: Sequence[Array],
    *,
    aligned: bool = True,
    fused: bool = True,
    softmax: str = "none",
    reading: str = "mean",
    split: str = "semantics",
    key_mask: Array | None = None,
    semantic_mask: Array | None = None,
) -> Array:
    """Section 4.1 to 4.3 up to Add&Norm: equations (4), (6), (7) and A V; (Q, D) or (Q, d).

    Arguments:
        query: (Q, d).
        memory: (M, d), of keys and values.
        semantics: (S, d).
        weights: W^q, W^k, W^v, W^s as `q`, `k`, `v`, `s`, (d, D); biases `bq`, `bk`, `bv`, `bs` if
            any. `o`, (S M, d), of split&concat, if not `fused`.
        cores: N cores, as in `attention_tensor`.
        aligned: As in `attention_tensor`.
        fused: TAM, or "w/o semantic fusing".
        softmax: "none" (published) or "keys".
        reading: Of equation (7).
        split: Of split&concat.
        key_mask: (M,), True for a token.
        semantic_mask: (S,), True for a token.
    """

    def project(x: Array, name: str) -> Array:
        return x @ weights[name] + weights.get("b" + name, 0.0)

    q, k, v = project(query, "q"), project(memory, "k"), project(memory, "v")
    s = project(semantics, "s")
    parts = [attention_tensor(q, k, s, core, aligned) for core in cores]
    tensor = sum_cores(parts, reading)
    if semantic_mask is not None:
        tensor = np.where(semantic_mask[None, None, :], tensor, 0.0)
    if key_mask is not None and softmax == "none":
        tensor = np.where(key_mask[None, :, None], tensor, 0.0)
    if not fused:
        return split_concat(tensor, split) @ weights["o"]
    scores = fuse(tensor)
    if softmax == "keys":
        if key_mask is not None:
            scores = np.where(key_mask[None, :], scores, -np.inf)
        scores = row_softmax(scores)
    return scores @ v


def attention_map(
    query: Array,
    memory: Array,
    semantics: Array,
    weights: Mapping[str, Array],
    cores: Sequence[Array],
    semantic: int | None = None,
    aligned: bool = True,
) -> Array:
    """Appendix A.1, Figure 2: the q x k matrix of one semantic token (a), or summed (b)."""
    q, k, s = (
        x @ weights[name] + weights.get("b" + name, 0.0)
        for x, name in ((query, "q"), (memory, "k"), (semantics, "s"))
    )
    tensor = sum_cores([attention_tensor(q, k, s, core, aligned) for core in cores])
    return fuse(tensor) if semantic is None else tensor[:, :, semantic]


# ------------------------------------------------------------------------------- layer and memory


def layer_norm(x: Array, gamma: Array, beta: Array, epsilon: float = 1e-12) -> Array:
    """The normalisation of "Add&Norm" (Vaswani et al.; no number); epsilon as BERT has it."""
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return gamma * (x - mean) / np.sqrt(variance + epsilon) + beta


def add_and_norm(
    mixed: Array,
    query: Array,
    norm: Mapping[str, Array],
    dense: Array | None = None,
    bias: Array | None = None,
    epsilon: float = 1e-12,
) -> Array:
    """O = Add&Norm(A V, Q), after (6), "through a dense network": LN(A V W + b + query)."""
    if dense is not None:
        mixed = mixed @ dense
    if bias is not None:
        mixed = mixed + bias
    return layer_norm(mixed + query, norm["gamma"], norm["beta"], epsilon)


def gru(
    x: Array,
    weights: Mapping[str, Array],
    *,
    reset: str = "before",
    update: str = "keep",
) -> Array:
    """The GRU of Cho et al. 2014 (Learning Phrase Representations, (5) to (8)); (T, d) to (T, h).

    r = sigma(W_r x + U_r h), z = sigma(W_z x + U_z h), n = tanh(W x + U (r * h)),
    h' = z * h + (1 - z) * n, from h = 0.

    Arguments:
        x: The stream of embeddings.
        weights: `wr`, `wz`, `wn`, (h, d), `ur`, `uz`, `un`, (h, h); biases `br`, `bz`, `bn`, and
            `cn` (of U h; only where `reset` is "after"), if any.
        reset: r before the product, U (r * h) (Cho et al.), or after it, r * (U h + c) (cuDNN and
            the libraries built on it).
        update: z keeps the old state (Cho et al.), or "replace": h' = (1 - z) * h + z * n.
    """
    states = np.zeros((x.shape[0], weights["ur"].shape[0]))
    h = np.zeros(states.shape[1])
    for t, row in enumerate(x):
        r = sigmoid(weights["wr"] @ row + weights["ur"] @ h + weights.get("br", 0.0))
        z = sigmoid(weights["wz"] @ row + weights["uz"] @ h + weights.get("bz", 0.0))
        if reset == "before":
            inner = weights["un"] @ (r * h)
        else:
            inner = r * (weights["un"] @ h + weights.get("cn", 0.0))
        n = np.tanh(weights["wn"] @ row + inner + weights.get("bn", 0.0))
        h = z * h + (1.0 - z) * n if update == "keep" else (1.0 - z) * h + z * n
        states[t] = h
    return states


def gru_memory(
    streams: Sequence[Array],
    weights: Mapping[str, Array] | Sequence[Mapping[str, Array]],
    **how: str,
) -> Array:
    """Section 5.1: memory of partitioned streams, each from a zero state, joined along the tokens.

    `weights`: of one GRU for all streams, or one for each.
    """
    each = [weights] * len(streams) if isinstance(weights, Mapping) else weights
    return np.concatenate([gru(x, w, **how) for x, w in zip(streams, each, strict=True)])


def encoder_layer(
    query: Array,
    memory: Array,
    semantics: Array,
    weights: Mapping[str, object],
    cores: Sequence[Array],
    **how: object,
) -> Array:
    """Section 4.1: a BERT layer with TAM in place of its attention; (Q, d) to (Q, d).

    `weights`: `attention` (as in `attention`), `dense`, (D, d), and `bias` if any, `norm1`, `norm2`
    with `gamma` and `beta`, `w1`, (d, F), `b1`, `w2`, (F, d), `b2`, of BERT's feed-forward network.
    Memory and semantics are the same in each layer of a stack, the output is the next query: the
    paper draws one layer and does not say it.
    """
    mixed = attention(query, memory, semantics, weights["attention"], cores, **how)  # type: ignore[arg-type]
    x = add_and_norm(mixed, query, weights["norm1"], weights.get("dense"), weights.get("bias"))  # type: ignore[arg-type]
    gelu = np.vectorize(lambda u: 0.5 * u * (1.0 + math.erf(u / math.sqrt(2.0))))
    inner = gelu(x @ weights["w1"] + weights["b1"]) @ weights["w2"] + weights["b2"]
    return layer_norm(x + inner, **weights["norm2"])  # type: ignore[call-overload]


def pretraining_loss(
    token_logits: Array, tokens: Array, segment_logits: Array, follows: int
) -> float:
    """Section 4.5: the sum of two cross-entropies, masked words (rows given) and next segment."""

    def entropy(logits: Array, target: int) -> float:
        return -float(np.log(row_softmax(logits)[target]))

    words = sum(entropy(row, int(t)) for row, t in zip(token_logits, tokens, strict=True))
    return words / len(tokens) + entropy(segment_logits, follows)
