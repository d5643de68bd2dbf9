"""Models with another attention are healed, taught and measured like others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tcompress.artifact.reader import Artifact
from tcompress.attention.module import CHILD, MechanismModule
from tcompress.reporting.model_report import report_of
from tcompress.roles import anatomy_of
from tcompress.training.objectives import Observer
from tests.support.cli import run
from tests.support.hosts import HOSTS, MECHANISMS
from tests.support.training import (
    batch_of,
    gradients,
    losses_of,
    needs_pictures,
    pictures,
    small,
    texts,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def _data(family: str, folder: Path) -> dict[str, Any]:
    if needs_pictures(family):
        return {"source": [str(pictures(folder / "pictures"))]}
    return texts(folder)


@pytest.mark.parametrize(
    ("family", "name", "method"),
    [
        ("bert", "tga", None),
        ("bert", "tucker", {"name": "lprod", "p": 4}),
        ("bert", "folded", None),
        ("gpt2", "tsa", None),
        ("llama", "tga", {"name": "svd", "rank": 4}),
        ("vit", "hot", None),
        ("vit", "favor", {"name": "lprod", "p": 4}),
    ],
)
def test_a_step_of_healing_trains_the_mechanism(
    family: str, name: str, method: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = small(family, tmp_path, method=method, attention=MECHANISMS[name])
    data = _data(family, tmp_path)
    losses = losses_of(folder, data=data)
    assert 0 < losses.gradients(batch_of(losses), 1, alone=False) < float("inf")
    own = [m for m in losses.setup.model.modules() if isinstance(m, MechanismModule)]
    assert len(own) == 2
    for module in own:
        found = gradients(module)
        assert found
        assert all(value.isfinite().all() for value in found.values())
        assert any(value.any() for value in found.values())
    done = train(folder, tmp_path / "out", steps=2, data=data)
    before, after = Artifact.open(folder), Artifact.open(done.folder)
    assert after.attention == before.attention
    names = [key for entry in after.attention for key in entry.tensor_shapes]
    moved = [key for key in names if not before.store.tensor(key).equal(after.store.tensor(key))]
    assert bool(moved) == (after.manifest.training[-1].best_step > 0)  # the best weights are kept
    kind = type(HOSTS[family].build())
    _, info = kind.from_pretrained(done.folder, output_loading_info=True)
    assert not any(info.values())
    report = report_of(done.folder)
    assert report.attention == after.attention
    assert report.parameters.total.now == after_parameters(kind, done.folder)


def after_parameters(kind: Any, folder: Path) -> int:
    return sum(parameter.numel() for parameter in kind.from_pretrained(folder).parameters())


def test_only_what_is_new_can_be_trained(tmp_path: Path) -> None:
    folder = small("bert", tmp_path, method=None, attention=MECHANISMS["tsa"])
    losses = losses_of(folder, data=texts(tmp_path), train="rewritten")
    chosen = [name for name, p in losses.setup.model.named_parameters() if p.requires_grad]
    assert len(chosen) == 4
    assert all(f".{CHILD}." in name for name in chosen)


def test_relations_leave_dropped_queries_out(tmp_path: Path) -> None:
    folder = small("bert", tmp_path, method=None, attention=MECHANISMS["tga"])
    losses = losses_of(folder, data=texts(tmp_path), objectives={"attention": 1.0})
    assert 0 <= losses.gradients(batch_of(losses), 1, alone=False) < float("inf")
    model = losses.setup.model
    observer = Observer(model, anatomy_of(HOSTS["bert"].build()), projections=True)
    seen = observer.run(HOSTS["bert"].inputs(batch=2, length=8, seed=0))
    assert set(seen.projections) == {"k", "v"}


def test_a_model_with_another_attention_is_timed(tmp_path: Path) -> None:
    folder = small("bert", tmp_path, method=None, attention=MECHANISMS["tam"])
    done = run(
        "bench", folder, "--against", tmp_path / "bert", "--batch", 1, "--length", 8,
        "--repeats", 1, "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
