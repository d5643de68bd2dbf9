"""Wrong values for every option of every command: all end in words, a hint and exit code 2."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import commands, run
from tests.support.evaluation import classifier, labelled_file

pytestmark = pytest.mark.fuzz

COUNT = 200
RIGHT = {("--only", "*"), ("--threshold", "-1"), ("--threshold", "-7.5")}  # any number
WRONG = (
    "", " ", "-1", "-7.5", "nan", "inf", "1e999", "9" * 400, "0x10", "١٢", "🦊", "no such thing",
    "a=b=c,=", ",", "=", ":", "[", "{", "re:(", "re:(.+)+x", "%s{0}", "'; ls", "\x1b[31mred",
    "~nobody", "x" * 3000, "./no/such/file.csv", "1-", "3x", "None", "true", "SvD!", "--p", "*",
)  # fmt: skip
# What a command needs beside the wrong value, and what keeps it from working long.
COMMANDS: dict[str, list[str]] = {
    "convert": ["bert", "--calib", "none", "--dry-run"],
    "finetune": ["bert", "--data", "rows.jsonl", "--steps", "1", "--teacher", "none"],
    "inspect": ["bert"],
    "report": ["bert"],
    "evaluate": ["bert", "--task", "classification", "--data", "rows.jsonl", "--limit", "2"],
    "bench": ["bert", "--against", "bert", "--batch", "1", "--length", "2", "--repeats", "1"],
    "export": ["bert"],
    "run": ["my.yaml", "--dry-run"],
    "sweep": ["bert", "--calib", "none", "--dry-run"],
    "demo": [],
    "recipes show": [],
    "recipes copy": [],
    "recipes validate": [],
}
# Anything may be a name of a folder, a token or a column; a file has no splits.
OPEN = {"--output", "--token", "--keep-dir", "--html", "--calib", "--calib-columns", "--split"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    classifier(folder / "bert")
    labelled_file(folder / "rows.jsonl")
    (folder / "my.yaml").write_text(
        "recipe_version: 1\nmodel: bert\n"
        "convert: {method: {name: lprod, p: 2}, calibration: {source: none}}\n"
    )
    return folder


def _options(command: Any) -> list[str]:
    """Names of what takes a value; arguments have an empty one."""
    taking = [item for item in command.params if not getattr(item, "is_flag", False)]
    names = ["" if item.param_type_name == "argument" else item.opts[-1] for item in taking]
    return [name for name in names if name not in OPEN]


CASES = [
    (name, option)
    for name, command in commands()
    if name in COMMANDS
    for option in _options(command)
]


@pytest.mark.parametrize("seed", range(COUNT))
def test_a_wrong_value(seed: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    draw = random.Random(seed)
    # Every option once before one comes again.
    command, option = CASES[seed % len(CASES)] if seed < len(CASES) else draw.choice(CASES)
    value = draw.choice([word for word in WRONG if (option, word) not in RIGHT])
    given = [*command.split(), *COMMANDS[command]]
    if option:
        given.append(f"{option}={value}")
    else:
        given[len(command.split()) :] = [value, *given[len(command.split()) + 1 :]]
    done = run(*given)
    assert "Traceback" not in done.err, given
    assert "unexpected `" not in done.err, given
    assert "\x1b" not in done.err, given
    assert done.code == 2, (given, done.err)
    assert "\n\nhint: " in done.err, given
