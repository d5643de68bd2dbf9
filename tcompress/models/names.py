"""From what a user types to a model folder, and its files that are carried along unchanged."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from tcompress.errors import SourceError, first_line, folder_content, listed, read_settings
from tcompress.files import write_text
from tcompress.project import INSTALL

CARD = "README.md"
PAGE = "report.html"  # that `compress` writes
REWRITTEN = (CARD, PAGE)
"""Files of ours that people write anew: others than were written, or none, are no damage."""
MODULES = "modules.json"  # of sentence-transformers

# Patterns of `fnmatch`, where `*` also matches slashes: hence the list of what is never wanted.
_ALWAYS = [
    "*.json", "*.txt", "*.model", "*.spm", "*.vocab", "*.codes", "*.tiktoken", "*.jinja", "*.py",
    "LICENSE*", "NOTICE*", "[0-9]_*/*", CARD, "adapter_model.*",
]  # fmt: skip
_SAFETENSORS = ["model.safetensors", "model-*.safetensors"]
_TORCH = ["pytorch_model.bin", "pytorch_model-*.bin"]
_NEVER = ["onnx/*", "openvino/*", "original/*", "coreml/*", "tf/*", "flax/*", ".*"]

AGAIN = 0.5  # seconds until a name is looked up again that could not be for the moment


def _download(
    repo: str, revision: str | None, token: str | None, near: str | None, weights: bool
) -> Path:
    """Fetch what a conversion can need; the older `.bin` format only if there is nothing else."""
    import huggingface_hub

    folder = Path()
    try:
        for patterns in (_SAFETENSORS, _TORCH) if weights else ([],):
            with cached_where_unreachable():
                found = huggingface_hub.snapshot_download(
                    repo,
                    revision=revision,
                    token=token,
                    allow_patterns=_ALWAYS + patterns,
                    ignore_patterns=_NEVER,
                )
            folder = Path(found)
            if any(folder.glob("model*.safetensors")):
                break
    except Exception as error:
        # The hub client raises errors of a dozen unrelated classes; all end in one of ours.
        raise _explained(error, repo, revision, near) from error
    return folder


@contextmanager
def cached_where_unreachable() -> Iterator[None]:
    """Has the hub's client look into its cache alone where the hub's name leads nowhere.

    The client would look it up again and again for half a minute.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or _leads_nowhere(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _leads_nowhere(url: str) -> bool:
    """Return whether no address belongs to a name, looked up twice in a row."""
    parts = urlsplit(url)
    host, proxies = parts.hostname or "", getproxies()
    if (parts.scheme in proxies or "all" in proxies) and not proxy_bypass(host):
        return False
    for pause in (0, AGAIN):
        time.sleep(pause)
        try:
            socket.getaddrinfo(host, None)
            return False
        except UnicodeError:  # no name at all, as the client will say
            return False
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                return True
    return True


def _explained(error: Exception, repo: str, revision: str | None, near: str | None) -> SourceError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            f"access to `{repo}` is restricted by its owner",
            hint=f"ask for access on `https://huggingface.co/{repo}`, then pass a token "
            "or run `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        hint = "give a branch, a tag or a full commit hash, or leave the revision out"
        return SourceError(f"`{repo}` has no revision `{revision}`", hint)
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return SourceError(
            f"there is no local folder and no model on the hub called `{repo}`",
            hint=(near or "give a folder, an alias or a hub id such as `openai-community/gpt2`")
            + "; a private model needs a token",
        )
    # `RevisionResolutionError` came with a later hub client; connection errors of its HTTP
    # library derive from no class that can be named without importing that library.
    names = {"RevisionResolutionError", "ConnectError", "ConnectTimeout", "ReadTimeout"}
    unreachable = errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | ConnectionError
    if isinstance(error, unreachable) or names & {kind.__name__ for kind in type(error).__mro__}:
        return SourceError(
            f"`{repo}` is neither a local folder nor in the local cache, "
            "and the hub cannot be reached",
            hint="go online (is `HF_HUB_OFFLINE` set?) or give the path of a model folder"
            + (f"; {near}" if near else ""),
        )
    text = f"downloading `{repo}` failed with `{type(error).__name__}: {first_line(error)}`"
    return SourceError(text, "try again, or download the model by hand and give its folder")


METHOD = "tcompress"  # our name among the quantisation methods of Transformers
# Value of `quant_method` in `config.json`: where nobody imported us, Transformers prints it.
_CURE = (
    "then `import tcompress` before `from_pretrained`; or "
    "write a dense copy: `tcompress export MODEL --to dense`)"
)
CALLED = f"{METHOD} (`{INSTALL}`, {_CURE}"
# All that were ever written; each is registered as it stands.
METHODS = (METHOD, f"{METHOD} (`pip install tcompress`, {_CURE}", CALLED)
# Key of `config.json` whose value Transformers (5.21 to 5.24) refuses, as the last line of a failed
# `from_pretrained`, unless it names a file of weights. Our quantizer takes it out before that.
WEIGHTS = "transformers_weights"
LOADED_WITH = f"this model needs tcompress: `{INSTALL}`, then `import tcompress` before loading it"
# 1: structured layers. 2: also attention replacements. 3: also models that began at random.
# 4: also fewer channels. 5: also tensors in fewer bits.
FORMAT_VERSION = 5
MANIFEST = "tcompress.json"

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

NO_ONNX = (
    "an ONNX file is what a model is exported to, and is not read back: give the folder that has "
    "`config.json` and `model.safetensors`"
)
NO_GGUF = (
    "a GGUF file holds weights that are quantised for another program: give the model that it was "
    "made from, a hub id or a folder written by `save_pretrained`"
)


def resolve(
    name: str, revision: str | None = None, token: str | None = None, *, weights: bool = True
) -> Path:
    """Give the folder of a local folder, an alias or a hub id, downloading it if need be.

    Without `weights` the path of a `config.json` is enough.
    """
    folder = find_locally(name, revision, weights=weights)
    if folder is not None:
        return folder
    near = _near_name(name)
    return transformer_folder(_download(ALIASES.get(name, name), revision, token, near, weights))


def name_of(model: object) -> str:
    """Give the name of a model as text; what is no name is refused, such as a loaded model."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    text = f"a `{type(model).__name__}` was given for a model"
    raise SourceError(text, "give a folder (`model.save_pretrained` writes one) or a hub id")


def find_locally(name: str, revision: str | None = None, *, weights: bool = True) -> Path | None:
    """Give the folder as `resolve` does, None where the hub is to be asked; refuse other names."""
    path = expanded(name)
    alone = not weights and path.name == "config.json" and path.is_file()
    folder = path.parent if alone else local_folder(name)
    if folder is not None:
        if revision is not None:
            text = f"revision `{revision}` was given, but `{name}` is a local folder"
            raise SourceError(text, "leave the revision out, or give the hub id of the model")
        return folder if alone else transformer_folder(folder)
    if not name.strip():
        hint = f"give a folder, a hub id or one of {listed(ALIASES)}"
        raise SourceError("the model name is empty", hint)
    if path.exists():
        raise _no_folder(name, path)
    if is_path(name):
        raise SourceError(*missing_path(name, "folder"))
    return None


def expanded(name: str) -> Path:
    """Give the path that a name means: as it stands if that is there, else from a user's home."""
    path = Path(name)
    try:
        return path if os.path.lexists(path) else path.expanduser()
    except (RuntimeError, ValueError):  # of `~name` for nobody; no path at all
        return path


def local_folder(name: str) -> Path | None:
    """Give the local folder that `name` means, or None if it is not one."""
    if not name.strip():
        return None
    try:
        folder = expanded(name)
        return folder if folder.is_dir() else None
    except (OSError, ValueError):  # longer than names may be
        return None


def default_output_name(name: str, suffix: str) -> str:
    """Name the folder of a converted model, such as `bert-base-lprod-p4`."""
    base = name
    if name not in ALIASES:
        base = Path(name.replace("\\", "/")).name
        if base in ("", "..", "~"):
            base = expanded(name).resolve().name or "model"
    return re.sub(r"[^\w.-]+", "-", f"{base}-{suffix}").strip("-")


def is_path(name: str) -> bool:
    """Tell whether a name can only be meant as a path: a hub id is `name` or `owner/name`."""
    local = name.startswith((".", "/", "~")) or name.endswith("/")
    return local or "\\" in name or name.count("/") > 1


def _no_folder(name: str, path: Path) -> SourceError:
    hint = {".gguf": NO_GGUF, ".onnx": NO_ONNX}.get(path.suffix.lower())
    if hint is None and (path.parent / "config.json").is_file():
        hint = f"give the folder `{path.parent}`"
    text = f"`{name}` is a file, but a model is a folder with `config.json` and weights"
    return SourceError(text, hint or "give a folder written by `save_pretrained`, or a hub id")


def missing_path(name: str, what: str) -> tuple[str, str]:
    """Write the message and the hint for a path that leads nowhere."""
    path = expanded(name)
    parent = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    try:
        content = folder_content(parent)
        near = get_close_matches(path.name, [item.name for item in parent.iterdir()], n=3)
    except OSError:
        content, near = "files that may not be listed", []
    hint = f"did you mean {listed(near)}" if near else "check the path"
    return f"there is no {what} `{name}`; `{parent}` holds {content}", hint


def own_section(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Give the section of a `config.json` that tcompress wrote; None where there is none."""
    section = settings.get("quantization_config")
    return section if isinstance(section, dict) and section.get("quant_method") in METHODS else None


def is_only_rounded(section: Any) -> bool:
    """Tell whether a section of `config.json` is ours, and all of it is fewer bits."""
    section = own_section({"quantization_config": section}) or {}
    plan = section.get("plan")
    return "storage" in section and isinstance(plan, dict) and not any(plan.values())


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a model that is to be opened."""
    path = folder / "config.json"
    if not path.is_file():
        text = f"`{folder}` has no `config.json`; it holds {folder_content(folder)}"
        raise SourceError(text, _hint_without_config(folder))
    try:
        return read_settings(path)
    except ValueError as error:
        raise SourceError(f"`{path}` {error}", hint="repair the file") from error


def _hint_without_config(folder: Path) -> str:
    if (folder / "model_index.json").is_file():
        return "this is a diffusers pipeline: give the folder of one transformer inside it"
    if any(folder.glob("*.gguf")):
        return NO_GGUF
    if any(folder.glob("*.onnx")):
        around = folder.absolute().parent
        return f"give the folder `{around}`" if (around / "config.json").is_file() else NO_ONNX
    inner = sorted(path.parent for path in folder.glob("*/config.json"))
    return f"did you mean `{inner[0]}`" if inner else "give a folder written by `save_pretrained`"


def _near_name(name: str) -> str | None:
    known = {**ALIASES, **{hub.rpartition("/")[2].lower(): hub for hub in ALIASES.values()}}
    near = get_close_matches(name.rpartition("/")[2].lower(), known, n=1, cutoff=0.6)
    if near and ALIASES.get(name) is None and known[near[0]] != name:
        return f"did you mean `{near[0]}`, that is `{known[near[0]]}`"
    return None


# Files of a model folder that are neither its weights nor its config, carried along unchanged.
# Links are followed within the folder, and within the hub's cache, whose folders consist of links;
# nothing else that a link leads to is read.

_PATTERNS = (
    # tokenizers
    "tokenizer*.json", "*.model", "*.spm", "*.vocab", "*.tiktoken", "tekken.json", "vocab*.json",
    "vocab*.txt", "merges*.txt", "bpe.codes", "special_tokens_map.json", "added_tokens.json",
    "normalizer.json", "*chat_template*.json", "*.jinja",
    # processors of images, sound and video
    "*preprocessor_config.json", "processor_config.json", "image_processor*.json",
    "feature_extractor*.json",
    # generation and sentence-transformers
    "generation_config.json", MODULES, "config_sentence_transformers.json",
    "sentence_*_config.json",
    # the terms under which the model may be passed on
    "LICENSE*", "NOTICE*",
)  # fmt: skip


ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def adapter_files(folder: Path) -> list[str]:
    """List the files of an adapter of PEFT in a model's folder."""
    return [name for name in ADAPTER if (folder / name).is_file()]


def auxiliary_files(folder: Path, with_code: bool = False) -> tuple[Path, ...]:
    """List what a converted model needs besides weights and config; with or without Python code."""
    found = (path for path in _candidates(folder, with_code) if _is_inside(path, folder))
    return tuple(sorted(path.relative_to(folder) for path in found))


def stray_links(folder: Path, with_code: bool = False) -> list[str]:
    """Names what is not carried along because it is a link out of the folder."""
    found = (path for path in _candidates(folder, with_code) if not _is_inside(path, folder))
    return sorted(str(path.relative_to(folder)) for path in found)


def carry_files(folder: Path, names: Iterable[Path], target: Path) -> None:
    """Copies files, by their paths relative to the folder, to another model folder.

    What stands around a transformer in the old layout is put beside it, as it is done today.
    """
    for name in names:
        _carry(folder, name, target)
    root = sentence_root(folder)
    if root is None or root == folder:
        return
    for name in auxiliary_files(root):
        if name.parts[0] != folder.name and not (target / name).exists():
            _carry(root, name, target)
    modules = json.loads((root / MODULES).read_text(encoding="utf-8"))
    for module in modules:
        if PurePosixPath(module["path"]).parts == (folder.name,):
            module["path"] = ""
    write_text(target / MODULES, json.dumps(modules, indent=2) + "\n")


def _carry(folder: Path, name: Path, target: Path) -> None:
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / name, target / name)


def transformer_folder(folder: Path) -> Path:
    """Give the folder of a model inside that of a sentence encoder in the old layout.

    There `modules.json` names a folder, such as `0_Transformer`, for the transformer too.
    """
    try:
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        names = [str(it["path"]) for it in modules if str(it["type"]).endswith("Transformer")]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return folder  # none; or what is wrong with it is said where it is read
    parts = PurePosixPath(names[0]).parts if names else ()
    inner = folder.joinpath(*parts)
    is_plain = len(parts) == 1 and parts[0] not in ("..", "/") and _is_inside(inner, folder)
    return inner if is_plain and (inner / "config.json").is_file() else folder


def sentence_root(folder: Path) -> Path | None:
    """Give the folder whose `modules.json` speaks of a model: its own, or the one around it."""
    if (folder / MODULES).is_file():
        return folder
    around = folder.absolute().parent
    return around if transformer_folder(around) == folder.absolute() else None


def encodes_sentences(folder: Path) -> bool:
    """Return whether sentence-transformers embeds texts with the states of the model in a folder.

    It may also hold models there that score pairs, or that predict tokens of sparse embeddings.
    """
    root = sentence_root(folder) or folder
    try:
        modules = json.loads((root / MODULES).read_text(encoding="utf-8"))
        first = str(modules[0]["type"]).rpartition(".")[2]
        paths = folder.glob("sentence_*_config.json")
        texts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        tasks = {settings.get("transformer_task") for settings in texts}
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return False  # what is wrong is said where it is read
    return first == "Transformer" and tasks <= {None, "feature-extraction"}


def _candidates(folder: Path, with_code: bool) -> set[Path]:
    patterns = (*_PATTERNS, "*.py") if with_code else _PATTERNS
    found = {
        path
        for path in folder.iterdir()
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns)
    }
    for name in ("additional_chat_templates", *_module_folders(folder)):
        # These modules are small heads with files of any kind: pooling, dense, normalisation.
        inside = (folder / name).rglob("*") if _is_inside(folder / name, folder) else ()
        found |= {path for path in inside if path.is_file() and path.name != "README.md"}
    return found


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path, links followed, is in its model folder or the model's in the cache."""
    real = path.resolve()
    return real.is_relative_to(folder.resolve()) or real in _cached(folder)


def _cached(folder: Path) -> set[Path]:
    """Lists the files that the hub's cache has of a model.

    A folder `snapshots/REVISION` links to files in `blobs`, which may be links to files that models
    share, in a folder `blobs` beside them. Older clients filled folders of the user with links:
    there the configuration, or the weights, tell which model's they are.
    """
    repos = {parent.parent for parent in folder.resolve().parents if parent.name == "snapshots"}
    own = (folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin"))
    homes = {(folder / path.readlink()).parent for path in own if path.is_symlink()}
    repos |= {home.resolve().parent for home in homes if home.name == "blobs"}
    cached = set()
    for blobs in (repo / "blobs" for repo in repos if (repo / "snapshots").is_dir()):
        stores = (blobs.resolve(), (blobs.parents[1] / "blobs").resolve())
        files = {path.resolve() for path in blobs.iterdir()} if blobs.is_dir() else set()
        cached |= {real for real in files if any(map(real.is_relative_to, stores))}
    return cached


def _module_folders(folder: Path) -> list[str]:
    path = folder / MODULES
    if not path.is_file():
        return []
    try:
        names = [str(module["path"]) for module in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        hint = "repair it, or delete it to convert the transformer alone"
        raise SourceError(f"`{path}` is no list of sentence-transformers modules", hint) from error
    for name in names:
        parts = PurePosixPath(name).parts
        named_outside = name.startswith("/") or ".." in parts or "\\" in name or "\0" in name
        if named_outside or not _is_inside(folder / name, folder):
            hint = "module folders must lie inside the model folder"
            raise SourceError(f"`{path}` names `{name}`, outside the folder", hint)
    return [name for name in names if PurePosixPath(name).parts]  # else the folder itself


def shorten_texts(folder: Path, longest: int) -> None:
    """Lower the length at which tokenizers cut texts, where theirs is larger."""
    files = {"tokenizer_config": "model_max_length", "sentence_*_config": "max_seq_length"}
    for name, key in files.items():
        for path in folder.glob(f"{name}.json"):
            settings = json.loads(path.read_text(encoding="utf-8"))
            before = settings.get(key)
            if before is None or before > longest:
                text = json.dumps(settings | {key: longest}, indent=2, ensure_ascii=False)
                write_text(path, text + "\n")


def renumber_alignment(folder: Path, kept: Sequence[int]) -> None:
    """Renumber decoder blocks, of which Whisper reads heads to tell when words are spoken.

    Heads of blocks that are gone go too.
    """
    path, key = folder / "generation_config.json", "alignment_heads"
    if not path.is_file():
        return
    with suppress(ValueError, TypeError):  # whoever reads it says what is wrong
        settings = json.loads(path.read_text(encoding="utf-8"))
        pairs = settings.get(key) if isinstance(settings, dict) else None
        heads = [[kept.index(block), head] for block, head in pairs or () if block in kept]
        if heads != (pairs or []):
            settings = {**settings, key: heads}
            if not heads:
                del settings[key]
            write_text(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


_PARTS = ("config", "processor", "extractor")  # ends of keys under which settings have parts


def without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Give settings, also of their parts, that name no Python code."""
    return {
        key: without_code(value) if isinstance(value, dict) and key.endswith(_PARTS) else value
        for key, value in settings.items()
        if key != "auto_map"
    }


def forget_code(folder: Path) -> None:
    """Remove names of Python code, which stays behind, from the settings in a folder."""
    for path in folder.glob("*config.json"):
        text = path.read_text(encoding="utf-8", errors="replace")
        with suppress(ValueError, RecursionError):  # whoever reads it says what is wrong
            settings = json.loads(text) if '"auto_map"' in text else None
            if isinstance(settings, dict) and (left := without_code(settings)) != settings:
                write_text(path, json.dumps(left, indent=2, ensure_ascii=False) + "\n")


def name_cure(folder: Path) -> None:
    """Let a converted model that Transformers has saved say again what it needs to load."""
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if "quantization_config" in settings:
        settings = {WEIGHTS: LOADED_WITH, **settings}
        write_text(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def stands_alone(config: Mapping[str, Any]) -> bool:
    """Return whether a plain model, by its config, loads without tcompress: our own do not."""
    return not str(config.get("model_type")).startswith("tcompress_")
