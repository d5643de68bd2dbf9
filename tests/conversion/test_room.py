"""Free memory and disk, looked at before a conversion begins."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tcompress.conversion import estimate
from tcompress.conversion.converter import convert
from tcompress.errors import DiskError
from tcompress.models import SourceModel
from tcompress.options import Convert
from tests.support.conversions import Told, calibration

RECIPE = {"method": {"name": "svd"}, "target": 0.3, "device": "cpu"}
DATA = {"source": "builtin", "samples": 256}


def test_a_small_disk_stops_it_before_any_work(
    tmp_path: Path, sources: Callable[[str], SourceModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "free_bytes", lambda _: 600_000)
    recipe = Convert.model_validate({**RECIPE, "calibration": DATA, "allocation": "loss"})
    with pytest.raises(DiskError, match=r"are needed .* 0\.6 MB are free") as refused:
        convert(sources("llama"), recipe, tmp_path / "out", data=calibration("llama"))
    hint = refused.value.hint or ""
    assert re.search(r"`--calib-samples \d+` \(about .* `--calib none` \(about", hint)
    assert not [*tmp_path.glob("out*")]


def test_little_memory_is_told(
    tmp_path: Path, sources: Callable[[str], SourceModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "free_memory", lambda _: 20_000)
    told = Told()
    recipe = Convert.model_validate({**RECIPE, "calibration": {"source": "none"}})
    convert(sources("llama"), recipe, tmp_path / "out", progress=told)
    [text] = told.texts
    assert text.startswith("warning: about 0.1 MB of memory will be needed, and 0.0 MB are free")


def test_no_data_is_no_way_out_where_data_decides(
    tmp_path: Path, sources: Callable[[str], SourceModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "free_bytes", lambda _: 600_000)
    method = {"method": {"name": "auto"}, "target": None, "max_loss": 0.01}
    recipe = Convert.model_validate({**RECIPE, **method, "calibration": DATA})
    with pytest.raises(DiskError) as refused:
        convert(sources("llama"), recipe, tmp_path / "out", data=calibration("llama"))
    assert "`--calib-samples" in (refused.value.hint or "")
    assert "`--calib none`" not in (refused.value.hint or "")
