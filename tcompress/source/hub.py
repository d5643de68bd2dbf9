"""Downloading a model from the Hugging Face hub, and telling when that is out of reach."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from tcompress.errors import SourceError
from tcompress.source.text import first_line

# Patterns of `fnmatch`, where `*` also matches slashes: hence the list of what is never wanted.
_ALWAYS = [
    "*.json",
    "*.txt",
    "*.model",
    "*.spm",
    "*.vocab",
    "*.codes",
    "*.tiktoken",
    "*.jinja",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "[0-9]_*/*",
]
_SAFETENSORS = ["model.safetensors", "model-*.safetensors"]
_TORCH = ["pytorch_model.bin", "pytorch_model-*.bin"]
_NEVER = ["onnx/*", "openvino/*", "original/*", "coreml/*", "tf/*", "flax/*", ".*"]

AGAIN = 0.5  # seconds until a name is looked up again that could not be for the moment


def download(
    repo: str,
    revision: str | None,
    token: str | None,
    near: str | None,
    *,
    weights: bool = True,
) -> Path:
    """Fetch the files of a model that a conversion can need.

    Weights come as safetensors; the older `.bin` format is fetched only if there is nothing else.

    Args:
        repo: Hub id.
        revision: Branch, tag or commit.
        token: Access token.
        near: What may have been meant, to be said if there is no such model.
        weights: Whether to fetch weights, besides the configuration and the tokenizer.

    Returns:
        The local snapshot folder.

    Raises:
        SourceError: If the download fails, with the reason in plain words.
    """
    try:
        if not weights:
            return _snapshot(repo, revision, token, _ALWAYS)
        folder = _snapshot(repo, revision, token, _ALWAYS + _SAFETENSORS)
        if not any(folder.glob("model*.safetensors")):
            folder = _snapshot(repo, revision, token, _ALWAYS + _TORCH)
    except Exception as error:
        # The hub client raises errors of a dozen unrelated classes; all end in one of ours.
        raise _explained(error, repo, revision, near) from error
    return folder


@contextmanager
def cached_where_unreachable() -> Iterator[None]:
    """Has the hub's client look into its cache alone where the hub's name leads nowhere.

    The client would look it up again and again for half a minute. Whatever else goes wrong, it
    tries again as it does: names that lead somewhere, and those that a proxy looks up.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or _leads_nowhere(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _leads_nowhere(url: str) -> bool:
    """Whether no address belongs to a name, or none is found twice in a row."""
    parts = urlsplit(url)
    host, proxies = parts.hostname or "", getproxies()
    if (parts.scheme in proxies or "all" in proxies) and not proxy_bypass(host):
        return False
    for pause in (0, AGAIN):
        time.sleep(pause)
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                return True
        except UnicodeError:  # no name at all, as the client will say
            return False
        else:
            return False
    return True


def _snapshot(repo: str, revision: str | None, token: str | None, patterns: list[str]) -> Path:
    import huggingface_hub

    with cached_where_unreachable():
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                token=token,
                allow_patterns=patterns,
                ignore_patterns=_NEVER,
            )
        )


def _explained(error: Exception, repo: str, revision: str | None, near: str | None) -> SourceError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            f"access to `{repo}` is restricted by its owner",
            hint=f"ask for access on `https://huggingface.co/{repo}`, then pass a token "
            "or run `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(
            f"`{repo}` has no revision `{revision}`",
            hint="give a branch, a tag or a full commit hash, or leave the revision out",
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return SourceError(
            f"there is no local folder and no model on the hub called `{repo}`",
            hint=(near or "give a folder, an alias or a hub id such as `openai-community/gpt2`")
            + "; a private model needs a token",
        )
    if _is_offline(error):
        return SourceError(
            f"`{repo}` is neither a local folder nor in the local cache, "
            "and the hub cannot be reached",
            hint="go online (is `HF_HUB_OFFLINE` set?) or give the path of a model folder"
            + (f"; {near}" if near else ""),
        )
    return SourceError(
        f"downloading `{repo}` failed with `{type(error).__name__}: {first_line(error)}`",
        hint="try again, or download the model by hand and give its folder",
    )


def _is_offline(error: Exception) -> bool:
    from huggingface_hub import errors

    # `RevisionResolutionError` came with a later hub client; connection errors of its HTTP
    # library derive from no class that can be named without importing that library.
    names = {"RevisionResolutionError", "ConnectError", "ConnectTimeout", "ReadTimeout"}
    return isinstance(
        error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | ConnectionError
    ) or bool(names & {kind.__name__ for kind in type(error).__mro__})
