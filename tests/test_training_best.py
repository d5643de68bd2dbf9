"""Which weights of a run are kept, and when it ends early."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.errors import TrainingError
from tcompress.training.losses import Losses
from tests.support.evaluation import encoder, pairs_file
from tests.support.training import small_encoder, texts, train, weights

pytestmark = pytest.mark.usefixtures("one_thread")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}


def _with_validations(values: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(values)
    monkeypatch.setattr(Losses, "validate", lambda self, size: next(left))


def test_the_best_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = small_encoder(tmp_path), texts(tmp_path)
    # Constant rates, so that a shorter run does the same steps.
    options = {"data": data, "schedule": "constant", "warmup": 0, "evaluate_every": 2}
    two = train(folder, tmp_path / "two", steps=2, **options)
    with monkeypatch.context() as patch:
        _with_validations([3.0, 1.0, 2.0, 5.0], patch)
        done = train(folder, tmp_path / "out", steps=6, **options)
    assert (done.facts.best_step, done.facts.best, done.facts.steps) == (2, 1.0, 6)
    assert weights(done.folder) == weights(two.folder)
    _with_validations([1.0, 1.0, 2.0, 5.0], monkeypatch)
    none = train(folder, tmp_path / "none", steps=6, **options)
    assert none.facts.best_step == 0
    before, after = _tensors(folder), _tensors(none.folder)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_metric_is_best_where_it_is_highest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pairs_file(tmp_path / "rows.jsonl")
    _with_validations([0.1, 0.5, 0.3], monkeypatch)
    done = train(
        encoder(tmp_path / "bert"), tmp_path / "out", task="sts", data={"source": [str(path)]}
    )
    assert (done.facts.best_step, done.facts.best) == (2, 0.5)


def test_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_validations([4.0, 3.0, 3.5, 2.0, 2.5, 2.4, 1.0], monkeypatch)
    done = train(
        small_encoder(tmp_path), tmp_path / "out", data=texts(tmp_path), steps=12, patience=2
    )
    assert (done.facts.steps, done.facts.best_step, done.facts.best) == (10, 6, 2.0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("loss", "the loss is nan at step 3"),
        ("gradient", "the gradient's norm is (nan|inf) at step 3"),
        ("validation", "the validation loss is inf at step 2"),
    ],
)
def test_numbers_that_are_not_finite_stop_the_run(
    what: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = small_encoder(tmp_path), tmp_path / "out"
    steps, inner = iter(range(99)), Losses.gradients

    def spoilt(self: Losses, *args: Any, **options: Any) -> float:
        value = inner(self, *args, **options)
        if next(steps) == 2:
            if what == "loss":
                return float("nan")
            next(p.grad for p in self.model.parameters() if p.grad is not None).mul_(float("inf"))
        return value

    if what == "validation":
        _with_validations([1.0, float("inf")], monkeypatch)
    else:
        monkeypatch.setattr(Losses, "gradients", spoilt)
    with pytest.raises(TrainingError) as failed:
        train(folder, output, data=texts(tmp_path), checkpoint_every=1)
    assert re.fullmatch(message, failed.value.message)
    assert failed.value.exit_code == 2
    assert "lower the learning rate, such as `--lr 0.00025`" in (failed.value.hint or "")
    assert not output.exists()
    kept = tmp_path / ".out.partial" / "checkpoints"
    assert (kept / ("step-00000001" if what == "validation" else "step-00000002")).is_dir()
    assert not list((tmp_path / ".out.partial").rglob("config.json"))
