"""A table of token vectors beside what `compress` makes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tcompress.artifact.reader import open_checked
from tcompress.compression import static_row
from tcompress.compression.attempts import Goal
from tcompress.compression.forecast import forecast
from tcompress.compression.static_row import (
    ROW_BYTES,
    TABLE,
    StaticModule,
    is_shown,
    table,
    token_vectors,
    words,
)
from tcompress.compression.table import Row
from tcompress.data.inputs import inputs_of
from tcompress.data.sentences import PLAIN
from tcompress.hf.opening import load_model
from tcompress.options.compress_options import Compress
from tcompress.options.read import read
from tests.support.cli import completed, run
from tests.support.evaluation import classifier, encoder, pairs_file
from tests.support.model_folders import sentences, text_file

FAR = {"size": "3MB", "runtime": "torch"}


@pytest.mark.parametrize(
    ("make", "options", "shown"),
    [
        (encoder, FAR, True),
        (encoder, {"speedup": 16.0}, True),
        (encoder, {"size": "5MB", "speedup": 15.0}, False),
        (encoder, {"max_loss": 0.01}, False),
        (classifier, FAR, False),
    ],
)
def test_only_encoders_far_from_the_goal_have_the_row(
    tmp_path: Path, make: Callable[[Path], Path], options: dict[str, Any], shown: bool
) -> None:
    source, settings = open_checked(str(make(tmp_path / "model"))), read(Compress, options)
    assert is_shown(source, settings) == shown
    assert (TABLE in forecast(source, settings).stages[-1]) == shown


def test_a_text_is_the_weighted_mean_of_its_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.0, 0.5, 1, 0.25, 1, 1, 1, 1, 1], dtype=torch.float64)
    module = StaticModule(None, vectors, weights)
    assert module.nbytes == 9 * (4 + ROW_BYTES)
    ids = torch.tensor([[0, 1, 2, 3, 0], [0, 4, 0, 8, 8]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    hidden = module(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (0.5 * vectors[1] + vectors[2] + 0.25 * vectors[3]) / 1.75
    step = vectors.abs().max() / 127
    for states, expected in zip(hidden, (mean, vectors[4]), strict=True):
        assert states.shape == (5, 4)
        assert torch.allclose(states, states[:1].expand(5, 4))
        assert (states[0] - expected).abs().max() < step
    assert not module(input_ids=torch.zeros(1, 3).long()).last_hidden_state.any()


def test_frequent_tokens_weigh_less_and_silent_ones_nothing() -> None:
    vectors = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([50.0, 8, 0, 2, 0, 0])
    for given in (counts, None):
        weights = table(None, vectors, given, [0], 3).weights
        assert weights[0] == 0
        assert weights[1] < weights[3]
    module = table(None, vectors, counts, [0], 4)
    # Cosines turn about the mean of all texts, to which silent tokens add nothing.
    parts = torch.tensor([0, 0.8, 0, 0.2, 0, 0]) * module.weights.float()
    centred = vectors - parts / parts.sum() @ vectors
    restored = module.values * module.scales[:, None]
    assert torch.allclose(restored @ restored.T, centred @ centred.T, atol=0.1)


def test_a_token_is_embedded_as_a_text_of_its_own(tmp_path: Path) -> None:
    source = open_checked(str(encoder(tmp_path / "model")))
    dense, reader = load_model(source), PLAIN.reader(source, inputs_of(source), None)
    [vectors] = token_vectors(dense, reader.tokenizer, PLAIN, range(100))
    [row] = reader.encode([sentences(1)[0].split()[0]])
    hidden = dense(**{name: value[None] for name, value in row.items()}).last_hidden_state
    assert len(row["input_ids"]) == 3
    assert torch.allclose(vectors[row["input_ids"][1]], hidden[0].mean(0), atol=1e-5)


def test_it_is_said_where_the_table_is_no_worse() -> None:
    shipped = Row("this model", "torch", 900, 16.0, quality=0.8, agreement=0.9)
    row = Row(TABLE, "torch", 800, 80.0, quality=0.81, agreement=0.7)
    [text] = words(Goal(speedup=15.0, bytes=1000), shipped, [row])
    assert "quality 0.8100, not 0.8000" in text
    assert not words(Goal(bytes=700), shipped, [row])
    assert not words(Goal(bytes=1000), Row("this model", "torch", 900, 16.0, quality=0.9), [row])
    assert not words(Goal(bytes=1000), shipped, [])


def test_compress_measures_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dense = encoder(tmp_path / "bert") / "model.safetensors"
    text_file(tmp_path / "texts.txt", sentences(60))
    pairs_file(tmp_path / "pairs.jsonl", 40)
    before = {path.name: path.read_bytes() for path in dense.parent.iterdir()}
    size = f"{dense.stat().st_size}B"  # nothing is cut, nothing healed
    typed = ("compress", "bert", "--data", "texts.txt", "--smoke", "--runtime", "torch", "--json")
    with monkeypatch.context() as short:
        short.setattr(static_row, "SHARE", 0.0)
        done = run(*typed, "--size", size, "-o", "hurried")
        assert TABLE not in {row["name"] for row in done.document["rows"]}
        assert f"no {TABLE}: 100 tokens" in done.err
    for more in ((), ("--task", "sts", "--test-data", "pairs.jsonl")):
        done = completed(*typed, "--size", size, *more, "-o", f"small{len(more)}")
        rows = {row["name"]: row for row in done.document["rows"]}
        assert rows[TABLE]["bytes"] == 100 * (32 + ROW_BYTES)
        assert -1 <= rows[TABLE]["agreement"] < 1
        assert (rows[TABLE]["quality"] is None) == (not more)
        assert rows["this model"]["agreement"] == pytest.approx(1) or more
    done = run(*typed, "--size", "1000B", "-o", "nothing")
    assert done.code == 2
    assert f"or take a {TABLE}" in done.err
    assert before == {path.name: path.read_bytes() for path in dense.parent.iterdir()}
