"""Roles, shapes, parts and groups of every layer of every family."""

import pytest

from tcompress.roles import Block, Layer
from tcompress.roles.find import find_roles
from tests.support.golden import Golden
from tests.support.tiny import TINY, build


def _line(block: Block, layer: Layer) -> str:
    """Name below the block, role, kind, in > out, bias, parts, group, side of the transform."""
    parts = "+".join(f"{part.name}:{part.size}" for part in layer.parts)
    experts = f"{layer.experts}x" if layer.experts else ""
    name = layer.weight_name.removeprefix(f"{block.name}.").removesuffix(".weight")
    shape = f"{experts}{layer.in_features}>{layer.out_features}"
    bias = "bias" if layer.bias else "-"
    return f"{name} {layer.role} {layer.kind} {shape} {bias} {parts} {layer.group} {layer.side}"


@pytest.mark.parametrize("family", TINY)
def test_roles(family: str, golden: Golden) -> None:
    roles = find_roles(build(family))
    said = [f"embeddings: {', '.join(roles.embeddings)}", f"head: {roles.output_head}"]
    for block in roles.blocks:
        said += ["", block.name, *(f"  {_line(block, layer)}" for layer in block.layers)]
    golden.text(f"roles/{family}.txt", "\n".join(said))


def test_every_file_is_of_a_family(golden: Golden) -> None:
    golden.only("roles", [f"{family}.txt" for family in TINY])
