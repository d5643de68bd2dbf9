"""From what was said of a conversion to all that it needs, over what a recipe says."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tcompress.errors import RecipeError
from tcompress.options.convert_options import BUDGETS, DEPTH, Convert
from tcompress.options.fields import Options, Place, flag_of
from tcompress.options.method_options import (
    MECHANISMS,
    METHODS,
    MechanismSpec,
    default_method,
    lookup_methods,
    mechanism_names,
    method_names,
)
from tcompress.options.read import Given, read
from tcompress.options.schema import Recipe
from tcompress.structures import Spec

NO_METHOD = "none"
"""Rewrite no layer."""
EMBEDDING_TARGET = 0.25
"""Kept fraction of the word embedding where none is given, nor one for the layers."""

Said = dict[str, Any]
"""Nested plain data, as a recipe would hold it."""

_LAYERS = (*BUDGETS, "allocation", "residual_rank")
_NESTED = {"method", "attention", "attention_layers", "calibration", "embeddings", *DEPTH}
_LISTS = ("keep", "only")
_MECHANISM_METHOD = "such as `--method hot`; a structure alone is chosen by `--method` itself"


@dataclass(frozen=True)
class Speech:
    """How messages call options.

    Attributes:
        typed: What was typed; None where keywords were given.
    """

    typed: Given[Any] | None = None

    def name(self, *place: str) -> str:
        """Names the option that sets a field."""
        if self.typed is None:
            return place[-1]
        item = self.typed.fields.get(place) or self.typed.fields.get((*place, "name"))
        return item.name if item else f"--{place[-1].replace('_', '-')}"

    def names(self, *places: Place) -> str:
        """Names several."""
        return ", ".join(f"`{self.name(*place)}`" for place in places)

    def ask(self, value: str, *place: str) -> str:
        """Writes an option with its value."""
        name = self.name(*place)
        return f'`{name}="{value}"`' if self.typed is None else f"`{name} {value}`"

    def read(self, data: Said) -> Convert:
        """Validates what a conversion needs."""
        return read(Convert, data) if self.typed is None else self.typed.read(data)


def conversion(
    said: Mapping[str, Any],
    recipe: Recipe | None = None,
    *,
    structure: str | None = None,
    typed: Given[Any] | None = None,
) -> Convert:
    """Puts what was said of a conversion over what a recipe says.

    Args:
        said: Nested plain data, of what was said alone; `method` may name a mechanism.
        recipe: What it overrides.
        structure: Method for the weights beside a mechanism.
        typed: What it was typed as, for messages.

    Raises:
        RecipeError: An option does not apply to the method, or its value is not allowed.
    """
    speech, said = Speech(typed), dict(said)
    base: Said = recipe.convert.model_dump(mode="json") if recipe else {"calibration": {}}
    if {*BUDGETS} & said.keys() or {"tol", "rank"} & said.get("method", {}).keys():
        base |= {name: None for name in BUDGETS if name in base}  # in place of the recipe's
    scratch = said.get("init", base.get("init")) == "random"
    if scratch and base.get("init") != "random":  # what a recipe says of data is for fits
        base["calibration"] = {}
    option = "--method" if structure is None else "--structure"
    attention = _attention(said, base, structure, speech)
    data = {**base, **{name: value for name, value in said.items() if name not in _NESTED}}
    data |= attention
    if depth := {name: said[name] for name in DEPTH if name in said}:
        data |= {**dict.fromkeys(DEPTH, None), **depth}
    data["embeddings"] = _embeddings(said, base.get("embeddings"), speech)
    data["calibration"] = base["calibration"] | said.get("calibration", {})
    if scratch and "seed" in said.get("calibration", {}):  # the seed is that of the weights
        data["seed"] = data["calibration"].pop("seed")
    if not data["calibration"]:
        del data["calibration"]  # it has its defaults
    cuts = scratch or any(data.get(name) is not None for name in (*DEPTH, "embeddings"))
    data["method"] = _method(said, base.get("method") or {}, option, speech, without=cuts)
    for name in _LISTS:
        data[name] = [*base.get(name, ()), *said.get(name, ())]
    result = speech.read(data)
    if recipe is None:
        _check_size(result, speech)
    return result


def options_of(name: str, option: str = "--method") -> type[Spec]:
    """Looks the options of a method up, of those that an option takes.

    Raises:
        RecipeError: There is no such method; the message lists those there are.
    """
    known = _allowed(option)
    if name not in known:
        listed = ", ".join(f"`{word}`" for word in known)
        where = "; methods are" if option == "--method" else f" of `{option}`; allowed are"
        close = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"did you mean `{close[0]}`?" if close else "see `tcompress methods`"
        raise RecipeError(f"unknown method `{name}`{where} {listed}", hint)
    return next(spec for spec in METHODS if name in spec.names())


def own_options(kind: type[Options]) -> list[str]:
    """Names the options of a method that have flags."""
    return [
        name
        for name, info in kind.model_fields.items()
        if name != "name" and not flag_of(name, info).off
    ]


def _allowed(option: str) -> tuple[str, ...]:
    """Names that an option takes, in the order of the registry."""
    if option == "--embeddings":
        return (*lookup_methods(), NO_METHOD)
    if option == "--methods":
        return method_names()
    return (*method_names(), *(mechanism_names() if option == "--method" else ()), NO_METHOD)


def _method(
    said: Said, base: Mapping[str, Any], option: str, speech: Speech, *, without: bool
) -> Said | None:
    """What a recipe would say of the method."""
    chosen = dict(said.get("method") or {})
    name = chosen.pop("name", None)
    about_layers = bool(chosen) or any(said.get(field) for field in (*_LAYERS, *_LISTS))
    name = name or base.get("name") or default_method(without and not about_layers)
    if name in (None, NO_METHOD):
        if chosen:
            listed = speech.names(*(("method", field) for field in chosen))
            raise RecipeError(
                f"{listed} needs a method", f"such as {speech.ask('lprod', 'method')}"
            )
        return None
    kind = options_of(name, option)
    wrong = [field for field in chosen if field not in kind.model_fields]
    if wrong:
        raise _not_applicable(wrong, name, kind, speech)
    seed = said.get("calibration", {}).get("seed")
    if seed is not None and "seed" in kind.model_fields:
        chosen.setdefault("seed", seed)
    # Of another method's options nothing can be kept.
    kept = dict(base) if base.get("name") in kind.names() else {}
    sized = any(field in said for field in BUDGETS)
    if "rank" in chosen or sized:
        kept.pop("tol", None)
    if "tol" in chosen or (sized and read(kind, {**kept, "name": name}).fixes_size):
        kept.pop("rank", None)
    return {**kept, **chosen, "name": name}


def _not_applicable(wrong: list[str], name: str, kind: type[Spec], speech: Speech) -> RecipeError:
    allowed = speech.names(*(("method", field) for field in own_options(kind)))
    owners = [spec.names()[0] for spec in METHODS if all(key in spec.model_fields for key in wrong)]
    one = len(wrong) == 1
    listed = speech.names(*(("method", field) for field in wrong))
    return RecipeError(
        f"{listed} {'does' if one else 'do'} not apply to method `{name}`; its options are "
        f"{allowed}",
        f"{listed} {'belongs' if one else 'belong'} to {speech.ask(owners[0], 'method')}"
        if owners
        else None,
    )


def _attention(said: Said, base: Mapping[str, Any], structure: str | None, speech: Speech) -> Said:
    """Takes what is about attention out of what was said; a structure becomes the method."""
    before = base.get("attention") or {}
    method, chosen = dict(said.get("method") or {}), dict(said.get("attention") or {})
    name = chosen.pop("name", before.get("name"))
    if method.get("name") in mechanism_names():
        name = method.pop("name")
    layers = said.get("attention_layers")
    if name is None:
        wrong: list[Place] = [("attention", field) for field in chosen]
        wrong += [("attention_layers",)] if layers else []
        wrong += [("structure",)] if structure else []
        if wrong:
            goes = "goes" if len(wrong) == 1 else "go"
            raise RecipeError(
                f"{speech.names(*wrong)} {goes} with an attention mechanism", _MECHANISM_METHOD
            )
        return {}
    kind = _mechanism(name)
    if structure is not None:
        method["name"] = structure
    elif "name" not in method and not base.get("method"):
        _of_the_paper(kind, said, method)
    said["method"] = method
    made: Said = {"attention": _own_attention(name, kind, chosen, before, said, speech)}
    return made if layers is None else {**made, "attention_layers": layers}


def _mechanism(name: str) -> type[MechanismSpec]:
    found = next((spec for spec in MECHANISMS if name in spec.names()), None)
    if found is None:
        known = ", ".join(f"`{word}`" for word in mechanism_names())
        raise RecipeError(f"unknown mechanism `{name}`; known mechanisms are {known}")
    return found


def _own_attention(
    name: str,
    kind: type[MechanismSpec],
    chosen: Said,
    before: Mapping[str, Any],
    said: Said,
    speech: Speech,
) -> Said:
    wrong = [field for field in chosen if field not in kind.model_fields]
    if wrong:
        own = speech.names(*(("attention", field) for field in own_options(kind)))
        listed = speech.names(*(("attention", field) for field in wrong))
        raise RecipeError(
            f"{listed} {'does' if len(wrong) == 1 else 'do'} not apply to `{name}`"
            + (f"; its options are {own}" if own else ""),
            "see `tcompress methods`",
        )
    seed = said.get("calibration", {}).get("seed")
    if seed is not None and "seed" in kind.model_fields:
        chosen.setdefault("seed", seed)
    kept = before if before.get("name") in kind.names() else {}
    return {**kept, **chosen, "name": name}


def _of_the_paper(kind: type[MechanismSpec], said: Said, method: Said) -> None:
    """Chooses the structure of the mechanism's paper, where something is said of layers."""
    if not method and not any(name in said for name in (*BUDGETS, "residual_rank")):
        method["name"] = NO_METHOD
        return
    method["name"] = kind.structure
    if kind.only and not said.get("only"):
        said["only"] = list(kind.only)


def _embeddings(said: Said, base: Mapping[str, Any] | None, speech: Speech) -> Any:
    """What is said of the word embedding; a method takes the place of the recipe's."""
    given = said.get("embeddings") or {}
    method, target = dict(given.get("method") or {}), given.get("target")
    name = method.get("name")
    if name == NO_METHOD:
        return None
    if name is None and target is None:
        return base
    if name is None and base is None:
        raise RecipeError(
            f"`{speech.name('embeddings', 'target')}` needs a method for the word embedding",
            f"add {speech.ask('svd', 'embeddings', 'method')}",
        )
    if name is not None:
        options_of(name, "--embeddings")  # says which there are
        base = {"method": method}
    elif base is not None:  # in place of the recipe's rank
        base = {**base, "method": {k: v for k, v in base["method"].items() if k != "rank"}}
    found = dict(base or {})
    if target is None and "rank" not in method:
        target = found.get("target") or said.get("target") or EMBEDDING_TARGET
    return found if target is None else {**found, "target": target}


def _check_size(convert: Convert, speech: Speech) -> None:
    """A rank that nothing determines would be refused for every layer, after a download."""
    method: Any = convert.method
    if method is None or method.has_size or convert.budget is not None:
        return
    names: Iterable[Place] = [("target",)]
    if method.name != "auto":
        names = [*names, ("method", "rank")]
    ways = " or ".join(f"`{speech.name(*place)}`" for place in names)
    raise RecipeError(
        f"method `{method.name}` needs a size: give {ways}",
        f"{speech.ask('0.25', 'target')} keeps a quarter of the rewritten layers' parameters; "
        f"`{speech.name('target_params')}`, `{speech.name('target_bytes')}` and "
        f"`{speech.name('max_error')}` are other ways to say it",
    )
