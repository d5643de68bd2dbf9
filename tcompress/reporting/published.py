"""Published numbers with ours beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tcompress.recipe.scratch import PaperRow
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
        ours: That of our model of this kind, where one was measured.
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
    found: dict[tuple[str, str, str], Published] = {}
    for report in reports:
        for row in report.paper:
            key = (row.row, row.metric, row.source)
            if key not in found or (row.ours and not found[key].ours):
                found[key] = _beside(row, report)
    return list(found.values())


def _beside(row: PaperRow, report: ModelReport) -> Published:
    metrics = [metric for metric in report.metrics if metric.name == row.metric]
    ours = ""
    if row.ours and metrics:
        own = metrics[-1]
        # Papers that count in percent get ours in percent; errors are no shares of anything.
        percent = own.higher_is_better and row.value > 1 and 0 <= own.value <= 1
        ours = value_text(own.value * (100 if percent else 1))
    why = "yes" if row.comparable else f"no: {row.why}" if row.why else "no"
    return Published(row.row, row.metric, row.source, why, f"{row.value:g}", ours)
