"""One visit to a GPU, in ten minutes: whether all commands run on it, and how fast they are.

    python benchmarks/gpu.py OUT [--stages commands heal layers decode large papers] [--small]
        [--limit SECONDS] [--minilm FOLDER] [--data FOLDER]

Needs no network. Every stage is a process with a limit of time; what it has measured is written at
once, so that a stage that hangs or crashes takes nothing along. OUT/results.json and OUT/results.md
name the hardware. `--small` runs all of it in little, on a CPU in three minutes.

- `commands`: convert by every method, attention and budget, finetune, evaluate, bench and export
  of tiny random models (those of the tests).
- `heal`: milliseconds of a step of all-MiniLM-L6-v2 (its folder by `--minilm`, or a random model of
  its shape) at svd 25 %, 64 texts of 64 tokens in bfloat16, and where they go.
- `layers`: bfloat16, eager and compiled, against `F.linear`, with the roofline that a large product
  and a large copy show.
- `decode`: a random Llama of 1.1 billion parameters, dense, svd and width at 50 %.
- `large`: conversions of such a model, without data and with 64 samples of 512 tokens, with the
  seconds of their stages.
- `papers`: the recipe of AG News at width 768 and its dense model, for as long as there is;
  `--data` has `ag_news` with `train` and `test` in parquet.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the models of the tests

from gpu_stages import STAGES  # noqa: E402

LIMITS = {
    "commands": 120, "heal": 75, "layers": 90, "decode": 90, "large": 90, "papers": 95,
}  # fmt: skip
SMALL_LIMITS = {
    "commands": 65, "heal": 30, "layers": 15, "decode": 20, "large": 25, "papers": 25,
}  # fmt: skip

Row = dict[str, Any]


class Record:
    """Rows of a stage, in a file from the moment that they are measured."""

    def __init__(self, args: argparse.Namespace, stage: str) -> None:
        self.path = args.out / f"{stage}.json"
        self.small, self.until = args.small, time.monotonic() + 0.9 * limit_of(args, stage)
        self.rows: list[Row] = []

    def add(self, **row: Any) -> None:
        """Takes a row."""
        self.rows.append(row)
        other = self.path.with_suffix(".tmp")
        other.write_text(json.dumps(self.rows, indent=1) + "\n", encoding="utf-8")
        other.replace(self.path)

    @property
    def left(self) -> float:
        """Seconds until the stage should be done."""
        return self.until - time.monotonic()

    @contextmanager
    def tried(self, **row: Any) -> Iterator[Row]:
        """Takes a row of whatever is done, with its time or its error."""
        start, more = time.perf_counter(), dict[str, Any]()
        try:
            yield more
            result = "ok"
        except Exception as error:  # the next row may still work
            result = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            traceback.print_exc()  # the stage's log has the whole of it
        self.add(**row, **more, result=result, seconds=round(time.perf_counter() - start, 2))


def main() -> None:
    """Runs the stages one after another, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for results and models")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES])
    parser.add_argument("--small", action="store_true", help="little of everything, on a CPU too")
    parser.add_argument("--limit", type=float, help="seconds of a stage; default 560 in all")
    parser.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, help="folder with `ag_news`")
    parser.add_argument("--only", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        STAGES[args.only](Record(args, args.only), args)
        return
    results: dict[str, Any] = {"hardware": hardware(), "stages": {}}
    for stage in args.stages:
        results["stages"][stage] = run(args, stage)
        (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.out / "results.md").write_text(document(results), encoding="utf-8")
        print(table(stage, results["stages"][stage]), flush=True)
    print(words(results["hardware"]))


def run(args: argparse.Namespace, stage: str) -> dict[str, Any]:
    """Runs a stage in a process of its own, which is ended with all that it began at its limit."""
    path, limit = args.out / f"{stage}.json", limit_of(args, stage)
    path.unlink(missing_ok=True)
    command, start = [sys.executable, *sys.argv, "--only", stage], time.perf_counter()
    with (args.out / f"{stage}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
            end = "done" if code == 0 else f"ended with {code}: {last_line(args.out, stage)}"
        except subprocess.TimeoutExpired:
            end = f"stopped after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return {"end": end, "seconds": round(time.perf_counter() - start, 1), "rows": rows}


def limit_of(args: argparse.Namespace, stage: str) -> float:
    """Seconds that a stage may take."""
    return float(args.limit or (SMALL_LIMITS if args.small else LIMITS)[stage])


def last_line(out: Path, stage: str) -> str:
    """What a process said last."""
    lines = (out / f"{stage}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "no word"


def hardware() -> dict[str, Any]:
    """The machine and what runs on it."""
    import torch
    import transformers

    found: dict[str, Any] = {
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            found["driver"] = subprocess.check_output(query, text=True, timeout=20).split()[0]
        found |= {
            "gpu": f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB",
            "capability": f"{facts.major}.{facts.minor}",
            "cuda": torch.version.cuda,
        }
    return found


def words(facts: dict[str, Any]) -> str:
    """The machine in a line."""
    return "; ".join(f"{name} {value}" for name, value in facts.items())


def document(results: dict[str, Any]) -> str:
    """All tables, in Markdown."""
    tables = [table(stage, found) for stage, found in results["stages"].items()]
    return "\n".join([words(results["hardware"]), "", *tables])


def table(stage: str, found: dict[str, Any]) -> str:
    """Rows of a stage, in Markdown."""
    columns = list(dict.fromkeys(name for row in found["rows"] for name in row))
    lines = [f"### {stage}: {found['end']}, {found['seconds']} s", ""]
    if columns:
        lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in found["rows"]:
        cells = ("" if row.get(name) is None else str(row[name]) for name in columns)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
