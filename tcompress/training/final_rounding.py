"""Rounding of a healed model: what is stored in few bits, in the norm of what its layers read.

Structures that know how lose a fraction of what rounding to nearest costs, so that steps need not
make up for it: passes see them whole until all is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tcompress.linalg.fits import in_float64
from tcompress.linalg.rounding import Rounding, rounded
from tcompress.structures import Target, structure
from tcompress.structures.base import RoundsInNorm, dense_of
from tcompress.structures.modules.embedding import StructuredEmbedding
from tcompress.structures.modules.linear import StructuredLinear, tensor_prefix
from tcompress.training.objectives import Batch

SAMPLES = 512
"""Examples whose inputs of layers are read: more change nothing in the output."""


class RoundedTerm(NamedTuple):
    """A summand of a layer that is rounded in the norm of its inputs."""

    layer: StructuredLinear
    part: int
    term: int
    roundings: Mapping[str, Rounding]  # by name among the summand's tensors

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its own tensors that are rounded, by name among them."""
        prefix = tensor_prefix(self.layer.parts, self.part, self.term)
        return {name: getattr(self.layer, prefix + name) for name in self.roundings}


def rounded_terms(model: nn.Module, roundings: Mapping[str, Rounding]) -> list[RoundedTerm]:
    """List the summands that know how to be rounded; roundings are by name in the model."""
    terms = []
    for path, layer in model.named_modules():
        if not isinstance(layer, StructuredLinear) or layer.experts is not None:
            continue
        if isinstance(layer, StructuredEmbedding):  # reads words, which have no moments
            continue
        for index, part in enumerate(layer.parts):
            for number, layout in enumerate(part.terms):
                kind = structure(layout.structure)
                prefix = f"{path}.{tensor_prefix(layer.parts, index, number)}"
                names = {name: prefix + name for name in kind.tensors(layout)}
                chosen = {name: roundings[key] for name, key in names.items() if key in roundings}
                if isinstance(kind, RoundsInNorm) and any(
                    rounding.group for rounding in chosen.values()
                ):
                    terms.append(RoundedTerm(layer, index, number, chosen))
    return terms


def _moments(
    layers: Iterable[StructuredLinear], batches: Iterable[Batch], run: Callable[[Batch], Any]
) -> dict[nn.Module, Tensor]:
    """Sums over what layers read, of tokens that are no padding, in float64.  # (in, in)."""
    grams: dict[nn.Module, Tensor] = {}
    mask: Tensor | None = None

    def read(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, StructuredLinear)
        x = inputs[0] if layer.reads is None else layer.reads.gather(inputs[0])
        is_text = mask is not None and x.shape[:-1] == mask.shape
        rows = in_float64(x[mask] if is_text else x.flatten(0, -2))
        gram = rows.mT @ rows
        grams[layer] = grams[layer] + gram if layer in grams else gram

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(read))
        for batch in batches:
            mask = batch.get("attention_mask")
            mask = mask.bool() if mask is not None and mask.ndim == 2 else None
            run(batch)
    return grams


@torch.no_grad()
def round_model(
    model: nn.Module,
    roundings: Mapping[str, Rounding],
    batches: Iterable[Batch],
    run: Callable[[Batch], Any],
) -> None:
    """Give a model the weights that will be read of it, once it is stored in few bits.

    Roundings are by name in the model. It is `run` on the batches: what its layers read tells what
    matters.
    """
    terms = rounded_terms(model, roundings)
    moments = _moments(dict.fromkeys(term.layer for term in terms), batches, run)
    terms = [term for term in terms if term.layer in moments]  # no text went through the others
    later = {id(value) for term in terms for value in term.parameters.values()}
    for name, parameter in model.named_parameters():  # transforms first, which terms are between
        if name in roundings and id(parameter) not in later:
            parameter.copy_(rounded(parameter, roundings[name]))
    for term in terms:
        layout, gram = term.layer.parts[term.part].terms[term.term], moments[term.layer]
        tensors, operators = term.layer.exact_term(term.part, term.term)
        product = dense_of(layout, tensors, operators) @ gram
        kind: Any = structure(layout.structure)
        target = Target(product, gram, operators=operators)
        tensors = kind.rounded(target, layout, tensors, term.roundings)
        for name, parameter in term.parameters.items():
            parameter.copy_(tensors[name])
