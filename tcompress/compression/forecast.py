"""What `compress` would do, before anything is done."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tcompress.compression.effort import Needs
from tcompress.compression.static_row import TABLE, is_shown
from tcompress.data.inputs import inputs_of
from tcompress.errors import DataError, PlanError
from tcompress.fields import RuntimeName
from tcompress.models import SourceModel
from tcompress.options import Finetune
from tcompress.options.choose import conversion
from tcompress.options.compress_options import Compress
from tcompress.options.method_options import NARROWING
from tcompress.options.read import read
from tcompress.planning.costs import disk_bytes
from tcompress.planning.planner import make_plan
from tcompress.planning.sites import roles_of
from tcompress.training.encoded_examples import ExampleEncoder
from tcompress.training.setup import check_run


@dataclass(frozen=True)
class Forecast:
    """The stages, and what is known of them."""

    bytes: int  # of the dense model
    bytes_there: int  # of its weights in the runtime
    stages: tuple[str, ...]
    unknown: str
    least_minutes: float  # of all stages on this machine, healing not counted, about
    too_short: str | None  # what is said where the time is less than that


def bytes_of_weights(source: SourceModel, runtime: RuntimeName) -> int:
    """Tell what the weights of a dense model take in a runtime, without names and shapes."""
    if runtime == "torch":
        return source.store.total_bytes
    return disk_bytes(source, make_plan(conversion({"bits": 8}), source), None)


def check_size(source: SourceModel, settings: Compress) -> None:
    """Refuse, before any work, a size below the smallest that layers and embeddings can take.

    What tokens that are left out give is known only with the data.

    Raises:
        PlanError: It is out of reach; the message says the least.
    """
    runtime = settings.runtime or "onnx-int8"
    if settings.most_bytes is None or settings.vocab is not None:
        return
    if bytes_of_weights(source, runtime) <= settings.most_bytes:
        return
    bits = {} if runtime == "torch" else {"bits": 8}
    size = {"method": {"name": NARROWING}, "target_bytes": settings.most_bytes, **bits}
    try:
        make_plan(conversion(size), source)
    except PlanError as error:
        unit = "" if isinstance(settings.size, str) else ", in bytes,"
        text = f"`--size {settings.size}`{unit} is out of reach: {reason_of(error)} in {runtime}"
        raise PlanError(text, smaller_ways(source, settings)) from error


def healing(settings: Compress, **more: Any) -> Finetune:
    """Give the options of healing."""
    data = {"data": {"source": list(settings.data)}} if settings.data else {}
    return read(Finetune, {"seed": settings.seed, **data, **more})


def why_unhealed(source: SourceModel) -> str | None:
    """Say why a model cannot be healed, whatever the data."""
    options = Finetune()
    try:
        ExampleEncoder.of(source, None, options.seed, options.data.max_length)
    except DataError as error:
        return error.message
    return None


def check_healing(source: SourceModel, settings: Compress) -> None:
    """Refuse, before any work, data that a model cannot be healed on, if it has to be."""
    if not _cuts_nothing(source, settings) and why_unhealed(source) is None:
        check_run(source, [source], healing(settings))


def _cuts_nothing(source: SourceModel, settings: Compress) -> bool:
    """Tell whether the dense file is small enough, where nothing else is asked for."""
    cuts = settings.speedup is not None or settings.vocab is not None
    most, runtime = settings.most_bytes, settings.runtime or "onnx-int8"
    return not cuts and most is not None and bytes_of_weights(source, runtime) <= most


def reason_of(error: PlanError) -> str:
    """Give what is possible, without the option of a conversion that asked for more."""
    return re.sub(r"^.* is out of reach( at [^:]*)?: ", "", error.message)


def smaller_ways(source: SourceModel, settings: Compress) -> str:
    """Say what to type where a goal is out of reach."""
    more = "ask for less" if settings.size is None else "allow more bytes"
    if not inputs_of(source).text:
        return more
    if settings.vocab is None:
        hint = f"{more}, or leave out the tokens that your data does not need"
        hint += ": `--vocab data`" if settings.data else ": `--vocab data --data FILE`"
    else:
        hint = f"{more}, or keep fewer tokens: `--vocab NUMBER`"
    if is_shown(source, settings):
        hint += f"; or take a {TABLE}, as model2vec makes it"
    return hint


def forecast(source: SourceModel, settings: Compress) -> Forecast:
    """Say what would be tried.

    Raises:
        PlanError: A size is out of reach; the message says the least.
    """
    dense, runtime = source.store.total_bytes, settings.runtime or "onnx-int8"
    as_it_is = bytes_of_weights(source, runtime)
    wide = f"narrow the {len(roles_of(source).blocks)} blocks (neurons and heads)"
    if settings.vocab is not None:
        wide = f"leave out tokens, {wide}"
    goal = [f"to {settings.size}"] if settings.size else []
    goal += [f"to {settings.speedup:g} x the speed at {settings.at}"] if settings.speedup else []
    if settings.max_loss or not goal:
        goal = [f"as far as {settings.max_loss or 0.01:.2%} of agreement allows"]
    check_size(source, settings)
    check_healing(source, settings)
    heal = f"heal on {', '.join(settings.data) or 'text that ships'} in what is left of "
    heal += f"{settings.most_minutes:g} minutes"
    if (why := why_unhealed(source)) is not None:
        heal = f"heal nothing: {why}"
    if _cuts_nothing(source, settings):
        wide, goal = "cut nothing", ["the dense file is small enough"]
        heal = "heal nothing"
    export = "" if runtime == "torch" else "export and time the dense model; "
    rows = "the dense model and fewer layers"
    if is_shown(source, settings):
        rows = f"the dense model, fewer layers and a {TABLE}"
    stages = (
        f"{export}{as_it_is / 1e6:.1f} MB in {runtime}, {dense / 1e6:.1f} MB as it is",
        f"{wide}: {' and '.join(goal)}; measured, and repeated up to twice where it misses",
        heal,
        f"measure {settings.task or 'size and speed'} of it, {rows}",
    )
    unknown = "what is lost, and how fast the result is: both are measured on the way"
    needs = Needs.of(source, settings)
    too_short = needs.too_short(settings.most_minutes)
    return Forecast(dense, as_it_is, stages, unknown, round(needs.least, 1), too_short)
