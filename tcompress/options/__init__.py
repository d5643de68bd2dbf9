"""What a user may ask for, from YAML to models with readable errors, and the recipes that ship.

Names are looked up on first use, so that listing recipes costs no import of torch. `schema` is what
a recipe may say, `load` reads one. Open `schema.py` first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcompress.options.convert_options import Calibration, Convert, Embeddings, LayerRule
    from tcompress.options.fields import DType
    from tcompress.options.library import copy_recipe, find_recipe, recipe_names, recipe_text
    from tcompress.options.load import (
        change_recipe,
        check_recipe,
        choose_variants,
        dump_recipe,
        load_recipe,
        parse_recipe,
    )
    from tcompress.options.method_options import (
        AttentionSpec,
        AutoSpec,
        MethodSpec,
        default_method,
        lookup_methods,
        mechanism_names,
        method_names,
    )
    from tcompress.options.schema import RECIPE_VERSION, Recipe, Sweep, json_schema
    from tcompress.options.steps import (
        Architecture,
        Bench,
        Evaluate,
        Finetune,
        PaperRow,
        TrainingData,
        Words,
    )

_HOMES = {
    "method_options": (
        "AttentionSpec",
        "AutoSpec",
        "MethodSpec",
        "default_method",
        "lookup_methods",
        "mechanism_names",
        "method_names",
    ),
    "load": (
        "change_recipe",
        "check_recipe",
        "choose_variants",
        "dump_recipe",
        "load_recipe",
        "parse_recipe",
    ),
    "convert_options": (
        "Calibration",
        "Convert",
        "Embeddings",
        "LayerRule",
    ),
    "fields": ("DType",),
    "library": (
        "copy_recipe",
        "find_recipe",
        "recipe_names",
        "recipe_text",
    ),
    "steps": (
        "Architecture",
        "Bench",
        "Evaluate",
        "Finetune",
        "PaperRow",
        "TrainingData",
        "Words",
    ),
    "schema": (
        "RECIPE_VERSION",
        "Recipe",
        "Sweep",
        "json_schema",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "RECIPE_VERSION",
    "Architecture",
    "AttentionSpec",
    "AutoSpec",
    "Bench",
    "Calibration",
    "Convert",
    "DType",
    "Embeddings",
    "Evaluate",
    "Finetune",
    "LayerRule",
    "MethodSpec",
    "PaperRow",
    "Recipe",
    "Sweep",
    "TrainingData",
    "Words",
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
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
