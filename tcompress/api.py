"""The public Python interface: what the commands do, as functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tcompress.benching.run import bench
from tcompress.conversion.run import Converted
from tcompress.conversion.run import convert as run_conversion
from tcompress.errors import RecipeError
from tcompress.evaluation.run import evaluate
from tcompress.exporting.dense import export_dense
from tcompress.inspection import inspect_model as inspect
from tcompress.mechanisms import mechanism_named
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.progress import Progress
from tcompress.recipe import Convert, default_method, mechanism_names, method_names, parse_recipe
from tcompress.recipe.library import find_recipe
from tcompress.recipe.methods import AUTO, AutoSpec
from tcompress.recipe.naming import short_name
from tcompress.recipe.schema import Bench, Evaluate, Finetune, Recipe, Sweep
from tcompress.recipe.scratch import Architecture
from tcompress.recipe.sections import BUDGETS, DEPTH
from tcompress.reporting.model import report_of as report
from tcompress.scratch.architecture import open_architecture
from tcompress.source import SourceModel, default_output_name
from tcompress.structures import structures
from tcompress.structures.linear import keep_weights
from tcompress.sweeping.cells import default_methods
from tcompress.sweeping.outcome import Swept
from tcompress.sweeping.run import sweep as run_sweep
from tcompress.training.run import Finetuned
from tcompress.training.run import finetune as run_training

_Section = TypeVar("_Section", bound=BaseModel)
_BLOCKS = frozenset((*DEPTH, "embeddings"))
_SIZES = frozenset((*BUDGETS, "residual_rank", "p", "rank"))
_METHOD_SIZES = _SIZES | {"keep", "only", "layers"}
_NOT_LAYERS = _BLOCKS | {"dtype", "device", "max_shard_size"}

__all__ = [
    "bench",
    "convert",
    "evaluate",
    "export_dense",
    "finetune",
    "inspect",
    "keep_weights",
    "plan",
    "report",
    "sweep",
]


def convert(
    model: str | Path | Mapping[str, Any],
    *,
    method: str | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    recipe: str | Convert | None = None,
    calibration: str | Mapping[str, Any] | None = None,
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Converted:
    """Converts a model and writes the result.

    Args:
        model: Folder, short name or hub id; with `init="random"` also a `config.json`, or the
            configuration itself, as `architecture` in a recipe.
        method: Name of the method, or its options with `name`, or `none` to rewrite no layer; or
            of a mechanism, beside which `structure` takes a method. Default `lprod`, and `none`
            where blocks are dropped or embeddings rewritten and nothing is said of layers.
        output: Folder to write; default a name made of model and method.
        recipe: A recipe instead of the other options: name, file, or `Convert`.
        calibration: `builtin`, `none`, a file or a dataset id; or all options of it.
        force: Replace a folder that is not empty.
        revision: Branch, tag or commit on the hub.
        token: Access token for the hub.
        progress: Hears how far it is.
        **options: Options of the method (`p=4`), of a mechanism (`fold=32`) and of the conversion
            (`target=0.25`, `target_params="30M"`).

    Returns:
        The written folder and its manifest.

    Raises:
        InputError: Something given cannot be used; the message says what to do.
        FitError: A weight or a fit is not finite; the message names the layer.
    """
    settled = _settled(recipe, method, calibration, options)
    source = _opened(model, settled, revision, token)
    name = source.id if isinstance(model, Mapping) else str(model)
    words = short_name(settled) or settled.label.replace(" + ", "-")
    folder = Path(output or default_output_name(name, words))
    return run_conversion(source, settled, folder, force=force, progress=progress)


def finetune(
    model: str | Path,
    *,
    output: str | Path | None = None,
    recipe: str | Finetune | None = None,
    force: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Finetuned:
    """Heals a converted model against its dense source, or teaches a model a task.

    Args:
        model: Folder that `convert` wrote, or any other model.
        output: Folder to write; default the model's name and `-healed`, or the task.
        recipe: A recipe instead of the options: name, file, or `Finetune`.
        force: Replace a folder that is not empty.
        token: Access token for the hub.
        progress: Hears how far it is.
        **options: Fields of `Finetune`, such as `steps=500` or `data={"source": ["a.txt"]}`.

    Returns:
        The written folder and the record of the run.

    Raises:
        InputError: Something given cannot be used; the message says what to do.
        TrainingError: Training diverged, or cannot go on.
    """
    _refuse_beside(recipe, **options)
    if isinstance(recipe, str):
        found = parse_recipe(*find_recipe(recipe)).finetune
        if found is None:
            raise RecipeError(f"recipe `{recipe}` has no `finetune`")
        recipe = found
    settled = recipe or _validated(Finetune, options)
    name = str(model)
    folder = Path(output or default_output_name(name, settled.task or "healed"))
    return run_training(name, settled, folder, force=force, token=token, progress=progress)


def sweep(
    model: str | Path,
    *,
    methods: Sequence[str | Mapping[str, Any]] = (),
    targets: Sequence[float] = (0.5, 0.25),
    task: str | None = None,
    data: str | Path | None = None,
    finetune: Mapping[str, Any] | None = None,
    bench: bool | Mapping[str, Any] = False,
    keep_models: bool = True,
    output: str | Path | None = None,
    recipe: str | Recipe | None = None,
    calibration: str | Mapping[str, Any] | None = None,
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Swept:
    """Compares methods and sizes: converts, heals, measures and times a model in each way.

    Called again with the same output, only what depends on changed settings is done again.

    Args:
        model: Folder, short name or hub id.
        methods: Names, which take options that suit the target, or options with `name`; default
            one method of each structure.
        targets: Kept fractions of the rewritten layers' parameters.
        task: What quality is, as `evaluate` takes it; default an error of the conversion.
        data: Data to measure on.
        finetune: Fields of `Finetune` to heal every model with; default no healing.
        bench: Whether to time every model, or fields of a recipe's `bench`.
        keep_models: Whether models are kept once they are measured.
        output: Folder to write; default the model's name and `-sweep`.
        recipe: A recipe with `sweep` instead of the other options: name, file, or `Recipe`.
        calibration: `builtin`, `none`, a file or a dataset id; or all options of it.
        force: Do all cells again, also in a folder that holds something else.
        revision: Branch, tag or commit on the hub.
        token: Access token for the hub.
        progress: Hears how far it is.
        **options: Options of all conversions, such as `keep=["down"]`.

    Returns:
        All models beside the dense one, and why others are missing.

    Raises:
        InputError: Something given cannot be used, or no cell can be done.
    """
    if isinstance(recipe, str):
        recipe = parse_recipe(*find_recipe(recipe))
    if recipe is None:
        if (task is None) != (data is None):
            raise RecipeError("`task` and `data` belong together: one of them is missing")
        measured = (
            () if task is None else (Evaluate.model_validate({"task": task, "data": str(data)}),)
        )
        named = {"methods": methods or default_methods(), "targets": targets}
        recipe = Recipe(
            recipe_version=1,
            convert=_settled(None, "lprod", calibration, options),
            finetune=None if finetune is None else Finetune.model_validate(finetune),
            evaluate=measured,
            bench=Bench.model_validate(bench if isinstance(bench, Mapping) else {})
            if bench
            else None,
            sweep=Sweep.model_validate({**named, "keep_models": keep_models}),
        )
    name = str(model)
    source = SourceModel.open(name, revision=revision, token=token)
    folder = Path(output or recipe.output or default_output_name(name, "sweep"))
    return run_sweep(recipe, source, folder, force=force, token=token, progress=progress)


def plan(
    model: str | Path | Mapping[str, Any],
    *,
    method: str | Mapping[str, Any] | None = None,
    recipe: str | Convert | None = None,
    calibration: str | Mapping[str, Any] | None = None,
    revision: str | None = None,
    token: str | None = None,
    **options: Any,
) -> Plan:
    """Plans a conversion without reading a weight; arguments as for `convert`.

    Raises:
        InputError: Something given cannot be used; the message says what to do.
    """
    settled = _settled(recipe, method, calibration, options)
    return make_plan(settled, _opened(model, settled, revision, token))


def _opened(
    model: str | Path | Mapping[str, Any], settled: Convert, revision: str | None, token: str | None
) -> SourceModel:
    seed = settled.seed if settled.init == "random" else None
    if not isinstance(model, Mapping):
        return SourceModel.open(str(model), revision=revision, token=token, seed=seed)
    if seed is None:
        raise RecipeError("a configuration has no weights", 'add `init="random"`')
    return open_architecture(Architecture.model_validate(model), seed, token)


def _settled(
    recipe: str | Convert | None,
    method: str | Mapping[str, Any] | None,
    calibration: str | Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Convert:
    _refuse_beside(recipe, method=method, calibration=calibration, **options)
    if isinstance(recipe, Convert):
        return recipe
    if recipe is not None:
        return parse_recipe(*find_recipe(recipe)).convert
    options, attention = _attention(method, dict(options))
    if attention is not None:
        method = None if _is_mechanism(method) else method
        method = options.pop("structure", None) or method or _of_the_paper(attention, options)
    if method is None and options.get("init") == "random" and not _METHOD_SIZES & set(options):
        method = "none"
    if method is None:
        method = default_method(bool(_BLOCKS & set(options)) and set(options) <= _NOT_LAYERS)
    own = dict(method) if isinstance(method, Mapping) else {"name": method or "none"}
    if own.get("name") not in (*method_names(), "none"):
        known = ", ".join(f"`{name}`" for name in (*method_names(), *mechanism_names(), "none"))
        raise RecipeError(f"unknown method `{own.get('name')}`; known methods are {known}")
    fields = _fields_of(own["name"])
    chosen: dict[str, Any] = {"method": None if own == {"name": "none"} else own}
    if attention is not None:
        chosen["attention"] = attention
    for name, value in options.items():
        if name in Convert.model_fields:
            chosen[name] = value
        elif name in fields:
            own[name] = value
        else:
            allowed = ", ".join(f"`{field}`" for field in (*fields, *Convert.model_fields))
            raise RecipeError(f"`{own['name']}` has no option `{name}`; allowed are {allowed}")
    if calibration is not None:
        given = {"source": calibration} if isinstance(calibration, str) else dict(calibration)
        chosen["calibration"] = given
    return _validated(Convert, chosen)


def _refuse_beside(recipe: object, **given: Any) -> None:
    """A recipe says everything; what is given beside it would be forgotten."""
    named = [f"`{name}`" for name, value in given.items() if value is not None]
    if recipe is not None and named:
        raise RecipeError(
            f"{', '.join(named)} cannot be given beside a recipe",
            "change the recipe instead, or leave it out",
        )


def _validated(kind: type[_Section], data: Mapping[str, Any]) -> _Section:
    """Builds settings; what is wrong with them is one error in words."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [
            f"`{'.'.join(map(str, item['loc']))}` is `{item['input']}`: {item['msg']}"
            for item in error.errors(include_url=False)
        ]
        raise RecipeError("; ".join(lines)) from error


def _is_mechanism(method: str | Mapping[str, Any] | None) -> bool:
    name = method.get("name") if isinstance(method, Mapping) else method
    return name in mechanism_names()


def _attention(
    method: str | Mapping[str, Any] | None, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Takes the options of a mechanism out of the others, if there is one."""
    found = options.pop("attention", None)
    if _is_mechanism(method):
        found = method
    if found is None:
        return options, None
    own = dict(found) if isinstance(found, Mapping) else {"name": found}
    if own.get("name") not in mechanism_names():
        known = ", ".join(f"`{name}`" for name in mechanism_names())
        raise RecipeError(f"unknown mechanism `{own.get('name')}`; known mechanisms are {known}")
    fields = mechanism_named(own["name"]).spec.model_fields
    own |= {name: options.pop(name) for name in fields if name in options and name != "name"}
    return options, own


def _of_the_paper(attention: Mapping[str, Any], options: dict[str, Any]) -> str:
    """Chooses the structure of the mechanism's paper where a size is given, else none."""
    if not _SIZES & set(options):
        return "none"
    kind = mechanism_named(attention["name"])
    if kind.only:
        options.setdefault("only", kind.only)
    return kind.structure


def _fields_of(name: str) -> list[str]:
    if name == AUTO:
        return [field for field in AutoSpec.model_fields if field != "name"]
    for item in structures():
        if name in item.spec.model_fields["name"].annotation.__args__:
            return [field for field in item.spec.model_fields if field != "name"]
    return []
