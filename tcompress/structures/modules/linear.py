"""The one layer that serves every structure: a sum of terms for each part of the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.nn.utils.parametrize import is_parametrized

from tcompress.errors import refuse_replica
from tcompress.linalg.fits import compute_dtype
from tcompress.structures.base import (
    SIDES,
    AnyLayout,
    Frozen,
    Layout,
    Shapes,
    Side,
    Transform,
    decoded,
    dense_of,
    encoded,
    shared_of,
    structure,
    transform_of,
)
from tcompress.structures.modules.shared import (
    FactorsModule,
    TransformModule,
    factors_module,
    version_of,
)


@dataclass(frozen=True, eq=False)
class CachedWeight:
    """One dense weight, and the state of all tensors that it was built from.

    It is out of date when one of them is another tensor, or was written to. What writes without
    counting versions (fused optimizers) trains, and layers drop the weight for that.
    """

    weight: Tensor
    # Where each tensor is looked up, the tensor, its address and its version.
    sources: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, int, int | None]]
    transforms: list[tuple[TransformModule, int]]  # with their counts of changes

    @property
    def is_current(self) -> bool:
        """True unless it is out of date; runs before every small product."""
        for owner, name, tensor, address, version in self.sources:
            if owner.get(name) is not tensor or tensor.data_ptr() != address:
                return False
            if version is not None and tensor._version != version:
                return False
        return not any(module.changes != changes for module, changes in self.transforms)

    @classmethod
    def of(cls, modules: Sequence[nn.Module], build: Callable[[], Tensor]) -> CachedWeight | None:
        """Builds a weight from tensors of modules; None while one of them is offloaded."""
        tensors = [
            (module._parameters, name, tensor)
            for module in modules
            for name, tensor in module._parameters.items()
            if tensor is not None and name != "bias"
        ]
        if any(tensor.is_meta for _, _, tensor in tensors):
            return None
        # A tensor made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            weight = build()
        sources = [(*item, item[2].data_ptr(), version_of(item[2])) for item in tensors]
        transforms = [module for module in modules if isinstance(module, TransformModule)]
        return cls(weight, sources, [(module, module.changes) for module in transforms])


class Channels(Frozen):
    """Channels between layers that are left: the first `kept` of each of some groups.

    A group is a head, all heads together, or all neurons of a feed-forward. Heads are `padded`: an
    attention sees them as wide as they were, with zeros at the end. None may be left.
    """

    groups: int = Field(gt=0)
    size: int = Field(gt=0)  # of one group in the dense model
    kept: int = Field(ge=0)
    padded: bool = False

    @property
    def dense(self) -> int:
        """Number of channels of the dense model."""
        return self.groups * self.size

    @property
    def left(self) -> int:
        """Number of channels that stay."""
        return self.groups * self.kept

    def spread(self, x: Tensor, width: int) -> Tensor:
        """Pad heads to this width.  # (..., left) -> (..., groups * width)."""
        if not self.padded or self.kept == width:
            return x
        heads = x.unflatten(-1, (self.groups, -1))
        if torch.compiler.is_compiling():  # one operator there, where this would be several
            return pad(heads, (0, width - self.kept)).flatten(-2)
        wide = x.new_zeros(*x.shape[:-1], self.groups, width)
        wide[..., : self.kept] = heads
        return wide.flatten(-2)

    def gather(self, x: Tensor) -> Tensor:
        """Cut heads of any width to what a layer reads.  # (..., channels) -> (..., left)."""
        if x.shape[-1] == self.left:
            return x
        return x.unflatten(-1, (self.groups, -1))[..., : self.kept].flatten(-2)

    def widened(self, weight: Tensor, dim: int) -> Tensor:
        """Puts zeros in a weight where channels are gone, so that it fits the dense model."""
        wide = weight.movedim(dim, -1).unflatten(-1, (self.groups, self.kept))
        return pad(wide, (0, self.size - self.kept)).flatten(-2).movedim(-1, dim)


class PartLayout(Frozen):
    """One run of output features: a sum of terms of the same widths."""

    name: str  # its role, such as `q` in a fused projection
    terms: tuple[AnyLayout, ...] = Field(min_length=1)
    channels: Channels | None = None  # what is left of its output features, if not all

    @property
    def out_features(self) -> int:
        """Width of the part, without channels that are gone."""
        return self.terms[0].out_features

    @property
    def dense_features(self) -> int:
        """Its width in the dense model."""
        return self.channels.dense if self.channels else self.out_features

    @property
    def is_padded(self) -> bool:
        """True if others read it as wide as in the dense model."""
        return self.channels is not None and self.channels.padded


def widened(tensor: Tensor, parts: Sequence[PartLayout], reads: Channels | None) -> Tensor:
    """Pad a weight (..., out, in), or a bias (out,), to its dense shape with zeros."""
    rows = -1 if tensor.ndim == 1 else -2
    if reads and tensor.ndim > 1:
        tensor = reads.widened(tensor, -1)
    pairs = zip(parts, tensor.split([part.out_features for part in parts], rows), strict=True)
    return torch.cat([p.channels.widened(t, rows) if p.channels else t for p, t in pairs], rows)


def tensor_prefix(parts: Sequence[PartLayout], part: int, term: int) -> str:
    """Names a term's tensors: `tc_`, `tc_1_`, and with several parts `tc_q_`, `tc_q_1_`."""
    middle = f"{parts[part].name}_" if len(parts) > 1 else ""
    return f"tc_{middle}" + (f"{term}_" if term else "")


def transform_name(parts: Sequence[PartLayout], side: Side, part: int, term: int) -> str:
    """Names the module of a transform: inputs are shared by all parts, outputs belong to one."""
    middle = f"{parts[part].name}_" if side == "out" and len(parts) > 1 else ""
    return f"tc_{middle}{side}{term}"


def _terms_of(parts: Sequence[PartLayout]) -> Iterator[tuple[int, int, Layout]]:
    """Lists the terms of all parts, each with the places of its part and of itself."""
    for index, part in enumerate(parts):
        for term, layout in enumerate(part.terms):
            yield index, term, layout


def own_transforms(
    parts: Sequence[PartLayout], shares_input: bool
) -> Iterator[tuple[str, Transform, Layout, Side]]:
    """Lists the transforms that a layer stores, with the module's name, the term and its side.

    All splits read what the first one encodes, unless another layer encodes it.
    """
    for part, term, layout in _terms_of(parts):
        for side in SIDES:
            transform = transform_of(layout, side)
            if transform is not None and (side == "out" or not (part or shares_input)):
                yield transform_name(parts, side, part, term), transform, layout, side


def own_shapes(parts: Sequence[PartLayout], experts: int | None = None) -> Shapes:
    """Shapes of a layer's own tensors, without its transforms."""
    lead = () if experts is None else (experts,)
    return {
        tensor_prefix(parts, part, term) + name: (*lead, *shape)
        for part, term, layout in _terms_of(parts)
        for name, shape in structure(layout.structure).tensors(layout).items()
    }


def factor_layouts(parts: Sequence[PartLayout]) -> dict[str, Layout]:
    """Returns a layout for each set of shared factors that a layer uses, by its name."""
    layouts: dict[str, Layout] = {}
    for _, _, layout in _terms_of(parts):
        if (shared := shared_of(layout)) is not None:
            layouts.setdefault(shared.name, layout)
    return layouts


def empty_guard(dtype: Any = None, device: Any = None) -> Tensor:
    """Returns the buffer under a dense name on which plain Transformers stop."""
    guard = torch.empty(0, dtype=dtype, device=device)
    guard._is_hf_initialized = True  # type: ignore[attr-defined]
    return guard


class StructuredLinear(nn.Module):
    """A linear layer whose weight is a sum of structures, for each run of output features.

    Parameters are called `tc_*`. An empty buffer under the dense key `weight` makes plain
    Transformers stop on a checkpoint of this layer instead of loading noise; it also answers
    base models that read `weight.dtype`.

    `input_of` is the layer whose input transforms this one shares, if not its own, which `readers`
    layers share. `factors` belong to other layers; all else its terms need is its own. Weights of
    `experts` are stacked along a leading dimension. `reads` says which channels of its input are
    left, `channels` of a part which of its output.
    """

    weight: Tensor
    bias: nn.Parameter | None
    head_width: int | None = None
    """Width of groups that the attention around it expects, if not that of the dense model."""
    keeps_weight: bool = False
    """Whether passes in evaluation may use a dense weight, once it is built."""
    _kept: CachedWeight | None = None

    _replicate_for_data_parallel = refuse_replica

    def __init__(
        self,
        parts: Sequence[PartLayout],
        *,
        bias: bool = False,
        input_of: StructuredLinear | None = None,
        readers: int = 1,
        factors: Mapping[str, FactorsModule] | None = None,
        experts: int | None = None,
        reads: Channels | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.reads = reads
        padded = reads is not None and reads.padded
        self.in_features = reads.dense if reads and padded else parts[0].terms[0].in_features
        self.out_features = sum(p.dense_features if p.is_padded else p.out_features for p in parts)
        self._spreads = any(part.is_padded for part in parts)
        self._is_matrix = [layout.is_plain for _, _, layout in _terms_of(parts)] == [True]
        self.experts = experts
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        for name, shape in own_shapes(parts, experts).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **place)))
        empty = torch.empty(sum(p.out_features for p in parts), **place)
        self.register_parameter("bias", nn.Parameter(empty) if bias else None)
        # Some families draw first values for whatever has `Linear` in its class's name.
        self._is_hf_initialized = True
        for name, _, layout, side in own_transforms(self.parts, input_of is not None):
            count = readers if side == "in" else 1
            self.add_module(name, TransformModule(layout, side, count, **place))
        # A tuple keeps the other layer out of this one's children: its tensors are stored once.
        self._input_owner = () if input_of is None else (input_of,)
        # In a dict, factors of other layers stay out of this one's children: they are stored once.
        self.factors: dict[str, FactorsModule] = {}
        for name, layout in factor_layouts(self.parts).items():
            shared = factors.get(name) if factors else None
            if shared is None:
                shared = FactorsModule(layout, **place)
                self.add_module(factors_module(name), shared)
            self.factors[name] = shared
        if experts is None:
            self.register_buffer("weight", empty_guard(**place))

    def _tensors(self, part: int, term: int) -> dict[str, Tensor]:
        prefix = tensor_prefix(self.parts, part, term)
        layout = self.parts[part].terms[term]
        kind = structure(layout.structure)
        own: dict[str, Tensor] = {k: getattr(self, prefix + k) for k in kind.tensors(layout)}
        if self.factors and (shared := shared_of(layout)) is not None:
            device = next(iter(own.values())).device
            own |= {name: t.to(device) for name, t in self.factors[shared.name]().items()}
        return own

    def exact_term(self, part: int, term: int) -> tuple[dict[str, Tensor], dict[Side, Any]]:
        """Returns a summand's tensors, shared ones too, and its built transforms, in float64."""
        tensors = {name: own.detach().double() for name, own in self._tensors(part, term).items()}
        return tensors, self._operators(part, term, next(iter(tensors.values())))

    def _operators(self, part: int, term: int, like: Tensor) -> dict[Side, Any]:
        modules = ((side, self._transform(side, part, term)) for side in SIDES)
        return {side: module.operator(like) for side, module in modules if module is not None}

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        # Parametrised ones, as PEFT's `target_parameters` makes them for a pass, lie deeper.
        return next(self.parameters()).dtype

    def encode(self, x: Tensor) -> list[Tensor]:
        """Applies every term's input transform.  # (..., in) -> one (tokens, in') per term."""
        inputs = []
        for term, layout in enumerate(self.parts[0].terms):
            module = self._transform("in", 0, term)
            if module is None:
                rows = x.to(compute_dtype(x.device, self.stored_dtype))
                flat = rows.flatten(0, -2) if rows.dim() > 1 else rows[None]
                inputs.append(encoded(layout, flat))
            else:
                inputs.append(module(x, id(self)))
        return inputs

    def _transform(self, side: Side, part: int, term: int) -> Any:
        [owner] = self._input_owner if side == "in" and self._input_owner else (self,)
        return owner._modules.get(transform_name(owner.parts, side, part, term))

    def core(self, inputs: Sequence[Tensor], expert: int | None = None) -> list[list[Tensor]]:
        """Applies the layer's own tensors, or those of one expert: a result per part and term."""
        results = []
        for index, part in enumerate(self.parts):
            row = []
            for term, layout in enumerate(part.terms):
                z, tensors = inputs[term], self._tensors(index, term)
                if expert is not None:
                    tensors = {name: stack[expert] for name, stack in tensors.items()}
                tensors = {name: tensor.to(z.dtype) for name, tensor in tensors.items()}
                row.append(structure(layout.structure).apply(z, tensors, layout))
            results.append(row)
        return results

    def decode(self, results: Sequence[Sequence[Tensor]]) -> Tensor:
        """Applies output transforms, sums the terms and puts the parts beside each other."""
        outputs = []
        for index, (part, row) in enumerate(zip(self.parts, results, strict=True)):
            terms = []
            for term, (layout, u) in enumerate(zip(part.terms, row, strict=True)):
                module = self._transform("out", index, term)
                terms.append(decoded(layout, u) if module is None else module(u))
            outputs.append(reduce(torch.add, terms))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def keep_weight(self, keep: bool = True) -> int:
        """Keep one dense weight for passes in evaluation without gradients; return its bytes."""
        self.keeps_weight, self._kept = keep, None
        size = next(self.parameters(recurse=False)).element_size()
        rows = sum(part.out_features for part in self.parts)  # of channels that are left
        columns = self.parts[0].terms[0].in_features
        return size * rows * columns * (self.experts or 1) if keep else 0

    def cached_weight(self) -> Tensor | None:
        """Returns the cached weight if this pass may use it.  # ([experts,] out, in)."""
        if not self.keeps_weight or self.training:
            return None
        if torch.is_grad_enabled():
            if any(tensor.requires_grad for m in self.owners() for tensor in m.parameters(False)):
                self._kept = None
            return None
        if torch.compiler.is_compiling():  # it would take the weight for a constant
            return None
        if is_parametrized(self):  # for one pass: the next may have other tensors
            self._kept = None
            return None
        cached = self._kept  # which other threads may replace meanwhile
        if cached is None or not cached.is_current:
            self._kept, cached, dtype = None, None, self.stored_dtype  # memory for the next
            accurate, owners = torch.promote_types(dtype, torch.float32), self.owners()
            cached = CachedWeight.of(owners, lambda: self.dense_weight(accurate).to(dtype))
            self._kept = cached
        return None if cached is None else cached.weight

    def owners(self) -> list[nn.Module]:
        """Modules whose tensors the weight depends on, those of other layers among them."""
        found = [*self._modules.values()]
        if self._input_owner:
            found += [self._transform("in", 0, term) for term in range(len(self.parts[0].terms))]
        found += [module for module in self.factors.values() if module not in found]
        return [self, *(module for module in found if module is not None)]

    def train(self, mode: bool = True) -> StructuredLinear:
        """Sets training or evaluation mode; training drops a cached weight."""
        if mode:
            self._kept = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StructuredLinear:
        self._kept = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._kept = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves a cached weight behind: copies build their own."""
        return {**self.__dict__, "_kept": None}

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer.  # (..., in_features) -> (..., out_features)."""
        weight = self.cached_weight() if self.keeps_weight else None
        dtype = self.stored_dtype if weight is None else weight.dtype
        x = x if x.dtype == dtype else x.to(compute_dtype(x.device, dtype))
        rows = x if self.reads is None else self.reads.gather(x)
        if weight is None and self._is_matrix and rows.dtype == dtype:
            weight = getattr(self, tensor_prefix(self.parts, 0, 0) + "w")
        if weight is not None:
            return self._spread(linear(rows, weight, self.bias))
        y = self.decode(self.core(self.encode(rows)))
        if self.bias is not None:
            bias = self.bias.to(y.dtype)
            # Autograd refuses changes in place of what a custom function returned as a view.
            y = y + bias if y.requires_grad else y.add_(bias)
        y = self._spread(y)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _spread(self, y: Tensor) -> Tensor:
        """Pad heads to the width that an attention expects."""
        if not self._spreads:
            return y
        if not y.shape[-1]:  # zeros without memory, which gradients pass
            return y.sum().expand(*y.shape[:-1], self.out_features)
        runs = list(y.split([part.out_features for part in self.parts], -1))
        for index, channels in enumerate(part.channels for part in self.parts):
            if channels:
                runs[index] = channels.spread(runs[index], self.head_width or channels.size)
        return runs[0] if len(runs) == 1 else torch.cat(runs, -1)

    def dense_weight(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Returns the weight that this layer applies.  # ([experts,] out, in)."""
        parts = []
        for index, part in enumerate(self.parts):
            terms = []
            for term, layout in enumerate(part.terms):
                tensors = {k: t.to(dtype) for k, t in self._tensors(index, term).items()}
                operators = self._operators(index, term, next(iter(tensors.values())))
                terms.append(dense_of(layout, tensors, operators))
            parts.append(reduce(torch.add, terms))
        return torch.cat(parts, -2)

    def extra_repr(self) -> str:
        terms = " + ".join(layout.structure for layout in self.parts[0].terms)
        bias = self.bias is not None
        return f"in={self.in_features}, out={self.out_features}, {terms}, bias={bias}"


def keep_weights(model: nn.Module, keep: bool = True) -> int:
    """Keep one dense weight for each structured layer of a model, for inference.

    In evaluation mode a pass without gradients then runs as fast as that of the dense model, from
    the second one on. The memory is the dense model's, on top of what is stored. A weight is
    dropped by `train()`, by moves and casts, by loading a state dict, and by passes that gradients
    flow through; other changes are noticed too, but for those in place through `.data`. Copies and
    files leave it out. Compiled passes do not use it.
    """
    layers = [module for module in model.modules() if isinstance(module, StructuredLinear)]
    return sum(layer.keep_weight(keep) for layer in layers)


_SIZES = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")


def channels_last(module: nn.Module, x: Tensor, *, output: bool = False) -> Tensor:
    """Arrange a convolution's input as rows of a linear layer: (batch, *positions, channels)."""
    if not hasattr(module, "kernel_size"):
        return x
    steps: tuple[int, ...] = module.stride  # type: ignore[assignment]
    if not output and max(steps) > 1:
        places: list[Any] = [slice(None, None, step) for step in steps]
        x = x[(..., *places)]
    return x.movedim(-1 - len(steps), -1)


class PointwiseConvolution(StructuredLinear):
    """A structured linear layer in the place of a convolution whose kernel covers one point."""

    stride: tuple[int, ...]

    def __init__(self, parts: Sequence[PartLayout], host: nn.Module, **options: Any) -> None:
        super().__init__(parts, **options)
        for name in _SIZES:  # some base models read them
            setattr(self, name, getattr(host, name))

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer.  # (batch, in_channels, *positions) -> (batch, out_channels, ...)."""
        rows = super().forward(channels_last(self, x))
        return rows.movedim(-1, -1 - len(self.stride)).contiguous()
