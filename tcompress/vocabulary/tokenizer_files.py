"""The files of a tokenizer, and settings that name tokens by their ids, for other ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tcompress.errors import SourceError, read_json
from tcompress.files import write_text

Numbers = Mapping[int, int]
"""New ids by the old ones; what is not there has gone."""

MAIN, CONFIG = "tokenizer.json", "tokenizer_config.json"

# Keys whose values are ids of tokens, or lists of them.
_NAMES = re.compile(r"(^|_)(token|tokens)_(id|ids|index)$|^(pad|bos|eos|unk|mask)_index$")
_FORCED = {"forced_decoder_ids", "force_words_ids", "lang_to_id", "lang_code_to_id", "task_to_id"}
# Of tokens that are not to be generated: those that have gone cannot be.
_AVOIDED = {"suppress_tokens", "begin_suppress_tokens", "bad_words_ids"}
_BIAS = "sequence_bias"

# What only other programs read, in forms that cannot be written here.
_DROPPED = ("*.model", "*.spm", "*.vocab", "*.tiktoken", "tekken.json", "bpe.codes")


def required_ids(settings: Mapping[str, Any]) -> Iterator[int]:
    """List the tokens that settings name by their ids, sections inside left out."""
    for key, value in settings.items():
        if _NAMES.search(key) or key in _FORCED:
            if key == "forced_decoder_ids":  # pairs of a position and a token
                value = [pair[-1] for pair in value or ()]
            yield from _numbers(value)


def _numbers(value: Any) -> Iterator[int]:
    if type(value) is int:
        if value >= 0:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers(item)


def renumbered(settings: Mapping[str, Any], numbers: Numbers) -> dict[str, Any]:
    """Give settings, sections inside left as they are, with other ids of tokens."""
    return {key: _renumber(key, value, numbers) for key, value in settings.items()}


def _renumber(key: str, value: Any, numbers: Numbers) -> Any:
    if key in _AVOIDED and isinstance(value, list):
        rows = [_mapped(item, numbers) for item in value if {*_numbers(item)} <= numbers.keys()]
        return rows or None
    if key == _BIAS and isinstance(value, list):
        return [
            [_mapped(ids, numbers), bias]
            for ids, bias in value
            if {*_numbers(ids)} <= numbers.keys()
        ] or None
    if key == "forced_decoder_ids" and isinstance(value, list):
        return [[at, _mapped(token, numbers)] for at, token in value]
    if _NAMES.search(key) or key in _FORCED:
        return _mapped(value, numbers)
    return value


def _mapped(value: Any, numbers: Numbers) -> Any:
    if type(value) is int:
        return numbers.get(value, value) if value >= 0 else value
    if isinstance(value, list | tuple):
        return [_mapped(item, numbers) for item in value]
    if isinstance(value, Mapping):
        return {key: _mapped(item, numbers) for key, item in value.items()}
    return value


def tokenizer_json(
    settings: Mapping[str, Any], model: Mapping[str, Any], numbers: Numbers
) -> dict[str, Any]:
    """Give the content of `tokenizer.json` with another model and other ids."""
    made = {**settings, "model": model}
    made["added_tokens"] = [
        {**token, "id": numbers[token["id"]]} for token in settings.get("added_tokens") or ()
    ]
    if settings.get("padding"):
        pad = settings["padding"]["pad_id"]
        made["padding"] = {**settings["padding"], "pad_id": numbers.get(pad, pad)}
    made["post_processor"] = _processor(settings.get("post_processor"), numbers)
    return made


def _processor(value: Any, numbers: Numbers) -> Any:
    """Put other ids into templates: where a token stands by its id and beside its name."""
    if not isinstance(value, Mapping):
        return value
    made = dict(value)
    if "processors" in value:
        made["processors"] = [_processor(item, numbers) for item in value["processors"]]
    if "special_tokens" in value:
        made["special_tokens"] = {
            name: {**token, "ids": [numbers[index] for index in token["ids"]]}
            for name, token in value["special_tokens"].items()
        }
    for end in ("sep", "cls"):
        if isinstance(value.get(end), list):
            name, index = value[end]
            made[end] = [name, numbers[index]]
    return made


def processor_ids(value: Any) -> Iterator[int]:
    """List the tokens that a post-processor adds."""
    if isinstance(value, Mapping):
        for item in value.get("processors") or ():
            yield from processor_ids(item)
        for token in (value.get("special_tokens") or {}).values():
            yield from token["ids"]
        for end in ("sep", "cls"):
            if isinstance(value.get(end), list):
                yield value[end][1]


def rewrite_folder(folder: Path, main: Mapping[str, Any], numbers: Numbers) -> None:
    """Rewrite the tokenizer's files in a folder for other ids; `main` is its `tokenizer.json`.

    Files of other programs that cannot be written go, since `tokenizer.json` says all.
    """
    write_text(folder / MAIN, json.dumps(main, indent=2, ensure_ascii=False) + "\n")
    for pattern in _DROPPED:
        for path in folder.glob(pattern):
            path.unlink()
    model = main["model"]
    _rewrite(folder / CONFIG, _tokenizer_config, numbers)
    _rewrite(folder / "generation_config.json", renumbered, numbers)
    for name in ("vocab.json", "added_tokens.json"):
        _rewrite(folder / name, renumbered_pieces, numbers)
    words = folder / "vocab.txt"
    if words.is_file():
        *lines, unended = words.read_bytes().decode().split("\n")
        lines += [unended] if unended else []
        rows = sorted((numbers[at], line) for at, line in enumerate(lines) if at in numbers)
        write_text(words, "".join(f"{line}\n" for _, line in rows))
    merges = folder / "merges.txt"
    if merges.is_file() and "merges" in model:
        pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
        first = merges.read_text(encoding="utf-8").partition("\n")[0]
        head = [first] if first.startswith("#version") else []
        write_text(merges, "".join(f"{line}\n" for line in (*head, *pairs)))


def _tokenizer_config(settings: Mapping[str, Any], numbers: Numbers) -> dict[str, Any]:
    changed = renumbered(settings, numbers)
    if isinstance(tokens := settings.get("added_tokens_decoder"), Mapping):
        ids = {key: numbers[int(key)] for key in tokens if int(key) in numbers}
        changed["added_tokens_decoder"] = {str(ids[key]): tokens[key] for key in ids}
    return changed


def renumbered_pieces(pieces: Mapping[str, int], numbers: Numbers) -> dict[str, int]:
    """Give the pieces that stay with other ids, in their order."""
    ids = {piece: numbers[index] for piece, index in pieces.items() if index in numbers}
    return dict(sorted(ids.items(), key=lambda item: item[1]))


def _rewrite(
    path: Path, change: Callable[[Mapping[str, Any], Numbers], dict[str, Any]], numbers: Numbers
) -> None:
    if not path.is_file():
        return
    try:
        text = json.dumps(change(read_json(path), numbers), indent=2, ensure_ascii=False) + "\n"
    except (ValueError, TypeError, AttributeError) as error:
        text = f"`{path.name}` of the tokenizer is not what it should be ({error})"
        raise SourceError(text, "repair the file, or leave `vocab` out") from error
    write_text(path, text)
