"""One HTML file with everything in it: no script, no font, no request to anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import tcompress
from tcompress.errors import InputError
from tcompress.files import check_file, unwritable, write_text
from tcompress.reporting import words
from tcompress.reporting.page import page_of, plain
from tcompress.reporting.speed import median_text, memory_text, speed_notes
from tcompress.reporting.tree import ModelReport

if TYPE_CHECKING:
    from jinja2 import Template

_ENDINGS = (".html", ".htm")


def render_html(reports: Sequence[ModelReport]) -> str:
    """Renders models as a page; the same reports always give the same text."""
    return _template().render(page=page_of(reports), version=tcompress.__version__)


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": words.bytes_text,
        "count": words.count_text,
        "coverage": words.coverage_text,
        "duration": words.time_text,
        "error": words.error_text,
        "interval": words.interval_text,
        "machine": words.machine_text,
        "memory": memory_text,
        "median": median_text,
        "milliseconds": words.milliseconds_text,
        "notes": speed_notes,
        "plain": plain,
        "position": lambda items, item: items.index(item),
        "ratio": words.ratio_text,
        "ratio_of": words.metric_ratio,
        "signed": words.signed_text,
        "value": words.value_text,
    }
    source = files("tcompress").joinpath("data", "report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def check_target(path: Path) -> None:
    """Refuses a file that cannot or should not be written.

    Raises:
        InputError: It is a folder, its folder is missing, or it is a file of another kind.
    """
    check_file(path)
    if path.exists() and path.suffix.lower() not in _ENDINGS:
        raise InputError(
            f"`{path}` exists and does not look like a page", "give a name that ends in `.html`"
        )


def write_html(reports: Sequence[ModelReport], path: Path | str) -> Path:
    """Writes models as a page: beside an older one first, then in its place.

    Args:
        reports: The models.
        path: File to write.

    Raises:
        InputError: The file cannot be written there.
    """
    target = Path(path).expanduser()
    check_target(target)
    text = render_html(reports)
    try:
        write_text(target, text)
    except OSError as error:
        raise unwritable(target, error) from error
    return target
