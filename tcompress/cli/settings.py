"""From the options of a command to what a recipe says about a conversion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tcompress.cli.depth import dropped_blocks, kept_blocks
from tcompress.cli.errors import suggestion
from tcompress.cli.further import method_options
from tcompress.cli.mechanisms import mechanism_spec, split_method
from tcompress.cli.names import DIGITS, flag
from tcompress.errors import RecipeError

if TYPE_CHECKING:
    from pydantic import ValidationError

    from tcompress.recipe import Convert, Recipe
    from tcompress.structures import Spec

NO_METHOD = "none"
"""Rewrite no layer."""
EMBEDDING_TARGET = 0.25
"""Kept fraction of the word embedding where none is given, nor one for the layers."""

_CALIBRATION = {
    "calib": "source",
    "calib_samples": "samples",
    "calib_columns": "columns",
    "max_length": "max_length",
    "output_moments": "output_moments",
    "damping": "damping",
    "seed": "seed",
}
_FRACTIONS = ("target", "embedding_target", "max_error", "tol")
BUDGETS = ("target", "target_params", "target_bytes", "max_error")
"""Options of which a conversion takes one."""

DEPTH = ("keep_layers", "drop_layers", "append_layers")
"""Options that choose blocks, of which it takes one."""

_MODES = re.compile(r"([0-9]{1,9})=([0-9]{1,9}(?:x[0-9]{1,9}){1,63})")
_LAYERS = (*BUDGETS, "allocation", "residual_rank")
_CONVERT = (*_LAYERS, "init", "positions", "norm", "dtype", "device", "max_shard_size")


def conversion(options: Mapping[str, Any], recipe: Recipe | None = None) -> Convert:
    """Merges options into a recipe.

    Args:
        options: Values by the name of the parameter; None and empty lists were not given.
        recipe: What they override.

    Raises:
        RecipeError: An option does not apply to the method, or its value is not allowed.
    """
    from pydantic import ValidationError

    from tcompress.recipe import Convert

    given = {name: value for name, value in options.items() if value not in (None, [], ())}
    empty = [name for name, value in given.items() if isinstance(value, str) and not value.strip()]
    if empty:  # a variable of the shell that is not set, most likely
        raise RecipeError(f"{_flags(empty)} has no value", "give one, or leave it out")
    refuse_huge(given)
    if isinstance(given.get("rank"), str):
        given["rank"] = _numbers("--rank", given["rank"])
    if isinstance(given.get("modes"), str):
        given["modes"] = _modes(given["modes"])
    if isinstance(given.get("offer"), str):
        given["offer"] = tuple(filter(None, map(str.strip, given["offer"].split(","))))
    for name in ("target_params", "target_bytes"):
        if isinstance(given.get(name), str) and _is_whole(given[name]):
            given[name] = int(given[name])
    given |= {name: fraction(given[name]) for name in _FRACTIONS if name in given}
    base = recipe.convert.model_dump() if recipe else {"calibration": {}}
    if any(name in given for name in (*BUDGETS, "tol", "rank")):  # in place of the recipe's
        base |= {name: None for name in BUDGETS if name in base}
    scratch = given.get("init", base.get("init")) == "random"
    if scratch and base.get("init") != "random":  # what a recipe says of data is for fits
        base["calibration"] = {}
    option = "--structure" if "structure" in given else "--method"
    attention = split_method(given, base)
    blocks = _blocks(given)
    embeddings = _embeddings(given, base.get("embeddings"))
    left = {**base, **blocks, "embeddings": embeddings, "scratch": scratch or None}
    data = {
        **base,
        **blocks,
        **attention,
        "embeddings": embeddings,
        "method": _method(given, base.get("method") or {}, option, without=_cuts(left)),
        "calibration": base["calibration"] | _calibration(given, scratch=scratch),
        "keep": (*base.get("keep", ()), *given.get("keep", ())),
        "only": (*base.get("only", ()), *given.get("only", ())),
        **{name: given[name] for name in _CONVERT if name in given},
        **({"seed": given["seed"]} if scratch and "seed" in given else {}),
    }
    if not data["calibration"]:
        del data["calibration"]  # it has its defaults
    try:
        result = Convert.model_validate(data)
    except ValidationError as error:
        raise _in_words(error, data) from error
    if recipe is None:
        _check_size(result)
    return result


def _numbers(option: str, text: str) -> int | tuple[int, ...]:
    """Reads one whole number, or several with commas between."""
    words = [word.strip() for word in text.split(",")]
    if not all(map(_is_whole, words)):
        raise RecipeError(
            f"`{option}` is `{text}`, allowed is a whole number, or several with commas between",
            "see `tcompress convert --help`",
        )
    found = tuple(map(int, words))
    return found if len(found) > 1 else found[0]


def refuse_huge(given: Mapping[str, Any]) -> None:
    """Refuses whole numbers that are larger than any size.

    Raises:
        RecipeError: There are some; names all of them.
    """
    huge = [
        name for name, value in given.items() if type(value) is int and abs(value) >= 10**DIGITS
    ]
    if huge:
        raise RecipeError(
            f"{_flags(huge)} {'is' if len(huge) == 1 else 'are'} larger than any size",
            f"allowed are up to {DIGITS} digits",
        )


def _is_whole(word: str) -> bool:
    """Tells whether a word is a whole number; longer ones than this size nothing."""
    return word.isascii() and word.isdigit() and len(word) <= DIGITS


def fraction(value: Any) -> Any:
    """Reads `0.25` or `25%`; leaves what is neither to validation, which says what is allowed."""
    text = str(value).strip()
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return value


def _modes(text: str) -> dict[int, tuple[int, ...]]:
    """Reads the factors of widths, such as `64=8x8,172=4x43`."""
    found = [_MODES.fullmatch(word.strip()) for word in text.split(",")]
    if not all(found):
        raise RecipeError(
            f"`--modes` is `{text}`, allowed are widths with factors, such as `64=8x8,172=4x43`",
            "see `tcompress convert --help`",
        )
    return {int(item[1]): tuple(map(int, item[2].split("x"))) for item in found if item}


def default_output(model: str, convert: Convert) -> str:
    """Names the folder to write, such as `bert-base-lprod-p4`."""
    from tcompress.recipe.naming import short_name
    from tcompress.source import default_output_name

    return default_output_name(model, short_name(convert))


def _blocks(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of blocks; any option takes the place of all in a recipe."""
    said: dict[str, Any] = {}
    if given.get("keep_layers"):
        said["keep_layers"] = kept_blocks(given["keep_layers"])
    if given.get("drop_layers"):
        said["drop_layers"] = dropped_blocks(given["drop_layers"])
    if given.get("append_layers"):
        said["append_layers"] = given["append_layers"]
    return {**dict.fromkeys(DEPTH, None), **said} if said else {}


def _embeddings(given: Mapping[str, Any], base: Mapping[str, Any] | None) -> Any:
    """What is said of the word embedding; a method takes the place of the recipe's."""
    name, target = given.get("embeddings"), given.get("embedding_target")
    if name == NO_METHOD:
        return None
    if name is None and target is None:
        return base
    if name is None and base is None:
        raise RecipeError(
            "`--embedding-target` needs a method for the word embedding", "add `--embeddings svd`"
        )
    if name is not None:
        method_class(name, "--embeddings")  # says which there are
        base = {"method": {"name": name}}
    if name is None and base is not None:  # in place of the recipe's rank
        base = {**base, "method": {k: v for k, v in base["method"].items() if k != "rank"}}
    default = (base or {}).get("target") or given.get("target") or EMBEDDING_TARGET
    return {**(base or {}), "target": default if target is None else target}


def _cuts(data: Mapping[str, Any]) -> bool:
    """Whether something is done without a method for the layers of blocks."""
    fields = (*DEPTH, "embeddings", "scratch")
    return any(data.get(name) is not None for name in fields)


def method_class(name: str, option: str = "--method") -> type[Spec]:
    """Looks the options of a method up, of those that an option takes."""
    from tcompress.recipe.methods import AutoSpec, names_of
    from tcompress.structures import structures

    known = _allowed(option)
    if name not in known:
        listed = ", ".join(f"`{word}`" for word in known)
        where = "; methods are" if option == "--method" else f" of `{option}`; allowed are"
        hint = suggestion(name, known) or "see `tcompress methods`"
        raise RecipeError(f"unknown method `{name}`{where} {listed}", hint)
    if name == AutoSpec().name:
        return AutoSpec
    return next(item.spec for item in structures() if name in names_of(item))


def _allowed(option: str) -> tuple[str, ...]:
    """Names that an option takes, in the order of the registry."""
    from tcompress.recipe import lookup_methods, mechanism_names, method_names

    if option == "--embeddings":
        return (*lookup_methods(), NO_METHOD)
    if option == "--methods":
        return method_names()
    mechanisms = mechanism_names() if option == "--method" else ()
    return (*method_names(), *mechanisms, NO_METHOD)


def _names(spec: type[Spec]) -> tuple[str, ...]:
    names: tuple[str, ...] = spec.model_fields["name"].annotation.__args__  # type: ignore[union-attr]
    return names


def _method(
    given: Mapping[str, Any], base: Mapping[str, Any], option: str, *, without: bool
) -> dict[str, Any] | None:
    from tcompress.recipe import default_method

    chosen = {name: given[name] for name in method_options() if name in given}
    about_layers = bool(chosen) or any(given.get(name) for name in (*_LAYERS, "keep", "only"))
    name = given.get("method") or base.get("name") or default_method(without and not about_layers)
    if name in (None, NO_METHOD):
        if chosen:
            raise RecipeError(f"{_flags(chosen)} needs a method", "such as `--method lprod`")
        return None
    kind = method_class(name, option)
    wrong = [option for option in chosen if option not in kind.model_fields]
    if wrong:
        raise _not_applicable(wrong, name, kind)
    if "seed" in given and "seed" in kind.model_fields:
        chosen["seed"] = given["seed"]
    # Of another method's options nothing can be kept.
    kept = dict(base) if base.get("name") in _names(kind) else {}
    if "rank" in chosen or any(name in given for name in BUDGETS):
        kept.pop("tol", None)
    if "tol" in chosen or (
        any(name in given for name in BUDGETS) and kind.model_validate(kept).fixes_size
    ):
        kept.pop("rank", None)
    return {**kept, **chosen, "name": name}


def _not_applicable(wrong: Sequence[str], name: str, kind: type[Spec]) -> RecipeError:
    from tcompress.recipe.methods import AutoSpec
    from tcompress.structures import structures

    allowed = [option for option in method_options() if option in kind.model_fields]
    specs: list[type[Spec]] = [*(item.spec for item in structures()), AutoSpec]
    owners = [
        _names(spec)[0] for spec in specs if all(option in spec.model_fields for option in wrong)
    ]
    verb = "does" if len(wrong) == 1 else "do"
    belongs = "belongs" if len(wrong) == 1 else "belong"
    listed = _flags(wrong)
    return RecipeError(
        f"{listed} {verb} not apply to method `{name}`; its options are {_flags(allowed)}",
        f"{listed} {belongs} to `--method {owners[0]}`" if owners else None,
    )


def _flags(fields: Iterable[str]) -> str:
    return ", ".join(f"`{flag(field)}`" for field in fields)


def _calibration(given: Mapping[str, Any], *, scratch: bool) -> dict[str, Any]:
    values = {field: given[name] for name, field in _CALIBRATION.items() if name in given}
    if scratch:  # the seed is that of the weights
        values.pop("seed", None)
    if "columns" in values:
        joined = ",".join(values["columns"])
        values["columns"] = tuple(name.strip() for name in joined.split(",") if name.strip())
    return values


def _in_words(error: ValidationError, data: Mapping[str, Any]) -> RecipeError:
    """Names options, where validation names fields, and says what they take."""
    from tcompress.recipe import json_schema
    from tcompress.recipe.words import describe, meant

    schema = json_schema()
    lines = []
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":  # of what is wrong already
            continue
        if item["type"] == "value_error":  # about several options; it says which
            lines.append(str(item["ctx"]["error"]))
            continue
        section, field = _place([str(step) for step in item["loc"]])
        fragment = _fragment(schema, section, field, data)
        allowed = describe(fragment, schema) if fragment else item["msg"]
        value = data.get(section, data).get(field, item["input"])
        ending = meant(value, fragment, schema) if fragment else ""
        lines.append(
            f"`{_option(section, field)}` is `{_written(value)}`, allowed is {allowed}{ending}"
        )
    return RecipeError("; ".join(dict.fromkeys(lines)), "see `tcompress convert --help`")


def _place(steps: Sequence[str]) -> tuple[str, str]:
    """Section and field of an error; behind the field validation names members of unions."""
    if steps[0] in ("method", "attention"):  # the name that selects comes between
        return steps[0], steps[min(2, len(steps) - 1)]
    if steps[0] == "calibration":
        return "calibration", steps[min(1, len(steps) - 1)]
    if steps[0] == "embeddings":
        return "embeddings", steps[min(1, len(steps) - 1)]
    return "", steps[0]


def _written(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _option(section: str, field: str) -> str:
    if section == "calibration":
        names = {field: name for name, field in _CALIBRATION.items()}
        return flag(names.get(field, field))
    if section == "embeddings":
        return "--embedding-target" if field == "target" else "--embeddings"
    return flag(field)


def _fragment(
    schema: Mapping[str, Any], section: str, field: str, data: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Finds the part of the schema that a failed field belongs to."""
    owner = {"calibration": "Calibration", "embeddings": "Embeddings"}.get(section, "Convert")
    if section == "method":
        owner = method_class(data["method"]["name"]).__name__
    if section == "attention":
        owner = mechanism_spec(data["attention"]["name"]).__name__
    found: dict[str, Any] | None = schema["$defs"][owner]["properties"].get(field)
    return found


def _check_size(convert: Convert) -> None:
    """A rank that nothing determines would be refused for every layer, after a download."""
    method: Any = convert.method
    if method is None or method.has_size or convert.budget is not None:
        return
    ways = "--target" if method.name == "auto" else "--target` or `--rank"
    raise RecipeError(
        f"method `{method.name}` needs a size: give `{ways}`",
        "`--target 0.25` keeps a quarter of the rewritten layers' parameters; `--target-params`, "
        "`--target-bytes` and `--max-error` are other ways to say it",
    )
