"""The commands that look at models and recipes, with their whole output where it is short."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import ResNetConfig, ResNetForImageClassification

from tcompress.options import recipe_names, recipe_text
from tests.support.cli import run
from tests.support.model_folders import model_folder
from tests.support.tiny import build


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models, and one that is converted."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("gpt2", "mixtral"):
        model_folder(family, folder / family)
    assert run("convert", folder / "gpt2", "--calib", "none", "-o", folder / "small").code == 0
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)


def trimmed(text: str) -> str:
    """Leaves out spaces at the ends of lines, and empty lines."""
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def test_inspect_a_dense_model() -> None:
    done = run("inspect", "gpt2")
    assert (done.code, done.err) == (0, "")
    assert trimmed(done.out) == (
        "gpt2: GPT2LMHeadModel (`gpt2`), dense, 2 blocks, 22,400 parameters\n"
        " role         stored as  in  out  layers  such as\n"
        " " + "─" * 71 + "\n"
        " qkv (q+k+v)  conv1d     32   96       2  transformer.h.0.attn.c_attn\n"
        " o            conv1d     32   32       2  transformer.h.0.attn.c_proj\n"
        " up           conv1d     32   64       2  transformer.h.0.mlp.c_fc\n"
        " down         conv1d     64   32       2  transformer.h.0.mlp.c_proj"
    )


def test_inspect_says_what_stays_dense() -> None:
    done = run("inspect", "mixtral")
    assert "experts_gate_up (gate+up)  4 experts  32  128       2" in done.out
    assert trimmed(done.out).splitlines()[-1] == (
        "           2  model.layers.0.mlp.gate  it routes tokens to experts, which a small error "
        "changes"
    )


def test_inspect_a_converted_model_layer_by_layer() -> None:
    done = run("inspect", "small", "--layers")
    assert "GPT2LMHeadModel (`gpt2`), converted, 2 blocks" in done.out
    rows = [line for line in done.lines if "lprod p=4 dct" in line]
    assert len(rows) == 8
    assert "transformer.h.1.mlp.c_proj" in rows[-1]


def test_inspect_as_json() -> None:
    document = run("inspect", "small", "--json").document
    assert (document["family"], document["converted"]) == ("gpt2", True)
    assert document["layers"][0] == {
        "name": "transformer.h.0.attn.c_attn",
        "block": "transformer.h.0",
        "role": "qkv",
        "kind": "conv1d",
        "in_features": 32,
        "out_features": 96,
        "parts": ["q", "k", "v"],
        "experts": None,
        "dense_parameters": 3072,
        "parameters": 768,
        "structure": "lprod p=4 dct",
    }


def test_inspect_where_nothing_can_be_rewritten(tmp_path: Path) -> None:
    sizes = {"hidden_sizes": [8, 8], "depths": [1, 1], "embedding_size": 8, "num_labels": 2}
    ResNetForImageClassification(ResNetConfig(**sizes)).save_pretrained(tmp_path)
    done = run("inspect", tmp_path, "--json")
    assert (done.code, done.document["layers"]) == (0, [])
    assert any("no repeated block" in warning for warning in done.document["warnings"])


def test_report_side_by_side() -> None:
    done = run("report", "small", "gpt2")
    assert (done.code, done.err) == (0, "")
    assert done.lines[0].split() == ["small", "gpt2"]


def test_report_as_json_at_a_length() -> None:
    document = run("report", "small", "gpt2", "--json", "--length", "32").document
    assert [item["method"] for item in document["reports"]] == ["lprod", "dense"]
    assert document["reports"][0]["macs_per_token"]["length"] == 32
    assert document["reports"][0]["parameters"]["rewritten"]["kept"] == 0.25


def test_report_layer_by_layer() -> None:
    done = run("report", "small", "mixtral", "--layers")
    assert done.out.count("lprod p=4 dct") == 8


def test_report_of_a_damaged_model(tmp_path: Path) -> None:
    for file in Path("small").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    done = run("report", tmp_path, "--json")
    assert done.code == 2
    assert done.document["error"]["type"] == "ArtifactError"


def test_export_of_a_host_of_our_own(tmp_path: Path) -> None:
    build("tcompress_grid").save_pretrained(tmp_path / "grid")  # type: ignore[attr-defined]
    made = tmp_path / "small"
    run("convert", tmp_path / "grid", "--method", "svd", "--rank", 2, "--calib", "none", "-o", made)
    done = run("export", made, "-o", tmp_path / "plain", "--quiet")
    assert done.out == f"Wrote `{tmp_path / 'plain'}`, which loads with `import tcompress`.\n"
    assert "import tcompress\nfrom transformers" in (tmp_path / "plain" / "README.md").read_text()


def test_export(tmp_path: Path) -> None:
    target = tmp_path / "plain"
    done = run("export", "small", "--to", "dense", "-o", target, "--quiet")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"Wrote `{target}`, which loads without tcompress.\n"
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    assert "import tcompress" not in (target / "README.md").read_text()
    done = run("export", "small", "-o", target, "--quiet", "--force", "--json")
    assert done.document == {"schema": 1, "output": str(target), "format": "dense"}


def test_export_of_a_dense_model(tmp_path: Path) -> None:
    done = run("export", "gpt2", "-o", tmp_path / "plain", "--quiet")
    assert done.code == 2
    assert "`gpt2` is a model that was not converted by tcompress" in done.err


def test_methods() -> None:
    done = run("methods")
    assert done.code == 0
    assert "svd (also `lowrank`): two thin factors" in done.out
    assert "arXiv:2603.05727" in done.out
    assert "--tubal-rank" in done.out
    assert "seed (in recipes)" in done.out


def test_methods_as_json() -> None:
    methods = {item["name"]: item for item in run("methods", "--json").document["methods"]}
    assert methods["svd"]["aliases"] == ["lowrank"]
    assert methods["lprod"]["options"][0] == {
        "name": "p",
        "option": "--p",
        "type": "a whole number, at least 1",
        "default": 4,
        "description": "number of slices; 1/p of the weights is kept",
    }


def test_options_that_go_to_the_structure_are_not_the_mechanisms() -> None:
    methods = {item["name"]: item for item in run("methods", "--json").document["methods"]}
    options = {row["name"]: row["option"] for row in methods["tam"]["options"]}
    assert (options["core"], options["memory"]) == ("--core", "--memory")
    assert options["cores"] is options["rank"] is None
    assert {row["option"] for row in methods["tucker"]["options"]} >= {"--rank", "--cores"}


def test_recipes_list() -> None:
    done = run("recipes", "list")
    assert done.code == 0
    assert all(name in done.out for name in recipe_names())
    listed = run("recipes", "list", "--json").document["recipes"]
    assert [item["name"] for item in listed] == list(recipe_names())
    assert all(item["description"] for item in listed)
    assert all(bool(item["model"]) != item["name"].startswith("scratch/") for item in listed)


def test_recipes_show_copy_validate(tmp_path: Path) -> None:
    name = "encoder/minilm-lprod"
    assert run("recipes", "show", name).out == recipe_text(name)
    file = tmp_path / "my.yaml"
    done = run("recipes", "copy", name, file)
    assert done.out == f"Wrote `{file}`. Next: `tcompress run {file}`\n"
    assert file.read_text() == recipe_text(name)
    assert run("recipes", "copy", name, file).code == 2
    assert run("recipes", "copy", name, file, "--force", "--json").document["file"] == str(file)
    done = run("recipes", "validate", file)
    assert (done.code, done.out) == (0, f"`{file}` is valid\n")


def test_recipes_validate_shows_the_problems_of_all_files(tmp_path: Path) -> None:
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for file in files:
        file.write_text("recipe_version: 1\nconvert: {method: {name: lprod, p: 0}}\n")
    done = run("recipes", "validate", *files, "encoder/minilm-lprod")
    assert (done.code, done.out) == (2, "")
    assert all(f"1 problem in `{file}`" in done.err for file in files)


HOSTILE = "a\x1b[2J\x1b]0;b\x07\x9bc\u202ed\r[red]e"
COMMANDS = set("\x1b\x07\x9b\u202e\r\x7f\udcff")


def test_terminals_get_no_commands_from_models(tmp_path: Path) -> None:
    """Not from names of folders or layers, nor from options, on stdout or stderr."""
    folder = tmp_path / HOSTILE
    shutil.copytree("small", folder)
    for name in ("tcompress.json", "config.json"):
        word = json.dumps(HOSTILE)[1:-1]
        (folder / name).write_text((folder / name).read_text().replace("GPT2LMHeadModel", word))
    for command in (["inspect"], ["report"], ["report", "--layers"], ["export", "--to", HOSTILE]):
        done = run(command[0], folder, *command[1:])
        said = done.out + done.err
        assert "a\ufffd[2J\ufffd]0;b" in said
        assert "[red]e" in said  # no markup
        assert not set(said) & COMMANDS


def test_terminals_get_no_commands_from_recipes(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(json.dumps({"recipe_version": 1, HOSTILE: 2}))
    done = run("recipes", "validate", tmp_path / "my.yaml")
    assert "`a\ufffd[2J\ufffd]0;b" in done.err
    assert not set(done.err) & COMMANDS


@pytest.mark.parametrize("name", ["half \udcff", "c1 \x9b", "delete \x7f"])
def test_json_is_safe_to_print(name: str, tmp_path: Path) -> None:
    """Names of folders may hold what is no character at all."""
    done = run("inspect", tmp_path / name, "--json")
    assert name in done.document["error"]["message"]
    assert not set(done.out + done.err) & COMMANDS
