"""Artefacts that earlier editions wrote: they load, and compute what they did then.

Every structure and every mechanism is in one of them; their recipes are in their manifests. No
option writes them anew: who changes the format adds a folder of the new edition beside them.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

import tcompress  # noqa: F401  # loads converted models
from tests.support.cli import worked
from tests.support.conversions import load_whole

HERE = Path(__file__).parent / "editions"
FOLDERS = sorted(path.parent for path in HERE.glob("*/*/tcompress.json"))
IDS = [str(folder.relative_to(HERE)) for folder in FOLDERS]
TOKENS = torch.arange(16).reshape(2, 8) % 20 + 4


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_it_computes_what_it_did(folder: Path) -> None:
    model = load_whole(AutoModelForMaskedLM, folder)
    wanted = load_file(folder.with_suffix(".safetensors"))["logits"]
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_commands_read_it(folder: Path) -> None:
    worked("inspect", folder)
    worked("inspect", folder, "--verify")
    worked("report", folder)
