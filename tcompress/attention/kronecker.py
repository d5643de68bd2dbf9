"""Kronecker attention: tokens sit on a grid, and every axis is mixed by a small matrix of its own.

The attention matrix is the Kronecker product of one matrix per axis, which is never built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from math import log, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from tcompress.attention.replacement import (
    AttentionReplacement,
    BaseAttention,
    ReplacementLayout,
    ReplacementSpec,
    register,
    repeat_heads,
)
from tcompress.errors import DataError, counted
from tcompress.fields import option, read_sizes
from tcompress.structures.base import Refusal, Shapes, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor

    from tcompress.attention.visibility import Visible

Kernel = Literal["softmax", "favor", "smreg"]
Pool = Literal["mean", "sum"]
AxisMask = Annotated[
    str,
    Field(
        pattern=r"^(none|causal|window:[1-9][0-9]{0,5})$",
        examples=["none", "causal", "window:4"],
    ),
]
Sharpness = Literal["learnt", "fixed"]


class KroneckerSpec(ReplacementSpec):
    """Options of `hot`."""

    name: Literal["hot", "kronecker"] = "hot"
    grid: tuple[PositiveInt, ...] | None = option(
        None,
        "sizes of the axes; read from the config of image and video models",
        metavar="N,N,...",
        read=read_sizes,
    )
    fold: int | None = option(
        None, "for text, tokens in a row of the grid; instead of `grid`", ge=2
    )
    kernel: Kernel = option(
        "softmax",
        "kernel; `favor` and `smreg` need time linear in each axis: random features of the softmax "
        "kernel, with directions as long as normal vectors, or all of length sqrt(width) (the "
        "regularised kernel, which is the paper's)",
    )
    features: int | None = option(
        None, "number of random features; default twice the head's width", gt=0
    )
    pool: Pool = option("mean", "how other axes are pooled; the paper's `sum` saturates softmax")
    axes: tuple[NonNegativeInt, ...] | None = option(
        None, "axes that are mixed, counted from 0; default all", metavar="N,N,..."
    )
    masks: tuple[AxisMask, ...] | None = option(
        None,
        "mask of each mixed axis, in the order of `axes`: `none`, `causal` (nothing that comes "
        "later is seen) or `window:N` (nothing more than N places away); default none",
        metavar="MASK,...",
    )
    scale: Sharpness = option(
        "learnt",
        "factor of the scores of an axis, for each head: `learnt`, or `fixed` at 1 / sqrt(width), "
        "as in the paper",
    )
    seed: int = option(0, "seed of the random features", ge=0, off=True)

    @field_validator("axes")
    @classmethod
    def _check_axes(cls, axes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        twice = sorted({axis for axis in axes or () if (axes or ()).count(axis) > 1})
        if twice:
            raise ValueError(f"`axes` names {_numbers(twice)} more than once: name each once")
        return axes


class KroneckerLayout(ReplacementLayout):
    """A grid behind some special tokens; its first axis is open where rows are folded."""

    mechanism: Literal["kronecker"] = "kronecker"
    grid: tuple[int, ...] = ()
    fold: int | None = None
    special: int = 0
    kernel: Kernel = "softmax"
    features: int = 0
    pool: Pool = "mean"
    axes: tuple[int, ...] | None = None  # that are mixed; None for all
    masks: tuple[AxisMask, ...] = ()  # one for each of them; none where there are none
    scale: Sharpness = "learnt"
    seed: int = 0

    @property
    def mixed(self) -> tuple[int, ...]:
        """Axes that are mixed."""
        return tuple(range(len(self.grid) or 2)) if self.axes is None else self.axes

    def sizes(self, tokens: int) -> tuple[int, ...]:
        """Sizes of the axes for so many tokens on the grid."""
        return self.grid or (-(-tokens // self.fold), self.fold)  # type: ignore[operator,return-value]


class Kronecker(AttentionReplacement[KroneckerSpec, KroneckerLayout]):
    """One attention matrix per axis of a grid, from pooled queries and keys."""

    name = "kronecker"
    summary = "one small attention matrix per axis of a grid: images, videos, folded text"
    reference = "Higher Order Transformers: Efficient Attention for Tensor Structured Data (HOT)"
    spec = KroneckerSpec
    layout_type = KroneckerLayout

    def arrange(self, spec: KroneckerSpec, base: BaseAttention) -> dict[str, Any]:
        if spec.grid and spec.fold:
            raise Refusal("`grid` and `fold` are both given; allowed is one")
        if spec.fold and base.grid:
            sizes = _product(base.grid)
            raise Refusal(f"its tokens sit on a grid of {sizes} already: leave `fold` out")
        grid = () if spec.fold else spec.grid or base.grid
        if not grid and not spec.fold:
            missing = "its tokens sit on no grid that the config tells of"
            raise Refusal(f"{missing}: give `grid`, or for text `fold`, the tokens in a row")
        special = 0 if spec.fold else base.special
        if grid and base.tokens is None:
            raise Refusal("inputs differ in length, so that no grid holds them: give `fold`")
        if grid and prod(grid) + special != base.tokens:
            raise Refusal(
                f"{_grid_words(grid, special)} holds {prod(grid) + special} tokens, the model has "
                f"{base.tokens}"
            )
        facts: dict[str, Any] = {"grid": grid, "fold": spec.fold, "special": special}
        facts |= {"pool": spec.pool, "scale": spec.scale, **_arranged_axes(spec, grid)}
        if spec.kernel == "softmax":
            return facts
        features = spec.features or 2 * base.head_dim
        return {**facts, "kernel": spec.kernel, "features": features, "seed": spec.seed}

    def tensors(self, layout: KroneckerLayout) -> Shapes:
        shapes: Shapes = {}
        if layout.scale == "learnt" and layout.mixed:
            shapes["scale"] = (len(layout.mixed), layout.heads)
        return {**shapes, "gate": (layout.heads,)} if layout.special else shapes

    def ordered(self, layout: KroneckerLayout) -> bool:
        return layout.fold is not None

    def start(self, layout: KroneckerLayout, generator: Generator, *, pretrained: bool) -> Tensors:
        import torch

        values = {name: torch.zeros(shape) for name, shape in self.tensors(layout).items()}
        if layout.special:  # the scale is stored as a logarithm
            values["gate"] = torch.full((layout.heads,), log(prod(layout.grid) / layout.special))
        return values

    def constants(self, layout: KroneckerLayout) -> Tensors:
        import torch

        if layout.kernel == "softmax":
            return {}
        generator = torch.Generator().manual_seed(layout.seed)
        width, count = layout.head_dim, layout.features
        random = torch.randn(-(-count // width), width, width, generator=generator)
        lengths = torch.randn(count, width, generator=generator).norm(dim=-1, keepdim=True)
        if layout.kernel == "smreg":
            lengths = torch.full_like(lengths, width**0.5)
        turned, upper = torch.linalg.qr(random)  # uniform once the signs are
        turned = turned * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]
        return {"directions": turned.flatten(0, 1)[:count] * lengths}

    def apply(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Tensors,
        layout: KroneckerLayout,
        visible: Visible,
    ) -> tuple[Tensor, None]:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        from tcompress.linalg.fits import has_autocast

        k, v = repeat_heads(k, layout.heads), repeat_heads(v, layout.heads)
        special, tokens = layout.special, visible.tokens
        if layout.grid and q.shape[2] != prod(layout.grid) + special:
            raise DataError(
                f"{_grid_words(layout.grid, special)} met {q.shape[2]} tokens",
                "give inputs of the size that the config of the model names",
            )
        valid = None if tokens is None else tokens[:, special:]
        device = q.device.type
        with torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext():
            # Every product in the dtype of its factors, which autocast would lower.
            queries, keys, values = (x[:, :, special:] for x in (q, k, v))
            mixed = mix_grid(queries, keys, values, valid, tensors, layout)
        if not special:
            return mixed, None
        keep = None if tokens is None else tokens[:, None, None]
        first = scaled_dot_product_attention(q[:, :, :special], k, v, attn_mask=keep)
        if special == 1:  # softmax over one key
            direct = v[:, :, :1]
        else:
            mask = None if keep is None else keep[..., :special]
            special_keys = k[:, :, :special], v[:, :, :special]
            direct = scaled_dot_product_attention(q[:, :, special:], *special_keys, attn_mask=mask)
        gate = tensors["gate"].sigmoid()[:, None, None]
        return torch.cat([first, torch.lerp(direct, mixed, gate)], 2), None


def _arranged_axes(spec: KroneckerSpec, grid: tuple[int, ...]) -> dict[str, Any]:
    """Check the axes that are mixed and their masks against a grid, or a fold of two axes."""
    count = len(grid) or 2
    axes = tuple(range(count)) if spec.axes is None else spec.axes
    beyond = [axis for axis in axes if axis >= count]
    if beyond:
        has = f"a grid of {_product(grid)} has" if grid else "rows and columns of a fold are"
        allowed = f"allowed are {_numbers(range(count))}"
        raise Refusal(
            f"`axes` names {_numbers(beyond)}, and {has} {count} axes: {allowed}",
            "name only axes that there are, from 0, or leave `axes` out for all",
        )
    masks = spec.masks or ()
    if masks and len(masks) != len(axes):
        raise Refusal(
            f"`masks` has {len(masks)}, and the axes that are mixed are {len(axes)}",
            "give one mask for each of these axes, `none` where nothing is hidden",
        )
    return {
        "axes": None if axes == tuple(range(count)) else axes,
        "masks": masks if any(mask != "none" for mask in masks) else (),
    }


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(f"`{number}`" for number in numbers)


def _product(grid: Sequence[int]) -> str:
    return " x ".join(map(str, grid))


def _grid_words(grid: Sequence[int], special: int) -> str:
    return f"a grid of {_product(grid)} with {counted(special, 'special token')}"


def mix_grid(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, tensors: Tensors, layout: KroneckerLayout
) -> Tensor:
    """Mix the tokens of a grid axis by axis; `valid` ones are no padding: (batch | 1, tokens)."""
    import torch
    from torch.nn.functional import pad

    tokens = q.shape[2]
    sizes = layout.sizes(tokens)
    extra = prod(sizes) - tokens
    if extra:
        valid = q.new_ones(1, tokens, dtype=torch.bool) if valid is None else valid
        q, k, v = (pad(x, (0, 0, 0, extra)) for x in (q, k, v))
        valid = pad(valid, (0, extra))
    weight = None
    if valid is not None:
        weight = valid[:, None, :, None].to(v.dtype)
        weights = weight.expand(len(v), v.shape[1], -1, 1)
        v = torch.cat([v * weight, weights], -1)
    # Pooled tokens are few, and they and random features leave the range of half precision, as
    # shares of valid tokens do that scores leave next to nothing of.
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    v = v.to(wide) if layout.kernel != "softmax" or weight is not None else v
    for index, axis in enumerate(layout.mixed):
        rows, count = _pooled(q, weight, sizes, axis, layout.pool)
        columns, _ = _pooled(k, weight, sizes, axis, layout.pool)
        empty = None if count is None else count == 0
        factors = _factors(rows.to(wide), columns.to(wide), empty, tensors, layout, index)
        for factor in reversed(factors):
            # One axis of the flat grid, of any size now, by (batch, heads, new, size).
            before, after, width = prod(sizes[:axis]), prod(sizes[axis + 1 :]), v.shape[-1]
            grid = v.reshape(*v.shape[:2], before, -1, after * width)
            v = (factor.to(v.dtype)[:, :, None] @ grid).reshape(*v.shape[:2], -1, width)
    if weight is not None:
        v = v[..., :-1] / v[..., -1:].clamp_min(torch.finfo(v.dtype).tiny)  # none are 0 / 0
    return v[:, :, :tokens].to(dtype)


def _pooled(
    x: Tensor, weight: Tensor | None, sizes: Sequence[int], axis: int, pool: Pool
) -> tuple[Tensor, Tensor | None]:
    """Pool a grid over all axes but one: (batch, heads, size, width), and how many were valid."""
    import torch

    shape = (prod(sizes[:axis]), sizes[axis], prod(sizes[axis + 1 :]))
    grid, wide = x.unflatten(2, shape), torch.promote_types(x.dtype, torch.float32)
    if weight is None:
        pooled = grid.mean if pool == "mean" else grid.sum
        return pooled((2, 4), dtype=wide), None
    weights = weight.unflatten(2, shape)
    count = weights.sum((2, 4), dtype=wide)
    total = (grid * weights).sum((2, 4), dtype=wide)
    return (total / count.clamp(min=1) if pool == "mean" else total), count


def _factors(
    rows: Tensor,
    columns: Tensor,
    empty: Tensor | None,
    tensors: Tensors,
    layout: KroneckerLayout,
    index: int,
) -> tuple[Tensor, ...]:
    """Compute factors whose product is the matrix of the axis at `index` of those that are mixed.

    From pooled queries and keys (batch, heads, size, width); `empty` columns are all padding.
    """
    import torch

    scale = torch.full((), layout.head_dim**-0.5, dtype=rows.dtype, device=rows.device)
    if "scale" in tensors:
        scale = scale * tensors["scale"][index].to(rows.dtype).exp()[:, None, None]
    mask = layout.masks[index] if layout.masks else "none"
    if layout.kernel == "softmax":
        scores = rows * scale @ columns.mT
    else:
        directions = tensors["directions"].to(rows.dtype)
        # Logarithms of positive random features: (..., size, features).
        scaled = (x * scale.sqrt() for x in (rows, columns))
        left, right = (x @ directions.mT - x.square().sum(-1, keepdim=True) / 2 for x in scaled)
        if mask == "none":
            return _favor(left, right, empty)
        # All pairs of places: masks need them one by one.
        scores = (left[..., :, None, :] + right[..., None, :, :]).logsumexp(-1)
    hidden = _hidden(mask, rows.shape[-2], empty, rows.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1),)


def _hidden(mask: str, size: int, empty: Tensor | None, device: torch.device) -> Tensor | None:
    """Places of an axis that a row must not see: (size, size), with all padding also by batch."""
    import torch

    hidden = None if empty is None else empty.mT
    if mask == "none":
        return hidden
    places = torch.arange(size, device=device)
    behind = places[:, None] - places  # how far each column is behind its row
    kind, _, width = mask.partition(":")
    unseen = behind < 0 if kind == "causal" else behind.abs() > int(width)
    return unseen if hidden is None else hidden | unseen


def _favor(left: Tensor, right: Tensor, empty: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two thin factors of an axis' matrix, of logarithms of positive features (Performer)."""
    import torch

    # Both are normalised as logarithms, features by columns first, then rows by features: no row is
    # lost whose features hardly any column has.
    if empty is not None:
        right = right.masked_fill(empty, torch.finfo(right.dtype).min)
    total = right.logsumexp(-2, keepdim=True)
    return (left + total).softmax(-1), (right - total).exp().mT


register(Kronecker())
