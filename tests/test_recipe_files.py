"""Recipes that cannot be read from where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tcompress.errors import RecipeError
from tcompress.options import load_recipe


def test_file_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "frist.yaml")
    assert caught.value.message == (
        f"there is no file `{tmp_path}/frist.yaml`; `{tmp_path}` holds `first.yaml`"
    )
    assert caught.value.hint == "did you mean `first.yaml`?"


def test_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "a" / "b.yaml")
    assert caught.value.message == (
        f"there is no file `{tmp_path}/a/b.yaml`; `{tmp_path}` holds no recipes"
    )
    assert caught.value.hint == "see `tcompress recipes list`"


def test_folder_instead_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").touch()
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path)
    assert caught.value.message == f"`{tmp_path}` is a folder; `{tmp_path}` holds `first.yaml`"
    assert caught.value.hint == "give a file"


def test_file_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("name: é".encode("latin-1"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.message == f"`{path}` is not UTF-8 text, at byte 6"
    assert caught.value.hint == "save it as UTF-8"


def test_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "a.yaml"
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.message == f"`{path}` cannot be read: Not a directory"
