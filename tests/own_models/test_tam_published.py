"""TAM as published: padding, attention maps, and mistakes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

import tcompress
from tcompress.errors import DataError, InputError
from tcompress.own_models.configs import TCompressTamConfig
from tcompress.own_models.tam import (
    TCompressTamForPreTraining,
    TCompressTamForSequenceClassification,
)
from tcompress.training.objectives import predicted_at

SIZES: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 12, "attention_size": 5, "num_hidden_layers": 2, "cores": 2,
    "intermediate_size": 16, "max_position_embeddings": 24, "memory_length": 12,
    "semantics_length": 6, "initializer_range": 0.4,
}  # fmt: skip
LENGTHS = ((6, 3, 4), (4, 2, 3))  # of the three texts: the first query is longer than D


def _model(kind: Any = TCompressTamForSequenceClassification, **options: Any) -> Any:
    torch.manual_seed(0)
    model = kind(TCompressTamConfig(**SIZES, **options)).double().eval()
    with torch.no_grad():  # biases, and cores that differ
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def _batch() -> dict[str, Tensor]:
    longest = max(map(sum, LENGTHS))
    rows = [[text for text, count in enumerate(row) for _ in range(count)] for row in LENGTHS]
    types = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    ids = torch.randint(5, 30, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": types}


@pytest.mark.parametrize("without", ["nothing", "semantic-fusing", "query-alignment"])
def test_a_padded_batch_equals_single_examples(without: str) -> None:
    """That single ones are the paper's, `tests/reference` says."""
    model, batch = _model(without=without), _batch()
    with torch.no_grad():
        together = model.model(**batch).last_hidden_state
        for row, lengths in enumerate(LENGTHS):
            alone = {name: x[row : row + 1, : sum(lengths)] for name, x in batch.items()}
            single = model.model(**alone).last_hidden_state[0, : lengths[0]]
            torch.testing.assert_close(together[row, : lengths[0]], single)


def test_attention_maps_are_returned_on_request() -> None:
    """Their numbers are the paper's, `tests/reference` says; what is padded has none."""
    model, batch = _model(), _batch()
    with torch.no_grad():
        assert model(**batch).attentions is None
        maps = model(**batch, output_attentions=True).attentions
    assert [item.shape for item in maps] == [(2, 1, 13, 13)] * 2
    for row, (first, second, _) in enumerate(LENGTHS):
        assert (maps[0][row, 0, :first, first + second :] == 0).all()


@pytest.mark.parametrize("without", ["nothing", "semantic-fusing"])
def test_its_layers_take_structures(without: str, tmp_path: Path) -> None:
    """Where weights have the rank that is asked for, it computes what it did."""
    model, batch = _model(without=without).float(), _batch()
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            left, values, right = torch.linalg.svd(module.weight.data, full_matrices=False)
            module.weight.data = left[:, :2] * values[:2] @ right[:2]
    model.save_pretrained(tmp_path / "dense")
    done = tcompress.convert(
        tmp_path / "dense", method="svd", rank=2, calibration="none", output=tmp_path / "small"
    )
    assert len(done.manifest.plan.layers) >= 2 * 4
    small = AutoModelForSequenceClassification.from_pretrained(done.folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(small(**batch).logits, model(**batch).logits)


def test_words_are_predicted_where_they_are_hidden_alone() -> None:
    model, batch = _model(TCompressTamForPreTraining), _batch()
    words = torch.full_like(batch["input_ids"], -100)
    words[0, 2] = words[1, 1] = 3
    with torch.no_grad():
        all_words = model(**batch)
        with predicted_at(model, words):
            some = model(**batch)
    assert all_words.seq_relationship_logits.shape == (2, 2)
    torch.testing.assert_close(some.prediction_logits, all_words.prediction_logits[words != -100])


# ---------------------------------------------------------------- mistakes
def test_a_missing_third_input_is_named() -> None:
    model, batch = _model(), _batch()
    two = batch["token_type_ids"].clamp(max=1)
    with pytest.raises(DataError, match="third input is missing: 2 of 2 examples have no"):
        model(**{**batch, "token_type_ids": two})
    del batch["token_type_ids"]
    with pytest.raises(DataError, match="was not told them apart"):
        model(**batch)


def test_an_unknown_ablation_is_named() -> None:
    with pytest.raises(InputError, match="`without: softmax` is not known; allowed are `nothing`"):
        TCompressTamConfig(without="softmax")
