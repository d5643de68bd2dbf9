"""Model folders as users have them: tiny weights with a tokenizer or an image processor."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import IMAGE, VOCAB, build

_SENTENCE = "a red fox runs over the old stone bridge and then it sleeps under one tall tree"
WORDS = _SENTENCE.split()
MEAN, SPREAD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]


def model_folder(
    family: str, folder: Path, *, tokenizer: bool = True, processor: bool = True
) -> Path:
    """Write a tiny model with everything that comes with it on the hub."""
    build(family).save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    if processor:
        save_processor(folder)
    return folder


def save_tokenizer(folder: Path, start: bool = True, **options: Any) -> None:
    """Write a tokenizer of whole words with ids below `VOCAB`."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    vocabulary |= {word: index for index, word in enumerate(WORDS, start=4)}
    vocabulary |= {f"w{index}": index for index in range(len(vocabulary), VOCAB)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if start:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", **options}
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)


def save_processor(folder: Path, **options: Any) -> None:
    """Write the options of an image processor."""
    content = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": IMAGE, "width": IMAGE},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": MEAN,
        "image_std": SPREAD,
        **options,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    """A JSON file as data, which is written again once it is changed."""
    content = json.loads(path.read_text(encoding="utf-8"))
    yield content
    path.write_text(json.dumps(content), encoding="utf-8")


def nested_items(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in nested lists and mappings, as its container and its key."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, key
        if isinstance(value, dict | list):
            yield from nested_items(value)


def sentences(count: int) -> list[str]:
    """Distinct sentences of 3 to 16 words."""
    return [
        " ".join([f"w{20 + index % 80}", *WORDS[: 2 + index % 14], f"w{20 + index // 80}"])
        for index in range(count)
    ]


def text_file(path: Path, texts: list[str]) -> str:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(path)
