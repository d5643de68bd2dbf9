"""Attention of several objects with a Tucker core: queries and keys meet through semantics.

A recurrent network may read keys in order, after the context of TAM (paper, section 5.1). The paper
makes keys and values of GRU(e), with e the word embeddings. Here every layer adds what a network of
its own makes of its keys: k + g GRU(k) and v + h GRU(k), so that closed gates g and h leave a
trained model as it is. Two texts are read one by one, each from a fresh state, and their states
stand side by side again.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any, Literal

from tcompress import linalg
from tcompress.attention.replacement import (
    AttentionReplacement,
    BaseAttention,
    QueryKeyMoments,
    ReplacementLayout,
    ReplacementSpec,
    register,
    repeat_heads,
)
from tcompress.fields import option
from tcompress.structures.base import Shapes, Tensors

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from tcompress.attention.visibility import Visible

Core = Literal["aligned", "cp", "tucker"]
Normalize = Literal["softmax", "none"]
Memory = Literal["states", "gru"]

RIDGE = 1e-6  # on moments of queries and keys: some features of a head may be constant
_NAMES = ("context_in", "context_state", "context_in_bias", "context_state_bias")


class TamSpec(ReplacementSpec):
    """Options of `tam`."""

    structure = "tucker"

    name: Literal["tam"] = "tam"
    core: Core = option(
        "cp",
        "form of the core; `aligned`: the paper's, along positions of queries; `cp`: along "
        "features, the paper's without query alignment; `tucker`: a full core with factors",
    )
    # The flags `--cores` and `--rank` are those of `tucker`.
    cores: int = option(
        1,
        "number of cores, which are averaged: several compute what one with their mean does, and "
        "differ in training alone",
        gt=0,
        le=64,
        off=True,
    )
    rank: int | None = option(
        None, "size of the core `tucker`; default the head's width", gt=0, off=True
    )
    semantic_rank: int = option(8, "size of the core `tucker` in semantics", gt=0)
    normalize: Normalize = option(
        "softmax", "how scores are normalised; `none` uses scores as in the paper"
    )
    memory: Memory = option(
        "states",
        "where keys and values come from; the model's `states`, or also a `gru`: k + g GRU(k) and "
        "v + h GRU(k) with gates g and h in every layer (the paper has GRU(e) W of the word "
        "embeddings e in their place)",
    )


class TamLayout(ReplacementLayout):
    """A core of some form per head, and a projection of the pooled semantics."""

    mechanism: Literal["tam"] = "tam"
    core: Core = "cp"
    cores: int = 1
    rank: int = 0
    semantic_rank: int = 0
    normalize: Normalize = "softmax"
    memory: Memory = "states"


class Tam(AttentionReplacement[TamSpec, TamLayout]):
    """Scores of queries and keys, weighed feature by feature by what the semantics say."""

    name = "tam"
    summary = "three-way attention of queries, keys and semantics through a core tensor"
    reference = "Tensorized Attention Model (TAM)"
    spec = TamSpec
    layout_type = TamLayout
    segments = True

    def arrange(self, spec: TamSpec, base: BaseAttention) -> dict[str, Any]:
        facts = spec.model_dump(include={"core", "cores", "normalize", "memory"})
        if spec.core != "tucker":
            return facts
        width = base.head_dim
        rank, semantic = min(spec.rank or width, width), min(spec.semantic_rank, width)
        return {**facts, "rank": rank, "semantic_rank": semantic}

    def tensors(self, layout: TamLayout) -> Shapes:
        heads, width = layout.heads, layout.head_dim
        rank, semantic = layout.rank, layout.semantic_rank
        shapes: Shapes = {
            "semantic_weight": (heads, width, width),
            "semantic_bias": (heads, width),
            "core": (layout.cores, heads, width),
        }
        if layout.core == "tucker":
            shapes |= {
                "core": (layout.cores, heads, rank, rank, semantic),
                "factor_q": (heads, width, rank),
                "factor_k": (heads, width, rank),
                "factor_s": (heads, width, semantic),
            }
        if layout.memory == "gru":
            shapes |= gru_tensors(layout.key_heads, layout.head_dim)
        return {**shapes, "scale": (heads,)} if layout.normalize == "softmax" else shapes

    def macs(self, layout: TamLayout, tokens: int) -> int:
        if layout.memory != "gru":
            return super().macs(layout, tokens)
        # The network runs token by token: to count it would take as long as a long text is.
        without = layout.model_copy(update={"memory": "states"})
        size = layout.key_heads * layout.head_dim
        return super().macs(without, tokens) + 6 * size**2 * tokens

    def ordered(self, layout: TamLayout) -> bool:
        return layout.core == "aligned" or layout.memory == "gru"

    def note(self, layout: TamLayout, longest: int | None, *, pretrained: bool) -> str | None:
        if layout.core != "aligned" or (longest is not None and longest <= layout.head_dim):
            return None
        later = "see all tokens alike" if layout.normalize == "softmax" else "get nothing"
        return (
            f"the core `aligned` knows queries by their place among the {layout.head_dim} features "
            f"of a head: those after token {layout.head_dim} {later}"
        )

    def start(self, layout: TamLayout, generator: Generator, *, pretrained: bool) -> Tensors:
        import torch

        width = layout.head_dim
        values = {name: torch.zeros(shape) for name, shape in self.tensors(layout).items()}
        if pretrained:  # the scores are the model's own; training lets semantics in
            values["semantic_bias"].fill_(1)
        else:
            values["core"].uniform_(generator=generator)
            values["semantic_weight"].normal_(generator=generator).div_(width**0.5)
        if layout.core == "tucker":
            values |= self._start_tucker(layout, generator)
        else:
            values["core"] = values["core"].softmax(-1)
        if layout.memory == "gru":
            bound = (layout.key_heads * width) ** -0.5  # as PyTorch does
            for name in _NAMES:
                values[name].uniform_(-bound, bound, generator=generator)
            values["context_gate"].fill_(0 if pretrained else 1)
        if layout.normalize == "softmax":
            values["scale"].fill_(log(width) / 2)
        return values

    def _start_tucker(self, layout: TamLayout, generator: Generator) -> dict[str, Tensor]:
        """A core whose first semantic slice is the identity, the others small."""
        import torch

        shapes, width = self.tensors(layout), layout.head_dim
        core = torch.randn(shapes["core"], generator=generator) * (0.01 / width)
        core[..., 0] = torch.eye(layout.rank) / width
        factor = torch.randn(shapes["factor_s"], generator=generator) / width
        factor[..., 0] = 1 / width
        cut = torch.eye(width, layout.rank).expand(shapes["factor_q"])
        return {"core": core, "factor_q": cut, "factor_k": cut, "factor_s": factor}

    def centres_keys(self, layout: TamLayout) -> bool | None:
        if layout.core != "tucker" or layout.rank == layout.head_dim:
            return None
        return layout.normalize == "softmax"

    def adapted(self, layout: TamLayout, moments: QueryKeyMoments, first: Tensors) -> Tensors:
        """Core and factors whose q^T P S R^T k loses least of q^T k.

        The SVD in both metrics: factors whose features have moments of one and are uncorrelated,
        and the singular values as the first slice of every core. Without data the moments are
        W_q W_q^T and W_k W_k^T, and S the largest singular values of W_q^T W_k, but for a factor.
        """
        import torch

        queries = linalg.damped_curvature(moments.queries, RIDGE)
        keys = repeat_heads(linalg.damped_curvature(moments.keys, RIDGE)[None], layout.heads)[0]
        roots = [linalg.safe_cholesky(moment) for moment in (queries, keys)]
        left, values, right = torch.linalg.svd(roots[0].mT @ roots[1])
        core = first["core"].to(queries, copy=True)
        core[..., 0] = (values[:, : layout.rank] / layout.head_dim).diag_embed()
        factors = {}
        for name, root, vectors in zip("qk", roots, (left, right.mT), strict=True):
            factor = torch.linalg.solve_triangular(root.mT, vectors[..., : layout.rank], upper=True)
            # Moments are sums over any number of tokens: columns are of length one on average.
            length = factor.square().sum((1, 2), keepdim=True).div(layout.rank).sqrt()
            factors[f"factor_{name}"] = factor / length
            core[..., 0] *= length
        return {"core": core, **factors}

    def apply(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors, layout: TamLayout, visible: Visible
    ) -> tuple[Tensor, Tensor]:
        import torch

        if layout.memory == "gru":
            k, v = add_context(k, v, tensors, visible.first)
        k, v = repeat_heads(k, layout.heads), repeat_heads(v, layout.heads)
        pooled, count = pooled_semantics(q, visible.topic)
        weight, bias = tensors["semantic_weight"], tensors["semantic_bias"]
        semantics = (pooled[..., None, :] @ weight.mT)[..., 0, :] + bias
        if layout.normalize == "none":
            semantics = semantics * count  # the paper's sum; softmax would saturate
        scores = tam_scores(q, k, semantics, tensors, layout)
        hidden = 0.0
        if layout.normalize == "softmax":
            scores = scores * tensors["scale"].exp()[:, None, None]
            hidden = torch.finfo(scores.dtype).min
        if visible.pairs is not None:
            scores = scores.masked_fill(~visible.pairs, hidden)
        weights = scores.softmax(-1) if layout.normalize == "softmax" else scores
        return weights @ v, weights


def pooled_semantics(s: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | int]:
    """Average semantic vectors (batch, heads, tokens, width) over valid tokens; counts these."""
    if valid is None:
        return s.mean(2), s.shape[2]
    weights = valid[:, None, :, None].to(s.dtype)
    count = weights.sum(2)
    return (s * weights).sum(2) / count.clamp(min=1), count


def tam_scores(
    q: Tensor, k: Tensor, semantics: Tensor, tensors: Tensors, layout: TamLayout
) -> Tensor:
    """Score queries against keys, given pooled or summed semantics (batch, heads, width)."""
    from torch.nn.functional import pad

    core = tensors["core"].mean(0)  # scores are linear in the cores
    if layout.core == "cp":  # sum_d g_d Q_qd K_kd S_d
        return q * (core * semantics)[..., None, :] @ k.mT
    if layout.core == "aligned":  # g_q (sum_i Q_qi) K_kq S_q, where q is a place among the features
        count = min(q.shape[2], layout.head_dim)
        gate = (core * semantics)[..., :count] * q.sum(-1)[..., :count]
        return pad(gate[..., None] * k[..., :count].mT, (0, 0, 0, q.shape[2] - count))
    # (batch, heads, semantic rank, 1)
    coordinates = (semantics[..., None, :] @ tensors["factor_s"]).mT
    middle = (core.flatten(1, 2) @ coordinates).unflatten(-2, (layout.rank, layout.rank))[..., 0]
    return (q @ tensors["factor_q"]) @ middle @ (k @ tensors["factor_k"]).mT


def gru_tensors(heads: int, width: int) -> Shapes:
    """Shapes of the network and of two gates per head, for keys and for values."""
    size = heads * width
    shapes = ((3 * size, size), (3 * size, size), (3 * size,), (3 * size,))
    return {**dict(zip(_NAMES, shapes, strict=True)), "context_gate": (2, heads)}


def add_context(
    k: Tensor, v: Tensor, tensors: Tensors, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add the network's states to keys and values through gates; `first` as in `read_texts`."""
    read = read_texts(k.transpose(1, 2).flatten(2), tensors, first)
    states = read.unflatten(2, (k.shape[1], -1)).transpose(1, 2)
    gates = tensors["context_gate"][:, :, None, None]
    return k + gates[0] * states, v + gates[1] * states


def read_texts(x: Tensor, tensors: Tensors, first: Tensor | None) -> Tensor:
    """States of the network; a second text, where `first` is not True, gets a fresh start."""
    import torch

    first_texts = _gru(x, tensors)
    if first is None:
        return first_texts
    # The second text is moved to the front, read, and moved back.
    tokens, places = x.shape[1], torch.arange(x.shape[1], device=x.device)
    start = first.long().cumprod(1).sum(1, keepdim=True)
    moved = _gru(_moved(x, (places + start) % tokens), tensors)
    second_texts = _moved(moved, (places - start) % tokens)
    return torch.where((places < start)[..., None], first_texts, second_texts)


def _moved(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[..., None].expand_as(x))


def _gru(x: Tensor, tensors: Tensors) -> Tensor:
    import torch

    weights = [tensors[name] for name in _NAMES]
    state = x.new_zeros(1, len(x), x.shape[2])
    # Without dropout it changes no number, but GPUs keep for gradients only what is trained.
    train = torch.is_grad_enabled()
    options = {"num_layers": 1, "dropout": 0.0, "train": train, "bidirectional": False}
    states, _ = torch.gru(x, state, weights, has_biases=True, batch_first=True, **options)  # type: ignore[call-overload]
    return states


register(Tam())
