"""Tensorized graph attention (TGA), from the text of its paper alone, in numpy and float64.

Paper: "Low-Complexity Attention Modelling via Graph Tensor Networks" (Xu, Konstantinidis, Li,
Stankovic, Mandic). Numbers of equations, remarks and sections are the paper's.

The paper is by the authors of TSA, and its Algorithm 1 is TSA's, so what is written in `tsa.py` is
used here. What differs in the text:

- The scale is 1 / sqrt(d_k), printed in full (section 3); d_k is not defined here either.
- The filter is (I + Psi) and nothing else: no eigendecomposition, no polynomial (TSA's (1)).
- Input and output are tensors (Algorithm 1), (L, I_1, ..., I_N) to (L, J_1, ..., J_N); the order of
  tensorization is not said, so that cores in tensor form need none. `attention` takes matrices.
- Psi = Omega * Theta, the Hadamard product, printed in full (section 3, Remark 2).
- Heads: "repeat the attention filtering operation H times, using a set of attention filters ...
  then combined" (section 3), "repeated for H different heads" (section 4): chains of its own for
  each head; how heads are joined is open here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference import tsa

Array = np.ndarray


def coefficients(keys: Array) -> Array:
    """Section 4: Theta = relu(K x_{2..N+1}^{2..N+1} K / sqrt(d_k)) without its diagonal.

    `keys`: (L, J_1, ..., J_N). The diagonal goes after the contraction, as Algorithm 1 has it.
    """
    modes = list(range(1, keys.ndim))
    theta = np.tensordot(keys, keys, axes=(modes, modes)) / np.sqrt(np.prod(keys.shape[1:]))
    theta = np.maximum(theta, 0.0)
    return theta - np.diag(np.diag(theta))


def algorithm(
    x: Array, omega: Array, key_cores: Sequence[Array], value_cores: Sequence[Array]
) -> Array:
    """Algorithm 1, one head: (L, I_1, ..., I_N) and Omega (L, L) to (L, J_1, ..., J_N)."""
    keys = tsa.tt_contract(x, key_cores)
    values = tsa.tt_contract(x, value_cores)
    psi = coefficients(keys) * omega
    return np.tensordot(np.eye(len(x)) + psi, values, axes=([1], [0]))


def attention(
    x: Array,
    heads: Sequence[tuple[Sequence[Array], Sequence[Array]]],
    damping: float,
    *,
    order: str = "big",
    combine: str = "concat",
    output: Array | None = None,
) -> Array:
    """Algorithm 1 for each head on a matrix (L, I); `heads`: (key cores, value cores) of each."""
    omega = tsa.bidirectional_graph(len(x), damping)
    outputs = []
    for key_cores, value_cores in heads:
        tensor = tsa.tensorize(x, [core.shape[1] for core in key_cores], order)
        outputs.append(tsa.matricize(algorithm(tensor, omega, key_cores, value_cores), order))
    return tsa.combine_heads(outputs, combine, output)
