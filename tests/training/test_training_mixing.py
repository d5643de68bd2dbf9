"""Healing ends where the weights between start and end agree best with the teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tcompress.blockwise.output_sampler import VARIANTS, change_of_likeness
from tcompress.training import mixing
from tcompress.training.checkpoints import Checkpoints
from tcompress.training.mixing import SHARES, chosen, is_worse
from tests.support.training import small_encoder, texts, train, weights

NEAR = [1.0, 1.2, 0.9, 1.1]


def _less(share: float) -> list[float]:
    return [share * value for value in NEAR]


def test_the_least_change_is_chosen() -> None:
    changes = {0.0: NEAR, 0.25: _less(0.8), 0.5: _less(0.6), 0.75: _less(0.7), 1.0: _less(0.9)}
    assert chosen({share: {"a": own} for share, own in changes.items()}) == 0.5


def test_sources_count_by_the_factor_that_they_change_by() -> None:
    large = [1000 * value for value in NEAR]
    changes = {
        0.0: {"a": NEAR, "b": large},
        0.5: {"a": _less(0.5), "b": [0.98 * value for value in large]},
        1.0: {"a": _less(0.9), "b": [0.9 * value for value in large]},
    }
    assert chosen(changes) == 0.5


def test_of_shares_that_are_as_near_the_smallest_is_chosen() -> None:
    """Better in two of four batches by as much as it is worse in the others, and a bit."""
    near = [0.5 + value for value in (0.1, -0.1, 0.1, -0.09)]
    changes = {0.0: NEAR, 0.5: near, 1.0: [0.5] * 4}
    assert chosen({share: {"a": own} for share, own in changes.items()}) == 0.5
    assert chosen({0.0: {"a": NEAR}, 0.5: {"a": [0.53] * 4}, 1.0: {"a": [0.5] * 4}}) == 1.0


def test_a_source_that_agrees_more_is_not_harmed() -> None:
    changes = {0.0: {"a": NEAR, "b": NEAR}, 1.0: {"a": _less(0.5), "b": [v + 0.1 for v in NEAR]}}
    before, lower, higher = ({"a": 0.9, "b": own} for own in (0.7, 0.69, 0.75))
    assert chosen(changes) == chosen(changes, {0.0: before, 1.0: lower}) == 0.0
    assert chosen(changes, {0.0: before, 1.0: higher}) == 1.0


def test_what_harms_a_source_is_not_chosen() -> None:
    changes = {
        0.0: {"a": NEAR, "b": NEAR},
        0.5: {"a": _less(0.7), "b": NEAR},
        1.0: {"a": _less(0.1), "b": _less(1.2)},
    }
    assert chosen(changes) == 0.5
    assert chosen({share: own for share, own in changes.items() if share != 0.5}) == 0.0


def test_worse_is_what_differences_of_batches_leave_no_doubt_of() -> None:
    assert is_worse(NEAR, [value + 0.1 for value in NEAR])
    assert not is_worse(NEAR, NEAR)
    assert not is_worse(NEAR, _less(0.9))
    assert not is_worse([1.0, 1.0, 1.0, 1.0], [0.5, 1.6, 0.6, 1.5])
    assert is_worse([1.0], [1.1])


@pytest.mark.often("0.75")
@pytest.mark.parametrize("share", SHARES)
def test_the_weights_that_were_chosen_are_written(
    share: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, seen = small_encoder(tmp_path), {}
    monkeypatch.setattr(mixing, "chosen", lambda changes, agreements: share)
    best = Checkpoints.best

    def kept(own: Checkpoints, step: int) -> dict[str, torch.Tensor]:
        seen[step] = best(own, step)
        return seen[step]

    monkeypatch.setattr(Checkpoints, "best", kept)
    facts = train(folder, tmp_path / "out", data=texts(tmp_path), steps=6).facts
    assert facts.best_step == 6
    assert facts.share == share
    written = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(folder / "model.safetensors")
    changed = [name for name in written if not torch.equal(written[name], before[name])]
    assert bool(changed) == (share > 0)
    for name, value in seen[0].items():
        assert torch.equal(before[name], value)
    if share > 0:  # the number of the record is that of what was written
        again = {"steps": 1, "learning_rate": 1e-12}
        measured = train(tmp_path / "out", tmp_path / "again", data=texts(tmp_path), **again).facts
        assert measured.curve[0].validation == pytest.approx(facts.best, rel=1e-4)


def test_too_little_memory_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer samples at a time then; what was trained is not lost."""
    sizes, inner = [], mixing.OutputComparison.add

    def add(self: Any, source: str, *outputs: Any) -> float:
        sizes.append(len(outputs[-1]["input_ids"]) // VARIANTS)
        if sizes[-1] > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return inner(self, source, *outputs)

    monkeypatch.setattr(mixing.OutputComparison, "add", add)
    monkeypatch.setattr(mixing, "chosen", lambda *_: 1.0)
    folder, how = small_encoder(tmp_path), {"data": texts(tmp_path, 200), "steps": 6}
    train(folder, tmp_path / "out", **how)
    assert sizes[:2] == [16, 8]
    assert {*sizes[2:]} == {4}
    monkeypatch.undo()
    monkeypatch.setattr(mixing, "chosen", lambda *_: 1.0)
    train(folder, tmp_path / "enough", **how)
    assert weights(tmp_path / "out") == weights(tmp_path / "enough")


def test_what_healing_did_is_told_by_source(tmp_path: Path) -> None:
    """Files of one name count apart."""
    paths = [tmp_path / name for name in ("one.txt", "a/two.txt", "b/two.txt")]
    lines = [f"w{place % 90} w{3 * place % 90} w{place % 7}" for place in range(180)]
    for number, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines[60 * number :][:60]))
    folder = small_encoder(tmp_path)
    facts = train(folder, tmp_path / "out", data={"source": [*map(str, paths)]}).facts
    names = [own.name.partition(":")[0] for own in facts.sources]
    assert names == ["one.txt", "two.txt", "two.txt", "builtin text"]
    assert len({own.name for own in facts.sources}) == 4
    for own in facts.sources:
        assert own.start is not None
        assert -1 <= own.kept <= 1


@pytest.mark.parametrize("spread", [1.0, 0.3, 0.01])
def test_texts_that_are_all_alike_are_not_near(spread: float) -> None:
    """How far likenesses are from the dense model's does not shrink with their own spread."""
    dense = torch.randn(VARIANTS * 16, 8, generator=torch.Generator().manual_seed(0)).double()
    noise = torch.randn(dense.shape, generator=torch.Generator().manual_seed(1)).double()

    def collapsed(vectors: torch.Tensor, spread: float) -> torch.Tensor:
        """Add what all texts have in common: cosines become 1 - spread² (1 - cosine)."""
        shared = vectors.new_full((len(vectors), 1), (1 - spread**2) ** 0.5)
        return torch.cat([spread * torch.nn.functional.normalize(vectors, dim=-1), shared], 1)

    change = change_of_likeness(dense, collapsed(dense + noise, spread))
    assert change == pytest.approx(change_of_likeness(dense, dense + noise), rel=1e-6)
    assert change_of_likeness(dense, collapsed(dense, spread)) == pytest.approx(0, abs=1e-12)
