"""One embedding of a sentence's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tcompress.reading.pooling import pooled, pooling_of
from tcompress.source import SourceModel
from tests.support.evaluation import encoder

MODES = ("mean", "cls", "max", "last")


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "weighted"}, "mean"),
        ({}, "mean"),
        (None, "mean"),
    ],
)
def test_mode_of_a_model(config: dict[str, Any] | None, mode: str, tmp_path: Path) -> None:
    folder = encoder(tmp_path / "bert", pooling=config)
    assert (folder / "1_Pooling").exists() == (config is not None)
    assert pooling_of(SourceModel.open(str(folder))) == mode


def test_mode_of_a_module_with_another_number(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "bert")
    (folder / "2_Pooling").mkdir()
    (folder / "2_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    assert pooling_of(SourceModel.open(str(folder))) == "last"


def _expected(rows: Tensor, how: str) -> Tensor:
    return {"mean": rows.mean(0), "cls": rows[0], "max": rows.amax(0), "last": rows[-1]}[how]


@pytest.mark.parametrize("how", MODES)
def test_padding_does_not_count(how: str) -> None:
    states, lengths = torch.randn(3, 6, 4), (6, 2, 1)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    wanted = [_expected(row[:length], how) for row, length in zip(states, lengths, strict=True)]
    assert_close(pooled(states, mask, how), torch.stack(wanted))


@pytest.mark.parametrize("how", MODES)
def test_a_row_of_padding_is_finite(how: str) -> None:
    states = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    rows = pooled(states, mask, how)
    rows.sum().backward()
    assert rows.isfinite().all()
    assert states.grad is not None
    assert states.grad.isfinite().all()
