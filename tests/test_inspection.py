"""What `inspect` tells without building the model is what it tells of the model itself."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tcompress.inspection import inspect_model
from tcompress.models import SourceModel
from tcompress.reporting.model_report import report_of
from tests.support.cli import completed, run
from tests.support.conversions import OPTIONS, WIDTHS, make
from tests.support.own_models import Workshop
from tests.support.scratch import config_folder
from tests.support.tiny import TINY, build

# What stacks weights on loading, and what runs a layer twice, only the model itself tells.
BUILT = ("mixtral", "qwen3_moe", "deberta-v2")


def told_twice(folder: Path, monkeypatch: pytest.MonkeyPatch, *, opens: bool = False) -> None:
    """Inspects without opening the model, unless it must be built, then by its plan."""
    with monkeypatch.context() as patch:
        if not opens:
            stop = Mock(side_effect=AssertionError("the model was opened"))
            patch.setattr(SourceModel, "open", stop)
            patch.setattr("tcompress.artifact.reader.Artifact.open", stop)
        at_once = inspect_model(folder)
    assert at_once == inspect_model(str(folder), plan=True)
    assert at_once.parameters == report_of(folder).parameters.total.now


@pytest.mark.often("tcompress_text", "llama", "t5", "vit", *BUILT)
@pytest.mark.parametrize("family", TINY)
def test_names_and_shapes_tell_what_the_model_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(family).save_pretrained(tmp_path)
    told_twice(tmp_path, monkeypatch, opens=family in BUILT)


@pytest.mark.often("experts", "svd", "fitted", "svd-width")
@pytest.mark.parametrize("option", [*OPTIONS, *WIDTHS, "experts"])
def test_plans_tell_what_artefacts_hold(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, method = ("mixtral", "svd") if option == "experts" else ("gpt2", option)
    told_twice(make(family, tmp_path, method).folder, monkeypatch)


@pytest.mark.often("vit-hot")
@pytest.mark.parametrize(
    ("family", "name"), [("vit", "hot"), ("gpt2", "tga"), ("bert", "tam"), ("bert", "multilinear")]
)
def test_plans_tell_of_attention(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_twice(Workshop(tmp_path).hosted(family, name).folder, monkeypatch)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    made = make("bert", tmp_path, "dct")
    code = (
        "import sys; from tcompress.cli.main import main\n"
        "try: main(['inspect', sys.argv[1]])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    for folder in (made.source, made.folder):
        subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True)


def test_buffers_and_tied_tables_are_no_parameters(tmp_path: Path) -> None:
    model = build("gpt2")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert inspect_model(str(tmp_path)).parameters == model.num_parameters()


def test_a_changed_artefact_is_read_in_full(tmp_path: Path) -> None:
    folder = make("bert", tmp_path, "dct").folder
    content = (folder / "config.json").read_text()
    (folder / "config.json").write_text(content.replace('"transform": "dct"', '"transform": "dft"'))
    done = run("inspect", folder)
    assert done.code == 2
    assert "hold different plans" in done.err


def test_a_damaged_manifest_of_a_plain_model_is_named(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    (tmp_path / "tcompress.json").write_text("{")
    done = run("inspect", tmp_path)
    assert done.code == 2
    assert "tcompress.json` is damaged: Expecting property name" in done.err


@pytest.mark.parametrize("given", ["", "config.json"])
def test_a_model_without_weights(given: str, tmp_path: Path) -> None:
    folder = config_folder("bert", tmp_path / "bare")
    found = inspect_model(str(folder / given))
    build("bert").save_pretrained(tmp_path / "dense")
    dense = inspect_model(str(tmp_path / "dense"))
    assert found.layers == dense.layers
    assert found.parameters == dense.parameters


def test_verify_says_what_was_compared(tmp_path: Path) -> None:
    folder = make("bert", tmp_path, "dct").folder
    (folder / "notes.txt").write_text("mine")
    done = completed("inspect", folder, "--verify")
    assert "files of" in done.out
    assert "no checksums of `notes.txt`" in done.out
    document = run("inspect", folder, "--verify", "--json").document
    assert document["files"] == len([*folder.iterdir()]) - 1
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes() + b" ")
    done = run("inspect", folder, "--verify")
    assert done.code == 2
    assert "`config.json` has" in done.err
