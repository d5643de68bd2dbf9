"""What lies beside the model that `compress` writes: card and page, about the file that ships."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tcompress.artifact.checksums import digest_of, seal
from tcompress.artifact.manifest import Alternative, Interval, read_manifest, write_manifest
from tcompress.compression.table import PAGE, Row
from tcompress.exports.onnx_folder import with_files
from tcompress.files import write_text
from tcompress.models.names import CARD
from tcompress.reporting.headline import Headline, headline_of
from tcompress.reporting.model_report import report_of
from tcompress.reporting.page import write_html


def write_records(
    folder: Path, name: str, rows: Sequence[Row] = (), *, trust_remote_code: bool = False
) -> None:
    """Write the page of `report`, and what was measured into the card; then seal the folder.

    Args:
        folder: The model, with all that was measured in its manifest; without one nothing is done.
        name: Name of the model on the page and in the card.
        rows: What was measured beside it.
        trust_remote_code: Whether Python code that comes with the model may run.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return
    manifest = manifest.model_copy(update={"alternatives": list(map(_alternative, rows))})
    write_manifest(folder, manifest)
    report = report_of(folder, trust_remote_code=trust_remote_code)
    report = report.model_copy(update={"name": name})
    write_html([report], folder / PAGE)
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    exported = [file for file in manifest.exports if file.runtime is not None]
    if exported:
        text = with_files(text, exported)
    title = report.method if report.is_smaller else None
    write_text(card, _with_headline(text, headline_of([report], [name]), after_title=bool(title)))
    known = manifest.checksums | {path.name: digest_of(path) for path in (card, folder / PAGE)}
    write_manifest(folder, manifest.model_copy(update=seal(folder, known)))


def _alternative(row: Row) -> Alternative:
    ends = row.interval and Interval(low=row.interval[0], high=row.interval[1])
    facts = {"name": row.name, "runtime": row.runtime, "bytes": row.bytes, "ratio": row.speedup}
    return Alternative(**facts, value=row.quality, interval=ends, agreement=row.agreement)


def _with_headline(card: str, headline: Headline, *, after_title: bool) -> str:
    """Put a sentence and the figures behind the title of a card, or at its end."""
    lines = [
        f"- {item.label}: {item.value}, {'; '.join((item.words, *item.notes))}"
        for item in headline.figures
    ]
    text = "\n".join([headline.sentence, "", *lines])
    before, mark, rest = card.partition("\n# ")
    if after_title and mark:
        title, _, body = rest.partition("\n")
        return f"{before}{mark}{title}\n\n{text}\n{body}"
    return f"{card.rstrip()}\n\n{text}\n".lstrip()
