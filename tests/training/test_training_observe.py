"""What is read off a model while it runs, and blocks that are trained alone."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tcompress.errors import InputError
from tcompress.hf.opening import load_model
from tcompress.models import SourceModel
from tcompress.training.objectives import (
    Hidden,
    Observed,
    Observer,
    Setting,
    fed_with,
    loaded_roles,
    token_mask,
)
from tcompress.training.sharding import _apart
from tcompress.training.teacher_outputs import TeacherOutputs
from tests.support.converted import converted
from tests.support.evaluation import labelled_file, pairs_file
from tests.support.tiny import TINY
from tests.support.training import (
    batch_of,
    gradients,
    losses_of,
    small,
    small_encoder,
    texts,
    train,
)

# Norms behind the last block of each stack, which `output_hidden_states` includes.
NORMS: dict[str, tuple[str | None, ...]] = {
    "bert": (None,),
    "deberta-v2": (None,),
    "vit": (None,),
    "clip_text_model": (None,),
    "bart": (None, None),
    "modernbert": ("model.final_norm",),
    "gpt2": ("transformer.ln_f",),
    "llama": ("model.norm",),
    "mixtral": ("model.norm",),
    "t5": ("encoder.final_layer_norm", "decoder.final_layer_norm"),
}
STATES = ("encoder_hidden_states", "decoder_hidden_states", "hidden_states")
pytestmark = pytest.mark.usefixtures("one_thread")


def _observer(folder: Path, blocks: list[int] | None = None, projections: bool = False) -> Observer:
    source = SourceModel.open(str(folder), converted=True)
    model = load_model(source, dtype=torch.float32)
    roles = loaded_roles(source, model)
    every = range(len(roles.blocks))
    return Observer(model, roles, every if blocks is None else blocks, projections)


@pytest.mark.often("llama")
@pytest.mark.parametrize("family", NORMS)
def test_states_are_those_that_the_model_gives(family: str, tmp_path: Path) -> None:
    small = converted(family, tmp_path).folder
    inputs = TINY[family].inputs(2, 8, 0)
    for folder in (tmp_path / family, small):
        observer = _observer(folder)
        seen = observer.run(inputs)
        with torch.no_grad():
            output = observer.model(**inputs, output_hidden_states=True)
        stacks = [output[name] for name in STATES if output.get(name) is not None]
        assert len(seen.states) == 2 * len(stacks) == 2 * len(NORMS[family])
        for index, (stack, name) in enumerate(zip(stacks, NORMS[family], strict=True)):
            first, last = seen.states[2 * index : 2 * index + 2]
            norm = observer.model.get_submodule(name) if name else nn.Identity()
            assert_close(first, stack[1])
            assert_close(norm(last), stack[2])


@pytest.mark.often("llama-widths2")
@pytest.mark.parametrize(
    ("family", "widths"),
    [
        ("bert", {"q": 32, "k": 32, "v": 32}),
        ("gpt2", {"q": 32, "k": 32, "v": 32}),  # one fused layer
        ("llama", {"q": 32, "k": 16, "v": 16}),
        ("t5", {"q": 32, "k": 32, "v": 32}),
    ],
)
def test_projections_of_the_last_block(family: str, widths: dict[str, int], tmp_path: Path) -> None:
    observer = _observer(converted(family, tmp_path).folder, projections=True)
    seen = observer.run(TINY[family].inputs(2, 8, 0))
    assert {role: value.shape[-1] for role, value in seen.projections.items()} == widths
    plain = _observer(converted(family, tmp_path).folder)
    assert plain.run(TINY[family].inputs(2, 8, 0)).projections == {}


def test_chosen_blocks(tmp_path: Path) -> None:
    folder = converted("bert", tmp_path).folder
    inputs = TINY["bert"].inputs(2, 8, 0)
    both, last = _observer(folder), _observer(folder, blocks=[1])
    assert_close(last.run(inputs).states, both.run(inputs).states[1:])


FED = ("bert", "distilbert", "mpnet", "deberta-v2", "modernbert", "gpt2", "llama", "mixtral", "vit")


@pytest.mark.often("modernbert")
@pytest.mark.parametrize("family", FED)
def test_fed_blocks_are_independent(family: str, tmp_path: Path) -> None:
    """Each reads the given state; no gradient reaches another one."""
    observer = _observer(converted(family, tmp_path).folder)
    inputs = TINY[family].inputs(2, 8, 0)
    wanted = [torch.randn_like(state) for state in observer.run(inputs).states]
    with fed_with(observer.modules, wanted):
        seen = observer.run(inputs)
    with torch.no_grad():
        swapped = [wanted[0] + 1, wanted[1]]
        with fed_with(observer.modules, swapped):
            other = observer.run(inputs)
    assert torch.equal(other.states[0], seen.states[0])
    assert not torch.allclose(other.states[1], seen.states[1])
    for index, module in enumerate(observer.modules):
        for one in observer.modules:
            one.zero_grad()
        seen.states[index].square().sum().backward(retain_graph=True)
        assert gradients(module)
        assert not gradients(observer.modules[1 - index])


@pytest.mark.often("gpt2-True")
@pytest.mark.parametrize(
    ("family", "alone"), [("bert", False), ("bert", True), ("gpt2", True), ("llama", False)]
)
def test_gradient_checkpointing_changes_nothing(family: str, alone: bool, tmp_path: Path) -> None:
    """Nor are states observed twice when blocks are computed again."""
    folder, data = small(family, tmp_path), texts(tmp_path)
    found = []
    for checkpointing in (False, True):
        losses = losses_of(folder, data=data, gradient_checkpointing=checkpointing)
        value = float(losses.gradients(batch_of(losses), 1, alone=alone))
        found.append((value, gradients(losses.setup.model)))
    (plain, wanted), (again, gradient) = found
    assert again == pytest.approx(plain)
    assert wanted
    assert_close(gradient, wanted)


def test_blocks_that_are_trained_alone_need_no_others(tmp_path: Path) -> None:
    """The first block's gradients are the same, whatever is in the second."""
    folder, data = small_encoder(tmp_path), texts(tmp_path)
    losses = losses_of(folder, data=data, objectives={"hidden": 1})
    batch, (first, second) = batch_of(losses), losses.setup.observer.modules
    losses.gradients(batch, 1, alone=True)
    before = gradients(first)
    losses.setup.model.zero_grad()
    with torch.no_grad():
        for value in second.parameters():
            value.mul_(2)
    losses.gradients(batch, 1, alone=True)
    assert_close(gradients(first), before)
    losses.setup.model.zero_grad()
    losses.gradients(batch, 1, alone=False)
    assert not torch.allclose(gradients(first)[next(iter(before))], before[next(iter(before))])


def test_a_mask_of_another_shape_is_not_used() -> None:
    batch = {"attention_mask": torch.zeros(2, 5)}
    assert not token_mask(batch, torch.zeros(2, 5, 3)).any()
    assert token_mask(batch, torch.zeros(2, 7, 3)).all()


def test_families_whose_blocks_are_computed_once(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="cannot compute blocks of `MPNetForMaskedLM` twice"
    ) as refused:
        train(small("mpnet", tmp_path), tmp_path / "out", gradient_checkpointing=True)
    assert "--accumulate" in (refused.value.hint or "")


def test_encoders_do_not_learn_to_write(tmp_path: Path) -> None:
    how = {"task": "causal-lm", "teacher": ["none"], "data": texts(tmp_path)}
    with pytest.raises(InputError, match="sees the tokens that it is to predict"):
        train(small_encoder(tmp_path), tmp_path / "out", **how)


def test_models_of_one_head_are_not_pretrained_as_bert_is(tmp_path: Path) -> None:
    data = {"source": [str(pairs_file(tmp_path / "pairs.jsonl", 40))]}
    how = {"task": "pretraining", "teacher": ["none"], "data": data}
    with pytest.raises(InputError, match="`RobertaForMaskedLM` has no head that") as refused:
        train(small("roberta", tmp_path), tmp_path / "out", **how)
    assert "`masked-lm`" in (refused.value.hint or "")


@pytest.mark.parametrize("objectives", [{}, {"hidden": 1.0}])
def test_the_teacher_reads_what_is_validated_where_a_loss_does(
    objectives: dict[str, float], tmp_path: Path
) -> None:
    how = {"task": "masked-lm", "data": texts(tmp_path), "objectives": objectives}
    losses = losses_of(small("roberta", tmp_path), **how)
    reading = patch.object(TeacherOutputs, "of_inputs", side_effect=KeyError)
    with reading, pytest.raises(KeyError) if objectives else nullcontext():
        assert losses.validate(8) > 0


def test_a_new_head_is_trained_whatever_else_is(tmp_path: Path) -> None:
    data = {"source": [str(labelled_file(tmp_path / "rows.jsonl"))]}
    how = {"task": "classification", "train": "rewritten", "data": data}
    trained = losses_of(small_encoder(tmp_path), **how).setup.trained
    assert {"classifier.weight", "classifier.bias"} < {*trained}
    assert "embeddings.word_embeddings.weight" not in str([*trained])


def test_states_of_convolutions_have_channels_first() -> None:
    state, target = torch.randn(2, 6, 3, 4), torch.randn(2, 6, 3, 4)
    rows = [item.flatten(2).mT for item in (state, target)]
    seen = [[Observed(None, [item]) for item in pair] for pair in ((state, target), rows)]
    first, second = (Hidden(Setting()).loss({}, *pair) for pair in seen)
    assert_close(first, second)


@pytest.mark.parametrize(
    ("recipe", "apart"),
    [
        ({"method": {"name": "tucker", "share": "layers"}, "target": 0.5}, [1]),
        ({"method": {"name": "svd"}, "target": 0.5}, [0, 1]),
    ],
)
def test_blocks_whose_weights_others_use_are_not_sharded_apart(
    recipe: dict[str, Any], apart: list[int], tmp_path: Path
) -> None:
    """Factors of a bank stand in the first layer's block, and those of the others borrow them."""
    source = SourceModel.open(str(small("bert", tmp_path, **recipe)), converted=True)
    model = load_model(source)
    blocks = [block.name for block in loaded_roles(source, model).blocks]
    assert _apart(model, blocks) == [blocks[index] for index in apart]
