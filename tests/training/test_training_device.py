"""A step of training leaves the host free: it reads nothing off the device but every tenth time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.testing import assert_close
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_bidirectional_mask

from tcompress.artifact.manifest import CurvePoint
from tcompress.progress import Silent
from tcompress.training import loop
from tcompress.training.checkpoints import Checkpoints
from tcompress.training.loop import Loop, StepNumbers
from tcompress.training.losses import Losses, unread_masks
from tcompress.training.optimizers import orthogonalised, orthogonalised_together
from tests.support.tiny import build
from tests.support.training import batch_of, losses_of, small, small_encoder, texts

pytestmark = pytest.mark.usefixtures("one_thread")

META = torch.device("meta")  # which has no numbers: whoever reads one fails


@contextmanager
def _on_meta(losses: Losses, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Moves the models of a run, and what is computed in it, to a device without numbers."""
    setup = losses.setup
    setup.model.to(META)
    setup.teacher_observer.model.to(META)
    for objective, _ in setup.objectives:
        for name, value in vars(objective).items():
            if isinstance(value, Tensor):
                setattr(objective, name, value.to(META))
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "device", META)
        yield


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(
            *("bert", {"objectives": {"hidden": 1, "embedding": 1, "attention": 1, "logits": 1}}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("bert", {"optimizer": "adamw", "block_steps": 5, "accumulate": 2}),
            marks=pytest.mark.slow,
        ),
        ("llama", {"objectives": {"hidden": 1, "logits": 1, "attention": 1}}),
    ],
)
def test_numbers_are_read_every_tenth_step(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else of a run is done on a device whose numbers cannot be read."""
    options = {"data": texts(tmp_path), "steps": 24, "evaluate_every": 50, **options}
    options["learning_rate"] = 1e-3  # else losses are read before the first step, to find one
    losses, read = losses_of(small(family, tmp_path), **options), list[int]()

    def note(self: StepNumbers, step: int) -> list[float]:
        read.extend([step] if self._unread else [])
        self._unread.clear()
        return []

    def validate(self: Loop) -> None:
        self._read()
        self.state.best_step = self.state.step
        self.state.curve.append(CurvePoint(step=self.state.step, validation=1.0))

    monkeypatch.setattr(loop, "SLOW", float("inf"))
    monkeypatch.setattr(loop, "mixing_validations", lambda _: 0.0)
    monkeypatch.setattr(StepNumbers, "read", note)
    monkeypatch.setattr(Loop, "_validate", validate)
    monkeypatch.setattr(Losses, "prepare_objectives", lambda _: None)
    with _on_meta(losses, monkeypatch):
        place = Checkpoints(tmp_path / "place")
        run = Loop(losses.setup, losses.accelerator, place, Silent(), lambda _: None)
        state = run.run()
    assert state.step == 24
    assert read == [1, 10, 20, 24]


def test_masks_are_what_they_would_be(tmp_path: Path) -> None:
    """With padding and without, and as they were when all is done."""
    config, states = build("bert").config, torch.zeros(2, 5, 32)
    full, padded = (
        torch.ones(2, 5, dtype=torch.int64),
        torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
    )
    before = dict(ALL_MASK_ATTENTION_FUNCTIONS)
    for mask in (full, padded):
        plain = create_bidirectional_mask(config, states, mask)
        with unread_masks({"attention_mask": mask}):
            found = create_bidirectional_mask(config, states, mask)
            unread = create_bidirectional_mask(config, states.to(META), mask.to(META))
        assert (plain is None) == (found is None) == (unread is None) == (mask is full)
        if plain is not None and found is not None:
            assert_close(found, plain)
    assert dict(ALL_MASK_ATTENTION_FUNCTIONS) == before


def test_a_batch_with_room_changes_no_matrix() -> None:
    """As on a GPU, where matrices of different shapes are orthogonalised together."""
    made = torch.Generator().manual_seed(0)
    shapes = [(1, 6, 9), (1, 9, 5), (3, 4, 9), (1, 8, 12)]
    parts = [torch.randn(*shape, generator=made) for shape in shapes]
    found = orthogonalised_together(parts, (8, 12))
    for own, part in zip(found, parts, strict=True):
        assert_close(own, orthogonalised(part))


def test_teachers_on_a_device_are_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = losses_of(small_encoder(tmp_path), data=texts(tmp_path))
    train = losses.setup.data.train
    with _on_meta(losses, monkeypatch):
        losses.teachers.cached(tmp_path, train)
        assert not train.tells_places
        assert "place" not in batch_of(losses)
    losses.teachers.cached(tmp_path, train)
    assert train.tells_places
