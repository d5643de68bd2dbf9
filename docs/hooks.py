"""Writes the generated parts of the pages when the site is built."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

REFERENCE = "<!-- recipe reference -->"
ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the reference of recipes where a page asks for it."""
    if REFERENCE not in markdown:
        return markdown
    return markdown.replace(REFERENCE, recipe_reference())


def recipe_reference() -> str:
    """The reference as the command prints it, one level deeper and without its title."""
    command = [sys.executable, "-m", "tcompress", "recipes", "reference"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    _, _, text = done.stdout.partition("\n")
    return re.sub(r"^#", "##", text, flags=re.MULTILINE)
