"""The tree of records that a report is; also its JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tcompress.artifact.manifest import CalibrationFacts, Metric, Speed, TrainingFacts
from tcompress.options.scratch import PaperRow
from tcompress.planning.entries import AttentionPlan, BudgetPlan, Coverage, DepthPlan, Left

ERRORS = ("held_out", "calibration", "weight")
"""Kinds of error, the most telling one first."""


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Amount(_Node):
    """A quantity of the dense model and of the converted one.

    Attributes:
        dense: Before.
        now: After; the same for a dense model.
        kept: Their ratio.
    """

    dense: int
    now: int
    kept: float

    @classmethod
    def of(cls, dense: int, now: int, **more: Any) -> Any:
        """Builds an amount with its ratio; nothing of nothing is all of it."""
        return cls(dense=dense, now=now, kept=now / dense if dense else 1.0, **more)


class Macs(Amount):
    """Multiply-adds for one token; `tcompress.reporting.count` has the formula.

    Attributes:
        length: Tokens in the sequence.
    """

    length: int


class Parameters(_Node):
    """Parameters by part: embeddings, blocks and the rest add up to the total.

    Attributes:
        embeddings: Embedding tables outside the blocks.
        blocks: Everything in transformer blocks, biases and norms counted.
        rewritten: Weights of the rewritten layers, a part of the blocks; what transforms store is
            counted, biases are not.
        other: Patch projections, norms outside the blocks, poolers, heads that are not tied.
        total: All parameters; tied ones count once.
    """

    embeddings: Amount
    blocks: Amount
    rewritten: Amount
    other: Amount
    total: Amount


class LayerReport(_Node):
    """One rewritten weight.

    Attributes:
        name: Name in the checkpoint.
        parameter: Attribute of that module which holds the weight.
        block: Name of the block in the checkpoint.
        role: What the layer does, such as `q` or `down`.
        structure: How it is stored, such as `lprod p=16 dct + lowrank r=77`.
        in_features: Width of the input.
        out_features: Width of the output.
        experts: Number of stacked experts, if any.
        input_of: Layer that stores the input side of this one too, if any.
        parameters: Parameters of the weight, without the bias.
        macs: Multiply-adds for one token, in a sequence as long as for the whole model.
        bytes: Size of the weight before and after, both in the dtype that is stored now; None for
            a layer that is only planned.
        errors: Relative squared errors by kind: of the output on data that the fit did not see
            (`held_out`) and on data that it saw (`calibration`), or of the weight (`weight`).
    """

    name: str
    parameter: str
    block: str
    role: str
    structure: str
    in_features: int
    out_features: int
    experts: int | None
    input_of: str | None
    parameters: Amount
    macs: Amount
    bytes: Amount | None = None
    errors: dict[str, float]


class ModelReport(_Node):
    """All that is known of one model without running it.

    Attributes:
        schema_version: Version of this tree; `schema` in JSON.
        name: Folder or id, as it was given.
        family: Model type.
        method: Name of the method; `dense` for a model that was not converted.
        source: The dense model, if known.
        created: Time of the conversion or of the training of a dense model, if known.
        parameters: Parameters by part.
        bytes_on_disk: Tensors of the source, and weight files as they are.
        macs_per_token: Multiply-adds for one token.
        layers: The rewritten weights.
        depth: Which blocks stay, where some were dropped; dense numbers are of all of them.
        budget: What might be kept, how it was shared out, and the error predicted for that.
        attention: Attentions that have another mechanism.
        left: Layers of the blocks that stayed dense, and why.
        errors: Means of the layers' errors by kind.
        calibration: Data that the fit looked at, if known.
        metrics: What was measured on the model, with protocols.
        training: Runs of fine-tuning, the first one first.
        speed: Times of forward passes, with protocols.
        recipe: What was asked for, if known.
        environment: Versions that the model was made with, if known.
        init: Whether the weights were pretrained before, or drawn at random.
        seed: Seed that they were drawn from.
        paper: Published numbers.
        coverage: How much of the whole model was rewritten, if known.
        warnings: What the user should know of the conversion.
    """

    schema_version: Literal[1] = Field(1, validation_alias="schema", serialization_alias="schema")
    name: str
    family: str
    method: str
    source: str | None
    created: str | None
    parameters: Parameters
    bytes_on_disk: Amount
    macs_per_token: Macs
    layers: tuple[LayerReport, ...] = ()
    depth: DepthPlan | None = None
    budget: BudgetPlan | None = None
    attention: tuple[AttentionPlan, ...] = ()
    left: tuple[Left, ...] = ()
    errors: dict[str, float] = Field(default_factory=dict)
    calibration: CalibrationFacts | None = None
    metrics: tuple[Metric, ...] = ()
    training: tuple[TrainingFacts, ...] = ()
    speed: tuple[Speed, ...] = ()
    recipe: dict[str, Any] | None = None
    environment: dict[str, str] | None = None
    init: Literal["pretrained", "random"] = "pretrained"
    seed: int | None = None
    paper: tuple[PaperRow, ...] = ()
    coverage: Coverage | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_smaller(self) -> bool:
        """Whether it was converted, and is no dense model."""
        return bool(self.layers or self.attention) or self.depth is not None

    def to_json(self) -> dict[str, Any]:
        """Returns the tree as plain data for JSON."""
        return self.model_dump(mode="json", by_alias=True)


def mean_errors(layers: Iterable[LayerReport]) -> dict[str, float]:
    """Means of the errors of each kind, over the layers that have it."""
    found: dict[str, list[float]] = {}
    for layer in layers:
        for kind, error in layer.errors.items():
            found.setdefault(kind, []).append(error)
    known = [kind for kind in ERRORS if kind in found]
    kinds = [*known, *(kind for kind in found if kind not in known)]
    return {kind: sum(found[kind]) / len(found[kind]) for kind in kinds}
