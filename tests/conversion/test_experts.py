"""Mixtures of experts of every layout: found, converted, loaded, saved again and exported."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tcompress.blockwise.output_sampler import OutputSampler
from tcompress.blockwise.sensitivity import BackwardWalk, input_moments
from tcompress.conversion.converter import Converted, convert
from tcompress.data.calibration import CalibrationData
from tcompress.exports import dense as exporting
from tcompress.fitting import block_rewrite
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.roles.find import find_roles
from tests.support.calibrating import one_by_one
from tests.support.conversions import distance, load_whole, outputs
from tests.support.tiny import EXPERTS, TinyModel

SVD = {"method": {"name": "svd"}, "target": 0.6}


def _thin(tiny: TinyModel) -> Any:
    """The model with matrices of rank 2, which a truncated SVD keeps as they are."""
    model, generator = tiny.build(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name and "lm_head" not in name:
                *lead, rows, columns = weight.shape
                left = torch.randn(*lead, rows, 2, generator=generator)
                right = torch.randn(*lead, 2, columns, generator=generator)
                weight.copy_(left @ right * (2 * columns) ** -0.5)
    return model


def _converted(
    dense: Any, folder: Path, data: CalibrationData | None = None, **changes: Any
) -> Converted:
    """Save a model as `<folder>/dense` and convert it to `<folder>/small`."""
    dense.save_pretrained(folder / "dense")
    source = {"source": "none" if data is None else "builtin"}
    recipe = Convert.model_validate({"calibration": source, **SVD, **changes})
    return convert(str(folder / "dense"), recipe, folder / "small", data=data)


def _batches(layout: str, count: int) -> CalibrationData:
    drawn = [EXPERTS[layout].inputs(2, 6, seed) for seed in range(count)]
    return CalibrationData(drawn, [count - 1], "tiny", 2 * count, 12 * count, layout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[nn.Module, Converted]]:
    """Dense models, and what became of them without data."""

    def make(layout: str) -> tuple[nn.Module, Converted]:
        folder = tmp_path_factory.mktemp("experts")
        dense = _thin(EXPERTS[layout])
        return dense, _converted(dense, folder)

    return cache(make)


@pytest.mark.often("a module for each weight", "one product for all")
@pytest.mark.parametrize("layout", EXPERTS)
def test_rank_two_is_kept_through_loading_saving_and_exporting(
    layout: str, made: Callable[[str], Any], tmp_path: Path
) -> None:
    dense, converted = made(layout)
    kind, inputs = type(dense), EXPERTS[layout].inputs(2, 6, 50)
    model = load_whole(kind, converted.folder)
    wanted = outputs(dense, inputs)
    assert distance(outputs(model, inputs), wanted) < 1e-4
    model.save_pretrained(tmp_path / "again")
    again = kind.from_pretrained(tmp_path / "again")
    assert distance(outputs(again, inputs), outputs(model, inputs)) == 0
    exporting.export_dense(converted.folder, tmp_path / "dense")
    exported = load_whole(kind, tmp_path / "dense")
    assert distance(outputs(exported, inputs), wanted) < 1e-4


@pytest.mark.parametrize("layout", EXPERTS)
def test_all_but_what_chooses_is_rewritten(layout: str, made: Callable[[str], Any]) -> None:
    dense, converted = made(layout)
    plan = converted.manifest.plan
    named = {item.name for item in plan.left}
    blocks = {block.name for block in find_roles(dense).blocks}
    rewritten = {(entry.name, entry.parameter) for entry in plan.layers}
    assert len(rewritten) == len(plan.layers)
    total = sum(
        weight.numel()
        for name, weight in dense.named_parameters()
        if any(name.startswith(f"{block}.") for block in blocks)
        and (weight.ndim == 3 or (weight.ndim == 2 and "bias" not in name))
        and not any(name.startswith(left) for left in named)
    )
    assert sum(entry.dense_parameters for entry in plan.layers) == total
    chooses = {
        name
        for name, module in dense.named_modules()
        if any(weight.ndim == 2 for weight in module.parameters(recurse=False))
        and any(mark in name for mark in ("router", "mlp.gate.", "_gate.", "indexer"))
    }
    assert chooses <= named
    if layout == "indexer":
        assert sum("indexer" in name for name in named) == 6


SIZED = ("shared expert", "list", "one product for all")


@pytest.mark.often(
    "chunked-False", "one product for all-False", "list, two experts for a token-False"
)
@pytest.mark.parametrize(
    ("layout", "by_loss"), [*((name, False) for name in EXPERTS), *((name, True) for name in SIZED)]
)
def test_a_few_tokens_suffice(layout: str, by_loss: bool, tmp_path: Path) -> None:
    dense, allocation = EXPERTS[layout].build(), "loss" if by_loss else "uniform"
    converted = _converted(dense, tmp_path, _batches(layout, 2), allocation=allocation)
    model = type(dense).from_pretrained(converted.folder)
    assert all(
        bool(torch.isfinite(item).all()) for item in outputs(model, _batches(layout, 1).batches[0])
    )
    dark = [text for text in converted.manifest.plan.warnings if "fitted without data" in text]
    assert len(dark) == (layout in ("a module for each weight", "one product for all"))


@pytest.mark.parametrize(("layout", "only"), [("chunked", "*.0.*"), ("latent attention", "*down*")])
def test_what_stays_dense_is_converted_on_saving_beside_what_does_not(
    layout: str, only: str, tmp_path: Path
) -> None:
    """Transformers stores the experts of these families one by one."""
    dense = _thin(EXPERTS[layout])
    converted = _converted(dense, tmp_path, only=[only])
    assert any(entry.experts for entry in converted.manifest.plan.layers)
    model = type(dense).from_pretrained(converted.folder)
    model.save_pretrained(tmp_path / "again")
    again = load_whole(type(dense), tmp_path / "again")
    inputs = EXPERTS[layout].inputs(2, 6, 50)
    assert distance(outputs(again, inputs), outputs(dense, inputs)) < 1e-4


@pytest.mark.often("chunked")
@pytest.mark.parametrize("layout", ["chunked", "transposed, biased, interleaved"])
def test_calibrated_experts_are_nearer_on_their_tokens(layout: str, tmp_path: Path) -> None:
    dense: Any = EXPERTS[layout].build()
    errors = []
    for data in (None, _batches(layout, 8)):
        converted = _converted(dense, tmp_path / str(len(errors)), data, target=0.5)
        model: Any = type(dense).from_pretrained(converted.folder)
        drawn = [EXPERTS[layout].inputs(2, 6, seed) for seed in range(4)]
        gaps = (outputs(dense, inputs)[0] - outputs(model, inputs)[0] for inputs in drawn)
        errors.append(sum(float(gap.norm()) for gap in gaps))
    assert errors[1] < errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in EXPERTS if name.startswith("list")])
def test_padding_is_no_row_of_listed_experts(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded texts give the rows that the same texts give one by one."""
    fitted: list[int] = []
    add = block_rewrite.add_rows

    def counted(sums: block_rewrite.Sums, rows: block_rewrite.Rows, **options: Any) -> None:
        fitted.append(len(rows[1]))
        add(sums, rows, **options)

    monkeypatch.setattr(block_rewrite, "add_rows", counted)
    dense: Any = EXPERTS[layout].build()
    dense.save_pretrained(tmp_path / "dense")
    source, device = SourceModel.open(str(tmp_path / "dense")), torch.device("cpu")
    roles = find_roles(source.meta_model())
    names = [layer.name for layer in roles.layers if "expert_" in layer.name]
    assert len(names) == 2 * 2 * dense.config.num_experts
    padded = [EXPERTS[layout].inputs(4, 12, seed) for seed in range(3)]
    alone = [text for batch in padded for text in one_by_one(batch)]
    chosen = {**SVD, "allocation": "uniform", "calibration": {"output_moments": False}}
    recipe = Convert.model_validate(chosen)
    rows, groups = [], []
    for batches, held in ((padded, 1), (alone, 4)):
        read = input_moments(source, names, batches, device)
        walk = BackwardWalk(source, batches, OutputSampler(None), tmp_path, device)
        for walked in (read, walk.run()):
            found = {name: worth.rows for _, block in walked for name, worth in block.items()}
            rows.append({name: found[name] for name in names})
        holdout = list(range(len(batches) - held, len(batches)))
        data = CalibrationData(batches, holdout, "tiny", 12, 144, layout)
        convert(str(tmp_path / "dense"), recipe, tmp_path / f"{held}", data=data)
        groups.append(sum(fitted))  # a run of batches has sums of its own
        fitted.clear()
    assert rows[0] == rows[1] == rows[2] == rows[3]
    assert sum(rows[0].values()) > 0
    assert groups[0] == groups[1]
