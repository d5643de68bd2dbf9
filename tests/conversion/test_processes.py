"""Several processes convert a model together: the bytes of one, one message, nothing lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from tcompress import processes
from tcompress.artifact.checksums import digest_of
from tcompress.artifact.manifest import read_manifest
from tcompress.blockwise.output_sampler import OutputComparison, OutputSampler
from tcompress.blockwise.sensitivity import Sensitivity
from tcompress.errors import FitError, PlanError, TCompressError
from tcompress.linalg.moments import MomentSums, ProductSum
from tests.support.cli import error, run
from tests.support.evaluation import encoder
from tests.support.model_folders import save_tokenizer, sentences, text_file
from tests.support.tiny import build

ROOT = Path(__file__).parents[2]
_CONVERT = """
import json, sys
from pathlib import Path
import torch
from tcompress import processes
from tcompress.conversion.converter import convert
from tcompress.linalg.moments import LARGE
from tcompress.options import Convert
from tcompress.search import candidates
from tests.support.conversions import calibration

for name, (family, recipe) in json.loads(sys.argv[2]).items():
    dense = Path(sys.argv[1]) / family
    data = calibration(family) if "calibration" not in recipe else None
    settings = Convert.model_validate({**recipe, "device": "cpu"})
    candidates.LARGE = 8 if name == "condensed" else LARGE
    with processes.joined(torch.device("cpu")):
        convert(str(dense), settings, Path(sys.argv[3]) / name, data=data)
"""
_SVD: dict[str, Any] = {"method": {"name": "svd"}, "target": 0.5}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "svd": ("bert", _SVD),
    "without data": ("bert", {**_SVD, "calibration": {"source": "none"}}),
    "fitted": ("bert", {"method": {"name": "lprod", "p": 2, "transform": "fitted"}}),
    "tt": ("bert", {"method": {"name": "tt"}, "target": 0.5}),
    "tucker": ("bert", {"method": {"name": "tucker"}, "target": 0.5}),
    "auto": ("bert", {"method": {"name": "auto"}, "target": 0.4}),
    "width": ("llama", {"method": {"name": "width"}, "target": 0.5}),
    "condensed": ("llama", _SVD),
    "experts": ("mixtral", _SVD),
    "depth": ("bert", {**_SVD, "target": 0.4, "drop_layers": "auto"}),
}


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MASTER_"))}
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **own, "GLOO_SOCKET_IFNAME": "lo"}


def _launch(count: int, *command: str) -> "subprocess.Popen[str]":
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = [sys.executable] if count == 1 else [*launcher, "--nproc_per_node", str(count)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [*program, *command], env=_environment(), cwd=ROOT, text=True, **pipes
    )


def _finished(count: int, *command: str) -> str:
    """Run a command that must end well; gives what it printed."""
    process = _launch(count, *command)
    out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return out


def _checksums(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): digest_of(p) for p in folder.rglob("*.safetensors")}


@pytest.mark.slow
def test_any_number_of_processes_comes_to_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "convert.py").write_text(_CONVERT, encoding="utf-8")
    for family in {family for family, _ in _CASES.values()}:
        build(family).save_pretrained(tmp_path / family)
    found = []
    for count in (1, 2, 4):
        arguments = (str(tmp_path), json.dumps(_CASES), str(tmp_path / str(count)))
        _finished(count, str(tmp_path / "convert.py"), *arguments)
        found.append(_checksums(tmp_path / str(count)))
    assert len(found[0]) == len(_CASES)
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.fuzz
def test_a_rank_killed_at_any_moment(tmp_path: Path) -> None:
    """Twenty times: the launcher ends all, at most one message is ours, the command goes on."""
    build("bert").save_pretrained(tmp_path / "bert")
    save_tokenizer(tmp_path / "bert")
    data = text_file(tmp_path / "texts.txt", sentences(200))
    typed = ("-m", "tcompress", "convert", str(tmp_path / "bert"), "--method", "auto")
    typed = (*typed, "--target", "0.5", "--calib", data, "--device", "cpu", "-q", "-o")
    started = time.monotonic()
    _finished(2, *typed, str(tmp_path / "whole"))
    seconds, chance = time.monotonic() - started, random.Random(0)
    for number in range(20):
        folder = tmp_path / f"cut{number}"
        process = _launch(2, *typed, str(folder))
        time.sleep(chance.uniform(0.2, 0.95) * seconds)
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        if pids := [*map(int, ranks.stdout.split())]:
            os.kill(chance.choice(pids), signal.SIGKILL)
        _, text = process.communicate(timeout=120)
        assert text.count("error: ") <= 1, text
        assert process.returncode or folder.exists(), text
        if not folder.exists():
            _finished(2, *typed, str(folder))
        assert _checksums(folder) == _checksums(tmp_path / "whole")
        assert not [*tmp_path.glob(f".cut{number}*")]


@pytest.mark.slow
def test_processes_compress_together_and_fail_with_one_message(tmp_path: Path) -> None:
    encoder(tmp_path / "bert")
    text_file(tmp_path / "texts.txt", sentences(60))
    dense = (tmp_path / "bert" / "model.safetensors").stat().st_size
    typed = ("-m", "tcompress", "compress", str(tmp_path / "bert"), "--runtime", "torch", "--smoke")
    typed = (*typed, "--minutes", "0.5", "--data", str(tmp_path / "texts.txt"), "--json")
    folder = str(tmp_path / "small")
    out = _finished(2, *typed, "--size", f"{int(0.8 * dense)}B", "-o", folder)
    assert json.loads(out)["missed"] == []  # of the first process alone
    manifest = read_manifest(Path(folder))
    assert manifest is not None
    assert manifest.training[-1].environment["processes"] == "2"
    process = _launch(2, *typed, "--size", f"{dense // 100}B", "-o", str(tmp_path / "none"))
    _, said = process.communicate(timeout=100)
    assert process.returncode != 0
    assert said.count("error: ") == 1, said
    assert "is out of reach" in said


@pytest.mark.parametrize(
    ("error", "goes_on"), [(PlanError("no plan"), True), (FitError("NaN in these batches"), False)]
)
def test_what_one_process_may_meet_alone_ends_all(
    error: TCompressError, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a process that has gone: the launcher ends all."""
    messages: list[object] = [("job", False), None]
    told: list[object] = []

    def work(job: object) -> None:
        raise error

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "agreed", lambda value: messages.pop(0))
    crew = processes.Crew[str](work)
    if goes_on:
        crew.follow()
    else:
        with pytest.raises(FitError):
            crew.follow()
    assert bool(messages) != goes_on
    monkeypatch.setattr(processes, "agreed", told.append)
    with pytest.raises(type(error)), crew.led():
        crew.do("job")
    assert told == [("job", False), *([error] if goes_on else [])]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", ["same", "different", "weighed", "some the same"])
def test_runs_add_up_to_the_whole(kind: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each about means of its own."""
    if large:  # rows of a run wait
        monkeypatch.setattr("tcompress.linalg.moments.LARGE", 4)
    rows = torch.randn(60, 5) + torch.arange(60)[:, None] / 20
    other = rows if kind == "same" else rows * 0.9 + 0.1 * torch.randn(60, 5)
    weights = torch.rand(60).double() if kind == "weighed" else None

    def added(sums: MomentSums, span: slice) -> MomentSums:
        x = rows[span]
        y = x if kind == "same" or (kind == "some the same" and span.start == 20) else other[span]
        sums.add(x, y, None if weights is None else weights[span])
        return sums

    spans = [slice(0, 20), slice(20, 40), slice(40, 60)]
    whole, total = MomentSums(5), MomentSums(5)
    for span in spans:
        added(whole, span)
        total = total.merge(added(MomentSums(5), span))
    total.merge(MomentSums(5))
    for centred in (False, True):
        exact, found = whole.moments(centred=centred), total.moments(centred=centred)
        assert found.rows == exact.rows
        for name in ("gram", "cross", "dense", "mean", "dense_mean"):
            torch.testing.assert_close(
                getattr(found, name), getattr(exact, name), rtol=1e-5, atol=1e-6
            )


def test_sensitivities_add_up_to_the_whole() -> None:
    rows, gradients = torch.randn(40, 4) + 3, torch.randn(40, 3)
    whole, total = (Sensitivity(4, 3, torch.device("cpu")) for _ in range(2))
    for batch, span in enumerate((slice(0, 10), slice(10, 40))):
        part = Sensitivity(4, 3, torch.device("cpu"))
        for sums in (whole, part):
            sums.add(rows[span], gradients[span], batch)
        total = total.merge(part)
    assert (total.rows, [*total.weights]) == (40, [0, 1])
    for exact, found in (
        (whole.inputs.moments(centred=True).gram, total.inputs.moments(centred=True).gram),
        (whole.inputs.moments(centred=False).gram, total.inputs.moments(centred=False).gram),
        (whole.curvature.total(), total.curvature.total()),
    ):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_a_sum_that_moves_goes_on_where_it_is() -> None:
    """Rows of a sum that has not begun wait on its device, which another process has not."""
    product = ProductSum((4, 4), torch.device("meta"))
    moved = processes.moved(product, "cpu")
    rows = torch.randn(6, 4)
    moved.add(rows, rows)
    torch.testing.assert_close(moved.total(), (rows.T @ rows).double(), rtol=1e-5, atol=1e-5)


def test_a_tensor_that_is_in_a_value_twice_stays_one() -> None:
    rows = torch.randn(3, 4)
    moved = processes.moved({"pair": (rows, rows), "copy": rows.clone()}, "meta")
    assert moved["pair"][0] is moved["pair"][1] is not moved["copy"]


def test_an_output_that_one_process_cannot_compare_is_an_error_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler, batch = OutputSampler(None), {"attention_mask": torch.ones(1, 2)}
    exact = BaseModelOutput(last_hidden_state=torch.ones(1, 2, 4))
    broken = BaseModelOutput(last_hidden_state=torch.full((1, 2, 4), torch.nan))
    with pytest.raises(FitError):
        OutputComparison(sampler).attempt("data", exact, broken, batch, 0)
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gathered", lambda value: [[], value])
    comparison = OutputComparison(sampler)
    comparison.attempt("data", exact, broken, batch, 0)
    comparison.attempt("data", exact, exact, batch, 1)
    with pytest.raises(FitError):
        comparison.merged()


def test_every_batch_is_in_one_run() -> None:
    for count in (1, 3, 8, 21):
        runs = [processes.batches_of(run, count) for run in range(processes.RUNS)]
        assert [index for run in runs for index in run] == [*range(count)]
        assert len([*filter(None, runs)]) == min(count, processes.RUNS)
        assert processes.batches_of(processes.RUNS, count) == []
    assert processes.own_batches(5) == [0, 1, 2, 3, 4]  # of one process


def test_what_one_process_does_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("bench", tmp_path)
    assert (done.code, done.err) == (2, error(
        "`bench` runs in one process, and a launcher has started several",
        "leave it out; with one, `compress`, `convert` and `finetune` share their work out",
    ))  # fmt: skip
    several = run("convert", tmp_path, "--speedup", "2,4", "--device", "cpu")
    assert several.code == 2
    assert "several processes convert one model at a time, and `--speedup` asks for 2" in (
        several.err
    )
