"""What is told of a mistyped path: at once, without the libraries that take seconds to import."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import commands

SVD = "--method svd --target 0.5"
PERPLEXITY = "--task perplexity --data nowhere.txt"
# Commands with what each says; what begins with `nowhere` is not there, and `full` is not empty.
COMMANDS = {
    f"convert ./nowhere {SVD}": "no folder `./nowhere`",
    f"convert ./nowhere {SVD} --dry-run": "no folder `./nowhere`",
    f"convert ./nowhere {SVD} --speedup 2,4": "no folder `./nowhere`",
    f"convert nowhere {SVD}": "`nowhere` is neither a local folder",
    f"convert empty {SVD}": "`empty` has no `config.json`",
    f"convert empty {SVD} -o full --calib nowhere.txt": "3 problems",
    f"convert nowhere {SVD} -o file/below": "cannot be written",
    "finetune ./nowhere --data nowhere.txt": "2 problems",
    "finetune nowhere --teacher ./nowhere": "no folder `./nowhere`",
    "finetune nowhere -o full": "full` is not empty",
    "inspect ./nowhere": "no folder `./nowhere`",
    "inspect ./nowhere --verify": "no folder `./nowhere`",
    "report ./nowhere --html nowhere/a.html": "2 problems",
    "report nowhere": "`nowhere` is neither a local folder",
    f"evaluate ./nowhere {PERPLEXITY} --baseline ../nowhere": "3 problems",
    "bench ./nowhere --against ../nowhere": "2 problems",
    "export ./nowhere -o full": "2 problems",
    "compress ./nowhere --size 10MB --data nowhere.txt": "2 problems",
    "run nowhere.yaml": "no file `nowhere.yaml`",
    "run all.yaml": "5 problems",
    "run sweep.yaml": "3 problems",
    "sweep ./nowhere --calib nowhere.txt -o full": "3 problems",
    "demo --keep-dir full": "`full` is not empty",
    "recipes validate nowhere.yaml": "no file `nowhere.yaml`",
    "recipes copy vision/vit-lprod file/below": "cannot be written",
}  # fmt: skip
STAGES = """\
recipe_version: 1
model: ./nowhere
output: made
report: nowhere/report.html
convert: {method: svd, target: 0.5, calibration: {source: [nowhere.csv]}}
"""
TRAINED = """\
output: full
finetune: {teacher: ../nowhere, data: {source: [nowhere.txt]}}
evaluate: [{task: perplexity, data: [nowhere.jsonl]}]
"""
# Runs commands in one process; what one imports would be there for all that follow.
SCRIPT = """\
import contextlib, io, json, sys
from tcompress.cli.main import main
slow = ("torch", "transformers", "datasets", "pandas", "pyarrow", "scipy")
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(line.split())
        except SystemExit as ended:
            code = ended.code
    imported = [name for name in slow if name in sys.modules]
    print(json.dumps([line, code, err.getvalue(), imported]))
"""


def _answers(lines: Iterable[str], folder: Path) -> list[Any]:
    """Commands with their exit codes, what they say, and what heavy modules they import."""
    lines = [*lines]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(lines), cwd=folder, check=True, capture_output=True, text=True,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line, *_ in answers] == lines
    return answers


def test_help_of_every_command_imports_nothing_heavy(tmp_path: Path) -> None:
    lines = [f"{name} --help" for name, _ in commands()]
    assert [answer[1:] for answer in _answers(lines, tmp_path)] == [[0, "", []]] * len(lines)


def test_mistyped_paths_are_told_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("full", "empty"):
        (tmp_path / name).mkdir()
    for name in ("full/mine", "file"):
        (tmp_path / name).touch()
    (tmp_path / "all.yaml").write_text(STAGES.replace("output: made\n", "") + TRAINED)
    (tmp_path / "sweep.yaml").write_text(f"{STAGES}sweep: {{}}\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for line, code, text, imported in _answers(COMMANDS, tmp_path):
        assert code == 2, (line, text)
        assert COMMANDS[line] in text, (line, text)
        assert imported == [], line
