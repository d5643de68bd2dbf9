"""Files of a model folder that are neither its weights nor its config, carried along unchanged.

Links are followed within the folder, and within the hub's cache, whose folders consist of links;
nothing else that a link leads to is read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from tcompress.errors import SourceError
from tcompress.files import write_text

_PATTERNS = (
    # tokenizers
    "tokenizer*.json",
    "*.model",
    "*.spm",
    "*.vocab",
    "*.tiktoken",
    "tekken.json",
    "vocab*.json",
    "vocab*.txt",
    "merges*.txt",
    "bpe.codes",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "*chat_template*.json",
    "*.jinja",
    # processors of images, sound and video
    "*preprocessor_config.json",
    "processor_config.json",
    "image_processor*.json",
    "feature_extractor*.json",
    # generation and sentence-transformers
    "generation_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    # the terms under which the model may be passed on
    "LICENSE*",
    "NOTICE*",
)
# Files that say how long texts may be: tokenizers, and sentence-transformers.
_LENGTHS = (
    ("tokenizer_config.json", "model_max_length"),
    ("sentence_bert_config.json", "max_seq_length"),
)
_TEMPLATE_FOLDER = "additional_chat_templates"


def companion_files(folder: Path, with_code: bool = False) -> tuple[Path, ...]:
    """List the files that a converted model needs besides weights and config.

    Args:
        folder: Model folder.
        with_code: Whether to carry Python files of the model's own code.

    Returns:
        Paths relative to the folder, sorted; links that lead out of it are left out.

    Raises:
        SourceError: If `modules.json` is no list of modules inside the folder.
    """
    found = (path for path in _candidates(folder, with_code) if _is_inside(path, folder))
    return tuple(sorted(path.relative_to(folder) for path in found))


def stray_links(folder: Path, with_code: bool = False) -> list[str]:
    """Names what is not carried along because it is a link out of the folder."""
    found = (path for path in _candidates(folder, with_code) if not _is_inside(path, folder))
    return sorted(str(path.relative_to(folder)) for path in found)


def carry_files(folder: Path, names: Iterable[Path], target: Path) -> None:
    """Copies files to another model folder.

    Args:
        folder: Model folder.
        names: Paths relative to it.
        target: The other folder.
    """
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def _candidates(folder: Path, with_code: bool) -> set[Path]:
    patterns = (*_PATTERNS, "*.py") if with_code else _PATTERNS
    found = {
        path
        for path in folder.iterdir()
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns)
    }
    for name in (_TEMPLATE_FOLDER, *_module_folders(folder)):
        # These modules are small heads with files of any kind: pooling, dense, normalisation.
        inside = (folder / name).rglob("*") if _is_inside(folder / name, folder) else ()
        found |= {path for path in inside if path.is_file() and path.name != "README.md"}
    return found


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, links followed, stays in its model folder or is the model's in the cache."""
    real = path.resolve()
    return real.is_relative_to(folder.resolve()) or real in _cached(folder)


def _cached(folder: Path) -> set[Path]:
    """Lists the files that the hub's cache has of a model.

    There a folder `snapshots/REVISION` links to files in `blobs`, and these may be links to files
    that models share, in a folder `blobs` beside them. Older clients filled folders of the user
    with links too: the configuration, or the weights, tell there which model's they are.
    """
    repos = {parent.parent for parent in folder.resolve().parents if parent.name == "snapshots"}
    own = (folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin"))
    homes = {(folder / path.readlink()).parent for path in own if path.is_symlink()}
    repos |= {home.resolve().parent for home in homes if home.name == "blobs"}
    found = set()
    for repo in repos:
        blobs = repo / "blobs"
        if blobs.is_dir() and (repo / "snapshots").is_dir():
            stores = (blobs.resolve(), (repo.parent / "blobs").resolve())
            files = {path.resolve() for path in blobs.iterdir()}
            found |= {real for real in files if any(map(real.is_relative_to, stores))}
    return found


def _module_folders(folder: Path) -> list[str]:
    """Folders that sentence-transformers' `modules.json` names."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        modules: Any = json.loads(path.read_text(encoding="utf-8"))
        names = [str(module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SourceError(
            f"`{path}` is no list of sentence-transformers modules",
            hint="repair it, or delete it to convert the transformer alone",
        ) from error
    for name in names:
        parts = PurePosixPath(name).parts
        named_outside = name.startswith("/") or ".." in parts or "\\" in name or "\0" in name
        if named_outside or not _is_inside(folder / name, folder):
            raise SourceError(
                f"`{path}` names `{name}`, outside the folder",
                hint="module folders must lie inside the model folder",
            )
    return [name for name in names if PurePosixPath(name).parts]  # else the folder itself


def shorten_texts(folder: Path, longest: int) -> None:
    """Tells tokenizers, which cut texts to the length that they know of, about a smaller one.

    Args:
        folder: Model folder.
        longest: Most tokens of a text.
    """
    for name, key in _LENGTHS:
        path = folder / name
        if path.is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
            known = settings.get(key)
            if known is None or known > longest:
                text = json.dumps(settings | {key: longest}, indent=2, ensure_ascii=False)
                write_text(path, text + "\n")
