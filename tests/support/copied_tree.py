"""A copy of the package and its tests, to which examples of the documentation are added."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copied(folder: Path) -> Path:
    """Copy the package and its tests into a folder, and return it."""
    for name in ("tcompress", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def example(heading: str) -> dict[str, str]:
    """Read the code of a section of CONTRIBUTING.md, by the file that it belongs to."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split(f"{heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def in_tree(tree: Path, *arguments: object, **environment: str) -> str:
    """Runs Python on the copy."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
