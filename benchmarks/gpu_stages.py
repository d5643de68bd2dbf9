"""What `gpu.py` measures, stage by stage."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]


class Record(Protocol):
    """Rows of a stage, which are written at once."""

    small: bool

    @property
    def left(self) -> float:
        """Seconds until the stage should be done."""

    def add(self, **row: Any) -> None:
        """Takes a row."""

    def tried(self, **row: Any) -> AbstractContextManager[Row]:
        """Takes a row of whatever is done, with its time or its error."""


# The commands


def commands(record: Record, args: argparse.Namespace) -> None:
    """Everything that is done with a model, on tiny ones."""
    import torch

    import tcompress
    from tests.support.evaluation import encoder, headed, pairs_file
    from tests.support.model_folders import sentences, text_file

    torch.set_num_threads(1)  # for tiny models, waiting for others takes longer than the work
    place = args.out / "commands"
    place.mkdir(exist_ok=True)
    lines = text_file(place / "texts.txt", sentences(60))
    pairs = str(pairs_file(place / "pairs.jsonl", 24))
    bert = encoder(place / "bert")
    llama = headed("llama", place / "llama", "LlamaForCausalLM")
    calibration = {"source": [lines], "samples": 16, "max_length": 16}
    # Tiny models take as long at any size: budgets of time need one whose products count.
    width, at = (1024, "64x128") if torch.cuda.is_available() else (192, "16x32")
    wide = random_encoder(place / "wide", 2, width)
    for base, name, options in conversions(bert, llama, wide, at):
        out = place / f"{base.name} {name}".replace(" ", "-")
        said = {"calibration": calibration, **options}
        with record.tried(command="convert", model=base.name, how=name):
            tcompress.convert(base, output=out, force=True, **said)
    trained = {"steps": 6, "evaluate_every": 3, "data": {"source": [lines], "max_length": 16}}
    for name in ("bert-svd", "bert-lprod", "bert-tt", "bert-tsa", "llama-width"):
        with record.tried(command="finetune", model=name, how="healing"):
            healed = place / f"{name}-healed"
            tcompress.finetune(place / name, output=healed, force=True, **trained)
    with record.tried(command="finetune", model="bert-svd", how="task sts"):
        task = {"task": "sts", "steps": 4, "data": {"source": [pairs]}}
        tcompress.finetune(place / "bert-svd", output=place / "sts", force=True, **task)
    folders = [bert, *(place / f"bert-{name}" for name in ("svd", "lprod", "width", "svd-healed"))]
    with record.tried(command="evaluate", model="bert", how="sts"):
        tcompress.evaluate(folders, "sts", pairs, bootstrap=100)
    with record.tried(command="evaluate", model="llama", how="perplexity"):
        tcompress.evaluate([llama, place / "llama-svd"], "perplexity", lines, bootstrap=100)
    with record.tried(command="bench", model="bert", how="4 x 16"):
        tcompress.bench(folders[1:4], bert, batch=[4], length=[16], repeats=3)
    with record.tried(command="bench", model="llama", how="generate"):
        tcompress.bench([place / "llama-svd"], llama, batch=[2], length=[8], generate=4, repeats=2)
    for name in ("bert-svd", "bert-lprod", "bert-width", "llama-tucker"):
        with record.tried(command="export", model=name, how="dense"):
            tcompress.export_dense(place / name, place / f"{name}-dense", force=True)


def conversions(bert: Path, llama: Path, wide: Path, at: str) -> Iterator[tuple[Path, str, Row]]:
    """A name and the options of every conversion."""
    methods: dict[str, Any] = {name: {"name": name} for name in ("svd", "tt", "tucker", "width")}
    methods["lprod"] = {"name": "lprod", "p": 4}
    for base in (bert, llama):
        for name, method in methods.items():
            sized = {} if name == "lprod" else {"target": 0.5}
            yield base, name, {"method": method, **sized}
    yield bert, "auto", {"method": "auto", "target": 0.5}
    yield bert, "max-error", {"method": "svd", "max_error": 0.5}
    yield bert, "max-loss", {"method": "svd", "max_loss": 0.9, "calibration": "builtin"}
    yield bert, "parameters", {"method": "svd", "target_params": 18_000}
    yield bert, "fewer blocks", {"drop_layers": 1}
    yield wide, "fitted", {"method": {"name": "lprod", "p": 4, "transform": "fitted"}}
    yield wide, "speedup", {"method": "auto", "speedup": 1.2, "at": at}
    yield wide, "width, speedup", {"method": "width", "speedup": 1.2, "at": at}
    options = {"hot": {"fold": 4}, "multilinear": {"length": 16}}
    for name in ("tga", "tsa", "hot", "tam", "multilinear"):
        yield bert, name, {"attention": {"name": name, **options.get(name, {})}, "method": "none"}


# Healing


class Steps:
    """A progress that knows when steps of training ended, and acts after some of them."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.training = False
        self.after: dict[int, Callable[[], object]] = {}

    def stage(self, name: str, total: int, unit: str) -> None:
        """Counts the stage of training alone."""
        self.training = name == "training"

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Takes the time of a step."""
        if self.training and amount:
            self.ends.append(time.perf_counter())
            self.after.get(len(self.ends), lambda: None)()

    def shorten(self, total: int) -> None:
        """Has nothing to do."""

    def part(self, name: str, number: int, total: int) -> None:
        """Has nothing to do."""


def heal(record: Record, args: argparse.Namespace) -> None:
    """Steps of healing, first by themselves, then with a look at what they consist of."""
    import torch

    import tcompress

    batch, tokens, steps = (8, 32, 12) if record.small else (64, 64, 120)
    precision = "bf16" if torch.cuda.is_available() else "no"
    place = args.out / "heal"
    shape = (2, 96) if record.small else (6, 384)
    model = args.minilm or random_encoder(place / "dense", *shape)
    data = {"source": [random_texts(place / "texts.txt", 30 * batch, tokens)], "max_length": tokens}
    with record.tried(what="convert, svd 25 %"):
        fitted = {"source": data["source"], "samples": 2 * batch, "max_length": tokens}
        options = {"method": "svd", "target": 0.25, "calibration": fitted}
        tcompress.convert(model, output=place / "svd", force=True, **options)
    options = {"data": data, "batch_size": batch, "steps": steps, "evaluate_every": 10**6}
    options |= {"mixed_precision": precision, "checkpoint_every": 10**6}
    healing = partial(tcompress.finetune, place / "svd", output=place / "healed", force=True)
    first = steps // 3
    with record.tried(what=f"step of {batch} x {tokens} tokens, {precision}") as row:
        plain = Steps()
        healing(progress=plain, **options)
        row["ms"] = ms = round(1e3 * (plain.ends[-1] - plain.ends[first]) / (steps - 1 - first), 2)
    phases = Phases()
    with record.tried(what="the same with a clock in it") as row, phases.watched():
        watched = Steps()
        watched.after[first] = phases.clear
        healing(progress=watched, **options)
        row["ms"] = round(1e3 * (watched.ends[-1] - watched.ends[first]) / (steps - 1 - first), 2)
    for name, host, device in phases.means():
        record.add(what=f"- {name}", ms=host, device_ms=device)
    if torch.cuda.is_available():
        with record.tried(what="busy device; the rest of a step is gaps") as row:
            row["ms"], row["kernels"] = busy(partial(healing, **options), first)
            row["gaps_ms"] = round(ms - row["ms"], 2)


class Phases:
    """Times of what a step consists of: on the host, and on the device from begin to end."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[float, Any, Any]]] = {}

    def clear(self) -> None:
        """Forgets the first steps."""
        self.spans.clear()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Puts a clock into the functions that do the work."""
        from accelerate import Accelerator
        from accelerate.optimizer import AcceleratedOptimizer

        from tcompress.training import batches
        from tcompress.training.loop import Loop
        from tcompress.training.losses import Losses
        from tcompress.training.teacher_outputs import TeacherOutputs

        parts = {
            "reading data": (batches, "_collate"),
            "moving data": (Losses, "_moved"),
            "teacher": (TeacherOutputs, "of_batch"),
            "forward and loss": (Losses, "_loss"),
            "backward": (Accelerator, "backward"),
            "norm of gradients": (Accelerator, "clip_grad_norm_"),
            "optimizer": (AcceleratedOptimizer, "step"),
            "waiting for numbers": (Loop, "_read"),
            "whole step": (Loop, "_step"),
        }
        with ExitStack() as stack:
            for name, (home, function) in parts.items():
                inner = getattr(home, function)
                stack.enter_context(patch.object(home, function, self._timed(name, inner)))
            yield

    def _timed(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def timed(*args: Any, **options: Any) -> Any:
            on_gpu = torch.cuda.is_available()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 if on_gpu else 0)]
            start = time.perf_counter()
            if events:
                events[0].record()
            try:
                return inner(*args, **options)
            finally:
                if events:
                    events[1].record()
                spent = time.perf_counter() - start
                self.spans.setdefault(name, []).append((spent, *(events or (None, None))))

        return timed

    def means(self) -> Iterator[tuple[str, float, float | None]]:
        """Milliseconds of a step, of each part."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        steps = len(self.spans.get("whole step", [0]))
        for name, spans in self.spans.items():
            host = round(1e3 * sum(span[0] for span in spans) / steps, 3)
            device = None
            if spans[0][1] is not None:
                device = round(sum(one.elapsed_time(two) for _, one, two in spans) / steps, 3)
            yield name, host, device


def busy(healing: Callable[..., Any], first: int) -> tuple[float, int]:
    """Milliseconds that a device computes in a step, and its kernels."""
    from torch.profiler import ProfilerActivity, profile

    steps, count = Steps(), 5
    profiler = profile(activities=[ProfilerActivity.CUDA])
    steps.after = {first: profiler.start, first + count: profiler.stop}
    healing(progress=steps)
    kernels = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    total = sum(event.time_range.elapsed_us() for event in kernels)
    return round(total / 1e3 / count, 2), len(kernels) // count


def random_encoder(folder: Path, layers: int, width: int) -> Path:
    """Writes a random encoder: with 6 layers of width 384 of the shape of all-MiniLM-L6-v2."""
    import torch
    from transformers import BertConfig, BertModel

    from tests.support.model_folders import save_tokenizer

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=12 if width % 12 == 0 else 16,
        intermediate_size=4 * width,
    )
    BertModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def random_texts(path: Path, count: int, tokens: int) -> str:
    """Writes texts of random words that the tokenizer of the tests has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(0)
    names = [f"w{index}" for index in range(20, 100)]
    lines = (" ".join(drawn.choices(names, k=drawn.randint(tokens // 2, tokens)))
             for _ in range(count))  # fmt: skip
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


# Layers


KINDS = ("dense", "svd", "lprod dct", "lprod fitted", "tt", "tucker")


def layers(record: Record, args: argparse.Namespace) -> None:
    """Structured layers against `F.linear`, and both against what the device can do."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens, widths = (512, (256, 768)) if record.small else (8192, (768, 1024, 4096))
    torch.manual_seed(0)
    flops, memory = ceilings(device, dtype, small=record.small)
    said = {"tflops": short(flops / 1e12), "gb_per_s": short(memory / 1e9)}
    record.add(layer=f"product and copy, {dtype}", **said)
    for way in ("eager", "compiled"):
        little = record.small and way == "compiled"
        for width in widths[:1] if little else widths:
            x = torch.randn(tokens, width, device=device, dtype=dtype)
            dense_ms = 0.0
            for kind in KINDS[:2] if little else KINDS:
                if record.left < 0:
                    return
                shape = f"{width} x {width}, {tokens} tokens"
                with record.tried(layer=kind, shape=shape, way=way) as row, torch.no_grad():
                    layer = layer_of(kind, width).to(device, dtype)
                    work = work_of(layer, x)
                    run: Any = torch.compile(layer) if way == "compiled" else layer
                    ms = milliseconds(partial(run, x), device, 5 if record.small else 30)
                    dense_ms = ms if kind == "dense" else dense_ms
                    row |= {"ms": round(ms, 4), "times_dense": round(dense_ms / ms, 2)}
                    row |= rates(work, ms, flops, memory)


def layer_of(kind: str, width: int) -> Any:
    """A square layer with a quarter of the parameters, or the dense one, of random values."""
    from torch import nn

    from tcompress.structures import Site, structure
    from tcompress.structures.modules.linear import PartLayout, StructuredLinear

    if kind == "dense":
        return nn.Linear(width, width)
    name, _, transform = kind.partition(" ")
    options = {"p": 4, "transform": transform} if transform else {}
    form = structure({"svd": "lowrank"}.get(name, name))
    site = Site(width, width, "in", role="q", block="layers.0", head=width // 8)
    layout = form.layout(form.spec(**options), site, width**2 // 4)
    layer = StructuredLinear([PartLayout(name="w", terms=(layout,))], bias=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return layer.eval()


def work_of(layer: Any, x: Any) -> tuple[float, float]:
    """Operations of a pass, and the bytes of input, output and weights."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        out = layer(x)
    tensors = [x, out, *layer.parameters(), *layer.buffers()]
    return float(counter.get_total_flops()), float(sum(tensor.nbytes for tensor in tensors))


def rates(work: tuple[float, float], ms: float, flops: float, memory: float) -> Row:
    """What a pass reaches, and the share of its time that the roofline allows it."""
    operations, moved = work
    least = max(operations / flops, moved / memory)
    return {
        "tflops": short(operations / ms / 1e9),
        "gb_per_s": short(moved / ms / 1e6),
        "of_roofline": f"{least / (ms / 1e3):.0%}",
    }


def short(value: float) -> float:
    """Three digits of a number."""
    return float(f"{value:.3g}")


def ceilings(device: Any, dtype: Any, *, small: bool) -> tuple[float, float]:
    """Operations and bytes in a second: of a large product, and of a large copy."""
    import torch

    size, length = (1024, 2**24) if small else (8192, 2**29)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = milliseconds(lambda: a @ b, device, 10)
    one = torch.randn(length, device=device, dtype=dtype)
    two = torch.empty_like(one)
    copy = milliseconds(lambda: two.copy_(one), device, 10)
    return 2e3 * size**3 / product, 2e3 * one.nbytes / copy


def milliseconds(run: Callable[[], Any], device: Any, repeats: int) -> float:
    """Median time of a call."""
    import torch

    for _ in range(3):
        run()
    if device.type == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


# Language models, and the papers


def decode(record: Record, args: argparse.Namespace) -> None:
    """Prefill and decoding of a language model without training, dense and at a half."""
    from memory import SHAPE

    import tcompress
    from tests.support.model_folders import save_tokenizer

    little = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    little |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    shape = {**SHAPE, **(little if record.small else {})}
    place = args.out / "decode"
    config = place / "config"
    config.mkdir(parents=True, exist_ok=True)
    (config / "config.json").write_text(json.dumps(shape))
    save_tokenizer(config)
    rows: dict[str, Row] = {"dense": {"method": "none"}}
    rows |= {name: {"method": name, "target": 0.5} for name in ("svd", "width")}
    for name, options in rows.items():
        more = {"init": "random", "dtype": "bfloat16", "max_shard_size": "500MB"}
        with record.tried(model=name, phase="written"):
            tcompress.convert(config, output=place / name, force=True, **more, **options)
    size = {"batch": [1, 8], "length": [128], "generate": 8 if record.small else 32}
    for name in ("svd", "width"):
        with record.tried(model=name, phase="bench"):
            [found] = tcompress.bench(
                [place / name], place / "dense", repeats=3, save=False, **size
            )
            for cell in found.speed:
                record.add(
                    model=name,
                    phase=cell.how if cell.phase == "forward" else cell.phase,
                    batch=cell.batch,
                    ms=round(cell.milliseconds, 3),
                    tokens_per_s=round(cell.tokens_per_second, 1),
                    dense_ms=round(cell.baseline_milliseconds, 3),
                    times_dense=round(cell.ratio, 2),
                )


def large(record: Record, args: argparse.Namespace) -> None:
    """Conversions of a random Llama of 1.1 billion parameters, and where their time goes."""
    import torch
    from large import METHODS, converted, recipe_of
    from memory import SHAPE, make_checkpoint

    shape, samples, length = SHAPE, 64, 512
    if record.small:
        sizes = {"hidden_size": 128, "intermediate_size": 344, "vocab_size": 1000}
        counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape, samples, length = {**SHAPE, **sizes, **counts}, 8, 64
    folder = args.out / "large" / "model"
    if not folder.exists():
        make_checkpoint(folder, torch.bfloat16, shape)
    for count in (0, samples):
        for method in METHODS:
            if record.left < 1:
                record.add(method=method, samples=count, result="no time left")
                continue
            recipe = {**recipe_of(method, count, length), "device": "auto"}
            with record.tried(method=method, samples=count) as row:
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()
                output = folder.parent / method
                stages = converted(str(folder), recipe, str(output), count, length)
                row |= {name: round(sum(parts.values()), 2) for name, parts in stages.items()}
                if torch.cuda.is_available():
                    row["GPU memory, GB"] = short(torch.cuda.max_memory_allocated() / 1e9)


def papers(record: Record, args: argparse.Namespace) -> None:
    """A paper's headline, as far as the time goes: AG News at width 768, and its dense model."""
    from papers import local_files

    folder = args.data / "ag_news" if args.data else None
    if folder is None or not folder.is_dir():
        record.add(model="none", result="give `--data FOLDER` with `ag_news` in it")
        return
    files = local_files(beginning(folder, args.out / "papers") if record.small else folder)
    said = [f"finetune.minutes={max(10, (record.left - 60) / 2) / 60:.3f}"]
    if record.small:
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 256}
        said = [f"architecture.{name}={size}" for name, size in sizes.items()]
        said += ["finetune.epochs=null", "finetune.steps=5"]
    for name, variant in (("L-product", None), ("dense", "dense")):
        said_of_it = [*files, f"output={args.out / 'papers' / name}", *said]
        with record.tried(model=name) as row:
            row |= trained("scratch/ag-news-lprod-768", variant, said_of_it)


def beginning(folder: Path, out: Path) -> Path:
    """Writes the first rows of the tables of a folder into another."""
    from pyarrow import parquet

    place = out / folder.name
    place.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.parquet"):
        parquet.write_table(parquet.read_table(path).slice(0, 100), place / path.name)
    return place


def trained(recipe: str, variant: str | None, said: list[str]) -> Row:
    """Runs a recipe by the command line."""
    command = [sys.executable, "-m", "tcompress", "run", recipe, "--json", "-q", "--force"]
    command += ["--variant", variant] if variant else []
    command += [part for setting in said for part in ("--set", setting)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"ended with {done.returncode}")
    report = json.loads(done.stdout)
    training = report["reports"][0]["training"][0]
    [accuracy] = [
        metric["value"]
        for metric in report["evaluations"][0]["models"][0]["metrics"]
        if metric["name"] == "accuracy"
    ]
    paper = next(line for line in report["reports"][0]["paper"] if line["ours"])
    return {
        "steps": training["steps"],
        "steps_per_s": round(training["steps"] / training["seconds"], 2),
        "accuracy": round(accuracy, 4),
        "paper": paper["value"],
    }


STAGES: dict[str, Callable[[Record, argparse.Namespace], None]] = {
    stage.__name__: stage for stage in (commands, heal, layers, decode, large, papers)
}
