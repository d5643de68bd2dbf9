"""What the paper proves about layers: theorems 16 and 19, definition 15, proposition 22.

The references below are literal: one loop over slices, one over heads, plain matrices inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from tcompress.linalg import (
    complex_dft,
    facewise,
    fixed_transform,
    l_product,
    l_transpose,
    mode3,
)
from tests.support.lproduct import near, randn, transform

T, D_S, HEADS, D_H, P = 5, 6, 2, 3, 4
real_kinds = pytest.mark.parametrize("kind", ["dct", "hadamard", "random", "invertible"])


def apply_hat(function: Callable[[Tensor], Tensor], a: Tensor, z: Tensor) -> Tensor:
    """Apply an element-wise function in the transform domain of a real Z."""
    return mode3(function(mode3(a, z)), torch.linalg.inv(z))


# Theorem 16: the L-FFN.


def ffn_parameters() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w1, w2 = randn(D_S, 4 * D_S, P, seed=1), randn(4 * D_S, D_S, P, seed=2)
    return w1, randn(1, 4 * D_S, P, seed=3), w2, randn(1, D_S, P, seed=4)


def l_ffn(x: Tensor, z: Tensor) -> Tensor:
    """Equation (3) in the algebra, sigma acting in the transform domain."""
    w1, b1, w2, b2 = ffn_parameters()
    return l_product(apply_hat(gelu, l_product(x, w1, z) + b1, z), w2, z) + b2


def standard_ffn_per_slice(x: Tensor, z: Tensor) -> Tensor:
    """Theorem 16 literally, each slice through torch's own linear layers; in the domain of L."""
    w1, b1, w2, b2 = (mode3(parameter, z) for parameter in ffn_parameters())
    outputs = []
    for i, slice_in in enumerate(mode3(x, z).unbind(2)):
        up, down = torch.nn.Linear(D_S, 4 * D_S), torch.nn.Linear(4 * D_S, D_S)
        for layer, weight, bias in ((up, w1, b1), (down, w2, b2)):
            layer.weight = torch.nn.Parameter(weight[:, :, i].T)
            layer.bias = torch.nn.Parameter(bias[0, :, i])
        outputs.append(down(gelu(up(slice_in))))
    return torch.stack(outputs, dim=2).detach()


@real_kinds
def test_theorem_16(kind: str) -> None:
    x, z = randn(T, D_S, P), transform(kind, P)
    near(mode3(l_ffn(x, z), z), standard_ffn_per_slice(x, z))


def definition_15_literally(x: Tensor, z: Tensor) -> Tensor:
    w1, b1, w2, b2 = ffn_parameters()
    return l_product(gelu(l_product(x, w1, z) + b1), w2, z) + b2


@real_kinds
def test_definition_15_read_literally_is_another_function(kind: str) -> None:
    x, z = randn(T, D_S, P), transform(kind, P)
    literal, meant = definition_15_literally(x, z), l_ffn(x, z)
    assert (literal - meant).norm() > 0.1 * meant.norm()
    # And it is not slice-wise: the first transformed input slice reaches every output slice.
    change = torch.zeros(T, D_S, P, dtype=torch.float64)
    change[:, :, 0] = randn(T, D_S, seed=9)
    moved = definition_15_literally(x + mode3(change, torch.linalg.inv(z)), z)
    assert (mode3(moved - literal, z).norm(dim=(0, 1)) > 1e-2).all()


def test_both_readings_agree_where_the_transform_only_permutes() -> None:
    x, z = randn(T, D_S, P), torch.eye(P, dtype=torch.float64)[[2, 0, 3, 1]]
    near(definition_15_literally(x, z), l_ffn(x, z))


# Theorem 19: L-attention.


def attention_parameters() -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    q, k, v = (
        [randn(D_S, D_H, P, seed=10 * role + head) for head in range(HEADS)] for role in (1, 2, 3)
    )
    return q, k, v, randn(D_S, D_S, P, seed=40)


def algorithm_2(x: Tensor, z: Tensor) -> Tensor:
    """Appendix A.2 line by line."""
    wq, wk, wv, wo = attention_parameters()
    x_hat = mode3(x, z)
    wq, wk, wv = ([mode3(w, z) for w in weights] for weights in (wq, wk, wv))
    wo = mode3(wo, z)
    slices = []
    for i in range(P):
        x_i = x_hat[:, :, i]
        heads = []
        for j in range(HEADS):
            q, k, v = x_i @ wq[j][:, :, i], x_i @ wk[j][:, :, i], x_i @ wv[j][:, :, i]
            scores = q @ k.T / math.sqrt(D_H)
            heads.append((scores.exp() / scores.exp().sum(1, keepdim=True)) @ v)
        slices.append(torch.cat(heads, dim=1) @ wo[:, :, i])
    return mode3(torch.stack(slices, dim=2), torch.linalg.inv(z))


def l_attention(x: Tensor, z: Tensor) -> Tensor:
    """The same from the algebra, batched over slices and heads."""
    wq, wk, wv, wo = attention_parameters()
    # (T, d_h, p) per head -> (p, heads, T, d_h)
    q, k, v = (
        torch.stack([mode3(l_product(x, w, z), z) for w in weights]).permute(3, 0, 1, 2)
        for weights in (wq, wk, wv)
    )
    heads = scaled_dot_product_attention(q, k, v).permute(2, 1, 3, 0).flatten(1, 2)  # (T, d_s, p)
    return l_product(mode3(heads, torch.linalg.inv(z)), wo, z)


def standard_attention(x_i: Tensor, z: Tensor, i: int) -> Tensor:
    """torch.nn.MultiheadAttention of width d_s with the transformed parameters of slice i."""
    wq, wk, wv, wo = attention_parameters()
    module = torch.nn.MultiheadAttention(D_S, HEADS, bias=False, dtype=torch.float64)
    projections = [torch.cat([mode3(w, z)[:, :, i] for w in ws], dim=1).T for ws in (wq, wk, wv)]
    module.in_proj_weight = torch.nn.Parameter(torch.cat(projections))
    module.out_proj.weight = torch.nn.Parameter(mode3(wo, z)[:, :, i].T)
    output: Tensor = module(x_i, x_i, x_i, need_weights=False)[0]
    return output.detach()


@real_kinds
def test_theorem_19_attention(kind: str) -> None:
    x, z = randn(T, D_S, P), transform(kind, P)
    literal = algorithm_2(x, z)
    near(l_attention(x, z), literal)
    y_hat = mode3(literal, z)
    for i in range(P):
        near(y_hat[:, :, i], standard_attention(mode3(x, z)[:, :, i].contiguous(), z, i))


@real_kinds
@pytest.mark.parametrize("core", [l_attention, l_ffn])
def test_theorem_19_each_slice_depends_on_its_own_input_slice_alone(
    kind: str, core: Callable[[Tensor, Tensor], Tensor]
) -> None:
    x, z = randn(T, D_S, P), transform(kind, P)
    base = mode3(core(x, z), z)
    for i in range(P):
        change = torch.zeros(T, D_S, P, dtype=torch.float64)
        change[:, :, i] = randn(T, D_S, seed=9)
        moved = mode3(core(x + mode3(change, torch.linalg.inv(z)), z), z)
        others = [j for j in range(P) if j != i]
        near(moved[:, :, others], base[:, :, others])
        assert (moved[:, :, i] - base[:, :, i]).norm() > 1e-2


def test_slices_are_coupled_in_the_original_domain() -> None:
    x, z = randn(T, D_S, P), fixed_transform("dct", P)
    change = torch.zeros(T, D_S, P, dtype=torch.float64)
    change[:, :, 0] = randn(T, D_S, seed=9)
    moved = (l_ffn(x + change, z) - l_ffn(x, z)).norm(dim=(0, 1))
    assert (moved > 1e-2).all()


def test_facewise_is_the_core_of_the_product() -> None:
    x, w, z = randn(T, D_S, P), randn(D_S, D_S, P, seed=1), fixed_transform("dct", P)
    near(mode3(l_product(x, w, z), z), facewise(mode3(x, z), mode3(w, z)))


# Proposition 22: gradients. It holds as printed for any Z with Z^H Z = c I, because Z^-1 brings a
# factor 1/c and the adjoint of L brings c. For any other Z, with M = Z^H Z, the gradient is
# dJ/dX = ((G x_3 M^-1) * W^T) x_3 M, and likewise for W.


def autograd(x: Tensor, w: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """G = dJ/dY of a curved J, with dJ/dX and dJ/dW from autograd."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = l_product(x, w, z)
    loss = (y.sin() * randn(*y.shape, seed=5)).sum()
    g, dx, dw = torch.autograd.grad(loss, (y, x, w))
    return g, dx, dw


def printed_formula(x: Tensor, w: Tensor, g: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return l_product(g, l_transpose(w, z), z), l_product(l_transpose(x, z), g, z)


SCALED_UNITARY = {
    "dct": fixed_transform("dct", P),
    "hadamard": fixed_transform("hadamard", P),
    "random": fixed_transform("random", P),
    "unnormalised hadamard": fixed_transform("hadamard", P) * math.sqrt(P),
    "-3 dct": fixed_transform("dct", P) * -3.0,
    "unitary dft": complex_dft(P, unitary=True),
    "unnormalised dft": complex_dft(P, unitary=False),
}


@pytest.mark.parametrize("name", SCALED_UNITARY)
def test_proposition_22_for_scaled_unitary_z(name: str) -> None:
    x, w, z = randn(T, D_S, P), randn(D_S, 3, P, seed=1), SCALED_UNITARY[name]
    g, dx, dw = autograd(x, w, z)
    expected_dx, expected_dw = printed_formula(x, w, g, z)
    near(dx, expected_dx)
    near(dw, expected_dw)


def test_proposition_22_needs_a_metric_for_any_other_z() -> None:
    x, w, z = randn(T, D_S, P), randn(D_S, 3, P, seed=1), transform("invertible", P)
    g, dx, dw = autograd(x, w, z)
    printed_dx, printed_dw = printed_formula(x, w, g, z)
    assert (dx - printed_dx).norm() > 0.1 * dx.norm()
    assert (dw - printed_dw).norm() > 0.1 * dw.norm()
    metric = z.T @ z
    inner = mode3(g, torch.linalg.inv(metric))
    near(dx, mode3(l_product(inner, l_transpose(w, z), z), metric))
    near(dw, mode3(l_product(l_transpose(x, z), inner, z), metric))
