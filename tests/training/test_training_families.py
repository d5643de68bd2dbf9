"""Every family can be healed, and taught what it has a head for, also by two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.artifact.reader import Artifact, verify_files
from tcompress.linalg.transforms import rotate_strided, slice_product
from tcompress.reporting.model_report import report_of
from tcompress.training.finetuning import FloatAttention
from tests.support.cli import run
from tests.support.conversions import load_whole, structured
from tests.support.evaluation import encoder, pairs_file
from tests.support.interrupted import partial_folder
from tests.support.tiny import build
from tests.support.training import (
    assert_gradients,
    batch_of,
    losses_of,
    needs_pictures,
    picture_rows,
    pictures,
    small,
    small_encoder,
    texts,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = (
    "bert", "roberta", "distilbert", "mpnet", "deberta-v2", "modernbert", "gpt2", "opt", "llama",
    "mixtral", "t5", "bart", "vit", "clip_text_model",
)  # fmt: skip


@pytest.mark.often("vit", "gpt2")
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Gradients reach every rewritten layer, and the result of a step loads."""
    folder, data = small(family, tmp_path), texts(tmp_path)
    if needs_pictures(family):
        data = {"source": [str(pictures(tmp_path / "p"))]}
    losses = losses_of(folder, data=data)
    assert 0 < losses.gradients(batch_of(losses), 1, alone=False) < float("inf")
    layers = structured(losses.setup.model)
    assert len(layers) == len(Artifact.open(folder).layers)
    assert_gradients(layers.values())
    done = train(folder, tmp_path / "out", steps=1, data=data)
    verify_files(done.folder)
    load_whole(type(build(family)), done.folder)


@pytest.mark.often("vit-image-classification-accuracy")
@pytest.mark.parametrize(
    ("family", "task", "validated"),
    [
        ("bert", "masked-lm", "validation loss"),
        ("gpt2", "causal-lm", "validation loss"),
        ("vit", "image-classification", "accuracy"),
    ],
)
def test_tasks_of_converted_models(family: str, task: str, validated: str, tmp_path: Path) -> None:
    folder, data = small(family, tmp_path), texts(tmp_path)
    if family == "vit":
        data = {"source": [str(picture_rows(tmp_path / "p.parquet"))]}
    done = train(folder, tmp_path / "out", task=task, data=data, steps=8, learning_rate=3e-3)
    assert done.facts.objectives == {"task": 1.0, "hidden": 1.0, "logits": 1.0}
    assert done.facts.validation == validated
    assert (done.facts.share, done.facts.sources) == (1, [])  # it is learnt to its end
    losses = [point.loss for point in done.facts.curve[1:]]
    assert losses[-1] < losses[0]
    assert report_of(done.folder).method == "lprod"


@pytest.mark.slow
def test_checkpoints_say_nothing_of_tied_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, data = small("gpt2", tmp_path), texts(tmp_path)
    train(folder, tmp_path / "out", data=data, checkpoint_every=2)
    assert "shared tensor" not in caplog.text


# Mixed precision on a CPU


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_attention_stays_in_float32() -> None:
    q, k, v = (draw(2, 3, 5 + i, 4)[:, :, :5] for i in range(3))
    mask = draw(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = attend(q, k, v, attn_mask=mask)
        with FloatAttention():
            exact = attend(q, k, value=v, attn_mask=mask)
            low = attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
            product = q @ k.mT
    assert plain.dtype == product.dtype == torch.bfloat16
    assert exact.dtype == low.dtype == torch.float32
    torch.testing.assert_close(exact, attend(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("product", ["slices", "feature-major", "strided"])
def test_products_of_slices_in_bfloat16_equal_those_in_float32(product: str) -> None:
    x, slices = draw(12, 20).requires_grad_(), draw(4, 5, 5).requires_grad_()

    def apply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if product == "strided":
            return rotate_strided(a.T.contiguous().T, b)
        return slice_product(a, b, feature_major=product == "feature-major")

    expected = apply(x, slices)
    wanted = torch.autograd.grad(expected.square().sum(), (x, slices))
    found = apply(x.bfloat16(), slices.bfloat16())
    assert found.dtype == torch.bfloat16
    assert found.stride() == expected.stride()
    got = torch.autograd.grad(found.float().square().sum(), (x, slices))
    for left, right in zip((found, *got), (expected, *wanted), strict=True):
        torch.testing.assert_close(left.float(), right, rtol=0.05, atol=0.2)


# Two processes train as one does with twice the batch


# The command, with a second process that is late to read the best weights.
_LATE = """
import os, signal, time
from tcompress.__main__ import main
from tcompress.training import checkpoints, loop

read = checkpoints.load_file
if os.environ["RANK"] == "1":
    checkpoints.load_file = lambda path: time.sleep(3) or read(path)
if limit := int(os.environ.get("DIES_AFTER", "0")):
    step, taken = loop.Loop._step, []

    def dying(self, batch):
        step(self, batch)
        taken.append(batch)
        if len(taken) == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    loop.Loop._step = dying
main()
"""


def _together(
    folder: Path, *arguments: object, dies_after: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run `tcompress finetune` in two processes, which are killed after so many steps."""
    (folder / "late.py").write_text(_LATE, encoding="utf-8")
    # Accelerate leaves variables behind in a process that has trained.
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "MASTER_", "TORCHELASTIC_"))
    }
    environment = {
        **own,
        "DIES_AFTER": str(dies_after),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
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


def _alone_and_together(folder: Path, *options: object) -> tuple[dict[str, Any], ...]:
    """What one process tells, and two; the second also what they said."""
    out = ("--batch-size", 8, "-o", folder / "one", "--device", "cpu", "--json", "--quiet")
    alone = run("finetune", *(item for item in options if item != "--shard"), *out).document
    done = _together(folder, *options, "--batch-size", 4, "-o", folder / "two")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)  # one of them prints
    assert _curve(document) == pytest.approx(_curve(alone), rel=1e-4)
    verify_files(folder / "two")
    return alone, {**document, "said": done.stderr}


@pytest.mark.slow
@pytest.mark.often("adamw")
@pytest.mark.parametrize("options", ["adamw", "muon", "adamw --shard", "muon --shard"])
def test_the_curve_of_one_process(options: str, tmp_path: Path) -> None:
    """The model's pooler takes no part in the task; no process must wait for its gradient."""
    folder = small_encoder(tmp_path)
    path = pairs_file(tmp_path / "pairs.jsonl", 30)
    common = [folder, "--task", "sts", "--data", path, "--steps", 6, "--evaluate-every", 2]
    common += ["--block-steps", 2, "--checkpoint-every", 4, "--minutes", 5]
    common += ["--optimizer", *options.split()]
    alone, document = _alone_and_together(tmp_path, *common)
    assert len(_curve(alone)) == 7
    for name in ("steps", "samples", "best_step", "data_fingerprint"):
        assert document["training"][name] == alone["training"][name]
    assert document["training"]["environment"]["processes"] == "2"
    assert document["said"].count("training: 6 of 6 steps") == 1
    assert not partial_folder(tmp_path / "two").exists()


@pytest.mark.slow
def test_a_model_that_is_shared_out_is_resumed(tmp_path: Path) -> None:
    """Its checkpoints hold the parts of both processes, the optimizer's too."""
    folder, path = small_encoder(tmp_path), pairs_file(tmp_path / "pairs.jsonl", 30)
    common = [folder, "--data", path, "--steps", 6, "--batch-size", 4, "--evaluate-every", 4]
    common += ["--checkpoint-every", 2, "--shard", "--mixed-precision", "bf16"]
    common += ["--gradient-checkpointing", "--task", "sts"]
    killed = _together(tmp_path, *common, "-o", tmp_path / "killed", dies_after=3)
    assert killed.returncode != 0
    assert [*(partial_folder(tmp_path / "killed") / "checkpoints").glob("step-*2/shard-1.pt")]
    for name in ("killed", "whole"):
        done = _together(tmp_path, *common, "-o", tmp_path / name)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["resumed"] is (name == "killed")
    files = [tmp_path / name / "model.safetensors" for name in ("killed", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_texts_that_teachers_read_are_shared(tmp_path: Path) -> None:
    """Cosines are those of the texts of both processes, and each reads a part for the teachers."""
    pooling = {"pooling_mode_mean_tokens": True}
    student = encoder(tmp_path / "student", pooling=pooling)
    wide = encoder(tmp_path / "wide", 1, pooling, hidden_size=48, intermediate_size=64)
    path = pairs_file(tmp_path / "pairs.jsonl", 30)
    common = [student, "--teacher", wide, "--teacher", student, "--task", "sts", "--data", path]
    common += ["--steps", 4, "--evaluate-every", 2, "--shard"]
    _, document = _alone_and_together(tmp_path, *common)
    assert document["training"]["objectives"] == {"task": 1, "similarities": 1, "embedding": 1}
