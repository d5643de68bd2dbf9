"""Recipes that ship with the package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tcompress.errors import InputError
from tcompress.models import ALIASES
from tcompress.options import (
    copy_recipe,
    dump_recipe,
    find_recipe,
    library,
    parse_recipe,
    recipe_names,
    recipe_text,
)

FOLDER = Path(__file__).parents[1] / "recipes"
FILES = sorted(FOLDER.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_recipe(path: Path) -> None:
    recipe = parse_recipe(path.read_text("utf-8"), str(path))
    assert parse_recipe(dump_recipe(recipe), "a") == recipe
    assert recipe.name == path.stem
    known = recipe.model in ALIASES or str(recipe.model).count("/") == 1  # a hub id
    assert known is (recipe.architecture is None)
    assert recipe.description is not None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_of_a_shipped_recipe_has_a_comment(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert [line for line in lines if line and "# " not in line] == []
    assert max(map(len, lines)) <= 100


def test_names_are_the_files_at_any_depth() -> None:
    names = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FILES]
    assert recipe_names() == tuple(sorted(names))
    assert "encoder/minilm-lprod" in names  # hints speak of it


def test_installed_recipes_lie_inside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "tcompress" / "assets" / "recipes" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "c.yaml").write_text("text")
    (deep / "README.md").write_text("no recipe")
    monkeypatch.setattr(library, "files", lambda name: tmp_path / name)
    assert recipe_names() == ("a/b/c",)
    assert recipe_text("a/b/c") == "text"


def test_package_without_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "files", lambda name: tmp_path / name)
    assert recipe_names() == ()


def test_find_by_name_with_or_without_suffix() -> None:
    text = (FOLDER / "encoder" / "minilm-lprod.yaml").read_text("utf-8")
    found = (text, "encoder/minilm-lprod.yaml")
    assert find_recipe("encoder/minilm-lprod") == find_recipe("encoder/minilm-lprod.yaml") == found


def test_file_wins_over_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "encoder").mkdir()
    mine = tmp_path / "encoder" / "minilm-lprod"
    mine.write_text("mine")
    assert find_recipe("encoder/minilm-lprod") == ("mine", "encoder/minilm-lprod")
    assert find_recipe(str(mine)) == ("mine", str(mine))


def test_copy_to_a_file_in_a_new_folder(tmp_path: Path) -> None:
    target = tmp_path / "new" / "my.yaml"
    assert copy_recipe("vision/vit-lprod", target) == target
    assert target.read_text("utf-8") == recipe_text("vision/vit-lprod")


def test_copy_into_a_folder(tmp_path: Path) -> None:
    assert copy_recipe("vision/vit-lprod", tmp_path) == tmp_path / "vit-lprod.yaml"


def test_copy_to_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "below" / "my.yaml"
    with pytest.raises(InputError) as caught:
        copy_recipe("vision/vit-lprod", target)
    assert caught.value.message == f"`{target}` cannot be written (Not a directory)"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is a named pipe, not an ordinary file"):
        copy_recipe("vision/vit-lprod", tmp_path / "pipe", force=True)
