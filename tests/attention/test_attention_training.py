"""Models with another attention: options, conversion, lengths, healing, measuring."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, AutoTokenizer

import tcompress
from tcompress.api import evaluate
from tcompress.artifact.reader import Artifact
from tcompress.attention.module import CHILD, GuardedLinear, ReplacementModule
from tcompress.conversion.converter import convert
from tcompress.errors import DataError, PlanError, RecipeError
from tcompress.models import SourceModel
from tcompress.models.store import WeightStore
from tcompress.options import Convert, parse_recipe
from tcompress.planning.planner import make_plan
from tcompress.reporting.model_report import report_of
from tcompress.roles.find import find_roles
from tcompress.training.objectives import Observer
from tests.support.cli import completed
from tests.support.conversions import load_whole
from tests.support.evaluation import rows_file
from tests.support.model_folders import model_folder, sentences
from tests.support.own_models import HOSTS, REPLACEMENTS
from tests.support.tiny import TinyModel
from tests.support.training import (
    assert_gradients,
    batch_of,
    losses_of,
    needs_pictures,
    pictures,
    small,
    small_encoder,
    texts,
    train,
)
from tests.support.typed import conversion
from tests.support.typed import conversion_changes as settings

pytestmark = pytest.mark.usefixtures("one_thread", "own_folder")


@pytest.mark.often("vit-hot-None")
@pytest.mark.parametrize(
    ("family", "name", "method"),
    [
        ("bert", "tga", None),
        ("bert", "tucker", {"name": "lprod", "p": 4}),
        ("bert", "folded", None),
        ("gpt2", "tsa", None),
        ("llama", "tga", {"name": "svd", "rank": 4}),
        ("vit", "hot", None),
        ("vit", "favor", {"name": "lprod", "p": 4}),
    ],
)
def test_a_step_of_healing_trains_the_mechanism(
    family: str, name: str, method: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = small(family, tmp_path, method=method, attention=REPLACEMENTS[name])
    seen = needs_pictures(family)
    data = {"source": [str(pictures(tmp_path / "p"))]} if seen else texts(tmp_path)
    losses = losses_of(folder, data=data)
    assert 0 < losses.gradients(batch_of(losses), 1, alone=False) < float("inf")
    own = [m for m in losses.setup.model.modules() if isinstance(m, ReplacementModule)]
    assert len(own) == 2
    assert_gradients(own)
    done = train(folder, tmp_path / "out", steps=2, data=data)
    before, after = Artifact.open(folder), Artifact.open(done.folder)
    assert after.attention == before.attention
    names = [key for entry in after.attention for key in entry.tensor_shapes]
    moved = [key for key in names if not before.store.tensor(key).equal(after.store.tensor(key))]
    assert bool(moved) == (after.manifest.training[-1].best_step > 0)  # the best weights are kept
    loaded = load_whole(type(HOSTS[family].build()), done.folder)
    report = report_of(done.folder)
    assert report.attention == after.attention
    assert report.parameters.total.now == sum(item.numel() for item in loaded.parameters())


def test_only_what_is_new_can_be_trained(tmp_path: Path) -> None:
    folder = small("bert", tmp_path, method=None, attention=REPLACEMENTS["tsa"])
    losses = losses_of(folder, data=texts(tmp_path), train="rewritten")
    chosen = [name for name, p in losses.setup.model.named_parameters() if p.requires_grad]
    assert len(chosen) == 4
    assert all(f".{CHILD}." in name for name in chosen)


def test_relations_leave_dropped_queries_out(tmp_path: Path) -> None:
    folder = small("bert", tmp_path, method=None, attention=REPLACEMENTS["tga"])
    losses = losses_of(folder, data=texts(tmp_path), objectives={"attention": 1.0})
    assert 0 <= losses.gradients(batch_of(losses), 1, alone=False) < float("inf")
    model = losses.setup.model
    roles = find_roles(HOSTS["bert"].build())
    observer = Observer(model, roles, range(len(roles.blocks)), projections=True)
    seen = observer.run(HOSTS["bert"].inputs(batch=2, length=8, seed=0))
    assert set(seen.projections) == {"k", "v"}


def test_a_model_with_another_attention_is_timed(tmp_path: Path) -> None:
    folder = small("bert", tmp_path, method=None, attention=REPLACEMENTS["tam"])
    sizes = ("--batch", 1, "--length", 8, "--repeats", 1)
    completed("bench", folder, "--against", tmp_path / "bert", *sizes, "--json")


# Mechanisms of one length, and the texts that everything after a conversion reads


LENGTH = 8


def test_texts_are_cut_to_the_length_from_calibration_to_evaluation(tmp_path: Path) -> None:
    dense = small_encoder(tmp_path).with_name("bert")
    (dense / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    words = tmp_path / "words.txt"
    words.write_text("\n".join(f"w{n} " * 30 for n in range(40)))
    recipe = {
        "attention": {"name": "multilinear", "length": LENGTH},
        "method": {"name": "svd"},
        "target": 0.5,
        "calibration": {"source": str(words), "samples": 40},
    }
    made = convert(str(dense), Convert.model_validate(recipe), tmp_path / "made").folder
    long = {name: [f"{text} " * 30 for text in sentences(6)] for name in ("sentence1", "sentence2")}
    pairs = rows_file(tmp_path / "pairs.jsonl", **long, score=range(6))
    assert evaluate([made], "sts", pairs, bootstrap=0)[0].metrics
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer.model_max_length == LENGTH
    assert json.loads((made / "sentence_bert_config.json").read_text()) == {"max_seq_length": 8}
    model = AutoModel.from_pretrained(made)
    ids = torch.arange(5, 5 + LENGTH + 1)[None]
    model(ids[:, :LENGTH])
    with pytest.raises(DataError, match=r"layer\.0\.attention\.self`: .* over 8 tokens met 9"):
        model(ids)


@pytest.mark.parametrize(
    ("family", "attention", "said"),
    [
        ("roberta", {"name": "multilinear", "length": 64}, "the model takes 63 at most"),
        ("masked", {"name": "hot"}, "a mask leaves patches out"),
        ("masked", {"name": "tga"}, "a mask leaves patches out"),
    ],
)
def test_what_cannot_work_is_refused_by_layer_before_weights_are_read(
    family: str,
    attention: dict[str, object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    video = HOSTS["videomae"]
    masked = TinyModel(video.config, "VideoMAEForPreTraining", video.options)
    (masked if family == "masked" else HOSTS[family]).build().save_pretrained(tmp_path / "dense")
    source = SourceModel.open(str(tmp_path / "dense"))
    monkeypatch.setattr(WeightStore, "tensor", lambda *_: pytest.fail("a weight was read"))
    recipe = {"attention": attention, "calibration": {"source": "none"}}
    with pytest.raises(PlanError, match=said) as caught:
        make_plan(Convert.model_validate(recipe), source)
    layers = caught.value.message.splitlines()[1:]
    assert layers
    assert all(line.strip().startswith(("-", "`")) for line in layers)


# Attention mechanisms on the command line, in recipes and in Python


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


def test_mechanisms_and_structures_are_chosen_apart() -> None:
    assert settings(method="hot", grid="4x4") == {"attention": {"grid": (4, 4)}}
    assert settings(method="tsa", filter_order=3, layers="0-1,4") == {
        "attention": {"name": "tsa", "filter_order": 3},
        "attention_layers": (0, 1, 4),
    }
    assert settings(method="multilinear", length=64)["attention"] == {"length": 64}
    assert settings(method="hot", kernel="favor", fold=8, seed=2)["attention"] == {
        "kernel": "favor", "fold": 8, "seed": 2,
    }  # fmt: skip
    assert settings(method="hot", structure="lprod", p=8) == {"attention": {}, "method": {"p": 8}}
    assert settings(method="tga", structure="none") == {"attention": {}}


def test_a_size_alone_means_the_structure_of_the_paper() -> None:
    sized = settings(method="tga", target=0.25)
    assert (sized["only"], sized["target"]) == (("re:^(k|v|qkv)$",), 0.25)
    assert settings(method="tam", rank="8")["method"] == {"rank": 8}
    assert conversion({"method": "tam", "rank": "8"}).method.name == "tucker"
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


def test_conversion_names_the_mechanism_and_loads(vit: Path) -> None:
    options = ("--method", "hot", "--structure", "lprod", "--p", "2", "--calib", "none")
    done = completed("convert", vit, *options)
    assert done.lines[0] == "vit-hot-lprod-p2"
    assert any("kronecker 4x4 in 2 blocks" in line for line in done.lines)
    model = transformers.AutoModelForImageClassification.from_pretrained("vit-hot-lprod-p2")
    assert sum(isinstance(module, ReplacementModule) for module in model.modules()) == 2
    assert "attention: kronecker 4x4 in 2 blocks" in completed("inspect", "vit-hot-lprod-p2").lines
    card = Path("vit-hot-lprod-p2/README.md").read_text()
    assert "kronecker attention in 2 blocks" in card
    assert "import tcompress" in card


def test_embeddings_are_rewritten_beside(tmp_path: Path) -> None:
    bert = model_folder("bert", tmp_path / "bert")
    options = ("--method", "tam", "--embeddings", "svd", "--embedding-target", "0.5")
    completed("convert", bert, *options, "--calib", "none", "-o", "both")
    model = transformers.AutoModel.from_pretrained("both")
    assert sum(isinstance(module, ReplacementModule) for module in model.modules()) == 2
    assert not any(isinstance(module, GuardedLinear) for module in model.modules())


def test_python_takes_mechanisms_too(vit: Path) -> None:
    plan = tcompress.plan(str(vit), method="hot", structure="lprod", p=2, calibration="none")
    assert plan.method == "hot + lprod"
    assert len(plan.attention) == 2
    alone = tcompress.plan(str(vit), attention={"name": "tsa", "filter_order": 4})
    assert (alone.method, alone.layers) == ("tsa", ())
    sized = tcompress.plan(str(vit), method="tga", target=0.5, calibration="none")
    assert {entry.role for entry in sized.layers} == {"k", "v"}
    with pytest.raises(
        RecipeError, match=r"`attention\.name` is `hit`, allowed is one of .*did you mean `hot`"
    ):
        tcompress.plan(str(vit), attention="hit")
