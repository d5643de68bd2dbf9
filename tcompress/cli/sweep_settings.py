"""What options say of a sweep, as a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tcompress.errors import RecipeError

if TYPE_CHECKING:
    from tcompress.recipe import Recipe
    from tcompress.recipe.schema import Finetune


def recipe_of(given: Mapping[str, Any]) -> Recipe:
    """Makes a recipe of the options: that which is named, if any, with changes.

    Raises:
        RecipeError: An option has a value that is not allowed.
    """
    from tcompress.cli.settings import conversion
    from tcompress.recipe import Recipe, change_recipe, find_recipe, parse_recipe
    from tcompress.recipe.schema import Bench, Sweep
    from tcompress.sweeping.cells import default_methods

    text, origin = find_recipe(given["recipe"]) if given["recipe"] is not None else (None, "sweep")
    base = None if text is None else parse_recipe(text, origin)
    names = ("allocation", "keep", "calib", "calib_samples", "calib_columns", "dtype", "device")
    settled = conversion({name: given[name] for name in names}, base)
    made = base or Recipe(recipe_version=1, convert=settled)
    sweep = made.sweep or Sweep(methods=() if base else default_methods())
    changed: dict[str, Any] = {"convert": settled}
    wanted: dict[str, Any] = {}
    if given["methods"]:
        wanted["methods"] = tuple(_method(text) for text in given["methods"].split(","))
    if given["targets"]:
        wanted["targets"] = tuple(_share(text) for text in given["targets"].split(","))
    if given["keep_models"] is not None:
        wanted["keep_models"] = given["keep_models"]
    changed["sweep"] = sweep.model_copy(update=wanted)
    changed["finetune"] = _finetune(given, made)
    changed["evaluate"] = _evaluate(given, made)
    if given["bench"] and made.bench is None:
        changed["bench"] = Bench()
    whole = made.model_copy(update=changed)
    whole = _everywhere(whole, given["device"]) if given["device"] else whole
    return change_recipe(whole, given["changes"] or [], origin)


def _everywhere(recipe: Recipe, device: str) -> Recipe:
    """Puts all that a recipe does on one device."""

    def placed(section: Any) -> Any:
        return section and section.model_copy(update={"device": device})

    return recipe.model_copy(
        update={
            "convert": placed(recipe.convert),
            "finetune": placed(recipe.finetune),
            "evaluate": tuple(map(placed, recipe.evaluate)),
            "bench": placed(recipe.bench),
        }
    )


def _method(text: str) -> Any:
    """Reads `svd`, or `lprod:p=8:transform=dct`."""
    from tcompress.cli.names import METHOD_OPTIONS
    from tcompress.cli.settings import conversion, method_class
    from tcompress.recipe import mechanism_names

    # A tolerance leaves nothing to targets, and lists of structures have commas of their own.
    allowed = [item for item in METHOD_OPTIONS if item not in ("tol", "offer", "trials")]
    name, *pairs = [word.strip() for word in text.split(":")]
    if name in mechanism_names():
        raise RecipeError(
            f"a sweep compares structures of weights, and `{name}` is a mechanism of attention",
            f"convert with it alone: `tcompress convert MODEL --method {name}`",
        )
    kind = method_class(name, "--methods")
    own = ", ".join(f"`{item}`" for item in allowed if item in kind.model_fields)
    options: dict[str, Any] = {}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        field = option.strip().replace("-", "_")
        if not equals or field not in allowed:
            has = f"options of `{name}` are {own}" if own else f"`{name}` has none"
            raise RecipeError(
                f"`--methods` has `{pair}`, expected an option with its value; {has}",
                "write, for example, `--methods svd,lprod:p=8`",
            )
        options[field] = value.strip()
    # The target only says that there will be one.
    spec = conversion({"method": name, "target": 0.5, **options}).method
    return spec if options else name


def _share(text: str) -> float:
    from tcompress.cli.settings import fraction
    from tcompress.recipe.words import as_share

    value = fraction(text)
    if not (isinstance(value, float) and 0 < value < 1):
        percent = as_share(text, {"type": "number", "exclusiveMaximum": 1}, {})
        raise RecipeError(
            f"`--targets` has `{text.strip()}`, allowed is a number greater than 0 and less than 1"
            f"{percent}",
            "write, for example, `--targets 0.5,0.25`",
        )
    return value


def _finetune(given: Mapping[str, Any], base: Recipe) -> Finetune | None:
    from tcompress.recipe.schema import Finetune

    steps, data = given["finetune_steps"], given["train_data"]
    if steps is None and data and base.finetune is None:
        raise RecipeError(
            "`--train-data` is what models are healed on, and nothing says for how long",
            "add `--finetune-steps 200`",
        )
    if steps is None and not data:
        return base.finetune
    said = base.finetune or Finetune()
    changed: dict[str, Any] = {} if steps is None else {"steps": steps}
    if data:
        changed["data"] = said.data.model_copy(update={"source": tuple(data)})
    return said.model_copy(update=changed)


def _evaluate(given: Mapping[str, Any], base: Recipe) -> tuple[Any, ...]:
    from tcompress.cli.finetune import pairs
    from tcompress.evaluation.tasks import find_task
    from tcompress.recipe.schema import Evaluate

    options = {name: given[name] for name in ("split", "limit") if given[name] is not None}
    if given["columns"]:
        options["columns"] = pairs("--columns", given["columns"], "text=review")
    task, data = given["task"], given["data"]
    if task is None and data is None:
        if options:
            raise RecipeError(
                f"`--{next(iter(options))}` belongs to a measurement, and none is asked for",
                "add `--task` and `--data`",
            )
        return base.evaluate
    if task is None or data is None:
        there, lacking = ("--task", "--data") if data is None else ("--data", "--task")
        raise RecipeError(f"`{there}` needs `{lacking}` too", "see `tcompress evaluate --help`")
    find_task(task)
    return (Evaluate(task=task, data=data, **options),)
