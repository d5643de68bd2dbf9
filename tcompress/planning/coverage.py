"""How much of a whole model a plan rewrites, and what the rest of it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from tcompress.planning.entries import Coverage, Dense, Plan
from tcompress.source import SourceModel


def coverage_of(plan: Plan, source: SourceModel, model: nn.Module) -> Coverage:
    """Counts every parameter once; tied ones are one.

    Args:
        plan: The plan.
        source: The dense model.
        model: The same on the meta device.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter

    def runtime(name: str) -> str:
        return source.keymap.runtime_name(name) or name

    rewritten = {f"{runtime(entry.name)}.{entry.parameter}" for entry in plan.entries}
    unused = {runtime(layer.name) for entry in plan.attention for layer in entry.unused}
    tables = {
        f"{name}.weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding)
    }
    reasons = {item.name: (item.role, item.reason) for item in plan.left}
    every = [name for own in names.values() for name in own]
    above = _above((*tables, *(name for name in every if _numbered(name) or _is_table(name))))
    counts = dict.fromkeys(("rewritten", "replaced", "embeddings", "norms"), 0)
    dense: dict[tuple[str, str], int] = {}
    for key, own in names.items():
        size = tensors[key].numel()
        if rewritten.intersection(own):
            counts["rewritten"] += size
        elif any(_module(name) in unused for name in own):
            counts["replaced"] += size
        elif any(name in tables or _is_table(name) for name in own):
            counts["embeddings"] += size
        elif tensors[key].ndim < 2 or own[0].endswith("bias"):
            counts["norms"] += size
        else:
            known = (reasons.get(name) or reasons.get(_module(name)) for name in own)
            role, reason = next((item for item in known if item), ("", ""))
            label = role or _label(own[0], above)
            dense[label, reason] = dense.get((label, reason), 0) + size
    listed = sorted(dense.items(), key=lambda item: -item[1])
    left = tuple(Dense(name=n, parameters=size, reason=why) for (n, why), size in listed)
    return Coverage(total=sum(item.numel() for item in tensors.values()), left=left, **counts)


def note_of_coverage(plan: Plan, chosen: Collection[str]) -> Iterator[str]:
    """Warns where most of a model cannot be rewritten.

    Args:
        plan: The plan, with its coverage.
        chosen: Reasons to leave a layer dense that are somebody's choice.
    """
    own = plan.coverage
    assert own is not None
    layers = min(own.rewritten, plan.dense_rewritten)
    outside = own.total - own.dropped - own.embeddings - (own.rewritten - layers)
    forced = [item for item in own.left if item.reason not in chosen]
    reached = layers + own.replaced + sum(i.parameters for i in own.left if i.reason in chosen)
    if 2 * reached < outside and forced:
        most = forced[0]
        yield (
            f"only {reached / outside:.0%} of the parameters outside embeddings can be rewritten; "
            f"the largest part that stays dense is `{most.name}` ({most.parameters:,} parameters)"
            + (f": {most.reason}" if most.reason else ", outside the blocks")
        )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_table(name: str) -> bool:
    """Whether a parameter that is no module's weight is a table, such as one of positions."""
    leaf = name.rpartition(".")[2]
    return leaf not in ("weight", "bias") and any(
        word in leaf for word in ("embed", "position", "token")
    )


def _numbered(name: str) -> bool:
    return any(step.isdecimal() for step in name.split("."))


def _above(names: Collection[str]) -> set[str]:
    """All starts of names."""
    steps = (name.split(".") for name in names)
    return {".".join(own[:depth]) for own in steps for depth in range(1, len(own))}


def _label(name: str, above: Collection[str]) -> str:
    """What people call a parameter: its module in a block, else the largest module around it."""
    steps = _module(name).split(".") if name.endswith(".weight") else name.split(".")
    if not _numbered(name):
        for depth in range(1, len(steps)):
            if ".".join(steps[:depth]) not in above:
                steps = steps[:depth]
                break
    return next((step for step in reversed(steps) if step and not step.isdecimal()), name)
