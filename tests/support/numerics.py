"""What tests of numbers share."""

import torch
from hypothesis import settings
from torch import Tensor
from torch.testing import assert_close

# Repeatable, and no clock: the first example pays for imports.
quick = settings(deadline=None, derandomize=True, max_examples=40)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Seeded float64 normal numbers."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def near(actual: Tensor, expected: Tensor) -> None:
    """Compare in float64, dtype and shape included."""
    assert_close(actual, expected, rtol=1e-10, atol=1e-11)


def alike(gradients: Tensor) -> Tensor:
    """In place of what tokens are worth: all count alike.  # (tokens, out) -> (tokens,)."""
    return torch.ones(len(gradients), dtype=torch.float64)
