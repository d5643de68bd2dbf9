"""Attention mechanisms on the command line, in recipes and in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import tcompress
from tcompress.attention.module import GuardedLinear, MechanismModule
from tcompress.cli.convert import default_output
from tcompress.errors import RecipeError
from tcompress.options import parse_recipe
from tests.support.cli import run
from tests.support.model_folders import model_folder
from tests.support.typed import conversion

RECIPE = """
recipe_version: 1
convert:
  attention: {name: tsa, filter_order: 3, decay: 0.8}
  attention_layers: [1]
  calibration: {source: none}
"""


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder("vit", tmp_path_factory.mktemp("models") / "vit")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings(text: str | None = None, **options: Any) -> dict[str, Any]:
    """What options make of a recipe, less what are defaults."""
    recipe = None if text is None else parse_recipe(text, "test.yaml")
    found = conversion(options, recipe).model_dump(exclude_defaults=True)
    return {name: value for name, value in found.items() if (name, value) != ("calibration", {})}


def test_a_mechanism_alone_leaves_weights_dense() -> None:
    assert settings(method="hot", grid="4x4") == {"attention": {"grid": (4, 4)}}
    assert settings(method="tsa", filter_order=3, layers="0-1,4") == {
        "attention": {"name": "tsa", "filter_order": 3},
        "attention_layers": (0, 1, 4),
    }
    assert settings(method="tam", core="tucker")["attention"] == {"core": "tucker"}
    assert settings(method="multilinear", length=64)["attention"] == {"length": 64}
    assert settings(method="hot", kernel="favor", fold=8, seed=2)["attention"] == {
        "kernel": "favor", "fold": 8, "seed": 2,
    }  # fmt: skip


def test_the_two_axes_combine() -> None:
    both = settings(method="hot", structure="lprod", p=8)
    assert both == {"attention": {}, "method": {"p": 8}}
    assert settings(method="tga", structure="none") == {"attention": {}}


def test_a_size_alone_means_the_structure_of_the_paper() -> None:
    sized = settings(method="tga", target=0.25)
    assert (sized["only"], sized["target"]) == (("re:^(k|v|qkv)$",), 0.25)
    assert settings(method="tam", rank="8")["method"] == {"rank": 8}
    assert conversion({"method": "tam", "rank": "8"}).method.name == "tucker"
    assert conversion({"method": "tga", "target": 0.25}).method.name == "tt"
    assert conversion({"method": "hot", "p": 2}).method.name == "lprod"
    assert settings(method="tga", target=0.25, only=["v"])["only"] == ("v",)


def test_options_override_a_recipe() -> None:
    parsed = parse_recipe(RECIPE, "test.yaml")
    assert settings(RECIPE, filter_order=4)["attention"] == {
        "name": "tsa", "filter_order": 4, "decay": 0.8,
    }  # fmt: skip
    assert settings(RECIPE, method="hot", fold=4)["attention"] == {"fold": 4}
    assert conversion({"structure": "svd", "target": 0.5}, parsed).label == "tsa + svd"
    assert settings(RECIPE, layers="0")["attention_layers"] == (0,)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"method": "hot"}, "vit-base-hot"),
        ({"method": "hot", "structure": "lprod"}, "vit-base-hot-lprod-p4"),
        ({"method": "hot", "grid": "14,14", "kernel": "favor"}, "vit-base-hot-14x14-favor"),
        ({"method": "tsa", "filter_order": 3, "layers": "0,1"}, "vit-base-tsa-k3-at2"),
        ({"method": "tga", "target": 0.25}, "vit-base-tga-tt-25"),
        ({"method": "tam", "core": "tucker"}, "vit-base-tam-tucker"),
        ({"method": "hot", "fold": 32}, "vit-base-hot-f32"),
    ],
)
def test_default_output(options: dict[str, Any], name: str) -> None:
    assert default_output("vit-base", conversion(options)) == name


def test_conversion_names_the_mechanism_and_loads(vit: Path) -> None:
    done = run(
        "convert", vit, "--method", "hot", "--structure", "lprod", "--p", "2", "--calib", "none"
    )
    assert done.code == 0
    assert done.lines[0] == "vit-hot-lprod-p2"
    assert any("kronecker 4x4 in 2 blocks" in line for line in done.lines)
    model = transformers.AutoModelForImageClassification.from_pretrained("vit-hot-lprod-p2")
    assert sum(isinstance(module, MechanismModule) for module in model.modules()) == 2
    report = run("report", "vit-hot-lprod-p2", "--json").document
    assert "attention" in str(report)
    seen = run("inspect", "vit-hot-lprod-p2")
    assert "attention: kronecker 4x4 in 2 blocks" in seen.lines
    card = Path("vit-hot-lprod-p2/README.md").read_text()
    assert "kronecker attention in 2 blocks" in card
    assert "import tcompress" in card


def test_embeddings_are_rewritten_beside(tmp_path: Path) -> None:
    bert = model_folder("bert", tmp_path / "bert")
    options = ("--method", "tam", "--embeddings", "svd", "--embedding-target", "0.5")
    done = run("convert", bert, *options, "--calib", "none", "-o", "both")
    assert done.code == 0, done.err
    model = transformers.AutoModel.from_pretrained("both")
    assert sum(isinstance(module, MechanismModule) for module in model.modules()) == 2
    assert not any(isinstance(module, GuardedLinear) for module in model.modules())


def test_python_takes_mechanisms_too(vit: Path) -> None:
    plan = tcompress.plan(str(vit), method="hot", structure="lprod", p=2, calibration="none")
    assert plan.method == "hot + lprod"
    assert len(plan.attention) == 2
    alone = tcompress.plan(str(vit), attention={"name": "tsa", "filter_order": 4})
    assert (alone.method, alone.layers) == ("tsa", ())
    sized = tcompress.plan(str(vit), method="tga", target=0.5, calibration="none")
    assert {entry.role for entry in sized.layers} == {"k", "v"}
    with pytest.raises(RecipeError, match="unknown mechanism `hit`"):
        tcompress.plan(str(vit), attention="hit")
