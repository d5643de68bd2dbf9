"""The text and the exit code of every kind of failure."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest
import typer

from tcompress.cli.errors import describe, suggestion
from tcompress.cli.main import main
from tcompress.errors import FitError, TCompressError
from tests.support.cli import error, run
from tests.support.model_folders import model_folder

SEE = "see `tcompress convert --help`"
EXPRESSION = "such as `re:layer\\.[0-3]\\.`; `*` wildcards need no `re:`, as in `*.layer.0.*`"
QUARTER = (
    "`--target 0.25` keeps a quarter of the rewritten layers' parameters; `--target-params`, "
    "`--target-bytes` and `--max-error` are other ways to say it"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder("bert", tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (
            ["convet"],
            "unknown command `convet`; commands are `convert`, `finetune`, `inspect`, `report`, "
            "`evaluate`, `bench`, `export`, `run`, `sweep`, `methods`, `lm-eval`, `demo`, "
            "`recipes`",
            "did you mean `convert`?",
        ),
        (
            ["recipes", "zzz"],
            "unknown command `zzz`; commands are `list`, `show`, `copy`, `reference`, `validate`",
            "see `tcompress recipes --help`",
        ),
        (["convert"], "missing argument `MODEL`", SEE),
        (["convert", "~nobody-at-all/m"], "a path begins with `~` and a user that there is not",
         "write the path in full, or `./~name` for a file of that name"),
        (["convert", "m", "--tagret"], "unknown option `--tagret`", "did you mean `--target`?"),
        (["convert", "m", "--calibration", "x"], "unknown option `--calibration`",
         "did you mean `--calib`?"),
        (["convert", "m", "--qqqqqq"], "unknown option `--qqqqqq`", SEE),
        (["convert", "m", "--p"], "option `--p` requires an argument", "see `tcompress --help`"),
    ],
)  # fmt: skip
def test_usage(arguments: list[str], message: str, hint: str) -> None:
    done = run(*arguments)
    assert (done.code, done.out, done.err) == (2, "", error(message, hint))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "m", "--p", "many"], "`--p` is `many`, allowed is a whole number, at least 1"),
        (
            ["convert", "m", "--target", "abc"],
            "`--target` is `abc`, allowed is a number, greater than 0 and less than 1",
        ),
        (["convert", "m", "--damping", "x"], "`--damping` is `x`, allowed is a number, at least 0"),
        (
            ["report", "m", "--length", "0"],
            "`--length` is `0`, allowed is a whole number, at least 1 and at most 1000000000",
        ),
    ],
)
def test_value_of_a_wrong_type(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert done.err == error(message, f"see `tcompress {arguments[0]} --help`")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (
            ["--method", "lprd"],
            "unknown method `lprd`; methods are `svd`, `lowrank`, `lprod`, `tt`, `qtt`, `tucker`, "
            "`auto`, `tga`, `tsa`, `hot`, `kronecker`, `multilinear`, `tam`, `none`",
            "did you mean `lprod`?",
        ),
        (
            ["--method", "SVD"],
            "unknown method `SVD`; methods are `svd`, `lowrank`, `lprod`, `tt`, `qtt`, `tucker`, "
            "`auto`, `tga`, `tsa`, `hot`, `kronecker`, `multilinear`, `tam`, `none`",
            "did you mean `svd`?",
        ),
        (
            ["--device", "gpu", "--max-shard-size", "tiny"],
            "`--device` is `gpu`, allowed is text like `auto`, `cpu`, `cuda`, `cuda:1` or `mps`; "
            "`--max-shard-size` is `tiny`, allowed is text like `2GB` or `500MB`",
            SEE,
        ),
        (
            ["--keep-layers", "0-99999999999"],
            "`--keep-layers` is `0-99999999999`, allowed are block numbers such as `1,3,5` or "
            "`0-5,11`, for one stack of several `STACK:1,3,5`",
            SEE,
        ),
        (
            ["--keep", "re:layer.("],
            "`re:layer.(` is not a regular expression: missing ), unterminated subpattern at "
            "position 6",
            EXPRESSION,
        ),
        (
            ["--keep", "re:(.+)+x"],
            "`re:(.+)+x` could take for ever, since it repeats what repeats, or repeats too often",
            EXPRESSION,
        ),
        (
            ["--method", "qqq"],
            "unknown method `qqq`; methods are `svd`, `lowrank`, `lprod`, `tt`, `qtt`, `tucker`, "
            "`auto`, `tga`, `tsa`, `hot`, `kronecker`, `multilinear`, `tam`, `none`",
            "see `tcompress methods`",
        ),
        (
            ["--rank", "4"],
            "`--rank` does not apply to method `lprod`; its options are `--p`, `--transform`, "
            "`--block`, `--stages`, `--placement`, `--tubal-rank`, `--pad`",
            "`--rank` belongs to `--method svd`",
        ),
        (
            ["--method", "tt"],
            "method `tt` needs a size: give `--target` or `--rank`",
            QUARTER,
        ),
        (
            ["--method", "tt", "--rank", "4", "--modes", "64=8"],
            "`--modes` is `64=8`, allowed are widths with factors, such as `64=8x8,172=4x43`",
            SEE,
        ),
        (
            ["--method", "tt", "--rank", "4,x"],
            "`--rank` is `4,x`, allowed is a whole number, at least 1 or several with commas, each "
            "a whole number, at least 1",
            SEE,
        ),
        (
            ["--method", "tt", "--rank", "4,0"],
            "`--rank` is `4,0`, allowed is a whole number, at least 1 or several with commas, each "
            "a whole number, at least 1",
            SEE,
        ),
        (
            ["--method", "svd", "--rank", "4,8"],
            "`--rank` is `4,8`, allowed is a whole number, at least 1",
            SEE,
        ),
        (
            ["--method", "tt", "--rank", "4", "--order", "1", "--apply", "build"],
            "`--order` is `1`, allowed is a whole number, at least 2 and at most 16; `--apply` is "
            "`build`, allowed is one of `auto`, `contract`, `rebuild`; did you mean `rebuild`?",
            SEE,
        ),
        (
            ["--method", "tucker", "--rank", "3,4"],
            "with `share: none` both factors have one rank: give one number",
            "see `tcompress convert --help`",
        ),
        (
            ["--method", "tucker", "--share", "all", "--rank", "3"],
            "`--share` is `all`, allowed is one of `none`, `heads`, `layers`, `model`",
            "see `tcompress convert --help`",
        ),
        (
            ["--method", "qtt", "--order", "3"],
            "the modes of `qtt` are 2: leave out `order` and `modes`",
            SEE,
        ),
        (
            ["--method", "tt", "--rank", "4,8", "--calib", "none"],
            "none of 12 layers can be rewritten:\n"
            "  - 2 cores have 1 inner rank, not 2: 12 layers, such as "
            "`bert.encoder.layer.0.attention.self.query.weight`",
            "give one rank for all, or `order` 3",
        ),
        (
            ["--method", "tt", "--target", "0.01", "--calib", "none"],
            "none of 12 layers can be rewritten:\n"
            "  - the budget of 10 parameters does not pay for rank 1, which takes 64: 8 layers, "
            "such as `bert.encoder.layer.0.attention.self.query.weight`\n"
            "  - the budget of 20 parameters does not pay for rank 1, which takes 96: 4 layers, "
            "such as `bert.encoder.layer.0.intermediate.dense.weight`",
            "0.047 is the smallest target that rewrites a layer, and 0.063 rewrites 12",
        ),
        (
            ["--method", "lowrank", "--p", "4", "--tubal-rank", "2"],
            "`--p`, `--tubal-rank` do not apply to method `lowrank`; its options are `--rank`, "
            "`--tol`",
            "`--p`, `--tubal-rank` belong to `--method lprod`",
        ),
        (
            ["--method", "svd"],
            "method `svd` needs a size: give `--target` or `--rank`",
            QUARTER,
        ),
        (["--p", "0"], "`--p` is `0`, allowed is a whole number, at least 1", SEE),
        (
            ["--target", "25", "--calib-samples", "-1"],
            "`--target` is `25`, allowed is a number, greater than 0 and less than 1; 25 % is "
            "`0.25`; `--calib-samples` is `-1`, allowed is a whole number, at least 1",
            SEE,
        ),
        (
            ["--dtype", "float8"],
            "`--dtype` is `float8`, allowed is one of `float32`, `float16`, `bfloat16`; did you "
            "mean `float32`?",
            SEE,
        ),
        (
            ["--transform", "dcd"],
            "`--transform` is `dcd`, allowed is one of `dct`, `identity`, `haar`, `hadamard`, "
            "`random`, `dft`, `learned`, `fitted`; did you mean `dct`?",
            SEE,
        ),
        (["--keep", "bert.encoder"],
         "no layer matches `bert.encoder`; roles are `q`, `k`, `v`, `o`, `up`, `down`",
         "did you mean `bert.encoder.*`?"),
        (
            ["--calib", "none", "--p", "7"],
            "none of 12 layers can be rewritten:\n"
            "  - p=7 does not divide the input 32 and the output 32: 8 layers, such as "
            "`bert.encoder.layer.0.attention.self.query.weight`\n"
            "  - p=7 does not divide the input 32 and the output 64: 2 layers, such as "
            "`bert.encoder.layer.0.intermediate.dense.weight`\n"
            "  - p=7 does not divide the input 64 and the output 32: 2 layers, such as "
            "`bert.encoder.layer.0.output.dense.weight`",
            "choose another method, or p=2, 4, 8 or 16, or `pad: true` in the method's options "
            "of a recipe",
        ),
        (
            ["--device", "cuda:77"],
            "device `cuda:77` cannot be used here",
            "use `--device cpu`, or `auto`",
        ),
    ],
)  # fmt: skip
def test_options_of_convert(model: Path, arguments: list[str], message: str, hint: str) -> None:
    done = run("convert", model, "--quiet", *arguments)
    assert (done.code, done.out, done.err) == (2, "", error(message, hint))
    assert not list(Path().iterdir())


def test_missing_model() -> None:
    done = run("convert", "./modell", "--p", "2")
    assert done.code == 2
    assert done.err.startswith("error: there is no folder `./modell`; ")


def test_output_that_is_not_empty(model: Path) -> None:
    Path("out").mkdir()
    Path("out/mine.txt").touch()
    done = run("convert", model, "-o", "out")
    expected = "choose another one with `-o`, or replace it with `--force`"
    assert done.code == 2
    assert done.err.startswith("error: output folder `out` is not empty\n")
    assert done.err.endswith(f"hint: {expected}\n")
    assert [path.name for path in Path("out").iterdir()] == ["mine.txt"]


def test_recipe_with_problems() -> None:
    Path("my.yaml").write_text("recipe_version: 1\nconvert: {method: {name: svd}, tagret: 0.5}\n")
    done = run("run", "my.yaml")
    assert done.code == 2
    assert "1 problem in `my.yaml`:\n  my.yaml:2: `convert.tagret`: " in done.err
    assert "did you mean `target`" in done.err


def test_recipe_without_a_model() -> None:
    Path("my.yaml").write_text("recipe_version: 1\nconvert: {method: {name: svd, rank: 2}}\n")
    done = run("run", "my.yaml")
    assert done.err == error("recipe `my.yaml` names no model", "add `--model MODEL`")
    assert done.code == 2


def test_unknown_export_format() -> None:
    done = run("export", "folder", "--to", "dens")
    assert done.err == error(
        "`--to` is `dens`, allowed is `dense`; did you mean `dense`?",
        "see `tcompress export --help`",
    )
    assert done.code == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["convert", "m", "--json", "--tagret", "1"], "UsageError", "unknown option `--tagret`"),
        (["convert", "--json"], "UsageError", "missing argument `MODEL`"),
        (["convert", "m", "--p", "0", "--json"], "RecipeError",
         "`--p` is `0`, allowed is a whole number, at least 1"),
        (["inspect", "./nowhere", "--json"], "SourceError", "there is no folder `./nowhere`; "),
    ],
)  # fmt: skip
def test_json_on_failure(arguments: list[str], kind: str, message: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert list(done.document) == ["schema", "error"]
    assert done.document["error"]["type"] == kind
    assert done.document["error"]["message"].startswith(message)
    assert done.document["error"]["hint"]
    assert done.err.startswith(f"error: {message}")


def test_unexpected_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("lost\nmore")

    monkeypatch.setattr("tcompress.inspection.inspect_model", fail)
    done = run("inspect", "m", "--json")
    assert done.code == 1
    assert done.document["error"]["type"] == "KeyError"
    hint = "run again with `TCOMPRESS_TRACEBACK=1` to see where, and report it"
    assert done.err == error("unexpected `KeyError`: 'lost\\nmore'", hint)


def test_traceback_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCOMPRESS_TRACEBACK", "1")
    done = run("inspect", "./nowhere")
    assert done.code == 2
    assert done.err.startswith("Traceback (most recent call last):")
    assert "error: there is no folder `./nowhere`; " in done.err


def test_full_disk_says_what_to_do() -> None:
    found = describe(OSError(errno.ENOSPC, "No space left on device"))
    assert found.code == 2
    assert found.message.startswith("there is no space for `.`: ")
    assert "free some disk space, then run the same command again" in (found.hint or "")


def test_lack_of_memory_says_what_to_do() -> None:
    found = describe(MemoryError())
    assert found.message == "unexpected `MemoryError`"
    assert found.hint == (
        "give fewer or shorter examples at a time (`--batch-size`, `--max-length`, "
        "`convert.calibration.batch_size` in a recipe), or another `--device`"
    )


def test_exit_codes_of_errors() -> None:
    assert describe(TCompressError("x")).code == 1
    assert describe(FitError("x")).code == 2
    assert describe(KeyboardInterrupt()).code == 130
    assert describe(typer.Abort()).code == 130


def test_suggestion_only_where_something_is_close() -> None:
    assert suggestion("targt", ["--x", "target"]) == "did you mean `target`?"
    assert suggestion("zzz", ["target"]) is None


@pytest.mark.parametrize("arguments", [["recipes", "list"], ["--help"], ["recipes", "list", "-x"]])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_reader_that_has_gone_changes_nothing(
    arguments: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(*arguments).code
    for closed in (True, False):  # as after `| head -0`, and after `>&-`
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, name, None if closed else stream)
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        assert ended.value.code == wanted


def test_a_disk_that_is_full_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with pytest.raises(SystemExit) as ended:
        main(["recipes", "list"])
    assert ended.value.code == 2
    assert errors.getvalue().count("error: ") == 1


def test_commands_to_copy_are_written_for_a_shell() -> None:
    done = run("recipes", "copy", "encoder/minilm-lprod", "a folder/my recipe.yaml")
    assert done.lines == [
        "Wrote `a folder/my recipe.yaml`. Next: `tcompress run 'a folder/my recipe.yaml'`"
    ]
