"""What a user may ask for, declared once: models of options, and recipes made of them.

A field of a model is a flag with its help and completion (`cli/flags.py`), a key of recipes, a
keyword in Python and a row of the reference; `fields.py` says how one is declared, `read.py` reads
values from anywhere. Nothing here imports torch. Names are looked up on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcompress.options.attention import AttentionSpec, mechanism_names
    from tcompress.options.change import change_recipe, check_recipe, choose_variants
    from tcompress.options.convert import Calibration, Convert, Embeddings, LayerRule
    from tcompress.options.fields import DType
    from tcompress.options.library import copy_recipe, find_recipe, recipe_names, recipe_text
    from tcompress.options.load import dump_recipe, load_recipe, parse_recipe
    from tcompress.options.measuring import Bench, Evaluate
    from tcompress.options.methods import (
        AutoSpec,
        MethodSpec,
        default_method,
        lookup_methods,
        method_names,
    )
    from tcompress.options.recipe import RECIPE_VERSION, Recipe, Sweep, json_schema
    from tcompress.options.scratch import Architecture, PaperRow, Words
    from tcompress.options.training import Finetune, TrainingData

_HOMES = {
    "attention": ("AttentionSpec", "mechanism_names"),
    "change": ("change_recipe", "check_recipe", "choose_variants"),
    "convert": ("Calibration", "Convert", "Embeddings", "LayerRule"),
    "fields": ("DType",),
    "library": ("copy_recipe", "find_recipe", "recipe_names", "recipe_text"),
    "load": ("dump_recipe", "load_recipe", "parse_recipe"),
    "measuring": ("Bench", "Evaluate"),
    "methods": ("AutoSpec", "MethodSpec", "default_method", "lookup_methods", "method_names"),
    "recipe": ("RECIPE_VERSION", "Recipe", "Sweep", "json_schema"),
    "scratch": ("Architecture", "PaperRow", "Words"),
    "training": ("Finetune", "TrainingData"),
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
