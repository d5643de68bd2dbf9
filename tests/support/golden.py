"""Golden files: what the program said when somebody last looked, and how it differs now.

    def test_help(golden: Golden) -> None:
        golden.text("help/convert.txt", run("convert", "--help").out)

Files lie in `tests/golden/files`. `pytest tests/golden --update-golden` writes what is found.
"""

import difflib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import tcompress
from tests.support.golden_documents import by_name, dumped, folded, unfolded

FOLDER = Path(__file__).parents[1] / "golden" / "files"
UPDATE = "--update-golden"
_MOST = 300  # lines of a difference
_DIGITS = 6  # of floats in documents
_PATTERNS = {
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.:+Z]*": "<time>",
    r"\b\d+\.\d s\b": "<seconds> s",
    rf"(?<= ){re.escape(tcompress.__version__)}\b": "<version>",
}
# Keys of documents whose values differ from run to run, from machine to machine, or with versions.
_VARYING = {"created", "seconds", "stage_seconds", "fingerprint", "tool_version", "environment"}


class Golden:
    """Compares with golden files in a folder, or writes them if they are to be updated."""

    def __init__(self, folder: Path = FOLDER, *, update: bool = False) -> None:
        self._folder, self._update = folder, update

    def text(self, name: str, found: str) -> None:
        """Compares text; spaces at the ends of lines do not count."""
        lines = [line.rstrip() for line in masked(found).splitlines()]
        self._same(self._folder / name, "\n".join(lines).strip("\n") + "\n")

    def document(
        self, name: str, found: Any, *, hide: Collection[str] = (), within: float = 1e-4
    ) -> None:
        """Compares what JSON can hold, but not what keys to `hide` have beside those that vary.

        Floats may differ by `within` of them: kernels round differently.
        """
        path = self._folder / name
        wanted = unfolded(json.loads(path.read_text("utf-8"))) if path.exists() else None
        shown = _hidden(json.loads(masked(json.dumps(found))), _VARYING | {*hide})
        self._same(path, dumped(folded(_settled(shown, wanted, within))) + "\n")

    def tensors(self, name: str, found: Mapping[str, Tensor], *, within: float = 1e-4) -> None:
        """Compares tensors, which may differ by `within` of their largest numbers."""
        from safetensors.torch import load_file, save_file

        path = self._folder / name
        wanted = load_file(path) if path.exists() else {}
        lines = [*_differences(found, wanted, within)]
        if lines and self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({key: tensor.contiguous() for key, tensor in found.items()}, path)
        elif lines:
            self._fail(path, lines)

    def only(self, folder: str, names: Iterable[str]) -> None:
        """Refuses files in a folder that no test compares with any more."""
        here = self._folder / folder
        for path in sorted({*here.iterdir()} - {here / name for name in names}):
            if not self._update:
                self._fail(path, ["no test compares with this file"])
            path.unlink()

    def _same(self, path: Path, found: str) -> None:
        wanted = path.read_text("utf-8") if path.exists() else ""
        if found == wanted:
            return
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, "utf-8")
            return
        both = (wanted.splitlines(), found.splitlines())
        self._fail(path, [*difflib.unified_diff(*both, "golden", "found", n=4, lineterm="")])

    def _fail(self, path: Path, lines: list[str]) -> None:
        name = path.relative_to(self._folder)
        more = [f"... and {len(lines) - _MOST} more lines"] if len(lines) > _MOST else []
        said = [f"not as in tests/golden/files/{name}:", "", *lines[:_MOST], *more, ""]
        said.append(f"If this is meant: pytest tests/golden {UPDATE}, then look at `git diff`.")
        pytest.fail("\n".join(said), pytrace=False)


def masked(text: str) -> str:
    """Replaces what differs from run to run: the working folder, times, our own version."""
    text = text.replace(str(Path.cwd()), "<here>")
    for pattern, name in _PATTERNS.items():
        text = re.sub(pattern, name, text)
    return text


def _hidden(value: Any, keys: Collection[str], name: str = "") -> Any:
    """Replaces the values of keys by their names, and rounds floats."""
    if name == "stage_seconds":  # which stages took any time varies too
        return f"<{name}>"
    if isinstance(value, dict):
        return {
            key: _hidden(item, keys, name or key * (key in keys)) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_hidden(item, keys, name) for item in value]
    if name and value is not None:
        return f"<{name}>"
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _settled(found: Any, wanted: Any, within: float) -> Any:
    """What was found, with the golden floats where they are near."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return {key: _settled(item, wanted.get(key), within) for key, item in found.items()}
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        rows = by_name(wanted)  # which are in another order if they were folded
        return [_settled(item, rows.get(name), within) for name, item in by_name(found).items()]
    if isinstance(found, float) and isinstance(wanted, float):
        return wanted if math.isclose(found, wanted, rel_tol=within, abs_tol=1e-9) else found
    return found


def _differences(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], within: float
) -> Iterable[str]:
    for name in sorted({*found, *wanted}):
        one, two = found.get(name), wanted.get(name)
        if one is None or two is None:
            yield f"{'-' if one is None else '+'} {name}"
        elif (one.shape, one.dtype) != (two.shape, two.dtype):
            yield f"- {name}: {two.dtype} {tuple(two.shape)}"
            yield f"+ {name}: {one.dtype} {tuple(one.shape)}"
        else:
            far = float((one - two).abs().max() / two.abs().max().clamp(min=1e-30))
            if not far <= within:  # NaN is far too
                yield f"! {name}: {far:.1e} of its largest number away, {within:.0e} are allowed"
