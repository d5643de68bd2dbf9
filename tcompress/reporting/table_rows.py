"""Rows of tables: lines about a model, its budget, published numbers, models side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from statistics import fmean
from typing import NamedTuple

from tcompress.artifact.averages import AGREEMENT, Mean, set_of
from tcompress.artifact.manifest import ExportedFile, Metric, Speed
from tcompress.models.vocabulary import Vocabulary
from tcompress.options.steps import PaperRow
from tcompress.planning.entries import BudgetPlan, DepthPlan, Plan
from tcompress.reporting import formatting as fmt
from tcompress.reporting.headline import file_of
from tcompress.reporting.over_seeds import OverSeeds, seed_groups
from tcompress.reporting.shipped import dense_there, file_metric, int8_speed
from tcompress.reporting.tree import (
    Amount,
    ModelReport,
    beside_dense,
    main_metrics,
    main_speeds,
    metric_key,
    numbers_of,
    other_baseline,
)


class Row(NamedTuple):
    """One line about a model: a quantity before and after, or a single value."""

    label: str
    value: str = ""
    dense: str = ""
    kept: str = ""


def rows_of(report: ModelReport, others: Sequence[ModelReport] = ()) -> list[Row]:
    """Lists the lines about one model that may be shown beside others.

    Then they say too what a title says otherwise, and leave room for lines of the others.
    """
    shown, parts = (report, *others), report.parameters
    rows = []
    if others:
        rows += [Row("family", report.family), Row("method", report.method)]
        if any(item.init == "random" for item in shown):
            rows.append(Row("start", start_text(report)))
        rows.append(Row("calibration", calibration_text(report)))
    rows += form_rows(report, others)
    if parts.rewritten.dense:
        rows.append(amount("rewritten layers", parts.rewritten))
    elif others:
        rows.append(Row("rewritten layers"))
    disk, macs = report.bytes_on_disk, report.macs_per_token
    rows += [
        amount("all blocks", parts.blocks),
        amount("embeddings", parts.embeddings),
        amount("other", parts.other),
        amount("whole model", parts.total),
        size("bytes on disk", disk.dense, disk.now),
        *_int8_rows(report),
        amount(f"MACs/token, T={macs.length}", macs),
    ]
    # Errors are those of the fit: training changes layers without measuring them again.
    when = ", before training" if report.training else ""
    for kind, error in report.errors.items():
        rows.append(Row(fmt.error_name(kind) + when, fmt.error_text(error)))
    if report.calibration is not None and not others:
        agreement = report.calibration.agreement
        for name, change in report.calibration.changes.items():
            what = "agreement" if name in agreement else "change of output"
            rows.append(Row(f"  {what}, {name}", fmt.value_text(agreement.get(name, change))))
    if any(item.training or item.speed for item in shown) and healed_text(report):
        healed = any(item.is_smaller and item.init == "pretrained" for item in shown)
        rows.append(Row("healed" if healed else "trained", healed_text(report)))
    rows += _metrics(report, shown)
    speeds = [speed for item in shown for speed in item.speed]
    machines, steps = set(map(fmt.machine_text, speeds)), set(map(_new_tokens, speeds)) - {""}
    for speed in report.speed:
        mode = "time" if speed.how == "eager" else speed.how
        machine = f", {fmt.machine_text(speed)}" if len(machines) > 1 else ""
        length = f"{speed.length}{_new_tokens(speed) if len(steps) > 1 else ''}"
        label = f"{mode} B={speed.batch} T={length}{machine}"
        now, dense = map(fmt.milliseconds_text, (speed.milliseconds, speed.baseline_milliseconds))
        rows.append(Row(label, now, dense, fmt.speed_text(speed)))
    return rows


def _new_tokens(speed: Speed) -> str:
    """Tokens that were made after a prompt, such as ` + 32`; nothing where none were."""
    count = speed.protocol.get("new_tokens")
    return f" + {count}" if count else ""


def form_rows(item: ModelReport | Plan, others: Sequence[ModelReport] = ()) -> list[Row]:
    """Lines about blocks, tokens, attention and stored numbers, with room for those of others."""
    rows = []
    if item.depth is not None:
        rows += _depth_rows(item.depth)
    elif any(other.depth is not None for other in others):
        rows.append(Row("blocks"))
    if item.vocabulary is not None:
        rows += _vocabulary_rows(item.vocabulary)
    elif any(other.vocabulary is not None for other in others):
        rows.append(Row("vocabulary"))
    if item.plain:  # keys that say all of it
        keys = (f"{key} {value:,}" for key, value in item.plain.items())
        rows.append(Row("in config.json", ", ".join(keys)))
    if item.attention or any(other.attention for other in others):
        rows.append(Row("attention", fmt.describe_attention(item.attention)))
    return rows if item.storage is None else [*rows, Row("stored in", str(item.storage))]


def _depth_rows(depth: DepthPlan) -> list[Row]:
    """Lines about the blocks that stay, and about other numbers of blocks that were tried."""
    kept = f"{depth.kept / depth.blocks:.1%}"
    rows = [Row("blocks", f"{depth.kept}: {depth.which}", str(depth.blocks), kept)]
    whole = next((change for change in depth.weighed if change is not None), None)
    for gone, change in enumerate(depth.weighed):
        label = f"  change of output, {depth.blocks - gone} blocks"
        ratio = fmt.ratio_text(change / whole) if change is not None and whole else ""
        value = "out of reach" if change is None else fmt.value_text(change)
        rows.append(Row(label, value, "", ratio))
    return rows


def _vocabulary_rows(vocabulary: Vocabulary) -> list[Row]:
    """Lines about the tokens that stay, and about the data that needs them."""
    before, rows = vocabulary.before, vocabulary.rows
    found = [Row("vocabulary", f"{rows:,}", f"{before:,}", f"{rows / before:.1%}")]
    if vocabulary.covered is not None:
        share = f"{vocabulary.covered:.2%} of {vocabulary.tokens:,}"
        found.append(Row("  tokens of the data that stay", share))
    if vocabulary.lost is not None:
        found.append(Row("  tokens of new texts that do not", f"about {vocabulary.lost:.2%}"))
    return found


def calibration_text(report: ModelReport) -> str:
    """Says what the fit looked at."""
    facts = report.calibration
    if facts is None or report.init == "random":
        return ""
    return "none" if facts.name == "none" else f"{facts.name}, {facts.samples:,} samples"


def start_text(report: ModelReport) -> str:
    """Says what a model began with, where it was not pretrained."""
    return f"at random, seed {report.seed}" if report.init == "random" else ""


def healed_text(report: ModelReport) -> str:
    """Says whether a model was trained after its conversion, and for how long."""
    healed = report.is_smaller and report.init == "pretrained"
    if not report.training:
        return "no" if healed or report.init == "random" else ""
    useful = [run for run in report.training if not run.keeps_start]
    steps = sum(run.steps for run in useful or report.training)
    minutes = fmt.time_text(sum(run.seconds for run in useful or report.training))
    if not useful:
        return f"no ({steps:,} steps tried, none better)"
    return f"{'yes, ' if healed else ''}{steps:,} steps, {minutes}"


def amount(label: str, amount: Amount) -> Row:
    """A line about a count before and after."""
    return Row(label, f"{amount.now:,}", f"{amount.dense:,}", fmt.share_text(amount.kept))


def size(label: str, dense: int | None, now: int) -> Row:
    """A line about bytes before and after."""
    if dense is None:
        return Row(label, fmt.bytes_text(now))
    return Row(label, fmt.bytes_text(now), fmt.bytes_text(dense), f"{now / max(1, dense):.1%}")


def _int8_rows(report: ModelReport) -> list[Row]:
    """A line about the file with eight bits, beside that of the dense model where it is known."""
    own, dense = file_of(report.exports), file_of(report.dense_exports)
    if own is not None:
        return [size("bytes of int8 file", None if dense is None else dense.bytes, own.bytes)]
    text = "" if dense is None else fmt.bytes_text(dense.bytes)
    return [Row("bytes of int8 file", "", text)] if text and report.is_smaller else []


def _metrics(report: ModelReport, shown: Sequence[ModelReport]) -> list[Row]:
    """Lines about metrics of the first model shown, with room for those that others have.

    Those that cannot be compared do not share a name.
    """
    numbers = numbers_of(shown)
    own = {metric_key(metric): metric for metric in numbers[0]}
    found: dict[tuple[str, ...], tuple[Metric, ModelReport]] = {}
    # The same order and names whichever model is asked about; means after what they are made of.
    pairs = zip(shown, numbers, strict=True)
    for item, metrics in sorted(pairs, key=lambda pair: (-len(pair[1]), *map(metric_key, pair[1]))):
        for metric in sorted(metrics, key=lambda metric: isinstance(metric, Mean)):
            found.setdefault(metric_key(metric), (metric, item))
    levels = {metric_key(m): m.interval.level for each in numbers for m in each if m.interval}
    labels = fmt.metric_labels(metric for metric, _ in found.values())
    rows = []
    for label, (key, (metric, maker)) in zip(labels, found.items(), strict=True):
        number = own.get(key)
        # A model without it shares the line of the first that has it.
        name = against(label, *((maker, metric) if number is None else (report, number)))
        rows.append(_number(name, number))
        if key in levels:
            interval = fmt.interval_text(number.interval) if number and number.interval else ""
            rows.append(Row(f"  {levels[key]:.0%} interval of {name}", interval))
        rows += _file_rows(report, shown, metric, label)
        naive = {} if number is None else naive_values(number)
        for kind in naive_values(metric):
            text = fmt.value_text(naive[kind]) if kind in naive else ""
            rows.append(Row(f"  {label} of {kind} (no model)", text))
    return rows


def against(label: str, report: ModelReport, metric: Metric) -> str:
    """Name a number, and what it was compared with where that is not its dense model."""
    other = other_baseline(report, metric)
    return label if other is None else f"{label}, against {other}"


def _number(label: str, number: Metric | None) -> Row:
    """A line about a number; empty where a model has none."""
    if number is None:
        return Row(label)
    dense = fmt.value_text(number.difference.baseline_value) if number.difference else ""
    return Row(label, fmt.value_text(number.value), dense, fmt.ratio_text(number.ratio))


def naive_values(metric: Metric) -> dict[str, float]:
    """What forecasts without a model come to on the same windows, by their names."""
    naive = metric.protocol.get("naive")
    if isinstance(metric, Mean) or not isinstance(naive, dict):
        return {}
    return {label: values[metric.name] for label, values in naive.items() if metric.name in values}


def _file_rows(
    report: ModelReport, shown: Sequence[ModelReport], metric: Metric, label: str
) -> list[Row]:
    """Lines about the same number of files, where any model that is shown has one.

    Each says of which number it is: models side by side share lines of one label.
    """
    of_files = [(item, value) for item in shown if (value := file_metric(item, metric)) is not None]
    if not of_files:
        return []
    number = file_metric(report, metric)
    name = against(f"{label} of int8 file", *(of_files[0] if number is None else (report, number)))
    rows = [_number(f"  {name}", number)]
    if number is not None and (ends := number.interval) is not None:
        rows.append(Row(f"  {ends.level:.0%} interval of {name}", fmt.interval_text(ends)))
    return rows


def sets_note(reports: Sequence[ModelReport]) -> str:
    """Says that one set misleads, where conversions were measured on one alone."""
    metrics = [metric for report in reports for metric in report.metrics]
    sets = {set_of(metric) for metric in metrics if "data_fingerprint" in metric.protocol}
    if len(sets) != 1 or not any(report.is_smaller for report in reports):
        return ""
    return (
        "Measured on one set, which alone often misleads: `tcompress evaluate ... --data A "
        "--data B` measures on several."
    )


_SHARED = {
    "uniform": "alike for all layers",
    "loss": "by predicted loss",
    "later": "by loss, measured when converting; the plan is provisional",
}


def is_open_ended(budget: BudgetPlan | None) -> bool:
    """Return whether sizes follow from what is measured when converting: time or agreement."""
    if budget is None or budget.chosen != "later":
        return False
    return budget.asked.is_resource or budget.asked.kind == "max_loss"


def budget_rows(budget: BudgetPlan | None) -> list[Row]:
    """Lines about a budget; none where there is none, or where other lines say it all."""
    if budget is None or (budget.asked.is_fraction and budget.chosen == "uniform"):
        return []
    rows = [Row("budget", str(budget.asked)), Row("", _SHARED[budget.chosen])]
    if (speedup := budget.speedup) is not None and budget.seconds is not None:
        times = (budget.seconds / speedup, budget.seconds)
        now, before = (f"{1e3 * seconds:.1f} ms" for seconds in times)
        rows.append(Row(f"  pass of {budget.at}, predicted", now, before, f"{speedup:.2f}×"))
    if budget.lost is not None:
        rows.append(Row("  agreement lost when tried", f"{budget.lost:.2%}"))
    if budget.error is not None:
        rows.append(Row("predicted error", fmt.error_text(budget.error)))
    rows += [Row(f"  {name}", fmt.error_text(e)) for name, e in _other_errors(budget).items()]
    least = budget.tried.get(budget.taken or "")
    for name, change in budget.tried.items():
        label = "  change of output, " + ("as predicted" if name == "auto" else f"{name} alone")
        ratio = "taken" if name == budget.taken else fmt.ratio_text(change / least) if least else ""
        rows.append(Row(label, fmt.value_text(change), "", ratio))
    return rows


def _other_errors(budget: BudgetPlan) -> dict[str, float]:
    alike = budget.uniform_error if budget.chosen == "loss" else None
    errors = {} if alike is None else {"shared out alike": alike}
    return errors | {f"{name} alone": error for name, error in budget.single_errors.items()}


class Published(NamedTuple):
    """A published number, with that of our model of this kind where one was measured.

    Of several models each stands with its name, or their mean where the published number is one.
    """

    row: str
    metric: str
    source: str
    comparable: str  # or why ours is not measured alike
    paper: str
    ours: str


def published(reports: Sequence[ModelReport]) -> list[Published]:
    """Lists what the recipes of models cite, each number once.

    A recipe cites rows of its own model and of those that its paper compares it with. The latter
    get a number where another of the models was made by a recipe that has the row as its own.
    """
    cited = [(row, report) for report in reports for row in report.paper]
    numbers = fmt.grouped(cited, lambda pair: (pair[0].row, pair[0].metric, pair[0].source))
    return list(map(_beside, numbers.values()))


def _beside(cited: Sequence[tuple[PaperRow, ModelReport]]) -> Published:
    """A published number beside those of the models that it is about."""
    row = next((row for row, _ in cited if row.ours), cited[0][0])
    about = [report for other, report in cited if other.ours]
    known = _by_recipe(row, about)
    ours = "; ".join(f"{name} {text}" for name, text, _ in known)
    if len(known) == 1:
        ours = known[0][1]
    elif known and row.mean:
        ours = f"{fmt.value_text(fmean(value for *_, value in known))}, mean of {len(known)}"
    why = "yes" if row.comparable else f"no: {row.why}" if row.why else "no"
    paper = f"{row.value:g}" + (f" ± {row.deviation:g}" if row.deviation is not None else "")
    return Published(row.row, row.metric, row.source, why, paper, ours)


def _by_recipe(row: PaperRow, reports: Sequence[ModelReport]) -> list[tuple[str, str, float]]:
    """Name, text and value of our number of each model; of several seeds their mean."""
    ours = {report.name: own for report in reports if (own := _ours(row, report)) is not None}
    values = {name: value for name, (value, _) in ours.items()}
    seeds = seed_groups(report for report in reports if report.name in values)
    groups = {report.name: group for group in seeds for report in group.reports}
    found: dict[str, tuple[str, str, float]] = {}
    for name, value in values.items():
        group = groups.get(name)
        if group is None:
            text = fmt.value_text(value) + ours[name][1]
            found[name] = (PurePath(name).name, text, value)
            continue
        over = OverSeeds(row.metric, tuple(values[report.name] for report in group.reports))
        text = f"{over.text} of {len(over.values)} seeds"
        found[group.name] = (group.name, text, over.mean)
    return [*found.values()]


def _ours(row: PaperRow, report: ModelReport) -> tuple[float, str] | None:
    """Our number in the units of a published one and, where several sets have it, which it is of.

    It is of the set that was measured last: recipes measure on what they trained on before.
    """
    measured = [metric for metric in report.metrics if metric.name == row.metric]
    if not measured:
        return None
    own, sets = measured[-1], {str(metric.protocol.get("data")) for metric in measured}
    where = f" on {own.protocol.get('data')}" if len(sets) > 1 else ""
    # Papers that count in percent get ours in percent; errors are no shares of anything.
    percent = own.higher_is_better and row.value > 1 and 0 <= own.value <= 1
    return own.value * (100 if percent else 1), where


class Cell(NamedTuple):
    """A number, and in small letters what belongs to it."""

    value: str = ""
    note: str = ""


class Printed(NamedTuple):
    """A table of cells; the first column holds names."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def shows_dense(reports: Sequence[ModelReport]) -> bool:
    """Return whether a column stands for the dense model: beside one model made of it."""
    return len(reports) == 1 and reports[0].is_smaller and reports[0].init == "pretrained"


def summary_of(reports: Sequence[ModelReport]) -> dict[str, list[Cell]]:
    """Lists quantities that at least one model has, with those of every one; see `shows_dense`."""
    lengths = {report.macs_per_token.length for report in reports}
    macs = "multiply-adds per token" + (f", T={lengths.pop()}" if len(lengths) == 1 else "")
    when = ", before training" if any(report.training for report in reports) else ""
    kinds = dict.fromkeys(kind for report in reports for kind in list(report.errors)[:1])
    errors = {kind: f"mean {fmt.error_name(kind)}{when}" for kind in kinds}
    quality, dense = _quality(reports)
    triples = zip(reports, quality, main_speeds(reports), strict=True)
    columns = [_column(report, macs, errors, own, speed) for report, own, speed in triples]
    order = list(columns[0])
    if shows_dense(reports):
        columns.insert(0, _dense_column(reports[0], macs) | dense)
    known = {label for column in columns for label, cell in column.items() if cell.value}
    labels = [label for label in order if label in known]
    return {label: [column.get(label, Cell()) for column in columns] for label in labels}


def _quality(reports: Sequence[ModelReport]) -> tuple[list[dict[str, Cell]], dict[str, Cell]]:
    """The main number and agreement of each model by label, on all sets, and those of the dense.

    The latter are of the first model's baseline, if that is its dense source.
    """
    main = next((metric for metric in main_metrics(reports) if metric is not None), None)
    if main is None:
        return [{} for _ in reports], {}

    def order(metric: Metric) -> tuple[bool, bool]:
        return metric.name != main.name, isinstance(metric, Mean)

    columns = [
        {
            metric_key(metric): metric
            for metric in own
            if metric.name in (main.name, AGREEMENT)
            and metric.protocol.get("task") == main.protocol.get("task")
        }
        for own in numbers_of(reports)
    ]
    found = {key: metric for column in columns for key, metric in column.items()}
    keys = sorted(found, key=lambda key: order(found[key]))
    labels = dict(zip(keys, fmt.metric_labels(found[key] for key in keys), strict=True))
    cells: list[dict[str, Cell]] = []
    dense: dict[str, Cell] = {}
    for report, column in zip(reports, columns, strict=True):
        cells.append({})
        for key, label in labels.items():
            metric, is_main = column.get(key), key == metric_key(main)
            cells[-1][label] = _measured(report, metric, with_ratio=not is_main)
            if is_main:
                cells[-1]["difference to dense"] = _difference(report, metric)
            cells[-1][f"{label} at int8"] = _measured(report, file_metric(report, found[key]))
            if metric and metric.difference and not other_baseline(report, metric):
                dense.setdefault(label, Cell(fmt.value_text(metric.difference.baseline_value)))
    return cells, dense


def _measured(report: ModelReport, metric: Metric | None, *, with_ratio: bool = True) -> Cell:
    if metric is None:
        return Cell()
    notes = [] if metric.interval is None else [fmt.interval_text(metric.interval)]
    ratio = beside_dense(report, metric).ratio
    notes += [fmt.ratio_text(ratio)] if with_ratio and ratio is not None else []
    return Cell(fmt.value_text(metric.value), "; ".join(notes))


def _column(
    report: ModelReport,
    macs: str,
    errors: dict[str, str],
    quality: dict[str, Cell],
    speed: Speed | None,
) -> dict[str, Cell]:
    """All quantities of a model by label, the same for each model."""
    calibration, start = calibration_text(report), start_text(report)
    facts = [report.family, *([start] if start else [])]
    facts += [f"calibration {calibration}"] if calibration else []
    disk, depth, own = report.bytes_on_disk, report.depth, dict(list(report.errors.items())[:1])
    share = fmt.share_text(disk.kept) if disk.kept != 1 else ""
    fast = speed and int8_speed(report, speed)
    return {
        "method": Cell(report.method, "; ".join(facts)),
        "parameters": _amount(report.parameters.total),
        **{f"  {name}": _amount(part) for name, part in parts_of(report).items()},
        "blocks": Cell(f"{depth.kept} of {depth.blocks}", depth.which) if depth else Cell(),
        "vocabulary": _vocabulary(report.vocabulary),
        "bytes on disk": Cell(fmt.bytes_text(disk.now), share),
        "int8 file": _int8_file(report.exports),
        "stored in": Cell(str(report.storage)) if report.storage else Cell(),
        macs: _amount(report.macs_per_token),
        **_budget(report.budget),
        **{text: Cell(fmt.error_text(own[k]) if k in own else "") for k, text in errors.items()},
        "trained": Cell(healed_text(report)),
        **quality,
        "speed": _speed(speed),
        "speed at int8": Cell(fmt.speed_text(fast), dense_there(fast)) if fast else Cell(),
    }


def _vocabulary(vocabulary: Vocabulary | None) -> Cell:
    if vocabulary is None:
        return Cell()
    return Cell(f"{vocabulary.rows:,}", f"{vocabulary.rows / vocabulary.before:.1%}")


def _dense_column(report: ModelReport, macs: str) -> dict[str, Cell]:
    """Column of the dense model that a model was made from, by label."""
    total = report.parameters.total.dense
    found = {"method": Cell("dense", report.source or "")}
    for name, part in parts_of(report).items():
        note = f"{part.dense / max(1, total):.1%} of the model" if part.dense else ""
        found[f"  {name}"] = Cell(f"{part.dense:,}", note)
    found["parameters"] = Cell(f"{total:,}")
    found["bytes on disk"] = Cell(fmt.bytes_text(report.bytes_on_disk.dense))
    found["int8 file"] = _int8_file(report.dense_exports)
    found[macs] = Cell(f"{report.macs_per_token.dense:,}")
    if report.depth is not None:
        found["blocks"] = Cell(str(report.depth.blocks))
    if report.vocabulary is not None:
        found["vocabulary"] = Cell(f"{report.vocabulary.before:,}")
    return found


def parts_of(report: ModelReport) -> dict[str, Amount]:
    """Splits the parameters of a model into parts that add up to all of them."""
    parts = report.parameters
    dense = parts.blocks.dense - parts.rewritten.dense
    return {
        "rewritten layers": parts.rewritten,
        "rest of the blocks": Amount.of(dense, parts.blocks.now - parts.rewritten.now),
        "embeddings": parts.embeddings,
        "elsewhere": parts.other,
    }


def _amount(amount: Amount) -> Cell:
    if not amount.dense and not amount.now:
        return Cell()
    return Cell(f"{amount.now:,}", fmt.share_text(amount.kept) if amount.kept != 1 else "")


def _budget(budget: BudgetPlan | None) -> dict[str, Cell]:
    limit = error = Cell()
    if budget is not None and budget_rows(budget):
        limit = Cell(f"{budget.asked}, {_SHARED[budget.chosen]}")
    if budget is not None and budget.error is not None:
        others = [f"{name} {fmt.error_text(e)}" for name, e in _other_errors(budget).items()]
        error = Cell(fmt.error_text(budget.error), "; ".join(others))
    return {"budget": limit, "predicted error": error}


def _difference(report: ModelReport, metric: Metric | None) -> Cell:
    if metric is None or metric.difference is None:
        return Cell()
    found = metric.difference
    notes = [] if found.interval is None else [fmt.interval_text(found.interval, signed=True)]
    ratio, other = fmt.ratio_text(metric.ratio), other_baseline(report, metric)
    notes += [f"against {other}, not dense"] if other else []
    notes += [ratio] if ratio else []
    return Cell(fmt.signed_text(found.value), "; ".join(notes))


def _speed(speed: Speed | None) -> Cell:
    if speed is None:
        return Cell()
    times = map(fmt.milliseconds_text, (speed.milliseconds, speed.baseline_milliseconds))
    return Cell(fmt.speed_text(speed), f"{' of '.join(times)}; {fmt.pass_text(speed)}")


def _int8_file(files: Sequence[ExportedFile]) -> Cell:
    own = file_of(files)
    if own is None:
        return Cell()
    return Cell(fmt.bytes_text(own.bytes), f"cosine with PyTorch {fmt.value_text(own.agreement)}")
