"""Adapters of PEFT in a model's folder: merged into the weights where that is asked for."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tcompress.errors import SourceError, first_line, listed, read_json
from tcompress.models.names import ADAPTER, adapter_files, local_folder

Adapter = Literal["merge"]
"""What is done with an adapter; without a word it is refused."""

CONFIG, *_WEIGHTS = ADAPTER

_KINDS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}  # by `task_type`
_HEAD = re.compile(r"\.(score|classifier(\.out_proj)?)\.weight$")


def check_adapter(folder: Path, adapter: Adapter | None) -> None:
    """Refuses a folder with an adapter that nothing is said of, and to merge where that cannot be.

    Without it another model would be read than the one that PEFT loads.
    """
    present = adapter_files(folder)
    if adapter is None:
        if present:
            raise SourceError(
                f"`{folder}` holds an adapter ({listed(present)}), which is part of the model",
                "`convert` merges it with `--adapter merge` (needs `pip install peft`); or merge "
                "and save it with PEFT: `merge_and_unload().save_pretrained(FOLDER)`",
            )
        return
    if not present:
        text = f"`{folder}` holds no adapter to merge: there is no `{CONFIG}`"
        raise SourceError(text, "leave out `--adapter`, or give the folder of the adapter")
    if present == [CONFIG] or CONFIG not in present:
        lacking = CONFIG if CONFIG not in present else _WEIGHTS[0]
        text = f"`{folder}` holds a part of an adapter ({listed(present)}): `{lacking}` is missing"
        raise SourceError(text, "copy the whole folder again")
    if find_spec("peft") is None:
        text = f"the adapter in `{folder}` is merged by PEFT, which is not installed"
        raise SourceError(text, "pip install peft")


def base_of(folder: Path) -> tuple[str, str | None]:
    """Name the model that an adapter alone in a folder belongs to, and its revision on the hub."""
    settings = _settings(folder)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(name, str) or not name.strip():
        text = f"`{folder / CONFIG}` names no model in `base_model_name_or_path`"
        raise SourceError(text, "write the folder or hub id of the model that it was trained from")
    on_hub = isinstance(revision, str) and local_folder(name) is None
    return name, revision if on_hub else None


def merge(base: Path, adapter: Path, kind: Any, target: Path, *, trust: bool = False) -> None:
    """Writes a model with an adapter merged into its weights; each tensor of it has to be used.

    The `base` has no adapter in its folder; `kind` is its class.
    """
    reasons = []
    for each in _classes(kind, adapter):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of tensors without a place, which are counted
                unused = _merge_as(each, base, adapter, target, trust)
        except Exception as error:  # PEFT and the classes of models may raise anything
            reasons.append(f"{type(error).__name__}: {first_line(error)}")
            continue
        if not unused:
            return
        reasons.append(f"a `{_name(each)}` has no place for {listed(unused)}")
    raise SourceError(
        f"the adapter in `{adapter}` cannot be merged into `{_name(kind)}`: {'; '.join(reasons)}",
        "merge and save it with PEFT, in the class that it was trained in, and convert that",
    )


def _merge_as(kind: Any, base: Path, adapter: Path, target: Path, trust: bool) -> list[str]:
    """Writes the merged model, and lists the tensors that were not used; then nothing is written.

    A head that came with the adapter alone has as many labels as it says.
    """
    peft = importlib.import_module("peft")
    stored = peft.load_peft_weights(str(adapter), device="cpu")
    heads = [tensor.shape[0] for key, tensor in stored.items() if _HEAD.search(key)]
    sizes = {"num_labels": heads[-1], "ignore_mismatched_sizes": True} if heads else {}
    model = kind.from_pretrained(base, dtype="auto", trust_remote_code=trust, **sizes)
    adapted = peft.PeftModel.from_pretrained(model, str(adapter))
    state = peft.get_peft_model_state_dict
    applied = {key for name in adapted.peft_config for key in state(adapted, adapter_name=name)}
    unused = [key for key in stored if key not in applied]
    if not unused:
        adapted.merge_and_unload(safe_merge=True).save_pretrained(target)
    return unused


def _classes(kind: Any, adapter: Path) -> Iterator[Any]:
    """Give the class of the base, unless the adapter's task needs another head, then that one."""
    import transformers

    name = _KINDS.get(str(_settings(adapter).get("task_type")), "")
    auto: Any = getattr(transformers, name, None)
    fitting: Any = getattr(auto, "_model_mapping", {}).get(kind.config_class, ())
    kinds = fitting if isinstance(fitting, tuple | list) else (fitting,)
    if kinds and kind not in kinds:
        yield auto
    yield kind


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        found = read_json(path)
        if not isinstance(found, dict):
            raise ValueError(f"holds a {type(found).__name__}, expected an object")
    except ValueError as error:
        raise SourceError(f"`{path}` cannot be read ({error})", "repair the file") from error
    return found
