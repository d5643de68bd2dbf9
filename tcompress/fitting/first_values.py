"""First values: of layers trained from scratch, and of attention that is replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from tcompress.attention import replacement_named
from tcompress.attention.module import ReplacementModule
from tcompress.attention.replacement import QueryKeyMoments
from tcompress.errors import REPAIR, FitError
from tcompress.fitting.layer_fits import FittedLayer, SharedFactors, shared_factors
from tcompress.hf.build import first_values
from tcompress.linalg.moments import naming
from tcompress.models import SourceModel, read_finite
from tcompress.models.keymap import CPU
from tcompress.planning.entries import AttentionPlan, FactorsKey, LayerPlan
from tcompress.planning.sites import roles_of
from tcompress.roles.find import attentions_of
from tcompress.structures import structure
from tcompress.structures.base import SharesFactors, dense_of, first_operators
from tcompress.structures.modules.linear import own_transforms, tensor_prefix

# Layers trained from scratch.
#
# A structure draws its tensors; they are then scaled so that the weight which they stand for is as
# large as the base model's own initialisation draws it, in the root mean square. Outputs so begin
# with the variance that they have in the dense model, whatever the family and its recipe (small
# normal values, values by width, or by depth). Biases are the base model's.


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return a generator of its own for everything that has a name, whatever else is drawn."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def scaled(tensors: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Multiply the weight that tensors stand for: it is linear in each of them.

    A factor of zero leaves all but the first one as they are, so that gradients still flow.
    """
    if factor == 0:
        first = next(iter(tensors))
        return {name: torch.zeros_like(t) if name == first else t for name, t in tensors.items()}
    each = factor ** (1 / len(tensors))
    return {name: tensor * each for name, tensor in tensors.items()}


def start_shared_factors(
    layers: Sequence[LayerPlan], dtype_of: Callable[[LayerPlan], torch.dtype], seed: int
) -> SharedFactors:
    """Draw the factors that layers share."""
    factors: dict[FactorsKey, dict[str, Tensor]] = {}
    for entry in layers:
        for name, layout in entry.own_factors.items():
            kind = structure(layout.structure)
            assert isinstance(kind, SharesFactors)
            drawn = kind.start_shared(layout, generator_of(seed, f"{entry.name}/{name}"))
            factors[entry.name, name] = {k: t.to(dtype_of(entry)) for k, t in drawn.items()}
    return factors


def start_layer(
    entry: LayerPlan, weight: Tensor, *, dtype: torch.dtype, factors: SharedFactors, seed: int
) -> FittedLayer:
    """Draw a layer; of what the base model draws only the size counts.  # ([experts,] out, in)."""
    generator = generator_of(seed, entry.key)
    tensors: dict[str, Tensor] = {}
    sections = weight.split([part.out_features for part in entry.parts], -2)
    for index, (part, section) in enumerate(zip(entry.parts, sections, strict=True)):
        stored = [structure(layout.structure).tensors(layout) for layout in part.terms]
        sizes = [sum(map(prod, shapes.values())) for shapes in stored]
        for number, layout in enumerate(part.terms):
            # Summands are independent, so that their variances add up.
            share = sizes[number] / sum(sizes)
            shared = shared_factors(entry, layout, factors, CPU)
            transforms = first_operators(layout, torch.empty(0, dtype=torch.float64))
            summands = []
            for matrix in section if entry.experts else section[None]:
                drawn = structure(layout.structure).start(layout, generator)
                exact = {name: tensor.double() for name, tensor in drawn.items()}
                dense = dense_of(layout, exact | shared, transforms)
                square = float(matrix.double().square().mean()) * share
                summands.append(scaled(exact, (square / float(dense.square().mean())) ** 0.5))
            prefix = tensor_prefix(entry.parts, index, number)
            for name in summands[0]:
                values = [summand[name].to(dtype) for summand in summands]
                tensors[prefix + name] = torch.stack(values) if entry.experts else values[0]
    for owner, transform, *_ in own_transforms(entry.parts, bool(entry.input_of)):
        first = transform.first().items()
        tensors |= {f"{owner}.{leaf}": tensor.to(dtype) for leaf, tensor in first}
    return FittedLayer(tensors, {})


def adapt(
    module: ReplacementModule,
    name: str,
    stored: dict[str, Tensor],
    calls: Iterable[tuple[Tensor, Tensor, Tensor | None]],
) -> None:
    """Start an attention with first values that depend on the base model's queries and keys.

    Those of the block are in `stored` by name, `name` being that of this attention, whose values
    are added where no interrupted run has left them.
    """
    kind, layout = module.kind, module.layout
    centred = kind.centres_keys(layout)
    if centred is None:
        return
    parameters = {f"{name}.{key}": value for key, value in module.named_parameters()}
    if not parameters.keys() & stored.keys():
        with naming(f"attention `{name}`", "use more calibration data"):
            moments = _query_key_moments(calls, centred=centred)
            adapted = kind.adapted(layout, moments, dict(module.named_parameters()))
        stored |= {f"{name}.{key}": value for key, value in adapted.items()}
    for key in parameters.keys() & stored.keys():
        parameters[key].copy_(stored[key])


def _query_key_moments(
    calls: Iterable[tuple[Tensor, Tensor, Tensor | None]], *, centred: bool
) -> QueryKeyMoments:
    """Sum the moments of one attention's queries and keys; their scale does not count.

    Calls are as `queries_and_keys` makes them. Centred keys count less their mean over their text.
    """
    queries = keys = torch.tensor(0.0)
    for q, k, tokens in calls:
        q, k = q.double(), k.double()
        if tokens is None:
            tokens = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
        valid = tokens[:, None, :, None].to(q)
        if centred:
            k = k - (k * valid).sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)
        q, k = q * valid, k * valid
        queries = queries.to(q.device) + (q.mT @ q).sum(0)
        keys = keys.to(k.device) + (k.mT @ k).sum(0)
    if not queries.dim() or not bool(torch.isfinite(queries.sum() + keys.sum())):
        text = "queries or keys on calibration data are missing, NaN or infinite"
        raise FitError(text, REPAIR)
    return QueryKeyMoments(queries, keys)


def started_values(source: SourceModel, entry: AttentionPlan) -> dict[str, Tensor]:
    """Make the tensors of an attention, and empty ones under the names of dense weights."""
    guards = {key: torch.empty(0) for key in entry.guards}
    if source.seed is None:
        return guards | first_values(entry, moments=_projection_moments(source, entry))
    seed = generator_of(source.seed, entry.name).initial_seed()
    return guards | first_values(entry, seed, pretrained=False)


def _projection_moments(source: SourceModel, entry: AttentionPlan) -> QueryKeyMoments | None:
    """Return moments of queries and keys as weights alone tell them, if an attention wants any.

    Inputs are taken for white: E[q q^T] is W_q W_q^T + b_q b_q^T.
    """
    centred = replacement_named(entry.layout.mechanism).centres_keys(entry.layout)
    if centred is None:
        return None
    path = source.keymap.runtime_name(entry.name)
    attentions = attentions_of(source.keymap.model, roles_of(source))
    attention = next(item for item in attentions if item.name == path)
    read, squares = partial(read_finite, source.store, source.keymap, device=CPU), []
    for role in ("q", "k"):
        layer = attention.layers.get(role) or attention.layers["qkv"]
        part = next((part for part in layer.parts if part.name == role), None)
        if part is None:
            return None  # fused head by head
        weight, outputs = read(layer.weight_name).double(), layer.rows_of(part)
        rows = (weight.mT if layer.kind == "conv1d" else weight)[outputs]
        if layer.bias and (role == "q" or not centred):
            bias = read(f"{layer.name}.bias").double()
            rows = torch.cat([rows, bias[outputs][:, None]], 1)
        heads = rows.unflatten(0, (-1, entry.layout.head_dim))
        squares.append(heads @ heads.mT)
    return QueryKeyMoments(*squares)
