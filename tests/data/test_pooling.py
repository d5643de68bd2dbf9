"""One embedding of a sentence's tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from tcompress.data.sentences import Pooling, SentenceEncoder
from tcompress.errors import DataError
from tcompress.models import SourceModel
from tests.support.evaluation import encoder
from tests.support.model_folders import edited

MODES = ("mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, ("cls",)),
        ({"pooling_mode_max_tokens": True}, ("max",)),
        ({"pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ("cls", "mean")),
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({}, ("mean",)),
        (None, ("mean",)),
    ],
)
def test_modes_of_a_model(
    config: dict[str, Any] | None, modes: tuple[str, ...], tmp_path: Path
) -> None:
    folder = encoder(tmp_path / "bert", pooling=config)
    found = SentenceEncoder.of(SourceModel.open(str(folder))).pooling
    assert found == Pooling(modes, stated=config is not None)


def test_what_follows_the_pooling_matters_only_where_it_is_asked(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "bert", pooling={"pooling_mode": "cls"})
    with edited(folder / "modules.json") as modules:
        modules[-1]["type"] = "sentence_transformers.models.CNN"
    source = SourceModel.open(str(folder))
    with pytest.raises(DataError, match="modules CNN after its transformer"):
        SentenceEncoder.of(source)
    assert SentenceEncoder.of(source, last=False).pooling.modes == ("cls",)


def _expected(rows: Tensor, how: str) -> Tensor:
    steps = torch.arange(1.0, len(rows) + 1)[:, None]
    return {
        "mean": rows.mean(0),
        "cls": rows[0],
        "max": rows.amax(0),
        "lasttoken": rows[-1],
        "weightedmean": (rows * steps).sum(0) / steps.sum(),
        "mean_sqrt_len_tokens": rows.sum(0),
    }[how]


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding_does_not_count(how: str, dtype: torch.dtype) -> None:
    states, lengths = torch.randn(3, 6, 4), (6, 2, 1)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    wanted = [_expected(row[:length], how) for row, length in zip(states, lengths, strict=True)]
    rows = SentenceEncoder(Pooling((how,)))(states, mask.to(dtype))
    assert_close(rows, normalize(torch.stack(wanted), dim=-1))


def test_several_modes_are_joined() -> None:
    states, mask = torch.randn(3, 6, 4), torch.ones(3, 6)
    joined = torch.cat([states.amax(1), states.mean(1)], -1)
    assert_close(Pooling(("max", "mean"))(states, mask), joined)


@pytest.mark.parametrize("how", MODES)
def test_a_row_of_padding_is_finite(how: str) -> None:
    states = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    rows = SentenceEncoder(Pooling((how,)))(states, mask)
    rows.sum().backward()
    assert rows.isfinite().all()
    assert states.grad.isfinite().all()
