"""Two processes train as one does with twice the batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tcompress.artifact.reader import Artifact
from tests.support.cli import run
from tests.support.evaluation import one_thread, pairs_file
from tests.support.interrupted import partial_folder
from tests.support.training import small_encoder

_LATE = """
import os, time
from tcompress.__main__ import main
from tcompress.training import checkpoints

read = checkpoints.load_file
if os.environ["RANK"] == "1":
    checkpoints.load_file = lambda path: time.sleep(3) or read(path)
main()
"""
"""The command, with a second process that is late to read the best weights."""


def _together(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `tcompress finetune` in two processes."""
    (folder / "late.py").write_text(_LATE, encoding="utf-8")
    # Accelerate leaves variables behind in a process that has trained.
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "MASTER_", "TORCHELASTIC_"))
    }
    environment = {
        **own,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",  # without a GPU `--device auto` is a CPU
    }
    environment.pop("TCOMPRESS_TRACEBACK", None)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
    ]  # fmt: skip
    command += [str(folder / "late.py"), "finetune", *map(str, arguments), "--json"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def _curve(document: dict[str, Any]) -> list[float]:
    points = document["training"]["curve"]
    found = [point[name] for point in points for name in ("loss", "validation")]
    return [number for number in found if number is not None]


def test_the_curve_of_one_process(tmp_path: Path) -> None:
    """The model's pooler takes no part in the task; no process must wait for its gradient."""
    folder = small_encoder(tmp_path)
    path = pairs_file(tmp_path / "pairs.jsonl", 30)
    common = [folder, "--task", "sts", "--data", path, "--steps", 6, "--evaluate-every", 2]
    common += ["--block-steps", 2, "--checkpoint-every", 4, "--max-minutes", 5]
    with one_thread():
        alone = run(
            "finetune", *common, "--batch-size", 8, "-o", tmp_path / "one", "--device", "cpu",
            "--json", "--quiet",
        ).document  # fmt: skip
    done = _together(tmp_path, *common, "--batch-size", 4, "-o", tmp_path / "two")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)  # one of them prints
    assert len(_curve(alone)) == 7
    assert _curve(document) == pytest.approx(_curve(alone), rel=1e-4)
    for name in ("steps", "samples", "best_step", "data_fingerprint"):
        assert document["training"][name] == alone["training"][name]
    assert document["training"]["environment"]["processes"] == "2"
    assert done.stderr.count("training: 6 of 6 steps") == 1
    Artifact.open(tmp_path / "two").verify_checksums()
    assert not partial_folder(tmp_path / "two").exists()
