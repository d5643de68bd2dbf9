"""`tcompress convert` and `tcompress run`, from options to files."""

import json
import re
import shutil
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from transformers import AutoModel, AutoModelForMaskedLM

from tcompress.cli import terminal
from tcompress.cli.convert import default_output
from tcompress.models import WeightStore
from tcompress.reporting.formatting import bytes_text
from tests.support.cli import completed, run, worked
from tests.support.model_folders import model_folder
from tests.support.training import AtStep
from tests.support.typed import conversion
from tests.support.typed import conversion_changes as settings

pytestmark = pytest.mark.usefixtures("own_folder")

RECIPE = """\
recipe_version: 1
model: MODEL
convert:
  method: {name: lprod, p: 2, transform: haar}
  keep: [down]
  calibration: {source: none, samples: 7}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder("bert", tmp_path_factory.mktemp("models") / "bert")


def test_every_option_reaches_the_recipe() -> None:
    made = settings(
        p=8, transform="dct", block=4, stages=3, tubal_rank=2, target=0.5, residual_rank=4,
        keep=["down", "o"], calib="a.csv", calib_samples=9, calib_columns=["x, y", "z"],
        max_length=33, damping=0.5, seed=3, dtype="float16", device="cpu", max_shard_size="1GB",
    )  # fmt: skip
    assert made == {
        "method": {"p": 8, "transform": "dct", "block": 4, "stages": 3, "tubal_rank": 2, "seed": 3},
        "target": 0.5,
        "residual_rank": 4,
        "keep": ("down", "o"),
        "calibration": {
            "source": ("a.csv",), "samples": 9, "columns": ("x", "y", "z"), "max_length": 33,
            "damping": 0.5, "seed": 3,
        },
        "dtype": "float16",
        "device": "cpu",
        "max_shard_size": "1GB",
    }  # fmt: skip


def test_a_recipe_that_only_converts_is_done_once(model: Path) -> None:
    Path("my.yaml").write_text(RECIPE.replace("MODEL", str(model)) + "output: small\n")
    first = completed("run", "my.yaml", "--json").document
    before = Path("small/model.safetensors").stat().st_mtime_ns
    again = completed("run", "my.yaml")
    assert again.err == "`small` is already converted; `--force` does it again\n"
    assert "Kept `small`." in again.lines
    assert completed("run", "my.yaml", "--json", "-q").document == first
    assert Path("small/model.safetensors").stat().st_mtime_ns == before
    other = run("run", "my.yaml", "--set", "convert.method.p=4")
    assert (other.code, "`small` is not empty" in other.err) == (2, True)
    completed("run", "my.yaml", "--force")
    assert Path("small/model.safetensors").stat().st_mtime_ns > before


def test_every_option_of_other_methods_reaches_the_recipe() -> None:
    made = settings(method="tt", rank="4, 8", order=3, apply="rebuild")
    assert made["method"] == {"order": 3, "rank": (4, 8), "apply": "rebuild"}
    assert settings(method="tt", rank="12")["method"] == {"rank": 12}
    assert settings(method="qtt")["method"] == {"name": "qtt"}  # its rank is 2
    assert settings(method="tucker", share="model", cores=72, rank="384,256")["method"] == {
        "share": "model", "cores": 72, "rank": (384, 256),
    }  # fmt: skip
    text = RECIPE.replace(
        "{name: lprod, p: 2, transform: haar}", "{name: tt, modes: {32: [4, 8]}, rank: 3}"
    )
    assert settings(text, rank="5")["method"] == {"modes": {32: (4, 8)}, "rank": 5}


def test_options_override_a_recipe() -> None:
    made = settings(RECIPE, p=4, calib_samples=8, keep=["o"])
    assert made == {
        "method": {"transform": "haar"},
        "keep": ("down", "o"),
        "calibration": {"source": ("none",), "samples": 8},
    }


def test_another_method_drops_the_options_of_the_recipe_s_method() -> None:
    made = settings(RECIPE, method="lowrank", rank=3)
    assert made["method"] == {"name": "lowrank", "rank": 3}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "bert-base-lprod-p4"),
        ({"p": 8, "transform": "dct", "target": 0.25}, "bert-base-lprod-p8-dct-25"),
        ({"tubal_rank": 5, "residual_rank": 16}, "bert-base-lprod-p4-k5-plus16"),
        ({"method": "svd", "target": 0.125}, "bert-base-svd-12.5"),
        ({"method": "lowrank", "rank": "64"}, "bert-base-lowrank-r64"),
        ({"method": "tt", "target": 0.25}, "bert-base-tt-25"),
        ({"method": "tt", "order": 3, "rank": "4,8"}, "bert-base-tt-o3-r4x8"),
        (
            {"method": "tt", "rank": "4", "modes": "64=8x8, 9=3x3"},
            "bert-base-tt-r4-modes64x8x8-modes9x3x3",
        ),
        ({"method": "qtt"}, "bert-base-qtt"),
        ({"method": "auto", "trials": False, "target": 0.5}, "bert-base-auto-no-trials-50"),
        ({"method": "tucker", "target": 0.25}, "bert-base-tucker-25"),
        (
            {"method": "tucker", "share": "model", "cores": 72, "rank": "384"},
            "bert-base-tucker-model-c72-r384",
        ),
        ({"method": "hot"}, "bert-base-hot"),
        ({"method": "hot", "structure": "lprod"}, "bert-base-hot-lprod-p4"),
        ({"method": "hot", "grid": "14,14", "kernel": "favor"}, "bert-base-hot-14x14-favor"),
        ({"method": "tsa", "filter_order": 3, "layers": "0,1"}, "bert-base-tsa-k3-at2"),
        ({"method": "tga", "target": 0.25}, "bert-base-tga-tt-25"),
        ({"method": "tam", "core": "tucker"}, "bert-base-tam-tucker"),
        ({"method": "hot", "fold": 32}, "bert-base-hot-f32"),
    ],
)
def test_default_output(options: dict[str, Any], name: str) -> None:
    assert default_output("bert-base", conversion(options)) == name


def test_conversion_says_how_far_it_is_and_writes_a_model(model: Path) -> None:
    done = completed("convert", model, "--p", "2", "--calib", "none")
    assert done.lines[-1] == "Next: `tcompress finetune bert-lprod-p2 --data FILE`"
    fitted, written = done.err.splitlines()
    assert re.fullmatch(r"fitting to weights: 2 of 2 blocks in \d+\.\d s", fitted)
    assert re.fullmatch(r"writing: 0\.\d of 0\.\d MB in \d+\.\d s", written)
    assert AutoModelForMaskedLM.from_pretrained("bert-lprod-p2").config.model_type == "bert"


def test_work_that_was_left_is_named(model: Path) -> None:
    left = Path(".other.partial")
    left.mkdir(mode=0o700)
    for name in ("identity", "lock"):
        (left / name).write_bytes(b"12345")
    arguments = ("convert", model, "--p", "2", "--calib", "none", "-o", "out")
    with patch("tcompress.artifact.workplace.Workplace.publish", side_effect=KeyboardInterrupt):
        stopped = run(*arguments)
    assert "or delete what is kept for that: `.out.partial` (" in stopped.err
    assert ".other.partial" not in stopped.err  # which this command does not go on with
    done = completed(*arguments)
    said = "Runs that were stopped left work in `.other.partial` (10 B): "
    assert said in done.err
    assert left.is_dir()


TAKEN = {
    "--target 0.5": "No method is named: taking `--method svd`",
    "--method lprod --p 4": "the layer of the paper is `--transform dct`",
    "--p 2": "the layer of the paper is `--transform dct`",
}


@pytest.mark.parametrize("options", TAKEN)
def test_what_is_taken_unasked_is_said_first(model: Path, options: str) -> None:
    done = completed("convert", model, *options.split(), "--dry-run")
    assert TAKEN[options] in done.err
    quiet = run("convert", model, *options.split(), "--dry-run", "--quiet")
    assert (quiet.out, quiet.err) == (done.out, "")


def test_a_size_without_a_method_is_of_svd() -> None:
    for options in ({"target": 0.5}, {"rank": 3}, {"target_bytes": "1MB"}, {"max_error": 0.1}):
        assert conversion(options).method.name == "svd", options
    for options in ({}, {"p": 2}, {"init": "random", "target": 0.5}, {"only": ["q"]}):
        assert conversion(options).method.name == "lprod", options


def test_data_that_nothing_is_fitted_to_is_said_not_to_be_read(model: Path) -> None:
    Path("texts.txt").write_text("a fox\n" * 8)
    options = ("convert", model, "--calib", "texts.txt", "--keep-layers", "1")
    said = "Nothing is fitted, so `texts.txt` is not read.\n"
    assert said in run(*options, "--dry-run").out
    assert said in run(*options, "-o", "out").out
    assert said not in run(*options, "--method", "svd", "--rank", "2", "--dry-run").out


def test_force_replaces_the_output(model: Path) -> None:
    shutil.copytree(model, "out")
    Path("out/old.txt").touch()
    completed("convert", model, "--calib", "none", "-o", "out", "--force", "--quiet")
    assert not Path("out/old.txt").exists()


def test_token_is_not_written_anywhere(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    done = run("convert", model, "--calib", "none", "-o", "out", "--json")
    files = [path for path in Path("out").rglob("*") if path.suffix in (".json", ".md")]
    written = "".join(path.read_text() for path in files)
    assert "secret-token" not in done.out + done.err + written
    assert "secret-token" not in run("convert", "--help").out


def test_a_dry_run_for_a_speed_shows_no_sizes(model: Path) -> None:
    done = completed("convert", model, "--speedup", "50", "--dry-run")
    assert "not known yet" in done.out
    assert "lowrank r=" not in done.out
    kept = [line for line in done.lines if line.split()[:2] == ["rewritten", "layers"]]
    assert kept
    assert "%" not in kept[0]


def test_dry_run_reads_no_weight_and_writes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightStore, "tensor", Mock(side_effect=AssertionError))
    done = worked("convert", model, "--p", "2", "--transform", "dct", "--keep", "down", "--dry-run")
    last = "Nothing was written. Without `--dry-run`, this writes `bert-lprod-p2-dct`."
    assert done.lines[-1] == last
    assert not list(Path().iterdir())


def test_json_is_one_document_and_that_of_a_dry_run_has_the_plan(model: Path) -> None:
    options = ["convert", model, "--p", "2", "--calib", "none", "--json"]
    planned = run(*options, "-o", "out", "--dry-run").document
    document = completed(*options).document
    assert planned["output"] == str(Path("out").absolute())
    assert planned["dry_run"] is True
    assert planned["plan"] == json.loads(Path("bert-lprod-p2/tcompress.json").read_text())["plan"]
    assert planned["estimate"]["disk_bytes"] > 0
    assert Path(document["output"]).name == "bert-lprod-p2"
    assert (document["resumed"], document["healed"]) == (False, False)
    assert document["report"]["parameters"]["rewritten"]["now"] == 8192
    assert document["report"]["schema"] == 1


def test_run_takes_another_model_and_output(model: Path) -> None:
    Path("my.yaml").write_text(RECIPE.replace("MODEL", "./nowhere") + "output: elsewhere\n")
    done = run("run", "my.yaml", "--model", model, "-o", "out", "--dry-run", "--json")
    assert done.document["output"] == str(Path("out").absolute())
    done = run("run", "my.yaml", "--model", model, "--dry-run", "--json")
    assert done.document["output"] == str(Path("elsewhere").absolute())


@pytest.mark.parametrize(
    "command",
    ["convert {0} --p 2 --calib none", "run my.yaml", "sweep {0} --methods svd --calib none"],
)
def test_the_path_of_a_home_is_said_in_full(
    command: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    Path("my.yaml").write_text(RECIPE.replace("MODEL", str(model)))
    done = run(*command.format(model).split(), "--output=~/out", "--dry-run", "--json")
    assert done.document["output"] == "/home/me/out"


@pytest.mark.often("2-130")
@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_conversion_goes_on(
    by: int, code: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--calib-samples", "24", "--p", "2", "--transform", "dct", "-o", "out"]
    with monkeypatch.context() as patch:
        # Four groups of layers in each block: the first block is done.
        stopping = AtStep(6, partial(signal.raise_signal, by))
        patch.setattr(terminal, "shown_progress", lambda **_: nullcontext(stopping))
        done = run("convert", model, *options)
    assert (done.code, done.out) == (code, "")
    kept = sum(path.stat().st_size for path in Path(".out.partial").rglob("*") if path.is_file())
    assert done.err == (
        "error: interrupted; `out` was not written\n\n"
        "hint: run the same command again: it goes on where it stopped; or delete what is kept for "
        f"that: `.out.partial` ({bytes_text(kept)})\n"
    )
    with pytest.raises(OSError, match="out"):
        AutoModel.from_pretrained("./out")
    done = worked("convert", model, *options, "--quiet")
    assert ", continuing an interrupted run." in done.out
    assert re.search(r"held-out error +0\.\d{4}", done.out)
    assert json.loads(Path("out/tcompress.json").read_text())["calibration"]["samples"] == 24
    assert AutoModel.from_pretrained("./out").config.model_type == "bert"
    assert [path.name for path in Path().iterdir()] == ["out"]


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_elsewhere(by: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    monkeypatch.setattr("tcompress.cli.inspect.reach", lambda *_, **__: signal.raise_signal(by))
    done = run("inspect", "m", "--json")
    assert done.code == code
    assert signal.getsignal(signal.SIGTERM) == before
    assert done.document["error"] == {"type": "Interrupted", "message": "interrupted", "hint": None}
