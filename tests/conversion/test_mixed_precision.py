"""Passes over the data whose products are bfloat16."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tcompress.blockwise.streams import PartialModel
from tcompress.conversion import converter
from tcompress.conversion.converter import convert
from tcompress.models import SourceModel
from tcompress.options import Convert
from tests.support.conversions import Told, calibration, make, recipe
from tests.support.tiny import TINY, build


@pytest.mark.often("bert-svd", "tcompress_text-svd")
@pytest.mark.parametrize(("family", "option"), [*product(TINY, ("svd", "width"))])
def test_errors_are_about_those_of_float32(family: str, option: str, tmp_path: Path) -> None:
    errors = []
    for precision in ("no", "bf16"):
        data = {"source": "builtin", "mixed_precision": precision}
        made = make(family, tmp_path / precision, option, aware=True, target=0.6, calibration=data)
        fits = made.converted.manifest.fit.values()
        errors.append(torch.tensor([value for fit in fits for value in fit.values()]))
    assert errors[0].isfinite().all()
    assert not torch.equal(*errors)
    # Other channels may stay.
    rtol = 0.5 if option == "width" else 0.3
    torch.testing.assert_close(errors[1].mean(), errors[0].mean(), rtol=rtol, atol=5e-3)


@pytest.mark.often("llama", "t5", "mixtral")
@pytest.mark.parametrize("family", TINY)
def test_weights_that_are_bfloat16_are_multiplied_as_they_are(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(family).bfloat16().save_pretrained(tmp_path / "dense")
    data = {"source": "builtin", "mixed_precision": "bf16"}
    asked = recipe("svd", aware=True, target=0.6, calibration=data)
    is_product = PartialModel._is_product
    answers, written = [], list[bytes]()

    def answered(model: PartialModel, name: str) -> bool:
        answers.append(is_product(model, name))
        return answers[-1]

    for answer in (answered, lambda *_: False):
        monkeypatch.setattr(PartialModel, "_is_product", answer)
        output = tmp_path / str(len(written))
        convert(str(tmp_path / "dense"), asked, output, data=calibration(family))
        written.append((output / "model.safetensors").read_bytes())
    assert any(answers) or family == "gpt2"  # whose layers are no `nn.Linear`
    assert written[0] == written[1]


@pytest.mark.parametrize("fast", [True, False])
def test_processors_without_such_products_are_told_of(
    fast: bool,
    sources: Callable[[str], SourceModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(converter, "multiplies_bfloat16", lambda: fast)
    monkeypatch.setattr(converter, "choose", Mock(side_effect=InterruptedError))
    asked = {"method": {"name": "svd"}, "target": 0.5, "device": "cpu"}
    chosen = Convert.model_validate({**asked, "calibration": {"mixed_precision": "bf16"}})
    told, data = Told(), calibration("bert")
    with pytest.raises(InterruptedError):
        convert(sources("bert"), chosen, tmp_path / "small", data=data, progress=told)
    assert any("--mixed-precision" in text for text in told.texts) is not fast
