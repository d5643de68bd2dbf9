"""The public Python interface: what the commands do, as functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from tcompress import compression, sweeps
from tcompress.attention import ReplacementSpec
from tcompress.conversion import converter
from tcompress.errors import RecipeError
from tcompress.evaluation import measuring
from tcompress.evaluation.scores import Baseline, ModelScores
from tcompress.exports import dense, onnx_folder
from tcompress.exports.onnx_folder import RuntimeFiles
from tcompress.fields import ExportFormat
from tcompress.inspection import inspect_model as inspect
from tcompress.latency import benchmark
from tcompress.models import SourceModel, default_output_name, name_of
from tcompress.options import (
    Bench,
    Convert,
    Evaluate,
    Finetune,
    Recipe,
    Sweep,
    parse_recipe,
    replacement_names,
)
from tcompress.options.choose import conversion
from tcompress.options.commands import OnnxFiles
from tcompress.options.compress_options import Compress
from tcompress.options.convert_options import BUDGETS
from tcompress.options.library import find_recipe
from tcompress.options.method_options import METHODS, REPLACEMENTS
from tcompress.options.read import as_plain, read
from tcompress.options.schema import default_methods, short_name
from tcompress.options.steps import Architecture
from tcompress.own_models.architecture import open_architecture
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.progress import Progress
from tcompress.reporting.model_report import report_of as report
from tcompress.structures import Spec
from tcompress.structures.modules.linear import keep_weights
from tcompress.training import finetuning
from tcompress.vocabulary.choice import with_vocabulary

__all__ = ["inspect", "keep_weights", "report"]  # beside what is defined here


_TARGETS = (0.5, 0.25)
_OF_CELLS = {"method", "structure", *BUDGETS}


@contextmanager
def _usual_torch() -> Iterator[None]:
    """Leave what a caller has set for all of torch, which work would follow in places.

    What is made in `torch.inference_mode` can neither be trained nor changed in place, and cached
    tensors would stay so; sums in 16 bits (a default dtype, `torch.autocast`) are wrong.
    """
    dtype, moved = torch.get_default_dtype(), torch.get_default_device().type != "cpu"
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        if moved:
            stack.enter_context(torch.device("cpu"))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


@_usual_torch()
def convert(
    model: str | Path | Mapping[str, Any],
    *,
    method: str | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    recipe: str | Path | Convert | None = None,
    calibration: str | Sequence[str] | Mapping[str, Any] | None = None,
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> converter.Converted:
    """Converts a model and writes the result.

    Args:
        model: Folder, short name or hub id; with `init="random"` also a `config.json`, or the
            configuration itself, as `architecture` in a recipe.
        method: Name of the method, or its options with `name`, or `none` to rewrite no layer; or
            of a replacement, beside which `structure` takes a method. Default `svd` with a size,
            `auto` with a time or `max_loss`, `width` with `plain`, `keep_neurons` or `head_size`,
            `none` where only blocks, embeddings, vocabulary or bits change, else `lprod`; with
            `init="random"` `none`, or `lprod` where something is said of layers.
        output: Folder to write; default a name made of model and method.
        recipe: A recipe instead of the other options: name, file, or `Convert`.
        calibration: `builtin`, `none`, a file or a dataset id, or a list; or all options of it.
        force: Replace a folder that is not empty.
        revision: Branch, tag or commit on the hub.
        token: Access token for the hub.
        progress: Hears how far it is.
        **options: Options of the method (`p=4`), of a replacement (`fold=32`) and of the conversion
            (`target=0.25`, `target_params="30M"`).

    Returns:
        The written folder and its manifest.

    Raises:
        InputError: Something given cannot be used; the message says what to do.
        FitError: A weight or a fit is not finite; the message names the layer.
    """
    said = _conversion(recipe, method, calibration, options)
    source = _opened(model, said, revision, token)
    name = source.id if isinstance(model, Mapping) else name_of(model)
    words = short_name(said) or said.label.replace(" + ", "-")
    folder = Path(output or default_output_name(name, words))
    return converter.convert(source, said, folder, force=force, progress=progress)


@_usual_torch()
def finetune(
    model: str | Path,
    *,
    output: str | Path | None = None,
    recipe: str | Path | Finetune | None = None,
    force: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> finetuning.Finetuned:
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
    if isinstance(recipe, str | Path):
        found = parse_recipe(*find_recipe(recipe)).finetune
        if found is None:
            raise RecipeError(f"recipe `{recipe}` has no `finetune`")
        recipe = found
    said = recipe or read(Finetune, options)
    name = name_of(model)
    folder = Path(output or default_output_name(name, said.task or "healed"))
    return finetuning.finetune(name, said, folder, force=force, token=token, progress=progress)


@_usual_torch()
def sweep(
    model: str | Path,
    *,
    methods: Sequence[str | Mapping[str, Any]] = (),
    targets: Sequence[float] = _TARGETS,
    task: str | None = None,
    data: str | Path | Sequence[str | Path] | None = None,
    finetune: Mapping[str, Any] | None = None,
    bench: bool | Mapping[str, Any] = False,
    keep_models: bool = True,
    seeds: int | None = None,
    output: str | Path | None = None,
    recipe: str | Path | Recipe | None = None,
    calibration: str | Sequence[str] | Mapping[str, Any] | None = None,
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> sweeps.Swept:
    """Compares methods and sizes: converts, heals, measures and times a model in each way.

    Called again with the same output, only what depends on changed settings is done again.

    Args:
        model: Folder, short name or hub id.
        methods: Names, which take options that suit the target, or options with `name`; default
            one method of each structure.
        targets: Kept fractions of the rewritten layers' parameters.
        task: What quality is, as `evaluate` takes it; default an error of the conversion.
        data: Data to measure on, or several sets: then their mean counts.
        finetune: Fields of `Finetune` to heal every model with; default no healing.
        bench: Whether to time every model, or fields of a recipe's `bench`.
        keep_models: Whether models are kept once they are measured.
        seeds: Repeat every cell with so many seeds, and compare means.
        output: Folder to write; default the model's name and `-sweep`.
        recipe: A recipe with `sweep` instead of the other options: name, file, or `Recipe`.
        calibration: `builtin`, `none`, a file or a dataset id, or a list; or all options of it.
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
    given: Any = {"methods": methods or None, "task": task, "data": data, "finetune": finetune}
    timed = bench is not None and bench is not False
    given |= {"bench": bench if timed else None, "keep_models": None if keep_models else False}
    targets = as_plain(targets)  # which may be an iterator
    given["targets"] = None if targets == [*_TARGETS] else targets
    _refuse_beside(recipe, **given, calibration=calibration, **options)
    if isinstance(recipe, str | Path):
        recipe = parse_recipe(*find_recipe(recipe))
    if recipe is None:
        if (task is None) != (data is None):
            raise RecipeError("`task` and `data` belong together: one of them is missing")
        measured = () if task is None else (read(Evaluate, {"task": task, "data": data}),)
        named = {"methods": methods or default_methods(), "targets": targets}
        _refuse_overwritten(options)
        recipe = Recipe(
            recipe_version=1,
            convert=_conversion(None, "lprod", calibration, options),
            finetune=None if finetune is None else read(Finetune, finetune),
            evaluate=measured,
            bench=read(Bench, bench if isinstance(bench, Mapping) else {}) if timed else None,
            sweep=read(Sweep, {**named, "keep_models": keep_models}),
        )
    name = name_of(model)
    adapter = recipe.convert.adapter
    source = SourceModel.open(name, revision=revision, token=token, adapter=adapter)
    folder = Path(output or recipe.output or default_output_name(name, "sweep"))
    shared: Any = {"force": force, "token": token, "progress": progress, "seeds": seeds}
    return sweeps.sweep(recipe, source, folder, **shared)


@_usual_torch()
def evaluate(
    models: str | Path | Sequence[str | Path],
    task: str,
    data: str | Path | Sequence[str | Path],
    *,
    baseline: str | Path | Sequence[Baseline] | None = None,
    save: bool = True,
    token: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> list[ModelScores]:
    """Measures models on the same examples, and compares them with one of them.

    Args:
        models: Converted or dense models: folders, short names or hub ids.
        task: Name of the task.
        data: File, folder or hub id, or several: each is measured, and their mean.
        baseline: Model to compare with, or `ModelScores.baseline` of one that was measured on the
            same data; default the first one.
        save: Write the numbers into the manifests of converted models in local folders.
        token: Access token for the hub.
        trust_remote_code: Whether Python code that comes with a model may run.
        progress: Hears how far it is.
        **options: Other fields of `Evaluate`, such as `limit=500`.

    Returns:
        Numbers of each model, in the order of the models: by set in `sets`, all in `metrics`, and
        `means` over several sets.

    Raises:
        InputError: A model, the data or an option cannot be used; the message says what to do.
    """
    given = {**(options.pop("options", None) or {}), **options}
    given = {name: value for name, value in given.items() if value is not None}
    return measuring.evaluate(
        _listed(models),
        read(Evaluate, {"task": task, "data": data, **given}),
        baseline=baseline,
        save=save,
        token=token,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )


@_usual_torch()
def bench(
    models: str | Path | Sequence[str | Path],
    against: str | Path | None = None,
    settings: Bench | None = None,
    *,
    save: bool = True,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[benchmark.Bench, ...]:
    """Times models against dense ones.

    Args:
        models: Converted or dense models: folders, short names or hub ids.
        against: The baseline; default the dense model that the manifest names.
        settings: How to measure, instead of the options.
        save: Keep the times in the manifests; what was measured before an error is kept too.
        progress: Hears how far it is.
        trust_remote_code: Whether Python code that comes with a model may run.
        **options: Fields of `Bench`, such as `batch=[1, 8]`.

    Raises:
        InputError: A model or an option cannot be used; the message says what to do.
    """
    _refuse_beside(settings, **options)
    with RuntimeFiles.opened() as files:
        return benchmark.bench(
            [name_of(name) for name in _listed(models)],
            None if against is None else name_of(against),
            settings or read(Bench, options),
            save=save,
            in_runtime=files,
            progress=progress,
            trust_remote_code=trust_remote_code,
        )


@_usual_torch()
def compress(
    model: str | Path,
    output: str | Path | None = None,
    *,
    force: bool = False,
    token: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> compression.Compressed:
    """Reaches a size or a speed: converts, heals, exports and measures, into one folder.

    Args:
        model: A dense model: folder, short name or hub id.
        output: Folder to write; default the model's name and `-small`.
        force: Replace a folder that is not empty.
        token: Access token for the hub.
        trust_remote_code: Whether Python code that comes with the model may run.
        progress: Hears how far it is.
        **options: The goal and what it is reached with: `size="10MB"`, `speedup=6`,
            `data=["train.csv"]`, `minutes=15`, `task="sts"`, `test_data=["dev.csv"]`.

    Returns:
        The written folder, and what was measured beside the dense model.

    Raises:
        InputError: Something given cannot be used, or the goal is out of reach.
    """
    return compression.compress(
        model,
        output or default_output_name(name_of(model), "small"),
        read(Compress, options),
        force=force,
        token=token,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )


@_usual_torch()
def export_onnx(
    model: str | Path,
    output: str | Path | None = None,
    *,
    to: ExportFormat = "onnx",
    force: bool = False,
    token: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> onnx_folder.ExportedOnnx:
    """Writes a model's folder with ONNX files in it, each compared with PyTorch before.

    Args:
        model: A converted or dense model: folder, short name or hub id.
        output: Folder to write; default the model's name and `-onnx` or `-openvino`. The folder of
            the model itself gets the files too.
        to: Files for ONNX Runtime, or one for OpenVINO.
        force: Replace a folder that is not empty.
        token: Access token for the hub.
        trust_remote_code: Whether Python code that comes with the model may run.
        progress: Hears how far it is.
        **options: Which files: `int8=True`, `bits=4`, `embedding_bits=4`,
            `sentence_embedding=False`, `dense=True`; for OpenVINO only the last two.

    Returns:
        The written folder, and what was measured of each file.

    Raises:
        InputError: Something given cannot be used, or the model cannot be exported.
        WriteError: A file computes something else than the model in PyTorch.
    """
    return onnx_folder.export_onnx(
        model,
        output or default_output_name(name_of(model), to),
        read(OnnxFiles, options),
        to=to,
        force=force,
        token=token,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )


def export_openvino(
    model: str | Path, output: str | Path | None = None, **options: Any
) -> onnx_folder.ExportedOnnx:
    """Writes a model's folder with a file for OpenVINO in it; arguments as for `export_onnx`.

    Raises:
        InputError: Something given cannot be used, or the model cannot be exported.
        WriteError: The file computes something else than the model in PyTorch.
    """
    return export_onnx(model, output, to="openvino", **options)


@_usual_torch()
def export_dense(
    folder: Path | str, output: Path | str, force: bool = False, progress: Progress | None = None
) -> Path:
    """Writes a plain model that needs no tcompress and computes the same within rounding.

    Memory holds one weight in float64 and what multiplying it out takes.

    Args:
        folder: Folder of a converted model.
        output: Folder to write; it appears only when everything is finished.
        force: Replace a folder that is not empty.
        progress: Hears how far it is.

    Returns:
        The written folder.

    Raises:
        ArtifactError: `folder` holds no converted model, or a damaged one.
        InputError: `output` cannot be written, or the model has another attention replacement.
        FitError: A weight is not finite in the dtype that the layer is stored in.
        WriteError: What was written does not load, or computes something else.
    """
    return dense.export_dense(folder, output, force, progress)


@_usual_torch()
def plan(
    model: str | Path | Mapping[str, Any],
    *,
    method: str | Mapping[str, Any] | None = None,
    recipe: str | Path | Convert | None = None,
    calibration: str | Sequence[str] | Mapping[str, Any] | None = None,
    revision: str | None = None,
    token: str | None = None,
    **options: Any,
) -> Plan:
    """Plans a conversion without reading a weight; arguments as for `convert`.

    Raises:
        InputError: Something given cannot be used; the message says what to do.
    """
    said = _conversion(recipe, method, calibration, options)
    return make_plan(said, with_vocabulary(_opened(model, said, revision, token), said))


def _opened(
    model: str | Path | Mapping[str, Any], said: Convert, revision: str | None, token: str | None
) -> SourceModel:
    seed = said.seed if said.init == "random" else None
    if not isinstance(model, Mapping):
        adapter = said.adapter
        return SourceModel.open(
            name_of(model), revision=revision, token=token, seed=seed, adapter=adapter
        )
    if seed is None:
        raise RecipeError("a configuration has no weights", 'add `init="random"`')
    return open_architecture(read(Architecture, model), seed, token)


def _conversion(
    recipe: str | Path | Convert | None,
    method: str | Mapping[str, Any] | None,
    calibration: str | Sequence[str] | Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Convert:
    _refuse_beside(recipe, method=method, calibration=calibration, **options)
    if isinstance(recipe, Convert):
        return recipe
    if recipe is not None:
        return parse_recipe(*find_recipe(recipe)).convert
    given = {name: value for name, value in options.items() if value is not None}
    given |= {name: _listed(given[name]) for name in ("keep", "only") if name in given}
    if isinstance(given.get("embeddings"), str):
        given["embeddings"] = {"method": given["embeddings"]}
    structure = given.pop("structure", None)
    said: dict[str, Any] = as_plain(
        {"method": method or {}, "attention": given.pop("attention", {})}
    )
    for name, value in said.items():
        if not isinstance(value, Mapping):
            text = f"`{name}` is a {type(value).__name__}, expected a name, or options with `name`"
            raise RecipeError(text)
    if said["method"].get("name") in replacement_names():
        said |= {"attention": said["method"], "method": {}}
    if calibration is not None:
        options_of = calibration if isinstance(calibration, Mapping) else {"source": calibration}
        said["calibration"] = as_plain(options_of)
    for name, value in as_plain(given).items():
        section = _section(said, structure, name)
        (said if section is None else said.setdefault(section, {}))[name] = value
    return conversion(said, structure=structure)


def _section(said: dict[str, Any], structure: str | None, name: str) -> str | None:
    """Where a keyword belongs to: the method, the attention, or None for the conversion."""
    method, attention = said["method"].get("name"), said["attention"].get("name")
    chosen = [spec for spec in REPLACEMENTS if {method, attention} & {*spec.names()}]
    if name == "seed":
        return "calibration"
    if name in Convert.model_fields:
        return None
    if name in next(iter(chosen), ReplacementSpec).model_fields:
        return "attention"
    for section, specs in (("method", METHODS), ("attention", REPLACEMENTS)):
        if any(name in spec.model_fields for spec in specs):
            return section
    own = next((spec for spec in METHODS if (structure or method or "lprod") in spec.names()), Spec)
    fields = [field for field in own.model_fields if field != "name"]
    allowed = ", ".join(f"`{field}`" for field in (*fields, *Convert.model_fields))
    raise RecipeError(f"there is no option `{name}`; allowed are {allowed}")


def _refuse_overwritten(options: Mapping[str, Any]) -> None:
    """Cells have methods and sizes of their own: what is said of one would be forgotten."""
    if options.get("init") == "random":
        text = '`init="random"` begins with weights at random, and a sweep cuts trained ones'
        raise RecipeError(text, "compare variants of a recipe: `tcompress run RECIPE`")
    said = as_plain({"method": {}, "attention": options.get("attention") or {}})
    named = [
        f"`{name}`"
        for name, value in options.items()
        if value is not None and (name in _OF_CELLS or _section(said, None, name) == "method")
    ]
    if named:
        hint = "name it in `methods`, such as `{'name': 'lprod', 'p': 8}`, or in `targets`"
        raise RecipeError(f"{', '.join(named)} cannot be given to all cells of a sweep", hint)


def _listed(value: Any) -> Any:
    """A list of names; what is no list stands for a list of one."""
    several = isinstance(value, Iterable) and not isinstance(value, str | Path)
    return list(value) if several else [value]


def _refuse_beside(recipe: object, **given: Any) -> None:
    """A recipe says everything; what is given beside it would be forgotten."""
    named = [f"`{name}`" for name, value in given.items() if value is not None]
    if recipe is not None and named:
        hint = "change the recipe instead, or leave it out"
        raise RecipeError(f"{', '.join(named)} cannot be given beside a recipe", hint)
