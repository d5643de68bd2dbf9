"""Opening models to run them, dense and converted alike, and reading back what was written."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate.hooks import remove_hook_from_submodules
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

import tcompress.hf.quantizer  # noqa: F401 - registers the format
from tcompress.errors import (
    DiskError,
    InputError,
    SourceError,
    TCompressError,
    WriteError,
    first_line,
    listed,
)
from tcompress.linalg.fits import has_float64
from tcompress.models import KeyMap, SourceModel, WeightStore, read_parameter
from tcompress.models.model import draw_model
from tcompress.models.vocabulary import row_axes, select_rows
from tcompress.planning.entries import LayerPlan
from tcompress.structures.modules.experts import child_of
from tcompress.structures.modules.linear import StructuredLinear

KINDS = ("cpu", "cuda", "mps", "xpu")


def pick_device(name: str, *, fits: bool = False) -> torch.device:
    """Returns the device to compute on, if there is such a device here, and it can `fit`."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return found if found is not None and has_float64(found) else torch.device("cpu")
    if name.partition(":")[0] not in KINDS:
        known = ", ".join(f"`{known}`" for known in ("auto", *KINDS, "cuda:1"))
        raise InputError(f"unknown device `{name}`; known are {known}", "use `--device auto`")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        hint = "use `--device cpu`, or `auto`"
        raise InputError(f"device `{name}` cannot be used here", hint) from error
    if fits and not has_float64(device):
        reason = f"device `{name}` has no float64, in which layers are fitted"
        raise InputError(reason, "use `--device cpu`; what it makes runs on any device")
    return device


def multiplies_bfloat16() -> bool:
    """Tell whether products of this processor take less time in bfloat16, or else more."""
    return has_bfloat16_tiles() or bool(_capabilities().get("avx512_bf16"))


def has_bfloat16_tiles() -> bool:
    """Tell whether this processor multiplies tiles of bfloat16 (AMX)."""
    return bool(_capabilities().get("amx_bf16"))


def _capabilities() -> dict[str, Any]:
    has: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return has


def pick_dtype(name: str | None) -> torch.dtype | None:
    """Returns the dtype of that name; None stands for whatever a model is stored in."""
    return None if name is None else getattr(torch, name)


Head = Literal[
    "classification", "regression", "image-classification", "masked-lm", "causal-lm", "seq2seq",
    "forecasting", "pretraining",
]  # fmt: skip
_AUTO: dict[str, Any] = {
    "classification": transformers.AutoModelForSequenceClassification,
    "regression": transformers.AutoModelForSequenceClassification,
    "image-classification": transformers.AutoModelForImageClassification,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "causal-lm": transformers.AutoModelForCausalLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "forecasting": transformers.AutoModelForTimeSeriesPrediction,
    "pretraining": transformers.AutoModelForPreTraining,
}


def has_head(source: SourceModel, head: Head) -> bool:
    """Return whether a model comes with the head of a task."""
    kinds: Any = _AUTO[head]._model_mapping.get(type(source.config), ())
    kinds = kinds if isinstance(kinds, tuple | list) else (kinds,)
    return any(kind in (source.model_class, source.headed) for kind in kinds)


def load_model(
    source: SourceModel,
    head: Head | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> PreTrainedModel:
    """Loads a model in evaluation mode, by default with the dtype in which it is stored.

    A `head` that it has not gets random weights; without one the class stays. `options` go to
    `from_pretrained`. A source that may be converted was opened with `converted=True`.
    """
    kind: Any = source.model_class
    if head is not None and has_head(source, head):
        kind = source.headed or kind
    elif head is not None:
        kind = _AUTO[head]
        if type(source.config) not in kind._model_mapping:
            text = f"there is no `{head}` head for the model type `{source.config.model_type}`"
            raise SourceError(text, "choose another task, or a model of another family")
    if source.seed is not None:
        model = draw_model(kind, source.config, source.seed)
        return model.to(device=device, dtype=dtype or torch.float32)
    if source.whole is not None and source.vocabulary is not None:
        return _with_rows(load_model(source.whole, head, dtype=dtype, **options), source).to(device)
    options |= {"dtype": dtype or "auto", "trust_remote_code": source.trust_remote_code}
    try:
        model = kind.from_pretrained(source.folder, **options)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # the class of a model may raise anything
        raise SourceError(
            f"`{source.folder}` cannot be loaded ({type(error).__name__}: {first_line(error)})",
            hint="`tcompress report` on the folder says what is damaged, if it was converted",
        ) from error
    return model.to(device).eval()  # type: ignore[arg-type]


def _with_rows(whole: PreTrainedModel, source: SourceModel) -> PreTrainedModel:
    """Copy a model, with the tokens that a source leaves it."""
    assert source.vocabulary is not None
    kind: Any = type(whole)
    cut: PreTrainedModel = kind._from_config(deepcopy(source.config), dtype=whole.dtype)
    own = source.vocabulary
    axes = row_axes(whole, cut, own.before, own.rows)
    rows = [index for index in own.ids if index < own.before]
    state = {
        name: select_rows(tensor, axes[name], rows) if name in axes else tensor
        for name, tensor in whole.state_dict().items()
    }
    cut.load_state_dict(state)
    return cut.eval()


_HINT = (
    "this is a defect of tcompress, or of the versions it runs with: please report it with the "
    "command; nothing was published"
)


class Reopened:
    """A folder that was written, opened on the meta device by `from_pretrained`, as users do.

    A `WriteError` says that it does not load, or that tensors are missing, unexpected or of another
    shape; nothing needs to be stored for names that are `unset`.
    """

    def __init__(
        self, folder: Path, kind: type[PreTrainedModel], unset: Collection[str] = ()
    ) -> None:
        with unloadable(), _quiet():
            options: dict[str, Any] = {"device_map": "meta", "dtype": "auto"}
            self.model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
            self.store = WeightStore.open(folder)
            self.keymap = KeyMap(self.model, self.store.keys())
        remove_hook_from_submodules(self.model)  # they would send inputs to the meta device
        problems = [str(text) for text in info.get("error_msgs", ())]
        whats = {"missing": "missing", "unexpected": "unexpected", "mismatched": "of another shape"}
        for key, what in whats.items():
            names = info[f"{key}_keys"]
            found = {str(name[0] if isinstance(name, tuple) else name) for name in names}
            if found := found - set(unset):
                problems.append(f"{listed(found)} {'is' if len(found) == 1 else 'are'} {what}")
        if problems:
            raise refusal("; ".join(problems))

    def tensor(self, name: str) -> Tensor:
        return read_parameter(self.store, self.keymap, name)

    def layer(self, entry: LayerPlan) -> StructuredLinear:
        """Loads a rewritten layer with all that it uses, in float64."""
        path = self.keymap.runtime_name(entry.name) or ""
        path = f"{path}.{child_of(entry.parameter)}" if entry.kind == "experts" else path
        layer = dict(self.model.named_modules()).get(path)
        if not isinstance(layer, StructuredLinear):
            raise WriteError(f"layer `{entry.name}` is no rewritten layer once it is loaded", _HINT)
        named = self.model.named_parameters(remove_duplicate=False)
        names = {id(item): name for name, item in named if item.is_meta}
        for owner in layer.owners():
            for leaf, item in owner._parameters.items():
                if item is not None and item.is_meta:
                    exact = self.tensor(names[id(item)]).double()
                    owner._parameters[leaf] = nn.Parameter(exact, requires_grad=False)
        return layer


def applied(layer: StructuredLinear, rows: Tensor) -> Tensor:
    """Applies every weight of a layer, without bias.  # (rows, in) -> ([experts x] rows, out)."""
    with torch.no_grad():
        encoded = layer.encode(rows)
        if layer.experts is None:
            return layer.decode(layer.core(encoded))
        results = layer.core([item.expand(layer.experts, *item.shape) for item in encoded])
        return layer.decode([[item.flatten(0, 1) for item in row] for row in results])


def refusal(reason: str) -> WriteError:
    """Makes an error about a model as a whole."""
    return WriteError(f"what was written does not load: {reason}", _HINT)


@contextmanager
def unloadable() -> Iterator[None]:
    """Turns whatever a class raises on loading into an error of ours."""
    try:
        yield
    except (WriteError, DiskError, MemoryError):
        raise
    except OSError as error:
        if error.errno is not None:  # a disk's, not that of a library which misses a file
            raise
        raise refusal(first_line(error)) from error
    except TCompressError as error:
        raise refusal(error.message) from error
    except Exception as error:  # the class of a model may raise anything
        raise refusal(f"{type(error).__name__}: {first_line(error)}") from error


def differs(layer: str, reason: str) -> WriteError:
    """Makes an error about one layer."""
    return WriteError(f"`{layer}` is not what it was before it was written: {reason}", _HINT)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the bar and the report of loading away from who only converts."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
