"""Models that begin at random, from tiny configurations."""

from pathlib import Path
from typing import Any

from tcompress.conversion.converter import Converted, convert
from tcompress.models import SourceModel
from tcompress.options import Convert
from tcompress.options.steps import Architecture
from tcompress.own_models.architecture import open_architecture
from tests.support.tiny import TINY, named

BERT: dict[str, Any] = {
    "model_type": "bert", "class": "BertForSequenceClassification", "vocab_size": 100,
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
LPROD = {"name": "lprod", "p": 4}


def config_folder(family: str, folder: Path) -> Path:
    """Writes the configuration of a tiny model, and nothing else."""
    tiny = TINY[family]
    config = named(tiny.config)(**tiny.options)
    config.architectures = [tiny.model]
    config.save_pretrained(folder)
    return folder


def architecture(**changes: Any) -> Architecture:
    """A tiny BERT as a recipe describes it; None takes a key away."""
    said = {**BERT, **changes}
    return Architecture.model_validate({k: v for k, v in said.items() if v is not None})


def scratch(folder: Path, source: SourceModel | None = None, **recipe: Any) -> Converted:
    """Builds a model from scratch, by default a tiny BERT."""
    source = source or open_architecture(architecture(), recipe.get("seed", 0))
    return convert(source, Convert.model_validate({"init": "random", **recipe}), folder)
