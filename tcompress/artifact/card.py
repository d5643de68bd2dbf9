"""The model card that a conversion writes."""

from __future__ import annotations

from pathlib import Path

from tcompress.artifact.manifest import Manifest


def model_card(manifest: Manifest) -> str:
    """Renders the card: what was done, what it costs, how to load it."""
    plan = manifest.plan
    errors = [value for fit in manifest.fit.values() for value in _shown(fit)]
    mean = f"{sum(errors) / len(errors):.3f}" if errors else "unknown"
    name = Path(manifest.source.id).name if Path(manifest.source.id).exists() else None
    base = "" if name else f"base_model: {manifest.source.id}\n"
    kind = "held-out output error" if manifest.calibration.name != "none" else "weight error"
    saved = plan.dense_rewritten - plan.structured_rewritten
    rows = [
        ("rewritten layers", f"{len(plan.layers)}", f"{len(plan.layers)}"),
        ("their parameters", f"{plan.dense_rewritten:,}", f"{plan.structured_rewritten:,}"),
        ("all parameters", f"{plan.parameters:,}", f"{plan.parameters - saved:,}"),
    ]
    table = "\n".join(f"| {name} | {before} | {after} |" for name, before, after in rows)
    return f"""---
library_name: transformers
{base}tags:
- tcompress
- compressed
---

# {name or manifest.source.id}, compressed with `{plan.method}`

Converted by [tcompress](https://pypi.org/project/tcompress/) {manifest.tool_version}: \
{plan.kept:.1%} of the rewritten layers' parameters are kept.

| | dense | compressed |
|---|---|---|
{table}

Calibration: {manifest.calibration.name} ({manifest.calibration.samples} samples). \
Mean relative {kind} of the rewritten layers: {mean}. Not healed: fine-tune before use.

```python
import tcompress
from transformers import AutoModel

model = AutoModel.from_pretrained("PATH")
```

Without `import tcompress`, loading stops with an error. All numbers and the recipe are in \
`tcompress.json`.
"""


def _shown(fit: dict[str, float]) -> list[float]:
    for kind in ("held_out", "calibration", "weight"):
        if kind in fit:
            return [fit[kind]]
    return []
