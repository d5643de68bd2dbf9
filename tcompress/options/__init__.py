"""What a user may ask for, from YAML to models with readable errors, and the recipes that ship.

Nothing here imports torch. `schema` is what a recipe may say, `load` reads one. Open `schema.py`
first.
"""

from tcompress.options.convert_options import Calibration, Convert, Embeddings, LayerRule
from tcompress.options.library import copy_recipe, find_recipe, recipe_names, recipe_text
from tcompress.options.load import (
    change_recipe,
    check_recipe,
    choose_variants,
    dump_recipe,
    parse_recipe,
)
from tcompress.options.method_options import AutoSpec, method_names, replacement_names
from tcompress.options.schema import Recipe, Sweep, json_schema
from tcompress.options.steps import Bench, Evaluate, Finetune, TrainingData

__all__ = [
    "AutoSpec",
    "Bench",
    "Calibration",
    "Convert",
    "Embeddings",
    "Evaluate",
    "Finetune",
    "LayerRule",
    "Recipe",
    "Sweep",
    "TrainingData",
    "change_recipe",
    "check_recipe",
    "choose_variants",
    "copy_recipe",
    "dump_recipe",
    "find_recipe",
    "json_schema",
    "method_names",
    "parse_recipe",
    "recipe_names",
    "recipe_text",
    "replacement_names",
]
