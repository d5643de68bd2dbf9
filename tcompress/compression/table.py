"""What `compress` shows at the end: the model beside those that one would take in its place.

The same is written beside the model: into its card, and as a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tcompress.artifact.checksums import digest_of, seal
from tcompress.artifact.manifest import Alternative, Interval, read_manifest, write_manifest
from tcompress.compression.attempts import Goal, Measured
from tcompress.exports.onnx_folder import with_files
from tcompress.fields import RuntimeName
from tcompress.files import write_text
from tcompress.models.names import CARD, PAGE
from tcompress.reporting.headline import Headline, headline_of
from tcompress.reporting.model_report import report_of
from tcompress.reporting.page import write_html


@dataclass(frozen=True)
class Row:
    """A model in the table."""

    name: str
    runtime: RuntimeName
    bytes: int  # of what the runtime reads
    speedup: float  # over the dense model in PyTorch
    quality: float | None = None
    interval: tuple[float, float] | None = None  # of the quality, 95 %
    agreement: float | None = None
    """With the dense model in PyTorch, on the labelled data; without, on texts held out."""


@dataclass(frozen=True)
class Compressed:
    """Written folder, and what was measured of it."""

    folder: Path
    file: str  # that the runtime reads, inside the folder
    rows: tuple[Row, ...]
    quality: str | None  # name of the number
    healed: str  # what became of healing, in words
    usage: str  # a few lines of Python
    agreement: float | None = None  # with the dense model on held-back texts, in PyTorch
    missed: tuple[str, ...] = ()  # goals that were not reached, in words
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}


def kept_layers(count: int, kept: int) -> tuple[int, ...]:
    """Choose layers at equal distances, the last one among them: 1, 3, 5 of six."""
    return tuple((place + 1) * count // kept - 1 for place in range(kept))


def layers_that_reach(count: int, goal: Goal, dense: Measured, layer_bytes: int) -> int:
    """Tell how many whole layers reach a goal, if all of the time is theirs; 0 if none do."""
    kept = count
    if goal.speedup is not None and dense.speedup < goal.speedup:
        kept = min(kept, int(count * dense.speedup / goal.speedup))
    if goal.bytes is not None and dense.bytes > goal.bytes:
        kept = min(kept, count - -(-(dense.bytes - goal.bytes) // layer_bytes))
    return max(0, kept)


_SENTENCES = """# In an environment of its own: pip install 'sentence-transformers[onnx]'
from sentence_transformers import SentenceTransformer
options = {{"file_name": "{file}"}}
model = SentenceTransformer("{folder}", backend="onnx", model_kwargs=options)
vectors = model.encode(["A red fox."])"""
_ONNX = """import onnxruntime, transformers
inputs = transformers.{reader}.from_pretrained("{folder}")({given}, return_tensors="np")
outputs = onnxruntime.InferenceSession("{folder}/{path}").run(None, dict(inputs))"""
_ONNX_WRITER = """# In an environment of its own: pip install 'optimum-onnx[onnxruntime]'
import transformers
from optimum.onnxruntime import ORTModelForCausalLM
inputs = transformers.{reader}.from_pretrained("{folder}")({given}, return_tensors="pt")
options = {{"subfolder": "onnx", "file_name": "{file}"}}
model = ORTModelForCausalLM.from_pretrained("{folder}", **options)
outputs = model.generate(**inputs, max_new_tokens=64)"""
_TORCH = """import tcompress, transformers
inputs = transformers.{reader}.from_pretrained("{folder}")({given}, return_tensors="pt")
model = transformers.{kind}.from_pretrained("{folder}")
outputs = model{call}"""


def usage_of(
    folder: Path, file: str, kind: str, *, sentences: bool, pictures: bool, writes: bool
) -> str:
    """Write a few lines of Python that run the model.

    Args:
        folder: The written folder.
        file: What the runtime reads, inside the folder.
        kind: Class of the model in Transformers.
        sentences: Whether it is a folder of sentence-transformers.
        pictures: Whether it reads pictures.
        writes: Whether it writes tokens, each after those before.
    """
    here = Path.cwd()
    facts = {
        "folder": str(folder.relative_to(here) if folder.is_relative_to(here) else folder),
        "path": file,
        "file": Path(file).name,
        "kind": kind,
        "reader": "AutoImageProcessor" if pictures else "AutoTokenizer",
        "given": "picture" if pictures else '"A red fox."',
        "call": ".generate(**inputs, max_new_tokens=64)" if writes else "(**inputs)",
    }
    if not file.endswith(".onnx"):
        return _TORCH.format(**facts)
    return (_SENTENCES if sentences else _ONNX_WRITER if writes else _ONNX).format(**facts)


def columns(rows: Sequence[Row], quality: str | None) -> list[str]:
    """Name the columns that rows have values for."""
    names = ["runtime", "MB", "speed"]
    if quality is not None:
        names += [quality]
    if any(row.agreement is not None for row in rows):
        names += ["agreement"]
    return names


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
