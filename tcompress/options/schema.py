"""What a recipe may say. Unknown keys are errors at every level."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tcompress.fields import Section, method_options, option, plain
from tcompress.options.convert_options import Convert, refuse_two_sizes
from tcompress.options.limits import Speedup
from tcompress.options.method_options import (
    METHODS,
    REPLACEMENTS,
    AnyMethod,
    MethodName,
    method_names,
    replacement_names,
)
from tcompress.options.steps import Architecture, Bench, Evaluate, Finetune, PaperRow
from tcompress.options.words import quoted
from tcompress.structures import structures

RECIPE_VERSION = 1
_NOT_IN_CELLS = ("tol", "offer", "trials", "modes")


def read_methods(texts: list[str]) -> list[Any]:
    """Reads `svd,lprod:p=8`: names, and names with options."""
    return [_read_method(word.strip()) for text in texts for word in text.split(",")]


def _read_method(text: str) -> Any:
    name, *pairs = [word.strip() for word in text.split(":")]
    if name in replacement_names():
        raise ValueError(
            f"and `{name}` is an attention replacement: a sweep compares structures of weights"
        )
    kind = next((spec for spec in METHODS if name in spec.names()), None)
    if kind is None:
        raise ValueError(f"and `{name}` is no method; methods are {quoted(method_names())}")
    if not pairs:
        return name
    own = {it.place[-1]: it for it in method_options(kind) if it.place[-1] not in _NOT_IN_CELLS}
    found: dict[str, Any] = {"name": name}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        field = option.strip().replace("-", "_")
        if not equals or field not in own:
            has = f"options of `{name}` are {quoted(own)}" if own else f"`{name}` has none"
            raise ValueError(f"expected an option with its value behind `{name}`; {has}")
        # Commas separate methods.
        found[field] = plain(own[field], [value.strip()])
    return found


class Sweep(Section):
    """Cells to compare: this recipe with each method and each target in place of its own."""

    panel = "Cells"

    methods: tuple[AnyMethod | MethodName, ...] = option(
        (),
        "methods: a name alone takes options that suit the target; default the recipe's, or one of "
        "each structure",
        metavar="NAME[:OPTION=VALUE]...,...",
        complete="method_lists",
        read=read_methods,
    )
    targets: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = option(
        (0.5, 0.25), "kept fractions of the rewritten layers", metavar="N,N,...", min_length=1
    )
    speedups: tuple[Speedup, ...] = option(
        (),
        "how many times as fast as the dense model cells are to be, in place of `targets`; fewer "
        "blocks stand beside them",
        metavar="N,N,...",
    )
    variants: tuple[str, ...] = option(
        (),
        "of a recipe with `init: random`: its variants that are trained and compared, in place of "
        "`methods` and `targets`; several in one model are joined by `+`",
        off=True,
    )
    keep_models: bool = option(
        True, "whether models are kept once they are measured; numbers always are", panel="Output"
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Sweep:
        for method in self.methods:
            refuse_two_sizes(None if isinstance(method, str) else method, "sweep.targets")
        return self


class Recipe(Section):
    """A whole recipe."""

    recipe_version: Literal[1] = Field(description="version of this schema")
    name: str | None = Field(None, description="short name")
    description: str | None = Field(None, description="what the recipe reaches, and on what")
    model: str | None = Field(None, description="folder, short name or hub id of the source model")
    architecture: Architecture | None = Field(
        None, description="in place of `model`, with `init: random`: the model's configuration"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    output: str | None = Field(None, description="folder to write")
    convert: Convert = Field(description="how to convert")
    pretrain: Finetune | None = Field(
        None, description="how to train what was converted before `finetune`, on another task"
    )
    finetune: Finetune | None = Field(None, description="how to train what was converted")
    evaluate: tuple[Evaluate, ...] = Field((), description="what to measure in the end")
    bench: Bench | None = Field(None, description="how to time in the end")
    sweep: Sweep | None = Field(None, description="methods and targets to compare")
    report: str | None = Field(None, description="HTML file to write in the end")
    paper: tuple[PaperRow, ...] = Field((), description="published numbers, to show beside ours")
    variants: dict[str, dict[str, Any]] = Field(
        {}, description="other ways to run it, by name: changes such as `finetune.steps: 20`"
    )

    @model_validator(mode="after")
    def _check_architecture(self) -> Recipe:
        compared = () if self.sweep is None else self.sweep.variants
        if self.sweep is not None and (self.convert.init == "random") != bool(compared):
            raise ValueError(
                "`sweep` compares conversions of one trained model, and with `init: random` "
                "variants of the recipe: name those in `sweep.variants`"
            )
        names = {name.strip() for text in compared for name in text.split("+")}
        if unknown := sorted(names - {*self.variants}):
            has = quoted(self.variants) if self.variants else "none"
            raise ValueError(
                f"`sweep.variants` names {quoted(unknown)}, which the recipe has not; it has {has}"
            )
        if self.pretrain is not None and (self.finetune is None or (self.sweep and not compared)):
            raise ValueError(
                "`pretrain` comes before `finetune`, in recipes that sweep no methods: for one "
                "training alone give `finetune`"
            )
        if self.sweep is not None and not self.sweep.methods and not compared:
            refuse_two_sizes(self.convert.method, "sweep.targets")
        if self.architecture is None:
            return self
        if self.model is not None:
            raise ValueError("`model` and `architecture` are both given; allowed is one")
        if self.convert.init != "random":
            raise ValueError(
                "`architecture` describes a model without weights: it needs `convert.init: random`"
            )
        return self


def default_methods() -> tuple[str, ...]:
    """Names one method of each structure: all of them are fitted to data and take a target."""
    return tuple(item.spec.names()[0] for item in structures())


def data_of(recipe: Recipe, *, converts: bool = True, trains: bool = True) -> list[str]:
    """Lists the names of all data that a recipe reads in the stages that are still to be done."""
    names = [*recipe.convert.calibration.source] if converts else []
    for training in (recipe.pretrain, recipe.finetune) if trains else ():
        if training is not None:
            names += training.data.names
    return [*names, *(name for item in recipe.evaluate for name in item.data)]


def kept_beside(output: Path, stage: Literal["converted", "pretrained"]) -> Path:
    """Names the folder of a model before its training, that is kept beside the trained one."""
    return output.with_name(f"{output.name}-{stage}")


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of a recipe, for editors and other tools."""
    schema = Recipe.model_json_schema()
    for spec in (*METHODS, *REPLACEMENTS):
        options = schema["$defs"][spec.__name__]
        # The name may be left out where options are built in Python, but not in a file.
        options["required"] = ["name", *options.get("required", ())]
        options["properties"]["name"].pop("default", None)
        options["properties"]["name"].setdefault("description", "selects the method")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_LETTERS = {"p": "p", "tubal_rank": "k", "order": "o", "cores": "c", "rank": "r"}
_NAMED = {*_LETTERS, "name", "share", "tol", "offer"}  # named in other ways
_ATTENTION = {"filter_order": "k", "grid": "", "fold": "f", "kernel": "", "axes": "axes",
              "core": "", "length": "t"}  # fmt: skip


def short_name(convert: Convert) -> str:
    """Names a conversion shortly, such as `lprod-p4` or `svd-25`."""
    method, words = convert.method, _attention_words(convert)
    if method is not None:
        words.append(str(method.name))
        if method.shares_factors and method.share != "inputs":
            words.append(method.share)
        for field, letter in _LETTERS.items():
            if (value := getattr(method, field, None)) is not None:
                words.append(letter + _joined(value))
        words += _other_options(method)
    words += ["plain"] if convert.plain else []
    if convert.residual_rank:
        words.append(f"plus{convert.residual_rank}")
    words += getattr(method, "offer", ())
    for pattern, value in (
        ("{:g}", convert.target and 100 * convert.target),
        ("{}", convert.target_params),
        ("{}", convert.target_bytes),
        ("{}x", _joined(convert.speedup) if convert.speedup else None),
        ("{}", convert.latency),
        ("err{:g}", convert.max_error),
        ("loss{:g}", convert.max_loss),
        ("tol{:g}", getattr(method, "tol", None)),
        ("keep{}", _number_of(convert.keep_layers)),
        ("drop{}", _number_of(convert.drop_layers)),
        ("append{}", convert.append_layers),
    ):
        words += [] if value is None else [pattern.format(value)]
    if convert.vocab is not None:
        words.append("vocab" if convert.vocab == "data" else f"vocab{convert.vocab}")
    if convert.embeddings is not None:
        share = convert.embeddings.target
        words.append("words" + ("" if share is None else f"{100 * share:g}"))
    words += convert.bit_words
    return "-".join(words)


def _joined(value: Any) -> str:
    values = value if isinstance(value, tuple) else (value,)
    return "x".join(f"{own:g}" if isinstance(own, float) else str(own) for own in values)


def _other_options(method: Any) -> list[str]:
    """Names what differs from a method's defaults and has no letter, such as `dct` or `block8`."""
    words = []
    for field, info in type(method).model_fields.items():
        value = getattr(method, field)
        if field in _NAMED or value in (None, info.default):
            continue
        if isinstance(value, Mapping):
            words += [f"{field}{width}x{_joined(part)}" for width, part in value.items()]
        elif isinstance(value, str):
            words.append(value)
        elif isinstance(value, bool):
            words.append(field if value else f"no-{field}")
        else:
            words.append(f"{field}{value}")
    return words


def _attention_words(convert: Convert) -> list[str]:
    """Names the replacement with what differs from its defaults, such as `hot-8x8` or `tsa-k3`."""
    spec = convert.attention
    if spec is None:
        return []
    words = [str(spec.name)]
    for field, letter in _ATTENTION.items():
        value = getattr(spec, field, None)
        if value is not None and value != type(spec).model_fields[field].default:
            words.append(letter + _joined(value))
    if convert.attention_layers is not None:
        words.append(f"at{len(convert.attention_layers)}")
    return words


def _number_of(blocks: Any) -> int | str | None:
    """Counts the blocks that are named, in all stacks."""
    if isinstance(blocks, Mapping):
        return sum(int(_number_of(item) or 0) for item in blocks.values())
    return len(blocks) if isinstance(blocks, tuple) else blocks
