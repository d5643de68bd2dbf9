"""Numbers of sentence encoders are those of sentence-transformers, which runs beside us here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

import tcompress
from tests.support.model_folders import text_file
from tests.support.sentence_folders import FOLDERS, HOSTS, OTHERS, similar_pairs

ALL = FOLDERS | OTHERS | HOSTS

pytestmark = [
    pytest.mark.doors,
    pytest.mark.usefixtures("one_thread"),
    # What sentence-transformers and scikit-learn warn of is not ours.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return similar_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl")


def _columns(pairs: Path) -> tuple[list[str], list[str], list[float]]:
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    one, two, scores = ([row[key] for row in rows] for key in ("sentence1", "sentence2", "score"))
    return one, two, scores


def _opened(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def _theirs(folder: Path, pairs: Path) -> dict[str, float]:
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    scores = EmbeddingSimilarityEvaluator(*_columns(pairs), write_csv=False)(_opened(folder))
    return {
        name: next(value for key, value in scores.items() if key.startswith(name))
        for name in ("spearman", "pearson")
    }


def _ours(folder: Path, pairs: Path, **options: Any) -> dict[str, float]:
    options = {"task": "sts", "data": str(pairs), "bootstrap": 0, **options}
    (scores,) = tcompress.evaluate([folder], save=False, **options)
    return {metric.name: metric.value for metric in scores.sets[0].metrics}


@pytest.mark.parametrize("case", [*FOLDERS, *OTHERS, *HOSTS])
def test_similarity(case: str, pairs: Path, tmp_path: Path) -> None:
    folder = ALL[case](tmp_path / "model")
    ours, theirs = _ours(folder, pairs), _theirs(folder, pairs)
    print(f"\n{case}: {ours['spearman']:.6f} here, {theirs['spearman']:.6f} there")  # noqa: T201
    assert ours == pytest.approx(theirs, abs=5e-5)


@pytest.mark.parametrize(
    "case", ["prompts", "prompt left out", "passage", "euclidean", "manhattan"]
)
def test_retrieval(case: str, pairs: Path, tmp_path: Path) -> None:
    folder = ALL[case](tmp_path / "model")
    model, (one, two, _) = _opened(folder), _columns(pairs)
    documents = list(dict.fromkeys(two))
    alike = model.similarity(model.encode_query(one), model.encode_document(documents)).numpy()
    right = alike[np.arange(len(one)), [documents.index(text) for text in two]]
    ranks = (alike >= right[:, None]).sum(1)
    ours = _ours(folder, pairs, task="retrieval")
    assert ours["recall@1"] == pytest.approx((ranks == 1).mean())
    assert ours["mrr@10"] == pytest.approx(((ranks <= 10) / ranks).mean(), abs=5e-5)


@pytest.mark.parametrize("case", ["dense", "old layout", "prompts", *HOSTS])
def test_what_is_converted_is_opened_there(case: str, pairs: Path, tmp_path: Path) -> None:
    folder = ALL[case](tmp_path / "model")
    made = tmp_path / "made"
    tcompress.convert(folder, method="svd", target=0.25, output=made, calibration={"samples": 8})
    assert _ours(made, pairs) == pytest.approx(_theirs(made, pairs), abs=5e-5)
    assert _ours(made, pairs) != pytest.approx(_ours(folder, pairs), abs=1e-3)


@pytest.mark.parametrize("case", ["dense", "old layout", "prompt left out", "qwen3", "t5"])
def test_what_is_saved_there_is_read_here(case: str, pairs: Path, tmp_path: Path) -> None:
    """In the layout and with the names of today."""
    folder = ALL[case](tmp_path / "model")
    _opened(folder).save(str(tmp_path / "saved"))
    assert _ours(tmp_path / "saved", pairs) == pytest.approx(_ours(folder, pairs), abs=5e-5)


@pytest.mark.parametrize("case", ["mean", "qwen3", "t5"])
def test_what_is_healed_agrees_as_much_there(case: str, pairs: Path, tmp_path: Path) -> None:
    """With the dense model, in the rank of similarities."""
    folder, small, healed = ALL[case](tmp_path / "model"), tmp_path / "small", tmp_path / "healed"
    texts = text_file(tmp_path / "texts.txt", [*_columns(pairs)[0], *_columns(pairs)[1]])
    how = {"method": "svd", "target": 0.25, "calibration": {"source": [texts], "samples": 16}}
    tcompress.convert(folder, output=small, **how)
    tcompress.finetune(small, output=healed, steps=8, device="cpu", data={"source": [texts]})
    scores = tcompress.evaluate([folder, healed], task="sts", data=str(pairs), save=False)
    ours = {metric.name: metric.value for metric in scores[1].sets[0].metrics}["agreement"]
    one, two, _ = _columns(pairs)
    dense, other = (
        [float(alike) for alike in model.similarity_pairwise(model.encode(one), model.encode(two))]
        for model in map(_opened, (folder, healed))
    )
    assert ours == pytest.approx(spearmanr(dense, other).statistic, abs=5e-5)
    assert ours != pytest.approx(1, abs=1e-3)
