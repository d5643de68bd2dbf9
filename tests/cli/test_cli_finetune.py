"""`tcompress finetune`: what it prints, and one clear line for everything that is wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
from accelerate.utils import DistributedType
from transformers.utils.logging import disable_progress_bar

from tcompress import processes
from tcompress.cli.finetune import default_output
from tcompress.options import Finetune
from tests.support.cli import completed, error, run
from tests.support.evaluation import encoder, rows_file
from tests.support.interrupted import contents
from tests.support.model_folders import sentences, text_file
from tests.support.training import small_encoder
from tests.support.typed import settings_of

SHORT = ("--steps", "2", "--batch-size", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data."""
    folder = tmp_path_factory.mktemp("models")
    small_encoder(folder)
    text_file(folder / "texts.txt", sentences(40))
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> Iterator[None]:
    monkeypatch.chdir(place)
    disable_progress_bar()  # the variable that does so comes too late in a process of tests
    before = sorted(path.name for path in place.iterdir())
    yield
    for path in place.iterdir():
        if path.name not in before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_table() -> None:
    done = completed("finetune", "bert-small", "--data", "texts.txt", *SHORT)
    assert done.lines[0].split() == [
        "step", "loss", "validation", "loss", "learning", "rate", "minutes"
    ]  # fmt: skip
    assert [line.split()[0] for line in done.lines[2:4]] == ["0", "2"]
    assert re.search(r"8 examples of texts.txt:text in 0\.\d minutes, taught by ", done.out)
    way = r"(the weights of step [02]|weights \d+ % of the way to step 2)"
    assert re.search(rf"Wrote `bert-small-healed`, with {way}\.", done.out)
    assert "agreement with the teacher" in done.out
    assert done.lines[-1] == "Next: `tcompress evaluate bert-small-healed --task ... --data ...`"
    assert "training: 2 of 2 steps" in done.err
    assert Path("bert-small-healed/tcompress.json").is_file()
    assert run("finetune", "bert-small", "--data", "texts.txt", "--force", *SHORT).code == 0


def test_a_start_that_stays_the_best_says_what_to_do() -> None:
    done = completed("finetune", "bert-small", "--data", "texts.txt", "--lr", "10", *SHORT)
    assert "with the weights of step 0.\nNo step did better than the start: give more" in done.out


def test_a_task_names_the_output_and_what_its_numbers_are_of_is_said() -> None:
    rows_file(Path("few.jsonl"), text=sentences(12), label=[0, 1] * 6)
    task = ("finetune", "bert-small", "--task", "classification", "--data", "few.jsonl", *SHORT)
    done = completed(*task)
    assert Path("bert-small-classification").is_dir()
    next_step = "Next: `tcompress evaluate bert-small-classification --task classification --data"
    assert done.lines[-1].startswith(next_step)
    assert default_output("bert-small", Finetune()) == Path("bert-small-healed")
    assert default_output("bert-base", Finetune(task="sts")) == Path("bert-base-sts")
    with chdir("bert-small"):  # beside it, not inside
        assert default_output(".", Finetune()) == Path("../bert-small-healed").resolve()
    assert "few.jsonl:text,label (columns guessed: `--columns` names others)" in done.out
    assert "`accuracy` is of a held-out part of few.jsonl" in done.out
    assert "examples to train on: with fewer than 30 little is learnt" in done.err
    validated = run(*task, "--validation", "few.jsonl", "--columns", "label=label", "--force").out
    assert "held-out part" not in validated
    assert "guessed" not in validated


def test_minutes_bound_the_comparison_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcompress.training.mixing.LEAST", 1)
    clock = Mock(perf_counter=count(0, 100).__next__)
    monkeypatch.setattr("tcompress.training.mixing.time", clock)
    for minutes, compared in (([], 3), (["--minutes", "1"], 2)):
        options = (*SHORT, *minutes, "-o", f"out-{compared}")
        done = completed("finetune", "bert-small", "--data", "texts.txt", *options)
        assert f"between the first and the best ones: {compared} of 3 batches" in done.err


def test_json() -> None:
    """Of a run on built-in text, which is the default."""
    options = ("--json", "--quiet", "--samples", "20", "-o", "out", *SHORT)
    document = completed("finetune", "bert-small", *options).document
    assert list(document) == ["schema", "output", "resumed", "training"]
    assert document["output"] == str(Path("out").absolute())
    written = json.loads(Path("out/tcompress.json").read_text())
    assert document["training"] == written["training"][0]
    assert (document["training"]["data"], document["training"]["samples"]) == ("builtin text", 8)


def test_options_change_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "recipe_version: 1\nconvert: {method: {name: svd, rank: 2}}\n"
        "finetune: {steps: 5, seed: 3, data: {source: [a.txt], max_length: 64}}\n"
    )
    found = settings_of(
        {"recipe": str(path), "steps": 7, "data": ["b.txt", "c.txt"], "columns": ["text=a,pair=b"],
         "objective": ["hidden=1, logits=0.5"], "teacher_blocks": "0, 2", "track": ["wandb"],
         "gradient_checkpointing": True}
    )  # fmt: skip
    assert found == Finetune.model_validate(
        {
            "steps": 7, "seed": 3, "objectives": {"hidden": 1, "logits": 0.5},
            "teacher_blocks": [0, 2], "trackers": ["wandb"], "gradient_checkpointing": True,
            "data": {"source": ["b.txt", "c.txt"], "max_length": 64,
                     "columns": {"text": "a", "pair": "b"}},
        }
    )  # fmt: skip
    kept = settings_of({"recipe": str(path), "gradient_checkpointing": False})
    longer = settings_of({"recipe": "encoder/minilm-healed", "epochs": 3.0})
    assert (longer.steps, longer.epochs) == (None, 3.0)  # the recipe has steps
    assert kept.steps == 5
    assert kept.data.source == ("a.txt",)


def test_ways_to_share_a_model_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher asks for it as `--shard` does, and all problems are told at once."""
    common = ("finetune", "bert-small", "--quiet", "--data", "texts.txt", "-o", "out", *SHORT)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    done = run(*common, "--bits", 8)
    assert done.code == 2
    assert "`shard` shares weights out over processes, and there is one" in done.err
    assert "these are stored in few bits" in done.err
    other = property(lambda _: DistributedType.DEEPSPEED)
    monkeypatch.setattr("accelerate.Accelerator.distributed_type", other)
    done = run(*common)
    assert done.code == 2
    assert done.err.startswith("error: accelerate is told to train by DEEPSPEED")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--mixed-precision", "fp16"], "mixed precision in float16 needs a GPU",
         "choose `--mixed-precision bf16`, or `no`"),
        (["--track", "pencil"], "accelerate cannot do this: Unsupported logging ",
         "choose another `--mixed-precision`, `--track` or `--device`"),
        (["--track", "comet_ml"], "the loggers `comet_ml` are not installed",
         "`pip install comet_ml`, or leave `--track` out"),
    ],
)  # fmt: skip
def test_what_accelerate_cannot_do(
    arguments: list[str], message: str, hint: str, place: Path
) -> None:
    before = contents(place)
    texts = ("--data", "texts.txt", "-o", "out")
    done = run("finetune", "bert-small", "--quiet", *texts, *SHORT, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")
    assert f"hint: {hint}" in done.err
    assert contents(place) == before


def test_a_moved_teacher(tmp_path: Path) -> None:
    folder = small_encoder(tmp_path)
    (tmp_path / "bert").rename(tmp_path / "elsewhere")
    done = run("finetune", folder, "--quiet", "-o", tmp_path / "out", *SHORT)
    assert done.code == 2
    assert done.err.startswith(
        f"error: the dense model `{tmp_path}/bert`, which is the teacher, cannot be opened: "
    )
    assert "hint: name it with `--teacher FOLDER`, or do without: `--teacher none`" in done.err
    named = ("--teacher", tmp_path / "elsewhere", "-o", tmp_path / "out", *SHORT)
    assert run("finetune", folder, "--quiet", *named).code == 0


def test_a_changed_teacher(tmp_path: Path) -> None:
    folder = small_encoder(tmp_path)
    encoder(tmp_path / "bert", seed=1)
    done = run("finetune", folder, "--quiet", "-o", tmp_path / "out", *SHORT)
    name = tmp_path / "bert"
    assert (done.code, done.err) == (2, error(
        f"`{name}` is not the model that was converted: its weights have changed",
        f"convert it again, or insist on it: `--teacher {name}`",
    ))  # fmt: skip
    assert not (tmp_path / "out").exists()
    insisted = ("--teacher", name, "-o", tmp_path / "out", *SHORT)
    assert run("finetune", folder, "--quiet", *insisted).code == 0


def test_other_processes_leave_it_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """They show nothing, and report what is wrong where the first has not."""
    monkeypatch.setenv("RANK", "1")
    done = run("finetune", "bert-small", "--data", "texts.txt", "-o", "out", *SHORT)
    assert (done.code, done.out, done.err) == (0, "", "")
    missing = ("finetune", "bert-small", "--data", "missing.txt", "-o", "out", *SHORT)
    monkeypatch.setattr(processes, "speaks", lambda: True)
    assert "missing.txt" in run(*missing).err
    monkeypatch.setattr(processes, "speaks", lambda: False)
    done = run(*missing)
    assert (done.code, done.out, done.err) == (2, "", "")


@pytest.mark.slow
def test_ctrl_c_keeps_the_training(tmp_path: Path) -> None:
    """In a process of its own, as users run it."""
    output = tmp_path / "out"
    command = f"finetune bert-small --data texts.txt --device cpu -o {output}"
    options = "--steps 5000 --checkpoint-every 3 --evaluate-every 5000"
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-m", "tcompress", *command.split(), *options.split()],
        env={**os.environ, **own}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    kept = tmp_path / ".out.partial" / "checkpoints"
    end = time.monotonic() + 100
    while not list(kept.glob("step-*[0-9]")) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "stopping after this step" in err
    assert err.endswith(("kB)\n", "MB)\n"))
    assert (
        f"error: interrupted; `{output}` was not written, but the training so far is kept\n\n"
        "hint: run the same command again: it goes on where it stopped; or delete what is kept for "
        f"that: `{output.parent}/.out.partial` ("
    ) in err
    assert not output.exists()
    (checkpoint,) = kept.glob("step-*")
    assert json.loads((checkpoint / "run.json").read_text())["step"] == int(checkpoint.name[5:])
