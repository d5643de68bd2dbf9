"""What a budget was, how it was shared out, and what that is predicted to cost."""

from __future__ import annotations

from tcompress.options.budget import Budget
from tcompress.planning.entries import BudgetPlan
from tcompress.reporting.rows import Row
from tcompress.reporting.words import error_text, ratio_text, value_text

_SHARED = {
    "uniform": "alike for all layers",
    "loss": "by predicted loss",
    "later": "shared out when converting: what is shown stands in",
}


def budget_text(budget: BudgetPlan) -> str:
    """Says what may be kept, such as `--target 0.25, by predicted loss`."""
    return f"{Budget(budget.kind, budget.limit)}, {_SHARED[budget.chosen]}"


def budget_rows(budget: BudgetPlan | None) -> list[Row]:
    """Lines about a budget; none where there is none, or where other lines say it all."""
    if budget is None or (budget.kind == "target" and budget.chosen == "uniform"):
        return []
    rows = [Row("budget", str(Budget(budget.kind, budget.limit))), Row("", _SHARED[budget.chosen])]
    if budget.error is not None:
        rows.append(Row("predicted error", error_text(budget.error)))
    if budget.uniform_error is not None and budget.chosen == "loss":
        rows.append(Row("  shared out alike", error_text(budget.uniform_error)))
    for name, error in budget.single_errors.items():
        rows.append(Row(f"  {name} alone", error_text(error)))
    least = budget.tried.get(budget.taken or "")
    for name, change in budget.tried.items():
        label = "  change of output, " + ("as predicted" if name == "auto" else f"{name} alone")
        ratio = "taken" if name == budget.taken else ratio_text(change / least) if least else ""
        rows.append(Row(label, value_text(change), "", ratio))
    return rows


def error_note(budget: BudgetPlan) -> str:
    """Says in a few words what else the same budget would have come to."""
    others = dict(budget.single_errors)
    words = [f"{name} alone {error_text(error)}" for name, error in others.items()]
    if budget.uniform_error is not None and budget.chosen == "loss":
        words.insert(0, f"shared out alike {error_text(budget.uniform_error)}")
    return "; ".join(words)
