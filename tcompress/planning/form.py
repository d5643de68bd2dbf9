"""A plan's entry for a module of the host that keeps its tensors, and takes another form."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class FormPlan(BaseModel):
    """A module of the host that keeps its tensors, and takes another form.

    Attributes:
        name: Name of the module in the checkpoint.
        kind: A table of positions, or a layer norm.
        form: What it becomes, see `Convert.positions` and `Convert.norm`.
        p: Number of slices.
        shape: Shape of its weight.
        offset: Rows of a table before that of the first position.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["positions", "norm"]
    form: str
    p: int
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def is_trained(self) -> bool:
        """Whether its tensors are parameters."""
        return self.kind == "norm" or self.form == "learned"
