"""The recipes that ship, with random damage: each ends in an answer, and none in an accident."""

from __future__ import annotations

import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tcompress.options import recipe_names, recipe_text
from tests.support.cli import run
from tests.support.model_folders import model_folder, nested_items

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(60)]

COUNT, AT_ONCE = 800, 20
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 64, "model_type": "bert", "vocab_size": 100}  # fmt: skip
WRONG: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 25, 1000, 10**6, 10**9, 10**30, -(10**30), 0.5, 1.5,
    25.0, 1e30, 1e-300, -0.25, "", " ", "svd", "SVD", "lprod", "auto", "tt", "hot", "tam", "25%",
    "1e400", "nan", ".inf", "2GB", "re:(", "re:(.+)+x", "re:" + "(a?" * 30 + ")" * 30, "*" * 50,
    "🦊", "١٢", "\x1b[31mred", "\u202egnp.exe", "a" * 5000, "x: y", [], {}, [[]], {"": None},
    [1, "a", None], {"name": "svd"}, {"name": "lprod", "p": 10**9, "pad": True},
    {"name": "tt", "order": 16, "rank": 10**9}, {"name": "tucker", "share": "model", "rank": 10**9},
    {"name": "lprod", "residual_rank": 3}, list(range(3000)), {str(key): key for key in range(300)},
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for family in ("bert", "gpt2", "vit"):
        model_folder(family, folder / family)
    return folder


def _damage(data: Any, draw: random.Random) -> None:
    holder, key = draw.choice([*nested_items(data)])
    how = draw.choice(("value", "value", "value", "remove", "rename", "nest", "move"))
    if type(holder[key]) in (int, float) and draw.random() < 0.7:
        holder[key] *= draw.choice((-1, 0, 2, 10, 100, 10**4, 10**6, 10**9, 10**25, 0.5, 1e4))
    elif how == "remove":
        del holder[key]
    elif how == "rename" and isinstance(holder, dict):
        holder[draw.choice((key[:-1], key + "s", key.upper(), "é" + key, key * 50))] = holder[key]
    elif how == "nest":
        for _ in range(draw.choice((1, 5, 90))):
            holder[key] = draw.choice(([holder[key]], {"name": holder[key]}))
    elif how == "move":
        other, place = draw.choice([*nested_items(data)])
        if isinstance(other[place], str | int | float | None):
            holder[key] = other[place]
    else:
        holder[key] = deepcopy(draw.choice(WRONG))  # it may be damaged further


def _recipe(seed: int) -> str:
    draw = random.Random(seed)
    name = recipe_names()[seed % len(recipe_names())]
    data = yaml.safe_load(recipe_text(name))
    if "architecture" in data:
        data["architecture"] = dict(SIZES)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if data:
            _damage(data, draw)
    if draw.randrange(20) == 0:
        return "recipe_version: 1\nconvert: " + "[" * 3000 + "]" * 3000  # deeper than one may go
    text = yaml.safe_dump(data, allow_unicode=True, sort_keys=False, width=10_000)
    lines = text.splitlines()
    at = draw.randrange(len(lines))
    if (how := draw.randrange(16)) == 0:
        lines.insert(at, draw.choice(lines))  # most often a key that is given twice
    elif how == 1:
        lines[at] = draw.choice(
            ("\t", "  ", "&a ", "*a", "!!python/object:os.system ", "- ", "{", "'")
        )
    elif how == 2:
        lines[at] = lines[at].replace(
            ": ", draw.choice((":", " : ", ": : ", ": |", ": &a [*a]")), 1
        )
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("start", range(0, COUNT, AT_ONCE))
def test_a_damaged_recipe(start: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for seed in range(start, start + AT_ONCE):
        text = _recipe(seed)
        Path("my.yaml").write_text(text)
        model = ("bert", "gpt2", "vit")[seed // 3 % 3]
        own = ["--model", model] if "architecture:" not in text else []
        for given in (["recipes", "validate", "my.yaml"], ["run", "my.yaml", "--dry-run", *own]):
            done = run(*given)
            said = f"seed {seed}: {given}\n{done.err[:3000]}"
            assert "Traceback" not in done.err, said
            assert "unexpected `" not in done.err, said
            assert done.code == 0 or (done.code == 2 and done.err.startswith("error: ")), said
            if done.code and given[0] == "recipes":
                assert "\n\nhint: " in done.err, said
                break  # it is not run
