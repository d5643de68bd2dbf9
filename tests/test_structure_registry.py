"""The registry of structures refuses what would be ambiguous, and helps with names."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tcompress.errors import RecipeError
from tcompress.structures import Layout, Spec, Structure, register, structure, structures
from tests.support.structure_cases import CASES


class _Other(Spec):
    """Options of nothing."""


def test_registry_refuses_names_and_specs_that_are_taken() -> None:
    class Fake(Structure[Any, Any]):
        name: ClassVar[str] = "lowrank"
        spec = _Other
        layout_type = Layout

    Fake.__abstractmethods__ = frozenset()
    with pytest.raises(ValueError, match="already registered"):
        register(Fake())  # type: ignore[abstract]
    Fake.name, Fake.spec = "other", structure("lowrank").spec
    with pytest.raises(ValueError, match="already registered"):
        register(Fake())  # type: ignore[abstract]
    Fake.name, Fake.spec = "Other-One", _Other
    with pytest.raises(ValueError, match="not lower snake case"):
        register(Fake())  # type: ignore[abstract]
    assert {kind.name for kind in structures()} == set(CASES)


def test_unknown_structures_are_refused_with_the_closest_name() -> None:
    with pytest.raises(RecipeError) as error:
        structure("lowrnk")
    assert error.value.message.startswith("unknown structure `lowrnk`; known structures are `lowr")
    assert error.value.hint == "did you mean `lowrank`?"
