"""`tcompress bench`."""

from __future__ import annotations

from tcompress.cli.first_look import first_look, reach
from tcompress.cli.terminal import print_json, results, shown_progress, tell
from tcompress.options.commands import Manner, Timed, Trust
from tcompress.options.steps import Bench as BenchOptions

EXAMPLES = (
    "tcompress bench bert-base-lprod-p4",
    "tcompress bench bert-base-lprod-p4 --against bert-base --batch 1,8",
    "tcompress bench bert-base-lprod-p4 --mode eager,compiled --threads 2",
    "tcompress bench bert-base-svd --runtime torch,onnx,onnx-int8",
    "tcompress bench bert-base-tt-25 --keep-weights",
    "tcompress bench gpt2-svd-50 --generate 64 --cache dynamic,static",
)


def bench(call: Timed, wanted: BenchOptions, trust: Trust, manner: Manner) -> None:
    """Does what `tcompress bench` says."""
    with first_look() as look:
        look.models(*call.models, call.against)
    reach(*call.models, call.against)
    from tcompress.exports.onnx_folder import RuntimeFiles
    from tcompress.latency.benchmark import bench as measure
    from tcompress.reporting.console import speed_table

    with shown_progress(quiet=manner.quiet) as progress, RuntimeFiles.opened() as files:
        done = measure(
            call.models,
            call.against,
            wanted,
            save=call.save,
            in_runtime=files,
            progress=progress,
            trust_remote_code=trust.allow_remote_code,
        )
    if manner.as_json:
        print_json({"benches": [item.model_dump(mode="json") for item in done]})
        return
    for item in done:
        tell(f"{item.model} against {item.baseline}", style="bold")
        results().print(speed_table(item.speed))
        for note in item.notes:
            tell(f"note: {note}")
        if item.saved:
            tell(f"Kept in `{item.model}/tcompress.json`.")
        elif call.save:
            tell(f"Not kept: `{item.model}` is no folder with a `tcompress.json` to write to.")
