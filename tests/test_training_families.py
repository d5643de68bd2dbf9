"""Every family that reads text or pictures can be healed, and taught what it has a head for."""

from __future__ import annotations

from pathlib import Path

import pytest

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.artifact.reader import Artifact
from tcompress.reporting.model_report import report_of
from tests.support.conversions import structured
from tests.support.tiers import tiered
from tests.support.tiny import build
from tests.support.training import (
    batch_of,
    gradients,
    losses_of,
    needs_pictures,
    picture_rows,
    pictures,
    small,
    texts,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


FAMILIES = (
    "bert", "roberta", "distilbert", "mpnet", "deberta-v2", "modernbert", "gpt2", "opt", "llama",
    "mixtral", "t5", "bart", "vit", "clip_text_model",
)  # fmt: skip


OFTEN = ("bert", "deberta-v2", "gpt2", "mixtral", "t5", "vit", "clip_text_model")


@pytest.mark.parametrize("family", tiered(FAMILIES, lambda row: row in OFTEN))
def test_families(family: str, tmp_path: Path) -> None:
    """Gradients reach every rewritten layer, and the result of a step loads."""
    folder, data = small(family, tmp_path), texts(tmp_path)
    if needs_pictures(family):
        data = {"source": [str(pictures(tmp_path / "p"))]}
    losses = losses_of(folder, data=data)
    assert 0 < losses.gradients(batch_of(losses), 1, alone=False) < float("inf")
    layers = structured(losses.setup.model)
    assert len(layers) == len(Artifact.open(folder).layers)
    for layer in layers.values():
        found = gradients(layer)
        assert found
        assert all(value.isfinite().all() for value in found.values())
        assert any(value.any() for value in found.values())
    done = train(folder, tmp_path / "out", steps=1, data=data)
    Artifact.open(done.folder).verify_checksums()
    _, info = type(build(family)).from_pretrained(done.folder, output_loading_info=True)
    assert {name: problems for name, problems in info.items() if problems} == {}


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
    losses = [point.loss for point in done.facts.curve[1:]]
    assert losses[-1] < losses[0]
    assert report_of(done.folder).method == "lprod"


def test_checkpoints_say_nothing_of_tied_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, data = small("gpt2", tmp_path), texts(tmp_path)
    train(folder, tmp_path / "out", data=data, checkpoint_every=2)
    assert "shared tensor" not in caplog.text
