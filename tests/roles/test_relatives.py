"""Families with blocks like those of others: what their tables say is true of a model that runs."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import zoo
from tcompress import api
from tcompress.planning.sites import Coupling, couplings
from tcompress.roles import Block, Layer
from tcompress.roles.families import RELATIVES
from tcompress.roles.find import find_roles

pytestmark = pytest.mark.filterwarnings("ignore")  # of Transformers, at sizes as small as these

# Models that those are part of which are none by themselves.
WHOLE = {"bridgetower_text_model": "bridgetower", "mlcd_vision_model": "mlcd"}
WHOLE |= {"t5gemma2_text": "t5gemma2", "pixtral": "mistral3"}
BUILT = [name for name in sorted(RELATIVES) if WHOLE.get(name, name) in zoo.families()]
OFTEN = ("bloom", "cohere", "dinov2", "gpt_oss", "imagegpt", "jina_embeddings_v3", "plbart")


def _model(family: str) -> tuple[Any, dict[str, Any]]:
    model, inputs = zoo.build(WHOLE.get(family, family))
    assert inputs is not None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # norms of ones, and no biases, would hide what stands between layers
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval(), inputs


def _readings(model: nn.Module, block: Block, inputs: dict[str, Any]) -> dict[str, list[int]]:
    """Numbers of the tensors that the layers of a block read, by name in order of execution."""
    tensors: dict[int, int] = {}
    kept: list[Tensor] = []  # whose addresses no other tensor has meanwhile
    readings = defaultdict[str, list[int]](list)

    def read(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        kept.append(x)
        readings[name].append(tensors.setdefault(x.data_ptr(), len(tensors)))

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: read(name, args, kwargs), with_kwargs=True
        )
        for name in {layer.name for layer in block.layers}
    ]
    zoo.outputs(model, inputs)
    for hook in hooks:
        hook.remove()
    return readings


def _weight(model: nn.Module, layer: Layer) -> Tensor:
    weight = model.get_parameter(layer.weight_name)
    return weight.mT if layer.kind == "conv1d" else weight


@torch.no_grad()
def _turn(model: nn.Module, coupling: Coupling) -> None:
    """Change the basis of the channels between layers, of every head by itself.

    Bases of heads are no rotations, which a norm in between would not notice.
    """
    size, generator = coupling.size, torch.Generator().manual_seed(2)
    heads = min(part.size for _, part in coupling.writers) // size
    bases = torch.eye(size) + 0.1 * torch.randn(heads, size, size, generator=generator)
    if coupling.kind == "neurons":
        bases = torch.eye(size)[None, torch.randperm(size, generator=generator)]
    inverses = torch.linalg.inv(bases)
    for index, (layer, part) in enumerate(coupling.writers):
        queries = coupling.kind == "scores" and index == 0  # scores are q M^-1 M k
        basis = inverses.mT if queries else bases
        basis = basis.repeat_interleave(part.size // size // heads, 0)
        items = [_weight(model, layer)]
        items += [model.get_submodule(layer.name).bias] if layer.bias else []
        for item in items:
            rows = item[layer.rows_of(part)]
            rows.copy_((basis @ rows.reshape(len(basis), size, -1)).reshape(rows.shape))
    if coupling.reader is not None:
        columns = _weight(model, coupling.reader)
        read = columns.reshape(len(columns), -1, size)
        back = inverses.repeat_interleave(read.shape[1] // heads, 0)
        columns.copy_(torch.einsum("ohs,hst->oht", read, back).reshape(columns.shape))


@pytest.mark.often(*OFTEN)
@pytest.mark.parametrize("family", BUILT)
def test_a_relative_is_what_its_table_says(family: str) -> None:
    model, inputs = _model(family)
    want, ran = zoo.outputs(model, inputs), list[Block]()
    for block in find_roles(model).blocks:
        readings = _readings(model, block, inputs)
        if not readings or any(layer.role == "linear" for layer in block.layers):
            continue  # a tower that these inputs do not reach, or that is scanned
        ran.append(block)
        # Experts have two groups in one module.
        groups = [*dict.fromkeys(frozenset(x.name for x in group) for group in block.groups)]
        assert [*dict.fromkeys(next(g for g in groups if n in g) for n in readings)] == groups
        for names in groups:
            assert len({*map(tuple, (readings[name] for name in names))}) == 1
            assert all(len(readings[name]) == 1 for name in names)
    assert ran
    free = [item for block in ran for item in couplings(block)]
    free = [item for item in free if all(layer.kind != "experts" for layer, _ in item.writers)]
    for item in free:
        _turn(model, item)
    got = zoo.outputs(model, inputs)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=3e-4 * float(other.abs().max()))


@pytest.mark.often(*OFTEN[:3])
@pytest.mark.parametrize("family", BUILT)
def test_a_relative_becomes_narrower(family: str, tmp_path: Path) -> None:
    model, inputs = _model(family)
    model.save_pretrained(tmp_path / "dense")
    sizes = {"keep_neurons": 0.5, "head_size": 0.5}
    options = {"method": "width", "calibration": "none", **sizes}
    done = api.convert(tmp_path / "dense", output=tmp_path / "small", **options)
    assert done.manifest.plan.kept < 0.8
    small = type(model).from_pretrained(tmp_path / "small").eval()
    assert all(bool(torch.isfinite(item).all()) for item in zoo.outputs(small, inputs)[:1])


def test_a_block_with_other_layers_is_scanned() -> None:
    model, _ = _model("cohere")
    model.model.layers[1].adapter = nn.Linear(8, 8)
    roles = find_roles(model)
    scanned = [{layer.role == "linear" for layer in block.layers} for block in roles.blocks]
    assert scanned == [{False}, {True}]
    assert roles.warnings[0].startswith("family `cohere` has no table of roles")


def test_a_fused_projection_that_means_something_else_is_scanned() -> None:
    model, _ = _model("imagegpt")
    block = find_roles(model).blocks[0].name
    model.get_submodule(block).attn.c_attn = nn.Linear(64, 144)
    first, *others = find_roles(model).blocks
    assert {layer.role for layer in first.layers} == {"linear"}
    assert "qkv" in {layer.role for layer in others[0].layers}
