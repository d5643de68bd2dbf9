"""Published numbers with ours beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean

from tcompress.options.scratch import PaperRow
from tcompress.reporting.tree import ModelReport
from tcompress.reporting.words import value_text


@dataclass(frozen=True)
class Published:
    """A published number.

    Attributes:
        row: The model that it is of.
        metric: What was measured.
        source: Where it stands.
        comparable: Whether ours is measured alike, or why it is not.
        paper: The number.
        ours: That of our model of this kind, where one was measured; of several each with its
            name, or their mean where the published number is one.
    """

    row: str
    metric: str
    source: str
    comparable: str
    paper: str
    ours: str


def published(reports: Sequence[ModelReport]) -> list[Published]:
    """Lists what the recipes of models cite, each number once.

    A recipe cites rows of its own model and of those that its paper compares it with. The latter
    get a number where another of the models was made by a recipe that has the row as its own.
    """
    own: dict[tuple[str, str, str], list[tuple[PaperRow, ModelReport]]] = {}
    for report in reports:
        for row in report.paper:
            own.setdefault((row.row, row.metric, row.source), []).append((row, report))
    return [_beside(cited) for cited in own.values()]


def _beside(cited: Sequence[tuple[PaperRow, ModelReport]]) -> Published:
    """A published number beside those of the models that it is about."""
    row = next((row for row, _ in cited if row.ours), cited[0][0])
    values = [(report.name, _ours(row, report)) for other, report in cited if other.ours]
    known = [(PurePath(name).name, value) for name, value in values if value is not None]
    ours = "; ".join(f"{name} {value_text(value)}" for name, value in known)
    if len(known) == 1:
        ours = value_text(known[0][1])
    elif known and row.mean:
        ours = f"{value_text(fmean(value for _, value in known))}, mean of {len(known)}"
    why = "yes" if row.comparable else f"no: {row.why}" if row.why else "no"
    return Published(row.row, row.metric, row.source, why, f"{row.value:g}", ours)


def _ours(row: PaperRow, report: ModelReport) -> float | None:
    metrics = [metric for metric in report.metrics if metric.name == row.metric]
    if not metrics:
        return None
    own = metrics[-1]
    # Papers that count in percent get ours in percent; errors are no shares of anything.
    percent = own.higher_is_better and row.value > 1 and 0 <= own.value <= 1
    return own.value * (100 if percent else 1)
