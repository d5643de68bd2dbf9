"""From what was said of a conversion to all that it needs, over what a recipe says.

What it takes that nobody asked for is put into words, to be said before it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tcompress.attention import ReplacementSpec
from tcompress.errors import RecipeError
from tcompress.fields import Options, Place, method_options
from tcompress.options.convert_options import BUDGETS, DEPTH, TIMES, WIDTHS, Convert
from tcompress.options.method_options import (
    AUTO,
    METHODS,
    NARROWING,
    REPLACEMENTS,
    AnyMethod,
    lookup_methods,
    method_names,
    replacement_names,
)
from tcompress.options.read import Given, read
from tcompress.options.schema import Recipe
from tcompress.options.words import quoted, suggestion
from tcompress.structures import Spec

NO_METHOD = "none"
"""Rewrite no layer."""
EMBEDDING_TARGET = 0.25
"""Kept fraction of the word embedding where none is given, nor one for the layers."""

_FEWER_BITS = (
    "bits stand beside any method, or none: `--bits 8` or `--bits 4`, and `--embedding-bits` for "
    "the word embedding, see docs/bits.md"
)
_LEAVE_OUT = (
    "`width` leaves out neurons and parts of heads, `--drop-layers N` whole blocks; single weights "
    "are not set to zero"
)
_ELSEWHERE = {
    **dict.fromkeys(("int8", "int4", "8bit", "4bit", "fp8", "quant", "gptq", "awq"), _FEWER_BITS),
    **dict.fromkeys(("prun", "sparse", "sparsity"), _LEAVE_OUT),
    "distil": "convert with any method, then `tcompress finetune` imitates the dense model",
}
"""Parts of names of what other programs call methods, with where it is found here."""

Said = dict[str, Any]
"""Nested plain data, as a recipe would hold it."""

_LAYERS = (*BUDGETS, "allocation", "residual_rank")
_NESTED = {"method", "attention", "attention_layers", "calibration", "embeddings", *DEPTH}
_LISTS = ("keep", "only")
_PAGE = "docs/methods.md"
_ATTENTION = "such as `--method hot`; a structure alone is chosen by `--method` itself"


def conversion(
    said: Mapping[str, Any],
    recipe: Recipe | None = None,
    *,
    structure: str | None = None,
    typed: Given[Any] | None = None,
) -> Convert:
    """Puts what was said of a conversion, as a recipe would hold it, over what a recipe says.

    `said["method"]` may name an attention replacement, `structure` then the method for the weights;
    what was `typed` is for messages, which call options by keywords without it.
    """
    typed, said = typed or Given(Convert), dict(said)
    base: Said = recipe.convert.model_dump(mode="json") if recipe else {"calibration": {}}
    if {*BUDGETS} & said.keys() or {"tol", "rank"} & said.get("method", {}).keys():
        base |= {name: None for name in BUDGETS if name in base}  # in place of the recipe's
        if not {*TIMES, "max_loss"} & said.keys():
            base |= {name: None for name in ("at", "threads") if name in base}
    scratch = said.get("init", base.get("init")) == "random"
    if scratch and base.get("init") != "random":  # what a recipe says of data is for fits
        base["calibration"] = {}
    option = "--method" if structure is None else "--structure"
    attention = _attention(said, base, structure, typed)
    data = {**base, **{name: value for name, value in said.items() if name not in _NESTED}}
    data |= attention
    if depth := {name: said[name] for name in DEPTH if name in said}:
        data |= {**dict.fromkeys(DEPTH, None), **depth}
    data["embeddings"] = _embeddings(said, base.get("embeddings"), typed)
    data["calibration"] = base["calibration"] | said.get("calibration", {})
    if scratch and "seed" in said.get("calibration", {}):  # the seed is that of the weights
        data["seed"] = data["calibration"].pop("seed")
    if not data["calibration"]:
        del data["calibration"]  # it has its defaults
    alone = (*DEPTH, "embeddings", "vocab", "bits", "embedding_bits")  # need no method
    cuts = scratch or any(data.get(name) is not None for name in alone)
    usual = _usual(data, said.get("method") or {}, scratch=scratch)
    data["method"] = _method(said, base.get("method") or {}, option, typed, usual, without=cuts)
    for name in _LISTS:
        data[name] = [*base.get(name, ()), *said.get(name, ())]
    result: Convert = typed.read(data)
    if recipe is None:
        _check_size(result, typed)
    return result


def _usual(data: Said, chosen: Said, *, scratch: bool) -> str:
    """Names the method that goes with a goal; options that are `chosen` may name it too."""
    if data.get("plain"):
        return NARROWING
    if any(data.get(name) is not None for name in (*TIMES, "max_loss")):
        return AUTO
    svd = _options_of("svd", "--method").model_fields.keys()
    sized = bool(chosen) or any(data.get(name) is not None for name in BUDGETS)
    return "svd" if sized and not scratch and chosen.keys() <= svd else "lprod"


def _options_of(name: str, option: str) -> type[Spec]:
    """Looks the options of a method up, of those that `option` takes."""
    methods = lookup_methods() if option == "--embeddings" else method_names()
    known = (*methods, *(replacement_names() if option == "--method" else ()), NO_METHOD)
    if name not in known:
        where = "; methods are" if option == "--method" else f" of `{option}`; allowed are"
        elsewhere = next((_ELSEWHERE[word] for word in _ELSEWHERE if word in name.lower()), None)
        hint = elsewhere or suggestion(name, known, "see `tcompress methods`")
        raise RecipeError(f"unknown method `{name}`{where} {quoted(known)}", hint)
    return next(spec for spec in METHODS if name in spec.names())


def _method(
    said: Said,
    base: Mapping[str, Any],
    option: str,
    typed: Given[Any],
    usual: str,
    *,
    without: bool,
) -> Said | None:
    """Section `method` of a recipe that says the same; None for no method."""
    chosen = dict(said.get("method") or {})
    name = chosen.pop("name", None) or base.get("name")
    about_layers = bool(chosen) or any(said.get(field) for field in (*_LAYERS, *_LISTS))
    if name is None and any(said.get(field) for field in WIDTHS):
        name = NARROWING
    if name is None and (about_layers or not without):
        name = usual
    if name in (None, NO_METHOD):
        if chosen:
            listed = typed.names([("method", field) for field in chosen])
            hint = f"such as {typed.ask('lprod', 'method')}"
            raise RecipeError(f"{listed} needs a method", hint)
        return None
    kind = _options_of(name, option)
    before = dict(base)
    sized, same = any(field in said for field in BUDGETS), before.get("name") in kind.names()
    if "rank" in chosen or sized:
        before.pop("tol", None)
    if "tol" in chosen or (sized and same and read(kind, before).fixes_size):
        before.pop("rank", None)
    return _over("method", kind, name, chosen, before, said, typed)


def _over(
    place: str,
    kind: type[Options],
    name: str,
    chosen: Said,
    before: Mapping[str, Any],
    said: Said,
    typed: Given[Any],
) -> Said:
    """Puts options of a method over those that a recipe gives the same method."""
    wrong: list[Place] = [(place, field) for field in chosen if field not in kind.model_fields]
    if wrong:
        raise _not_applicable(wrong, name, kind, typed)
    seed = said.get("calibration", {}).get("seed")
    if seed is not None and "seed" in kind.model_fields:
        chosen.setdefault("seed", seed)
    # Of another method's options nothing can be kept.
    kept = before if before.get("name") in kind.names() else {}
    return {**kept, **chosen, "name": name}


def _not_applicable(
    wrong: Sequence[Place], name: str, kind: type[Options], typed: Given[Any]
) -> RecipeError:
    place = wrong[0][0]
    allowed = typed.names([item.place for item in method_options(kind, (place,))])
    fields = [field for _, field in wrong]
    kinds: Sequence[type[Options]] = METHODS if place == "method" else REPLACEMENTS
    owners = [each.names()[0] for each in kinds if {*fields} <= each.model_fields.keys()]
    listed, one = typed.names(wrong), len(wrong) == 1
    its = f"; its options are {allowed}" if allowed else ""
    return RecipeError(
        f"{listed} {'does' if one else 'do'} not apply to method `{name}`{its}",
        f"{listed} {'belongs' if one else 'belong'} to {typed.ask(owners[0], 'method')}"
        if owners
        else "see `tcompress methods`",
    )


def _attention(said: Said, base: Said, structure: str | None, typed: Given[Any]) -> Said:
    """Move options of attention out of what was said; a structure becomes the method."""
    before = base.get("attention") or {}
    method, chosen = dict(said.get("method") or {}), dict(said.get("attention") or {})
    name = chosen.pop("name", before.get("name"))
    if method.get("name") in replacement_names():
        name = method.pop("name")
    layers = said.get("attention_layers")
    if name is None:
        wrong: list[Place] = [("attention", field) for field in chosen]
        wrong += [("attention_layers",)] if layers else []
        wrong += [("structure",)] if structure else []
        if wrong:
            go = "goes" if len(wrong) == 1 else "go"
            text = f"{typed.names(wrong)} {go} with an attention replacement"
            raise RecipeError(text, _ATTENTION)
        return {}
    kind = next((spec for spec in REPLACEMENTS if name in spec.names()), None)
    if kind is None:
        return {"attention": {**chosen, "name": name}}  # for validation to refuse
    if structure is not None:
        method["name"] = structure
    elif "name" not in method and not base.get("method"):
        _of_the_paper(kind, said, method)
    said["method"] = method
    made: Said = {"attention": _over("attention", kind, name, chosen, before, said, typed)}
    return made if layers is None else {**made, "attention_layers": layers}


def _of_the_paper(kind: type[ReplacementSpec], said: Said, method: Said) -> None:
    """Chooses the structure of a replacement's paper, where something is said of layers."""
    if not method and not any(name in said for name in (*BUDGETS, "residual_rank")):
        method["name"] = NO_METHOD
        return
    method["name"] = kind.structure
    if kind.only and not said.get("only"):
        said["only"] = list(kind.only)


def _embeddings(said: Said, base: Mapping[str, Any] | None, typed: Given[Any]) -> Any:
    """Section `embeddings` of a recipe; a method replaces the recipe's."""
    given = said.get("embeddings") or {}
    method, target = dict(given.get("method") or {}), given.get("target")
    name = method.get("name")
    if name == NO_METHOD:
        return None
    if name is None and target is None:
        return base
    if name is not None:
        _options_of(name, "--embeddings")  # says which there are
        found = {"method": method}
    elif base is None:
        text = f"`{typed.name('embeddings', 'target')}` needs a method for the word embedding"
        raise RecipeError(text, f"add {typed.ask('svd', 'embeddings', 'method')}")
    else:  # in place of the recipe's rank
        found = {**base, "method": {k: v for k, v in base["method"].items() if k != "rank"}}
    if target is None and "rank" not in method:
        target = said.get("target") or EMBEDDING_TARGET
    return found if target is None else {**found, "target": target}


def _check_size(convert: Convert, typed: Given[Any]) -> None:
    """A rank that nothing determines would be refused for every layer, after a download."""
    method = convert.method
    if method is None or method.has_size or convert.budget is not None:
        return
    if method.narrows and convert.fixes_width:
        return
    place = ("keep_neurons",) if method.narrows else ("method", "rank")
    rank = "" if method.name == "auto" else f" or `{typed.name(*place)}`"
    raise RecipeError(
        f"method `{method.name}` needs a size: give `{typed.name('target')}`{rank}",
        f"{typed.ask('0.25', 'target')} keeps a quarter of the rewritten layers' parameters; "
        f"`{typed.name('target_params')}`, `{typed.name('target_bytes')}` and "
        f"`{typed.name('max_error')}` are other ways to say it",
    )


def unasked(settings: Convert, said: dict[str, Any], typed: Given[Any]) -> Iterator[str]:
    """Says which method was taken where none was named, and what its defaults are.

    `said` is what was typed, as a recipe would hold it. Options of a method name it too.
    """
    method = settings.method
    if method is None:
        return
    named = said.get("method") or settings.attention or method.narrows  # by its options
    if not named:
        yield _taken(settings, method, typed)
    chosen = getattr(method, "transform", None) is not None
    fitted = not (chosen or settings.calibration.is_none or settings.init == "random")
    if method.name == "lprod" and fitted:
        yield (
            "lprod: the transform is fitted to the data, which keeps a little more than 1/p; the "
            f"layer of the paper is {typed.ask('dct', 'method', 'transform')}"
        )


def _taken(settings: Convert, method: AnyMethod, typed: Given[Any]) -> str:
    taken = typed.ask(method.name, "method")
    if settings.budget is not None or method.name != "lprod":
        return f"No method is named: taking {taken}, as fits what is asked for; see {_PAGE}"
    quick = f"{typed.ask('svd', 'method')} {typed.ask('0.5', 'target')}".replace("` `", " ")
    fewer = typed.ask("2", "drop_layers")
    return (
        f"No method or size is named: taking {taken} with p = {getattr(method, 'p', '')}, which "
        f"takes minutes; quicker are {quick} and {fewer}; see {_PAGE}"
    )
