"""The Python interface: what it refuses, and how it names what it writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import tcompress
from tcompress.artifact.workplace import Workplace, check_output
from tcompress.errors import InputError, RecipeError
from tcompress.options import Convert, Finetune
from tests.support.tiny import build


@pytest.fixture
def dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    model: Any = build("bert")
    model.save_pretrained("dense")
    return "dense"


def test_default_folders_tell_sizes_apart(dense: str) -> None:
    for p in (2, 4):
        done = tcompress.convert(dense, method="lprod", p=p, calibration="none")
        assert done.folder.name == f"dense-lprod-p{p}"


def test_embeddings_alone_rewrite_no_layer(dense: str) -> None:
    plan = tcompress.plan(dense, embeddings={"method": {"name": "svd"}, "target": 0.5})
    assert (len(plan.layers), len(plan.embeddings)) == (0, 1)


def test_options_beside_a_recipe_are_not_forgotten(dense: str) -> None:
    recipe = Convert.model_validate({"method": {"name": "svd"}, "target": 0.5})
    with pytest.raises(RecipeError, match="`method`, `target` cannot be given beside a recipe"):
        tcompress.convert(dense, recipe=recipe, method="svd", target=0.25)
    with pytest.raises(RecipeError, match="`steps` cannot be given beside a recipe"):
        tcompress.finetune(dense, recipe=Finetune(), steps=5)


def test_every_budget_chooses_the_structure_of_the_paper(dense: str) -> None:
    plan = tcompress.plan(dense, method="tga", target_params="20K", calibration="none")
    assert plan.attention
    assert {term.structure for entry in plan.layers for part in entry.parts for term in part.terms}


def test_what_is_finished_is_not_thrown_away(tmp_path: Path) -> None:
    place = Workplace(tmp_path / "out", "same")
    (place.model / "weights").write_text("made")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note.txt").write_text("put there meanwhile")
    with pytest.raises(InputError, match="is not empty"):
        place.publish(force=False)
    place.discard()
    (tmp_path / "out" / "note.txt").unlink()
    again = Workplace(tmp_path / "out", "same")
    assert (again.model / "weights").read_text() == "made"
    again.close()


def test_a_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    with pytest.raises(InputError, match="is where another disk is mounted"):
        check_output(tmp_path / "out", force=False)
