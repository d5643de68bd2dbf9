"""From what a user types to a model folder: aliases, local folders, hub ids."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from tcompress.errors import SourceError
from tcompress.source.text import folder_content, listed

METHOD = "tcompress"
"""Our name among the quantisation methods of Transformers."""

CALLED = (
    f"{METHOD} (`pip install tcompress`, then `import tcompress` before `from_pretrained`; or "
    "write a dense copy: `tcompress export MODEL --to dense`)"
)
"""Value of `quant_method` in `config.json`: where nobody imported us, Transformers prints it."""

METHODS = (METHOD, CALLED)
"""All values that were ever written; each is registered with Transformers as it stands."""

FORMAT_VERSION = 3
"""1: structured layers. 2: also attention mechanisms. 3: also models that began at random."""

MANIFEST = "tcompress.json"
CARD = "README.md"

ALIASES: dict[str, str] = {
    "bart-base": "facebook/bart-base",
    "bart-large": "facebook/bart-large",
    "bert-base": "google-bert/bert-base-uncased",
    "bert-base-cased": "google-bert/bert-base-cased",
    "bert-large": "google-bert/bert-large-uncased",
    "bert-tiny": "prajjwal1/bert-tiny",
    "clip-base": "openai/clip-vit-base-patch32",
    "deberta-v3-base": "microsoft/deberta-v3-base",
    "deberta-v3-small": "microsoft/deberta-v3-small",
    "deit-small": "facebook/deit-small-patch16-224",
    "deit-tiny": "facebook/deit-tiny-patch16-224",
    "distilbert": "distilbert/distilbert-base-uncased",
    "distilgpt2": "distilbert/distilgpt2",
    "distilroberta": "distilbert/distilroberta-base",
    "electra-base": "google/electra-base-discriminator",
    "electra-small": "google/electra-small-discriminator",
    "flan-t5-small": "google/flan-t5-small",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "modernbert-base": "answerdotai/ModernBERT-base",
    "mpnet": "sentence-transformers/all-mpnet-base-v2",
    "opt-125m": "facebook/opt-125m",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "pythia-160m": "EleutherAI/pythia-160m",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "roberta-base": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
    "t5-base": "google-t5/t5-base",
    "t5-small": "google-t5/t5-small",
    "vit-base": "google/vit-base-patch16-224",
    "vit-large": "google/vit-large-patch16-224",
    "whisper-small": "openai/whisper-small",
    "whisper-tiny": "openai/whisper-tiny",
}
"""Short names for well-known models."""

NO_GGUF = (
    "a GGUF file holds weights that are quantised for another program: give the model that it was "
    "made from, a hub id or a folder written by `save_pretrained`"
)
"""What to do instead of giving such a file."""


def resolve(
    name: str, revision: str | None = None, token: str | None = None, *, weights: bool = True
) -> Path:
    """Give the folder that holds a model, downloading it if need be.

    An existing local folder wins over an alias, an alias over a hub id.

    Args:
        name: Local folder, alias of `ALIASES` or hub id.
        revision: Branch, tag or commit on the hub.
        token: Access token for the hub.
        weights: Whether weights are needed; without them the path of a `config.json` is enough.

    Returns:
        The folder with the model's files.

    Raises:
        SourceError: If there is no such model, or the hub cannot give it.
    """
    path = Path(name).expanduser()
    alone = not weights and path.name == "config.json" and path.is_file()
    folder = path.parent if alone else local_folder(name)
    if folder is not None:
        if revision is not None:
            raise SourceError(
                f"revision `{revision}` was given, but `{name}` is a local folder",
                hint="leave the revision out, or give the hub id of the model",
            )
        return folder
    if not name.strip() or _looks_like_path(name):
        raise _missing_path(name)
    from tcompress.source.hub import download

    near = _near_name(name)
    return download(ALIASES.get(name, name), revision, token, near=near, weights=weights)


def local_folder(name: str) -> Path | None:
    """Give the local folder that `name` means, or None if it is not one."""
    if not name.strip():
        return None
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, ValueError):  # longer than names may be
        return None


def default_output_name(name: str, suffix: str) -> str:
    """Name the folder of a converted model, such as `bert-base-lprod-p4`."""
    base = name
    if name not in ALIASES:
        base = Path(name.replace("\\", "/")).name
        if base in ("", "..", "~"):
            base = Path(name).expanduser().resolve().name or "model"
    return re.sub(r"[^\w.-]+", "-", f"{base}-{suffix}").strip("-")


def _looks_like_path(name: str) -> bool:
    # A hub id is `name` or `owner/name`; everything else can only be meant as a path.
    return (
        name.startswith((".", "/", "~"))
        or "\\" in name
        or name.endswith("/")
        or name.count("/") > 1
        or Path(name).exists()
    )


def _missing_path(name: str) -> SourceError:
    if not name.strip():
        return SourceError(
            "the model name is empty", hint=f"give a folder, a hub id or one of {listed(ALIASES)}"
        )
    path = Path(name).expanduser()
    if path.exists():
        beside = (path.parent / "config.json").is_file()
        return SourceError(
            f"`{name}` is a file, but a model is a folder with `config.json` and weights",
            hint=NO_GGUF
            if path.suffix.lower() == ".gguf"
            else f"give the folder `{path.parent}`"
            if beside
            else "give a folder written by `save_pretrained`, or a hub id",
        )
    parent = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    try:
        content = folder_content(parent)
        near = get_close_matches(path.name, [item.name for item in parent.iterdir()], n=3)
    except OSError:
        content, near = "files that may not be listed", []
    hint = f"did you mean {listed(near)}" if near else "check the path"
    return SourceError(f"there is no folder `{name}`; `{parent}` holds {content}", hint=hint)


def _near_name(name: str) -> str | None:
    """What may have been meant by a name that the hub does not know."""
    known = {**ALIASES, **{hub.rpartition("/")[2].lower(): hub for hub in ALIASES.values()}}
    near = get_close_matches(name.rpartition("/")[2].lower(), known, n=1, cutoff=0.6)
    if near and ALIASES.get(name) is None and known[near[0]] != name:
        return f"did you mean `{near[0]}`, that is `{known[near[0]]}`"
    return None
