"""Models whose word embedding is rewritten."""

from pathlib import Path
from typing import Any

from tests.support.conversions import make

METHODS: dict[str, dict[str, Any]] = {
    "svd": {"method": {"name": "svd"}, "target": 0.5},
    "tt": {"method": {"name": "tt"}, "target": 0.5},
    "qtt": {"method": {"name": "qtt", "rank": 4}},
    "tucker": {"method": {"name": "tucker"}, "target": 0.5},
}
ALONE: dict[str, Any] = {"method": None, "target": None}


def made(family: str, folder: Path, table: str = "svd", *, aware: bool = False, **more: Any) -> Any:
    options = {**ALONE, "embeddings": METHODS[table], **more}
    return make(family, folder, aware=aware, **options)
