"""Opening models to run them: dense and converted ones alike."""

from __future__ import annotations

from typing import Any, Literal

import torch
import transformers
from transformers import PreTrainedModel

from tcompress.errors import InputError, SourceError
from tcompress.integration.quantizer import register
from tcompress.source import SourceModel
from tcompress.source.drawn import draw_model
from tcompress.source.text import first_line

Head = Literal[
    "classification",
    "regression",
    "image-classification",
    "masked-lm",
    "causal-lm",
    "forecasting",
]

_AUTO: dict[str, Any] = {
    "classification": transformers.AutoModelForSequenceClassification,
    "regression": transformers.AutoModelForSequenceClassification,
    "image-classification": transformers.AutoModelForImageClassification,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "causal-lm": transformers.AutoModelForCausalLM,
    "forecasting": transformers.AutoModelForTimeSeriesPrediction,
}


def has_head(source: SourceModel, head: Head) -> bool:
    """Tells whether a model comes with the head of a task."""
    mapping = _AUTO[head]._model_mapping
    kind: Any = mapping.get(type(source.config), None)
    kinds = kind if isinstance(kind, tuple | list) else (kind,)
    return source.model_class in kinds


def load_model(
    source: SourceModel,
    head: Head | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> PreTrainedModel:
    """Loads a model in evaluation mode.

    Args:
        source: The model; opened with `converted=True` if it may be a converted one.
        head: Head that it should have; where it lacks one, a new one is added with random
            weights. None keeps the class of the checkpoint.
        dtype: Dtype to compute in; default as stored.
        device: Where to put it.
        **options: Passed to `from_pretrained`, such as `num_labels`.

    Raises:
        SourceError: The weights cannot be loaded, or there is no such head for the family.
    """
    register()
    kind: Any = source.model_class
    if head is not None and not has_head(source, head):
        kind = _AUTO[head]
        if type(source.config) not in kind._model_mapping:
            raise SourceError(
                f"there is no `{head}` head for the model type `{source.config.model_type}`",
                hint="choose another task, or a model of another family",
            )
    if source.seed is not None:
        drawn = draw_model(kind, source.config, source.seed)
        return drawn.to(device=device, dtype=dtype or torch.float32)
    try:
        model: PreTrainedModel = kind.from_pretrained(
            source.folder,
            dtype=dtype or "auto",
            trust_remote_code=source.trust_remote_code,
            **options,
        )
    except InputError:
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise SourceError(
            f"`{source.folder}` cannot be loaded ({type(error).__name__}: {first_line(error)})",
            hint="`tcompress report` on the folder says what is damaged, if it was converted",
        ) from error
    return model.to(device).eval()  # type: ignore[arg-type]
