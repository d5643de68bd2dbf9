"""Tensors that layers of several blocks share: stored once, owned by one, used by all."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForSequenceClassification

import tcompress
from tcompress.blockwise import sensitivity
from tcompress.conversion import model_fits
from tcompress.conversion.converter import convert
from tcompress.errors import ArtifactError
from tcompress.exports.dense import export_dense
from tcompress.fitting.workdir import FitWorkplace
from tcompress.hf.build import install_layers
from tcompress.structures import Site, structure
from tcompress.structures.modules.linear import PartLayout, StructuredLinear
from tests.support.conversions import (
    Made,
    assert_wired,
    calibration,
    distance,
    load_whole,
    make,
    outputs,
    recipe,
    structured,
)
from tests.support.interrupted import contents, convert_until_killed, partial_folder
from tests.support.numerics import alike
from tests.support.structures import fill_random, randn
from tests.support.tiny import TINY, build

WIDTH, HEAD = 16, 4
SHARES = ("inputs", "heads", "layers", "model")
METHODS: dict[str, dict[str, Any]] = {
    share: {"method": {"name": "tucker", "share": share}, "target": 0.4} for share in SHARES
}


class Pair(nn.Module):
    """A projection to the residual stream after one from it, over one bank."""

    def __init__(self, *, shared: bool = True) -> None:
        super().__init__()
        into = Site(WIDTH, WIDTH, "in", role="q", block="layers.0", head=HEAD)
        out = Site(WIDTH, WIDTH, "out", role="o", block="layers.0", head=HEAD)
        kind = structure("tucker")
        spec = kind.spec(share="heads", rank=(3, 5), cores=3)
        layouts = [
            kind.layout(spec, Site(**{**vars(site), "sharing_sites": (into, out)}))
            for site in (into, out)
        ]
        self.q, self.o = (self._layer(layout) for layout in layouts)
        if shared:
            self.o = self._layer(layouts[1], factors=self.q.factors)
        fill_random(self)

    @staticmethod
    def _layer(layout: Any, **options: Any) -> StructuredLinear:
        return StructuredLinear(
            [PartLayout(name="w", terms=(layout,))], dtype=torch.float64, bias=True, **options
        )

    @property
    def factor(self) -> Tensor:
        return self.q.tc_bank_heads.u

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.o(self.q(x).tanh())
        return result


def test_the_owner_alone_stores_the_bank() -> None:
    names = {name for name, _ in Pair().named_parameters()}
    own = {f"q.tc_bank_heads.{name}" for name in ("u", "v", "cores")}
    assert names == {"q.tc_mix", "q.bias", "o.tc_mix", "o.bias"} | own
    assert set(Pair().state_dict()) == names | {"q.weight", "o.weight"}


def test_gradients_of_all_users_add_up() -> None:
    pair, alone, x = Pair(), Pair(shared=False), randn(5, WIDTH)
    values = dict(pair.named_parameters())
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            parameter.copy_(values[name.replace("o.tc_bank", "q.tc_bank")])
    for module in (pair, alone):
        module(x).square().sum().backward()
    other = dict(alone.named_parameters())
    for name, parameter in pair.named_parameters():
        wanted = other[name].grad
        if "tc_bank" in name:
            wanted = wanted + other[name.replace("q.tc", "o.tc")].grad
        assert_close(parameter.grad, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    plain, saved, x = Pair(), Pair(), randn(5, WIDTH).requires_grad_()
    plain(x).square().sum().backward()
    y = checkpoint(saved.q, x, use_reentrant=reentrant).tanh()
    checkpoint(saved.o, y, use_reentrant=reentrant).square().sum().backward()
    assert_close(*([value.grad for value in pair.parameters()] for pair in (saved, plain)))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_share_a_bank_of_their_own(copied: Callable[[Pair], Pair]) -> None:
    pair, x = Pair(), randn(5, WIDTH)
    wanted = pair(x)
    other = copied(pair)
    with torch.no_grad():
        pair.factor.zero_()
        assert_close(other(x), wanted)
        before = other.o.dense_weight()
        other.factor.mul_(2)
        assert_close(other.o.dense_weight(), 2 * before)


def test_kept_weights_notice_a_change_of_a_bank_elsewhere() -> None:
    pair, x = Pair().eval(), randn(5, WIDTH)
    tcompress.keep_weights(pair)
    with torch.no_grad():
        before = pair(x)
        assert_close(pair(x), before)
        pair.factor.mul_(1.5)
        after = pair(x)
        tcompress.keep_weights(pair, keep=False)
        assert_close(after, pair(x))
        assert not torch.equal(after, before)


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.float])
def test_casts_reach_all_users(change: Callable[[nn.Module], nn.Module]) -> None:
    pair, x = Pair(), randn(5, WIDTH)
    wanted = pair(x)
    changed = change(pair)
    dtype = next(changed.parameters()).dtype
    assert_close(changed(x.to(dtype)).double(), wanted, rtol=0.05, atol=0.05)


# ---------------------------------------------------------------- models
@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The arrangement of the recipe `bert-tucker-model`, half of everything, on a tiny model."""
    method = {"name": "tucker", "share": "model", "cores": 8, "rank": [16, 16]}
    return make("bert", tmp_path_factory.mktemp("bert"), aware=True, method=method)


@pytest.mark.slow
def test_other_heads_find_the_bank(bert: Made, tmp_path: Path) -> None:
    wanted = outputs(AutoModel.from_pretrained(bert.folder), bert.inputs())
    for kind in (AutoModel, AutoModelForSequenceClassification):
        model = kind.from_pretrained(bert.folder)
        model.save_pretrained(tmp_path / kind.__name__)
        again = AutoModel.from_pretrained(tmp_path / kind.__name__)
        found = outputs(again, bert.inputs())
        assert distance(found[:1], wanted[:1]) == 0
        assert len({id(layer.factors["model"]) for layer in structured(again).values()}) == 1


def test_layers_whose_owner_is_gone_are_refused(bert: Made) -> None:
    model = copy.deepcopy(bert.dense)
    with pytest.raises(ArtifactError, match="shares tensors with layers that this model lacks"):
        install_layers(model, bert.plan.layers[1:], lambda name: name)


# ---------------------------------------------------------------- interruptions and walks
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "moment",
    [
        ("fitting blocks", 6),
        pytest.param(("measuring what layers read", 2), marks=pytest.mark.grid),
    ],
    ids=["after", "before"],
)
def test_killed_and_run_again(
    moment: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "dense"
    build("bert").save_pretrained(source)
    chosen = recipe(aware=True, method={"name": "tucker", "share": "model", "rank": 8})
    convert_until_killed(source, chosen, tmp_path / "out", "bert", moment)
    fitted = partial_folder(tmp_path / "out") / "factors.safetensors"
    assert fitted.exists() is (moment[0] == "fitting blocks")
    with monkeypatch.context() as patch:
        if fitted.exists():
            patch.setattr(model_fits, "input_moments", None)  # not measured again
        convert(str(source), chosen, tmp_path / "out", data=calibration("bert"))
    convert(str(source), chosen, tmp_path / "whole", data=calibration("bert"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def _inputs_alone(own: Any) -> Any:
    return lambda place, kind, block: own(place, kind, block) if kind == "inputs" else {}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", pytest.param("t5", marks=pytest.mark.grid)])
def test_both_walks_measure_the_same_inputs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survey's moments and those of the walk without gradients lead to the same factors."""
    monkeypatch.setattr(sensitivity, "token_weights", alike)
    made = []
    for allocation in ("loss", "uniform"):
        options = {"allocation": allocation, **METHODS["layers"]}
        with monkeypatch.context() as patch:
            if allocation == "loss":  # as if the survey had not looked at outputs
                patch.setattr(FitWorkplace, "moments", _inputs_alone(FitWorkplace.moments))
            made.append(make(family, tmp_path / allocation, aware=True, **options))
    one, two = (outputs(item.load(), item.inputs()) for item in made)
    assert distance(one, two) <= 1e-4


FUSED = ("gpt2", "gpt_neox", "modernbert", "phi3")  # no two layers read one input


@pytest.mark.grid
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("aware", [False, True])
def test_every_family(family: str, share: str, aware: bool, tmp_path: Path) -> None:
    made = make(family, tmp_path, aware=aware, **METHODS[share])
    assert made.plan.kept <= 0.4
    shares = any(entry.bank_of for entry in made.plan.layers)
    assert shares is not (share == "inputs" and family in FUSED)
    assert_wired(made)


@pytest.mark.often("model")
@pytest.mark.parametrize("share", SHARES)
def test_export(share: str, tmp_path: Path) -> None:
    made = make("gpt2" if share == "layers" else "bert", tmp_path, **METHODS[share])
    export_dense(made.folder, tmp_path / "plain")
    plain = load_whole(type(made.dense), tmp_path / "plain")
    assert not structured(plain)
    found = outputs(made.load(), made.inputs())
    assert distance(outputs(plain, made.inputs()), found) <= 1e-5
