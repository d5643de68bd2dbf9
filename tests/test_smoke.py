"""Every module and the whole way of a model, in a minute: what other versions of libraries must do.

`.ci/versions lowest` and `.ci/versions highest` run what is marked `smoke` in environments of
their own; `test_round_trip.py` and `test_transform_caches.py` mark some of their tests too.
"""

import importlib
import pkgutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tcompress
from tcompress.artifact.reader import verify_files
from tests.support.cli import commands, completed
from tests.support.conversions import distance, load_whole, outputs
from tests.support.evaluation import headed, labelled_file
from tests.support.model_folders import (
    model_folder,
    save_processor,
    save_tokenizer,
    sentences,
    text_file,
)
from tests.support.tiny import TINY
from tests.support.training import needs_pictures, picture_rows, pictures

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("one_thread", "own_folder")]


worked = partial(completed, columns=100)


def test_every_module_is_imported() -> None:
    names = [found.name for found in pkgutil.walk_packages(tcompress.__path__, "tcompress.")]
    assert len(names) > 100
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)


def test_every_command_explains_itself() -> None:
    for name, command in commands():
        said = worked(*name.split(), "--help").out
        assert all(option in said for option in ("Usage:", "--help")), name
        assert command.name in said


WAYS: dict[str, tuple[str, str, list[str]]] = {
    # family: the class with the head that the task asks for, the task, options of `convert`
    "bert": (
        "BertForMaskedLM",
        "masked-lm",
        ["--method", "lprod", "--p", "4", "--residual-rank", "2"],
    ),
    "llama": ("LlamaForCausalLM", "perplexity", ["--method", "svd", "--target", "0.5"]),
    "gpt2": ("GPT2ForSequenceClassification", "classification", ["--method", "tt", "--rank", "4"]),
    "vit": ("ViTForImageClassification", "image-classification", ["--keep-neurons", "0.5"]),
}


def _data(family: str) -> tuple[str, Path]:
    """What a model is fitted to and healed with, and what it is measured on."""
    if needs_pictures(family):
        return str(pictures(Path("pictures"))), picture_rows(Path("rows.parquet"))
    texts = text_file(Path("texts.txt"), sentences(40))
    return texts, labelled_file(Path("rows.jsonl")) if family == "gpt2" else Path(texts)


def _same(one: Any, two: Any, family: str) -> bool:
    inputs = TINY[family].inputs(2, 8, seed=1)
    return distance(outputs(one, inputs), outputs(two, inputs)) <= 1e-4


@pytest.mark.parametrize("family", WAYS)
def test_a_model_is_converted_healed_measured_and_exported(family: str) -> None:
    head, task, options = WAYS[family]
    special = {"num_labels": 2} if "Classification" in head else {}
    headed(family, Path("dense"), head, **special)
    save_tokenizer(Path("dense"), mask_token="w99")
    save_processor(Path("dense"))
    fitted_to, measured_on = _data(family)
    worked("inspect", "dense")
    worked("convert", "dense", *options, "--calib", fitted_to, "-o", "small", "--quiet")
    short = ("--steps", "2", "--batch-size", "4", "--device", "cpu", "--quiet")
    worked("finetune", "small", "--data", fitted_to, *short, "-o", "healed")
    rows = ("--task", task, "--data", measured_on, "--device", "cpu", "--bootstrap", "20")
    measured = worked("evaluate", "dense", "small", "healed", *rows, "--json").document
    assert len(measured["models"]) == 3
    worked("report", "healed")
    worked("export", "healed", "--to", "dense", "-o", "plain", "--quiet")
    verify_files(Path("healed"))
    kind = getattr(transformers, head)
    model = load_whole(kind, Path("healed"))
    assert _same(model, kind.from_pretrained("plain"), family)
    model.save_pretrained("again")
    assert _same(model, kind.from_pretrained("again"), family)


def test_models_are_timed_and_compiled() -> None:
    model_folder("llama", Path("dense"))
    half = ("--method", "svd", "--target", "0.5", "--calib", "none")
    worked("convert", "dense", *half, "-o", "small")
    worked("bench", "small", "--batch", "1", "--length", "4", "--repeats", "1", "--no-save")
    model = transformers.AutoModelForCausalLM.from_pretrained("small")
    inputs = TINY["llama"].inputs(2, 8, seed=1)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
    told = model.generate(inputs["input_ids"][:1, :3], max_new_tokens=3, do_sample=False)
    assert told.shape == (1, 6)


def test_a_recipe_is_run() -> None:
    model_folder("bert", Path("dense"))
    text_file(Path("texts.txt"), sentences(40))
    Path("recipe.yaml").write_text(
        "recipe_version: 1\nmodel: dense\noutput: small\n"
        "convert: {method: {name: tucker}, target: 0.5, calibration: {source: texts.txt}}\n"
    )
    worked("run", "recipe.yaml", "--quiet")
    verify_files(Path("small"))
