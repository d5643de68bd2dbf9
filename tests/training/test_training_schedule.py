"""How long a run is, its learning rates, and batches that do not fit into memory."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tcompress.errors import TrainingError
from tcompress.progress import Silent
from tcompress.training import finetuning, loop
from tcompress.training.loop import stopping
from tcompress.training.losses import _counts, is_out_of_memory
from tcompress.training.objectives import Observed, Observer
from tcompress.training.schedule import (
    HEALING_RATE,
    HEALING_STEPS,
    TASK_RATE,
    Pace,
    highest_rate,
    learning_rate,
    total_steps,
)
from tcompress.training.setup import drop_nothing
from tests.support.evaluation import classifier, headed, labelled_file, pairs_file
from tests.support.tiny import TINY, build
from tests.support.training import (
    assert_alike,
    batch_of,
    gradients,
    losses_of,
    memory_for,
    settings,
    small,
    small_encoder,
    texts,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def _rates(total: int = 100, **changes: Any) -> list[float]:
    options = settings(learning_rate=0.5, **changes)
    return [learning_rate(options, step, total, 0.5) for step in range(total)]


def test_the_default_rate_depends_on_what_is_trained() -> None:
    assert highest_rate(settings()) == HEALING_RATE
    assert highest_rate(settings(task="classification")) == TASK_RATE
    assert highest_rate(settings(task="classification", learning_rate=0.5)) == 0.5


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_rates_warm_up_and_fall(schedule: str) -> None:
    rates = _rates(warmup=0.1, schedule=schedule)
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert max(rates) == 0.5
    falling = rates[10:]
    assert falling == sorted(falling, reverse=True)
    if schedule == "constant":
        assert set(falling) == {0.5}
    else:
        assert falling[45] == pytest.approx(0.25)  # half the way
        assert 0 < falling[-1] < 0.01


def test_rates_without_warming_up() -> None:
    assert _rates(warmup=0)[0] == 0.5
    assert _rates(total=1, warmup=0.1) == [0.5]


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({"steps": 7, "epochs": 3}, 7),
        ({"steps": None}, HEALING_STEPS),
        ({"steps": None, "minutes": 5}, 10**9),
        ({"steps": None, "minutes": 5, "epochs": 1}, 12),
        ({"steps": None, "epochs": 2}, 24),
        ({"steps": None, "epochs": 0.01}, 1),
        ({"steps": None, "task": "sts"}, 36),
    ],
)
def test_number_of_steps(changes: dict[str, Any], total: int) -> None:
    assert total_steps(settings(**changes), 12) == total


def _possible(pace: Pace, step: int, seconds: float, validation: float = 0.0) -> int | None:
    pace.note(step, seconds)
    return pace.possible(validation)


def test_pace_finds_out_what_a_limit_allows() -> None:
    """The first step, which is slow, does not count; where all are slow, none is waited for."""
    pace = Pace(2.0)
    times = [3.0, *(10 + 0.5 * step for step in range(1, 40))]
    found = [_possible(pace, step, seconds) for step, seconds in enumerate(times)]
    assert found == [None] * 4 + [220] * 36
    slow = Pace(2.0)
    assert [_possible(slow, step, 3 + 20.0 * step) for step in range(6)] == [None, 5, 5, 5, 5, 5]
    assert pace.left(119) == 1
    assert pace.left(121) == -1
    pace.reserve(20)
    assert pace.left(119) == -19
    pace.reserve(1000)  # a half of the time at most
    assert pace.left(119) == -59
    assert Pace(2.0, spent=30).left(80) == 10  # of what went by before


@pytest.mark.parametrize("every", [10, 100])
def test_pace_knows_what_validations_take(every: int) -> None:
    """Steps of half a second, validations of eight, the first one before the first step."""
    pace, found = Pace(10.0, every), None
    for step in range(1, 40):
        seconds = 8 + 0.5 * step + 8 * ((step - 1) // every)
        found = found or _possible(pace, step, seconds, 8.0)
    assert 560 <= 8 + 0.5 * found + 8 * (found // every) <= 600


def test_what_is_left_is_right_from_the_tenth_step() -> None:
    """A minute of reading and validating before the first step counts for nothing after it."""
    pace = Pace(None, 50)
    for step in range(121):
        validations = max(0, step - 1) // 50
        pace.note(step, 60 + 2 * min(step, 1) + 0.5 * step + 8 * validations)
        left = pace.ahead(200, 8.0)
        if step >= 10:
            assert left == pytest.approx(0.5 * (200 - step) + 8 * (4 - step // 50))


def test_pace_without_a_limit() -> None:
    pace = Pace(None)
    assert [_possible(pace, step, 1e6) for step in range(40)] == [None] * 40
    assert pace.left(1e9) > 0


def _without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes on by a second whenever somebody looks."""
    for module in (finetuning, loop):
        monkeypatch.setattr(module, "time", Mock(perf_counter=count(1.0).__next__))


def test_a_limit_of_time_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_time(monkeypatch)
    folder, said = small_encoder(tmp_path), []
    options = {"steps": 10_000, "evaluate_every": 1000, "data": texts(tmp_path)}
    done = train(folder, tmp_path / "out", minutes=2, say=said.append, **options)
    (line,) = said
    told = int(line.removeprefix("2 minutes allow about ").removesuffix(" steps"))
    assert abs(told - done.facts.steps) <= 2
    assert 40 <= done.facts.steps <= 90  # of 120 seconds, half of them at most for what follows
    rates = [point.learning_rate for point in done.facts.curve]
    assert rates[-1] < 1e-4  # the schedule came to its end


@pytest.mark.slow
def test_a_short_limit_warms_up_and_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand steps by default, of which the time allows a dozen."""
    _without_time(monkeypatch)
    notes: list[str] = []
    monkeypatch.setattr(Silent, "advance", lambda _, amount=1, note="": notes.append(note))
    options = {"steps": 10_000, "evaluate_every": 1, "data": texts(tmp_path)}
    done = train(small_encoder(tmp_path), tmp_path / "out", minutes=1, **options)
    rates = [point.learning_rate or 0.0 for point in done.facts.curve]
    assert max(rates) > 0.5 * HEALING_RATE
    assert rates[-1] < 0.3 * HEALING_RATE
    left = [note.split()[-2] for note in notes if note.endswith("left")]
    assert left
    assert all(text == "1:00" or text.startswith("0:") for text in left)


@pytest.mark.slow
def test_a_limit_of_time_ends_slow_runs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_time(monkeypatch)
    done = train(
        small_encoder(tmp_path), tmp_path / "out", minutes=0.3, steps=99, data=texts(tmp_path)
    )
    assert 1 < done.facts.steps < 18
    assert done.facts.curve[-1].step == done.facts.steps


TERMS = {"hidden": 1.0, "logits": 0.5, "attention": 2.0}


@pytest.mark.often("pairs of texts-options3")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", {"objectives": {**TERMS, "embedding": 1.0}}),
        ("gpt2", {"objectives": TERMS}),
        ("mixtral", {"objectives": TERMS}),
        ("pairs of texts", {"task": "sts"}),
    ],
)
def test_gradients_do_not_depend_on_pieces(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if "task" in options:
        folder, data = small_encoder(tmp_path), {"source": [str(pairs_file(tmp_path / "p.jsonl"))]}
    else:
        folder, data = small(family, tmp_path), texts(tmp_path)
    losses = losses_of(folder, data=data, **options)
    batch = batch_of(losses, 6)
    value = float(losses.gradients(batch, 1, alone=False))
    wanted = gradients(losses.setup.model)
    for parts in (2, 3, 4, 6):
        losses.setup.model.zero_grad()
        found = losses.gradients(batch, parts, alone=False)
        assert float(found) == pytest.approx(value, rel=1e-5)
        assert_close(gradients(losses.setup.model), wanted, rtol=1e-3, atol=1e-6)


def test_validation_does_not_depend_on_batches(tmp_path: Path) -> None:
    losses = losses_of(small("bert", tmp_path), data=texts(tmp_path))
    assert losses.validate(1) == pytest.approx(losses.validate(8), rel=1e-5)


@pytest.mark.slow
def test_too_little_memory_halves_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, how = small_encoder(tmp_path), {"data": texts(tmp_path), "learning_rate": 1e-3}
    enough = train(folder, tmp_path / "enough", **how)
    tried, said = memory_for(3, monkeypatch), []
    done = train(folder, tmp_path / "out", say=said.append, **how)
    assert said == [
        "memory ran out; going on with 4 examples at a time, which changes nothing else",
        "memory ran out; going on with 2 examples at a time, which changes nothing else",
    ]
    assert tried == [8, 4, *[2] * 16]
    assert_alike(done, enough)


def test_too_little_memory_to_validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, inner = small_encoder(tmp_path), Observer.run
    options = {"data": texts(tmp_path, 80), "learning_rate": 1e-3}
    enough = train(losses, tmp_path / "enough", **options)
    tried: list[int] = []

    def run(self: Observer, batch: dict[str, Tensor], runner: nn.Module | None = None) -> Observed:
        if runner is not None and not torch.is_grad_enabled():
            tried.append(len(batch["input_ids"]))
            if tried[-1] > 4:
                raise torch.OutOfMemoryError("out of memory")
        return inner(self, batch, runner)

    monkeypatch.setattr(Observer, "run", run)
    done = train(losses, tmp_path / "out", **options)
    assert tried == 3 * [8, 4, 4, 4, 4]
    assert_alike(done, enough)


def test_memory_that_never_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tried = small_encoder(tmp_path), memory_for(0, monkeypatch)
    options: dict[str, Any] = {"accumulate": 2, "learning_rate": 1e-3}
    with pytest.raises(TrainingError) as failed:
        train(folder, tmp_path / "out", data=texts(tmp_path), **options)
    assert tried == [4, 2, 1]
    assert failed.value.message == "memory ran out at step 1 with 1 example at a time"
    assert "--max-length" in (failed.value.hint or "")
    assert "--gradient-checkpointing" in (failed.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_which_errors_are_lack_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("any"))
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    )
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))


def test_other_errors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, fail = small_encoder(tmp_path), Mock(side_effect=RuntimeError("a bug"))
    monkeypatch.setattr("tcompress.training.losses.Losses._loss", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        train(folder, tmp_path / "out", data=texts(tmp_path))


def test_ctrl_c_is_heard_between_steps() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with stopping(said.append) as asked:
        assert not asked.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.is_set()
        assert said == ["stopping after this step"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_do_not_hear_signals() -> None:
    def work() -> bool:
        with stopping(lambda text: None) as asked:
            return asked.is_set()

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(work).result()


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "bart", "deberta-v2", "vit"])
def test_dropout_off(family: str) -> None:
    """A model in training computes what it computes in evaluation."""
    model: nn.Module = build(family)
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.5)
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    inputs = TINY[family].inputs(2, 8, 0)
    with torch.no_grad():
        wanted = model.eval()(**inputs).logits
        assert not torch.allclose(model.train()(**inputs).logits, wanted)
        drop_nothing(model)
        assert_close(model.train()(**inputs).logits, wanted)


def test_blocks_that_are_compared_are_not_dropped(tmp_path: Path) -> None:
    model = headed("bart", tmp_path, "BartModel", encoder_layerdrop=0.9, decoder_layerdrop=0.9)
    data = {"source": [str(pairs_file(tmp_path / "pairs.jsonl"))]}
    data["columns"] = {"source": "sentence1", "target": "sentence2"}
    how = {"task": "seq2seq", "teacher": [str(model)], "dropout": True, "data": data}
    assert train(model, tmp_path / "out", **how).facts.steps == 4


def test_a_teacher_that_no_objective_asks_is_not_run(tmp_path: Path) -> None:
    model = classifier(tmp_path / "model")
    how = {"task": "classification", "teacher": str(model), "objectives": {"task": 1.0}}
    data = {"source": [str(labelled_file(tmp_path / "rows.jsonl"))]}
    assert train(model, tmp_path / "out", data=data, **how).facts.teacher is None


def test_scores_of_minus_a_hundred_count() -> None:
    batch = {"input_ids": torch.ones(3, 2), "labels": torch.full((3,), -100.0)}
    assert _counts(batch)["targets"] == 3.0
