"""From the options of a command to what a recipe says about attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tcompress.cli.depth import block_numbers
from tcompress.cli.further import method_options
from tcompress.cli.names import DIGITS, MECHANISM_OPTIONS, flag
from tcompress.errors import RecipeError

if TYPE_CHECKING:
    from tcompress.mechanisms import MechanismSpec


def split_method(given: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Takes what is about attention out of the options.

    Args:
        given: Options; `method` is replaced by the structure, if it names a mechanism.
        base: What a recipe says of the conversion.

    Returns:
        What a recipe would say about attention; empty where nothing is said.

    Raises:
        RecipeError: An option does not apply to the mechanism, or there is none.
    """
    from tcompress.recipe import mechanism_names

    before = base.get("attention") or {}
    name = before.get("name")
    if given.get("method") in mechanism_names():
        name = given.pop("method")
    chosen = {option: given.pop(option) for option in MECHANISM_OPTIONS if option in given}
    layers = given.pop("layers", None)
    structure = given.pop("structure", None)
    if name is None:
        _check_alone(chosen, layers, structure)
        return {}
    if structure is not None:
        given["method"] = structure
    elif "method" not in given and not base.get("method"):
        given |= _of_the_paper(name, given)
    said: dict[str, Any] = {"attention": _options(name, chosen, before, given.get("seed"))}
    if layers is not None:
        said["attention_layers"] = block_numbers("--layers", layers)
    return said


def _options(
    name: str, chosen: dict[str, Any], before: Mapping[str, Any], seed: int | None
) -> dict[str, Any]:
    from tcompress.mechanisms.base import spec_names

    kind = mechanism_spec(name)
    wrong = [option for option in chosen if option not in kind.model_fields]
    if wrong:
        own = [flag(option) for option in MECHANISM_OPTIONS if option in kind.model_fields]
        raise RecipeError(
            f"{_flags(wrong)} {'does' if len(wrong) == 1 else 'do'} not apply to `{name}`"
            + (f"; its options are {', '.join(f'`{item}`' for item in own)}" if own else ""),
            "see `tcompress methods`",
        )
    if "grid" in chosen:
        chosen["grid"] = _sizes(chosen["grid"])
    if seed is not None and "seed" in kind.model_fields:
        chosen["seed"] = seed
    kept = before if before.get("name") in spec_names(kind) else {}
    return {**kept, **chosen, "name": name}


def mechanism_spec(name: str) -> type[MechanismSpec]:
    """Returns the options of a mechanism by a name that selects it."""
    from tcompress.mechanisms import mechanism_named

    return mechanism_named(name).spec


def _of_the_paper(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Chooses the structure of the mechanism's paper, where something is said of layers."""
    from tcompress.mechanisms import mechanism_named
    from tcompress.recipe.sections import BUDGETS

    if not any(option in given for option in (*method_options(), *BUDGETS, "residual_rank")):
        return {"method": "none"}
    kind = mechanism_named(name)
    found: dict[str, Any] = {"method": kind.structure}
    if kind.only and not given.get("only"):
        found["only"] = kind.only
    return found


def _check_alone(chosen: Mapping[str, Any], layers: Any, structure: Any) -> None:
    """Options of a mechanism without one."""
    wrong = [*chosen, *(["layers"] if layers else []), *(["structure"] if structure else [])]
    if wrong:
        raise RecipeError(
            f"{_flags(wrong)} {'goes' if len(wrong) == 1 else 'go'} with an attention mechanism",
            "such as `--method hot`; a structure alone is chosen by `--method` itself",
        )


def _sizes(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.replace("x", ",").split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) <= DIGITS for word in words):
        raise RecipeError(
            f"`--grid` is `{text}`, allowed are whole numbers with commas between, such as `14,14`",
            "see `tcompress convert --help`",
        )
    return tuple(int(word) for word in words)


def _flags(fields: list[str]) -> str:
    return ", ".join(f"`{flag(field)}`" for field in fields)
