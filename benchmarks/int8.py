"""Dynamic int8 of a sentence encoder through ONNX Runtime: quality, bytes and speed beside dense.

    pip install onnx onnxruntime onnxscript
    python benchmarks/int8.py MODEL --data stsb/validation.parquet

The plain baseline of the first table: no structure, no training, no calibration data. The dense
model is exported to ONNX, and ONNX Runtime rewrites the weights of its matrix products and its
embeddings to eight bits. Quality is what `tcompress evaluate --task sts` would say. Times are
medians of passes that take turns; those of one thread are by the clock of the processor, so that
other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging

import tcompress  # noqa: F401 - makes converted models loadable
from tcompress.data.examples import load_examples
from tcompress.evaluation.measuring import TASKS
from tcompress.models import SourceModel
from tcompress.options import Evaluate

BATCH, LENGTH = 32, 32


class Hidden(nn.Module):
    """The part of an encoder that is exported: ids and mask to hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Hidden states.  # (batch, length, d)."""
        found: Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        return found


class Session(nn.Module):
    """A file for ONNX Runtime, called like the dense model; it lends its config and dtype."""

    def __init__(self, path: Path, dense: Any) -> None:
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.run = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        ).run
        self.config, self.dtype, self.device = dense.config, dense.dtype, dense.device

    @property
    def base_model(self) -> Session:
        """The part that turns texts into vectors."""
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        """Hidden states, as the dense model returns them."""
        inputs = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
        (hidden,) = self.run(None, inputs)
        return SimpleNamespace(last_hidden_state=torch.from_numpy(hidden))


def exported(dense: nn.Module, folder: Path) -> tuple[Path, Path]:
    """Writes the dense model as ONNX, then with int8 weights."""
    ids = torch.randint(1000, 2000, (2, 16))
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    full, small = folder / "dense.onnx", folder / "int8.onnx"
    torch.onnx.export(
        Hidden(dense),
        (ids, torch.ones_like(ids)),
        str(full),
        input_names=["input_ids", "attention_mask"],
        output_names=["last_hidden_state"],
        dynamic_shapes={"input_ids": axes, "attention_mask": axes},
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    quantize_dynamic(str(full), str(small), weight_type=QuantType.QInt8)
    return full, small


def medians(
    calls: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds of each call, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for round_ in range(repeats + 2):
            for name, call in calls.items():
                start = clock()
                call()
                if round_ > 1:  # the first passes fill caches
                    times[name].append((clock() - start) * 1000)
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}


def main() -> None:
    """Exports, quantises, measures and prints one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="BERT-like sentence encoder: folder or hub id")
    parser.add_argument("--data", required=True, help="pairs with scores to measure on")
    parser.add_argument("--beside", nargs="*", default=[], help="converted models to time as well")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    source = SourceModel.open(args.model)
    dense = AutoModel.from_pretrained(args.model, dtype=torch.float32).eval()
    examples = load_examples(args.data, "validation", TASKS["sts"].needs)
    ids = torch.randint(1000, 2000, (BATCH, LENGTH))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with tempfile.TemporaryDirectory() as name:
        full, small = exported(dense, Path(name))
        models: dict[str, Any] = {
            "dense, PyTorch": dense,
            "dense, ONNX Runtime": Session(full, dense),
            "int8, ONNX Runtime": Session(small, dense),
        }
        size = {"dense, ONNX Runtime": full, "int8, ONNX Runtime": small}
        task = TASKS["sts"](source, examples, 128, Evaluate(task="sts", data=args.data))
        scores = {
            label: task.measure(model, task.batch_size, lambda done: None).statistics[0].value()
            for label, model in models.items()
        }
        models |= {path: AutoModel.from_pretrained(path).eval() for path in args.beside}
        calls = {label: (lambda m=model: m(**inputs)) for label, model in models.items()}
        clock = time.process_time if args.threads == 1 else time.perf_counter
        times = medians(calls, args.repeats, clock)
        bytes_ = {label: os.path.getsize(path) for label, path in size.items()}
    facts = {
        "versions": {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__},
        "machine": platform.machine(),
        "threads": args.threads,
        "spearman": scores,
        "bytes": bytes_,
        "milliseconds": times,
        "times_faster_than_dense": {
            label: times["dense, PyTorch"] / value for label, value in times.items()
        },
    }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
