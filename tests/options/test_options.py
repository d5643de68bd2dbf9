"""An option is declared once: what one field means for flags, recipes, keywords and reference."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

import tcompress
from tcompress.cli.bench import bench
from tcompress.cli.flags import help_of, offers
from tcompress.errors import InputError, RecipeError, SourceError
from tcompress.fields import Typed, members, option, typed_fields
from tcompress.options import Bench, Convert, Evaluate, Finetune, Recipe, json_schema, parse_recipe
from tcompress.options import read as reading
from tcompress.options.choose import conversion
from tcompress.options.document import read_document
from tcompress.options.read import Given, read
from tcompress.reporting.reference import reference_markdown
from tests.support.cli import run
from tests.support.tiny import build
from tests.support.typed import bound

TEXTS = (
    "-3", "-1", "0", "1", "2", "5", "99999", "0.5", "1.5", "-0.5", "1e-3", "2.0", "4294967296",
    "99999999999999999999", "nan", "inf", "abc", "10MB", "30M", "cpu", "0.9x", "1_000",
)  # fmt: skip
REQUIRED: dict[str, Any] = {"task": "sts", "data": "x"}
SECTIONS = {"evaluate": Evaluate, "bench": Bench, "finetune": Finetune, "convert": Convert}
_UNREAD = {"columns"}  # any pair will do


def own(kind: type[BaseModel]) -> list[Typed]:
    """Options whose values are typed as recipes write them."""
    chosen = ("method", "attention", "embeddings")  # which depend on others
    return [
        item
        for item in typed_fields(kind)
        if item.flag.read is None and item.place[0] not in chosen and item.place[-1] not in _UNREAD
    ]


CASES = [(name, item) for name, kind in SECTIONS.items() for item in own(kind)]


@pytest.mark.parametrize(("section", "item"), CASES, ids=[f"{a}{b.name}" for a, b in CASES])
def test_flag_recipe_and_keyword_take_the_same(section: str, item: Typed) -> None:
    if members(item.annotation) == [bool]:
        return  # there is nothing to type
    for text in (*TEXTS, *words(item)):
        found = [outcome(way, section, item, text) for way in (by_flag, by_recipe, by_keyword)]
        assert found[0] == found[1] == found[2], text


def words(item: Typed) -> list[str]:
    return [word for part in members(item.annotation) for word in get_args(part) if word in WORDS]


WORDS = {"sts", "float16", "eager", "compiled", "blocks", "all", "eos", "bf16", "uniform"}


def outcome(way: Any, section: str, item: Typed, text: str) -> Any:
    try:
        return way(section, item, text)
    except RecipeError:
        return None


def by_flag(section: str, item: Typed, text: str) -> Any:
    typed = {(name,): [value] for name, value in REQUIRED.items() if section == "evaluate"}
    typed[item.place] = [f"hidden={text}" if is_a(item, dict) else text]
    fields = {each.place: each for each in typed_fields(SECTIONS[section])}
    said: Given[Any] = Given(SECTIONS[section], section, typed, fields)
    alone = {"method": {"name": "lprod"}} if section == "convert" else {}
    return said.read({**alone, **said.values()})


def by_recipe(section: str, item: Typed, text: str) -> Any:
    base: dict[str, Any] = {"recipe_version": 1, "convert": {"method": {"name": "lprod"}}}
    mark = json.dumps("THE VALUE")
    here = nested(item, "THE VALUE")
    here = {**REQUIRED, **here} if section == "evaluate" else here
    base[section] = {**base.get(section, {}), **here}
    base[section] = [base[section]] if section == "evaluate" else base[section]
    written = json.dumps(text) if only_text(item) else text
    found = getattr(parse_recipe(json.dumps(base).replace(mark, written), "test"), section)
    return found[0] if section == "evaluate" else found


def by_keyword(section: str, item: Typed, text: str) -> Any:
    value = text if only_text(item) else read_document(text).data
    given = nested(item, value)
    if section == "evaluate":
        given = {**REQUIRED, **given}
    if section == "convert":
        given = {"method": "lprod", **given}
    return read(SECTIONS[section], given)


def nested(item: Typed, value: Any) -> dict[str, Any]:
    """Puts a value where it belongs, in a list or a mapping of its kind."""
    if is_a(item, tuple):
        value = [value]
    if is_a(item, dict):
        value = {"hidden": value}
    for step in reversed(item.place):
        value = {step: value}
    found: dict[str, Any] = value
    return found


def is_a(item: Typed, kind: type) -> bool:
    return any(get_origin(part) is kind for part in members(item.annotation))


def only_text(item: Typed) -> bool:
    """Whether text is all that a value, or each of a list, can be."""
    parts = []
    for part in members(item.annotation):
        inner = get_args(part) if get_origin(part) in (tuple, dict) else (part,)
        parts.append(inner[-1] if get_origin(part) is dict else inner[0])
    return not {int, float} & {kind for part in parts for kind in members(part)}


@pytest.fixture
def _fan() -> Iterator[None]:
    """A field that is added to `Bench` at run time."""
    info = option("off", "how fast the fan turns", metavar="SPEED")
    info.annotation = Literal["off", "slow", "full"]
    Bench.__pydantic_fields__["fan"] = info
    try:
        rebuilt()
        yield
    finally:
        del Bench.__pydantic_fields__["fan"]
        rebuilt()


def rebuilt() -> None:
    for kind in (Bench, Recipe):
        kind.model_rebuild(force=True)
    reading.schema_of.cache_clear()


@pytest.mark.usefixtures("_fan")
def test_a_new_field_is_everything_at_once() -> None:
    assert "--fan" in run("bench", "--help").out
    item = next(item for item in typed_fields(Bench) if item.name == "--fan")
    assert help_of(item) == "How fast the fan turns. Default `off`."
    offered = offers(item)
    assert offered is not None
    assert offered("s") == ["slow"]
    assert bound(bench, "m", "--fan", "full")["wanted"].fan == "full"
    assert json_schema()["$defs"]["Bench"]["properties"]["fan"]["enum"] == ["off", "slow", "full"]
    row = "| `bench.fan` | one of `off`, `slow`, `full` | `off` | how fast the fan turns |"
    assert row in reference_markdown().splitlines()
    given: Any = read(Bench, {"fan": "slow"})
    assert given.fan == "slow"
    text = "{recipe_version: 1, convert: {method: svd, target: 0.5}, bench: {fan: full}}"
    said: Any = parse_recipe(text, "test").bench
    assert said.fan == "full"
    done = run("bench", "m", "--fan", "ful")
    assert done.code == 2
    wrong = "is `ful`, allowed is one of `off`, `slow`, `full`; did you mean `full`?"
    assert done.err.startswith(f"error: `--fan` {wrong}")
    with pytest.raises(RecipeError) as caught:
        read(Bench, {"fan": "ful"})
    assert caught.value.message == f"`fan` {wrong}"


def test_help_shows_what_most_people_need_first() -> None:
    done = run("convert", "--help")
    assert done.out.index("--method") < done.out.index("--recipe") < done.out.index("--p ")
    (facts,) = run("methods", "lprod", "--json").document["methods"]
    assert {"--p", "--transform"} <= {item["option"] for item in facts["options"]}
    assert run("methods", "lprd").err.startswith("error: unknown method `lprd`; methods are `svd`")


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({}, "lprod"),
        ({"target": 0.5}, "svd"),
        ({"method": {"rank": 8}}, "svd"),
        ({"speedup": 2}, "auto"),
        ({"max_loss": 0.01}, "auto"),
        ({"plain": True, "speedup": 2}, "width"),
        ({"keep_neurons": 0.5}, "width"),
        ({"head_size": 0.5}, "width"),
        ({"drop_layers": 1}, None),
        ({"embeddings": {"method": {"name": "svd"}}}, None),
        ({"vocab": 100}, None),
        ({"bits": 8}, None),
        ({"bits": 8, "target": 0.5}, "svd"),
        ({"init": "random"}, None),
        ({"init": "random", "target": 0.5}, "lprod"),
    ],
)
def test_the_method_that_nobody_named(said: dict[str, Any], method: str | None) -> None:
    assert getattr(conversion(said).method, "name", None) == method


def test_values_of_python_are_plain_data() -> None:
    import numpy as np

    said = {"task": "sts", "data": Path("a") / "b.csv", "limit": np.int64(5)}
    assert read(Evaluate, said) == Evaluate(task="sts", data="a/b.csv", limit=5)
    assert read(Convert, {"method": None, "keep_layers": np.array([0, 2])}).keep_layers == (0, 2)
    with pytest.raises(RecipeError, match="`limit` is `1e"):
        read(Evaluate, {"task": "sts", "data": "x", "limit": 1e30})
    with pytest.raises(RecipeError, match=r"`limt`: unknown option; .*did you mean `limit`"):
        read(Evaluate, {"task": "sts", "data": "x", "limt": 3})
    assert read(Evaluate, {"task": "sts", "data": (f"{x}.csv" for x in "ab")}).data[1] == "b.csv"
    with pytest.raises(RecipeError, match=r"a `bytes` was given, where text") as caught:
        read(Evaluate, {"task": "sts", "data": b"sentence1,sentence2"})
    assert caught.value.hint == "write data to a file, and give its path"


@pytest.mark.parametrize(
    "ask",
    [
        tcompress.inspect,
        tcompress.report,
        tcompress.bench,
        tcompress.export_onnx,
        partial(tcompress.convert, method="svd", target=0.5),
        partial(tcompress.finetune, steps=1),
        partial(tcompress.compress, size="1MB"),
        partial(tcompress.sweep, methods=["svd"]),
        partial(tcompress.evaluate, task="sts", data="x.csv"),
    ],
)
def test_a_loaded_model_is_no_name(ask: Any) -> None:
    with pytest.raises(SourceError, match=r"a `BertForMaskedLM` was given(.|\n)*save_pretrained"):
        ask(build("bert"))


def test_a_method_is_a_name_or_a_mapping() -> None:
    method: Any = ["svd"]
    with pytest.raises(RecipeError, match="`method` is a list, expected a name"):
        tcompress.plan("minilm", method=method)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"init": "random", "adapter": "merge"}, "merged into trained weights"),
        ({"method": "svd", "max_loss": 0.01, "bits": 8}, "before weights are rounded"),
        ({"method": "svd", "max_loss": 0.01, "embedding_bits": 3}, "before weights are rounded"),
    ],
)
def test_what_contradicts_itself_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        read(Convert, said)


def test_one_name_is_a_list_of_one_and_a_recipe_may_be_a_path(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    recipe = tmp_path / "r.yaml"
    convert = "{method: svd, target: 0.5, keep: [down], calibration: {source: none}}"
    recipe.write_text(f"recipe_version: 1\nconvert: {convert}\n")
    said: dict[str, Any] = {"method": "svd", "target": 0.5, "calibration": "none"}
    assert tcompress.plan(tmp_path, keep="down", **said) == tcompress.plan(tmp_path, recipe=recipe)
    assert len(tcompress.plan(tmp_path, only="down", embeddings="svd", **said).embeddings) == 1
    asks: list[Any] = [tcompress.bench, partial(tcompress.evaluate, task="sts", data=recipe)]
    for ask in asks:
        with pytest.raises(InputError, match=r"there is no folder .*nowhere"):
            ask("./nowhere")
