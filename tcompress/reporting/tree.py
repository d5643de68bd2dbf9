"""The tree of records that a report is, also as JSON, and which numbers stand for many models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tcompress.artifact.averages import means_of
from tcompress.artifact.manifest import (
    Alternative,
    AttentionMap,
    CalibrationFacts,
    ExportedFile,
    Metric,
    Speed,
    TrainingFacts,
)
from tcompress.models.names import ALIASES, sentence_root
from tcompress.models.vocabulary import Vocabulary
from tcompress.options.steps import PaperRow
from tcompress.planning.entries import (
    AttentionPlan,
    BudgetPlan,
    Coverage,
    DepthPlan,
    SkippedLayer,
    Storage,
)
from tcompress.reporting.formatting import ERRORS


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Amount(_Node):
    """A quantity of the dense model and of the converted one, and their ratio."""

    dense: int
    now: int
    kept: float | None  # None where there is something now, and was nothing before

    @classmethod
    def of(cls, dense: int, now: int, **more: Any) -> Any:
        """Builds an amount with its ratio; nothing of nothing is all of it."""
        kept = now / dense if dense else None if now else 1.0
        return cls(dense=dense, now=now, kept=kept, **more)

    @classmethod
    def sum_of(cls, amounts: Iterable[Amount]) -> Any:
        """Adds amounts up."""
        pairs = [(item.dense, item.now) for item in amounts]
        return cls.of(sum(dense for dense, _ in pairs), sum(now for _, now in pairs))


class Macs(Amount):
    """Multiply-adds for one token in a sequence of `length`; see `model_report.macs_per_token`."""

    length: int


class Parameters(_Node):
    """Parameters by part: embeddings, blocks and the rest add up to the total."""

    embeddings: Amount  # tables outside the blocks, those of positions too
    blocks: Amount  # everything in transformer blocks, biases and norms counted
    rewritten: Amount  # a part of the blocks: weights and what transforms store, without biases
    other: Amount  # patch projections, norms outside the blocks, poolers, heads that are not tied
    total: Amount  # tied ones count once


class LayerReport(_Node):
    """One rewritten weight."""

    name: str  # in the checkpoint
    parameter: str  # attribute of that module which holds the weight
    block: str
    role: str  # such as `q` or `down`
    structure: str  # such as `lprod p=16 dct + lowrank r=77`
    in_features: int
    out_features: int
    experts: int | None  # number of stacked ones, if any
    input_of: str | None  # layer that stores the shared input transform too, if any
    parameters: Amount  # without the bias
    macs: Amount  # for one token, in a sequence as long as for the whole model
    bytes: Amount | None = None  # each in the dtype that it is, or was, stored in
    errors: dict[str, float]  # by kind; relative and squared


class ModelReport(_Node):
    """All that is known of one model without running it."""

    schema_version: Literal[1] = Field(1, validation_alias="schema", serialization_alias="schema")
    name: str  # folder or id, as it was given
    family: str
    method: str  # `dense` for a model that was not converted
    source: str | None
    created: str | None  # the conversion, or the training of a dense model
    parameters: Parameters
    bytes_on_disk: Amount  # tensors of the source, and weight files as they are
    macs_per_token: Macs
    layers: tuple[LayerReport, ...] = ()
    depth: DepthPlan | None = None  # which blocks stay; dense numbers are of all of them
    vocabulary: Vocabulary | None = None  # which tokens stay; likewise
    budget: BudgetPlan | None = None  # and the error predicted for it
    plain: dict[str, int] | None = None  # keys of `config.json` that say all of it
    attention: tuple[AttentionPlan, ...] = ()  # what is replaced
    storage: Storage | None = None  # bits that tensors were rounded to
    left: tuple[SkippedLayer, ...] = ()  # layers of the blocks that stayed dense, and why
    errors: dict[str, float] = Field(default_factory=dict)  # means of the layers' errors by kind
    calibration: CalibrationFacts | None = None
    metrics: tuple[Metric, ...] = ()
    training: tuple[TrainingFacts, ...] = ()  # the first run first
    speed: tuple[Speed, ...] = ()
    exports: tuple[ExportedFile, ...] = ()  # files for other runtimes
    dense_exports: tuple[ExportedFile, ...] = ()  # those of the dense model, where they are here
    alternatives: tuple[Alternative, ...] = ()  # what `compress` measured beside the model
    attention_map: AttentionMap | None = None  # what the last attention looks at
    recipe: dict[str, Any] | None = None  # what was asked for
    environment: dict[str, str] | None = None  # versions
    init: Literal["pretrained", "random"] = "pretrained"
    seed: int | None = None  # of the random initialisation
    paper: tuple[PaperRow, ...] = ()  # published numbers
    coverage: Coverage | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_smaller(self) -> bool:
        """True for a converted model, False for a dense one."""
        done = self.layers or self.attention or self.depth or self.vocabulary
        return bool(done) or self.storage is not None

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)


def mean_errors(layers: Iterable[LayerReport]) -> dict[str, float]:
    """Means of the errors of each kind, over the layers that have it."""
    found: dict[str, list[float]] = {kind: [] for kind in ERRORS}
    for layer in layers:
        for kind, error in layer.errors.items():
            found.setdefault(kind, []).append(error)
    return {kind: sum(errors) / len(errors) for kind, errors in found.items() if errors}


_Item = TypeVar("_Item")

_SAME = ("task", "split", "data_fingerprint", "max_length", "layer")

_SAME_RUN = ("device", "device_name", "dtype", "threads", "new_tokens")

ALIKE = 0.005  # part of a cost that is no difference


def metric_key(metric: Metric) -> tuple[str, ...]:
    """Equal for numbers that can be compared: of the same task on the same examples."""
    facts = metric.protocol
    data = facts.get("data_fingerprint") or facts.get("data")  # a name depends on where one stands
    return (metric.name, str(data), *(str(facts.get(key)) for key in _SAME))


def other_baseline(report: ModelReport, metric: Metric) -> str | None:
    """Name of what a number was compared with, where that is not the model's own dense source."""
    against = metric.difference and metric.difference.baseline
    against = against or metric.protocol.get("baseline")
    if against is None or report.source is None:
        return None
    # A conversion's own name is that of its weights in PyTorch, which a file is compared with.
    own = [report.source, *([] if report.is_smaller else [report.name])]
    # Models by their last folder: names differ by where one stands, or by the owner.
    name, *dense = map(_last_folder, (against, *own))
    return None if name in dense else name


def _last_folder(name: str) -> str:
    """Name a model by its folder: that of its repository in the hub's cache, or around modules."""
    path = Path(ALIASES.get(name, name))
    path = sentence_root(path) or path
    if path.parent.name == "snapshots":  # models--OWNER--NAME/snapshots/COMMIT
        return path.parent.parent.name.rpartition("--")[2]
    return path.name or path.resolve().name


def beside_dense(report: ModelReport, metric: Metric) -> Metric:
    """Return a number without its difference where that is not to the model's dense source."""
    if other_baseline(report, metric) is None:
        return metric
    return metric.model_copy(update={"difference": None})


def speed_key(speed: Speed) -> tuple[int, int, str, tuple[str, ...]]:
    """Equal for times that can be compared."""
    found = (speed.protocol.get(key) for key in _SAME_RUN)
    return (speed.batch * speed.length, speed.batch, speed.how, tuple(map(str, found)))


def numbers_of(reports: Sequence[ModelReport]) -> list[tuple[Metric, ...]]:
    """Lists the metrics of each model, and first their means over the sets that all share.

    Of a set that was measured on other examples before, such as fewer, the newest numbers count:
    they are in the means, and stand before older ones.
    """
    newest: list[dict[tuple[object, ...], Metric]] = []
    keys: dict[tuple[object, ...], set[tuple[str, ...]]] = {}  # of the sets that all share
    for report in reports:
        names = ("task", "data", "split")
        own = {(m.name, *map(m.protocol.get, names)): m for m in report.metrics}
        newest.append(own)
        for what in {place[:2] for place in own}:
            found = {metric_key(metric) for place, metric in own.items() if place[:2] == what}
            keys[what] = keys.get(what, found) & found
    means = [
        means_of(m for place, m in own.items() if metric_key(m) in keys[place[:2]])
        for own in newest
    ]
    listed = []
    for mean, own, report in zip(means, newest, reports, strict=True):
        older = [metric for metric in report.metrics if metric not in own.values()]
        listed.append((*mean, *own.values(), *older))
    return listed


def main_metrics(reports: Sequence[ModelReport]) -> list[Metric | None]:
    """Picks the metric that most of the models have, the first of those, for each model."""
    numbers = numbers_of(reports)
    keys = (dict.fromkeys(map(metric_key, own)) for own in numbers)
    counts = Counter(key for found in keys for key in found)
    key = max(counts, key=lambda key: counts[key], default=None)
    return [next((m for m in own if metric_key(m) == key), None) for own in numbers]


def main_speeds(reports: Sequence[ModelReport]) -> list[Speed | None]:
    """Picks the size that most models were timed at: calm, eager and large where there are more.

    A time of a busy machine stands for a model only where there is no better one.
    """
    keys = (dict.fromkeys(map(speed_key, report.speed)) for report in reports)
    counts = Counter(key for found in keys for key in found)
    noisy = Counter(speed_key(s) for report in reports for s in report.speed if s.is_noisy)

    def order(key: Any) -> tuple[Any, ...]:
        return (counts[key], -noisy[key], key[2] == "eager", *key[:2])

    key = max(counts, key=order, default=None)
    return [next((s for s in report.speed if speed_key(s) == key), None) for report in reports]


def unbeaten(
    items: Sequence[_Item], place: Callable[[_Item], tuple[float, float]], higher: bool = True
) -> list[_Item]:
    """Picks the Pareto front: the items that no other one beats in both cost and quality.

    Costs that differ by no more than `ALIKE` are one: budgets are spent almost to the last
    parameter, and an item is not on the front for leaving a few more of them. `place` gives cost
    and quality of an item.
    """
    sign = 1 if higher else -1

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        better = sign * (one[1] - other[1])
        return one[0] < other[0] if better == 0 else better > 0 and one[0] <= other[0] * (1 + ALIKE)

    places = [place(item) for item in items]
    pairs = zip(items, places, strict=True)
    return [item for item, own in pairs if not any(beats(other, own) for other in places)]
