"""Short training runs of tiny models, for tests of what comes out of them."""

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from tcompress.artifact.manifest import read_manifest
from tcompress.models import SourceModel
from tcompress.options import Finetune
from tcompress.progress import Silent
from tcompress.training.batches import loader
from tcompress.training.finetuning import Finetuned, finetune
from tcompress.training.losses import Losses
from tcompress.training.setup import set_up
from tcompress.training.tasks import TASKS
from tcompress.training.teacher import find_teachers
from tcompress.training.teacher_outputs import TeacherOutputs
from tcompress.training.training_data import Data, load_data
from tests.support.converted import converted
from tests.support.evaluation import classifier, encoder
from tests.support.interrupted import die, until_killed
from tests.support.model_folders import (
    model_folder,
    save_processor,
    save_tokenizer,
    sentences,
    text_file,
)
from tests.support.tiny import TINY


def settings(**changes: Any) -> Finetune:
    """Settings of a short run on sentences; `data` is merged with what is given of it."""
    data = {"max_length": 16, "holdout": 0.2, **changes.pop("data", {})}
    short = {"steps": 4, "batch_size": 8, "evaluate_every": 2, "device": "cpu", "data": data}
    return Finetune.model_validate({**short, **changes})


def train(model: Path, output: Path, *, force: bool = False, **changes: Any) -> Finetuned:
    """Train a model; `progress`, `say` and settings as in `settings`."""
    more = {name: changes.pop(name) for name in ("progress", "say") if name in changes}
    return finetune(str(model), settings(**changes), output, force=force, **more)


def taught(model: Path, task: str, data: dict[str, Any], **more: Any) -> Finetuned:
    """Train a model on labels alone, into a folder `out` beside it."""
    options = {"task": task, "teacher": "none", "data": data, "learning_rate": 3e-3, **more}
    return train(model, model.with_name("out"), **options)


def data_of(model: Path, task: str | None = None, **data: Any) -> Data:
    """The data of a run."""
    options = settings(data=data).data
    return load_data(SourceModel.open(str(model)), options, TASKS[task]() if task else None, seed=0)


def small(family: str, folder: Path, **recipe: Any) -> Path:
    """Write `<folder>/<family>` and its conversion `<folder>/<family>-small`."""
    if not (folder / family).exists():
        model_folder(family, folder / family, tokenizer=False)
        save_tokenizer(folder / family, mask_token="w99")
    made = converted(family, folder, **recipe).folder
    save_tokenizer(made, mask_token="w99")
    save_processor(made)
    return made


def small_encoder(folder: Path, pooling: Mapping[str, Any] | None = None) -> Path:
    """Write a sentence encoder `<folder>/bert` and its conversion `<folder>/bert-small`."""
    return _converted(encoder(folder / "bert", pooling=pooling))


def small_classifier(folder: Path, labels: Sequence[str] | int = 2) -> Path:
    """Write a classifier `<folder>/bert` and its conversion `<folder>/bert-small`."""
    return _converted(classifier(folder / "bert", labels))


def _converted(dense: Path) -> Path:
    made = converted(dense.name, dense.parent).folder
    save_tokenizer(made)
    return made


def texts(folder: Path, count: int = 40) -> dict[str, Any]:
    """Write sentences; gives the settings that read them."""
    return {"source": [text_file(folder / "texts.txt", sentences(count))]}


def _noise(rng: np.random.Generator) -> Any:
    """A small picture of noise."""
    from PIL import Image

    return Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8))


def pictures(folder: Path, count: int = 10) -> Path:
    """Write small pictures of noise into a new folder."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(count):
        _noise(rng).save(folder / f"{index}.png")
    return folder


def picture_rows(path: Path, count: int = 12, classes: int = 2) -> Path:
    """Write small pictures and labels as a table."""
    import pandas as pd

    rng, cells = np.random.default_rng(0), []
    for _ in range(count):
        content = io.BytesIO()
        _noise(rng).save(content, "PNG")
        cells.append({"bytes": content.getvalue(), "path": None})
    frame = pd.DataFrame({"image": cells, "label": [index % classes for index in range(count)]})
    frame.to_parquet(path)
    return path


def needs_pictures(family: str) -> bool:
    return TINY[family].needs == ("image",)


def weights(folder: Path) -> str:
    """Checksum of the weight files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def curve(done: Finetuned) -> list[tuple[int, float | None, float | None]]:
    """What does not depend on time."""
    return [(point.step, point.loss, point.validation) for point in done.facts.curve]


def assert_alike(one: Finetuned, two: Finetuned, tolerance: float = 1e-4) -> None:
    """The courses of two runs are the same, up to rounding."""
    assert len(one.facts.curve) == len(two.facts.curve)
    for (step, *numbers), (other, *wanted) in zip(curve(one), curve(two), strict=True):
        assert step == other
        for number, want in zip(numbers, wanted, strict=True):
            assert number == (want if want is None else pytest.approx(want, rel=tolerance))


class AtStep(Silent):
    """A progress that does something after a step of the training."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.left, self.action = step, action

    def advance(self, amount: int = 1, note: str = "") -> None:
        before, self.left = self.left, self.left - amount
        if before > 0 >= self.left:
            self.action()


def interrupt() -> None:
    raise KeyboardInterrupt


def memory_for(most: int, monkeypatch: Any) -> list[int]:
    """Let memory run out for more examples at a time; gives the sizes that were tried."""
    tried: list[int] = []
    inner = Losses._loss

    def loss(self: Losses, batch: dict[str, Tensor], *others: Any) -> Tensor:
        tried.append(len(batch["input_ids"]))
        if tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return inner(self, batch, *others)

    monkeypatch.setattr(Losses, "_loss", loss)
    return tried


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the parameters that have one."""
    return {
        name: value.grad.clone()
        for name, value in model.named_parameters()
        if value.grad is not None
    }


def assert_gradients(modules: Iterable[nn.Module]) -> None:
    """Every one has gradients, which are finite and not all zero."""
    for module in modules:
        found = gradients(module)
        assert found
        assert all(value.isfinite().all() for value in found.values())
        assert any(value.any() for value in found.values())


def losses_of(model: Path, **changes: Any) -> Losses:
    """What computes losses and gradients of a run, before its first step."""
    options = settings(**changes)
    source = SourceModel.open(str(model), converted=True)
    manifest = read_manifest(source.folder)
    setup = set_up(source, find_teachers(options.teacher, manifest), options, manifest)
    if options.gradient_checkpointing:
        setup.model.gradient_checkpointing_enable({"use_reentrant": False})
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    teachers = TeacherOutputs(setup, accelerator)
    made = Losses(setup, accelerator, setup.model, teachers)
    made.prepare_objectives()
    setup.model.train()
    return made


def batch_of(losses: Losses, size: int = 6) -> dict[str, Tensor]:
    """The first training examples."""
    data = losses.setup.data
    return next(iter(loader(data.train, data.pad, [list(range(size))])))


def train_until_killed(model: Path, output: Path, moment: int | str, **changes: Any) -> None:
    """Train in another process, which must die after a step or at the call of a function."""
    until_killed(_train_and_die, model, output, moment, changes)


def _train_and_die(model: Path, output: Path, moment: int | str, changes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if isinstance(moment, str):
        with patch(moment, die):
            train(model, output, **changes)
    else:
        train(model, output, progress=AtStep(moment, die), **changes)
