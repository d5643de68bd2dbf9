"""What a recipe says, from YAML to models with readable errors, and the recipes that ship.

Names are looked up on first use, so that listing recipes costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcompress.recipe.attention import AttentionSpec, mechanism_names
    from tcompress.recipe.change import change_recipe, check_recipe, choose_variants
    from tcompress.recipe.docs import json_schema, reference_markdown
    from tcompress.recipe.library import copy_recipe, find_recipe, recipe_names, recipe_text
    from tcompress.recipe.load import dump_recipe, load_recipe, parse_recipe
    from tcompress.recipe.methods import (
        AutoSpec,
        MethodSpec,
        default_method,
        lookup_methods,
        method_names,
        structure_of,
    )
    from tcompress.recipe.schema import (
        RECIPE_VERSION,
        Calibration,
        Convert,
        LayerRule,
        Recipe,
    )

__all__ = [
    "RECIPE_VERSION",
    "AttentionSpec",
    "AutoSpec",
    "Calibration",
    "Convert",
    "LayerRule",
    "MethodSpec",
    "Recipe",
    "change_recipe",
    "check_recipe",
    "choose_variants",
    "copy_recipe",
    "default_method",
    "dump_recipe",
    "find_recipe",
    "json_schema",
    "load_recipe",
    "lookup_methods",
    "mechanism_names",
    "method_names",
    "parse_recipe",
    "recipe_names",
    "recipe_text",
    "reference_markdown",
    "structure_of",
]

_HOMES = {
    "RECIPE_VERSION": "schema",
    "AttentionSpec": "attention",
    "AutoSpec": "methods",
    "Calibration": "schema",
    "Convert": "schema",
    "LayerRule": "schema",
    "MethodSpec": "methods",
    "Recipe": "schema",
    "change_recipe": "change",
    "check_recipe": "change",
    "choose_variants": "change",
    "copy_recipe": "library",
    "default_method": "methods",
    "dump_recipe": "load",
    "find_recipe": "library",
    "json_schema": "docs",
    "load_recipe": "load",
    "lookup_methods": "methods",
    "mechanism_names": "attention",
    "method_names": "methods",
    "parse_recipe": "load",
    "recipe_names": "library",
    "recipe_text": "library",
    "reference_markdown": "docs",
    "structure_of": "methods",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
