"""Fewer tokens together with everything else: methods, budgets, reports, healing, evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tcompress.api import convert, evaluate, plan, sweep
from tcompress.artifact.manifest import read_manifest
from tcompress.cli.convert import default_output
from tcompress.data.calibration import builtin_texts
from tcompress.errors import PlanError
from tcompress.exports.dense import export_dense
from tcompress.hf.opening import load_model
from tcompress.inspection import inspect_model
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.reporting.model_report import report_of
from tcompress.training.teacher import find_teacher
from tests.support.cli import worked
from tests.support.evaluation import rows_file
from tests.support.model_folders import text_file
from tests.support.training import train
from tests.support.vocabularies import KINDS

TEXTS = builtin_texts()
NEEDED = TEXTS[:50]
KIND = "byte-level BPE"
SVD = {"method": "svd", "target": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    core = KINDS[KIND].train(TEXTS[:300], 800)
    return KINDS[KIND].folder(tmp_path_factory.mktemp("models") / "gpt2", core, padding=13)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return text_file(tmp_path_factory.mktemp("data") / "data.txt", NEEDED)


@pytest.fixture(scope="module")
def small(model: Path, data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with fewer tokens, and nothing else that is changed."""
    output = tmp_path_factory.mktemp("small") / "vocab"
    return convert(model, vocab="data", calibration=data, output=output).folder


def options(data: str, **changes: Any) -> dict[str, Any]:
    calibration = {"source": [data], "samples": 32, "max_length": 16}
    return {"vocab": "data", "calibration": calibration, **changes}


def test_it_goes_with_layers_tables_and_fewer_blocks(
    model: Path, data: str, tmp_path: Path
) -> None:
    said = options(
        data, **SVD, keep_layers=[1], embeddings={"method": {"name": "svd"}, "target": 0.5}
    )
    done = convert(model, output=tmp_path / "all", **said)
    found, vocabulary = done.manifest.plan, done.manifest.plan.vocabulary
    (entry,) = found.embeddings
    assert entry.out_features == vocabulary.rows
    loaded = AutoModelForCausalLM.from_pretrained(done.folder)
    report = report_of(done.folder)
    count = sum(parameter.numel() for parameter in loaded.parameters())
    dense = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters())
    assert report.parameters.total.now == found.parameters - found.saved == count
    assert report.parameters.total.dense == found.parameters == dense
    assert found.coverage.total == dense
    assert report.bytes_on_disk.dense == SourceModel.open(str(model)).store.total_bytes
    assert loaded(torch.tensor([[1, 2, 3]])).logits.shape[-1] == vocabulary.rows
    assert (
        inspect_model(str(done.folder)).vocabulary
        == f"{vocabulary.rows} of {vocabulary.before} tokens"
    )
    assert inspect_model(str(done.folder)).parameters == count
    card = (done.folder / "README.md").read_text()
    assert f"| vocabulary | {vocabulary.before} | {vocabulary.rows} |" in card
    exported = export_dense(done.folder, tmp_path / "dense")
    weights = AutoModelForCausalLM.from_pretrained(exported).get_input_embeddings().weight
    assert len(weights) == vocabulary.rows


def test_texts_in_lists_are_read(model: Path, data: str, tmp_path: Path) -> None:
    lists = str(rows_file(tmp_path / "lists.jsonl", set=[NEEDED[:20], NEEDED[20:]]))
    of_lists, of_lines = (plan(model, **options(name, method="none")) for name in (lists, data))
    assert of_lists.vocabulary.ids == of_lines.vocabulary.ids


def test_budgets_count_it(model: Path, data: str) -> None:
    source = SourceModel.open(str(model))
    size, rows = source.store.total_bytes, source.config.vocab_size
    whole = plan(model, **options(data, method="none")).vocabulary
    bare = size - (rows - whole.rows) * 32 * 4
    made = plan(model, **options(data, method="svd", target_bytes=bare - 20_000))
    assert made.layers
    assert 4 * (made.parameters - made.saved) <= bare - 20_000 + 4 * 130 * 32
    with pytest.raises(PlanError, match=f"with the tokens that stay has {bare:,} bytes"):
        plan(model, **options(data, method="svd", target_bytes=bare + 1))


def test_what_is_said_of_it(model: Path, data: str, small: Path, tmp_path: Path) -> None:
    vocabulary = read_manifest(small).plan.vocabulary  # type: ignore[union-attr]
    said = ["convert", model, "--vocab", "data", "--calib", data]
    shown = worked(*said, "--dry-run", "-o", tmp_path / "no").lines
    line = next(line for line in shown if line.startswith("vocabulary "))
    assert line.split()[1:3] == [f"{vocabulary.before}", f"{vocabulary.rows}"]
    assert not (tmp_path / "no").exists()
    assert "to the last bit" in (small / "README.md").read_text()
    made = Convert.model_validate({"vocab": 500})
    assert (made.label, default_output("gpt2", made)) == ("vocab", "gpt2-vocab500")


def test_a_teacher_reads_the_tokens_of_its_student(
    model: Path, small: Path, data: str, tmp_path: Path
) -> None:
    teacher = find_teacher("source", read_manifest(small))
    taught, student = load_model(teacher), load_model(SourceModel.open(str(small)))
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert torch.equal(taught(ids).logits, student(ids).logits)
    assert find_teacher(str(model), read_manifest(small)).vocabulary == teacher.vocabulary
    healed = train(small, tmp_path / "healed", data={"source": [data]})
    # It says what its teacher says, whose outputs are kept in 16 bits.
    assert healed.facts.curve[0].validation < 1e-4
    assert read_manifest(healed.folder).plan.vocabulary == teacher.vocabulary  # type: ignore[union-attr]


def test_models_with_other_tokens_are_compared_where_they_can_be(
    model: Path, small: Path, data: str, tmp_path: Path
) -> None:
    settings = {"max_length": 64, "pack": "none", "bootstrap": 50}
    _, known = evaluate([model, small], "perplexity", data, save=False, **settings)
    metrics = {metric.name: metric for metric in known.metrics}
    assert metrics["agreement"].value > 0.9  # of the tokens that are left
    assert metrics["perplexity"].difference.value < 0  # shared among fewer tokens
    others = text_file(tmp_path / "others.txt", TEXTS[300:340])
    _, unknown = evaluate([model, small], "perplexity", others, save=False, **settings)
    metrics = {metric.name: metric for metric in unknown.metrics}
    assert metrics["perplexity"].difference is None
    assert metrics["bits_per_byte"].difference is not None
    assert "each reads its own" in unknown.notes[-1]


@pytest.mark.slow
def test_sweeps_and_recipes_leave_tokens_out(model: Path, data: str, tmp_path: Path) -> None:
    said = options(data, methods=["svd"], targets=[0.5, 0.25], output=tmp_path / "sweep")
    sweep(model, **said)
    plans = [read_manifest(folder).plan for folder in sorted((tmp_path / "sweep").glob("svd-*"))]  # type: ignore[union-attr]
    assert len(plans) == 2
    assert plans[0].vocabulary == plans[1].vocabulary is not None
