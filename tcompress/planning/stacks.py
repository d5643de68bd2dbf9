"""A plan's entries for stacks of blocks: which of them stay."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StackPlan(_Entry):
    """What stays of one stack of blocks.

    Attributes:
        name: What it is called, such as `decoder`.
        path: Its module path.
        blocks: Number of blocks of the dense model.
        kept: Those that stay, from 0.
    """

    name: str
    path: str
    blocks: int
    kept: tuple[int, ...]


class BlockLoss(_Entry):
    """What dropping one block costs.

    Attributes:
        path: Its module path in the dense model.
        loss: Change of what the model puts out, summed over the calibration data, in the unit of
            predicted losses.
        parameters: Its parameters.
    """

    path: str
    loss: float
    parameters: int


class DepthPlan(_Entry):
    """Which blocks stay.

    Attributes:
        stacks: All stacks of the model, in its order.
        chosen: Who chose: the recipe (`asked`), the change that blocks make on data (`measured`),
            equal distances (`spread`), or nobody yet (`later`; the blocks named stand in).
        dropped: In the order in which they were chosen, with the loss of all up to each.
        weighed: Where the number of blocks was chosen under a budget, the change of the output
            per sample, measured on data held out, with no block dropped, one, and so on; None
            where the budget was out of reach.
    """

    stacks: tuple[StackPlan, ...]
    chosen: Literal["asked", "measured", "spread", "later"]
    dropped: tuple[BlockLoss, ...] = ()
    weighed: tuple[float | None, ...] = ()

    @property
    def blocks(self) -> int:
        """Number of blocks of the dense model."""
        return sum(stack.blocks for stack in self.stacks)

    @property
    def kept(self) -> int:
        """Number of blocks that stay."""
        return sum(len(stack.kept) for stack in self.stacks)

    @property
    def deeper(self) -> bool:
        """Whether copies of blocks are put on top: what is dense then has them too."""
        return self.kept > self.blocks

    @property
    def which(self) -> str:
        """The kept blocks in words, such as `1, 3, 5`."""
        if self.chosen == "later":
            return "chosen when converting"
        lists = {stack.name: ", ".join(map(str, stack.kept)) for stack in self.stacks}
        if len(lists) == 1:
            return next(iter(lists.values()))
        return "; ".join(f"{name} {numbers}" for name, numbers in lists.items())

    @property
    def stands_for(self) -> tuple[int, ...]:
        """For each block the dense one whose output it should give, counted over all stacks.

        The last one of a stack stands for the last one.
        """
        found, start = [], 0
        for stack in self.stacks:
            found += [start + index for index in (*stack.kept[:-1], stack.blocks - 1)]
            start += stack.blocks
        return tuple(found)
