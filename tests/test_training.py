"""What a loaded model can do: generate, be copied, train."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from tcompress.artifact.reader import Artifact
from tests.support.conversions import OPTIONS, Made, distance, outputs, structured
from tests.support.tiny import TINY

Models = Callable[[str, str], Made]


@pytest.mark.parametrize(
    ("family", "option"),
    [("llama", "fitted"), ("gpt2", "residual"), ("t5", "dct"), ("mixtral", "svd"), ("bart", "dct")],
)
def test_generation_with_a_cache(family: str, option: str, models: Models) -> None:
    made = models(family, option)
    model, ids = made.load(), made.inputs()["input_ids"][:1]
    free = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cached, plain = (
        model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=flag, **free)
        for flag in (True, False)
    )
    assert torch.equal(cached, plain)
    assert cached.shape[1] >= 6


@pytest.mark.parametrize(
    ("way", "family", "option"),
    [
        ("deepcopy", "llama", "fitted"),
        ("pickle", "mixtral", "fitted"),
        ("loaded again", "llama", "fitted"),
    ],
)
def test_copies_are_whole_and_independent(
    way: str, family: str, option: str, models: Models
) -> None:
    made = models(family, option)
    model, inputs = made.load(), made.inputs()
    wanted = outputs(model, inputs)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = made.load()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert distance(outputs(twin, inputs), wanted) == 0
    layers = set(twin.modules())
    assert all(layer._input_owner[0] in layers for layer in structured(twin).values())


@pytest.mark.parametrize("option", OPTIONS)
def test_two_steps_of_adamw_change_every_tensor(option: str, models: Models) -> None:
    made = models("bert", option)
    _check_training(made.load(), made.inputs())


@pytest.mark.parametrize(("family", "option"), [("mixtral", "fitted"), ("t5", "residual")])
def test_training_of_other_families(family: str, option: str, models: Models) -> None:
    made = models(family, option)
    _check_training(made.load(), TINY[family].inputs(8, 16, 0))


def _check_training(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    model.train()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if ".tc_" in n}
    assert before
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    labels = inputs.get("decoder_input_ids", inputs["input_ids"])
    for _ in range(2):
        optimiser.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimiser.step()
    for name, tensor in before.items():
        after = model.get_parameter(name)
        assert bool(torch.isfinite(after).all()), name
        assert bool((after != tensor).any()), name


def test_trainer(models: Models, tmp_path: Path) -> None:
    made = models("bert", "fitted")
    model = made.load()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    texts = TINY["bert"].inputs(8, 8, 0)
    texts["labels"] = texts["input_ids"]
    rows = [{name: values[row] for name, values in texts.items()} for row in range(8)]
    options = TrainingArguments(
        str(tmp_path / "runs"),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_steps=1,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=options, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    Artifact.open(tmp_path / "trained")
    again = type(made.dense).from_pretrained(tmp_path / "trained").eval()
    assert distance(outputs(model.eval(), made.inputs()), outputs(again, made.inputs())) <= 1e-6
    changed = [n for n, t in again.state_dict().items() if ".tc_" in n and not t.equal(before[n])]
    assert len(changed) == sum(".tc_" in name for name in before)
    middle = type(made.dense).from_pretrained(tmp_path / "runs" / "checkpoint-1")
    Trainer(model=middle, args=options, train_dataset=rows).train(
        resume_from_checkpoint=str(tmp_path / "runs" / "checkpoint-1")
    )
    assert distance(outputs(middle.eval(), made.inputs()), outputs(again, made.inputs())) <= 1e-5


@pytest.mark.parametrize(
    ("family", "option", "reentrant"), [("llama", "fitted", True), ("mixtral", "residual", False)]
)
def test_gradient_checkpointing(family: str, option: str, reentrant: bool, models: Models) -> None:
    made = models(family, option)
    inputs = made.inputs()
    gradients = []
    for checkpointed in (False, True):
        model = made.load().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(gradient is not None for gradient in gradients[0])
    assert distance(*gradients) <= 1e-6
