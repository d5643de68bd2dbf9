"""The tree of records that a report is, and which numbers stand for a set of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tcompress.artifact.manifest import CalibrationFacts, Metric, Speed, TrainingFacts
from tcompress.models.names import ALIASES
from tcompress.options.steps import PaperRow
from tcompress.planning.entries import AttentionPlan, BudgetPlan, Coverage, DepthPlan, Left

# The tree of records that a report is; also its JSON.


ERRORS = ("held_out", "calibration", "weight")
"""Kinds of error, the most telling one first."""


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Amount(_Node):
    """A quantity of the dense model and of the converted one, and their ratio."""

    dense: int
    now: int
    kept: float

    @classmethod
    def of(cls, dense: int, now: int, **more: Any) -> Any:
        """Builds an amount with its ratio; nothing of nothing is all of it."""
        return cls(dense=dense, now=now, kept=now / dense if dense else 1.0, **more)


class Macs(Amount):
    """Multiply-adds for one token in a sequence of `length`; see `model_report.macs_per_token`."""

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
        input_of: Layer that stores the shared input transform of this one too, if any.
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
        attention: Attentions that were replaced.
        left: Layers of the blocks that stayed dense, and why.
        errors: Means of the layers' errors by kind.
        calibration: Data that the fit looked at, if known.
        metrics: What was measured on the model, with protocols.
        training: Runs of fine-tuning, the first one first.
        speed: Times of forward passes, with protocols.
        recipe: What was asked for, if known.
        environment: Versions that the model was made with, if known.
        init: Whether the weights were pretrained before, or randomly initialised.
        seed: Seed of the random initialisation.
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
    found: dict[str, list[float]] = {kind: [] for kind in ERRORS}
    for layer in layers:
        for kind, error in layer.errors.items():
            found.setdefault(kind, []).append(error)
    return {kind: sum(errors) / len(errors) for kind, errors in found.items() if errors}


# Which numbers stand for a set of models, and which models no other one beats.


_Item = TypeVar("_Item")

_SAME = ("task", "data", "split", "data_fingerprint", "max_length", "layer")

ALIKE = 0.005
"""Part of a cost that is no difference."""


def metric_key(metric: Metric) -> tuple[str, ...]:
    """Equal for numbers that can be compared: of the same task on the same examples."""
    return (metric.name, *(str(metric.protocol.get(key)) for key in _SAME))


def other_baseline(report: ModelReport, metric: Metric) -> str | None:
    """Name of what a number was compared with, where that is not the model's own dense source."""
    if metric.difference is None or report.source is None:
        return None
    # Models by their last folder: names differ by where one stands, or by the owner.
    name, *own = (
        Path(ALIASES.get(name, name)).name
        for name in (metric.difference.baseline, report.source, report.name)
    )
    return None if name in own else Path(metric.difference.baseline).name


def speed_key(speed: Speed) -> tuple[int, int, str, tuple[str, ...]]:
    """Equal for times that can be compared."""
    found = (speed.protocol.get(key) for key in ("device", "device_name", "dtype", "threads"))
    return (speed.batch * speed.length, speed.batch, speed.mode, tuple(map(str, found)))


def main_metrics(reports: Sequence[ModelReport]) -> list[Metric | None]:
    """Picks the metric that most of the models have, the first of those, for each model."""
    keys = (dict.fromkeys(map(metric_key, report.metrics)) for report in reports)
    counts = Counter(key for found in keys for key in found)
    key = max(counts, key=lambda key: counts[key], default=None)
    return [next((m for m in report.metrics if metric_key(m) == key), None) for report in reports]


def main_speeds(reports: Sequence[ModelReport]) -> list[Speed | None]:
    """Picks the size that most models were timed at: eager and large where there are more."""
    keys = (dict.fromkeys(map(speed_key, report.speed)) for report in reports)
    counts = Counter(key for found in keys for key in found)
    key = max(counts, key=lambda key: (counts[key], key[2] == "eager", *key[:2]), default=None)
    return [next((s for s in report.speed if speed_key(s) == key), None) for report in reports]


def unbeaten(
    items: Sequence[_Item], place: Callable[[_Item], tuple[float, float]], higher: bool = True
) -> list[_Item]:
    """Picks the Pareto front: the items that no other one beats in both cost and quality.

    Costs that differ by no more than `ALIKE` are one: budgets are spent almost to the last
    parameter, and an item is not on the front for leaving a few more of them.

    Args:
        items: What is compared.
        place: Gives cost and quality of an item.
        higher: Whether more quality is a greater number.
    """
    sign = 1 if higher else -1

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        better = sign * (one[1] - other[1])
        return one[0] < other[0] if better == 0 else better > 0 and one[0] <= other[0] * (1 + ALIKE)

    places = [place(item) for item in items]
    return [
        item
        for item, own in zip(items, places, strict=True)
        if not any(beats(other, own) for other in places)
    ]
