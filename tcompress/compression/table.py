"""What `compress` shows at the end: the model beside those that one would take in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tcompress.fields import RuntimeName

PAGE = "report.html"
"""Name of the page inside the folder."""


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

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Row:
        """Read it from plain data."""
        interval = data["interval"]
        return cls(**{**data, "interval": None if interval is None else tuple(interval)})


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

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Compressed:
        """Read what `to_json` gives."""
        rows = tuple(map(Row.of_json, data["rows"]))
        words = {name: tuple(data[name]) for name in ("missed", "notes")}
        return cls(**{**data, **words, "folder": Path(data["folder"]), "rows": rows})


def kept_layers(count: int, kept: int) -> tuple[int, ...]:
    """Choose layers at equal distances, the last one among them: 1, 3, 5 of six."""
    return tuple((place + 1) * count // kept - 1 for place in range(kept))


def layers_that_reach(
    count: int,
    speedup: float | None,
    dense_speedup: float,
    most_bytes: int | None,
    dense_bytes: int,
    layer_bytes: int,
) -> int:
    """Tell how many whole layers reach a goal, if all of the time is theirs; 0 if none do."""
    kept = count
    if speedup is not None and dense_speedup < speedup:
        kept = min(kept, int(count * dense_speedup / speedup))
    if most_bytes is not None and dense_bytes > most_bytes:
        kept = min(kept, count - -(-(dense_bytes - most_bytes) // layer_bytes))
    return max(0, kept)


_SENTENCES = """# In an environment of its own: pip install 'sentence-transformers[onnx]'
from sentence_transformers import SentenceTransformer
options = {{"file_name": "{file}"}}
model = SentenceTransformer("{folder}", backend="onnx", model_kwargs=options)
vectors = model.encode(["A red fox."])"""
_ONNX = """import onnxruntime, transformers
inputs = transformers.{reader}.from_pretrained("{folder}")({given}, return_tensors="np")
outputs = onnxruntime.InferenceSession("{folder}/{path}").run(None, dict(inputs))"""
_TORCH = """import tcompress, transformers
inputs = transformers.{reader}.from_pretrained("{folder}")({given}, return_tensors="pt")
outputs = transformers.{kind}.from_pretrained("{folder}")(**inputs)"""


def usage_of(folder: Path, file: str, kind: str, *, sentences: bool, pictures: bool) -> str:
    """Write a few lines of Python that run the model.

    Args:
        folder: The written folder.
        file: What the runtime reads, inside the folder.
        kind: Class of the model in Transformers.
        sentences: Whether it is a folder of sentence-transformers.
        pictures: Whether it reads pictures.
    """
    here = Path.cwd()
    facts = {
        "folder": str(folder.relative_to(here) if folder.is_relative_to(here) else folder),
        "path": file,
        "file": Path(file).name,
        "kind": kind,
        "reader": "AutoImageProcessor" if pictures else "AutoTokenizer",
        "given": "picture" if pictures else '"A red fox."',
    }
    if not file.endswith(".onnx"):
        return _TORCH.format(**facts)
    return (_SENTENCES if sentences else _ONNX).format(**facts)


def columns(rows: Sequence[Row], quality: str | None) -> list[str]:
    """Name the columns that rows have values for."""
    names = ["runtime", "MB", "speed"]
    if quality is not None:
        names += [quality]
    if any(row.agreement is not None for row in rows):
        names += ["agreement"]
    return names
