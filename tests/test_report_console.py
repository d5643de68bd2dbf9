"""The tables of reports and plans, as they look 100 columns wide without colour."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from tcompress.artifact.manifest import CalibrationFacts, Metric
from tcompress.conversion.estimate import Estimate
from tcompress.planning.entries import Plan
from tcompress.planning.planner import make_plan
from tcompress.reporting.console import layer_table, render, render_plan
from tcompress.reporting.model import ModelReport, mean_errors, report_of
from tcompress.source import SourceModel
from tests.support.converted import converted, recipe
from tests.support.tiny import build

SUM = {"name": "lprod", "p": 8}


def shown(what: RenderableType, width: int = 100) -> str:
    """Print without colour; spaces at the ends of lines and empty lines are left out."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, force_terminal=False).print(what)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelReport]:
    """A converted and a dense model, with errors and a source that do not vary."""
    folder = tmp_path_factory.mktemp("models")
    small = report_of(
        converted("gpt2", folder, method=SUM, target=0.5, keep=["h.1.mlp.*"]).folder, 16
    )
    layers = [
        layer.model_copy(update={"errors": {"held_out": 0.1 + index / 100, "calibration": 0.1}})
        for index, layer in enumerate(small.layers)
    ]
    facts = CalibrationFacts(name="builtin text", samples=1024, tokens=19971)
    metric = Metric(name="perplexity", value=12.3456, protocol={})
    small = small.model_copy(
        update={
            "layers": tuple(layers),
            "errors": mean_errors(layers),
            "source": "tests/gpt2",
            "calibration": facts,
            "metrics": (metric,),
        }
    )
    return {"small": small, "dense": report_of(folder / "gpt2", 16)}


NOTE = """\
held-out error: squared, as a fraction of what layers put out for data that the fit did not see;
calibration error: squared, as a fraction of what layers put out for the data that they were fitted
to. 0 is exact, 1 as bad as zeros. The smaller of two conversions is the better one, if both are of
one kind; what a task loses, `tcompress evaluate` measures.
"""

TOTALS = """\
gpt2-small
gpt2 · lprod · calibration builtin text, 1,024 samples
from tests/gpt2
 parameters           dense      now    kept
 ───────────────────────────────────────────
 rewritten layers    12,288    6,144   50.0%
 all blocks          17,088   10,944   64.0%
 embeddings           5,248    5,248  100.0%
 other                   64       64  100.0%
 whole model         22,400   16,256   72.6%
 bytes on disk      89.6 kB  70.5 kB   78.7%
 MACs/token, T=16    21,632   17,024   78.7%
 held-out error               0.1250
 calibration error            0.1000
 perplexity                    12.35
"""

COVERED = """\
rewritten: 12.3 k of 22.4 k parameters (55 %); embeddings 5.25 k, norms and biases 768, left dense:
up 2.05 k, down 2.05 k
"""

LAYERS = """\
                                                                    held-out
 block  role  structure                    in → out  params   kept     error
 ───────────────────────────────────────────────────────────────────────────
 h.0    qkv   lprod p=8 dct + lowrank r=6   32 → 96   1,536  50.0%    0.1000
        o     lprod p=8 dct + lowrank r=6   32 → 32     512  50.0%    0.1100
        up    lprod p=8 dct + lowrank r=8   32 → 64   1,024  50.0%    0.1200
        down  lprod p=8 dct + lowrank r=8   64 → 32   1,024  50.0%    0.1300
 h.1    qkv   lprod p=8 dct + lowrank r=6   32 → 96   1,536  50.0%    0.1400
        o     lprod p=8 dct + lowrank r=6   32 → 32     512  50.0%    0.1500
"""

LEFT = """\
 left dense  such as                          because
 ─────────────────────────────────────────────────────────────────────
          2  transformer.h.1.mlp.c_fc.weight  kept dense by the recipe
"""

SIDE_BY_SIDE = """\
                               gpt2                   gpt2-small
 ───────────────────────────────────────────────────────────────
 family                        gpt2                         gpt2
 method                       dense                        lprod
 calibration                         builtin text, 1,024 samples
 rewritten layers                                  6,144   50.0%
 all blocks          17,088  100.0%               10,944   64.0%
 embeddings           5,248  100.0%                5,248  100.0%
 other                   64  100.0%                   64  100.0%
 whole model         22,400  100.0%               16,256   72.6%
 bytes on disk      92.2 kB  100.0%              70.5 kB   78.7%
 MACs/token, T=16    21,632  100.0%               17,024   78.7%
 held-out error                                           0.1250
 calibration error                                        0.1000
 perplexity                                                12.35
"""

BY_ROLE = """\
                                                                     held-out
 layers  role  structure                    in → out  params   kept     error
 ────────────────────────────────────────────────────────────────────────────
 14      qkv   lprod p=8 dct + lowrank r=6   32 → 96  21,504  50.0%    0.1200
 14      o     lprod p=8 dct + lowrank r=6   32 → 32   7,168  50.0%    0.1300
 7       up    lprod p=8 dct + lowrank r=8   32 → 64   7,168  50.0%    0.1200
 7       down  lprod p=8 dct + lowrank r=8   64 → 32   7,168  50.0%    0.1300
"""

NARROW = """\
                                                   held-out
 block  role  structure   in → out  params   kept     error
 ──────────────────────────────────────────────────────────
 h.0    qkv   lprod p=8    32 → 96   1,536  50.0%    0.1000
              dct +
              lowrank
              r=6
        o     lprod p=8    32 → 32     512  50.0%    0.1100
"""


def test_one_model(reports: dict[str, ModelReport]) -> None:
    assert shown(render([reports["small"]])) == TOTALS + COVERED + NOTE + LAYERS + LEFT
    older = reports["small"].model_copy(update={"coverage": None})  # of a version without it
    assert shown(render([older])) == TOTALS + NOTE + LAYERS + LEFT


def test_a_dense_model(reports: dict[str, ModelReport]) -> None:
    lines = shown(render([reports["dense"]])).splitlines()
    assert lines[:2] == ["gpt2", "gpt2 · dense"]
    assert lines[4] == " all blocks         17,088   17,088  100.0%"
    assert len(lines) == 10


def test_models_side_by_side(reports: dict[str, ModelReport]) -> None:
    both = [reports["dense"], reports["small"]]
    assert shown(render(both)) == SIDE_BY_SIDE + NOTE
    assert shown(render(both, per_layer=True)) == SIDE_BY_SIDE + NOTE + "gpt2-small\n" + LAYERS


def test_models_one_below_the_other_in_a_narrow_terminal(reports: dict[str, ModelReport]) -> None:
    lines = shown(render([reports["dense"], reports["small"]]), width=60).splitlines()
    assert lines[0].split() == ["gpt2"]
    tables = lines[
        : lines.index(next(line for line in lines if line.startswith("held-out error:")))
    ]
    assert [line.split() for line in tables].index(["gpt2-small"]) == len(tables) // 2 - 1


def test_models_of_one_name_are_told_apart(reports: dict[str, ModelReport]) -> None:
    both = [reports["small"].model_copy(update={"name": name}) for name in ("a/small", "b/small")]
    assert shown(render(both)).splitlines()[0].split() == ["a/small", "b/small"]


def test_layers_in_a_narrow_terminal(reports: dict[str, ModelReport]) -> None:
    assert shown(layer_table(reports["small"].layers), width=60).startswith(NARROW)


def test_many_layers_are_shown_by_role(reports: dict[str, ModelReport]) -> None:
    layers = reports["small"].layers * 7
    assert shown(layer_table(layers)) == BY_ROLE
    assert len(shown(layer_table(layers, per_layer=True)).splitlines()) == 3 + 42


def test_blocks_of_several_stacks_keep_their_names(reports: dict[str, ModelReport]) -> None:
    layer = reports["small"].layers[0]
    names = ("encoder.block.0", "decoder.block.0")
    layers = [layer.model_copy(update={"block": name}) for name in names]
    lines = shown(layer_table(layers)).splitlines()
    assert [line.split()[0] for line in lines[3:]] == list(names)


PLAN = """\
tests/mixtral · mixtral · lprod
 parameters             now           after   kept
 ─────────────────────────────────────────────────
 rewritten layers    49,152          12,288  25.0%
 all blocks          55,680          18,816  33.8%
 whole model         62,112          25,248  40.6%
 bytes on disk     248.4 kB        100.9 kB  40.6%
 peak memory                 about 376.8 kB
 time                         roughly 2.0 h
rewritten: 49.2 k of 62.1 k parameters (79 %); embeddings 3.2 k, norms and biases 160, left dense:
lm_head 3.2 k, q 2.05 k, o 2.05 k, k 1.02 k, v 1.02 k, gate 256
 block     role             structure            in → out  params   kept
 ───────────────────────────────────────────────────────────────────────
 layers.0  experts_gate_up  lprod p=4 dct  4 x (32 → 128)   4,096  25.0%
           experts_down     lprod p=4 dct   4 x (64 → 32)   2,048  25.0%
 layers.1  experts_gate_up  lprod p=4 dct  4 x (32 → 128)   4,096  25.0%
           experts_down     lprod p=4 dct   4 x (64 → 32)   2,048  25.0%
 left dense  such as                                 because
 ──────────────────────────────────────────────────────────────────────────────────────────────────
          8  model.layers.0.self_attn.q_proj.weight  kept dense by the recipe
          2  model.layers.0.mlp.gate                 it routes tokens to experts, which a small
                                                     error changes
"""


def test_a_plan(tmp_path: Path) -> None:
    plan, source = planned(tmp_path, keep=["self_attn.*"])
    costs = Estimate(memory_bytes=376_832, disk_bytes=100_864, seconds=7300)
    plan = plan.model_copy(update={"source": "tests/mixtral"})
    assert shown(render_plan(plan, costs, source.store.total_bytes)) == PLAN


def test_a_plan_without_estimate(tmp_path: Path) -> None:
    text = shown(render_plan(planned(tmp_path)[0].model_copy(update={"warnings": ("careful",)})))
    assert "bytes on disk" not in text
    assert text.splitlines()[-1] == "warning: careful"


def planned(folder: Path, **options: Any) -> tuple[Plan, SourceModel]:
    build("mixtral").save_pretrained(folder / "mixtral")
    source = SourceModel.open(str(folder / "mixtral"))
    return make_plan(recipe(**options), source), source


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "roughly 1 s"), (99, "roughly 99 s"), (600, "roughly 10 min"), (7200, "roughly 2.0 h")],
)
def test_times_are_rough(tmp_path: Path, seconds: float, words: str) -> None:
    costs = Estimate(memory_bytes=5, disk_bytes=3 * 10**12, seconds=seconds)
    text = shown(render_plan(planned(tmp_path)[0], costs))
    assert words in text
    assert "about 5 B" in text
    assert "3.00 TB" in text
