"""Passes over the data whose products are bfloat16."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from tcompress.conversion import converter
from tcompress.conversion.converter import Converted, convert
from tcompress.options import Convert
from tests.support.conversions import Told, calibration, recipe
from tests.support.tiers import tiered
from tests.support.tiny import TINY, build

CASES = [*product(TINY, ("svd", "width"))]
OFTEN = [("bert", "svd"), ("tcompress_text", "svd")]


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., Converted]:
    def make(family: str, option: str, precision: str) -> Converted:
        build(family).save_pretrained(tmp_path / "dense")
        asked = recipe(option, aware=True, target=0.6).model_dump()
        asked["calibration"]["mixed_precision"] = precision
        return convert(
            str(tmp_path / "dense"),
            Convert.model_validate(asked),
            tmp_path / precision,
            data=calibration(family),
        )

    return make


@pytest.mark.parametrize(("family", "option"), tiered(CASES, OFTEN.__contains__))
def test_errors_are_about_those_of_float32(
    converted: Callable[..., Converted], family: str, option: str
) -> None:
    exact, rough = (converted(family, option, precision).manifest for precision in ("no", "bf16"))
    errors = [
        torch.tensor([value for fit in manifest.fit.values() for value in fit.values()])
        for manifest in (exact, rough)
    ]
    assert errors[0].isfinite().all()
    assert not torch.equal(*errors)
    # Other channels may stay.
    rtol = 0.5 if option == "width" else 0.3
    torch.testing.assert_close(errors[1].mean(), errors[0].mean(), rtol=rtol, atol=5e-3)


@pytest.mark.parametrize("fast", [True, False])
def test_processors_without_such_products_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(converter, "multiplies_bfloat16", lambda: fast)
    build("bert").save_pretrained(tmp_path / "dense")
    asked = {"method": {"name": "svd"}, "target": 0.5, "device": "cpu"}
    recipe = Convert.model_validate({**asked, "calibration": {"mixed_precision": "bf16"}})
    told = Told()

    def stop(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(converter, "choose", stop)
    with pytest.raises(InterruptedError):
        convert(
            str(tmp_path / "dense"),
            recipe,
            tmp_path / "small",
            data=calibration("bert"),
            progress=told,
        )
    assert any("--mixed-precision" in text for text in told.texts) is not fast
