"""Runs the recipes of the papers' tables on local data, and prints ours beside the papers' numbers.

    python benchmarks/papers.py DATA OUT [--only ag-news ag-news-dense] [--max-minutes 8] [--full]
        [--seeds 3] [--jobs 1]

DATA has a folder for each data set (`ag_news`, `imdb`, `newsgroups20`, `tweetqa`, `weather`,
`etth1`, `adrenalmnist3d_28`) with `train`, `validation`, `test` or `all` in parquet. Schedules are
cut for two cores, as the table below says; `--full` trains as the recipes say, for a GPU, and
`--max-minutes` ends every training. The papers' accuracies, areas and recalls are in percent. What
is done with the same settings is not done again: OUT/results.json keeps it, with the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch


class Row(NamedTuple):
    """A recipe, or a variant of it, and how much less is done without `--full`."""

    recipe: str
    data: str
    cut: tuple[str, ...] = ()
    variant: str | None = None  # or several with commas between


AG = ("finetune.epochs=2", "finetune.mixed_precision=bf16")
IMDB = ("finetune.epochs=3", "finetune.mixed_precision=bf16")
SMALL = (
    "pretrain.epochs=null",
    "pretrain.steps=1200",
    "pretrain.learning_rate=1e-3",
    "pretrain.evaluate_every=300",
    "finetune.epochs=null",
    "finetune.steps=600",
    "finetune.learning_rate=1e-3",
    "finetune.evaluate_every=150",
    "architecture.hidden_size=64",
    "architecture.num_hidden_layers=2",
    "architecture.num_attention_heads=1",
    "architecture.intermediate_size=256",
)
R8 = ("finetune.epochs=3",)
KINDS, HORIZONS = ("", "paper", "dense"), (96, 192, 336, 720)


def forecasts(series: str) -> dict[str, Row]:
    """Our HOT, HOT as published and dense attention on a series, for each horizon."""
    rows = {}
    for kind in KINDS:
        for horizon in HORIZONS:
            own = [kind] if kind else []
            name = "-".join([series, *own, *([] if horizon == 96 else [str(horizon)])])
            variants = own + ([] if horizon == 96 else [f"horizon-{horizon}"])
            rows[name] = Row(f"{series}-hot", series, variant=",".join(variants) or None)
    return rows


ROWS = {
    "ag-news": Row("ag-news-lprod", "ag_news", AG),
    "ag-news-dense": Row("ag-news-lprod", "ag_news", AG, "dense"),
    "ag-news-one-layer": Row("ag-news-lprod", "ag_news", AG, "one-layer"),
    "ag-news-768": Row("ag-news-lprod-768", "ag_news", variant="smoke"),
    "ag-news-768-dense": Row("ag-news-lprod-768", "ag_news", AG, "dense"),
    "imdb": Row("imdb-lprod", "imdb", IMDB),
    "imdb-linear": Row("imdb-lprod", "imdb", IMDB, "linear"),
    "imdb-dense": Row("imdb-lprod", "imdb", IMDB, "dense"),
    "imdb-one-layer": Row("imdb-lprod", "imdb", IMDB, "one-layer"),
    "ag-news-harmonic": Row("ag-news-lprod", "ag_news", AG, "harmonic"),
    **{
        f"imdb-{variant}": Row("imdb-lprod", "imdb", IMDB, variant)
        for variant in ("learned", "exponential", "harmonic", "two-slices")
    },
    "newsgroups": Row("newsgroups-tga", "newsgroups20"),
    "newsgroups-dot-product": Row("newsgroups-tga", "newsgroups20", variant="dot-product"),
    "newsgroups-additive": Row("newsgroups-tga", "newsgroups20", variant="additive"),
    "tweetqa": Row("tweetqa-tam", "tweetqa", SMALL),
    "tweetqa-without-fusing": Row("tweetqa-tam", "tweetqa", SMALL, "without-fusing"),
    "tweetqa-without-alignment": Row("tweetqa-tam", "tweetqa", SMALL, "without-alignment"),
    **{
        f"tweetqa-{variant}": Row("tweetqa-tam", "tweetqa", SMALL, variant)
        for kind in ("softmax", "multilinear")
        for variant in (kind, f"{kind}-without-question")
    },
    "r8": Row("r8-tsa", "reuters_r8", R8),
    "r8-dot-product": Row("r8-tsa", "reuters_r8", R8, "dot-product"),
    "r8-additive": Row("r8-tsa", "reuters_r8", R8, "additive"),
    "r8-dense": Row("r8-tsa", "reuters_r8", R8, "dense"),
    "adrenal": Row("adrenal-hot", "adrenalmnist3d_28"),
    "adrenal-dense": Row("adrenal-hot", "adrenalmnist3d_28", variant="dense"),
    "adrenal-paper": Row("adrenal-hot", "adrenalmnist3d_28", variant="paper"),
    **forecasts("weather"),
    **forecasts("etth1"),
    **{
        f"weather-paper-{axes}": Row("weather-hot", "weather", variant=f"paper,{axes}")
        for axes in ("along-variables", "along-time", "without-attention")
    },
}

SEEDS = (42, 123, 7)  # those of the L-product paper


def main() -> None:
    """Runs what is not there yet, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with a folder for each data set")
    parser.add_argument("out", type=Path, help="folder for the models and results.json")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help="rows to run")
    parser.add_argument("--full", action="store_true", help="the recipes' own schedules")
    parser.add_argument("--max-minutes", type=float, help="longest training of a row")
    parser.add_argument("--seeds", type=int, choices=(1, 2, 3), default=1, help="runs of a row")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    record = args.out / "results.json"
    results: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {}
    rows = [(name, seed) for name in args.only or ROWS for seed in SEEDS[: args.seeds]]

    def run_one(row: tuple[str, int]) -> None:
        key, chosen = "-".join(map(str, row)), settings(args, *row)
        if results.get(key, {}).get("settings") != chosen:
            result = {"settings": chosen, **run(row[0], chosen)}
            with lock:
                results[key] = result
                record.write_text(json.dumps(results, indent=1) + "\n")
        show(key, results[key])

    lock = Lock()
    with ThreadPoolExecutor(args.jobs) as pool:
        problems = [error for error in pool.map(attempt(run_one), rows) if error]
    for name in dict.fromkeys(name for name, _ in rows):
        show_means(name, [results[key] for seed in SEEDS if (key := f"{name}-{seed}") in results])
    if problems:
        sys.exit("\n".join(problems))


def attempt(run_one: Callable[[tuple[str, int]], None]) -> Callable[[tuple[str, int]], str]:
    """The same function with its error as a result, so that the next row is run."""

    def run_or_error(row: tuple[str, int]) -> str:
        try:
            run_one(row)
        except RuntimeError as error:
            return str(error)
        return ""

    return run_or_error


def settings(args: argparse.Namespace, name: str, seed: int) -> list[str]:
    """What is changed in the recipe of a row, its variant first."""
    row = ROWS[name]
    variant = row.variant if row.variant and not (args.full and row.variant == "smoke") else ""
    said = [
        variant,
        *local_files(args.data / row.data, variant),
        f"output={args.out / name}-{seed}",
    ]
    said += [f"convert.seed={seed}", f"finetune.seed={seed}"]
    said += [] if args.full else list(row.cut)
    return said + ([f"finetune.minutes={args.max_minutes}"] if args.max_minutes else [])


def run(name: str, said: list[str]) -> dict[str, Any]:
    """Runs one row by the command line, and keeps what its report says."""
    recipe = f"scratch/{ROWS[name].recipe}"
    command = [sys.executable, "-m", "tcompress", "run", recipe, "--json", "-q", "--force"]
    for variant in said[0].split(",") if said[0] else []:
        command += ["--variant", variant]
    for setting in said[1:]:
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: `{' '.join(command)}` ended with {done.returncode}")
    found = json.loads(done.stdout)
    report, training = found["reports"][0], found["reports"][0]["training"][-1]
    *trained_on, measured = found["evaluations"]
    metrics = measured["models"][0]["metrics"]
    for item in trained_on:  # expressive power, as two of the papers call it
        for metric in item["models"][0]["metrics"]:
            metrics.append({**metric, "name": f"{metric['name']} on training texts"})
    return {
        "metrics": metrics,
        "naive": measured["protocol"].get("naive", {}),
        "paper": [line for line in report["paper"] if line["ours"]],
        "parameters": report["parameters"],
        "training": {key: training[key] for key in ("steps", "samples", "seconds", "curve")},
        "hardware": hardware(),
    }


def local_files(folder: Path, variant: str = "") -> list[str]:
    """Settings of a variant that read the files of a folder in place of the hub's data sets."""
    parts = {path.stem.split("_")[0]: path for path in sorted(folder.glob("*.parquet"))}
    train = parts.get("train") or parts["all"]
    test = parts.get("test") or parts.get("validation") or parts["all"]
    said = [f"finetune.data.source=[{train}]", f"evaluate.0.data={test}"]
    if folder.name in ("reuters_r8", "newsgroups20"):  # on what was trained on, and on other texts
        said = [said[0], f"evaluate.0.data={train}", f"evaluate.1.data={test}"]
    if folder.name == "tweetqa":
        said.append(f"pretrain.data.source=[{train}]")
        two = variant.startswith(("softmax", "multilinear", "replacement"))
        texts = "text: question+passage" if two else "text: passage, semantics: question"
        texts = "text: passage" if variant.endswith("without-question") else texts
        for place in ("pretrain.data", "finetune.data", "evaluate.0"):
            said.append(f"{place}.columns={{{texts}, pair: answers}}")
    if folder.name.startswith("adrenal"):
        return [*said, f"finetune.data.validation={parts['validation']}"]
    return said if "all" in parts else [*said, f"architecture.tokenizer.words={train}"]


def hardware() -> str:
    """The machine, in words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def show(name: str, row: dict[str, Any]) -> None:
    """Prints ours, and the papers' rows beside it."""
    for metric in row["metrics"]:
        span = metric["interval"] or {"low": float("nan"), "high": float("nan")}
        print(f"{name}: {metric['name']} {metric['value']:.4f}", end=" ")
        print(f"[{span['low']:.3f}, {span['high']:.3f}]", end="")
        for line in row["paper"]:
            if line["metric"] == metric["name"]:
                print(
                    f"  paper: {line['row']} {line['value']} (not comparable: {line['why']})",
                    end="",
                )
        print(flush=True)
    for label, values in row.get("naive", {}).items():
        numbers = ", ".join(f"{metric} {value:.4f}" for metric, value in values.items())
        print(f"{name}: {label} (no model): {numbers}")


def show_means(name: str, runs: list[dict[str, Any]]) -> None:
    """Prints the mean and the deviation over seeds."""
    for metric in runs[0]["metrics"] if len(runs) > 1 else []:
        values = [one["value"] for run in runs for one in run["metrics"]
                  if one["name"] == metric["name"]]  # fmt: skip
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        print(f"{name}: {metric['name']} {mean:.4f} +- {deviation:.4f} ({len(values)} seeds)")


if __name__ == "__main__":
    main()
