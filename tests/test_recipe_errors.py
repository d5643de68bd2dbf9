"""The text of every error about a recipe."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tcompress.errors import RecipeError
from tcompress.options import dump_recipe, method_names, parse_recipe
from tcompress.options.document import Document, Problem
from tcompress.options.explain import explain
from tcompress.options.methods import structure_names
from tcompress.structures.lprod import LprodSpec

METHODS = ", ".join(f"`{name}`" for name in sorted(method_names()))
STRUCTURES = ", ".join(f"`{name}`" for name in sorted(structure_names()))
TOP = (
    "`recipe_version`, `name`, `description`, `model`, `architecture`, `revision`, `output`, "
    "`convert`, `finetune`, `evaluate`, `bench`, `sweep`, `report`, `paper`, `variants`"
)
CONVERT = (
    "`init`, `seed`, `method`, `attention`, `attention_layers`, `keep_layers`, `drop_layers`, "
    "`append_layers`, "
    "`target`, `target_params`, `target_bytes`, `max_error`, `allocation`, `residual_rank`, "
    "`keep`, `only`, `layers`, "
    "`embeddings`, `positions`, `norm`, `calibration`, `dtype`, `device`, `max_shard_size`"
)
CALIBRATION = (
    "`source`, `split`, `columns`, `samples`, `max_length`, `batch_size`, `holdout`, `damping`, "
    "`output_moments`, `seed`"
)
COMPARE = "compare with a recipe that works: `tcompress recipes show encoder/minilm-lprod`"
START = "start from a recipe that works: `tcompress recipes copy encoder/minilm-lprod recipe.yaml`"
SYNTAX = "indent with spaces, and put text that contains `: ` or ` #` in quotes"
UPDATE = "update tcompress: `pip install --upgrade tcompress`"


def error_of(text: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "my.yaml")
    return caught.value


def one_line(text: str) -> str:
    """The only problem of a recipe, after the name of the file."""
    head, *lines = error_of(text).message.splitlines()
    assert head == "1 problem in `my.yaml`:"
    assert len(lines) == 1
    return lines[0].removeprefix("  my.yaml:")


def with_method(options: str) -> str:
    return f"recipe_version: 1\nconvert:\n  method: {{{options}}}\n"


def with_convert(line: str) -> str:
    return f"recipe_version: 1\nconvert:\n  method: {{name: svd}}\n  {line}\n"


def test_all_problems_are_listed_and_counted() -> None:
    text = """\
recipe_version: 1
name: 3
convert:
  method:
    name: lprod
    p: 0
    transfrom: dct
  target: 1.5
  layers:
    - match: "*.q"
      method: {name: svd, rank: -1}
      keep: yes
"""
    error = error_of(text)
    assert (
        str(error)
        == f"""\
6 problems in `my.yaml`:
  my.yaml:2: `name`: found `3`; allowed is text: write `"3"`
  my.yaml:6: `convert.method.p`: found `0`; allowed is a whole number, at least 1
  my.yaml:7: `convert.method.transfrom`: unknown key; known keys are `name`, `p`, `transform`, \
`block`, `stages`, `placement`, `tubal_rank`, `pad`, `seed`; did you mean `transform`?
  my.yaml:8: `convert.target`: found `1.5`; allowed is a number, greater than 0 and less than 1
  my.yaml:11: `convert.layers[0].method.rank`: found `-1`; allowed is a whole number, at least 1
  my.yaml:12: `convert.layers[0].keep`: found the text `yes`; allowed is `true` or `false`

hint: {COMPARE}"""
    )
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "name: svd, rnak: 3",
            "3: `convert.method.rnak`: unknown key; known keys are `name`, `rank`, `tol`; "
            "did you mean `rank`?",
        ),
        (
            "name: svd, zzz: 3",
            "3: `convert.method.zzz`: unknown key; known keys are `name`, `rank`, `tol`",
        ),
        (
            "name: svd, 1: 3",
            "3: `convert.method.1`: unknown key; known keys are `name`, `rank`, `tol`",
        ),
        (
            "name: lpord",
            f"3: `convert.method.name`: found the text `lpord`; allowed is one of {METHODS}; "
            "did you mean `lprod`?",
        ),
        (
            "name: 7",
            f"3: `convert.method.name`: found `7`; allowed is one of {METHODS}",
        ),
        ("", f"3: `convert.method.name`: missing; allowed is one of {METHODS}"),
        ("nam: svd", "3: `convert.method.nam`: unknown key; did you mean `name`?"),
        (
            "name: svd, rank: '4'",
            "3: `convert.method.rank`: found the text `4`; allowed is a whole number, at least 1",
        ),
        (
            "name: svd, rank: 2.5",
            "3: `convert.method.rank`: found `2.5`; allowed is a whole number, at least 1",
        ),
        (
            "name: svd, rank: true",
            "3: `convert.method.rank`: found `true`; allowed is a whole number, at least 1",
        ),
        (
            "name: svd, rank: 3, rank: 4",
            "3: `convert.method.rank`: given again, first on line 3; keep one",
        ),
        (
            "name: lprod, stages: 9",
            "3: `convert.method.stages`: found `9`; "
            "allowed is a whole number, at least 1 and at most 8",
        ),
        (
            "name: lprod, p:",
            "3: `convert.method.p`: found nothing; allowed is a whole number, at least 1",
        ),
        (
            "name: lprod, placement: inn",
            "3: `convert.method.placement`: found the text `inn`; "
            "allowed is one of `in`, `out`, `both`; did you mean `in`?",
        ),
        (
            "name: lprod, transform: ''",
            "3: `convert.method.transform`: found empty text; allowed is one of `dct`, "
            "`identity`, `haar`, `hadamard`, `random`, `dft`, `learned`, `fitted`",
        ),
    ],
)
def test_problem_of_a_method(options: str, line: str) -> None:
    assert one_line(with_method(options)) == line


@pytest.mark.parametrize(
    ("written", "line"),
    [
        (
            "target: .inf",
            "4: `convert.target`: found the text `.inf`; "
            "allowed is a number, greater than 0 and less than 1",
        ),
        (
            "target: 0",
            "4: `convert.target`: found `0`; allowed is a number, greater than 0 and less than 1",
        ),
        (
            "dtype: Float32",
            "4: `convert.dtype`: found the text `Float32`; "
            "allowed is one of `float32`, `float16`, `bfloat16`; did you mean `float32`?",
        ),
        (
            "device: 1.50",
            "4: `convert.device`: found `1.50`; allowed is text like `auto`, `cpu`, `cuda`, "
            "`cuda:1` or `mps`",
        ),
        (
            "keep: lm_head",
            "4: `convert.keep`: found the text `lm_head`; allowed is a list, each entry text",
        ),
        ("keep: [a, null]", "4: `convert.keep[1]`: found nothing; allowed is text"),
        (
            "layers: [q]",
            "4: `convert.layers[0]`: found the text `q`; allowed is a mapping with the keys "
            "`match`, `keep`, `method`, `residual_rank`, `target`",
        ),
        ("layers: [{keep: true}]", "4: `convert.layers[0].match`: missing; allowed is text"),
        (
            "layers: [{macth: q}]",
            "4: `convert.layers[0].macth`: unknown key; known keys are `match`, `keep`, "
            "`method`, `residual_rank`, `target`; did you mean `match`?",
        ),
        (
            "layers: [{match: q, method: lpord}]",
            "4: `convert.layers[0].method`: found the text `lpord`; allowed is one of "
            f"{STRUCTURES}; did you mean `lprod`?",
        ),
        (
            "layers: {match: q}",
            "4: `convert.layers`: found a mapping; allowed is a list, each entry a mapping with "
            "the keys `match`, `keep`, `method`, `residual_rank`, `target`",
        ),
        (
            "calibration: []",
            "4: `convert.calibration`: found an empty list; "
            f"allowed is a mapping with the keys {CALIBRATION}",
        ),
        (
            "calibration: {samples: many words that go on and on for ever and a day}",
            "4: `convert.calibration.samples`: found the text "
            "`many words that go on and on for ever...`; allowed is a whole number, at least 1",
        ),
        (
            "calibration: {holdout: 0.9}",
            "4: `convert.calibration.holdout`: found `0.9`; "
            "allowed is a number, greater than 0 and less than 0.9",
        ),
    ],
)
def test_problem_of_the_conversion(written: str, line: str) -> None:
    assert one_line(with_convert(written)) == line


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("", "1: the recipe is empty", START),
        ("# only a comment\n", "1: the recipe is empty", START),
        (
            "\n- a\n",
            "2: found a list; a recipe is a mapping that starts with `recipe_version: 1`",
            START,
        ),
        (
            "hello",
            "1: found the text `hello`; a recipe is a mapping that starts with `recipe_version: 1`",
            START,
        ),
        (
            "a: b: c",
            "1:5: not valid YAML: mapping values are not allowed here",
            SYNTAX,
        ),
        (
            "a:\n\tb: 1",
            "2:1: not valid YAML: while scanning for the next token, "
            "found character '\\t' that cannot start any token",
            SYNTAX,
        ),
        (
            "a: 1\n---\nb: 2",
            "2:1: not valid YAML: expected a single document in the stream, "
            "but found another document",
            SYNTAX,
        ),
        ("a: 1\nb: \x01", "2:4: not valid YAML: the character U+0001 is not allowed", SYNTAX),
        ("a: *b", "1:4: not valid YAML: found undefined alias 'b'", SYNTAX),
        ("a: !!set {b}", "1:4: the tag `!!set` is not supported", START),
        ("a: !mine 3", "1:4: the tag `!mine` is not supported", START),
        ("a: !mine [3]", "1:4: the tag `!mine` is not supported", START),
        ("a: !!int b", "1:4: `b` is not a valid `int`", START),
        ("? [a]\n: 1", "1:3: a key must be plain text, not a list or a mapping", START),
        ('{"a": "\\ud83d"}', "1:7: this text holds half of a character", START),
        (
            "a: &b [*b]",
            "1: the recipe is nested too deeply, or an alias contains itself",
            START,
        ),
        (
            "a: &a [x, x, x, x, x, x, x, x]\n"
            + "\n".join(f"{n}: &{n} [{','.join([f'*{o}'] * 8)}]" for o, n in pairwise("abcdefgh")),
            "1:8: the recipe has more than 20,000 values, those that aliases repeat included",
            START,
        ),
        (
            "x" * 100_001,
            "1: 100,001 characters are too many for a recipe, 100,000 are the most",
            START,
        ),
        (
            "[" * 600,
            "1: the recipe is nested too deeply, or an alias contains itself",
            START,
        ),
    ],
)
def test_text_that_is_no_recipe(text: str, line: str, hint: str) -> None:
    assert one_line(text) == line
    assert error_of(text).hint == hint


@pytest.mark.parametrize(
    ("version", "line", "hint"),
    [
        ("", "1: `recipe_version`: missing; versions understood are `1`", COMPARE),
        (
            "recipe_version: '1'",
            "1: `recipe_version`: found the text `1`; versions understood are `1`",
            COMPARE,
        ),
        (
            "recipe_version: true",
            "1: `recipe_version`: found `true`; versions understood are `1`",
            COMPARE,
        ),
        (
            "recipe_version: 0",
            "1: `recipe_version`: found `0`; versions understood are `1`",
            COMPARE,
        ),
        (
            "recipe_version: 2\nof_the_future: 1",
            "1: `recipe_version`: `2` is newer than this tcompress; versions understood are `1`",
            UPDATE,
        ),
    ],
)
def test_version(version: str, line: str, hint: str) -> None:
    text = f"{version}\nconvert: {{method: {{name: svd}}}}\n".lstrip("\n")
    assert one_line(text) == line
    assert error_of(text).hint == hint


def test_problems_beside_the_version_are_listed_too() -> None:
    assert error_of("convrt: 1\nname: a\nname: b\n").message == (
        "3 problems in `my.yaml`:\n"
        f"  my.yaml:1: `recipe_version`: missing; versions understood are `1`\n"
        f"  my.yaml:1: `convrt`: unknown key; known keys are {TOP}; did you mean `convert`?\n"
        "  my.yaml:3: `name`: given again, first on line 2; keep one"
    )


def test_missing_section() -> None:
    assert one_line("recipe_version: 1\n") == (
        f"1: `convert`: missing; allowed is a mapping with the keys {CONVERT}"
    )


def test_first_of_two_equal_keys_is_checked() -> None:
    assert error_of(with_method("name: svd, rank: 0, rank: 4")).message == (
        "2 problems in `my.yaml`:\n"
        "  my.yaml:3: `convert.method.rank`: given again, first on line 3; keep one\n"
        "  my.yaml:3: `convert.method.rank`: found `0`; allowed is a whole number, at least 1"
    )


def test_rule_of_a_model_speaks_for_itself() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    document = Document(data={"a": "b"}, lines={(): 1, ("a",): 2})
    error = {"type": "value_error", "loc": ("a",), "ctx": {"error": ValueError("`a` needs `b`")}}
    assert explain([error], document, schema) == [Problem(2, "`a` needs `b`", ("a",))]


@pytest.mark.parametrize(
    ("methods", "line"),
    [
        ("[{name: lprodd}]", "[0].name`: found the text `lprodd`; allowed is one of {METHODS}; "),
        ("[{name: svd, q: 3}]", "[0].q`: unknown key; known keys are `name`, `rank`, `tol`"),
        ("[{name: lprod, p: x}]", "[0].p`: found the text `x`; allowed is a whole number, "),
        ("[svdd]", "[0]`: found the text `svdd`; allowed is a mapping with a `name`, one of"),
        ("[3]", "[0]`: found `3`; allowed is a mapping with a `name`, one of"),
    ],
)
def test_methods_of_a_sweep_are_names_or_options(methods: str, line: str) -> None:
    found = one_line(with_method("name: svd") + f"sweep: {{methods: {methods}}}\n")
    assert found.startswith("4: `sweep.methods" + line.replace("{METHODS}", METHODS))
    assert found.endswith("did you mean `svd`?") == (methods == "[svdd]")


def test_sweep_round_trip() -> None:
    text = with_method("name: svd") + "sweep: {methods: [svd, {name: lprod, p: 8}]}\n"
    recipe = parse_recipe(text, "my.yaml")
    assert recipe.sweep is not None
    assert recipe.sweep.methods == ("svd", LprodSpec(p=8))
    assert parse_recipe(dump_recipe(recipe), "again") == recipe
