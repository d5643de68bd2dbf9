"""What an attention looks at: its weights on one example, for reports."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcompress.artifact.manifest import AttentionMap
from tcompress.evaluation.task_base import EvaluationTask

_MOST = 32  # queries, and keys: more are not readable in a picture
_DIGITS = 4


@torch.no_grad()
def attention_map(model: PreTrainedModel, task: EvaluationTask) -> AttentionMap | None:
    """Weights of the last attention that returns them, a mean over heads, on the first example.

    Of a model that reads three texts, rows are tokens of the query and columns those of memory.
    None where the task reads no rows of tokens, or no attention returns weights.
    """
    rows = task.prepared.rows
    if not rows:
        return None
    inputs = {name: value for name, value in rows[0].items() if name != "labels"}
    batch = {name: value[None].to(model.device) for name, value in inputs.items()}
    returned = getattr(model(**batch, output_attentions=True), "attentions", None) or ()
    shown = [(layer, item) for layer, item in enumerate(returned) if isinstance(item, Tensor)]
    if not shown or shown[-1][1].dim() != 4:
        return None
    layer, weights = shown[-1]
    words = task.reader.tokenizer.convert_ids_to_tokens(rows[0]["input_ids"].tolist())
    queries = keys = range(len(words))
    types = rows[0].get("token_type_ids")
    if types is not None and getattr(model.config, "reads_semantics", False):
        queries, keys = range(int((types == 0).sum())), range(int((types < 2).sum()))
    queries, keys = queries[:_MOST], keys[:_MOST]
    mean = weights[0].float().mean(0).cpu()[: len(queries), : len(keys)]
    return AttentionMap(
        data=task.examples.name,
        layer=layer,
        rows=[words[index] for index in queries],
        columns=[words[index] for index in keys],
        weights=[[float(f"{value:.{_DIGITS}g}") for value in row] for row in mean.tolist()],
    )
