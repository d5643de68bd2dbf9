"""Plain models: narrower, and nothing but what the family's own config can say."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tcompress.artifact.manifest import read_manifest
from tcompress.artifact.reader import Artifact, verify_files
from tcompress.cli.convert import default_output
from tcompress.conversion import outputs
from tcompress.conversion.converter import convert
from tcompress.conversion.outputs import plain_tensors
from tcompress.errors import ArtifactError, PlanError, WriteError
from tcompress.models import SourceModel
from tcompress.models.narrower import with_keys
from tcompress.options import Convert
from tcompress.options.choose import conversion
from tcompress.planning.planner import make_plan
from tcompress.reporting.model_report import report_of
from tcompress.search import resources
from tcompress.search.budgets import TRIES
from tcompress.timing_model.clocks import ModelClock
from tcompress.timing_model.random_weights import RandomWeights
from tcompress.training.teacher import find_teacher
from tests.support.conversions import Made, calibration, make
from tests.support.depth import deep
from tests.support.other_python import there
from tests.support.sentence_folders import base, with_text_settings

WIDTH: dict[str, Any] = {"method": {"name": "width"}}
HALF: dict[str, Any] = {**WIDTH, "keep_neurons": 0.5}

# What the config says of half the neurons, and of smaller heads.
KEYS: dict[str, dict[str, int]] = {
    "bert": {"intermediate_size": 32},
    "distilbert": {"hidden_dim": 32},
    "modernbert": {"intermediate_size": 32},  # gate and up are one layer
    "gpt2": {"n_inner": 32},
    "gpt_neox": {"intermediate_size": 32},
    "llama": {"intermediate_size": 32},
    "phi3": {"intermediate_size": 32},
    "mixtral": {"intermediate_size": 32},  # a checkpoint has experts one by one
    "qwen3_moe": {"moe_intermediate_size": 16, "intermediate_size": 32},
    "t5": {"d_ff": 32, "d_kv": 4},
    "t5-gated": {"d_ff": 32},
    "bart": {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    "vit": {"intermediate_size": 32},
    "clip": {"text_config.intermediate_size": 32, "vision_config.intermediate_size": 32},
    "whisper": {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
}

LOAD = """
import json, sys
sys.modules["tcompress"] = None  # importing it fails
import torch, transformers
from safetensors.torch import load_file
for folder, name in json.loads(sys.argv[1]):
    kind = getattr(transformers, name)
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), (folder, info)
    with torch.no_grad():
        found = model.eval()(**load_file(f"{folder}/../inputs.safetensors"))
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    torch.save(tensors, f"{folder}/../outputs.pt")
print("\\n" + json.dumps(None))
"""


class Pair(NamedTuple):
    """One conversion twice: as a plain model, and as one that needs tcompress."""

    plain: Made
    usual: Made


@pytest.fixture(scope="module")
def pairs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pair]:
    """Converts models of all families that are tested, and runs the plain ones elsewhere.

    There is no tcompress where they run.
    """
    families = {
        item.callspec.params["family"]
        for item in request.session.items
        if item.path == request.path and "pairs" in item.fixturenames and hasattr(item, "callspec")
    }
    found, arguments = {}, []
    for family, keys in KEYS.items():
        if family not in {*families, "bert"}:
            continue
        folder = tmp_path_factory.mktemp(family)
        asked = {**HALF, "aware": family != "mixtral"}
        if "d_kv" in keys:
            asked["head_size"] = 4
        one = make(family, folder / "plain", plain=True, **asked)
        found[family] = Pair(one, make(family, folder / "usual", **asked))
        save_file(one.inputs(), one.folder / "../inputs.safetensors")
        arguments.append((str(one.folder), type(one.dense).__name__))
    there(sys.executable, LOAD, *arguments)
    return found


@pytest.mark.often("bert", "t5")
@pytest.mark.parametrize("family", KEYS)
def test_it_loads_without_tcompress_and_computes_the_same(
    family: str, pairs: dict[str, Pair]
) -> None:
    one, usual = pairs[family]
    found = torch.load(one.folder / "../outputs.pt")
    with torch.no_grad():
        wanted = usual.load()(**usual.inputs())
    assert found
    assert max(float((found[key] - wanted[key]).abs().max()) for key in found) <= 1e-5


@pytest.mark.often("phi3")
@pytest.mark.parametrize("family", KEYS)
def test_nothing_but_sizes_differs_from_the_source(family: str, pairs: dict[str, Pair]) -> None:
    one = pairs[family].plain
    assert one.plan.plain == KEYS[family]
    source = SourceModel.open(str(one.source))
    config = json.loads((one.folder / "config.json").read_text())
    assert config == with_keys(source, KEYS[family]).settings
    assert {*load_file(one.folder / "model.safetensors")} == {*source.store.keys()}
    verify_files(one.folder)
    total = sum(parameter.numel() for parameter in one.load().parameters())
    assert total == one.plan.parameters - one.plan.saved


ARCHITECTURES = {
    "bert": "BERT",
    "gpt2": "GPT2",
    "gpt_neox": "GPTNEOX",
    "llama": "LLAMA",
    "phi3": "PHI3",
    "t5": "T5",
}


@pytest.mark.often("bert", "phi3")
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_llama_cpp_finds_all_tensors_in_the_sizes_of_the_config(
    family: str, pairs: dict[str, Pair]
) -> None:
    """Its converter renames tensors by these tables, and takes sizes from the config."""
    made = pairs[family].plain
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, ARCHITECTURES[family]), 2)
    sizes: dict[str, set[int]] = {"ffn_up": set(), "ffn_down": set()}
    for name, tensor in load_file(made.folder / "model.safetensors").items():
        known = names.get_name(name.removeprefix("bert."), (".weight", ".bias"))
        if name.startswith("cls."):  # of masked tokens, which it leaves out
            continue
        assert known is not None, name
        block, _, layer = known.removesuffix(".weight").rpartition(".")
        if block and layer in sizes:
            assert tensor.ndim == 2
            turned = family == "gpt2"  # its weights are stored the other way round
            sizes[layer].add(tensor.shape[(layer == "ffn_down") ^ turned])
    width = next(iter(KEYS[family].values()))
    gates = 2 if family == "phi3" else 1  # stored in one tensor
    assert sizes == {"ffn_up": {gates * width}, "ffn_down": {width}}


def test_what_belongs_to_sentence_encoders_is_carried(tmp_path: Path) -> None:
    dense = with_text_settings(base(tmp_path / "dense"))
    done = convert(str(dense), _recipe(keep_neurons=0.5), tmp_path / "small").folder
    written, own = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for folder in (done, dense)
    )
    assert written == own | {"README.md", "tcompress.json"}
    assert "It loads without tcompress." in (done / "README.md").read_text()


def _recipe(**changes: Any) -> Convert:
    data = {"calibration": {"source": "none"}, **WIDTH, **changes}
    return Convert.model_validate({"plain": True, **data})


# ---------------------------------------------------------------- which key says it
def test_other_keys_of_the_same_number_stay(tmp_path: Path) -> None:
    options = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    options |= {"type_vocab_size": 64, "max_position_embeddings": 128}
    deep("bert", 2, **options).build().save_pretrained(tmp_path)
    recipe = _recipe(keep_neurons=0.5)
    assert make_plan(recipe, SourceModel.open(str(tmp_path))).plain == {"intermediate_size": 64}


def test_a_width_that_the_file_leaves_to_the_default_is_written(tmp_path: Path) -> None:
    deep("gpt2", 2, n_inner=None).build().save_pretrained(tmp_path)
    recipe = _recipe(keep_neurons=0.5)
    assert make_plan(recipe, SourceModel.open(str(tmp_path))).plain == {"n_inner": 64}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"head_size": 4}, "`head_dim` in its config would change `.*.q_proj.weight` too"),
        ("gpt_neox", {"head_size": 4}, "no attention of it can have smaller heads"),
        ("bert", {"keep_neurons": 64}, "would keep their width"),
        # All that cannot be said is said at once.
        ("gpt_neox", {"keep_neurons": 64, "head_size": 4}, "(?s)keep their width.*smaller heads"),
        ("tcompress_text", {}, "no feed-forward of it is known"),
        ("tcompress_grid", {}, "its class comes with tcompress"),
    ],
)
def test_what_no_config_can_say(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=words) as refused:
        make(family, tmp_path, aware=True, plain=True, **{**HALF, **changes})
    hint = refused.value.hint or ""
    assert "leave `plain` out" in hint
    assert "`drop_layers` alone" in hint
    assert "--" not in hint  # options have other names in Python


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": {"name": "auto"}, "target": 0.5}, "config can say `auto`"),
        (
            {**HALF, "attention": {"name": "tga"}, "residual_rank": 2},
            "`attention`, `residual_rank`",
        ),
        ({**HALF, "embeddings": {"method": {"name": "svd"}, "target": 0.5}}, "`embeddings`"),
        ({**HALF, "layers": [{"match": "up", "keep": True}]}, "`layers`"),
        ({**WIDTH, "max_loss": 0.01, "calibration": {"source": "builtin"}}, "`max_loss`"),
        ({**WIDTH, "target": 0.5, "init": "random"}, "widths in the configuration"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Convert.model_validate({"plain": True, **changes})


def test_width_is_the_method_of_plain_models() -> None:
    chosen = conversion({"plain": True, "target": 0.5})
    assert chosen.method is not None
    assert (chosen.method.name, default_output("m", chosen)) == ("width", "m-width-plain-50")
    assert conversion({"plain": True, "drop_layers": 1}).method is None


# ---------------------------------------------------------------- one width for a budget
def _widths(made: Made) -> set[int]:
    return {entry.inputs_left for entry in made.plan.layers if entry.role == "down"}


@pytest.mark.often("target_bytes")
@pytest.mark.parametrize("budget", ["target", "target_params", "target_bytes"])
def test_a_budget_chooses_the_largest_width(budget: str, tmp_path: Path) -> None:
    chosen = {**WIDTH, "plain": True, "aware": True}
    given = make("bert", tmp_path / "given", **chosen, keep_neurons=24).plan
    limits = {"target": given.kept, "target_params": given.parameters - given.saved}
    stored = load_file(tmp_path / "given/small/model.safetensors")
    limits["target_bytes"] = sum(tensor.nbytes for tensor in stored.values())
    found = make("bert", tmp_path / "found", **chosen, **{budget: limits[budget]})
    assert _widths(found) == {24}
    assert found.plan.plain == {"intermediate_size": 24}
    assert found.plan.budget is not None
    assert found.plan.budget.chosen == "uniform"


@pytest.mark.often("dropped0")
@pytest.mark.parametrize("dropped", [{"keep_layers": [0, 2]}, {"drop_layers": "auto"}])
def test_fewer_blocks_and_neurons(dropped: dict[str, Any], tmp_path: Path) -> None:
    model = deep("bert").build()
    model.save_pretrained(tmp_path / "dense")
    recipe = _recipe(target=0.6, calibration={}, **dropped)
    done = convert(str(tmp_path / "dense"), recipe, tmp_path / "small", data=calibration("bert"))
    config = json.loads((done.folder / "config.json").read_text())
    depth = done.manifest.plan.depth
    assert depth is not None
    assert config["num_hidden_layers"] == depth.kept
    made = type(model).from_pretrained(done.folder)
    assert config["intermediate_size"] == made.bert.encoder.layer[0].intermediate.dense.out_features
    assert report_of(done.folder).parameters.total.dense == model.num_parameters()


def test_the_largest_width_that_is_fast_enough() -> None:
    """Time grows evenly with the width, and a tenth is left without any."""
    timed: list[int] = []

    def speed(width: int) -> Any:
        timed.append(width)
        return width, 1 / (0.1 + 0.9 * width / 1536)

    widths = range(16, 1536, 16)
    assert resources._fast_enough(widths, widths[-1], speed, 2.0) == (
        672,
        pytest.approx(2.025, abs=0.01),
    )
    assert len(timed) <= TRIES
    assert resources._fast_enough(widths, 320, speed, 2.0)[0] == 320
    assert resources._fast_enough(widths, widths[-1], speed, 50.0)[0] == 16


def test_a_time_chooses_the_width(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def speedups(clock: ModelClock, made: Any) -> list[float]:
        config = with_keys(clock.source, made.plain).config
        return [1 / (0.2 + 0.8 * config.intermediate_size / 64)]

    monkeypatch.setattr(ModelClock, "speedups", speedups)
    monkeypatch.setattr("tcompress.conversion.converter.bench", lambda *_, **__: None)
    asked = {**WIDTH, "aware": True, "plain": True, "at": "2x8"}
    made = make("bert", tmp_path / "fast", speedup=2.0, **asked)
    assert _widths(made) == {24}
    assert made.plan.budget is not None
    assert made.plan.budget.speedup == pytest.approx(2.0)
    both = make("bert", tmp_path / "both", speedup=2.0, target=0.55, **asked)
    assert _widths(both) == {4}
    with pytest.raises(PlanError, match=r"at 2x8: with 4 neurons 4 x was reached"):
        make("bert", tmp_path / "slow", speedup=9.0, **asked)


# ---------------------------------------------------------------- afterwards
def test_what_was_written_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def negated(*arguments: Any) -> dict[str, Any]:
        return {name: -value for name, value in plain_tensors(*arguments).items()}

    monkeypatch.setattr(outputs, "plain_tensors", negated)
    with pytest.raises(WriteError, match=r"output.dense.weight`.* its values are others"):
        make("bert", tmp_path, aware=True, plain=True, **HALF)
    assert not (tmp_path / "small").exists()


def test_reports_and_healing_know_where_it_comes_from(pairs: dict[str, Pair]) -> None:
    one, usual = pairs["bert"]
    found, other = (report_of(made.folder) for made in (one, usual))
    assert found.plain == {"intermediate_size": 32}
    assert found.parameters == other.parameters
    assert [layer.parameters for layer in found.layers] == [own.parameters for own in other.layers]
    assert (found.errors, found.is_smaller) == (other.errors, True)
    teacher = find_teacher("source", read_manifest(one.folder))
    assert teacher is not None
    assert teacher.folder == one.source
    with pytest.raises(ArtifactError, match="a plain model already"):
        Artifact.open(one.folder)


def test_the_clock_runs_the_plain_model_itself(pairs: dict[str, Pair]) -> None:
    one = pairs["bert"].plain
    clock = object.__new__(ModelClock)
    clock.source = SourceModel.open(str(one.source))
    clock._weights = RandomWeights(torch.device("cpu"), torch.float32)
    small = clock._small(one.plan)
    assert type(small) is type(one.dense)
    assert small.num_parameters() == one.plan.parameters - one.plan.saved
