"""A plan: a flat list of frozen entries that says all about a conversion before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Literal, NamedTuple

from pydantic import Field
from torch import Tensor

from tcompress.attention.module import CHILD
from tcompress.attention.replacement import AnyReplacementLayout, replacement_named
from tcompress.linalg.rounding import Rounding, widths_text
from tcompress.models.vocabulary import Vocabulary
from tcompress.options.limits import Budget
from tcompress.roles import Layer
from tcompress.structures.base import Frozen, Layout, Shapes, shared_shapes
from tcompress.structures.flops import lookup_macs, macs_of
from tcompress.structures.modules.experts import child_of
from tcompress.structures.modules.linear import (
    Channels,
    PartLayout,
    factor_layouts,
    own_shapes,
    own_transforms,
)
from tcompress.structures.modules.shared import factors_module


class FormPlan(Frozen):
    """A table of positions, or a layer norm, that keeps its tensors and takes another form."""

    name: str  # of the module in the checkpoint
    kind: Literal["positions", "norm"]
    form: str  # what it becomes, see `Convert.positions` and `Convert.norm`
    p: int  # number of slices
    shape: tuple[int, ...]  # of its weight
    offset: int = 0  # rows of a table before that of the first position


class StackPlan(Frozen):
    """Blocks that stay of one stack."""

    name: str  # such as `decoder`
    path: str  # module path
    blocks: int  # number of blocks of the dense model
    kept: tuple[int, ...]  # those that stay, from 0


class BlockLoss(Frozen):
    """Loss of dropping one block."""

    path: str  # module path in the dense model
    loss: float  # change of the output over the calibration data, in the unit of losses
    parameters: int


class DepthPlan(Frozen):
    """Blocks of a model that stay."""

    stacks: tuple[StackPlan, ...]  # all of the model, in its order
    chosen: Literal["asked", "measured", "spread", "later"]
    """By the recipe, by data, at equal distances, or not yet (the blocks named stand in)."""
    dropped: tuple[BlockLoss, ...] = ()  # in the order chosen, with the loss of all up to each
    weighed: tuple[float | None, ...] = ()
    """Where a budget chose the number of blocks: change of the output per held-out sample, with no
    block dropped, one, and so on; None where the budget was out of reach."""

    @property
    def blocks(self) -> int:
        return sum(stack.blocks for stack in self.stacks)

    @property
    def kept(self) -> int:
        return sum(len(stack.kept) for stack in self.stacks)

    @property
    def deeper(self) -> bool:
        """True where copies of blocks are put on top: what is dense then has them too."""
        return self.kept > self.blocks

    @property
    def which(self) -> str:
        """The kept blocks in words, such as `1, 3, 5`."""
        if self.chosen == "later":
            return "chosen when converting"
        lists = [(stack.name, ", ".join(map(str, stack.kept))) for stack in self.stacks]
        return lists[0][1] if len(lists) == 1 else "; ".join(map(" ".join, lists))

    @property
    def target_blocks(self) -> tuple[int, ...]:
        """For each block the dense one whose output it gives; the last gives that of the last."""
        targets, start = [], 0
        for stack in self.stacks:
            targets += [start + index for index in (*stack.kept[:-1], stack.blocks - 1)]
            start += stack.blocks
        return tuple(targets)


FactorsKey = tuple[str, str]  # name of the layer that owns shared factors, and their own name


class LayerForm(NamedTuple):
    """Form of a layer: layouts of its output splits, and what is left of its input."""

    parts: tuple[PartLayout, ...]
    reads: Channels | None = None


class LayerPlan(Frozen):
    """One layer, or table of word embeddings, that will be rewritten."""

    name: str  # of the module in the checkpoint; for experts, of the experts module
    parameter: str = "weight"  # the weight of that module which is rewritten
    block: str  # name in the checkpoint
    role: str  # what the layer does, such as `q` or `down`
    kind: Literal["linear", "conv1d", "experts", "embedding", "pointwise"]  # how it is stored
    bias: bool
    experts: int | None = None  # number of stacked experts
    transposed: bool = False  # whether stacked experts are stored as (experts, in, out)
    parts: tuple[PartLayout, ...] = Field(min_length=1)  # layouts of its output splits
    input_of: str | None = None  # layer whose input transform it shares, if not its own
    readers: int = 1  # number of layers that share its input transform, itself included
    bank_of: dict[str, str] = Field(default={})  # owners of shared factors that are not its own
    axes: int = 0  # that a convolution moves along
    reads: Channels | None = None  # what is left of its input features, if not all

    @property
    def key(self) -> str:
        """Name of its weight in the checkpoint."""
        return f"{self.name}.{self.parameter}"

    @property
    def in_features(self) -> int:
        """Width of the dense layer's input."""
        return self.reads.dense if self.reads else self.inputs_left

    @property
    def is_narrow(self) -> bool:
        """True where channels that it reads or writes are gone."""
        return bool(self.reads) or any(part.channels for part in self.parts)

    @property
    def is_plain(self) -> bool:
        """True for a plain matrix, which may make up for what layers before it lost."""
        return all(term.is_plain for part in self.parts for term in part.terms)

    @property
    def is_flipped(self) -> bool:
        """True where the dense weight is stored as ([experts,] in, out)."""
        return self.kind == "conv1d" or self.transposed

    def matrix(self, weight: Tensor) -> Tensor:
        """The matrix that a dense weight is.  # ([experts,] out, in)."""
        if self.axes:
            return weight.flatten(1)
        return weight.mT if self.is_flipped else weight

    def as_stored(self, matrix: Tensor) -> Tensor:
        """The dense weight of a matrix, as the base model stores it."""
        if self.axes:
            return matrix[(..., *(None,) * self.axes)]
        return matrix.mT if self.is_flipped else matrix

    @property
    def out_features(self) -> int:
        """Width of the dense layer's output."""
        return sum(part.dense_features for part in self.parts)

    @property
    def inputs_left(self) -> int:
        """Width of what its summands read."""
        return self.parts[0].terms[0].in_features

    @property
    def outputs_left(self) -> int:
        """Width of its own output: that of its bias too."""
        return sum(part.out_features for part in self.parts)

    @property
    def biases_saved(self) -> int:
        """Numbers that its bias loses."""
        return (self.out_features - self.outputs_left) * self.bias

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
        factors = {
            f"{factors_module(bank)}.{name}": shape
            for bank, layout in self.own_factors.items()
            for name, shape in shared_shapes(layout).items()
        }
        return own_shapes(self.parts, self.experts) | self.transform_shapes | factors

    @property
    def transform_shapes(self) -> Shapes:
        """The same of the tensors that transforms are built from."""
        return {
            f"{module}.{name}": shape
            for module, transform, *_ in own_transforms(self.parts, bool(self.input_of))
            for name, shape in transform.shapes.items()
        }

    @property
    def stored_shapes(self) -> Shapes:
        """Names in the checkpoint, and shapes, of all tensors that are stored for it."""
        return {self.stored_name(name): shape for name, shape in self.tensor_shapes.items()}

    def stored_name(self, tensor: str) -> str:
        """Return the name in the checkpoint of a tensor, from that relative to the layer."""
        child = f"{child_of(self.parameter)}." if self.kind == "experts" else ""
        return f"{self.name}.{child}{tensor}"

    @property
    def own_factors(self) -> dict[str, Layout]:
        """A layout for all factors that are stored with this layer and shared, by their name."""
        layouts = factor_layouts(self.parts)
        return {bank: layout for bank, layout in layouts.items() if bank not in self.bank_of}

    @property
    def parameters(self) -> int:
        """Parameters after the conversion, without the bias."""
        return sum(prod(shape) for shape in self.tensor_shapes.values())

    @property
    def row_macs(self) -> int:
        """Multiply-adds of looking one word up, of a table of embeddings."""
        return sum(map(lookup_macs, self.parts[0].terms))

    def macs(self, tokens: int) -> int:
        """Multiply-adds of a pass over so many tokens (for experts, in one of them)."""
        macs = [[macs_of(layout, tokens) for layout in part.terms] for part in self.parts]
        read = 0 if self.input_of else sum(item.encode for item in macs[0])
        return read + sum(item.apply + item.decode for terms in macs for item in terms)


class DenseLayer(Frozen):
    """A dense projection of an attention."""

    name: str  # in the checkpoint
    role: str
    in_features: int
    out_features: int
    bias: bool
    transposed: bool = False  # whether its weight is stored as (in, out)

    @property
    def shape(self) -> tuple[int, int]:
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.transposed else shape

    @property
    def parameters(self) -> int:
        return self.out_features * (self.in_features + self.bias)


class AttentionPlan(Frozen):
    """One attention that is replaced."""

    name: str  # of the base model's attention in the checkpoint
    block: str  # in the checkpoint
    layout: AnyReplacementLayout  # of the replacement
    unused: tuple[DenseLayer, ...] = ()  # projections that it has no use for
    guard: DenseLayer | None = None  # stored under another name, so that plain Transformers stops
    like: str  # name of a projection whose dtype its tensors have

    @property
    def tensor_shapes(self) -> Shapes:
        """Names in the checkpoint, and shapes, of the replacement's own tensors."""
        shapes = replacement_named(self.layout.mechanism).tensors(self.layout)
        return {f"{self.name}.{CHILD}.{name}": shape for name, shape in shapes.items()}

    @property
    def guards(self) -> tuple[str, ...]:
        """Names in the checkpoint of tensors that are stored empty."""
        return tuple(f"{layer.name}.weight" for layer in (*self.unused, self.guard) if layer)

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.tensor_shapes.values())

    @property
    def saved(self) -> int:
        """Parameters that the model loses."""
        return sum(layer.parameters for layer in self.unused) - self.parameters


class SkippedLayer(Frozen):
    """One layer that stays dense, and why."""

    name: str
    block: str
    role: str
    parameters: int
    reason: str

    @classmethod
    def of(cls, layer: Layer, block: str, reason: str) -> SkippedLayer:
        """Say why a layer of a block stays dense."""
        facts = {"block": block, "role": layer.role, "reason": reason}
        return cls(name=layer.weight_name, parameters=layer.parameters, **facts)


class DenseWeights(Frozen):
    """Weights of one kind that stay as they are."""

    name: str  # their role, or the module that they belong to
    parameters: int
    reason: str = ""  # why they stay dense; empty outside the blocks


class Coverage(Frozen):
    """Parameters of the whole dense model by what becomes of them; they add up to the total."""

    total: int  # tied ones count once
    rewritten: int = 0  # weights that get a structure, as they are in the dense model
    replaced: int = 0  # projections that another attention has no use for
    dropped: int = 0  # blocks
    vocabulary: int = 0  # rows of tokens that are left out
    embeddings: int = 0  # tables that stay as they are
    norms: int = 0  # and biases and other single vectors
    left: tuple[DenseWeights, ...] = ()  # other weights that stay dense, the largest first

    def without(self, dropped: int) -> Coverage:
        """The same of a model that had more blocks, with so many parameters."""
        total = self.total - self.dropped + dropped
        return self.model_copy(update={"total": total, "dropped": dropped})


class BudgetPlan(Frozen):
    """The budget of a conversion, and how it was spent; errors are relative to leaving all out."""

    kind: str  # name of the option
    limit: float  # a fraction, a number of parameters or bytes, or an error
    chosen: Literal["uniform", "loss", "later"]
    """How layers got their sizes: alike, by predicted loss, or not yet (those planned stand in)."""
    fraction: float  # kept fraction of every layer if all were alike
    error: float | None = None  # predicted, of what was chosen
    uniform_error: float | None = None  # of the budget spent alike, by the best method offered
    single_errors: dict[str, float] = Field(default={})  # of each method offered on its own
    tried: dict[str, float] = Field(default={})
    """Change of the output per held-out sample, of `auto` and of methods alone, where tried."""
    taken: str | None = None  # which of them was taken
    lost: float | None = None  # agreement on samples held out, where that was limited
    speedup: float | None = None  # of a model of these forms, any weights, before it was fitted
    at: str | None = None  # the pass that was timed
    seconds: float | None = None  # that the dense model took

    @property
    def asked(self) -> Budget:
        """The budget as a recipe has it."""
        return Budget(self.kind, self.limit)


class Storage(Frozen):
    """Bits that tensors are stored in, where these are fewer than those of their dtype."""

    weights: Rounding | None = None  # of layers, factors and whatever else has two axes
    embeddings: Rounding | None = None  # of the word embedding, and of a head that is tied to it

    def __str__(self) -> str:
        return widths_text(self.weights, self.embeddings)


class Plan(Frozen):
    """All that a conversion will do."""

    layers: tuple[LayerPlan, ...]  # of the blocks, to be rewritten, in order of execution
    attention: tuple[AttentionPlan, ...] = ()  # to be replaced
    embeddings: tuple[LayerPlan, ...] = ()  # tables to be rewritten: words are output features
    forms: tuple[FormPlan, ...] = ()  # position tables and norms
    left: tuple[SkippedLayer, ...] = ()  # layers of the blocks that stay dense
    source: str = ""  # name of the source model
    family: str = ""  # its model type
    method: str = ""  # name of the method
    parameters: int = 0  # of the whole dense model
    block_parameters: int = 0  # of all blocks, with biases and norms
    dropped_parameters: int = 0  # those of them in blocks that are dropped
    depth: DepthPlan | None = None  # which blocks stay, where some are dropped
    vocabulary: Vocabulary | None = None  # which tokens stay, where some are left out
    budget: BudgetPlan | None = None  # what may be kept, where something limits it
    coverage: Coverage | None = None  # None in plans of older versions
    storage: Storage | None = None  # of what is rounded, where anything is
    plain: dict[str, int] | None = None
    """New values in `config.json`, by key, of a plain model, which they say all about."""
    warnings: tuple[str, ...] = Field(default=())

    def warned(self, notes: Iterable[str]) -> Plan:
        return self.model_copy(update={"warnings": (*self.warnings, *notes)})

    def with_facts(self, facts: Mapping[str, Any]) -> Plan:
        """Return the same with more said of its budget."""
        assert self.budget is not None
        return self.model_copy(update={"budget": self.budget.model_copy(update=facts)})

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
        """Most tokens of an input, where attentions limit them."""
        layouts = (entry.layout for entry in self.attention)
        limits = (replacement_named(layout.mechanism).longest(layout) for layout in layouts)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def entries(self) -> tuple[LayerPlan, ...]:
        """All that is rewritten, in order of execution."""
        return (*self.embeddings, *self.layers)

    @property
    def reads_data(self) -> bool:
        """True where calibration data matters, where there is any."""
        chooses = self.depth is not None and self.depth.chosen == "later"
        return bool(self.entries) or self.reads_queries or chooses

    @property
    def reads_queries(self) -> bool:
        """True where an attention begins with what the base model's queries and keys are like."""
        return any(
            replacement_named(entry.layout.mechanism).centres_keys(entry.layout) is not None
            for entry in self.attention
        )

    def whole_table(self, table: LayerPlan) -> int:
        """Parameters of a table with all tokens of the dense model."""
        before, rows = (self.vocabulary.before, self.vocabulary.rows) if self.vocabulary else (1, 1)
        return table.dense_parameters * before // rows

    @property
    def saved(self) -> int:
        """Parameters that the whole model loses."""
        tables = sum(item.dense_parameters - item.parameters for item in self.embeddings)
        rows = self.vocabulary.parameters if self.vocabulary else 0  # of tokens that are left out
        return self.saved_in_blocks + tables + rows

    @property
    def saved_in_blocks(self) -> int:
        """Those of them that its blocks lose, or that dropped blocks had."""
        rewritten = self.dense_rewritten - self.structured_rewritten
        rewritten += sum(layer.biases_saved for layer in self.layers)
        exchanged = sum(entry.saved for entry in self.attention)
        return rewritten + exchanged + self.dropped_parameters

    @property
    def changes_model(self) -> bool:
        """True where the result needs tcompress to load."""
        rebuilt = self.plain is None and bool(self.entries or self.attention)
        return rebuilt or self.storage is not None

    @property
    def compresses(self) -> bool:
        """True where anything is done: a plain model has fewer blocks or tokens, or is narrower."""
        return bool(self.entries or self.attention or self.depth or self.storage or self.vocabulary)

    @property
    def only_rounded(self) -> bool:
        """True where fewer bits are all that is done."""
        done = self.entries or self.attention or self.depth or self.plain or self.vocabulary
        return self.storage is not None and not done

    @property
    def cuts_vocabulary_only(self) -> bool:
        """True where tokens are left out, and all that stays is as it was."""
        changes = self.entries or self.attention or self.forms or self.depth or self.plain
        return self.vocabulary is not None and not changes and self.storage is None

    @property
    def kept(self) -> float:
        """Kept fraction of the blocks' rewritten weights; all where none is rewritten."""
        return self.structured_rewritten / self.dense_rewritten if self.layers else 1.0
