"""`tcompress recipes reference`, and the commands in comments of recipes."""

from __future__ import annotations

import re

import pytest

from tcompress.options import change_recipe, parse_recipe, recipe_names, recipe_text


@pytest.mark.parametrize("name", recipe_names())
def test_changes_in_comments_fit_the_recipe(name: str) -> None:
    text = recipe_text(name)
    comments = " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))
    changes = re.findall(r"--set (\S+=\S+)", comments)
    assert change_recipe(parse_recipe(text, name), changes)
