"""Weights and data at the limits: every method either gives a result that loads, or says why not.

All combinations run with `-m fuzz`, a few of them always.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from tcompress.artifact.reader import Artifact
from tcompress.conversion.converter import convert
from tcompress.data.calibration import CalibrationData
from tcompress.errors import TCompressError
from tcompress.options import Convert
from tests.support.cli import run
from tests.support.model_folders import save_tokenizer
from tests.support.own_models import REPLACEMENTS

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
LENGTH, WORDS = 12, 99


def _randn(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def _of_rank(rank: int) -> Callable[[Tensor, int], Tensor]:
    def make(like: Tensor, seed: int) -> Tensor:
        whole = _randn(like, seed)
        return whole[:, :rank] @ whole[:rank] / like.shape[1]

    return make


def _between(size: float) -> Callable[[Tensor, int], Tensor]:
    return lambda like, seed: _randn(like, seed).clamp(-1, 1).mul(size)


def _with_one(value: float) -> Callable[[Tensor, int], Tensor]:
    """One number of one tensor: of the first layer in the feed-forward part of the second block."""

    def make(like: Tensor, seed: int) -> Tensor:
        made = _randn(like, seed) / like.shape[1] ** 0.5
        if seed == 23:
            made[3, 5] = value
        return made

    return make


# By name: how a matrix is made, and the dtype of the checkpoint.
WEIGHTS: Mapping[str, tuple[Callable[[Tensor, int], Tensor], torch.dtype]] = {
    "rank1": (_of_rank(1), torch.float32),
    "rank2": (_of_rank(2), torch.float32),
    "zero": (lambda like, _: torch.zeros_like(like), torch.float32),
    "constant": (lambda like, _: torch.full_like(like, 0.3), torch.float32),
    "tiny": (_between(1e-38), torch.float32),
    "huge": (_between(3e38), torch.float32),
    "half_most": (_between(65504), torch.float16),
    "half_least": (_between(3e-7), torch.float16),
    "nan": (_with_one(torch.nan), torch.float32),
    "infinite": (_with_one(torch.inf), torch.float32),
}
TARGET = {"target": 0.5}
METHODS: Mapping[str, dict[str, Any]] = {
    "svd": {"method": {"name": "svd"}, **TARGET},
    "lprod-dct": {"method": {"name": "lprod", "p": 4, "transform": "dct"}},
    "lprod-fitted": {"method": {"name": "lprod", "p": 4, "transform": "fitted", "block": 4}},
    "lprod-residual": {"method": {"name": "lprod", "p": 4}, "residual_rank": 2},
    "lprod-truncated": {"method": {"name": "lprod", "p": 2, "transform": "dct", "tubal_rank": 2}},
    "tt": {"method": {"name": "tt", "order": 3}, **TARGET},
    "qtt": {"method": {"name": "qtt", "rank": 3}},
    "tucker": {"method": {"name": "tucker", "share": "none"}, **TARGET},
    "tucker-shared": {"method": {"name": "tucker", "share": "model"}, **TARGET},
    "auto": {"method": {"name": "auto"}, **TARGET},
    "embeddings": {"embeddings": {"method": {"name": "svd"}, **TARGET}},
    **{
        f"attention-{name}": {"attention": REPLACEMENTS[name]}
        for name in ("tga", "tsa", "folded", "tam", "tucker", "multilinear")
    },
}


def _batches(*batches: Tensor) -> CalibrationData:
    drawn = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches]
    rows = sum(map(len, batches))
    return CalibrationData(drawn, [len(drawn) - 1], "tiny", rows, rows * LENGTH, str(batches))


def _words(*shape: int) -> Tensor:
    return torch.randint(5, WORDS, shape, generator=torch.Generator().manual_seed(len(shape)))


DATA: Mapping[str, Callable[[], CalibrationData | None]] = {
    "none": lambda: None,
    "words": lambda: _batches(_words(4, LENGTH), _words(4, LENGTH) + 1, _words(2, LENGTH)),
    "one_token": lambda: _batches(torch.tensor([[7]]), torch.tensor([[7]])),
    "one_sentence": lambda: _batches(_words(LENGTH).expand(450, -1), _words(LENGTH).expand(50, -1)),
}


ALWAYS = (
    ("constant", "tucker-shared", "none", "bfloat16"),
    ("zero", "attention-tucker", "words", "float16"),
    ("rank1", "tucker-shared", "one_sentence", None),
)


def _cases() -> Iterator[Any]:
    """All combinations; the default tier has those of `ALWAYS`."""
    combinations = [
        *product(WEIGHTS, METHODS, ["none"], ["float32", "float16", "bfloat16"]),
        *product(WEIGHTS, METHODS, ["words"], ["float32", "float16"]),
        *product(["rank1", "zero", "half_most"], METHODS, ["one_token", "one_sentence"], [None]),
    ]
    for case in combinations:
        yield pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.fuzz)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of dense models by what is special about their weights."""

    @cache
    def of(name: str) -> Path:
        make, dtype = WEIGHTS[name]
        config = BertConfig(
            vocab_size=WORDS + 1, num_hidden_layers=2, max_position_embeddings=16, **SIZES
        )
        torch.manual_seed(0)
        model: Any = BertForMaskedLM(config)
        with torch.no_grad():
            for seed, parameter in enumerate(model.parameters()):
                if parameter.ndim == 2:
                    parameter.copy_(make(parameter, seed))
                elif "nan" not in name:
                    parameter.add_(_randn(parameter, seed), alpha=0.1)
        folder = tmp_path_factory.mktemp("dense") / name
        model.to(dtype).save_pretrained(folder)
        return folder

    return of


@pytest.mark.parametrize(("weights", "method", "data", "dtype"), [*_cases()])
def test_a_result_that_loads_or_one_clear_line(
    weights: str,
    method: str,
    data: str,
    dtype: str | None,
    dense: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    chosen = {"calibration": {"source": "none" if data == "none" else "builtin"}, "dtype": dtype}
    recipe = Convert.model_validate({**chosen, **METHODS[method]})
    source, output = dense(weights), tmp_path / "out"
    try:
        done = convert(str(source), recipe, output, data=DATA[data]())
    except TCompressError as error:
        assert_clear(error, output)
        return
    assert weights not in ("nan", "infinite")
    for errors in Artifact.open(done.folder).manifest.fit.values():  # type: ignore[union-attr]
        assert all(isfinite(value) and value >= 0 for value in errors.values())
    stored = [t for path in done.folder.glob("*.safetensors") for t in load_file(path).values()]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in stored)
    # Attention without a softmax squares the largest numbers of float16 once more.
    if not (weights == "half_most" and method.startswith("attention")):
        assert _is_finite(done.folder) or not _is_finite(source)


def assert_clear(error: TCompressError, output: Path) -> None:
    """One sentence that says where, a hint, and nothing left behind."""
    assert error.exit_code == 2
    assert "\n" not in error.message
    assert "`" in error.message or "what the model puts out" in error.message
    assert error.hint
    assert not list(output.parent.iterdir())


@cache
def _is_finite(folder: Path) -> bool:
    with torch.no_grad():
        model = BertForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
        return bool(torch.isfinite(model(input_ids=_words(2, LENGTH)).logits).all())


@pytest.mark.often("empty-svd")
@pytest.mark.parametrize("method", ["svd", pytest.param("auto", marks=pytest.mark.fuzz)])
@pytest.mark.parametrize(
    ("text", "code"),
    [("", 2), (" \n\n\t\n", 2), ("one", 0), ("one two three four five\n" * 500, 0)],
    ids=["empty", "blank", "one_token", "one_sentence"],
)
def test_calibration_text(
    text: str, code: int, method: str, dense: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, data = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(dense("half_least"), folder)
    save_tokenizer(folder)
    data.write_text(text, encoding="utf-8")
    options = ("--method", method, "--target", "0.5", "--calib", data, "-o", tmp_path / "out")
    done = run("convert", folder, *options)
    assert (done.code, "unexpected" in done.err) == (code, False), done.err
    assert (tmp_path / "out").is_dir() is (code == 0)
    if code == 0:
        assert _is_finite(tmp_path / "out")


@pytest.mark.slow
def test_scores_that_overflow(dense: Callable[[str], Path], tmp_path: Path) -> None:
    """The command line says so in a line, and leaves nothing."""
    model: Any = BertForMaskedLM.from_pretrained(dense("rank2"))
    with torch.no_grad():
        model.cls.predictions.bias.fill_(3e38)
        model.cls.predictions.transform.LayerNorm.bias.fill_(3e38)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    for method in ("svd", "auto"):
        options = ("--method", method, "--target", "0.5", "--calib", "builtin")
        done = run("convert", tmp_path / "model", *options, "-o", tmp_path / "out")
        assert done.code == 2
        assert "error: what the model puts out on the calibration data holds NaN" in done.err
        assert not (tmp_path / "out").exists()
