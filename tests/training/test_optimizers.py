"""Muon: what it does to a matrix, to many at once, and to what is none."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tcompress.training.optimizers import Muon, as_matrices, optimizer_of, orthogonalised


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 4, 40), (2, 40, 4), (2, 1, 9)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_singular_values_become_about_one(shape: tuple[int, ...], size: float) -> None:
    made = orthogonalised(size * randn(*shape))
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.3
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(randn(*shape), full_matrices=False)
    assert (made * (u @ v)).sum() > 0.65 * min(shape[1:]) * shape[0]


def test_a_matrix_does_not_depend_on_others() -> None:
    many = randn(5, 6, 9)
    assert_close(orthogonalised(many)[2:3], orthogonalised(many[2:3]))
    assert not orthogonalised(torch.zeros(1, 4, 4)).any()


@pytest.mark.parametrize(
    ("shape", "matrices"), [((4, 6), (1, 4, 6)), ((3, 4, 6), (3, 4, 6)), ((2, 3, 4, 5), (1, 6, 20))]
)
def test_tensors_are_read_as_matrices(shape: tuple[int, ...], matrices: tuple[int, ...]) -> None:
    assert as_matrices(randn(*shape)).shape == matrices


def _stepped(values: list[Tensor], gradients: list[Tensor], **group: float) -> list[Tensor]:
    own = [nn.Parameter(value.clone()) for value in values]
    optimizer = Muon([{"params": own, "weight_decay": 0.0, "matrices": True, **group}])
    optimizer.param_groups[0]["lr"] = 0.01
    for parameter, gradient in zip(own, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return own


def test_steps_are_as_large_in_all_shapes() -> None:
    for shape in ((64, 64), (16, 256), (4, 32, 32)):
        [moved] = _stepped([torch.zeros(shape)], [randn(*shape)])
        largest = torch.linalg.matrix_norm(moved.detach(), 2).max()
        assert float(largest) == pytest.approx(0.01 * 5 * 1.0, rel=0.3)


def test_parameters_of_one_shape_go_together_and_change_nothing() -> None:
    values = [randn(4, 6, seed=1), randn(4, 6, seed=2), randn(2, 4, 6, seed=3), randn(6, 4, seed=4)]
    gradients = [randn(*value.shape, seed=9) for value in values]
    together = _stepped(values, gradients)
    alone = [_stepped([v], [g])[0] for v, g in zip(values, gradients, strict=True)]
    assert_close(together, alone)


def test_other_groups_are_adamw_s_and_a_run_resumes() -> None:
    def made() -> tuple[list[nn.Parameter], Muon]:
        own = [nn.Parameter(randn(4, 6)), nn.Parameter(randn(6)), nn.Parameter(randn(9, 3))]
        groups = [
            {"params": own[:1], "weight_decay": 0.1, "matrices": True},
            {"params": own[1:], "weight_decay": 0.1},
        ]
        return own, Muon(groups)

    def step(own: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        for parameter in own:
            parameter.grad = randn(*parameter.shape, seed=seed)
        optimizer.step()

    own, optimizer = made()
    usual = [nn.Parameter(value.detach().clone()) for value in own[1:]]
    adamw = torch.optim.AdamW([{"params": usual, "weight_decay": 0.1}])
    for seed in (1, 2):
        step(own, optimizer, seed)
        step(usual, adamw, seed)
    assert_close(own[1:], usual)
    other, resumed = made()
    with torch.no_grad():
        for one, two in zip(other, own, strict=True):
            one.copy_(two)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    step(own, optimizer, 3)
    step(other, resumed, 3)
    assert_close(other, own, rtol=0, atol=0)


def test_tables_and_matrices_without_numbers_are_left_to_adamw() -> None:
    parts: dict[str, Any] = {"some": nn.Linear(4, 6), "table": nn.Embedding(5, 4)}
    parts["none"] = nn.Linear(4, 1)
    parts["none"].weight = nn.Parameter(torch.empty(0, 4))
    model = nn.ModuleDict(parts)
    options = SimpleNamespace(optimizer=None, task=None, weight_decay=0.1)
    trained = dict(model.named_parameters())
    setup: Any = SimpleNamespace(model=model, trained=trained, options=options)
    optimizer = optimizer_of(setup)
    moved = [
        own for group in optimizer.param_groups if group["matrices"] for own in group["params"]
    ]
    assert [*map(id, moved)] == [id(trained["some.weight"])]
    torch.stack([value.sum() for value in trained.values()]).sum().backward()
    optimizer.step()
