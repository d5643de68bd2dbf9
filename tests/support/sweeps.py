"""Sweeps of a tiny model, and counts of what they do."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from tcompress import pipeline, sweeps
from tcompress.artifact.manifest import Difference, Metric
from tcompress.evaluation.scores import Baseline, ModelScores, SetScores
from tcompress.models import SourceModel
from tcompress.options import Evaluate, Recipe
from tcompress.sweeps import Swept, sweep
from tests.support.evaluation import headed, loaded, rows_file
from tests.support.model_folders import sentences, text_file

STS: dict[str, Any] = {"task": "sts", "data": "pairs.jsonl", "bootstrap": 50}
HEAL: dict[str, Any] = {
    "steps": 2,
    "batch_size": 4,
    "data": {"source": ["texts.txt"], "max_length": 16, "holdout": 0.2},
}


@pytest.fixture(scope="module")
def sweep_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder, and data that it does well on."""
    folder = tmp_path_factory.mktemp("models")
    headed("bert", folder / "bert", "BertModel", num_hidden_layers=1)
    text_file(folder / "texts.txt", sentences(24))
    agreeable_pairs(folder / "pairs.jsonl", folder / "bert", 30)
    return folder


@pytest.fixture
def sweep_folder(sweep_models: Path, tmp_path: Path, own_folder: None, one_thread: None) -> None:
    """Works in a folder with a model, sentences and pairs."""
    shutil.copytree(sweep_models, tmp_path, dirs_exist_ok=True)


def agreeable_pairs(path: Path, model: Path, count: int) -> None:
    """Pairs of sentences with the score that the model itself gives them."""
    network, tokenizer = loaded(model, "BertModel")
    texts = sentences(2 * count)
    inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        states = network(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    means = normalize((states * mask).sum(1) / mask.sum(1))
    scores = (means[:count] * means[count:]).sum(1).tolist()
    rows_file(path, sentence1=texts[:count], sentence2=texts[count:], score=scores)


def recipe(methods: Any = ("svd",), targets: Any = (0.5, 0.25), **sections: Any) -> Recipe:
    """A recipe without calibration data, unless it is given."""
    data = {"method": {"name": "lprod"}, "calibration": {"source": "none"}, "device": "cpu"}
    cells = {"methods": methods, "targets": targets, **sections.pop("sweep", {})}
    made = {"convert": {**data, **sections.pop("convert", {})}, "evaluate": [STS], **sections}
    return Recipe.model_validate({"recipe_version": 1, "sweep": cells, **made})


def run(said: Recipe, **options: Any) -> Swept:
    """Sweeps the model into `out`."""
    return sweep(said, SourceModel.open("bert"), Path("out"), **options)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes no time to measure quality, where only the order of work matters."""
    monkeypatch.setattr(sweeps, "evaluate", quick_evaluate)


def quick_evaluate(models: Any, wanted: Evaluate, **options: Any) -> list[ModelScores]:
    """Scores models by the bytes of their weights, without running them."""
    size = Path(models[0], "model.safetensors").stat().st_size
    examples = wanted.limit or len(Path(wanted.data[0]).read_text().splitlines())
    known = next(iter(options.get("baseline") or ()), None)
    value = size / Path("bert/model.safetensors").stat().st_size
    value += 0.1 * Path(models[0]).name.endswith("-healed")
    options["progress"].stage(Path(models[0]).name, 1, "inputs")
    found = Metric(
        name="spearman",
        value=value,
        difference=known
        and Difference(baseline=known.name, baseline_value=known.values[0], value=value - 1),
        protocol={"task": wanted.task, "data": wanted.data[0], "examples": examples},
    )
    baseline = Baseline("bert", [value], [np.zeros(2)], [examples], "tokens")
    numbers = SetScores((found,), found.protocol, 1.0, False, (), baseline)
    return [ModelScores(str(models[0]), "examples", (numbers,))]


class Counting:
    """Counts calls of what a sweep does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("convert", "finetune", "evaluate", "bench"):
            place: Any = sweeps if name == "evaluate" else pipeline
            monkeypatch.setattr(place, name, self._counted(name, getattr(place, name)))

    def _counted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return function(*args, **options)

        return call

    def since(self) -> list[str]:
        """What was called since this was asked last."""
        calls, self.calls = self.calls, []
        return calls
