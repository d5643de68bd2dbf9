"""The model card that a conversion or a training run writes."""

from __future__ import annotations

from pathlib import Path

from tcompress.artifact.manifest import Manifest, TrainingFacts


def model_card(manifest: Manifest) -> str:
    """Renders the card: what was done, what it costs, how to load it."""
    plan = manifest.plan
    name = Path(manifest.source.id).name if Path(manifest.source.id).exists() else None
    drawn = manifest.source.init == "random"
    base = "" if name or drawn else f"base_model: {manifest.source.id}\n"
    shown, tags = name or manifest.source.id, "- tcompress\n"
    if plan.changes_model or plan.depth:
        done = "from scratch" if drawn else "compressed"
        title, tags = (
            f"{shown}, {done} with `{plan.method}`",
            tags + f"- {done.replace(' ', '-')}\n",
        )
        body, loading = _conversion(manifest), "It loads without tcompress. "
        if plan.changes_model:
            loading = "Without `import tcompress`, loading stops with an error. "
    else:
        title, body, loading = f"{shown}, trained with tcompress", _trained(manifest), ""
        if drawn:
            title, body = f"{shown} from scratch", _fitted(manifest) + body
    first = "import tcompress\n" if plan.changes_model else ""
    return f"""---
library_name: transformers
{base}tags:
{tags}---

# {title}

{body}

```python
{first}from transformers import AutoModel

model = AutoModel.from_pretrained("PATH")
```

{loading}All numbers and the recipe are in `tcompress.json`.
"""


def _conversion(manifest: Manifest) -> str:
    plan = manifest.plan
    rows = [("all parameters", f"{plan.parameters:,}", f"{plan.parameters - plan.saved:,}")]
    done = []
    if plan.layers:
        rows = [
            ("rewritten layers", f"{len(plan.layers)}", f"{len(plan.layers)}"),
            ("their parameters", f"{plan.dense_rewritten:,}", f"{plan.structured_rewritten:,}"),
            *rows,
        ]
        done.append(f"{plan.kept:.1%} of the rewritten layers' parameters are kept")
    for item in plan.embeddings:
        rows = [("word embedding", f"{item.dense_parameters:,}", f"{item.parameters:,}"), *rows]
        done.append(f"{item.parameters / item.dense_parameters:.1%} of the word embedding")
    if plan.attention:
        kinds = sorted({entry.layout.mechanism for entry in plan.attention})
        count = len(plan.attention)
        done.append(f"{' and '.join(kinds)} attention in {count} block{'s' * (count > 1)}")
    if plan.depth is not None:
        rows = [("blocks", f"{plan.depth.blocks}", f"{plan.depth.kept}"), *rows]
        done.append(f"{plan.depth.blocks} -> {plan.depth.kept} blocks, from 0: {plan.depth.which}")
    table = "\n".join(f"| {name} | {before} | {after} |" for name, before, after in rows)
    verb = "Built" if manifest.source.init == "random" else "Converted"
    return f"""{verb} by [tcompress](https://pypi.org/project/tcompress/) \
{manifest.tool_version}: {"; ".join(done)}.

| | dense | compressed |
|---|---|---|
{table}

{_fitted(manifest)}{_trained(manifest)}"""


def _fitted(manifest: Manifest) -> str:
    """What the weights follow from, before any training."""
    if manifest.source.init == "random":
        return f"All weights began at random, with seed {manifest.source.seed}; no teacher. "
    facts = manifest.calibration
    return f"Calibration: {facts.name} ({facts.samples} samples). {_errors(manifest)}"


def _errors(manifest: Manifest) -> str:
    """What the rewritten layers lost."""
    if not manifest.plan.entries:
        return ""
    errors = [value for fit in manifest.fit.values() for value in _shown(fit)]
    mean = f"{sum(errors) / len(errors):.3f}" if errors else "unknown"
    kind = "held-out output error" if manifest.calibration.name != "none" else "weight error"
    after = " before training" if manifest.training else ""
    return f"Mean relative {kind} of the rewritten layers{after}: {mean}. "


def _trained(manifest: Manifest) -> str:
    """What training did, one sentence a run."""
    if not manifest.training and manifest.source.init == "random":
        return "Not trained: train before use."
    if not manifest.training:
        return "Not healed: fine-tune before use."
    return "\n".join(map(_sentence, manifest.training))


def _sentence(facts: TrainingFacts) -> str:
    what = "Healed" if facts.task is None else f"Fine-tuned for {facts.task}"
    teacher = facts.teacher
    if teacher is not None:
        # Folders of one machine mean nothing to others.
        teacher = Path(teacher).name if Path(teacher).exists() else teacher
    by = f", taught by {teacher}" if teacher else ""
    start = next((point.validation for point in facts.curve if point.validation is not None), None)
    before = "" if start is None else f", {start:.4g} at the start"
    return (
        f"{what} for {facts.steps:,} steps on {facts.data} ({facts.samples:,} examples seen){by}; "
        f"{facts.validation} on held-out data {facts.best:.4g}{before}."
    )


def _shown(fit: dict[str, float]) -> list[float]:
    for kind in ("held_out", "calibration", "weight"):
        if kind in fit:
            return [fit[kind]]
    return []
