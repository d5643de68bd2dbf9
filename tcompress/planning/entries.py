"""A plan: a flat list of frozen entries that says all about a conversion before it runs."""

from __future__ import annotations

from math import prod
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from tcompress.attention.module import CHILD
from tcompress.attention.replacement import AnyMechanismLayout, mechanism
from tcompress.options.method_options import BudgetKind
from tcompress.structures.base import Layout, Shapes, Side
from tcompress.structures.capabilities import lookup_macs, macs_of, shared_of, transform_shapes
from tcompress.structures.modules.linear import PartLayout, bank_layouts, own_shapes, side_name
from tcompress.structures.modules.shared import bank_module

# A plan's entry for a module of the host that keeps its tensors, and takes another form.


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


# A plan's entries for stacks of blocks: which of them stay.


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


# A plan: a flat list of frozen entries that says all about a conversion before it runs.


SIDES: tuple[Side, Side] = ("in", "out")


BankKey = tuple[str, str]
"""Name of the layer that owns a bank, and name of the bank."""


class LayerPlan(_Entry):
    """One layer, or table of word embeddings, that will be rewritten.

    Attributes:
        name: Name of the module in the checkpoint (for experts, of the experts module).
        parameter: The weight of that module which is rewritten.
        block: Name of the block in the checkpoint.
        role: What the layer does, such as `q` or `down`.
        kind: How the dense weight is stored.
        bias: Whether the layer has a bias.
        experts: Number of stacked experts, if any.
        transposed: Whether stacked experts are stored as (experts, in, out).
        parts: Layouts of the runs of output features.
        input_of: Layer whose input sides this one shares, if not its own.
        readers: Number of layers that share this layer's input sides, itself included.
        bank_of: Layers that own the banks which this one uses, by name; others are its own.
        axes: Number of axes that a convolution moves along.
    """

    name: str
    parameter: str = "weight"
    block: str
    role: str
    kind: Literal["linear", "conv1d", "experts", "embedding", "pointwise"]
    bias: bool
    experts: int | None = None
    transposed: bool = False
    parts: tuple[PartLayout, ...] = Field(min_length=1)
    input_of: str | None = None
    readers: int = 1
    bank_of: dict[str, str] = Field(default={})
    axes: int = 0

    @property
    def key(self) -> str:
        """Name of its weight in the checkpoint."""
        return f"{self.name}.{self.parameter}"

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.parts[0].terms[0].in_features

    @property
    def is_flipped(self) -> bool:
        """Whether the dense weight is stored as ([experts,] in, out)."""
        return self.kind == "conv1d" or self.transposed

    def matrix(self, weight: Tensor) -> Tensor:
        """Gives the matrix that a dense weight is.  # ([experts,] out, in)."""
        if self.axes:
            return weight.flatten(1)
        return weight.mT if self.is_flipped else weight

    def as_stored(self, matrix: Tensor) -> Tensor:
        """Gives the dense weight as the host stores it, of its matrix; the other way round."""
        if self.axes:
            return matrix[(..., *(None,) * self.axes)]
        return matrix.mT if self.is_flipped else matrix

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return sum(part.out_features for part in self.parts)

    @property
    def copies(self) -> int:
        """Number of weights stacked in the layer."""
        return self.experts or 1

    @property
    def dense_parameters(self) -> int:
        """Parameters of the dense weight, without the bias."""
        return self.in_features * self.out_features * self.copies

    @property
    def tensor_shapes(self) -> Shapes:
        """Names, relative to the layer, and shapes of all tensors that are stored for it."""
        shapes = dict(own_shapes(self.parts, self.experts))
        for index, part in enumerate(self.parts):
            for term, layout in enumerate(part.terms):
                for side in SIDES:
                    if side == "in" and (index or self.input_of):
                        continue
                    module = side_name(self.parts, side, index, term)
                    tensors = transform_shapes(layout, side)
                    shapes |= {f"{module}.{name}": shape for name, shape in tensors.items()}
        for bank, layout in self.own_banks.items():
            shared = shared_of(layout)
            assert shared is not None  # that is how it was found
            module = bank_module(bank)
            shapes |= {f"{module}.{name}": shape for name, shape in shared.shapes.items()}
        return shapes

    @property
    def own_banks(self) -> dict[str, Layout]:
        """A layout for every bank that is stored with this layer, by the bank's name."""
        used = bank_layouts(self.parts)
        return {bank: layout for bank, layout in used.items() if bank not in self.bank_of}

    @property
    def parameters(self) -> int:
        """Parameters after the conversion, without the bias."""
        return sum(prod(shape) for shape in self.tensor_shapes.values())

    @property
    def row_macs(self) -> int:
        """Multiply-adds of looking one word up, of a table of embeddings."""
        terms = self.parts[0].terms
        return sum(map(lookup_macs, terms))

    def macs(self, tokens: int) -> int:
        """Multiply-adds of a pass over so many tokens (for experts, in one of them)."""
        total = 0
        for index, part in enumerate(self.parts):
            for layout in part.terms:
                macs = macs_of(layout, tokens)
                reads = not index and not self.input_of
                total += macs.apply + macs.decode + (macs.encode if reads else 0)
        return total


class DenseLayer(_Entry):
    """A dense projection of an attention.

    Attributes:
        name: Name of the module in the checkpoint.
        role: What it does.
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Whether it has a bias.
        transposed: Whether its weight is stored as (in, out).
    """

    name: str
    role: str
    in_features: int
    out_features: int
    bias: bool
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight as it is stored."""
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.transposed else shape

    @property
    def parameters(self) -> int:
        """Parameters of the weight and the bias."""
        return self.out_features * (self.in_features + self.bias)


class AttentionPlan(_Entry):
    """One attention that gets another mechanism.

    Attributes:
        name: Name of the host's attention in the checkpoint.
        block: Name of the block in the checkpoint.
        layout: The mechanism.
        unused: Projections that are dropped, since the mechanism has no use for them.
        guard: A layer that stays dense and is stored under another name, so that plain
            Transformers stops; needed once in a model where no layer is rewritten.
        like: Name of a projection whose dtype the mechanism's tensors have.
    """

    name: str
    block: str
    layout: AnyMechanismLayout
    unused: tuple[DenseLayer, ...] = ()
    guard: DenseLayer | None = None
    like: str

    @property
    def tensor_shapes(self) -> Shapes:
        """Names in the checkpoint, and shapes, of the mechanism's own tensors."""
        shapes = mechanism(self.layout.mechanism).tensors(self.layout)
        return {f"{self.name}.{CHILD}.{name}": shape for name, shape in shapes.items()}

    @property
    def guards(self) -> tuple[str, ...]:
        """Names in the checkpoint of tensors that are stored empty."""
        guarded = (*self.unused, *((self.guard,) if self.guard else ()))
        return tuple(f"{layer.name}.weight" for layer in guarded)

    @property
    def parameters(self) -> int:
        """Parameters of the mechanism."""
        return sum(prod(shape) for shape in self.tensor_shapes.values())

    @property
    def saved(self) -> int:
        """Parameters that the model loses."""
        return sum(layer.parameters for layer in self.unused) - self.parameters


class Left(_Entry):
    """One layer that stays dense, and why."""

    name: str
    block: str
    role: str
    parameters: int
    reason: str


class Dense(_Entry):
    """Weights of one kind that stay as they are.

    Attributes:
        name: Their role, or the module that they belong to.
        parameters: How many they have together.
        reason: Why they stay dense; empty outside the blocks.
    """

    name: str
    parameters: int
    reason: str = ""


class Coverage(_Entry):
    """What becomes of the parameters of the whole dense model; the parts add up to the total.

    Attributes:
        total: All of them; tied ones count once.
        rewritten: Weights that get a structure, as they are in the dense model.
        replaced: Projections that another attention has no use for.
        dropped: Blocks that are dropped.
        embeddings: Tables that stay as they are.
        norms: Norms, biases and other single vectors.
        left: Other weights that stay dense, the largest first.
    """

    total: int
    rewritten: int = 0
    replaced: int = 0
    dropped: int = 0
    embeddings: int = 0
    norms: int = 0
    left: tuple[Dense, ...] = ()

    def without(self, dropped: int) -> Coverage:
        """The same of a model that had more blocks, with so many parameters."""
        total = self.total - self.dropped + dropped
        return self.model_copy(update={"total": total, "dropped": dropped})


class BudgetPlan(_Entry):
    """What a conversion may keep, and how that was shared out.

    Errors are predicted: squared errors of outputs, weighed by what they are worth to the model,
    summed over layers, relative to leaving all of them out.

    Attributes:
        kind: The option that limits it.
        limit: A fraction, a number of parameters or bytes, or an error.
        chosen: How layers got their sizes: all alike (`uniform`), by predicted loss (`loss`), or
            not yet (`later`; those planned stand in).
        fraction: Kept fraction of every layer if all were alike.
        error: Predicted error of what was chosen.
        uniform_error: That of the same budget shared out alike, by the best method offered.
        single_errors: That of each method offered on its own, by its name.
        tried: Change of the output per sample, measured on data held out, of what was predicted
            (`auto`) and of methods on their own, by name, where they were tried.
        taken: Which of them was taken.
    """

    kind: BudgetKind
    limit: float
    chosen: Literal["uniform", "loss", "later"]
    fraction: float
    error: float | None = None
    uniform_error: float | None = None
    single_errors: dict[str, float] = Field(default={})
    tried: dict[str, float] = Field(default={})
    taken: str | None = None


class Plan(_Entry):
    """What a conversion will do.

    Attributes:
        layers: Layers of the blocks to be rewritten, in order of execution.
        attention: Attentions that get another mechanism.
        embeddings: Tables of word embeddings to be rewritten: words are their output features.
        forms: Other modules that take another form.
        left: Layers of the blocks that stay dense.
        source: Name of the source model.
        family: Its model type.
        method: Name of the method.
        parameters: Parameters of the whole dense model.
        block_parameters: Parameters of all blocks, with biases and norms.
        dropped_parameters: Those of them in blocks that are dropped.
        depth: Which blocks stay, where some are dropped.
        budget: What may be kept, where something limits it.
        coverage: How much of the whole model is rewritten; None in plans of older versions.
        warnings: What the user should know.
    """

    layers: tuple[LayerPlan, ...]
    attention: tuple[AttentionPlan, ...] = ()
    embeddings: tuple[LayerPlan, ...] = ()
    forms: tuple[FormPlan, ...] = ()
    left: tuple[Left, ...] = ()
    source: str = ""
    family: str = ""
    method: str = ""
    parameters: int = 0
    block_parameters: int = 0
    dropped_parameters: int = 0
    depth: DepthPlan | None = None
    budget: BudgetPlan | None = None
    coverage: Coverage | None = None
    warnings: tuple[str, ...] = Field(default=())

    @property
    def dense_rewritten(self) -> int:
        """Parameters of the blocks' rewritten weights before."""
        return sum(layer.dense_parameters for layer in self.layers)

    @property
    def structured_rewritten(self) -> int:
        """Parameters of the blocks' rewritten weights after, generators counted."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def longest(self) -> int | None:
        """Most tokens of an input, where mechanisms limit them."""
        layouts = (entry.layout for entry in self.attention)
        limits = (mechanism(layout.mechanism).longest(layout) for layout in layouts)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def entries(self) -> tuple[LayerPlan, ...]:
        """All that is rewritten, in order of execution."""
        return (*self.embeddings, *self.layers)

    @property
    def reads_data(self) -> bool:
        """Whether calibration data matters, where there is any."""
        return (
            bool(self.entries)
            or self.reads_queries
            or (self.depth is not None and self.depth.chosen == "later")
        )

    @property
    def reads_queries(self) -> bool:
        """Whether an attention begins with what the host's queries and keys are like."""
        return any(
            mechanism(entry.layout.mechanism).centres_keys(entry.layout) is not None
            for entry in self.attention
        )

    @property
    def saved(self) -> int:
        """Parameters that the whole model loses."""
        return self.saved_in_blocks + sum(
            item.dense_parameters - item.parameters for item in self.embeddings
        )

    @property
    def saved_in_blocks(self) -> int:
        """Those of them that its blocks lose, or that dropped blocks had."""
        rewritten = self.dense_rewritten - self.structured_rewritten
        exchanged = sum(entry.saved for entry in self.attention)
        return rewritten + exchanged + self.dropped_parameters

    @property
    def changes_model(self) -> bool:
        """Whether the result needs tcompress to load: a plain model only lost blocks."""
        return bool(self.entries or self.attention)

    @property
    def kept(self) -> float:
        """Kept fraction of the blocks' rewritten weights; all where none is rewritten."""
        if not self.layers:
            return 1.0
        return self.structured_rewritten / max(1, self.dense_rewritten)
